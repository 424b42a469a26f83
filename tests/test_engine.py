"""The engine gives the resident model's tokens whatever the cache and the prefetch, and the simulator's counts on the trace that it records."""

import math
import os
import threading

import numpy as np
import pytest
import torch
from engine_models import B, NEW, P, house, opened
from tiny_models import their_model

from predmoe.config import ConfigError
from predmoe.engine import Engine, export, foresight
from predmoe.engine.storage import DIRECT
from predmoe.evaluation import NextRouter
from predmoe.predictor import predicted_top_k
from predmoe.simulator import Cache, Compute, Disk, Prefetch, count, replay
from predmoe.simulator.config import POLICIES
from predmoe.traces import DECODE, PREFILL, TraceError

L, E, K = 4, 8, 2   # of lively()


def same_logits(h, engine):
    """Greedy tokens equal the resident model's, over 1,040 tokens, with every logit within 1e-4."""
    seen = []
    tokens = engine.generate(h.prompts, max_new_tokens=NEW, on_logits=seen.append)
    worst = max((a - b).abs().max().item() for a, b in zip(seen, h.logits))
    return tokens == h.tokens and len(seen) == NEW and worst < 1e-4


def counts_of(engine):
    summary = engine.summary()
    return summary.accesses, summary.hits, summary.demand_bytes


CACHES = [dict(slots=slots, policy=policy) for policy in POLICIES for slots in (K, 9)]
CACHES += [dict(slots=3, scope="layer"), dict(slots=K, policy="lfu", scope="layer"), dict(bytes=70_000), dict(slots=8, pinned=5), dict(slots=L * E), dict(slots=1, streaming=True)]


