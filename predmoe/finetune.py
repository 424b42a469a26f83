"""Fine-tuning a transformers OLMoE checkpoint: adapters through peft, the last half of its blocks, or all of its weights.

A fine-tune is a run like any other (`config.RunConfig.finetune`): the same loop, text, objectives and heads, on the transformers model whose
routing `hf` captures. What it writes at its end is an OLMoE checkpoint with the adapters merged, so that every measurement of a run holds for it.
"""
# L layers, N tokens, K chosen

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from predmoe.checkpoint import dense_entries, model_config
from predmoe.config import TOKENIZERS, ConfigError, FinetuneConfig, ModelConfig, RunConfig, to_dict
from predmoe.data import Tokens, prepare
from predmoe.hf import Backbone, find_gates
from predmoe.hf_models import load, seems_foreign, tokenizer_of
from predmoe.model import MoEModel
from predmoe.objectives import stack
from predmoe.predictor import membership
from predmoe.train import Trainer, TrainingError, new_predictor, optimizer_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")                    # modules that get adapters
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")         # and parameters: all experts of a layer in one tensor
MERGED_APART = 0.01   # nats: how far the merged model's loss may lie from that of model and adapters on the same text


def prepare_text(config: RunConfig) -> Tokens:
    """The text of a run; of a fine-tune with the tokenizer that `data.tokenizer` names, one of ours, a folder or a hub id."""
    if config.finetune is None or config.data.tokenizer in TOKENIZERS:
        return prepare(config.data)
    return prepare(config.data, tokenizer=tokenizer_of(config.finetune.checkpoint, config.data.tokenizer))


# --- the model that it starts from -------------------------------------------------------------------------------------

def load_stock(config: RunConfig, store: Path) -> nn.Module:
    """The transformers model, float32, that a fine-tune of this store starts from.

    Raises ConfigError where it cannot be loaded, is dense or no OLMoE model, or has another shape than the run.
    """
    start = config.finetune
    name = start.checkpoint or str(Path(store) / start.stock.hash / "checkpoint")
    model = load(name, dtype="float32", device=config.train.device).model
    model.set_experts_implementation("grouped_mm")   # the others loop over experts, or hold every token's weights at once
    check_shape(model_config(model.config.to_dict(), name), config.model, name)
    return model


def check_shape(found: ModelConfig, wanted: ModelConfig, name: str) -> None:
    """Raise ConfigError unless a run of the shape `wanted` can start from the model `found`; a shorter context may."""
    if wanted.context > found.context:
        raise ConfigError(f"context={wanted.context} is longer than that of {name}, {found.context}")
    a, b = to_dict(found), to_dict(wanted)
    if differing := [f"{n}={a[n]!r} (the run has {b[n]!r})" for n in a if a[n] != b[n] and n not in ("context", "init_std")]:
        raise ConfigError(f"{name} has another shape than the run: {', '.join(differing)}; set the run's model section to it")


def digest(model: nn.Module) -> str:
    """12 hex digits that name the weights of a model."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:12]


def as_ours(model: nn.Module, config: ModelConfig) -> MoEModel:
    """A transformers OLMoE model (without adapters) as our own, on its device; the experts' weights are shared with it, not copied."""
    theirs = model.state_dict()
    state = {ours: torch.cat([theirs[name] for name in entries]) for ours, entries in dense_entries(config).items()}
    for i in range(config.num_layers):
        for ours, name in zip(("gate_up", "down"), EXPERTS):
            state[f"layers.{i}.experts.{ours}"] = theirs[f"model.layers.{i}.{name}"]
    own = MoEModel(config)
    own.load_state_dict(state, assign=True)
    return own.to(next(iter(state.values())).device)   # buffers


# --- what is trained ---------------------------------------------------------------------------------------------------

