"""Post-hoc predictors: fresh heads on a frozen backbone, trained on cached activations to convergence; and `measure`,
the whole measurement of one finished run that a result file holds. `fit_and_evaluate` serves any model that has a `body`, a
transformers one (`hf.Backbone`) as well."""
# N tokens, D model width, E experts, K chosen, L layers, S source layers of a horizon, V vocabulary

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from predmoe import objectives
from predmoe.config import PREDICTORS, PosthocConfig, PredictorConfig, RunConfig, to_dict
from predmoe.data import EvalSet, Tokens
from predmoe.evaluation import Heads, Lookup, NextRouter, Scorer, evaluate
from predmoe.model import MoEModel, Routing, count_parameters
from predmoe.objectives import prediction, stack
from predmoe.predictor import Predictor, hit_at_k, restore
from predmoe.train import new_predictor

ACTIVATION_ORDER = 1_000_003  # order seed of the text that activations are cached from: the same for every backbone


@dataclass
class Activations:
    """MoE inputs and realized routing of a frozen backbone on N tokens; float16 keeps 11 bits, enough for heads."""

    hidden_NLD: Tensor  # or `activations.DiskRows`, which is read by rows alike
    experts_NLK: Tensor  # uint8 or int16
    tokens_N: Tensor
    rows_at_once: int = 8192  # the most that are read in one piece to be scored

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """hidden (L, n, D) float32 and experts (L, n, K) int64 of some rows."""
        hidden = self.hidden_NLD[rows].transpose(0, 1).float()
        return hidden.contiguous(), self.experts_NLK[rows].transpose(0, 1).long()


