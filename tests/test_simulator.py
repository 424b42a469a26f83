"""The compiled event replay against the plain-Python one, and the laws that every replay obeys."""

import math
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
from reference_simulator import Reference

from predmoe import traces
from predmoe.simulator import Cache, Compute, Disk, Prefetch, SimulationError, SimulationWarning, count, replay

MB = 1_000_000


def random_trace(rng, *, layers, experts, k, passes, prefill=True, batch=1, guesses=0, skew=1.0):
    """Zipf-like routing with some repetition; a prefill pass of several tokens first, then `batch` sequences side by side."""
    popularity = [1.0 / (e + 1) ** skew for e in range(experts)]
    draw = lambda: sorted(range(experts), key=lambda e: rng.random() ** (1 / popularity[e]), reverse=True)[:k]  # noqa: E731
    sizes = [rng.randint(2, 4)] * prefill + [rng.randint(1, batch) for _ in range(passes)]
    phase = [0] * prefill + [1] * passes
    sequence, rows = [], []
    for s, size in enumerate(sizes):
        of = [0] * size if phase[s] == 0 else list(range(size))
        for q in of:
            same = rows and rng.random() < 0.5
            rows.append([row if same and rng.random() < 0.7 else draw() for row in (rows[-1] if same else [None] * layers)])
            rows[-1] = [row or draw() for row in rows[-1]]
            sequence.append(q)
    meta = traces.Meta(model="random", num_experts=experts, top_k=k, layers=range(layers), expert_bytes=[rng.choice([1, 2, 3]) * MB for _ in range(layers)])
    predictions = []
    for h in range(1, layers + 1) if guesses else ():
        ids = np.full((len(rows), layers, guesses), -1)
        scores = np.zeros(ids.shape)
        for n in range(len(rows)):
            for l in range(layers):
                held = rng.randint(0, guesses)
                ids[n, l, :held] = rng.sample(range(experts), held)
                scores[n, l, :held] = sorted((rng.random() for _ in range(held)), reverse=True)
        predictions.append(("guess", traces.Prediction(h, ids, scores)))
    return traces.build(meta, rows, starts=np.cumsum([0, *sizes]), phase=phase, sequence=sequence, predictions=predictions)


