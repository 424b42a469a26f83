"""One token of one sequence through a layer, compiled: for small float32 models, where starting some fifty operations per layer takes several times
as long as the operations themselves.

The order of operations depends on the model alone, so that every cache and every prefetch gives the same bits.
"""
# L layers, D model width, H heads, C head size, T tokens so far, E experts, K chosen, F expert width, V vocabulary, R rows of predictors (horizon, layer)

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import float32

from ..config import ModelConfig
from .table import compiled, kernel

LARGEST = 1 << 20                                                 # weights of an expert beyond which torch's threads are worth more
NOBODY, NEXT_ROUTER, LINEAR, RANKING = range(4)                   # Net.kind: who guesses
LENGTH, STAGE, NOW, LEFT, PASS, ROW, FORESEEN, LOOKS = range(8)    # Net.at
FINE, NAN_ROUTER, NAN_GUESS = range(3)                            # what `attended` returns


class Net(NamedTuple):
    """Weights as rows of plain arrays, the sequence's keys and values, and working memory. All float32 but where said."""

    attention_norm: np.ndarray   # [L, D]
    qkv: np.ndarray              # [L, 3 D D]
    qk_norm: np.ndarray          # [L, 2 D]
    out: np.ndarray              # [L, D D]
    moe_norm: np.ndarray         # [L, D]
    router: np.ndarray           # [L, E D]
    norm: np.ndarray             # [1, D]
    head: np.ndarray             # [1, V D]
    cos: np.ndarray              # [T, C]
    sin: np.ndarray              # [T, C]
    blocks: np.ndarray           # [buffers, floats of a buffer]: gate and up (2F, D), down (D, F)
    first: np.ndarray            # [R, . D]: a predictor's first matrix
    first_bias: np.ndarray       # [R, .]
    second: np.ndarray           # [R, E D]
    second_bias: np.ndarray      # [R, E]
    guesser: np.ndarray          # int64 [H, L]: its row for each horizon and layer, or -1
    ahead: np.ndarray            # int64 [H]: the horizons
    keys: np.ndarray             # [L, capacity, H, C]
    values: np.ndarray           # [L, capacity, H, C]
    x: np.ndarray                # [D]
    hidden: np.ndarray           # [L, D]: what routers and predictors read
    gates: np.ndarray            # [L, K]
    chosen: np.ndarray           # int16 [L, K]
    mixed: np.ndarray            # [K, D]
    logits: np.ndarray           # [V]
    room: np.ndarray             # [5, .]: scratch
    taken: np.ndarray            # uint8 [E]
    done: np.ndarray             # uint8 [K]: the current layer's experts that have been computed
    times: np.ndarray            # float64 [L, 2]: seconds up to the reads' hand-over, and of the experts
    at: np.ndarray               # int64, see above
    heads: int
    width: int                   # F
    kind: int
    wanted: int
    threshold: float             # least probability of a guess; -1 for none
    normed: bool                 # gate weights are divided by their sum
    eps: float


def create(config: ModelConfig, *, weights: dict[str, np.ndarray], blocks: np.ndarray, kind: int = NOBODY, predictor: dict[str, np.ndarray] | None = None, wanted: int = 0,
           threshold: float | None = None) -> Net:  # fmt: skip
    """`weights`: attention_norm, ..., sin as in Net; `predictor`: first, first_bias, second, second_bias, guesser, ahead."""
    L, D, E, K, V = config.num_layers, config.hidden_size, config.num_experts, config.top_k, config.vocab_size
    real = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    held = {"first": real(1, 1), "first_bias": real(1, 1), "second": real(1, 1), "second_bias": real(1, 1), "guesser": np.zeros((1, L), np.int64), "ahead": np.zeros(0, np.int64)}
    return Net(**weights, blocks=blocks, **(held | (predictor or {})), keys=real(L, 1, 1, 1), values=real(L, 1, 1, 1), x=real(D), hidden=real(L, D), gates=real(L, K),
               chosen=np.zeros((L, K), np.int16), mixed=real(K, D), logits=real(V), room=real(5, max(3 * D, 2 * config.expert_size, E, config.context)), taken=np.zeros(E, np.uint8),
               done=np.zeros(K, np.uint8), times=np.zeros((L, 2)), at=np.zeros(8, np.int64), heads=config.num_heads, width=config.expert_size, kind=kind, wanted=wanted,
               threshold=-1.0 if threshold is None else float(threshold), normed=bool(config.norm_topk_prob), eps=float(config.rms_norm_eps))  # fmt: skip


