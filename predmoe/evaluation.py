"""One pass over a fixed set of text: loss, routing diagnostics, and how well each predictor foresaw the routing.

Sums are kept, never activations, so memory does not grow with the set.
"""
# B batch, T time, N = B*T tokens, E experts, K chosen, L layers, S = L - h source layers of horizon h, V vocabulary

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from predmoe import metrics
from predmoe.data import EvalSet
from predmoe.model import MoEModel
from predmoe.objectives import stack
from predmoe.predictor import Predictor, hits


class Scorer(Protocol):
    """Anything that scores the experts of layer s + horizon for each token: trained heads or a confound."""

    def __call__(self, hidden_LND: Tensor, horizon: int, tokens_N: Tensor) -> Tensor:
        """Scores (S, N, E) or broadcastable to it; entry s is about layer s + horizon."""


class Heads:
    """A trained Predictor."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def __call__(self, hidden_LND: Tensor, horizon: int, tokens_N: Tensor) -> Tensor:
        return self.predictor(hidden_LND.float(), horizon)


class NextRouter:
    """The free floor: layer l+h's own router applied to layer l's MoE input (Fate, arXiv 2502.12224)."""

    def __init__(self, model: MoEModel):
        self.weight_LED = torch.stack([layer.router.weight.detach().float() for layer in model.layers])

    def __call__(self, hidden_LND: Tensor, horizon: int, tokens_N: Tensor) -> Tensor:
        return torch.bmm(hidden_LND[:-horizon].float(), self.weight_LED[horizon:].transpose(1, 2))


class Lookup:
    """Confounds known before the first layer: each layer's most popular experts, or the most frequent of the token id.

    `counts_LVE` are choices on training text. A token id never seen there falls back to popularity, which also breaks
    ties between equal counts. `rows_V`: the row of the counts that holds a token id, where not every id has one of its own.
    """

    def __init__(self, counts_LVE: Tensor, by_token: bool, rows_V: Tensor | None = None):
        popularity_LE = counts_LVE.sum(1).double()
        self.popularity_LE = popularity_LE / popularity_LE.sum(1, keepdim=True)
        self.counts_LVE = counts_LVE if by_token else None
        self.rows_V = rows_V

    def __call__(self, hidden_LND: Tensor, horizon: int, tokens_N: Tensor) -> Tensor:
        popular_S1E = self.popularity_LE[horizon:].unsqueeze(1)
        if self.counts_LVE is None:
            return popular_S1E.expand(-1, tokens_N.numel(), -1)
        rows_N = tokens_N if self.rows_V is None else self.rows_V[tokens_N]
        return self.counts_LVE[horizon:, rows_N].double() + 0.5 * popular_S1E


class Accumulator:
    """Sums of one pass; `result` turns them into means."""

    def __init__(self, num_experts: int, top_k: int):
        self.E, self.K = num_experts, top_k
        self.tokens = 0
        self.sums: dict[str, float] = defaultdict(float)
        self.load_LE: Tensor | int = 0
        self.hit_S: dict[tuple[str, int], Tensor | int] = defaultdict(int)
        self.exact_S: dict[tuple[str, int], Tensor | int] = defaultdict(int)
        self.by_document: dict[object, np.ndarray] = {}

    def add(self, output, tokens_BT: Tensor, scorers: Mapping[str, Scorer], horizons, document_N: np.ndarray, documents: int):
        routing, N = output.routing, tokens_BT.numel()
        hidden, logits, experts = (stack(routing, n) for n in ("hidden_ND", "logits_NE", "experts_NK"))
        self.tokens += N
        for name, value in {
            "val_loss": output.losses_BT.double().mean().item(),
            "router_entropy": metrics.router_entropy(logits),
            "top_k_mass": metrics.top_k_mass(logits, self.K),
            "reuse": np.mean([metrics.reuse(e.view(*tokens_BT.shape, -1), self.E) for e in experts]),
            "hidden_cosine": metrics.hidden_cosine(hidden[:-1], hidden[1:]),
        }.items():
            self.sums[name] += float(value) * N
        self.load_LE = self.load_LE + torch.stack([torch.bincount(e.reshape(-1), minlength=self.E) for e in experts])
        self._document("tokens", np.ones(N), document_N, documents)
        self._document("loss", output.losses_BT.double().reshape(-1).cpu().numpy(), document_N, documents)
        for name, scorer in scorers.items():
            for h in horizons:
                got_SN = hits(scorer(hidden, h, tokens_BT.reshape(-1)), experts[h:]).double()
                self.hit_S[name, h] = self.hit_S[name, h] + got_SN.sum(1) / self.K
                self.exact_S[name, h] = self.exact_S[name, h] + (got_SN == self.K).double().sum(1)
                self._document((name, h), (got_SN.mean(0) / self.K).cpu().numpy(), document_N, documents)

    def _document(self, key, values_N, document_N, documents):
        total = self.by_document.setdefault(key, np.zeros(documents))
        total += np.bincount(document_N, weights=values_N, minlength=documents)

    def absorb(self, other: Accumulator) -> None:
        """Add another's sums, as if this one had seen its text as well."""
        self.tokens += other.tokens
        self.load_LE = self.load_LE + other.load_LE
        for mine, theirs in ((self.sums, other.sums), (self.hit_S, other.hit_S), (self.exact_S, other.exact_S)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0) + value
        for name, values in other.by_document.items():
            self.by_document[name] = self.by_document.get(name, 0.0) + values

    def result(self, names, horizons, domains: list[str]) -> dict:
        load_LE = self.load_LE.double() / self.load_LE.sum(1, keepdim=True)
        mean = lambda sums_S: (sums_S / self.tokens).mean().item()  # noqa: E731
        table = lambda source: {n: {str(h): mean(source[n, h]) for h in horizons} for n in names}  # noqa: E731
        tokens = self.by_document["tokens"]
        per = lambda key: (self.by_document[key] / tokens).tolist()  # noqa: E731
        return {
            **{name: total / self.tokens for name, total in self.sums.items()},
            "router_entropy_fraction": self.sums["router_entropy"] / self.tokens / np.log(self.E),
            "load_entropy": float(np.mean([metrics.load_entropy(row) for row in load_LE])),
            "largest_load": load_LE.max().item(),
            "dead_experts": sum(metrics.dead_experts(row) for row in load_LE),
            "hit": table(self.hit_S),
            "exact_set": table(self.exact_S),
            "hit_per_layer": {n: {str(h): (self.hit_S[n, h] / self.tokens).tolist() for h in horizons} for n in names},
            "documents": {
                "domain": domains,
                "tokens": tokens.astype(int).tolist(),
                "loss": per("loss"),
                "hit": {n: {str(h): per((n, h)) for h in horizons} for n in names},
            },
        }


@torch.no_grad()
def evaluate(model: MoEModel, evalset: EvalSet, domains, horizons, scorers: Mapping[str, Scorer], *, batch_size: int = 32,
             autocast: torch.dtype | None = None, part: tuple[int, int] = (0, 1), join: Callable[[Accumulator], Accumulator] = lambda own: own) -> dict:
    """Loss (nats per token), diagnostics, and hit@k and exact-set accuracy of every scorer at every horizon, over all
    windows of `evalset`; also per layer and per document. `domains` names the set's domains. Weighted by tokens.

    `part` (i, n): this process takes every n-th batch from the i-th on, and `join` returns the sums of all of them."""
    config = model.config
    total = Accumulator(config.num_experts, config.top_k)
    ids, document_nT = np.unique(evalset.document, return_inverse=True)
    document_nT = document_nT.reshape(evalset.document.shape)
    domain_of = np.zeros(len(ids), dtype=int)
    domain_of[document_nT] = evalset.domain
    starts = range(0, len(evalset.tokens), batch_size)
    for i in range(part[0], part[1] * math.ceil(len(starts) / part[1]), part[1]):
        s = starts[i % len(starts)]   # every process makes as many forward passes: a model in parts needs them all
        windows = torch.from_numpy(evalset.tokens[s : s + batch_size]).to(model.device)
        with torch.autocast(model.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            output = model(windows[:, :-1], windows[:, 1:])
        if i < len(starts):
            total.add(output, windows[:, :-1], scorers, horizons, document_nT[s : s + batch_size].reshape(-1), len(ids))
    return join(total).result(list(scorers), horizons, [domains[i] for i in domain_of])