def scenario(seed):
    """A trace and settings drawn over all options."""
    rng, extras = random.Random(seed), random.Random(f"{seed} extras")
    layers, experts = rng.randint(2, 4), rng.randint(3, 7)
    k = rng.randint(1, min(3, experts - 1))
    trace = random_trace(rng, layers=layers, experts=experts, k=k, passes=rng.randint(3, 9), prefill=rng.random() < 0.5, batch=rng.choice([1, 1, 3]),
                         guesses=min(experts, k + 2))  # fmt: skip
    scope = rng.choice(["global", "layer"])
    policy = rng.choice(["lru", "lru", "fifo", "lfu", "lfru", "least-stale", "belady", "static"])
    slots = rng.randint(k, experts if scope == "layer" else layers * experts)
    pinned = rng.choice([0, 0, max(slots - k, 0) // 2])
    room = dict(slots=slots) if rng.random() < 0.6 else dict(bytes=slots * 3 * MB)
    cache = Cache(**room, policy=policy, scope=scope, pinned=pinned, streaming=True)
    lanes = rng.choice([1, 1, 2, 4])
    table = rng.choice([1.0, 5.0, (2.0, 3.0, 3.5), math.inf])
    disk = Disk(latency_ms=rng.choice([0.0, 0.1, 1.0]), gb_per_s=table, lanes=lanes, noise=rng.choice([0.0, 0.3]), seed=seed, issue_ms=extras.choice([0.0, 0.3]))
    compute = Compute(attention_ms=rng.choice([0.0, 0.7, tuple(rng.random() for _ in range(layers))]), expert_ms=rng.choice([0.1, 0.9]),
                      shared_ms=rng.choice([0.0, 0.2]), head_ms=rng.choice([0.0, 0.5]), extra_token=rng.choice([0.0, 0.3]), overlap=rng.random() < 0.4, fresh_ms=extras.choice([0.0, 0.4]))  # fmt: skip
    prefetch = None
    if rng.random() < 0.85:
        cross = rng.random() < 0.5
        furthest = layers - 1 + cross
        source = rng.choice(["oracle", "guess", "guess"])
        horizon = rng.choice([rng.randint(1, furthest), tuple(rng.sample(range(1, furthest + 1), rng.randint(1, furthest)))])
        prefetch = Prefetch(source=source, horizon=horizon, budget=rng.randint(0, min(2, experts - k)), cross_token=cross, expire=rng.random() < 0.7,
                            threshold=rng.choice([None, 0.5]) if source == "guess" else None, cancel=rng.random() < 0.4, promote=rng.random() < 0.6,
                            guard=rng.choice(["none", "none", "idle", "window"]))  # fmt: skip
    return trace, cache, disk, compute, prefetch, rng.choice([0, 0, 2]), rng.choice(["trace", "sequence"])


@pytest.mark.filterwarnings("ignore::predmoe.simulator.SimulationWarning", "ignore::predmoe.traces.TraceWarning")
@pytest.mark.parametrize("block", range(10))
def test_the_compiled_replay_equals_the_plain_python_one(block):
    for seed in range(block * 60, block * 60 + 60):
        trace, cache, disk, compute, prefetch, warmup, cold = scenario(seed)
        ours = replay(trace, cache, disk, compute=compute, prefetch=prefetch, warmup=warmup, cold=cold, timeline=(0, trace.num_passes))
        spans, counts, ledger, timeline = Reference(trace, cache, disk, compute, prefetch, warmup, cold).run()
        spans, counts = spans[warmup:], counts[warmup:]
        np.testing.assert_allclose(np.stack([ours.start_S, ours.end_S, ours.stall_S], 1), spans, rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")
        table = ours.per_pass()
        for name in ("accesses", "resident", "in_flight", "missing", "promoted", "demand_reads", "demand_bytes", "prefetch_reads", "prefetch_bytes"):
            assert table[name].tolist() == [c[name] for c in counts], (seed, name)
        for name in ("issued", "useful", "late", "wasted", "cancelled", "resident", "in_flight", "held_back", "wasted_bytes"):
            assert getattr(ours.ledger, name) == ledger[name], (seed, name)
        key = lambda row: (row[0], *row[3:], row[1])  # noqa: E731: kind, pass, what, start
        mine, theirs = sorted(ours.timeline().itertuples(index=False, name=None), key=key), sorted(timeline, key=key)
        assert [key(row)[:3] for row in mine] == [key(row)[:3] for row in theirs], seed
        np.testing.assert_allclose([row[1:3] for row in mine], [row[1:3] for row in theirs], rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")
        obeys_the_laws(trace, cache, disk, compute, ours)


def obeys_the_laws(trace, cache, disk, compute, outcome):
    """What holds for every replay whatever its settings."""
    outcome.ledger.check()
    hits = outcome.hits
    assert hits["resident"] + hits["in_flight"] + hits["missing"] == outcome.accesses
    assert outcome.stall_ms + outcome.compute_ms == pytest.approx(outcome.total_ms)
    sizes = np.asarray(trace.meta.expert_bytes)
    if len(set(sizes)) == 1:
        assert outcome.read_bytes == outcome.reads * sizes[0]
    if outcome.warmup == 0 and not disk.noise:
        assert outcome.total_ms >= outcome.read_bytes / (max(disk.table) * 1e6) - 1e-9


def test_simulator_and_traces_know_nothing_of_torch():
    code = "import sys, predmoe.simulator, predmoe.traces; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- laws of special machines ---------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def trace():
    return random_trace(random.Random(7), layers=4, experts=12, k=2, passes=60, guesses=4)


def test_a_disk_without_latency_and_limit_never_stalls(trace):
    outcome = replay(trace, Cache(slots=4), Disk(latency_ms=0.0, gb_per_s=math.inf))
    assert outcome.stall_ms == 0 and outcome.read_bytes > 0


def test_a_cache_for_all_experts_has_only_cold_misses(trace):
    outcome = replay(trace, Cache(slots=48), Disk())
    used = len({(l, e) for l in range(4) for e in trace.experts_NLK[:, l].ravel().tolist()})
    assert outcome.hits["missing"] == used == outcome.reads


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "lfru", "least-stale", "belady", "static"])
def test_without_prefetch_the_clock_changes_no_hit(trace, policy, scope):
    cache = Cache(slots=6, policy=policy, scope=scope)
    outcome, counts = replay(trace, cache, Disk(lanes=2)), count(trace, cache)
    assert outcome.hits["missing"] == counts.misses and outcome.read_bytes == counts.read_bytes and outcome.accesses == counts.accesses


@pytest.mark.parametrize("prefetch", [None, Prefetch(source="oracle", horizon=1)])
def test_more_bandwidth_is_never_slower_where_nothing_is_guessed_wrong(trace, prefetch):
    times = [replay(trace, Cache(slots=16), Disk(gb_per_s=b), prefetch=prefetch).total_ms for b in (0.5, 1.0, 2.0, 4.0, 8.0, 1e9)]
    assert times == sorted(times, reverse=True)


def test_compute_and_stall_by_hand():
    """One layer, two experts of 1 MB at 1 GB/s and 0.5 ms latency: a read takes 1.5 ms."""
    meta = traces.Meta(model="hand", num_experts=4, top_k=2, layers=[0], expert_bytes=[MB])
    trace = traces.build(meta, [[[0, 1]], [[0, 2]]])
    machine = Disk(latency_ms=0.5, gb_per_s=1.0), Compute(attention_ms=1.0, expert_ms=0.25, head_ms=2.0)
    outcome = replay(trace, Cache(slots=2), machine[0], compute=machine[1], timeline=(0, 2))
    assert outcome.stall_S.tolist() == [3.0, 1.5] and outcome.token_ms.tolist() == [1 + 3 + 0.5 + 2, 1 + 1.5 + 0.5 + 2]
    assert outcome.hits == {"resident": 1, "in_flight": 0, "missing": 3}
    assert outcome.tokens_per_s == pytest.approx(2000 / (6.5 + 5.0)) and outcome.ttft_ms == 6.5
    assert outcome.timeline().query("kind == 'demand read'").start_ms.tolist() == [1.0, 2.5, 7.5]


def test_experts_computed_as_they_arrive_by_hand():
    """The first of two reads arrives at 1 + 1.5, is computed until 3.5 while the second arrives at 4: stalls 1.5 and 0.5."""
    meta = traces.Meta(model="hand", num_experts=4, top_k=2, layers=[0], expert_bytes=[MB])
    outcome = replay(traces.build(meta, [[[0, 1]]]), Cache(slots=2), Disk(latency_ms=0.5, gb_per_s=1.0), compute=Compute(attention_ms=1.0, expert_ms=1.0, overlap=True))
    assert outcome.stall_S.tolist() == [2.0] and outcome.end_S.tolist() == [5.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_handing_over_and_cold_weights_cost_the_processor_by_hand(overlap):
    """A read of 1.5 ms; 0.25 ms to hand it over, in which a resident expert waits; an expert that has just been read takes 0.5 ms longer."""
    meta = traces.Meta(model="hand", num_experts=4, top_k=2, layers=[0], expert_bytes=[MB])
    trace = traces.build(meta, [[[0, 1]], [[0, 2]], [[0, 2]]])
    disk, compute = Disk(latency_ms=0.5, gb_per_s=1.0, lanes=2, issue_ms=0.25), Compute(attention_ms=1.0, expert_ms=1.0, overlap=overlap, fresh_ms=0.5)
    outcome = replay(trace, Cache(slots=2), disk, compute=compute)
    # two reads at once take 0.5 + 2; both fresh. Then the hit is computed at 1.25..2.25, the read is there at 2.5. Then nothing is read
    assert outcome.token_ms.tolist() == pytest.approx([1 + 2.5 + 3.0, 1 + 1.5 + (1.5 if overlap else 2.5), 1 + 2.0])
    assert outcome.stall_S.tolist() == pytest.approx([2.25, 0.25 if overlap else 1.25, 0.0])
    plain = replay(trace, Cache(slots=2), Disk(latency_ms=0.5, gb_per_s=1.0, lanes=2), compute=Compute(attention_ms=1.0, expert_ms=1.0, overlap=overlap))
    assert outcome.read_bytes == plain.read_bytes and plain.token_ms.sum() < outcome.token_ms.sum()


def two_layers(*rows, guess=None):
    """Two layers of four experts, top-1; `guess` per token is what layer 0 predicts for layer 1."""
    meta = traces.Meta(model="hand", num_experts=4, top_k=1, layers=[0, 1], expert_bytes=[MB, MB])
    predictions = []
    if guess is not None:
        ids = np.array([[[g], [-1]] for g in guess])
        predictions = [("p", traces.Prediction(1, ids, np.ones(ids.shape)))]
    return traces.build(meta, [[[a], [b]] for a, b in rows], predictions=predictions)


MACHINE = dict(disk=Disk(latency_ms=0.0, gb_per_s=1.0), compute=Compute(attention_ms=2.0, expert_ms=1.0))   # a read takes 1 ms


def test_a_right_guess_hides_its_read():
    """Layer 0: attention 2, demand 1, expert 1; the guess for layer 1 is read meanwhile (1 ms of the 3 until its router)."""
    outcome = replay(two_layers((0, 0), guess=[0]), Cache(slots=4), **MACHINE, prefetch=Prefetch(source="p"), timeline=(0, 1))
    assert outcome.ledger.useful == 1 == outcome.ledger.issued and outcome.stall_ms == 1.0 and outcome.total_ms == 2 + 1 + 1 + 2 + 1
    assert outcome.prefetches_read().values.tolist() == [[0, 4]]   # pass 0, layer 1's expert 0
    assert outcome.energy_j(2e-6) == 2 * 2.0
    with pytest.raises(SimulationError, match="joules_per_byte=-1.0"):
        outcome.energy_j(-1.0)
    assert outcome.summary(joules_per_byte=2e-6)["energy_j"] * outcome.tokens == pytest.approx(4.0) and "energy_j" not in outcome.summary()
    assert outcome.percentile_ms(0) <= outcome.percentile_ms(100)
    for q in (-1, 100.5, 200, float("nan"), True, "50"):
        with pytest.raises(SimulationError, match="q="):
            outcome.percentile_ms(q)


def test_a_started_wrong_guess_delays_the_demand():
    """A slow guess (10 ms) is on the disk when layer 1 asks at 2+10+1+2 = 15, and ends at 22: the demand waits from 15 to 32."""
    outcome = replay(two_layers((0, 0), guess=[3]), Cache(slots=4), Disk(latency_ms=9.0, gb_per_s=1.0), compute=MACHINE["compute"], prefetch=Prefetch(source="p"))
    assert outcome.stall_S.tolist() == [10.0 + 17.0] and outcome.ledger.resident == 1
    assert replay(two_layers((0, 0)), Cache(slots=4), Disk(latency_ms=9.0, gb_per_s=1.0), compute=MACHINE["compute"]).stall_S.tolist() == [20.0]


def test_waste_is_judged_per_residence():
    """Expert 3 of layer 1 is guessed, evicted unused, guessed again and evicted again: two wasted reads, though one is used in the end."""
    trace = two_layers((0, 0), (0, 1), (0, 0), (0, 3), guess=[3, -1, 3, -1])
    outcome = replay(trace, Cache(slots=1, scope="layer"), **MACHINE, prefetch=Prefetch(source="p"))
    assert (outcome.ledger.issued, outcome.ledger.wasted, outcome.ledger.wasted_bytes) == (2, 2, 2 * MB)


def test_a_queued_guess_expires_or_is_promoted():
    """At 9 ms a read the second guess of layer 0 is still queued when layer 1 asks: promoted if wanted, cancelled if not."""
    meta = traces.Meta(model="hand", num_experts=4, top_k=1, layers=[0, 1], expert_bytes=[MB, MB])
    for wanted, fate in ((2, "late"), (0, "cancelled")):
        ids = np.array([[[1, 2], [-1, -1]]])
        trace = traces.build(meta, [[[0], [wanted]]], predictions=[("p", traces.Prediction(1, ids, np.array([[[1.0, 0.5]] * 2])))])
        outcome = replay(trace, Cache(slots=4), Disk(latency_ms=8.0, gb_per_s=1.0), compute=MACHINE["compute"], prefetch=Prefetch(source="p", budget=1))
        assert outcome.ledger.issued == 2 and getattr(outcome.ledger, fate) == 1 and outcome.promoted == (wanted == 2)


@pytest.mark.parametrize("expire", [True, False])
@pytest.mark.parametrize("promote, read_before", [(True, 0), (False, 2)])
def test_a_demanded_guess_jumps_the_queue_or_waits_its_turn(promote, read_before, expire):
    """Layer 0 is done at 2 + 9 + 1 = 12; its guesses 1, 2, 3, 0 of layer 1 are queued from 2 on, behind the demand. 1 is on the disk from 11 to 20
    when layer 1 asks for 0 at 14. Promoted, 0 is read from 20 to 29; else 2 and 3 come first, unless they expire, which the awaited 0 does not."""
    meta = traces.Meta(model="hand", num_experts=4, top_k=1, layers=[0, 1], expert_bytes=[MB, MB])
    guess = traces.Prediction(1, np.array([[[1, 2, 3, 0], [-1] * 4]]), np.array([[[4.0, 3.0, 2.0, 1.0]] * 2]))
    trace = traces.build(meta, [[[0], [0]]], predictions=[("p", guess)])
    outcome = replay(trace, Cache(slots=8), Disk(latency_ms=8.0, gb_per_s=1.0), compute=MACHINE["compute"], timeline=(0, 1),
                     prefetch=Prefetch(source="p", budget=3, promote=promote, expire=expire))  # fmt: skip
    waited = 6 + 9 * (1 + (0 if expire else read_before))
    assert outcome.stall_S.tolist() == [9 + waited] and outcome.promoted == promote and outcome.ledger.late == 1
    assert outcome.ledger.cancelled == (2 if expire else 0) and outcome.hits == {"resident": 0, "in_flight": 0, "missing": 2}
    kinds = outcome.timeline().query("what == 4").kind.tolist()   # key of layer 1's expert 0
    assert kinds == ["demand read" if promote else "prefetch read"]


def test_a_prefetch_evicts_nobody_of_the_current_set():
    trace = two_layers((0, 0), guess=[1])
    outcome = replay(trace, Cache(slots=1), **MACHINE, prefetch=Prefetch(source="p"))
    assert outcome.ledger.wasted == 1 and outcome.hits["missing"] == 2   # no room on arrival


def test_the_warm_up_is_in_the_state_and_in_no_statistic(trace):
    whole = replay(trace, Cache(slots=16), Disk(), prefetch=Prefetch(source="guess"))
    rest = replay(trace, Cache(slots=16), Disk(), prefetch=Prefetch(source="guess"), warmup=20)
    assert (rest.end_S == whole.end_S[20:]).all() and rest.accesses == whole.counts[20:, 0].sum() and rest.ledger.issued < whole.ledger.issued


def test_the_guard_is_seen_when_it_stops_everything(trace):
    with pytest.warns(SimulationWarning, match="nothing was issued; the guard 'window' held back"):
        replay(trace, Cache(slots=16), Disk(latency_ms=1e6), prefetch=Prefetch(source="guess", guard="window"))


@pytest.mark.parametrize("size_ms, issued", [(0.9, 4), (1.0, 3), (1.5, 2), (2.1, 1), (4.1, 0)])
def test_the_window_guard_counts_what_fits_between_two_routers_and_no_demand(size_ms, issued):
    """4 ms lie between the two routers, one read takes 0.1 ms and its bytes. The four reads that layer 0 demands are over
    before its experts are computed, so they leave the window whole."""
    meta = traces.Meta(model="hand", num_experts=8, top_k=4, layers=[0, 1], expert_bytes=[int(size_ms * MB)] * 2)
    guess = np.array([[[4, 5, 6, 7], [-1] * 4]])
    scores = np.array([[[4.0, 3.0, 2.0, 1.0]] * 2])
    trace = traces.build(meta, [[[0, 1, 2, 3], [4, 5, 6, 7]]], predictions=[("p", traces.Prediction(1, guess, scores))])
    machine = dict(disk=Disk(latency_ms=0.1, gb_per_s=1.0), compute=Compute(attention_ms=1.0, expert_ms=0.5, shared_ms=1.0))
    settings = dict(cache=Cache(slots=8), prefetch=Prefetch(source="p", guard="window"), **machine)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if issued else "ignore", SimulationWarning)
        outcome = replay(trace, **settings)
    assert (outcome.ledger.issued, outcome.ledger.held_back, outcome.ledger.useful) == (issued, 4 - issued, issued)
    assert outcome.total_ms == pytest.approx(8.0 + (8 - issued) * (size_ms + 0.1))


def test_perfect_overlap_is_max_not_sum():
    """Prefetching creates no bandwidth: with compute C and disk D per token a perfect oracle is bounded by max(C, D)."""
    trace = random_trace(random.Random(3), layers=8, experts=64, k=2, passes=40, prefill=False, skew=0.0)
    machine = dict(compute=Compute(attention_ms=1.0, expert_ms=0.5))
    cold, ahead = (replay(trace, Cache(slots=20), Disk(gb_per_s=1.0, latency_ms=0.0), prefetch=p, **machine) for p in (None, Prefetch(horizon=1, cross_token=True)))
    assert max(ahead.compute_ms, ahead.read_bytes / 1e6) - 1e-6 <= ahead.total_ms < cold.total_ms


# --- bad input ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make, message", [
    (lambda: Cache(slots=0), "at least one slot"),
    (lambda: Cache(), "either slots or bytes"),
    (lambda: Cache(slots=4, bytes=4), "either slots or bytes"),
    (lambda: Cache(slots=4, policy="mru"), "policy='mru' is unknown; choose one of lru"),
    (lambda: Disk(latency_ms=-1.0), "latency_ms=-1.0 must be a number of at least 0"),
    (lambda: Disk(gb_per_s=0.0), "must be positive"),
    (lambda: Disk(gb_per_s=float("nan")), "must be positive"),
    (lambda: Compute(expert_ms=-0.1), "expert_ms=-0.1"),
    (lambda: Compute(attention_ms=(1.0, float("nan"))), "attention_ms=nan"),
    (lambda: Prefetch(horizon=0), "at least 1"),
    (lambda: Prefetch(horizon=(1, 1)), "different"),
    (lambda: Prefetch(guard="maybe"), "guard='maybe' is unknown"),
    (lambda: Prefetch(horizon=1.5), "horizon=1.5 must be a whole number"),
    (lambda: Cache(slots=2.5), "slots=2.5 must be a whole number"),
    (lambda: Cache(slots=4, pinned=True), "pinned=True must be a whole number"),
    (lambda: Disk.fitted(latency_ms=0.1, peak_gb_per_s=5.0, half_depth=-1.0, lanes=2), "half_depth=-1.0 must be a number of at least 0"),
])
def test_settings_refuse_nonsense(make, message):
    with pytest.raises(SimulationError, match=message):
        make()


