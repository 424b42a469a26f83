"""A transformers mixture of experts, seen through its gates: the same `Routing` records as our own model gives.

A gate is the module beside a layer's `experts` that chooses among them: hooks on the two give the MoE input, the router logits and the
experts that the pass really used, whatever the family's scores (softmax, sigmoid with a bias, groups, sparse mixer) and whatever the model
itself returns. `Backbone` is a model's body, shape and gates under the names that `posthoc`, `evaluation` and `traces.record` use.

Ties: the *realized* experts are recorded. A family's own top-k may break equal logits otherwise than ours (lower id first).
"""
# B batch, T time, N tokens (padding left out), D model width, E experts, K chosen, L MoE layers, V vocabulary

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from predmoe.config import ConfigError
from predmoe.model import Output, Routing
from predmoe.predictor import membership, predicted_top_k

GATES = ("gate", "router")   # what transformers calls the module that chooses, beside `experts`


@dataclass(frozen=True)
class Shape:
    """The sizes that heads, evaluation and traces ask of a model; `num_layers` counts its MoE layers alone."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    top_k: int
    context: int


@dataclass
class Gate:
    """One layer's gate. `layer`: the layer's index in the model, dense layers counted; `name`: the gate's path in the model.

    What the first pass shows is kept: `scores`, what the gate returns for all experts ("logits", "softmax" or "sigmoid"); and how
    it is called: `rank` and `dtype` of its input, `more`, the arguments after it (some gates are given their bias).
    """

    layer: int
    name: str
    module: nn.Module
    block: nn.Module
    experts: nn.Module
    scores: str | None = None
    rank: int = 2
    dtype: torch.dtype = torch.float32
    more: tuple = field(default=((), {}), repr=False)


def find_gates(model: nn.Module) -> list[Gate]:
    """The gates of a transformers model (or of one wrapped by peft) in the order of its layers.

    Raises ConfigError for a model without a recognisable gate, a dense one among them, or with more than one stack of gated layers.
    """
    found: dict[str, list[Gate]] = {}
    for name, block in model.named_modules():
        children = dict(block.named_children())
        place = re.match(r"(.*?)\.(\d+)(?:\.|$)", name)
        gate = next((children[kind] for kind in GATES if kind in children), None)
        if gate is None or "experts" not in children or not place:
            continue
        kind = next(kind for kind in GATES if kind in children)
        found.setdefault(place[1], []).append(Gate(int(place[2]), f"{name}.{kind}", gate, block, children["experts"]))
    if not found:
        raise ConfigError(f"{type(model).__name__} has no recognisable gate: no layer holds `experts` beside a `{'` or `'.join(GATES)}`, so it is a dense "
                          "model or routes in another way")  # fmt: skip
    if len(found) > 1:
        raise ConfigError(f"{type(model).__name__} has several stacks of gated layers ({', '.join(found)}): load the language model alone")
    gates = sorted(next(iter(found.values())), key=lambda gate: gate.layer)
    for a, b in zip(gates, gates[1:]):
        if a.layer == b.layer:
            raise ConfigError(f"layer {a.layer} has two gates, {a.name} and {b.name}: which of them is meant cannot be told")
    return gates


# --- what a pass shows -------------------------------------------------------------------------------------------------

class Capture:
    """What the gates saw in the last forward pass; made by `capture`."""

    def __init__(self, gates: list[Gate], detach: bool):
        self.gates, self.detach = gates, detach
        self._seen: dict[int, tuple] = {}    # by place in `gates`; a pass overwrites the one before, so recomputation does no harm
        self._asked: dict[int, tuple] = {}   # what the experts were given

    def take(self, mask_BT: Tensor | None = None) -> list[Routing]:
        """One `Routing` per MoE layer of the last forward pass, in the order of the layers, of the tokens where `mask_BT` is not 0
        (all tokens without it), sequence after sequence. Best first means by router logit, equals in the gate's own order; gates_NK are
        the weights that the experts' outputs were given. Raises ConfigError that names the layer where a gate was not called, shows
        no logits or no ids, or gave NaN as logits or weights.
        """
        keep_N = None if mask_BT is None else mask_BT.reshape(-1).nonzero().squeeze(1)   # row numbers: a mask would be waited for at every use
        records = [self._record(at, keep_N, None if mask_BT is None else mask_BT.numel()) for at in range(len(self.gates))]
        self._seen.clear()
        self._asked.clear()
        device = records[0].logits_NE.device
        nan = lambda values: torch.isnan(values).any().to(device)  # noqa: E731
        if torch.stack([nan(record.logits_NE) | nan(record.gates_NK) for record in records]).any():   # one look, not one per layer
            at, kind = next((i, kind) for i, record in enumerate(records) for kind in ("logits_NE", "gates_NK") if nan(getattr(record, kind)))
            row, where = int(torch.isnan(getattr(records[at], kind)).any(1).nonzero()[0]), self.gates[at]
            told = ("router's logits", "no expert can be chosen") if kind == "logits_NE" else ("gate weights", "a logit is infinite, and no output can be weighted")
            raise ConfigError(f"layer {where.layer}: the {told[0]} of token {row} are NaN ({where.name}): {told[1]}")
        return records

    def _record(self, at: int, keep_N: Tensor | None, masked: int | None) -> Routing:
        gate = self.gates[at]
        where = f"layer {gate.layer}: the gate {gate.name}"
        if at not in self._seen:
            raise ConfigError(f"{where} was not called in the forward pass: another implementation of the block runs in its place, or there was no pass")
        hidden_ND, logits_NE, experts_NK, gates_NK = self._seen[at]
        given_ids, given_weights = self._asked.get(at, (None, None))
        experts_NK = given_ids if experts_NK is None else experts_NK
        gates_NK = given_weights if gates_NK is None else gates_NK
        if experts_NK is None or gates_NK is None:
            raise ConfigError(f"{where} returns no ids of experts, and its experts are given none: which were chosen cannot be seen")
        if experts_NK.shape[0] != hidden_ND.shape[0] or experts_NK.shape != gates_NK.shape:
            raise ConfigError(f"{where} chose for {experts_NK.shape[0]} tokens with {tuple(gates_NK.shape)} weights, but was given {hidden_ND.shape[0]} tokens")
        fields = (hidden_ND, logits_NE, experts_NK.long(), gates_NK.float())
        if keep_N is not None:
            if masked != len(hidden_ND):
                raise ConfigError(f"the mask has {masked} tokens, the forward pass had {len(hidden_ND)}")
            fields = tuple(part.index_select(0, keep_N.to(part.device)) for part in fields)
        hidden_ND, logits_NE, experts_NK, gates_NK = fields
        if self.detach:
            hidden_ND, logits_NE, gates_NK = hidden_ND.detach(), logits_NE.detach(), gates_NK.detach()
        order_NK = logits_NE.detach().gather(1, experts_NK).argsort(dim=1, descending=True, stable=True)   # some gates return them in no order
        return Routing(hidden_ND, logits_NE, experts_NK.gather(1, order_NK), gates_NK.gather(1, order_NK))

    def _hooks(self, at: int):
        gate = self.gates[at]

        def gated(_, args, kwargs, output):
            given = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
            more = {name: value for name, value in kwargs.items() if value is not given}
            gate.rank, gate.dtype, gate.more = given.dim(), given.dtype, (args[1:], more)
            hidden_ND = given.reshape(-1, given.shape[-1])
            self._seen[at] = (hidden_ND, *read_gate(gate, hidden_ND, output))

        def asked(_, args, kwargs):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 2]
            ids = next((value for value in tensors if not value.is_floating_point()), None)
            weights = None if ids is None else next((value for value in tensors if value.is_floating_point() and value.shape == ids.shape), None)
            self._asked[at] = (ids, weights)

        yield gate.module.register_forward_hook(gated, with_kwargs=True)
        yield gate.experts.register_forward_pre_hook(asked, with_kwargs=True)


@contextmanager
def capture(gates: list[Gate], *, detach: bool = True) -> Iterator[Capture]:
    """Within, each forward pass of the gates' model leaves what its gates saw: `take()` gives it as `list[Routing]`.

    `detach=False` keeps the graph, so that a loss on the records reaches the model through the MoE inputs, the router logits and the gate
    weights (with gradient checkpointing only in its non-reentrant form, which records the first pass). Take before `backward`.
    """
    seen = Capture(gates, detach)
    hooks = [hook for at in range(len(gates)) for hook in seen._hooks(at)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def read_gate(gate: Gate, hidden_ND: Tensor, output) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Router logits (N, E) float32, and the chosen ids and weights (N, K), None where the gate does not return them.

    `output` is one tensor of scores, or a tuple in any order with ids, their weights and the scores of all experts; where a gate chooses
    among all of them (K = E), scores come before weights. Softmaxed or squashed scores become logits again; without scores they are worked out
    from the gate's `weight`. Raises ConfigError where neither is there.
    """
    tensors = [part for part in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(part, Tensor) and part.dim() > 1 and part.numel()]
    N = len(hidden_ND)
    rows = [part.reshape(-1, part.shape[-1]) for part in tensors if part.numel() // part.shape[-1] == N]
    ids = next((part for part in rows if not part.is_floating_point()), None)
    floats = [part for part in rows if part.is_floating_point()]
    weight_ED = _weight(gate, hidden_ND.shape[1])
    E = len(weight_ED) if weight_ED is not None else max((part.shape[1] for part in floats), default=0)
    wide = next((part for part in floats if part.shape[1] == E and E > 1), None)
    weights = None if ids is None else next((part for part in floats if part is not wide and part.shape == ids.shape), None)
    if wide is not None:
        if gate.scores is None:
            gate.scores = _kind_of_scores(gate, hidden_ND, wide, weight_ED)
        logits_NE = _as_logits(wide.float(), gate.scores)
    elif weight_ED is not None:
        logits_NE = F.linear(hidden_ND.float(), weight_ED.float())
    else:
        raise ConfigError(f"layer {gate.layer}: the gate {gate.name} returns no scores of all experts and has no `weight` to work them out from")
    return logits_NE, ids, weights


def _weight(gate: Gate, D: int) -> Tensor | None:
    """The router matrix (E, D) where the gate is one (or holds a single one), else None."""
    weight = getattr(gate.module, "weight", None)
    if weight is None:
        inner = [parameter for parameter in gate.module.parameters() if parameter.dim() == 2 and parameter.shape[1] == D]
        weight = inner[0] if len(inner) == 1 else None
    return weight if weight is not None and weight.dim() == 2 and weight.shape[1] == D else None


def _kind_of_scores(gate: Gate, hidden_ND: Tensor, wide_NE: Tensor, weight_ED: Tensor | None, rows: int = 8) -> str:
    """Whether scores are logits, a softmax of them or a sigmoid, from a few rows: probabilities are not taken for logits.

    Rows that sum to one with nothing negative are a softmax. Scores in 0..1 may be logits all the same, so they are compared with what the
    gate's own matrix gives.
    """
    some = wide_NE[:rows].detach().float()
    if (some < 0).any() or (some > 1).any() or torch.isnan(some).any():
        return "logits"
    if ((some.sum(1) - 1).abs() < 1e-2).all():
        return "softmax"
    if weight_ED is None:
        return "logits"
    bias = getattr(gate.module, "bias", None)
    again = F.linear(hidden_ND[:rows].detach().float(), weight_ED.detach().float(), None if bias is None else bias.detach().float())
    return "sigmoid" if (again.sigmoid() - some).abs().max() < (again - some).abs().max() else "logits"


def _as_logits(scores_NE: Tensor, kind: str) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    if kind == "softmax":
        return scores_NE.clamp_min(tiny).log()   # logits up to a constant of the row, which no use of them sees
    return scores_NE.logit(eps=1e-7) if kind == "sigmoid" else scores_NE


# --- the model ---------------------------------------------------------------------------------------------------------

class Backbone:
    """A transformers causal language model with its gates: `body`, `config`, `device` and the call of our own `MoEModel`.

    Making one runs two tokens through the model, to see that every gate can be read. `layers`: the model's index of each MoE layer;
    `model_layers` counts the dense ones too. `detach=False`: a call's records keep the graph (`capture`). Raises ConfigError for a model whose routing cannot be captured.
    """

    def __init__(self, model: nn.Module, *, detach: bool = True):
        self.model, self.gates, self.detach = model, find_gates(model), detach
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model   # peft's wrapper
        self.decoder = inner.get_decoder()
        if self.decoder is inner and isinstance(getattr(inner, "model", None), nn.Module):   # a family whose prefix is another's
            self.decoder = inner.model
        text = inner.config.get_text_config()
        context = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
        vocab = model.get_input_embeddings().weight.shape[0]
        if not context:
            raise ConfigError(f"{type(inner).__name__}: its configuration has no max_position_embeddings, so its context is not known")
        self.config = Shape(vocab, 0, len(self.gates), 0, 0, context)
        self.layers = tuple(gate.layer for gate in self.gates)
        self.model_layers = len(self._layer_list())
        mode = model.training
        try:
            with torch.no_grad():
                routing = self.eval().body(torch.zeros(1, 2, dtype=torch.long, device=self.device))[1]
        finally:
            model.train(mode)
        sizes = [(r.hidden_ND.shape[1], r.logits_NE.shape[1], r.experts_NK.shape[1]) for r in routing]
        for layer, size in zip(self.layers, sizes):
            if size != sizes[0]:
                raise ConfigError(f"layer {layer} has width, experts and top-k of {size}, layer {self.layers[0]} of {sizes[0]}: one predictor cannot serve both")
        D, E, K = sizes[0]
        if K < 1:
            raise ConfigError(f"layer {self.layers[0]}: the gate {self.gates[0].name} chooses no expert: its configuration's top-k is 0")
        self.config = Shape(vocab, D, len(self.gates), E, K, context)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def eval(self) -> Backbone:
        self.model.eval()
        return self

    def requires_grad_(self, wanted: bool) -> Backbone:
        self.model.requires_grad_(wanted)
        return self

    def capture(self, *, detach: bool = True):
        """`capture` of this model's gates."""
        return capture(self.gates, detach=detach)

    def body(self, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, list[Routing]]:
        """Final hidden states (B, T, D) and the routing of every MoE layer, of the tokens where `mask_BT` is not 0, detached.

        Raises ConfigError for tokens beyond the context or outside the vocabulary.
        """
        self._check(tokens_BT)
        with self.capture() as seen:
            output = self.decoder(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False)
            return output.last_hidden_state, seen.take(mask_BT)

    def __call__(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output:
        """Loss (with targets) or logits, and the routing of every MoE layer, as of `MoEModel`."""
        self._check(tokens_BT)
        with self.capture(detach=self.detach) as seen:
            logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
            routing = seen.take()
        if targets_BT is None:
            return Output(None, None, logits_BTV, routing)
        losses_N = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.reshape(-1), reduction="none")
        return Output(losses_N.mean(), losses_N.view(targets_BT.shape), None, routing)

    def _check(self, tokens_BT: Tensor) -> None:
        if tokens_BT.shape[1] > self.config.context:
            raise ConfigError(f"{tokens_BT.shape[1]} tokens exceed the model's context of {self.config.context}")
        if tokens_BT.numel() and not 0 <= int(tokens_BT.min()) <= int(tokens_BT.max()) < self.config.vocab_size:
            raise ConfigError(f"token ids reach from {int(tokens_BT.min())} to {int(tokens_BT.max())}, the model's from 0 to {self.config.vocab_size - 1}:"
                              " the tokenizer is another model's")  # fmt: skip

    def _layer_list(self) -> nn.Module:
        return self.model.get_submodule(re.match(r"(.*?)\.\d+\.", self.gates[0].name)[1])

    @property
    def trace_sizes(self) -> dict:
        """Of a trace's metadata (`traces.Meta`), what the model tells: sizes, layer indices, bytes of an expert, shared experts."""
        config = self.config
        size = lambda gate: sum(p.numel() * p.element_size() for p in gate.experts.parameters()) // config.num_experts  # noqa: E731
        return dict(num_experts=config.num_experts, top_k=config.top_k, layers=self.layers, model_layers=self.model_layers,
                    expert_bytes=[size(gate) for gate in self.gates], shared_experts=self._shared_experts())  # fmt: skip

    def _shared_experts(self) -> int:
        """Experts that run for every token: as the configuration counts them, where a layer has such a module at all."""
        gate = self.gates[0]
        beside = [*dict(gate.block.named_children()), *dict(self._layer_list()[gate.layer].named_children())]
        if not any(name in ("shared_expert", "shared_experts", "shared_mlp") for name in beside):
            return 0
        text = self.model.config.get_text_config()
        counts = [getattr(text, name, None) for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")]
        return next((count for count in counts if isinstance(count, int) and count > 0), 1)


class NextGate:
    """The free floor (`evaluation.NextRouter`) of a transformers model: layer l+h's own gate applied to layer l's MoE input.

    The gate module itself is called, so that its bias, groups and ties count: its scores are its logits (float64), and where the k largest of
    those are not what it chooses, the chosen ones lifted above the others, their order among themselves as it is.
    """

    def __init__(self, backbone: Backbone):
        self.gates = backbone.gates

    @torch.no_grad()
    def __call__(self, hidden_LND: Tensor, horizon: int, tokens_N: Tensor) -> Tensor:
        """Scores (S, N, E); entry s is about MoE layer s + horizon."""
        return torch.stack([self._scores(gate, hidden_ND) for gate, hidden_ND in zip(self.gates[horizon:], hidden_LND)])

    def _scores(self, gate: Gate, hidden_ND: Tensor) -> Tensor:
        given = hidden_ND.to(gate.dtype)
        args, kwargs = gate.more
        logits_NE, ids_NK, _ = read_gate(gate, given, gate.module(given.unsqueeze(0) if gate.rank == 3 else given, *args, **kwargs))
        return logits_NE.double() if ids_NK is None else lifted(logits_NE, ids_NK)


def lifted(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Logits (float64) whose k largest are `experts_NK` in every row: where others are larger or stand before them, the chosen
    ones are raised by one amount, just above the largest of the others."""
    scores, E = logits_NE.double(), logits_NE.shape[1]
    chosen = membership(experts_NK, E).bool()
    best = membership(predicted_top_k(scores, experts_NK.shape[1]), E).bool()
    weakest = scores.masked_fill(~chosen, float("inf")).amin(1, keepdim=True)
    strongest = scores.masked_fill(chosen, float("-inf")).amax(1, keepdim=True)
    wrong = (best != chosen).any(1, keepdim=True)
    return torch.where(wrong & chosen, scores + (strongest - weakest) + 1e-3, scores)
