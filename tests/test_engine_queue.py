"""Reads through the kernel's own queue, and single tokens in compiled code: the same tokens, the same counts, and faults that are seen to."""

import os
import subprocess
import sys
import time

import numba
import numpy as np
import pytest
import torch
from engine_models import house, opened

from predmoe.engine import EngineError, ReadError, kernelqueue, table
from predmoe.engine.decode import fits, sampled
from predmoe.engine.loop import kernels_of
from predmoe.simulator import Cache, Prefetch, count

NEW = 30


def by_threads():
    return dict(preadv=lambda *read: os.preadv(*read))


@pytest.fixture
def queued():
    """Skips where the kernel gives no queue."""
    with opened(house().folder) as engine:
        if not engine.experts.queued:
            pytest.skip(f"no kernel queue here: {engine.experts.reads_by}")


def one_by_one(engine, prompts=slice(0, 3), new=NEW):
    h, seen = house(), []
    tokens = [engine.generate([prompt], max_new_tokens=new, on_logits=seen.append)[0] for prompt in h.prompts[prompts]]
    expected = [step[i] for i in range(len(h.prompts))[prompts] for step in h.logits[:new]]
    return tokens == [tokens[:new] for tokens in h.tokens[prompts]] and max((a[0] - b).abs().max().item() for a, b in zip(seen, expected)) < 1e-4


@pytest.mark.parametrize("settings", [dict(cache=Cache(slots=2)), dict(cache=Cache(slots=9, policy="lfu")), dict(cache=Cache(slots=1, streaming=True)), dict(cache=Cache(slots=2, scope="layer"))], ids=str)
@pytest.mark.parametrize("how", [dict, by_threads])
def test_single_tokens_by_queue_and_by_threads_are_the_models(settings, how):
    h = house()
    with opened(h.folder, record={}, **settings, **how()) as engine:
        assert one_by_one(engine) and engine.experts.leaked() == 0
        simulated, summary = count(engine.trace(), settings["cache"]), engine.summary()
        assert (summary.accesses, summary.hits, summary.demand_bytes) == (simulated.accesses, simulated.hits, simulated.read_bytes)
        assert summary.read_bytes == 12288 * engine.file.reads == engine.file.bytes
        assert ("threads (reads are not the system's own)" in str(summary)) == (how is by_threads)


@pytest.mark.parametrize("prefetch", [Prefetch(source="next_router", horizon=(1, 3), budget=2), Prefetch(source="linear", horizon=2), Prefetch(source="ranking", horizon=(1, 2), budget=1),
                                      Prefetch(source="ranking", threshold=0.2)], ids=str)  # fmt: skip
def test_compiled_guesses_are_the_predictors(prefetch):
    """What is queued is what the recorder, which asks the predictor by torch, says that the predictor foretold."""
    h = house()
    horizons = prefetch.horizons
    with opened(h.folder, prefetch=prefetch, record={prefetch.source: horizons}) as engine:
        assert one_by_one(engine, slice(0, 1))
        held, trace = engine.experts.control.guesses, engine.trace()
        wanted = 2 + prefetch.budget
        for i, horizon in enumerate(horizons):
            told, rows = trace.prediction(prefetch.source, horizon), slice(6, 6 + NEW - 1)   # the decode passes
            for layer in range(4 - horizon):
                assert (held.experts_HNLM[i, rows, layer, :wanted] == told.experts_NLM[rows, layer, :wanted]).all(-1).mean() > 0.95, "but for equal scores"
                limit = wanted if prefetch.threshold is None else (told.scores_NLM[rows, layer, :wanted] >= prefetch.threshold).sum(-1)
                assert (held.limit_HNL[i, rows, layer] == limit).mean() > 0.95
            assert (held.limit_HNL[i, rows, 4 - horizon :] == 0).all()
        engine.experts.quiet()
        engine.summary().ledger.check()
        assert engine.summary().ledger.issued > 0 and engine.experts.leaked() == 0


def test_what_is_computed_how_depends_on_the_model_alone(tmp_path):
    from predmoe.engine import export, load_manifest

    h = house()
    assert fits(load_manifest(h.folder))
    assert not fits(export(h.root / "checkpoint", tmp_path / "bf16", dtype="bf16"))


def test_a_read_that_the_kernel_does_not_take_is_made_another_way(queued):
    with opened(house().folder, cache=Cache(slots=2)) as engine:
        io = engine.experts.control.io
        io.request[:, 2] = 10**6 << 32   # no such file
        assert one_by_one(engine) and engine.experts.leaked() == 0 and io.at[kernelqueue.IDLE] == len(io.idle)
        assert engine.generate(house().prompts, max_new_tokens=5) == [tokens[:5] for tokens in house().tokens]


def test_a_queue_that_is_none_any_more_is_told(queued):
    """As in a process that was forked: the system refuses the queue, again and again."""
    with opened(house().folder, cache=Cache(slots=2)) as engine:
        io = engine.experts.control.io
        assert one_by_one(engine, slice(0, 1))
        engine.experts.quiet()
        context, io.at[kernelqueue.CONTEXT] = int(io.at[kernelqueue.CONTEXT]), 4096
        with pytest.raises(EngineError, match="the kernel's queue of reads no longer answers"):
            one_by_one(engine)
        io.at[kernelqueue.CONTEXT] = context
        assert one_by_one(engine) and engine.experts.leaked() == 0