def nothing() -> Net:
    """For an engine that computes by torch."""
    real = np.zeros((1, 1), np.float32)
    config = ModelConfig(vocab_size=1, hidden_size=2, num_layers=1, num_heads=1, expert_size=1, num_experts=1, top_k=1, context=1)
    names = ("attention_norm", "qkv", "qk_norm", "out", "moe_norm", "router", "norm", "head", "cos", "sin")
    return create(config, weights=dict.fromkeys(names, real), blocks=real)


# --- arithmetic -----------------------------------------------------------------------------------------------------------------

# Rows are sliced before a loop over them: of flat[at + j] the compiler must ask for each entry whether its index counts from the end, and reads them
# one by one.

@kernel
def _times(flat, first, rows, columns, x, y):
    """y = M x, where M (rows, columns) begins at flat[first]. Row after row, so that memory is read in one stream."""
    x = x[:columns]
    for i in range(rows):
        row = flat[first + i * columns : first + (i + 1) * columns]
        total = float32(0)
        for j in range(columns):
            total += row[j] * x[j]
        y[i] = total


@kernel
def _norm(x, weight, eps, y):
    """y = RMSNorm of x, weighted, over the length of the weight."""
    n = len(weight)
    total = float32(0)
    for j in range(n):
        total += x[j] * x[j]
    scale = float32(1) / math.sqrt(total / float32(n) + float32(eps))
    for j in range(n):
        y[j] = x[j] * weight[j] * scale


@kernel
def _rotated(x, cos, sin, y):
    """y (H, C) = RoPE of the H heads in x (H C)."""
    H, C = y.shape
    half = C // 2
    for h in range(H):
        head = x[h * C : (h + 1) * C]
        for c in range(C):
            other = c + half if c < half else c - half
            y[h, c] = head[c] * cos[c] + head[other] * sin[c]


@kernel
def _attention(q, keys, values, length, heads, scores, y):
    """y (H C) = attention of one query (H C) over `length` keys and values (T, H, C)."""
    C = keys.shape[2]
    scale = float32(1.0 / math.sqrt(C))
    for h in range(heads):
        query, out = q[h * C : (h + 1) * C], y[h * C : (h + 1) * C]
        most = float32(-np.inf)
        for t in range(length):
            key = keys[t, h]
            total = float32(0)
            for c in range(C):
                total += query[c] * key[c]
            scores[t] = total * scale
            most = max(most, scores[t])
        total = float32(0)
        for t in range(length):
            scores[t] = math.exp(scores[t] - most)
            total += scores[t]
        for c in range(C):
            out[c] = float32(0)
        for t in range(length):
            share, value = scores[t] / total, values[t, h]
            for c in range(C):
                out[c] += share * value[c]


@kernel
def _add(x, y, n):
    for j in range(n):
        x[j] += y[j]


@compiled
def _best(scores, n, k, taken, ids):
    """Ids of the k largest of scores[:n], largest first, equal ones by lower id; False where one is NaN."""
    for e in range(n):
        if scores[e] != scores[e]:
            return False
        taken[e] = 0
    for i in range(k):
        best = -1
        for e in range(n):
            if not taken[e] and (best < 0 or scores[e] > scores[best]):
                best = e
        taken[best] = 1
        ids[i] = best
    return True


@kernel
def _softmax(x, n, y):
    most = x[0]
    for e in range(1, n):
        most = max(most, x[e])
    total = float32(0)
    for e in range(n):
        y[e] = math.exp(x[e] - most)
        total += y[e]
    for e in range(n):
        y[e] /= total


@kernel
def _gelu(x, bias, n):
    """x = gelu(x + bias)"""
    for j in range(n):
        v = x[j] + bias[j]
        x[j] = v * float32(0.5) * (float32(1) + math.erf(v * float32(0.7071067811865476)))


@kernel
def _swiglu(both, n, y):
    """y = silu(gate) * up, of gate and up one after another."""
    gate, up = both[:n], both[n : 2 * n]
    for j in range(n):
        y[j] = gate[j] / (float32(1) + math.exp(-gate[j])) * up[j]


