"""Every fault that disks, files and threads have been seen to have: never a wrong token, a hang, or a buffer that is lost."""

import os
import shutil
import threading
import time

import numpy as np
import pytest
from engine_models import house, opened
from storage_double import EINVAL, EIO, Faulty

from predmoe.config import ConfigError
from predmoe.engine import EngineError, ReadError
from predmoe.engine.control import Control
from predmoe.engine.foresight import live_routing
from predmoe.engine.layout import EXPERTS
from predmoe.engine.storage import BUFFERED
from predmoe.simulator import Cache, Prefetch, count
from predmoe.simulator import diskqueue as dq

NEW = 24
GUESSING = dict(prefetch=Prefetch(source="next_router", horizon=(1, 2), budget=1))
sources = pytest.mark.parametrize("more", [{}, GUESSING], ids=["demand", "prefetch"])


def generated(engine, which=slice(0, 2)):
    h = house()
    return engine.generate(h.prompts[which], max_new_tokens=NEW) == [tokens[:NEW] for tokens in h.tokens[which]]


def sound(engine):
    """Nothing lost: every buffer is accounted for, the ledger balances, and the cache is as large as it was."""
    engine.experts.quiet()
    engine.summary().ledger.check()
    used = engine.experts.control.r.used
    return engine.experts.leaked() == 0 and (used <= engine.experts.control.r.capacity).all() and generated(engine)


@sources
@pytest.mark.parametrize("fault", [dict(short=4096), dict(errors={5: EIO, 20: EIO}), dict(errors={9: EINVAL})], ids=str)
def test_faults_that_can_be_mended_change_no_token(more, fault):
    said = []
    with opened(house().folder, preadv=Faulty(**fault), announce=said.append, **more) as engine:
        direct = engine.file.mode != BUFFERED
        assert generated(engine) and sound(engine)
        summary = engine.summary()
        if fault.get("errors") == {9: EINVAL} and direct:
            assert summary.io_mode == BUFFERED and len(said) == 1 and "BUFFERED" in said[0] and "BUFFERED".lower() in str(summary)
        if 5 in fault.get("errors", {}):
            assert summary.retried == 2 and "2 reads tried again" in str(summary)


@sources
def test_a_disk_that_fails_is_told_and_the_engine_goes_on_when_it_is_mended(more):
    """colibri#967: k failed loads leave the capacity as it was, and the next read works."""
    double = Faulty()
    with opened(house().folder, preadv=double, **more) as engine:
        assert generated(engine)
        double.errors = {"always": EIO}
        for _ in range(3):
            with pytest.raises(ReadError, match=r"expert \d of layer \d: experts.bin: reading 12288 bytes at \d+ failed: Input/output error"):
                engine.generate(house().prompts[2:4], max_new_tokens=NEW)
        double.errors = {}
        assert sound(engine)


@sources
def test_a_thread_that_is_told_to_exit_is_a_failed_read(more):
    with opened(house().folder, preadv=Faulty(die=6), **more) as engine:
        try:
            assert generated(engine), "the read may have been a guess that nobody asked for"
        except ReadError as error:
            assert "SystemExit: the thread is told to exit" in str(error)
        assert sound(engine)
        assert sum(thread.name.startswith("reader") for thread in threading.enumerate()) == 2


def test_a_disk_that_hangs_is_told_within_the_patience_and_the_engine_survives_it():
    double = Faulty(hang=8)
    with opened(house().folder, preadv=double, patience=1.0) as engine:
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"the disk gave no answer for 1 s; expert \d of layer \d is still awaited"):
            generated(engine)
        with pytest.raises(EngineError, match="the disk gave no answer for 1 s"):
            generated(engine)
        assert time.monotonic() - began < 30
        double.hang = None
        double.release.set()
        engine.experts._patience = 300.0
        assert sound(engine)


