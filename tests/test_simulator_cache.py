"""Cache policies: by hand, against libcachesim, against a plain OrderedDict, and against what the public traces' sources report."""

import csv
import json
import random
from collections import OrderedDict

import numpy as np
import pytest
from conftest import PUBLIC, needs_public
from hypothesis import given, settings
from hypothesis import strategies as st

from predmoe import traces
from predmoe.simulator import Cache, SimulationError, count, count_keys, counting, uses

MIB = 2**20
POLICIES = ("lru", "fifo", "lfu", "lfru", "least-stale", "belady")


def small(sets, experts=8, layers=1, sizes=None):
    """A trace of decode tokens from nested lists [token][layer][k]."""
    sets = np.asarray(sets)
    meta = traces.Meta(model="t", num_experts=experts, top_k=sets.shape[2], layers=range(layers), expert_bytes=sizes or [1] * layers)
    return traces.build(meta, sets)


# --- by hand --------------------------------------------------------------------------------------------------------

TOY = [[[0, 1]] * 3, [[0, 2]] * 3, [[0, 1]] * 3, [[0, 3]] * 3, [[0, 1]] * 3]   # 5 steps, 3 layers of 4 experts, top-2


def test_the_toy_trace_by_hand():
    """Two slots a layer: 0 stays, the other slot is missed every time: 2 + 4 x 1 misses in each of 3 layers."""
    counts = count(small(TOY, experts=4, layers=3), Cache(slots=2, scope="layer"))
    assert (counts.hits, counts.misses, counts.evictions) == (12, 18, 12)
    assert counts.per_pass[:, 0].tolist() == [6] * 5 and counts.per_pass[:, 1].tolist() == [0, 3, 3, 3, 3]


def keys(text):
    return np.array([ord(c) - ord("a") for c in text])


@pytest.mark.parametrize("slots, hits", [(1, 0), (2, 2), (3, 4)])
def test_lru_by_hand(slots, hits):
    assert 7 - count_keys(keys("abcbcab"), slots) == hits


@pytest.mark.parametrize("policy, text, misses", [
    ("lru", "abacab", 4),      # c evicts b, so the last b is missed
    ("fifo", "abacab", 5),     # c evicts a, a evicts b, b evicts c
    ("lfu", "aabcbc", 5),      # a is never evicted: b, c, b and c miss
    ("lfru", "aabbbcaa", 4),   # c evicts a (2 uses against 3), a evicts c
    ("belady", "abcab", 4),    # c evicts b, which is used last
])
def test_policies_by_hand(policy, text, misses):
    assert count_keys(keys(text), 2, policy) == misses


def test_lfu_forgets_and_lfru_remembers_what_was_evicted():
    """c evicts a (3 uses against 4) and a comes back for c. Then lfu counts 1 use of a, so c and a evict each other; lfru 4, so b leaves."""
    assert count_keys(keys("aaabbbbca"), 2, "lfu") == count_keys(keys("aaabbbbca"), 2, "lfru") == 4
    assert count_keys(keys("aaabbbbcacac"), 2, "lfu") == 7 and count_keys(keys("aaabbbbcacac"), 2, "lfru") == 5


def test_least_stale_by_hand():
    """Three layers with one expert each and two slots: LRU evicts what comes next, Least-Stale what is furthest ahead."""
    trace = small([[[0], [0], [0]]] * 4, layers=3)
    assert count(trace, Cache(slots=2)).hits == 0
    assert count(trace, Cache(slots=2, policy="least-stale")).hits == 3


def test_atomic_and_sequential_differ_by_hand():
    """Slots a, b; the set {c, a}: atomically a is a hit; in sequence c evicts a first."""
    trace = small([[[0, 1]], [[2, 0]]])
    assert count(trace, Cache(slots=2)).hits == 1
    assert count(trace, Cache(slots=2), replay="sequential").hits == 0


def test_a_global_lru_smaller_than_one_cycle_of_layers_never_hits():
    trace = small([[[0, 1]] * 6] * 10, layers=6)
    assert count(trace, Cache(slots=10)).hits == 0 and count(trace, Cache(slots=11), replay="sequential").hits == 0
    assert count(trace, Cache(slots=12)).hits == 108   # all but the first token's


def test_bytes_count_each_layers_own_size():
    trace = small([[[0], [0]], [[1], [1]], [[0], [0]]], layers=2, sizes=[10, 30])
    counts = count(trace, Cache(bytes=50))
    assert counts.read_bytes == 3 * 40 and count(trace, Cache(bytes=80)).read_bytes == 80
    assert counts.hits == 0