# --- parts of a layer -------------------------------------------------------------------------------------------------------------

@compiled
def attended(net, layer):
    """x + attention(norm(x)), then router: net.x, net.hidden, net.chosen, net.gates. FINE, or NAN_ROUTER."""
    D, E, K, H = len(net.x), len(net.taken), net.gates.shape[1], net.heads
    C, length = D // H, net.at[LENGTH]
    a, b, c = net.room[0], net.room[1], net.room[2]
    _norm(net.x, net.attention_norm[layer], net.eps, a)
    _times(net.qkv[layer], 0, 3 * D, D, a, b)
    query, key, value = b[:D], b[D : 2 * D], b[2 * D : 3 * D]
    _norm(query, net.qk_norm[layer][:D], net.eps, query)
    _norm(key, net.qk_norm[layer][D:], net.eps, key)
    keys, values = net.keys[layer], net.values[layer]
    _rotated(key, net.cos[length], net.sin[length], keys[length])
    _rotated(query, net.cos[length], net.sin[length], net.room[3][:D].reshape(H, C))
    for h in range(H):
        head = value[h * C : (h + 1) * C]
        for i in range(C):
            values[length, h, i] = head[i]
    _attention(net.room[3], keys, values, length + 1, H, c, a)
    _times(net.out[layer], 0, D, D, a, b)
    _add(net.x, b, D)
    m = net.hidden[layer]
    _norm(net.x, net.moe_norm[layer], net.eps, m)
    _times(net.router[layer], 0, E, D, m, a)
    _softmax(a, E, b)
    if not _best(b, E, K, net.taken, net.chosen[layer]):
        return NAN_ROUTER
    total = float32(0)
    for k in range(K):
        net.gates[layer, k] = b[net.chosen[layer, k]]
        total += net.gates[layer, k]
    if net.normed:
        for k in range(K):
            net.gates[layer, k] /= total
    return FINE


@compiled
def guessed(net, layer, experts_HNLM, limit_HNL, row):
    """Write the guesses of every horizon at `layer` of the token `row`. FINE, or NAN_GUESS."""
    D, E = len(net.x), len(net.taken)
    m, a, b = net.hidden[layer], net.room[0], net.room[1]
    for i in range(len(net.ahead)):
        at = net.guesser[i, layer]
        if at < 0:
            limit_HNL[i, row, layer] = 0
            continue
        if net.kind == NEXT_ROUTER:
            _times(net.router[at], 0, E, D, m, a)
        elif net.kind == LINEAR:
            _times(net.first[at], 0, E, D, m, a)
            _add(a, net.first_bias[at], E)
        else:
            _times(net.first[at], 0, D, D, m, b)
            _gelu(b, net.first_bias[at], D)
            _times(net.second[at], 0, E, D, b, a)
            _add(a, net.second_bias[at], E)
        if not _best(a, E, net.wanted, net.taken, experts_HNLM[i, row, layer]):
            return NAN_GUESS
        limit = net.wanted
        if net.threshold >= 0:
            most, total = a[experts_HNLM[i, row, layer, 0]], 0.0
            for e in range(E):
                total += math.exp(np.float64(a[e]) - most)
            while limit > 0 and math.exp(np.float64(a[experts_HNLM[i, row, layer, limit - 1]]) - most) / total < net.threshold:
                limit -= 1
        limit_HNL[i, row, layer] = limit
    return FINE


@compiled
def expert(net, layer, k, buffer):
    """The k-th chosen expert, whose weights are in `buffer`."""
    D = len(net.x)
    F, a, b = net.width, net.room[0], net.room[1]
    _times(net.blocks[buffer], 0, 2 * F, D, net.hidden[layer], a)
    _swiglu(a, F, b)
    _times(net.blocks[buffer], 2 * F * D, D, F, b, net.mixed[k])


@compiled
def mixed(net, layer):
    """x + the chosen experts' weighted outputs, summed in the order of the choice."""
    for j in range(len(net.x)):
        total = float32(0)
        for k in range(len(net.mixed)):
            total += net.gates[layer, k] * net.mixed[k, j]
        net.x[j] += total


@compiled
def logits(net):
    D = len(net.x)
    _norm(net.x, net.norm[0], net.eps, net.room[0])
    _times(net.head[0], 0, len(net.logits), D, net.room[0], net.logits)