@pytest.mark.parametrize("settings", CACHES, ids=str)
def test_demand_gives_the_models_tokens_and_the_simulators_counts(settings):
    """Exactly, for every policy and budget down to one top-k set, with passes of one token of each of 8 prompts."""
    h, cache = house(), Cache(**settings)
    with opened(h.folder, cache=cache, future=h.trace) as engine:
        assert same_logits(h, engine)
        simulated = count(h.trace, cache)
        assert counts_of(engine) == (simulated.accesses, simulated.hits, simulated.read_bytes)
        assert engine.experts.leaked() == 0 and engine.summary().ledger.issued == 0
        assert engine.summary().read_bytes - engine.summary().preloaded_bytes == engine.summary().demand_bytes
        assert engine.experts.buffers.count <= (cache.slots or 70_000 // 12288) * (L if cache.scope == "layer" else 1) + engine.lanes


@pytest.mark.parametrize("source, horizon, budget", [
    ("next_router", 1, 0), ("next_router", (1, 2), 2), ("next_router", 3, 6), ("linear", 2, 0), ("linear", (1, 2), 1), ("ranking", 1, 2), ("ranking", 2, 0),
    ("oracle", 1, 0), ("oracle", 2, 0), ("oracle", (1, 2, 3), 0),
])  # fmt: skip
@pytest.mark.parametrize("slots", [K, 12])
def test_prefetching_changes_no_token(source, horizon, budget, slots):
    h = house()
    with opened(h.folder, cache=Cache(slots=slots), prefetch=Prefetch(source=source, horizon=horizon, budget=budget), future=h.trace) as engine:
        assert same_logits(h, engine)
        engine.experts.quiet()
        summary = engine.summary()
        summary.ledger.check()
        assert summary.ledger.issued > 0 and engine.experts.leaked() == 0
        assert summary.prefetch_bytes % 12288 == 0 and summary.read_bytes == 12288 * engine.file.reads


def test_an_oracle_sees_the_next_token():
    h = house()
    ahead = Prefetch(source="oracle", horizon=L, cross_token=True)   # guesses for nothing but the same layer, a token later
    with opened(h.folder, cache=Cache(slots=12, policy="belady"), prefetch=ahead, future=h.trace) as engine:
        assert same_logits(h, engine)
        engine.experts.quiet()
        assert engine.experts.ledger().issued > 0 and engine.experts.leaked() == 0


@pytest.mark.parametrize("more", [dict(guard="idle"), dict(expire=False), dict(cancel=True, horizon=(1, 2)), dict(threshold=0.3)], ids=str)
def test_every_way_of_prefetching_changes_no_token(more):
    h = house()
    with opened(h.folder, prefetch=Prefetch(**{"source": "next_router", "horizon": 1} | more)) as engine:
        assert same_logits(h, engine)
        engine.experts.quiet()
        ledger = engine.summary().ledger   # whether a disk is idle at a guess is a matter of its speed
        assert ledger.issued + (ledger.held_back if more.get("guard") else 0) > 0 and engine.experts.leaked() == 0


@pytest.mark.parametrize("lanes", [1, 4])
def test_one_prompt_at_a_time_gives_the_same_tokens(lanes):
    """Batch 1, where single tokens take a path of their own, and a sequence's end by a stop token."""
    h = house()
    with opened(h.folder, lanes=lanes, prefetch=Prefetch(source="next_router", horizon=1)) as engine:
        for prompt, tokens in zip(h.prompts[:2], h.tokens):
            assert engine.generate([prompt], max_new_tokens=40) == [tokens[:40]]
            stop = tokens[7]
            assert engine.generate([prompt], max_new_tokens=40, stop=stop) == [tokens[: tokens.index(stop) + 1]]
    with opened(h.folder, lanes=lanes, cache=Cache(slots=K)) as engine:
        assert engine.generate([h.prompts[0], h.prompts[1][:3]], max_new_tokens=9)[0] == h.tokens[0][:9], "prompts of other lengths beside it change nothing"


def test_transformers_gives_the_same_tokens_for_an_olmoe_checkpoint(tmp_path):
    theirs = their_model(max_position_embeddings=160)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    export(tmp_path / "theirs", tmp_path / "out", dtype="float32")
    prompts = torch.randint(61, (8, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.generate(prompts, max_new_tokens=130, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompts), output_logits=True, return_dict_in_generate=True)
    seen = []
    with opened(tmp_path / "out", prefetch=Prefetch(source="next_router", horizon=1)) as engine:
        assert engine.generate(prompts.tolist(), max_new_tokens=130, on_logits=seen.append) == expected.sequences[:, 4:].tolist()
    assert max((a - b).abs().max() for a, b in zip(seen, expected.logits)) < 1e-4


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_rounded_experts_are_the_stored_models(tmp_path, dtype):
    import copy

    from engine_models import resident_tokens
    from predmoe.engine import stored_model

    h = house()
    export(h.root / "checkpoint", tmp_path / "out", dtype=dtype)
    tokens, logits = resident_tokens(stored_model(copy.deepcopy(h.model), dtype), h.prompts, 20)
    seen = []
    with opened(tmp_path / "out") as engine:
        assert engine.generate(h.prompts, max_new_tokens=20, on_logits=seen.append) == tokens
        assert engine.generate(h.prompts[:1], max_new_tokens=20) == tokens[:1]
    assert max((a - b).abs().max() for a, b in zip(seen, logits)) < 1e-4
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(seen, h.logits)), "rounding is there to be seen"


@pytest.mark.parametrize("routing", [dict(routing="early", early_by=1), dict(routing="hash")], ids=str)
def test_other_kinds_of_routing(tmp_path, routing):
    from engine_models import resident_tokens
    from predmoe.checkpoint import save_checkpoint
    from tiny_models import lively, tokens_of

    model = lively(**routing)
    prompts = tokens_of(model, B=2, T=4).tolist()
    export(save_checkpoint(model, tmp_path / "c"), tmp_path / "out", dtype="float32")
    with opened(tmp_path / "out") as engine:
        assert engine.generate(prompts, max_new_tokens=20) == resident_tokens(model, prompts, 20)[0]


def test_sampling_follows_its_seed():
    h = house()
    with opened(h.folder) as engine:
        ask = lambda **how: engine.generate(h.prompts[:2], max_new_tokens=20, **how)  # noqa: E731
        assert ask(temperature=1.0, seed=1) == ask(temperature=1.0, seed=1) != ask(temperature=1.0, seed=2)
        assert ask(temperature=1e-4, seed=5) == [tokens[:20] for tokens in h.tokens[:2]], "nearly no temperature is nearly greedy"


# --- the trace ---------------------------------------------------------------------------------------------------------

def test_the_recorded_trace_is_what_the_model_did():
    h, t = house(), house().trace
    assert t.num_passes == NEW and t.phase.tolist() == [PREFILL] + [DECODE] * (NEW - 1) and np.diff(t.starts).tolist() == [B * P] + [B] * (NEW - 1)
    assert t.meta.expert_bytes == (12288,) * L and t.meta.on_policy is True
    for number in (0, 5):
        rows = t.sequence == number
        ids = torch.tensor([[*h.prompts[number], *h.tokens[number][:-1]]])
        assert t.token_ids[rows].tolist() == ids[0].tolist()
        with torch.no_grad():
            routing = h.model(ids).routing
        hidden = torch.stack([record.hidden_ND for record in routing])
        for layer in range(L):
            assert (t.experts_NLK[rows, layer] == routing[layer].experts_NK.numpy()).all()
            np.testing.assert_allclose(t.weights_NLK[rows, layer], routing[layer].gates_NK.numpy(), rtol=1e-3, atol=1e-6)
        for horizon in (1, 2):
            best = predicted_top_k(NextRouter(h.model)(hidden, horizon, ids[0]), 6).numpy()   # (S, N, M)
            prediction = t.prediction("next_router", horizon)
            agree = (prediction.experts_NLM[rows, : L - horizon] == best.transpose(1, 0, 2)).all(-1).mean()
            assert agree > 0.999, "but for scores that are equal within rounding"
            assert (prediction.experts_NLM[:, L - horizon :] == -1).all()


def test_the_simulator_replays_the_recorded_trace_with_its_predictions():
    h = house()
    outcome = replay(h.trace, Cache(slots=6), Disk(), compute=Compute(), prefetch=Prefetch(source="ranking", horizon=1))
    outcome.ledger.check()
    assert outcome.ledger.issued > 0


def test_a_future_of_another_generation_is_noticed():
    h = house()
    with opened(h.folder, prefetch=Prefetch(source="oracle"), future=h.trace) as engine:
        with pytest.raises(RuntimeError, match="pass 0 has 6 tokens, the trace of the future another number: it is of another generation"):
            engine.generate(h.prompts[:1], max_new_tokens=3)
    with opened(h.folder, prefetch=Prefetch(source="oracle"), future=h.trace) as engine:
        with pytest.raises(RuntimeError, match="layer 0 of pass 0 chose other experts than the trace of the future has"):
            engine.generate(h.prompts[::-1], max_new_tokens=3)


# --- what it says of itself ----------------------------------------------------------------------------------------------

def test_numbering_begins_again_without_a_trace(monkeypatch):
    """Passes are numbered within a window; a long run and a long prompt go through it."""
    h = house()
    monkeypatch.setattr(foresight, "WINDOW", 7)
    for prefetch in (None, Prefetch(source="linear", horizon=(1, 2), expire=False)):
        with opened(h.folder, prefetch=prefetch, cache=Cache(slots=9, policy="lru")) as engine:
            live = engine.experts.control.routing
            assert len(live.starts) == 8
            assert same_logits(h, engine)
            engine.experts.quiet()
            engine.summary().ledger.check()
            if prefetch is None:
                simulated = count(h.trace, Cache(slots=9))
                assert counts_of(engine) == (simulated.accesses, simulated.hits, simulated.read_bytes)
    with opened(h.folder) as engine:
        engine.experts.control._set(engine.experts.control._state._replace(routing=live._replace(experts_NLK=live.experts_NLK[:4].copy(), sequence=live.sequence[:4].copy())))
        assert engine.generate(h.prompts, max_new_tokens=5) == [tokens[:5] for tokens in h.tokens], "a prompt longer than the window makes room"


def test_the_summarys_bytes_are_what_the_kernel_counted():
    h = house()
    with opened(h.folder, cache=Cache(slots=K), prefetch=Prefetch(source="next_router")) as engine:
        if engine.file.mode != DIRECT:
            pytest.skip(f"this file system has no direct reads: {engine.file.why}")
        engine.generate(h.prompts, max_new_tokens=NEW)
        engine.experts.quiet()
        summary = engine.summary()
        if summary.kernel_bytes is None:
            pytest.skip("the kernel does not count")
        assert summary.read_bytes > 10e6 and abs(summary.kernel_bytes / summary.read_bytes - 1) < 0.01


def test_the_summary_adds_up_and_says_what_was_done():
    h = house()
    with opened(h.folder, prefetch=Prefetch(source="next_router")) as engine:
        engine.generate(h.prompts[:1], max_new_tokens=30)
        engine.generate(h.prompts[1:2], max_new_tokens=1)
        engine.experts.quiet()
        summary = engine.summary()
    assert summary.tokens == 31 and len(engine.clock.decode_ms) == 29 and len(engine.clock.first_token_ms) == 2
    assert summary.tokens_per_s == pytest.approx(29_000 / sum(engine.clock.decode_ms)) and summary.p50_ms <= summary.p99_ms
    assert 0 < summary.hit_rate < 1 and summary.buffer_bytes == 8 * 12288 and summary.peak_resident_bytes > summary.buffer_bytes
    text = str(summary)
    assert summary.io_mode in text and f"{summary.ledger.issued} issued = {summary.ledger.useful} useful" in text and f"{summary.read_bytes:,} bytes" in text
    compute = engine.clock.compute(K)
    assert len(compute.attention_ms) == L and min(compute.expert_ms) > 0 and compute.overlap


def test_an_emptied_cache_is_cold_again():
    h = house()
    with opened(h.folder, cache=Cache(slots=L * E)) as engine:
        engine.generate(h.prompts[:1], max_new_tokens=10)
        cold = engine.summary().demand_bytes
        engine.generate(h.prompts[:1], max_new_tokens=10)
        assert engine.summary().demand_bytes == cold
        engine.empty()
        engine.generate(h.prompts[:1], max_new_tokens=10)
        assert engine.summary().demand_bytes == 2 * cold and engine.experts.leaked() == 0


def test_no_thread_is_left():
    h = house()
    with opened(h.folder, preadv=lambda *read: os.preadv(*read)):
        assert sum(thread.name.startswith("reader") for thread in threading.enumerate()) == 2
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())


