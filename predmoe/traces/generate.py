"""Synthetic traces with the properties that matter to a cache and a prefetcher as knobs.

Every (token, layer) has a logit per expert: how popular the expert is (Zipf with exponent `skew`, another order in each
layer), plus a fluctuation that persists from token to token. A token's experts are its k highest logits, so they are
different experts, and a predictor sees the same logits through noise, so what it gets wrong are near misses. The two
unknowns, how long a fluctuation persists and how much noise a predictor has, are found by bisection from what is asked for:
the reuse between adjacent tokens, and the predictor's recall.
"""
# N tokens, L layers, E experts, K chosen, M guesses

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .schema import ABSENT, DECODE, PREFILL, Meta, Prediction, Trace, TraceError, build

SAMPLE = 1024     # tokens on which a knob is set
BISECTIONS = 20
NOISIEST = 1e3    # at this noise, against logits of order 1, a predictor knows nothing

COLIBRI = dict(layers=75, num_experts=256, top_k=8, expert_bytes=18_920_000)     # GLM-5.x class, int4 experts with per-row scales
REFERENCE = dict(layers=75, num_experts=256, top_k=8, expert_bytes=19_000_000)   # the reference study's simulator


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How good a predictor is: `recall` per horizon, the share of the chosen experts that it guesses, and `precision`,
    the share of its guesses that are chosen (None: as high as recall, by k guesses each). It makes recall * k / precision
    guesses per (token, layer), rounded up or down at random, so that the mean is right. `spare`: so many guesses more, the
    next best, which recall and precision do not count; a prefetch uses them by its over-fetch budget.
    """

    recall: Mapping[int, float]
    precision: float | None = None
    spare: int = 0

    def __post_init__(self):
        if self.spare < 0:
            raise TraceError(f"spare={self.spare} must be at least 0")
        for h, recall in self.recall.items():
            if h < 1 or not 0 < recall <= 1:
                raise TraceError(f"recall {recall} at horizon {h} must lie in (0, 1], at a horizon of at least 1")
            if self.precision is not None and not 0 < self.precision <= 1:
                raise TraceError(f"precision={self.precision} must lie in (0, 1]")

    def guesses(self, horizon: int, k: int) -> float:
        return k if self.precision is None else self.recall[horizon] * k / self.precision


def synthetic(*, tokens: int, layers: int, num_experts: int, top_k: int, expert_bytes: int = 1_000_000, skew: float = 0.5, reuse: float | None = None,
              prompt: int = 0, sequences: int = 1, predictors: Mapping[str, Accuracy] | None = None, seed: int = 0) -> Trace:  # fmt: skip
    """`sequences` sequences of `prompt` prefill and `tokens` decode tokens each, one after the other.

    `reuse`: mean share of a token's experts that the token before chose too (None: what popularity alone gives).
    Predictions past the last layer are for the next token of the sequence. Raises TraceError for a reuse or a recall that cannot be had.
    """
    if tokens < 1 or prompt < 0 or sequences < 1 or layers < 1:
        raise TraceError(f"tokens={tokens}, layers={layers} and sequences={sequences} must be at least 1, prompt={prompt} at least 0")
    meta = Meta(model="synthetic", num_experts=num_experts, top_k=top_k, layers=range(layers), expert_bytes=[expert_bytes] * layers, source="synthetic",
                domain=f"skew {skew}, reuse {reuse}", on_policy=None)  # fmt: skip
    rng = np.random.default_rng(seed)
    length = prompt + tokens
    N = sequences * length
    draw = lambda: int(rng.integers(1 << 31))  # noqa: E731: a seed of its own for each unknown
    persistence = 0.0 if reuse is None else _persistence(reuse, num_experts, top_k, skew, draw())
    predictors = predictors or {}
    noise = {(name, h): _noise(accuracy.recall[h], accuracy.guesses(h, top_k), num_experts, top_k, skew, draw())
             for name, accuracy in predictors.items() for h in accuracy.recall}  # fmt: skip
    if any(h > layers for _, h in noise):
        raise TraceError(f"a horizon is beyond the last of {layers} layers")
    experts_NLK = np.empty((N, layers, top_k), np.int16)
    held = {}
    for name, h in noise:
        M = int(np.ceil(predictors[name].guesses(h, top_k))) + predictors[name].spare
        if M > num_experts:
            raise TraceError(f"{name} would make {M} guesses of {num_experts} experts")
        held[name, h] = np.full((N, layers, M), ABSENT, np.int16), np.zeros((N, layers, M), np.float32)
    for layer in range(layers):
        logits_NE = np.concatenate([_logits(length, num_experts, skew, persistence, rng, order) for order in [rng.permutation(num_experts)] * sequences])
        experts_NLK[:, layer] = _best(logits_NE, top_k)
        for (name, h), sigma in noise.items():
            ids, scores = _guess(logits_NE, predictors[name].guesses(h, top_k) + predictors[name].spare, sigma, rng)
            asked = layer - h
            if asked >= 0:
                held[name, h][0][:, asked], held[name, h][1][:, asked] = ids, scores
            else:   # asked of the token before, at layer asked + layers
                inside = np.arange(N) % length > 0
                before = np.flatnonzero(inside) - 1
                held[name, h][0][before, asked + layers], held[name, h][1][before, asked + layers] = ids[inside], scores[inside]
    opens = np.arange(N) % length
    starts = np.flatnonzero((opens == 0) | (opens >= max(prompt, 1)))
    phase = np.where(np.diff([*starts, N]) > 1, PREFILL, DECODE) if prompt != 1 else np.where(opens[starts] == 0, PREFILL, DECODE)
    return build(meta, experts_NLK, starts=[*starts, N], phase=phase, sequence=np.arange(N) // length,
                 predictions=[(name, Prediction(h, ids, scores)) for (name, h), (ids, scores) in held.items()])  # fmt: skip


def reuse_rate(trace: Trace) -> float:
    """Mean share of a token's experts that the token before it in the sequence chose at the same layer."""
    same = trace.sequence[1:] == trace.sequence[:-1]
    if not same.any():
        raise TraceError("no token follows another of its sequence, so there is no reuse")
    now, before = trace.experts_NLK[1:][same], trace.experts_NLK[:-1][same]
    shared = (now[..., :, None] == before[..., None, :]).any(-1) & (now != ABSENT)
    return float(shared.sum() / (now != ABSENT).sum())