def test_a_prefill_is_one_batch_per_layer():
    """Four tokens that use 0,1 / 0,1 / 2,3 / 0,3: four accesses; the last appearances rank 1 < 2 < 0 < 3."""
    meta = traces.Meta(model="t", num_experts=8, top_k=2, layers=[0], expert_bytes=[1])
    prefill = [[[0, 1]], [[0, 1]], [[2, 3]], [[0, 3]]]
    trace = traces.build(meta, prefill + [[[4, 0]]], starts=[0, 4, 5], phase=[0, 1])
    counts = count(trace, Cache(slots=3), flags=True)
    assert counts.prefill.accesses == 4 and counts.decode.hits == 1 and counts.hit_NLK[4, 0].tolist() == [False, True]
    trace = traces.build(meta, prefill + [[[1, 2]]], starts=[0, 4, 5], phase=[0, 1])
    assert count(trace, Cache(slots=3), flags=True).hit_NLK[4, 0].tolist() == [False, True]   # 1 did not stay


def test_pinned_experts_are_there_from_the_start_and_stay():
    trace = small([[[0]], [[1]], [[0]], [[2]], [[0]], [[3]]])
    assert count(trace, Cache(slots=2, pinned=1)).hits == 3
    assert count(trace, Cache(slots=2, policy="static")).misses == 2   # 0 and, first of equals, 1
    assert count(trace, Cache(slots=1, policy="static"), usage=np.array([0, 0, 9, 0, 0, 0, 0, 0])).hits == 1


def test_cold_sequences_start_with_an_empty_cache():
    meta = traces.Meta(model="t", num_experts=8, top_k=1, layers=[0], expert_bytes=[1])
    trace = traces.build(meta, [[[0]], [[0]], [[0]], [[0]]], sequence=[3, 3, 1, 1])
    assert count(trace, Cache(slots=1)).hits == 3 and count(trace, Cache(slots=1), cold="sequence").hits == 2


@pytest.mark.parametrize("call, message", [
    (lambda t: count(t, Cache(slots=1)), "1 slots cannot hold one top-2 set"),
    (lambda t: count(t, Cache(bytes=1)), r"1 bytes cannot hold one top-2 set \(2 bytes\)"),
    (lambda t: count(t, Cache(slots=2), replay="both"), "replay='both'"),
    (lambda t: count(t, Cache(slots=2), cold="never"), "cold='never'"),
    (lambda t: count(t, Cache(slots=2, policy="lfru", sample=4)), "sequential replay only"),
    (lambda t: count(t, Cache(slots=2), usage=np.ones(3)), "one count for each of 3 layers x 4 experts"),
    (lambda t: count(t, Cache(slots=2)).prefill, "no prefill pass"),
    (lambda t: count(t, Cache(slots=2, policy="lfru", sample=1 << 63), replay="sequential"), "at most"),
    (lambda t: count(t.passes(0, 1), Cache(slots=2, policy="lfru", sample=-1), replay="sequential"), "sample=-1 must be"),
    (lambda t: count_keys(np.array([-1]), 2), "whole number of 0"),
])
def test_what_cannot_be_counted_says_why(call, message):
    with pytest.raises(SimulationError, match=message):
        call(small(TOY, experts=4, layers=3))


# --- against others -------------------------------------------------------------------------------------------------

sequences = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=300),                                            # random
    st.lists(st.integers(0, 900).map(lambda x: int((x / 30) ** 0.5 * x / 30)), min_size=1, max_size=300),  # skewed
    st.tuples(st.integers(1, 20), st.integers(1, 15)).map(lambda t: list(range(t[0])) * t[1]),          # looping
)


def theirs(sequence, slots, policy):
    libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed: pip install --no-deps libcachesim==0.3.5, as make test does")
    cache = getattr(libcachesim, {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "belady": "Belady"}[policy])(slots, hashpower=12)
    later, following = {}, []
    for i in reversed(range(len(sequence))):
        following.append(later.get(sequence[i], np.iinfo(np.int64).max))
        later[sequence[i]] = i
    misses = 0
    for key, next_use in zip(sequence, reversed(following)):
        request = libcachesim.Request(obj_size=1, op=libcachesim.ReqOp.OP_GET, obj_id=key + 1, next_access_vtime=next_use)
        misses += not cache.get(request)
    return misses


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "belady"])
@settings(max_examples=100, deadline=None)
@given(sequence=sequences, slots=st.integers(1, 24))
def test_misses_equal_libcachesims(policy, sequence, slots):
    assert count_keys(np.array(sequence), slots, policy) == theirs(sequence, slots, policy)


