"""Segment metrics against the search over every router, and by hand; no cache beats Belady; the published models' neighbourhood."""

import itertools

import numpy as np
import pytest
from conftest import PUBLIC, needs_public

from predmoe import locality, traces
from predmoe.traces import ABSENT, Meta, TraceError, build



def make(experts_NLK, E, sequence=None, **more):
    experts = np.asarray(experts_NLK)
    meta = Meta(model="m", num_experts=E, top_k=experts.shape[2], layers=range(experts.shape[1]), expert_bytes=[1] * experts.shape[1])
    return build(meta, experts, sequence=sequence, **more)


def drawn(rng, n, L, E, K):
    return np.array([[rng.choice(E, K, replace=False, p=np.arange(E, 0, -1) / (E * (E + 1) / 2)) for _ in range(L)] for _ in range(n)])


def one_layer(*ids):
    return np.array(ids).reshape(len(ids), 1, -1)


# --- segment routing best performance ---------------------------------------------------------------------------------

def search(trace, m):
    """The best F1 over every segment router: each (segment, layer, expert) held active or not."""
    E = trace.meta.num_experts
    frequencies = []
    for s in np.unique(trace.sequence):
        rows = np.flatnonzero(trace.sequence == s)
        for p in range(len(rows) - m + 1):
            for l in range(trace.num_layers):
                window = trace.experts_NLK[rows[p : p + m], l].ravel().tolist()
                frequencies += [window.count(e) for e in range(E)]
    best = 0.0
    for held in itertools.product((0, 1), repeat=len(frequencies)):
        right = sum(f for f, h in zip(frequencies, held) if h)
        best = max(best, 2 * right / (m * sum(held) + sum(frequencies)))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_srp_is_the_best_of_all_segment_routers(seed):
    rng = np.random.default_rng(seed)
    trace = make(drawn(rng, 6, 1, 3, 1 + seed % 2), 3, sequence=[0, 0, 0, 1, 1, 1])   # 2 sequences x 2 segments x 3 experts: 4096 routers
    assert locality.srp(trace, 2)[0].f1 == pytest.approx(search(trace, 2), abs=1e-12)


def test_srp_of_a_model_is_the_best_over_all_its_layers_together():
    rng = np.random.default_rng(9)
    trace = make(drawn(rng, 3, 2, 3, 1), 3)
    model, layers = locality.srp(trace, 2)
    assert model.f1 == pytest.approx(search(trace, 2), abs=1e-12) and len(layers) == 2
    for l, layer in enumerate(layers):
        assert layer.f1 == pytest.approx(search(make(trace.experts_NLK[:, l : l + 1], 3), 2), abs=1e-12)


def test_srp_by_hand():
    """Tokens a a b in segments of 2: {a, a}, {a, b}. Holding a in the first: 2 right of 2 held; 4 choices in all: F1 = 2*2/(2+4).
    Holding a and b in the second too: 4 right of 6 held: F1 = 2*4/(6+4), better. It holds 3 experts where the model chooses 2."""
    model, _ = locality.srp(make(one_layer(0, 0, 1), 3), 2)
    assert (model.f1, model.size_ratio, model.threshold) == (0.8, 1.5, 1)


def test_srp_is_one_where_nothing_changes_and_no_segment_crosses_sequences():
    still = make(np.tile(one_layer([1, 3]), (8, 1, 1)), 4)
    assert locality.srp(still, 4)[0] == locality.SegmentRouting(f1=1.0, size_ratio=1.0, threshold=4)
    two = make(one_layer(*[[0, 1]] * 4, *[[2, 3]] * 4), 4, sequence=[0] * 4 + [1] * 4)
    assert locality.srp(two, 4)[0].f1 == 1.0
    assert locality.srp(make(two.experts_NLK, 4), 4)[0].f1 < 1.0


def test_absent_rows_are_left_out_and_too_long_segments_refused():
    experts = np.tile(one_layer([1, 3]), (8, 2, 1))
    experts[:3, 1] = ABSENT
    model, layers = locality.srp(make(experts, 4), 4)
    assert model.f1 == layers[1].f1 == 1.0
    with pytest.raises(TraceError, match="no segment of m=6"):
        locality.srp(make(experts, 4), 6)
    with pytest.raises(TraceError, match="m=0"):
        locality.srp(make(experts, 4), 0)


# --- segment cache best hit rate --------------------------------------------------------------------------------------