@pytest.mark.parametrize("settings, message", [
    (dict(cache=Cache(slots=1)), "1 slots cannot hold one top-2 set"),
    (dict(cache=Cache(slots=4, pinned=3)), "4 slots, 3 of them pinned, cannot hold"),
    (dict(prefetch=Prefetch(horizon=4)), "horizon 4 is beyond the last layer: the trace has 4 MoE layers, so at most 3"),
    (dict(prefetch=Prefetch(source="ghost")), "no predictor 'ghost' at horizon 1; it holds guess at horizons 1, 2, 3, 4"),
    (dict(prefetch=Prefetch(source="guess", budget=9)), "4 guesses per layer; top-2 and a budget of 9 need 11"),
    (dict(warmup=61), "must leave some"),
    (dict(compute=Compute(attention_ms=(1.0, 2.0))), "2 entries for 4 MoE layers"),
    (dict(timeline=(0, 99)), "must be passes"),
])
def test_a_replay_that_cannot_be_run_says_why(trace, settings, message):
    with pytest.raises((SimulationError, traces.TraceError), match=message):
        replay(trace, **{"cache": Cache(slots=16), "disk": Disk(), **settings})


@pytest.mark.filterwarnings("ignore::predmoe.simulator.SimulationWarning")
def test_sequences_interleaved_in_one_pass_guess_across_tokens_from_their_last_token_only():
    meta = traces.Meta(model="hand", num_experts=6, top_k=1, layers=[0, 1], expert_bytes=[MB, MB])
    ids = np.array([[[e], [e]] for e in (0, 1, 2, 3, 4, 5)])
    trace = traces.build(meta, ids, starts=[0, 4, 6], phase=[0, 1], sequence=[0, 1, 0, 1, 0, 1], predictions=[("p", traces.Prediction(2, ids, np.ones(ids.shape)))])
    prefetch = Prefetch(source="p", horizon=2, cross_token=True)
    cache = Cache(slots=2, streaming=True)
    ours, (_, _, ledger, _) = replay(trace, cache, Disk(), prefetch=prefetch), Reference(trace, cache, Disk(), Compute(), prefetch).run()
    assert {name: getattr(ours.ledger, name) for name in ("issued", "useful", "late", "wasted")} == {name: ledger[name] for name in ("issued", "useful", "late", "wasted")}