def plain_lru(trace, slots, scope):
    """Misses of an event-atomic LRU, an OrderedDict that starts empty."""
    caches = [OrderedDict() for _ in range(trace.num_layers if scope == "layer" else 1)]
    misses = 0
    for token in trace.experts_NLK.tolist():
        for layer, chosen in enumerate(token):
            cache = caches[layer if scope == "layer" else 0]
            for e in chosen:
                misses += (layer, e) not in cache
                cache[layer, e] = True
                cache.move_to_end((layer, e))
            while len(cache) > slots:
                cache.popitem(last=False)
    return misses


def random_sets(seed, tokens=60, layers=3, experts=10, k=3):
    rng = random.Random(seed)
    weights = [1 / (e + 1) for e in range(experts)]
    pick = lambda: sorted(range(experts), key=lambda e: rng.random() ** (1 / weights[e]), reverse=True)[:k]  # noqa: E731
    return small([[pick() for _ in range(layers)] for _ in range(tokens)], experts=experts, layers=layers)


@pytest.mark.parametrize("scope, slots", [("global", 9), ("global", 17), ("layer", 3), ("layer", 6)])
@pytest.mark.parametrize("seed", range(5))
def test_atomic_lru_equals_a_plain_one(seed, scope, slots):
    trace = random_sets(seed)
    assert count(trace, Cache(slots=slots, scope=scope)).misses == plain_lru(trace, slots, scope)