def test_direct_reads_that_are_refused_while_running_are_made_by_the_decoder(queued, monkeypatch):
    said = []
    with opened(house().folder, cache=Cache(slots=2), announce=said.append) as engine:
        io, system, refused = engine.experts.control.io, os.preadv, []
        direct = engine.file.descriptor

        def preadv(descriptor, buffers, offset):
            if descriptor == direct:
                refused.append(offset)
                raise OSError(22, "Invalid argument")
            return system(descriptor, buffers, offset)

        io.address[:] += 1   # no alignment: the kernel refuses what the queue hands over
        engine.file._preadv = preadv
        assert one_by_one(engine) and engine.experts.leaked() == 0 and len(refused) == 1
        summary = engine.summary()
        assert summary.io_mode == "buffered" and summary.reads_by.startswith("the decoder, one at a time") and len(said) == 1


def test_a_queue_that_gives_no_answer_is_told_within_the_patience(queued):
    """The kernel is asked to wait for a pipe that nobody writes to."""
    read, write = os.pipe()
    with opened(house().folder, cache=Cache(slots=2), patience=0.3) as engine:
        io, before = engine.experts.control.io, engine.experts.control.io.request[:, 2].copy()
        assert one_by_one(engine, slice(0, 1))
        poll = 5   # IOCB_CMD_POLL, whose event mask stands where the buffer's address does
        io.request[:, 2] = poll | read << 32
        kept, io.address[:] = io.address.copy(), 1
        size, io.at[kernelqueue.SIZE] = int(io.at[kernelqueue.SIZE]), 0
        offsets, io.offset[:] = io.offset.copy(), 0
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(EngineError, match=r"the disk gave no answer for 0.3 s"):
                one_by_one(engine, slice(1, 2))
            assert time.monotonic() - began < 20
        io.request[:, 2], io.address[:], io.at[kernelqueue.SIZE], io.offset[:] = before, kept, size, offsets
        os.write(write, b"x" * 8)   # the polls end, with a result that is no whole block: those are read another way
        engine.experts.quiet()
        assert one_by_one(engine) and engine.experts.leaked() == 0
    os.close(read)
    os.close(write)


def test_a_router_that_is_not_a_number_is_named():
    for how in (dict, by_threads):
        with opened(house().folder, **how()) as engine:
            assert one_by_one(engine, slice(0, 1))
            router = engine._loop.net.router[2]
            kept = router.copy()
            router[:] = np.nan
            with pytest.raises(EngineError, match="router of layer 2: token 0 of the pass has NaN scores"):
                engine.generate(house().prompts[:1], max_new_tokens=3)
            router[:] = kept
            assert one_by_one(engine) and engine.experts.leaked() == 0


def test_a_failed_checksum_gives_nothing_up(queued):
    with opened(house().folder, cache=Cache(slots=2), verify="always") as engine:
        assert one_by_one(engine)
        kept, engine.experts._crc = engine.experts._crc, [value + 1 for value in engine.experts._crc]
        with pytest.raises(ReadError, match="checksum"):
            one_by_one(engine)
        engine.experts._crc = kept
        assert one_by_one(engine) and engine.experts.leaked() == 0


def test_tokens_are_drawn_in_proportion():
    logits = torch.tensor([[0.0, 1.0, -float("inf"), 2.0]]).repeat(20000, 1)
    drawn = sampled(logits, 1.0, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    assert share[2] == 0 and torch.allclose(share, logits[0].softmax(0), atol=0.02)
    assert (sampled(logits, 1e-3, torch.Generator().manual_seed(1)) == 3).all()


def test_an_engine_needs_no_library_of_tables_or_of_training():
    """They are half of what a process with a small model would take."""
    code = "import sys; import predmoe.contender, predmoe.engine; print([name for name in ('pandas', 'scipy.optimize', 'scipy.signal', 'transformers', 'datasets', 'matplotlib') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


# --- what is compiled ------------------------------------------------------------------------------------------------------

def test_nothing_is_compiled_while_a_clock_runs():
    """An engine that is open has all that its passes call, for the very types with which they call it."""
    kernels = kernels_of(True)
    with opened(house().folder) as engine, opened(house().folder, **by_threads()) as other:
        before = [function.signatures for function, *_ in kernels]
        assert table.ready(kernels) and all(tuple(signature) in function.signatures for function, *signature in kernels)
        assert one_by_one(engine) and one_by_one(other)
    with opened(house().folder, cache=Cache(slots=2), prefetch=Prefetch(source="ranking", horizon=(1, 2))) as engine:
        assert one_by_one(engine)
    assert [function.signatures for function, *_ in kernels] == before


def test_whether_it_is_compiled_is_known_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def twice(x):
        return 2 * x

    first, later = table.compiled(twice), table.compiled(twice)   # the later one is as another process finds it
    assert not table.ready([(first, numba.int64)]) and not table.ready([(later, numba.int64)])
    table.prepare([(first, numba.int64)])
    assert table.ready([(first, numba.int64)]) and table.ready([(later, numba.int64)]) and not later.signatures
    assert not table.ready([(first, numba.int64), (later, numba.float64)])