# --- refused in one sentence ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, message", [
    (dict(cache=Cache(slots=1)), "1 slots cannot hold one top-2 set"),
    (dict(cache=Cache(bytes=20_000)), "20000 bytes cannot hold one top-2 set"),
    (dict(cache=Cache(slots=4, policy="belady")), "the policy belady must know the future"),
    (dict(cache=Cache(slots=4, pinned=2)), "pinned and static experts are chosen by their use"),
    (dict(cache=Cache(slots=4, policy="lfu", sample=2)), "sample is for the simulator"),
    (dict(prefetch=Prefetch(source="oracle")), "the oracle must know the future"),
    (dict(prefetch=Prefetch(source="cotrained")), "the export has no predictor 'cotrained'; it has none, next_router, linear, ranking, oracle"),
    (dict(prefetch=Prefetch(source="linear", horizon=3)), "the linear predictor has no horizon 3; it has 1, 2"),
    (dict(prefetch=Prefetch(source="next_router", horizon=4)), "horizon 4 is beyond the last layer: the model has 4 MoE layers, so at most 3"),
    (dict(prefetch=Prefetch(source="linear", budget=7)), "budget=7 and top-2 exceed the 8 experts"),
    (dict(prefetch=Prefetch(source="linear", guard="window")), "guard='window' is for the simulator only; an engine has none, idle"),
    (dict(prefetch=Prefetch(source="linear", cross_token=True)), "cross_token is for the simulator and the oracle only"),
    (dict(verify="sometimes"), "verify='sometimes' is unknown; choose one of first, always, never"),
    (dict(lanes=0), "lanes=0 must lie in 1..1024: reads at a time"),
])  # fmt: skip
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        opened(house().folder, **settings)