@sources
def test_a_flipped_bit_is_found_by_the_checksum(tmp_path, more):
    folder = shutil.copytree(house().folder, tmp_path / "out")
    with opened(folder) as engine:
        chosen = int(engine.manifest.offsets[2][int(house().trace.experts_NLK[0, 2, 0])])
    raw = bytearray((folder / EXPERTS).read_bytes())
    raw[chosen + 1000] ^= 16
    (folder / EXPERTS).write_bytes(raw)
    with opened(folder, **more) as engine:
        with pytest.raises(ReadError, match=r"expert \d of layer 2: its bytes are not those that were exported \(checksum\)"):
            generated(engine, slice(0, 8))
        assert engine.experts.leaked() == 0
    with opened(folder, verify="never") as engine:
        engine.generate(house().prompts, max_new_tokens=2)   # asked for: nothing is checked


def test_checksums_are_verified_at_first_or_each_time():
    last = Faulty(flip=40)
    with opened(house().folder, preadv=last, cache=Cache(slots=2), verify="always") as engine:
        with pytest.raises(ReadError, match="checksum"):
            engine.generate(house().prompts, max_new_tokens=NEW)
        assert sound(engine)
    with opened(house().folder, cache=Cache(slots=2)) as engine:
        generated(engine, slice(0, 8))
        assert engine.experts._check.sum() == 32 - len({(l, int(e)) for l in range(4) for e in house().trace.experts_NLK[house().trace.starts[0] : house().trace.starts[NEW], l].reshape(-1)})


def test_a_file_cut_short_while_running_names_both_counts(tmp_path):
    folder = shutil.copytree(house().folder, tmp_path / "out")
    with opened(folder, cache=Cache(slots=2)) as engine:
        generated(engine, slice(0, 1))
        os.truncate(folder / EXPERTS, 12288 * 31 + 100)
        with pytest.raises(ReadError, match="expert 7 of layer 3: experts.bin: 100 bytes of 12288 at 380928, then the file ends"):
            engine.generate(house().prompts, max_new_tokens=NEW * 4)
        assert engine.experts.leaked() == 0
    with pytest.raises(ConfigError, match="is cut short"):
        opened(folder)


def test_a_model_that_is_deleted_while_running_runs_on(tmp_path):
    folder = shutil.copytree(house().folder, tmp_path / "out")
    with opened(folder, cache=Cache(slots=2)) as engine:
        generated(engine, slice(0, 1))
        shutil.rmtree(folder)
        assert sound(engine)


def test_a_read_only_model_can_be_run(tmp_path):
    folder = shutil.copytree(house().folder, tmp_path / "out")
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with opened(folder) as engine:
        assert generated(engine)
    folder.chmod(0o755)


def test_more_memory_than_there_is_is_one_sentence(monkeypatch):
    import mmap

    def none(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", none)
        with pytest.raises(ConfigError, match="no memory for|Cannot allocate memory"):
            opened(house().folder, direct=False)
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())


def test_a_preload_that_fails_leaves_no_thread():
    h = house()
    with pytest.raises(ReadError, match="failed: Input/output error"):
        opened(h.folder, cache=Cache(slots=9, pinned=3), future=h.trace, preadv=Faulty(errors={"always": EIO}))
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("reader") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the bookkeeping of a failed read, step by step -----------------------------------------------------------------------

def control(slots=4, lanes=1, **more):
    h = house()
    return Control(Cache(slots=slots), Prefetch(source="next_router", **more), live_routing(h.model.config), 3, num_experts=8, expert_bytes=np.full(4, 100), top_k=2, lanes=lanes,
                   usage=np.zeros(32, np.int64), oracle=False, warmup=0)  # fmt: skip


def choose(c, layer, experts, guesses=()):
    """Pass 0, one token: its experts at `layer`, and what it guesses for the next."""
    c.routing.starts[1] = 1
    c.routing.experts_NLK[0, layer] = experts
    c.guesses.experts_HNLM[0, 0, layer, : len(guesses)] = guesses
    c.guesses.limit_HNL[0, 0, layer] = len(guesses)
    c.asked(0, layer)
    demanded = c.started()
    c.foretold(0, layer)
    return demanded + c.started()