@pytest.mark.parametrize("make, message", [
    (lambda: Cache(slots="4"), "slots='4' must be a whole number"),
    (lambda: Disk(latency_ms="1"), "latency_ms='1' must be a number"),
    (lambda: Disk(gb_per_s="12"), "gb_per_s='12' must be a number"),
    (lambda: Disk(gb_per_s=10**400), "gb_per_s must be a number below"),
    (lambda: Disk(noise=0.1, seed=-1), "seed=-1 must be a whole number"),
    (lambda: Compute(attention_ms="12"), "attention_ms='12' must be a number"),
    (lambda: Compute(overlap="no"), "overlap='no' must be True or False"),
    (lambda: Prefetch(horizon=(1, "a")), "horizon='a' must be a whole number"),
    (lambda: Prefetch(expire=None), "expire=None must be True or False"),
    (lambda: Prefetch(source="p", threshold="x"), "threshold='x' must be a number"),
])
def test_settings_of_a_wrong_type_are_refused(make, message):
    with pytest.raises(SimulationError, match=message):
        make()


def test_numbers_of_numpy_are_numbers():
    assert Disk(gb_per_s=np.int64(5)).table == (5.0,) == Disk(gb_per_s=np.float32(5)).table and Compute(attention_ms=np.int64(2)).attention_ms == 2.0