@pytest.mark.parametrize("horizon, cross_token", [(L, False), (L + 1, True)])
def test_an_oracle_has_a_furthest_layer(horizon, cross_token):
    with pytest.raises(ConfigError, match=f"horizon {horizon} is beyond the last layer: the model has {L} MoE layers, so at most {horizon - 1}"):
        opened(house().folder, prefetch=Prefetch(source="oracle", horizon=horizon, cross_token=cross_token), future=house().trace)


def test_a_future_of_another_shape_is_refused():
    from tiny_traces import sound

    with pytest.raises(TraceError, match="the trace is of 3 layers of 8 experts, top-2, the model 'checkpoint' is not"):
        opened(house().folder, prefetch=Prefetch(source="oracle"), future=sound())


@pytest.mark.parametrize("prompts, more, message", [
    ([], {}, "there is no prompt"),
    ([[1], []], {}, "prompt 1 is empty: the model needs at least one token"),
    ([[1] * P], {"max_new_tokens": NEW + 1}, "prompt 0: 6 tokens and 131 new ones exceed the model's context of 136"),
    ([[61]], {}, "prompt 0 has a token id outside 0..60"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    *[([[1]], {"temperature": t}, f"temperature={t} must be 0, for the likeliest token, or finite and at least 1e-06") for t in (-1.0, 1e-320, math.nan, math.inf)],
])  # fmt: skip
def test_prompts_that_cannot_be(prompts, more, message):
    with opened(house().folder) as engine, pytest.raises(ConfigError, match=message):
        engine.generate(prompts, **{"max_new_tokens": 5} | more)


def test_a_recording_is_asked_for_beforehand():
    with opened(house().folder) as engine, pytest.raises(ConfigError, match="nothing was recorded"):
        engine.trace()
    with Engine(house().folder, cache=Cache(slots=4), record={}, announce=lambda line: None) as engine, pytest.raises(ConfigError, match="nothing has been generated yet"):
        engine.trace()