def adapt(model: nn.Module, config: FinetuneConfig, seed: int) -> nn.Module:
    """The model with what `config.trained` names set to be trained and everything else frozen; with adapters wrapped by peft.

    Raises ConfigError where no parameter of some layer's experts would be trained that should be.
    """
    model.requires_grad_(False)
    if config.trained == "lora":
        from peft import LoraConfig, get_peft_model

        how = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=list(ATTENTION), target_parameters=list(EXPERTS))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = get_peft_model(model, how)
        for gate in find_gates(model):
            gate.module.requires_grad_(True)
    gates = find_gates(model)
    wanted = {"lora": gates, "full": gates, "half": gates[len(gates) // 2 :], "none": []}[config.trained]
    if config.trained == "full":
        model.requires_grad_(True)
    elif config.trained == "half":
        for gate in wanted:
            model.get_submodule(gate.name.rsplit(".", 2)[0]).requires_grad_(True)   # the block: attention, norms and experts
    for gate in wanted:
        if not any(p.requires_grad for p in gate.experts.parameters()):
            raise ConfigError(f"no parameter of the experts of layer {gate.layer} is trained ({type(gate.experts).__name__}): adapters are put on "
                              f"{', '.join(EXPERTS) or 'nothing'}, which this model does not have; their routing could not be changed from within")  # fmt: skip
    return model


def merged(model: nn.Module) -> nn.Module:
    """The transformers model with its adapters, if any, added to its weights (in place)."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


class Tuned(Backbone):
    """A model that is being fine-tuned: its records keep the graph, and its state is what is trained of it."""

    def __init__(self, model: nn.Module, *, float_gates: bool = False):
        super().__init__(model, detach=False)
        for gate in self.gates if float_gates else ():
            gate.module.forward = _float32(gate.module.forward)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for _, p in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named_parameters()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        own = dict(self.named_parameters())
        if other := own.keys() ^ state.keys():
            raise KeyError(f"{sorted(other)[0]} is in one of checkpoint and model alone")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(state[name])


def _float32(forward):
    """A gate's forward pass outside of autocast: bf16 logits would break ties at random."""

    def run(hidden, *args, **kwargs):
        with torch.autocast(hidden.device.type, enabled=False):
            return forward(hidden.float(), *args, **kwargs)

    return run


# --- how far it moves --------------------------------------------------------------------------------------------------

@torch.no_grad()
def drift(tuned: MoEModel, stock: MoEModel, windows: np.ndarray, *, autocast: torch.dtype | None = None, batch_size: int = 32) -> dict:
    """How far a fine-tune has moved from its stock model: `kept`, the share of a token's k experts that both choose, on token windows (n, T+1), its
    mean and per layer; and the change of the weights relative to their norm, of routers, experts and attention."""
    kept_L, total, E = torch.zeros(len(stock.layers), dtype=torch.float64), 0, stock.config.num_experts
    for s in range(0, len(windows), batch_size):
        tokens_BT = torch.as_tensor(windows[s : s + batch_size, :-1]).to(tuned.device)
        with torch.autocast(tuned.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            theirs, mine = (stack(model.body(tokens_BT)[1], "experts_NK") for model in (stock, tuned))
        kept_L += membership(theirs, E).gather(-1, mine).double().mean(-1).sum(-1).cpu()
        total += tokens_BT.numel()
    after, before = dict(tuned.named_parameters()), dict(stock.named_parameters())
    moved = {}
    for part in ("router", "experts", "attention"):
        names = [name for name in before if f".{part}." in name]   # one tensor at a time in float64
        change, size = (sum(float(of(name).double().square().sum()) for name in names) for of in (lambda name: after[name] - before[name], before.get))
        moved[part] = math.sqrt(change / size)
    return {"kept": float(kept_L.mean() / total), "kept_per_layer": (kept_L / total).tolist(), "weights": moved}


# --- training ----------------------------------------------------------------------------------------------------------

class FinetuneTrainer(Trainer):
    """A `Trainer` that starts from the stock model of the run's configuration, in the store that the run's folder lies in."""

    def text(self) -> Tokens:
        return prepare_text(self.config)

    def parts(self):
        config = self.config
        model = load_stock(config, self.folder.parent)
        self.stock_weights = digest(model)
        model = Tuned(adapt(model, config.finetune, config.train.seed), float_gates=config.train.dtype != "float32")
        predictor = None
        if config.objective.lambda_pred:
            predictor = new_predictor(config.predictor, config.model).initialise(config.train.seed).to(config.train.device)
        return model, predictor, optimizer_of(model, predictor, config.train) if self.trains_anything(predictor) else _Nothing()

    def trains_anything(self, predictor) -> bool:
        return self.config.finetune.trained != "none" or predictor is not None

    def origin(self) -> dict[str, str]:
        return super().origin() | {"stock_weights": self.stock_weights}

    def training_step(self) -> dict:
        if not self.trains_anything(self.predictor):   # the model as it is: what a step would tell
            with torch.no_grad():
                return {name: value.item() for name, value in self.losses(self.windows(0))[0].items()}
        return super().training_step()

    def losses(self, windows: Tensor, *, last: bool = True):
        parts, experts_LNK = super().losses(windows, last=last)
        if self.step == 0 and self.config.finetune.checkpoint and seems_foreign(cost := parts["lm"].item(), self.config.model.vocab_size):
            raise ConfigError(f"{self.config.finetune.checkpoint} gives the text {cost:.2f} nats per token, no better than chance: the tokenizer "
                              f"{self.config.data.tokenizer!r} is another model's")  # fmt: skip
        return parts, experts_LNK

    def whole(self):
        """The model with its adapters merged, as our own; how far it has moved is logged."""
        evalset = self.tokens.dev(self.config.model.context)
        some = torch.from_numpy(evalset.tokens[: self.config.train.batch_size]).to(self.config.train.device)
        experts = {id(p) for gate in self.model.gates for p in gate.experts.parameters()}
        trained = {"parameters": sum(p.numel() for p in self.model.parameters()), "experts": sum(p.numel() for p in self.model.parameters() if id(p) in experts)}
        with torch.no_grad():
            adapted = self._loss(self.model, some)
            model = as_ours(merged(self.model.model), self.config.model)
            apart = abs(self._loss(model, some) - adapted)
        if not apart <= MERGED_APART:
            raise TrainingError(f"the merged weights give another model than weights and adapters: the loss of the same text differs by {apart:.4f} nats")
        stock = as_ours(load_stock(self.config, self.folder.parent), self.config.model)
        self.log(drift=drift(model, stock, evalset.tokens, autocast=self.autocast), trained=trained, merged_apart=apart)
        return model, self.predictor

    def _loss(self, model, windows: Tensor) -> float:
        with torch.autocast(windows.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            return model(windows[:, :-1], windows[:, 1:]).loss.item()


class _Nothing:
    """The optimiser of a run that trains nothing."""

    param_groups: tuple = ()

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass
