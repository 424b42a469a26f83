"""How local a model's routing is in time: how much of what a token needs is what its neighbours need. No torch, traces alone.

`srp` and `sch` are the segment metrics of "Not All Models Suit Expert Offloading" (arXiv 2505.16056v3, ICLR 2026), `reuse` and
`switch_rate` compare adjacent tokens, and `hit_rates` puts real and optimal cache policies beside them. All of them take a trace token by
token, whatever its passes were, and look at no token of another sequence.
"""
# N tokens, L layers, E experts, K chosen, G groups of experts that share a cache, X experts of a group, m tokens of a segment

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .simulator import Cache, count
from .traces import ABSENT, DECODE, Trace, TraceError
from .traces import reuse_rate as reuse

__all__ = ["SegmentRouting", "hit_at_k", "hit_rates", "locality", "reuse", "sch", "srp", "switch_rate", "token_by_token"]


@dataclass(frozen=True, kw_only=True)
class SegmentRouting:
    """SRP of a group of experts: the best F1, the ratio of experts that the best segment router holds active to those the
    model chooses (the paper's rho-hat), and how many of a segment's m tokens must choose an expert for it to be held."""

    f1: float
    size_ratio: float
    threshold: int


def srp(trace: Trace, m: int = 16) -> tuple[SegmentRouting, list[SegmentRouting]]:
    """Segment routing best performance (section 2.2 and appendix C.1): of the whole model, and of each layer.

    A segment router says of each expert that it is active in all of a segment's m tokens or in none. Its F1 is taken over
    all experts, tokens and segments, which begin at every token, and SRP is the highest F1 of any such router: that of the router
    which holds the experts chosen by at least a threshold of the segment's tokens. Raises TraceError where no sequence has
    m tokens, or m < 1. Segments in which a layer has an absent row are left out of that layer.
    """
    if m < 1:
        raise TraceError(f"a segment has at least one token, not m={m}")
    L, E, K = trace.num_layers, trace.meta.num_experts, trace.meta.top_k
    pairs_LF = np.zeros((L, m + 1), np.int64)   # (segment, expert) pairs by how many of the segment's tokens chose the expert
    for rows in _sequences(trace):
        if len(rows) < m:
            continue
        for l in range(L):
            chosen_TE = _membership(trace.experts_NLK[rows, l : l + 1], E)[:, 0]
            total_TE = np.cumsum(np.concatenate([np.zeros((1, E), np.int64), chosen_TE]), axis=0)
            frequency_PE = total_TE[m:] - total_TE[:-m]
            whole = frequency_PE.sum(1) == m * K
            pairs_LF[l] += np.bincount(frequency_PE[whole].ravel(), minlength=m + 1)
    if not pairs_LF.any(1).all():
        raise TraceError(f"no sequence has {m} tokens in a row that are all routed, so there is no segment of m={m}")
    return _best_router(pairs_LF.sum(0), E, K), [_best_router(pairs_F, E, K) for pairs_F in pairs_LF]


def _best_router(pairs_F: np.ndarray, E: int, K: int) -> SegmentRouting:
    m = len(pairs_F) - 1
    frequency_F = np.arange(m + 1)
    held_F = np.cumsum(pairs_F[::-1])[::-1]                          # pairs held active at each threshold
    right_F = np.cumsum((pairs_F * frequency_F)[::-1])[::-1]         # (token, expert) choices among them
    f1_F = 2 * right_F / (m * held_F + right_F[0])
    threshold = m - int(np.argmax(f1_F[::-1]))                       # of equals the one that holds fewer
    segments = pairs_F.sum() / E
    return SegmentRouting(f1=float(f1_F[threshold]), size_ratio=float(held_F[threshold] / (segments * K)), threshold=threshold)


def sch(trace: Trace, m: int = 16, ratio: float = 2.0, scope: str = "global") -> float:
    """Segment cache best hit rate (section 2.3): the hit rate of a cache that evicts what the next m tokens choose least.

    The cache holds `ratio` times the experts that a token chooses: `scope` "global" is one cache for all layers (the
    paper's model-level figure), "layer" one for each. It starts empty in each sequence; at each token what is missing is loaded,
    and of the experts that the token does not choose those chosen least by the m tokens after it leave, of equals the one not used
    for longest. Hits are counted over all tokens, the first too. Raises TraceError for a ratio below 1, m < 1, or an unknown scope.
    """
    L, E, K = trace.num_layers, trace.meta.num_experts, trace.meta.top_k
    if m < 1 or not ratio >= 1 or scope not in ("global", "layer"):
        raise TraceError(f"m={m} and ratio={ratio} must be at least 1, scope={scope!r} global or layer")
    G = 1 if scope == "global" else L
    capacity = round(ratio * K * L / G)
    hits = asked = 0
    for rows in _sequences(trace):
        chosen_TGX = _membership(trace.experts_NLK[rows], E).reshape(len(rows), G, -1)
        ahead_GX = chosen_TGX[1 : m + 1].sum(0, dtype=np.int64)
        used_GX = np.full(ahead_GX.shape, -1, np.int64)
        held_GX = np.zeros(ahead_GX.shape, bool)
        for t, now_GX in enumerate(chosen_TGX):
            hits += int((held_GX & now_GX).sum())
            asked += int(now_GX.sum())
            used_GX[now_GX] = t
            held_GX |= now_GX
            # the token's own experts stay, then by uses ahead, then by last use: one number that orders all three
            rank_GX = np.where(now_GX, np.int64(1) << 60, ahead_GX * (len(rows) + 1) + used_GX)
            rank_GX[~held_GX] = -(1 << 60)
            if (held_GX.sum(1) > capacity).any():
                order_GX = np.argsort(-rank_GX, axis=1, kind="stable")
                np.put_along_axis(held_GX, order_GX[:, capacity:], False, 1)
            if t + 1 < len(rows):
                ahead_GX = ahead_GX - chosen_TGX[t + 1]
            if t + 1 + m < len(rows):
                ahead_GX = ahead_GX + chosen_TGX[t + 1 + m]
    return hits / asked


def switch_rate(trace: Trace) -> float:
    """Share of (token, layer) pairs whose top-k set is not exactly that of the token before in the sequence.

    Stricter than 1 - `reuse`, the share of experts that are new. Raises TraceError where no token follows another.
    """
    ordered = np.sort(trace.experts_NLK, axis=-1)
    routed = trace.experts_NLK[..., 0] != ABSENT
    compared = (trace.sequence[1:] == trace.sequence[:-1])[:, None] & routed[1:] & routed[:-1]
    if not compared.any():
        raise TraceError("no token follows another of its sequence, so there is no switch")
    changed = (ordered[1:] != ordered[:-1]).any(-1)
    return float(changed[compared].mean())


def hit_at_k(trace: Trace, predictor: str, horizon: int) -> float:
    """The share of the chosen experts among a predictor's first k guesses, over all (token, layer) at which it guessed and of which the
    layer `horizon` ahead is one of the same token. Raises TraceError where there is none."""
    L, K = trace.num_layers, trace.meta.top_k
    guessed = trace.prediction(predictor, horizon).experts_NLM[:, : max(L - horizon, 0), :K]
    true = trace.experts_NLK[:, horizon:]
    asked = (guessed[..., :1] != ABSENT) & (true != ABSENT)
    if not asked.any():
        raise TraceError(f"{predictor} at horizon {horizon} guesses for no layer of the same token")
    return float((guessed[..., None, :] == true[..., :, None]).any(-1)[asked].mean())


def token_by_token(trace: Trace) -> Trace:
    """The same routing as decode passes of one token each, sequence by sequence: prefill batches taken apart."""
    order = np.argsort(trace.sequence, kind="stable")
    cut = lambda array: None if array is None else np.ascontiguousarray(array[order])  # noqa: E731
    return dataclasses.replace(trace, experts_NLK=cut(trace.experts_NLK), starts=np.arange(trace.num_tokens + 1), phase=np.full(trace.num_tokens, DECODE, np.uint8),
                               sequence=cut(trace.sequence), weights_NLK=cut(trace.weights_NLK), token_ids=cut(trace.token_ids), predictions={})  # fmt: skip


def hit_rates(trace: Trace, ratio: float = 2.0, policies: tuple[str, ...] = ("lru", "belady"), scope: str = "layer") -> dict[str, float]:
    """Hit rate by policy of a cache of `ratio` times a token's experts, empty at the start of each sequence; sets are atomic."""
    single = token_by_token(trace)
    slots = round(ratio * trace.meta.top_k * (trace.num_layers if scope == "global" else 1))
    return {policy: count(single, Cache(slots=slots, policy=policy, scope=scope), cold="sequence").hit_rate for policy in policies}


def locality(trace: Trace, m: int = 16, ratio: float = 2.0) -> dict[str, float]:
    """One line of a table: SRP and its size ratio, reuse, switch rate, and with a cache of `ratio` times a token's experts in each
    layer the hit rates of SCH, LRU and Belady, and of one such cache for all layers SCH ("sch_global", the paper's model level)."""
    model, _ = srp(trace, m)
    rates = hit_rates(trace, ratio)
    return {"srp": model.f1, "srp_size": model.size_ratio, "sch_global": sch(trace, m, ratio, "global"), "sch": sch(trace, m, ratio, "layer"), **rates,
            "reuse": reuse(trace), "switch_rate": switch_rate(trace)}  # fmt: skip


def _sequences(trace: Trace) -> Iterator[np.ndarray]:
    """Row numbers of each sequence's tokens, in order."""
    order = np.argsort(trace.sequence, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(trace.sequence[order])) + 1)


def _membership(experts_TLK: np.ndarray, E: int) -> np.ndarray:
    """bool [T, L, E]: which experts a token chose; none in an absent row."""
    chosen = np.zeros((*experts_TLK.shape[:2], E + 1), bool)
    np.put_along_axis(chosen, experts_TLK.astype(np.int64), True, 2)   # ABSENT is -1, the last column
    return chosen[..., :E]