def test_a_failed_guess_was_never_issued():
    """imp#237, ChampSim#105."""
    c = control()
    assert choose(c, 0, [1, 2], guesses=[5, 6]) == [1] and c.ledger().issued == 2
    assert c.ended(1, 0) and c.started() == [2] and c.ended(2, 1) and c.started() == [8 + 5]
    assert not c.failed(8 + 5) and c.started() == [8 + 6]
    assert c.ledger().issued == 1 and c.q.at[dq.AHEAD] == 1
    assert not c.ended(8 + 6, 2) and c.ledger().resident == 1 and c.started() == []
    assert choose(c, 1, [5, 6]) == [8 + 5], "what failed is asked for anew"
    assert c.ledger().useful == 1 and c.q.per_pass[0, dq.GUESS_READS] == 1


def test_a_failed_demand_leaves_its_place_free():
    c = control(slots=2)
    assert choose(c, 0, [1, 2]) == [1]
    assert c.failed(1) and c.started() == [2] and c.r.used.tolist() == [1] and c.r.after[1] < 0
    assert c.ended(2, 0) and c.r.used.tolist() == [1]
    c.abandoned()
    assert c.freed() == [] and c.own.holder[2] == 0
    assert choose(c, 1, [3, 4]) == [8 + 3] and c.freed() == [0], "the expert that arrived is evicted like any other"
    assert c.q.per_pass[0, dq.DEMAND_READS] == 1


def test_a_demanded_guess_that_fails_stays_late_and_the_ledger_balances():
    c = control()
    assert choose(c, 0, [1, 2], guesses=[5]) == [1]
    c.ended(1, 0), c.ended(2, 1)
    assert c.started() == [8 + 5]
    assert choose(c, 1, [5, 7]) == [], "one lane: the guess is being read, the other waits"
    assert c.failed(8 + 5) and c.started() == [8 + 7]
    ledger = c.ledger()
    assert ledger.issued == ledger.late == 1 and c.r.used.tolist() == [3]


def test_demand_goes_before_guesses_first_come_first_served_and_promotes():
    c = control(slots=8)
    assert choose(c, 0, [1, 2], guesses=[5, 6, 7]) == [1]
    c.ended(1, 0), c.ended(2, 1)
    assert c.started() == [8 + 5] and c.ledger().issued == 3
    assert choose(c, 1, [3, 7]) == []
    order = []
    while key := next(iter(c.q.key[: c.q.at[dq.ACTIVE]].tolist()), None):
        order.append(key)
        c.ended(key, len(order) + 1)
    assert order == [8 + 5, 8 + 3, 8 + 7], "the read that runs ends, then demands in their order, the promoted one among them; 6 has expired"
    assert c.ledger().cancelled == 1 and c.ledger().late == 1 and c.q.per_pass[0, dq.PROMOTED] == 1


def test_an_empty_slot_is_never_expert_0():
    """colibri#480: with nothing in memory the first expert is a miss like any other."""
    h = house()
    with opened(h.folder, cache=Cache(slots=2)) as engine:
        engine.generate(h.prompts[:1], max_new_tokens=1)
        assert engine.summary().hits == count(h.trace.passes(0, 1), Cache(slots=2)).hits == 0


def test_a_router_that_gives_nan_is_told_and_chooses_nobody():
    """colibri#563."""
    import torch

    h = house()
    with opened(h.folder) as engine:
        router = engine._resident.routers[2].clone()
        engine._resident.routers[2][:] = torch.nan
        with pytest.raises(EngineError, match="router of layer 2: token 0 of the pass has NaN scores, so no expert can be chosen"):
            generated(engine)
        engine._resident.routers[2][:] = router
        assert sound(engine)


def test_a_set_that_is_left_half_computed_does_no_harm():
    """An interrupt between two experts of a set: the reads that were under way are waited for before the next set is looked up."""
    h = house()
    with opened(h.folder, cache=Cache(slots=2), lanes=2) as engine:
        one, calls = engine._blocks.many, []

        def interrupted(*arguments):
            calls.append(1)
            if len(calls) in (3, 11, 40):
                raise KeyboardInterrupt
            return one(*arguments)

        engine._blocks.many = interrupted
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                generated(engine)
        assert sound(engine)