@torch.no_grad()
def capture(model: MoEModel, windows, *, batch_size: int = 32, autocast: torch.dtype | None = None,
            inputs: Callable[[list[Routing]], Tensor] = lambda routing: stack(routing, "hidden_ND"),
            room: Callable[..., Tensor] = torch.empty, rows_at_once: int = 8192) -> Activations:  # fmt: skip
    """Activations of `model` on token windows (n, T+1); the last token of each window is only a target and left out.

    `inputs`: what is kept of each batch as (L, N, D), by default the MoE inputs. `room`: makes what holds them, from three sizes and a dtype.
    """
    config = model.config
    n, T = windows.shape[0], windows.shape[1] - 1
    ids = torch.uint8 if config.num_experts <= 256 else torch.int16
    hidden = room(n * T, config.num_layers, config.hidden_size, dtype=torch.float16)
    experts = torch.empty(n * T, config.num_layers, config.top_k, dtype=ids)
    for s in range(0, n, batch_size):
        tokens = torch.as_tensor(windows[s : s + batch_size, :-1]).to(model.device)
        with torch.autocast(model.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            _, routing = model.body(tokens)
        rows = slice(s * T, s * T + tokens.numel())
        hidden[rows] = inputs(routing).transpose(0, 1).to("cpu", torch.float16)
        experts[rows] = stack(routing, "experts_NK").transpose(0, 1).to("cpu", ids)
    return Activations(hidden, experts, torch.as_tensor(windows[:, :-1]).reshape(-1).long(), rows_at_once)


def training_activations(model: MoEModel, run: RunConfig, tokens: Tokens, config: PosthocConfig) -> Activations:
    """Activations on the training text that predictors are fitted on and lookups counted from."""
    autocast = torch.bfloat16 if run.train.dtype == "bfloat16" else None
    return capture(model, training_windows(run, tokens, config), autocast=autocast)


def training_windows(run: RunConfig, tokens: Tokens, config: PosthocConfig) -> np.ndarray:
    """The token windows (n, T+1) of the training text that predictors are fitted on: the same for every backbone."""
    T = run.model.context
    return tokens.stream(ACTIVATION_ORDER, run.data.shuffle_buffer).batch(0, max(1, config.tokens // T), T)


def heads_file(folder: Path, name: str, kind: str) -> Path:
    """Where the fitted heads of measurement `name` lie in a run's folder: beside the checkpoint, never in git."""
    return folder / "checkpoint" / f"{name}_{kind}.safetensors"


def load_heads(folder: Path, name: str, run: RunConfig) -> dict[str, Predictor]:
    """The post-hoc predictors of measurement `name`, by kind, as they were fitted."""
    fitted = {}
    for kind in PREDICTORS:
        heads = new_predictor(PredictorConfig(kind=kind, horizons=run.predictor.horizons), run.model)
        fitted[kind] = restore(heads, heads_file(folder, name, kind))
    return fitted


def token_counts(activations: Activations, vocab_size: int, num_experts: int) -> Tensor:
    """How often each token id chose each expert, per layer: (L, V, E) float32."""
    experts = activations.experts_NLK
    L = experts.shape[1]
    counts = torch.zeros(L, vocab_size * num_experts)
    for layer in range(L):
        keys = (activations.tokens_N.unsqueeze(1) * num_experts + experts[:, layer].long()).reshape(-1)
        counts[layer] = torch.bincount(keys, minlength=vocab_size * num_experts).float()
    return counts.view(L, vocab_size, num_experts)


def head_loss_of(predictor: Predictor, hidden: Tensor, experts: Tensor, ranking_loss: Callable[[Tensor, Tensor], Tensor] = objectives.margin) -> Tensor:
    """The head's own loss (linear: hard top-k cross-entropy; ranking: `ranking_loss`), mean over all (layer, horizon) pairs."""
    total, pairs = hidden.new_zeros(()), 0
    for h in predictor.config.depths:
        guess = predictor(hidden, h)
        term = ranking_loss(guess, experts[h:]) if predictor.config.kind == "ranking" else prediction(guess, guess, experts[h:], target="topk", gradient="input")
        total, pairs = total + term * guess.shape[0], pairs + guess.shape[0]
    return total / pairs


@torch.no_grad()
def dev_hit(predictor: Predictor, dev: Activations, batch_tokens: int = 8192) -> float:
    """Mean hit@k over horizons on the dev set: the curve that decides convergence."""
    total, count = 0.0, 0
    for rows in torch.arange(len(dev.tokens_N)).split(min(batch_tokens, dev.rows_at_once)):
        hidden, experts = dev.batch(rows)
        for h in predictor.config.depths:
            total += hit_at_k(predictor(hidden, h), experts[h:]) * len(rows)
            count += len(rows)
    return total / count


def fit(kind: str, train: Activations, dev: Activations, model_config, horizons, config: PosthocConfig, *, progress=lambda line: None):
    """Fresh heads trained to convergence; returns (predictor, curve, converged). Horizon 0 stands for heads of the same layer.

    The rule is the same for every backbone: see PosthocConfig. The weights with the best dev hit@k are returned.
    """
    heads = PredictorConfig(kind=kind, horizons=tuple(h for h in horizons if h), next_token=0 in horizons)
    predictor = new_predictor(heads, model_config).initialise(config.seed)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    generator = torch.Generator().manual_seed(config.seed)
    curve, best, best_state, lr, cuts = [], -1.0, None, config.lr, 0
    losses: list[float] = []
    ranking_loss = getattr(objectives, config.ranking_loss)
    for step in range(1, config.max_steps + 1):
        rows = torch.randint(len(train.tokens_N), (config.batch_tokens,), generator=generator)
        loss = head_loss_of(predictor, *train.batch(rows), ranking_loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % config.eval_every:
            continue
        hit = dev_hit(predictor, dev)
        curve.append({"step": step, "lr": lr, "train_loss": float(np.mean(losses)), "dev_hit": hit})
        progress(f"{kind} predictor: step {step}, dev hit@k {hit:.4f}, learning rate {lr:.1e}")
        losses = []
        if hit < best + config.min_gain:
            cuts += 1
            lr /= 4
            for group in optimizer.param_groups:
                group["lr"] = lr
        if hit > best:
            best, best_state = hit, copy.deepcopy(predictor.state_dict())
        if cuts > config.patience:
            break
    predictor.load_state_dict(best_state)
    return predictor, curve, cuts > config.patience


def lookups(train: Activations, vocab_size: int, num_experts: int, device: str | torch.device = "cpu") -> dict[str, Lookup]:
    """The confounds known before the first layer, counted on `train`: "token_id" and "static". Only ids that occur there take room."""
    seen, at = torch.unique(train.tokens_N, return_inverse=True)
    rows_V = torch.full((vocab_size,), len(seen))   # a last row without a count serves all others
    rows_V[seen] = torch.arange(len(seen))
    counts = token_counts(dataclasses.replace(train, tokens_N=at), len(seen) + 1, num_experts).to(device)
    return {"token_id": Lookup(counts, True, rows_V.to(device)), "static": Lookup(counts, False)}


def fit_and_evaluate(model: MoEModel, train: Activations, dev: Activations, heldout: EvalSet, domains, horizons, config: PosthocConfig, *, next_router: Scorer,
                     cotrained: Predictor | None = None, autocast: torch.dtype | None = None, batch_size: int = 32, progress=lambda line: None):  # fmt: skip
    """Both post-hoc predictors fitted on `train`, evaluated on `heldout` beside the confounds and the heads that came with the model.

    Returns `evaluate`'s result, the fitted predictors by kind, and per kind the curve, whether it converged, and the seconds that it took.
    """
    fitted, curves, converged, seconds = {}, {}, {}, {}
    for kind in PREDICTORS:
        begun = time.perf_counter()
        fitted[kind], curves[kind], converged[kind] = fit(kind, train, dev, model.config, horizons, config, progress=progress)
        seconds[kind] = time.perf_counter() - begun
    scorers = {kind: Heads(predictor.to(model.device)) for kind, predictor in fitted.items()}
    scorers |= {"next_router": next_router} | lookups(train, model.config.vocab_size, model.config.num_experts, model.device)
    if cotrained is not None:
        scorers["cotrained"] = Heads(cotrained.to(model.device))
    result = evaluate(model, heldout, domains, horizons, scorers, batch_size=batch_size, autocast=autocast)
    return result, fitted, curves, converged, seconds


def measure(model: MoEModel, cotrained: Predictor | None, run: RunConfig, tokens: Tokens, config: PosthocConfig, *, progress=lambda line: None):
    """Everything a result file says about one finished run, and the fitted predictors by kind.

    Fits both post-hoc predictors on the frozen backbone, builds the confounds from the same text, and evaluates all of
    them, with the run's own heads, on the held-out set.
    """
    model.requires_grad_(False)
    autocast = torch.bfloat16 if run.train.dtype == "bfloat16" else None
    T, horizons = run.model.context, run.predictor.horizons
    started = time.perf_counter()
    progress("caching activations")
    train = training_activations(model, run, tokens, config)
    dev = capture(model, tokens.dev(T).tokens, autocast=autocast)
    seconds = {"capture": time.perf_counter() - started}
    result, fitted, curves, converged, spent = fit_and_evaluate(model, train, dev, tokens.heldout(T), tokens.domains, horizons, config, next_router=NextRouter(model),
                                                                cotrained=cotrained, autocast=autocast, progress=progress)  # fmt: skip
    seconds |= spent | {"posthoc": time.perf_counter() - started}
    free = ("token_id", "static")
    result |= {
        "config_hash": run.hash,
        "seed": run.train.seed,
        "lambda_pred": run.objective.lambda_pred,
        "config": to_dict(run),
        "posthoc_config": to_dict(config),
        "margin_over_token_id": {
            name: {h: value - result["hit"]["token_id"][h] for h, value in by_horizon.items()}
            for name, by_horizon in result["hit"].items() if name not in free
        },
        "static_hit": result["hit"]["static"],
        "token_id_hit": result["hit"]["token_id"],
        "curves": curves,
        "converged": converged,
        "seconds": seconds,
        "parameters": count_parameters(run.model),
        "data_hash": tokens.hash,
    }
    return result, fitted