def plain_sch(trace, m, ratio):
    """One cache per layer, in words: lists and sorts."""
    K, hits, asked = trace.meta.top_k, 0, 0
    for s in np.unique(trace.sequence):
        rows = np.flatnonzero(trace.sequence == s)
        for l in range(trace.num_layers):
            sets = [set(trace.experts_NLK[n, l].tolist()) for n in rows]
            cache, used = set(), {}
            for t, now in enumerate(sets):
                hits, asked = hits + len(cache & now), asked + K
                used |= dict.fromkeys(now, t)
                others = sorted(cache - now, key=lambda e: (sum(e in later for later in sets[t + 1 : t + 1 + m]), used[e]), reverse=True)  # noqa: B023
                cache = now | set(others[: round(ratio * K) - K])
    return hits / asked


@pytest.mark.parametrize("seed", range(5))
def test_sch_is_what_the_definition_says(seed):
    rng = np.random.default_rng(seed)
    trace = make(drawn(rng, 60, 3, 8, 2), 8, sequence=np.repeat([0, 1, 2], [30, 1, 29]))
    for m, ratio in ((1, 1.0), (4, 1.5), (16, 2.0), (16, 4.0)):
        assert locality.sch(trace, m, ratio, "layer") == pytest.approx(plain_sch(trace, m, ratio), abs=1e-12)
        one = make(trace.experts_NLK[:, :1], 8, sequence=trace.sequence)
        assert locality.sch(one, m, ratio, "global") == locality.sch(one, m, ratio, "layer")


def test_sch_by_hand():
    """a b a c a b with two places. After b, both stay; at c one of {a, b} goes: the next two tokens are a, b, once each, and b was used
    longer ago, so b goes and a hits again: a at the third token, a at the fifth; b misses."""
    trace = make(one_layer(0, 1, 0, 2, 0, 1), 3)
    assert locality.sch(trace, 2, 2.0, "global") == pytest.approx(2 / 6)
    assert locality.sch(trace, 2, 3.0, "global") == pytest.approx(3 / 6)   # only the first uses miss


def test_no_cache_beats_belady_and_one_that_holds_all_misses_only_first_uses():
    trace = make(drawn(np.random.default_rng(1), 120, 2, 8, 2), 8, sequence=np.repeat([0, 1], 60))
    for ratio in (1.0, 2.0, 3.0):
        rates = locality.hit_rates(trace, ratio)
        assert rates["lru"] <= rates["belady"] + 1e-12 and locality.sch(trace, 16, ratio, "layer") <= rates["belady"] + 1e-12
    full = locality.hit_rates(trace, 4.0)
    assert full["lru"] == full["belady"] == locality.sch(trace, 16, 4.0, "layer")


@pytest.mark.parametrize("ask", [dict(m=0), dict(ratio=0.5), dict(scope="both")])
def test_impossible_caches_are_refused(ask):
    with pytest.raises(TraceError, match="must be at least 1"):
        locality.sch(make(one_layer(0, 1), 3), **ask)


# --- adjacent tokens --------------------------------------------------------------------------------------------------

def test_switch_rate_and_reuse_by_hand():
    """{0,1} {1,0} {1,2} | {1,2}: the order is no switch, the next sequence's first token is not compared."""
    trace = make(one_layer([0, 1], [1, 0], [1, 2], [1, 2]), 4, sequence=[0, 0, 0, 1])
    assert locality.switch_rate(trace) == 0.5 and locality.reuse(trace) == pytest.approx(3 / 4)
    with pytest.raises(TraceError, match="no token follows another"):
        locality.switch_rate(make(one_layer([0, 1]), 4))


def test_token_by_token_takes_passes_and_batches_apart():
    experts = one_layer([0, 1], [2, 3], [1, 2], [3, 0])
    trace = make(experts, 4, starts=[0, 2, 4], phase=[0, 1], sequence=[0, 1, 0, 1])
    single = locality.token_by_token(trace)
    assert single.num_passes == 4 and single.sequence.tolist() == [0, 0, 1, 1] and single.experts_NLK[:, 0].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    single.validate()


def test_one_line_of_a_table():
    line = locality.locality(make(drawn(np.random.default_rng(2), 40, 2, 8, 2), 8))
    assert list(line) == ["srp", "srp_size", "sch_global", "sch", "lru", "belady", "reuse", "switch_rate"] and line["sch"] <= line["belady"]


@needs_public
@pytest.mark.parametrize("file, options, published", [
    ("olmoe/trace_olmoe_299.jsonl", dict(num_experts=64), 0.5091),
    ("bigmoe/qwen.route.csv", {}, 0.5414),
])
def test_real_models_are_in_the_neighbourhood_of_the_published_srp(file, options, published):
    """Other text, few tokens, and for Qwen3 top-6 in place of top-8: a neighbourhood, no replication (arXiv 2505.16056, table 1)."""
    model, _ = locality.srp(traces.read(PUBLIC / file, **options), 16)
    assert model.f1 == pytest.approx(published, abs=0.12)