@pytest.mark.parametrize("replay", ["atomic", "sequential"])
@pytest.mark.parametrize("scope", ["global", "layer"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(3, 20))
def test_belady_is_never_worse_than_any_policy_that_starts_with_the_same_residents(replay, scope, seed, slots):
    """None, or the same pinned ones, which leave room for a set of three at least."""
    trace = random_sets(seed)
    for pinned in {0, (slots - 3) // 2}:
        misses = {policy: count(trace, Cache(slots=slots, scope=scope, policy=policy, pinned=pinned), replay=replay).misses for policy in POLICIES}
        assert misses["belady"] == min(misses.values()), (pinned, misses)


def preloaded_and_used(trace, slots, scope):
    """Of the experts that `static` loads before the start, how many the trace asks for: what a cold start would have read for them."""
    groups = uses(trace).reshape(trace.num_layers if scope == "layer" else 1, -1)
    return int((np.sort(groups)[:, ::-1][:, :slots] > 0).sum())


@pytest.mark.parametrize("replay", ["atomic", "sequential"])
@pytest.mark.parametrize("scope", ["global", "layer"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(3, 9))
def test_belady_against_a_preloaded_cache(replay, scope, seed, slots):
    """From the same preload and without room for more, Belady is that cache. Cold, with room for one more set, which a static cache has read and
    dropped, it could do as that cache does and read the preload on its way, so it never reads more than the static cache and its preload."""
    trace = random_sets(seed)
    static = count(trace, Cache(slots=slots, scope=scope, policy="static"), replay=replay).misses
    assert count(trace, Cache(slots=slots, scope=scope, policy="belady", pinned=slots, streaming=True), replay=replay).misses == static
    cold = count(trace, Cache(slots=slots + trace.meta.top_k, scope=scope, policy="belady"), replay=replay).misses
    assert cold <= static + preloaded_and_used(trace, slots, scope)


def test_a_preloaded_cache_can_beat_belady_that_starts_cold_or_must_keep_what_it_reads():
    """The exception by hand, one slot: of a b a b a, `static` holds a from the start and reads b twice; Belady reads all five."""
    assert [count_keys(keys("ababa"), 1, policy) for policy in ("static", "belady")] == [2, 5]


@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_a_larger_cache_never_misses_more(policy):
    trace = random_sets(1)
    misses = [count(trace, Cache(slots=slots, policy=policy)).misses for slots in range(3, 31)]
    assert misses == sorted(misses, reverse=True) and misses[-1] == (uses(trace) > 0).sum()


def test_a_sampled_eviction_draws_as_python_does():
    rng = random.Random(5)
    trace = random_sets(3, tokens=200, experts=40)
    cache, frequency, misses, now = OrderedDict(), {}, 0, 0
    for token in trace.experts_NLK.tolist():
        for layer, chosen in enumerate(token):
            for e in chosen:
                key, now = (layer, e), now + 1
                frequency[key] = frequency.get(key, 0) + 1
                if key in cache:
                    cache.move_to_end(key)
                else:
                    misses += 1
                    if len(cache) >= 60:
                        drawn = rng.sample(list(cache), 8)
                        del cache[min(drawn, key=lambda k: (frequency[k], cache[k]))]
                cache[key] = now
    assert count(trace, Cache(slots=60, policy="lfru", sample=8, seed=5), replay="sequential").misses == misses


def test_a_huge_sample_is_all_residents_and_draws_nothing():
    trace, rng = random_sets(0), random.Random(0)
    before = rng.getstate()
    huge = [count(trace, Cache(slots=9, policy="lfru", sample=sample), replay="sequential", rng=rng).misses for sample in (10**9, 1 << 62)]
    assert huge == [count(trace, Cache(slots=9, policy="lfru"), replay="sequential").misses] * 2 and rng.getstate() == before


def test_many_draws_are_the_same_in_pieces_and_too_many_are_refused(monkeypatch):
    """Python counts the bits of one draw in an int of C, so a long trace needs several."""
    trace = random_sets(0)
    ask = lambda rng: count(trace, Cache(slots=20, policy="lfru", sample=8), replay="sequential", rng=rng).misses  # noqa: E731
    whole, pieces = random.Random(3), random.Random(3)
    expected = ask(whole)
    monkeypatch.setattr(counting, "PIECE", 7)
    assert ask(pieces) == expected and pieces.getstate() == whole.getstate()
    monkeypatch.setattr(counting, "MOST_WORDS", 3 * 540 * 5)
    with pytest.raises(SimulationError, match="sample=8 on 540 accesses .* take a smaller sample, at most 5 here"):
        ask(pieces)


# --- what the sources report ----------------------------------------------------------------------------------------

@needs_public
def test_the_toy_trace_of_its_source():
    with open(PUBLIC / "toy" / "events.csv") as file:
        rows = list(csv.DictReader(file))
    sets = [[[int(e) for e in row["requested_experts"].split()] for row in rows[s * 3 : s * 3 + 3]] for s in range(5)]
    assert sets == TOY
    counts = count(small(sets, experts=4, layers=3), Cache(slots=2, scope="layer"), flags=True)
    assert (~counts.hit_NLK).sum(-1).ravel().tolist() == [int(row["misses"]) for row in rows]


@needs_public
def test_qwen_every_residency_flag_is_the_engines_own():
    """Global LRU of 4000 MiB. The engine's timing file counts 20,023.9 MiB in decode, the trace's own byte column 19,938.8:
    each missed expert is three tensors, read in whole pages, one page more than its size."""
    path = PUBLIC / "bigmoe" / "qwen.route.csv"
    trace = traces.read(path)
    with open(path) as file:
        rows = [line.split(",") for line in file if line[0].isdigit()]
    flags = np.array([row[7] != "0" for row in rows if row[1] == "1"]).reshape(128, 48, 6)
    counts = count(trace, Cache(bytes=4000 * MIB), flags=True)
    assert flags.size == 36_864 and (counts.hit_NLK[28:] == flags).all()
    assert round(counts.read_bytes / MIB, 1) == 27_213.7
    assert counts.decode.read_bytes == sum(int(row[8]) for row in rows if row[1] == "1")
    assert round((counts.decode.read_bytes + counts.decode.misses * 3 * 4096) / MIB, 1) == 20_023.9


@needs_public
@pytest.mark.parametrize("theirs, ours, scope", [("lru", "lru", "global"), ("lfu", "lfru", "global")])
def test_qwen_the_published_curve(theirs, ours, scope):
    trace = traces.read(PUBLIC / "bigmoe" / "qwen.route.csv")
    with open(PUBLIC / "bigmoe" / "qwen-curve.csv") as file:
        curve = [row for row in csv.DictReader(file) if row["policy"] == theirs and int(row["budget_mib"]) >= 1000]
    assert len(curve) == 8
    for row in curve:
        counts = count(trace, Cache(bytes=int(row["budget_mib"]) * MIB, policy=ours, scope=scope))
        found = round(100 * counts.hit_rate, 3), round(100 * counts.decode.hit_rate, 3), round(counts.read_bytes / MIB, 1)
        assert found == (float(row["hit_pct_cum"]), float(row["hit_pct_decode"]), float(row["read_mib"])), row


@needs_public
@pytest.mark.parametrize("prompt", ["english_prose", "code", "math"])
@pytest.mark.parametrize("column, policy, scope", [("lru", "lru", "global"), ("equal_lru", "lru", "layer"), ("oracle", "belady", "global"),
                                                   ("equal_oracle", "belady", "layer"), ("fifo", "fifo", "global"), ("lfu", "lfru", "global"),
                                                   ("static_pin", "static", "global")])  # fmt: skip
def test_granite_the_published_page_ins(prompt, column, policy, scope):
    """At 10% a layer has 3 slots for a set of 8: what does not fit is read, used and dropped."""
    trace = traces.read(PUBLIC / "granite" / "moe_expert_trace.json", prompt=prompt)
    trace = trace.passes(1, trace.num_passes)   # the source replays decode only
    published = json.loads((PUBLIC / "granite" / "moe_cache_sim_results.json").read_text())["workloads"][prompt]
    for ratio, cell in published.items():
        slots = cell["budget"] if scope == "global" else round(float(ratio) * 32)
        assert count(trace, Cache(slots=slots, policy=policy, scope=scope, streaming=True)).misses == cell["page_ins"][column], ratio


@needs_public
def test_granite_sequential_replay_misses_a_fifth_more():
    trace = traces.read(PUBLIC / "granite" / "moe_expert_trace.json", prompt="english_prose")
    trace = trace.passes(1, trace.num_passes)
    assert [count(trace, Cache(slots=192), replay=replay).misses for replay in ("atomic", "sequential")] == [6590, 7906]


@needs_public
def test_olmoe_the_published_lfru():
    """As the source's tool replays it: experts in order of layer and id, uses counted over evictions, the worst of 32 drawn at random,
    all from one random.Random(0) that goes on from budget to budget, so that each figure depends on the budgets before it.

    The budgets are published as shares only (about 6, 12.5, 25 and 53% of 1,024 experts). 61, 128, 257 and 544 slots are 0.095, 0.2, 0.4 and
    0.845 GB at the tool's 2.12 bits per weight, and of 58-66, 126-130, 253-259 and 538-547 slots the only ones that give the printed decimals."""
    trace, rng = traces.read(PUBLIC / "olmoe" / "trace_olmoe_299.jsonl", num_experts=64), random.Random(0)
    found = [count(trace, Cache(slots=slots, policy="lfru", sample=32, streaming=True), replay="sequential", rng=rng) for slots in (61, 128, 257, 544)]
    assert [f"{counts.hit_rate:.1%}" for counts in found] == ["22.5%", "34.7%", "52.8%", "80.6%"]


@pytest.fixture(scope="module")
def gpt_oss():
    """The whole trace; (replay, slots) -> hits of each sequence, cold at its start; accesses of each sequence."""
    trace = traces.read(PUBLIC / "gptoss20b" / "gptoss20b_routes.npz")
    per_sequence = lambda counts, column: np.bincount(trace.sequence, weights=counts.per_pass[:, column])  # noqa: E731: a pass is a token
    counted = {(replay, slots): count(trace, Cache(slots=slots, scope="layer"), replay=replay, cold="sequence") for replay in ("atomic", "sequential") for slots in (4, 8, 16)}
    return trace, {key: per_sequence(counts, 1) for key, counts in counted.items()}, per_sequence(counted["atomic", 4], 0)


@needs_public
@pytest.mark.parametrize("replay, published", [("atomic", (44, 66, 89)), ("sequential", (35, 63, 89))])
def test_gpt_oss_the_published_hit_rates(gpt_oss, replay, published):
    """Published are whole percents of 60 sequences drawn from 702, which ones is not said. The hit rate of all 702 is exact, so a published
    figure may differ from it by its rounding, half a point, and by twice the standard error of a draw of 60 without replacement."""
    _, hits, accesses = gpt_oss
    for slots, percent in zip((4, 8, 16), published):
        rate = hits[replay, slots].sum() / accesses.sum()
        residual = (hits[replay, slots] - rate * accesses) / accesses.mean()   # of a ratio estimator
        error = residual.std(ddof=1) * np.sqrt((1 - 60 / 702) / 60)
        assert error < 0.01 and abs(100 * rate - percent) <= 0.5 + 200 * error, (slots, rate, error)


@needs_public
@pytest.mark.parametrize("slots", [4, 8, 16])
def test_gpt_oss_every_hit_of_two_sequences_is_anothers_too(gpt_oss, slots):
    """The shortest and a middling sequence: sequentially libcachesim's LRU, one cache per layer; event-atomically an OrderedDict."""
    trace, hits, accesses = gpt_oss
    for q in np.argsort(accesses, kind="stable")[[0, 100]].tolist():
        rows = np.flatnonzero(trace.sequence == q)
        part = trace.passes(int(rows[0]), int(rows[-1]) + 1)
        assert accesses[q] - hits["atomic", slots][q] == plain_lru(part, slots, "layer")
        assert accesses[q] - hits["sequential", slots][q] == sum(theirs(part.experts_NLK[:, layer].ravel().tolist(), slots, "lru") for layer in range(part.num_layers))