def _logits(n: int, E: int, skew: float, persistence: float, rng: np.random.Generator, order: np.ndarray) -> np.ndarray:
    """[n, E]: log popularity plus a stationary first-order process of unit variance."""
    return _persisting(rng.standard_normal((n, E), dtype=np.float32), persistence) - skew * np.log1p(order).astype(np.float32)


def _persisting(shocks: np.ndarray, persistence: float) -> np.ndarray:
    """Independent shocks [n, E] made a stationary first-order process; they are changed in place."""
    if persistence:
        from scipy.signal import lfilter   # here: who only reads traces has no use for its memory

        step = np.sqrt(1 - persistence**2)
        shocks[0] /= step
        shocks = lfilter([step], [1.0, -persistence], shocks, axis=0).astype(np.float32)
    return shocks


def _best(logits_NE: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k highest, best first, ties to the lower id."""
    return np.argsort(-logits_NE, axis=1, kind="stable")[:, :k].astype(np.int16)


def _guess(logits_NE: np.ndarray, guesses: float, sigma: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The best guesses of a predictor whose logits are off by `sigma`: ids and probabilities, ABSENT past each row's number."""
    seen = logits_NE + sigma * rng.standard_normal(logits_NE.shape, dtype=np.float32)
    M = int(np.ceil(guesses))
    ids = _best(seen, M)
    scores = np.exp(seen - seen.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    scores = np.take_along_axis(scores, ids.astype(np.int64), 1)
    short = rng.random(len(ids)) >= 1 - (M - guesses)
    ids[short, -1], scores[short, -1] = ABSENT, 0.0
    return ids, scores


def _bisect(measure: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """x in low..high at which `measure`, monotone, gives `wanted`."""
    rising = measure(high) > measure(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if (measure(middle) < wanted) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@lru_cache(maxsize=64)   # the same few traces are made again and again: on every disk, with every predictor
def _persistence(reuse: float, E: int, k: int, skew: float, seed: int) -> float:
    shocks = np.random.default_rng(seed).standard_normal((SAMPLE, E), dtype=np.float32)
    popularity = skew * np.log1p(np.arange(E)).astype(np.float32)

    def measure(persistence: float) -> float:
        chosen = np.argpartition(popularity - _persisting(shocks.copy(), persistence), k - 1, axis=1)[:, :k]
        return float((chosen[1:, :, None] == chosen[:-1, None, :]).any(-1).mean())

    least = measure(0.0)
    if not least - 0.01 <= reuse < 1:
        raise TraceError(f"reuse={reuse} cannot be had: popularity alone (skew {skew}) gives {least:.3f}, and it must stay below 1")
    return 0.0 if reuse <= least else _bisect(measure, reuse, 0.0, 0.9999)


@lru_cache(maxsize=256)
def _noise(wanted: float, guesses: float, E: int, k: int, skew: float, seed: int) -> float:
    """The noise at which a predictor has the recall `wanted` with so many guesses."""
    if guesses > E:
        raise TraceError(f"recall {wanted} means {guesses:.1f} guesses of {E} experts, at the precision asked for")

    own = np.random.default_rng(seed)
    logits = _logits(SAMPLE, E, skew, 0.0, own, np.arange(E))
    noise, chosen, M = own.standard_normal(logits.shape, dtype=np.float32), _best(logits, k), int(np.ceil(guesses))
    short = own.random(SAMPLE) >= 1 - (M - guesses)

    def measure(sigma: float) -> float:
        ids = np.argpartition(-(logits + sigma * noise), M - 1, axis=1)[:, :M]   # the M best; only the last one's place is known, and needed
        ids[short, -1] = ABSENT
        return float((chosen[:, :, None] == ids[:, None, :]).any(-1).mean())

    if measure(NOISIEST) > wanted:
        raise TraceError(f"recall {wanted} with {guesses:.1f} guesses is below what guessing at random gives")
    if wanted >= measure(0.0):
        return 0.0
    return 10 ** _bisect(lambda x: measure(10**x), wanted, -3.0, np.log10(NOISIEST))