@pytest.mark.parametrize("settings, message", [
    (dict(disk=Disk(latency_ms=1e308)), "lose their digits"),
    (dict(disk=Disk(gb_per_s=1e-320)), "lose their digits"),
    (dict(warmup=1.5), "warmup=1.5 must leave some"),
    (dict(timeline=(0.0, 2.0)), "must be passes"),
    (dict(cache=Cache(slots=16, pinned=2), usage=np.ones((12, 4))), "usage has the shape"),
    (dict(cache=Cache(slots=16, pinned=2), usage=np.full((4, 12), np.nan)), "usage must be numbers"),
])
def test_a_replay_with_extremes_says_why(trace, settings, message):
    with pytest.raises(SimulationError, match=message):
        replay(trace, **{"cache": Cache(slots=16), "disk": Disk(), **settings})


def test_usage_may_be_shares(trace):
    shares = np.random.default_rng(0).random((4, 12))
    same = [count(trace, Cache(slots=16, pinned=8), usage=usage).misses for usage in (shares, np.round(shares * 1e9).astype(np.int64))]
    assert same[0] == same[1]


def test_where_nothing_takes_time_the_rate_is_infinite(trace):
    outcome = replay(trace, Cache(slots=16), Disk(latency_ms=0.0, gb_per_s=math.inf), compute=Compute(attention_ms=0.0, expert_ms=0.0))
    assert outcome.summary()["tok_s"] == math.inf


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("threshold, issued", [(0.5, 1), (-1e6, 1), (1e6, 0), (1e300, 0)])
@pytest.mark.filterwarnings("ignore::predmoe.simulator.SimulationWarning")
def test_a_threshold_beyond_half_precision(threshold, issued):
    meta = traces.Meta(model="hand", num_experts=4, top_k=1, layers=[0, 1], expert_bytes=[MB, MB])
    half = traces.Prediction(1, np.array([[[1], [-1]]]), np.array([[[0.5], [0.0]]], np.float16))
    trace = traces.build(meta, [[[0], [1]]], predictions=[("p", half)])
    assert replay(trace, Cache(slots=8), Disk(), prefetch=Prefetch(source="p", threshold=threshold)).ledger.issued == issued
