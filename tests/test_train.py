"""Training: the update rule by hand, the same bits from the same seed, and no loss whenever and however it is ended."""

import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import JOINT, STEPS, finished, folder_of, lines, results, tiny

from predmoe import train, worker
from predmoe.checkpoint import load_checkpoint
from predmoe.config import ConfigError, RunConfig, TrainConfig, build, to_dict
from predmoe.files import write_json
from predmoe.train import LOG_EVERY, Trainer, build_parts, learning_rate, load_predictor

pytestmark = pytest.mark.usefixtures("one_thread")

# A process forked from one that has imported the package starts at once and has never computed anything.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["predmoe.worker", "torch._dynamo"])  # torch imports the latter for its first optimiser


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """The joint run, never interrupted."""
    return finished(tiny(corpus), tmp_path_factory.mktemp("uninterrupted") / "run")


# ---------------------------------------------------------------------------------------------------- the update rule


@pytest.mark.parametrize("step, factor", [
    (0, 0.25), (1, 0.5), (3, 1.0),           # warm-up: (step + 1) / 4
    (4, 1.0), (6, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4), (8, 0.55), (12, 0.1),  # cosine over 8 steps from 1 to 0.1
])  # fmt: skip
def test_the_learning_rate_by_hand(step, factor):
    config = TrainConfig(steps=12, batch_size=1, lr=1.0, warmup_steps=4, final_lr_fraction=0.1)
    assert learning_rate(config, step) == pytest.approx(factor)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(TrainConfig(steps=1, batch_size=1, lr=1.0, warmup_steps=0), 0) == 1.0


def test_matrices_decay_and_norms_and_biases_do_not(corpus):
    model, predictor, optimizer = build_parts(tiny(corpus))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        group = group_of.pop(id(parameter))
        assert group["weight_decay"] == (0.0 if "norm" in name else 0.1), name
        assert group["scale"] == 1.0
    for name, parameter in predictor.named_parameters():
        group = group_of.pop(id(parameter))
        assert group["weight_decay"] == (0.0 if "biases" in name else 0.1), name
        assert group["scale"] == 5.0
    assert not group_of  # and nothing else is trained
    assert build_parts(tiny(corpus, objective={}))[1] is None


@pytest.mark.parametrize("clip", [1e9, 1e-3])
def test_an_update_is_a_clipped_adamw_step_by_hand(corpus, tmp_path, clip):
    config = tiny(corpus, grad_clip=clip, warmup_steps=0, objective={"lambda_pred": 0.3})
    trainer = Trainer(config, tmp_path)
    everything = dict(trainer.model.named_parameters()) | {f"heads.{n}": p for n, p in trainer.predictor.named_parameters()}
    before = {name: p.detach().clone().double() for name, p in everything.items()}
    grads = {}
    zero, trainer.optimizer.zero_grad = trainer.optimizer.zero_grad, lambda **_: grads.update({n: p.grad.double() for n, p in everything.items()})
    trainer.training_step()
    trainer.optimizer.zero_grad = zero
    norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
    assert norm == pytest.approx(clip, rel=1e-3) if clip < 1 else norm < clip  # gradients as they were after clipping
    for name, p in everything.items():
        lr = 5e-3 * (5.0 if name.startswith("heads.") else 1.0)
        decay = 0.0 if "norm" in name or "biases" in name else 0.1
        g = grads[name]  # in the first step both moments, corrected for their bias, are g and g^2
        by_hand = before[name] * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach().double(), by_hand, rtol=0, atol=2e-6, msg=name)
        assert lr * decay == 0 or not torch.equal(p.double(), before[name])


def test_every_group_follows_the_schedule(corpus, tmp_path):
    trainer = Trainer(tiny(corpus), tmp_path)
    for step, factor in enumerate([0.2, 0.4, 0.6, 0.8, 1.0, 1.0]):
        trainer.training_step()
        trainer.step += 1
        assert [g["lr"] for g in trainer.optimizer.param_groups] == pytest.approx([5e-3 * factor] * 2 + [25e-3 * factor] * 2), step


# ------------------------------------------------------------------------------------------------------ what is learnt


def test_the_loss_falls_far_below_chance_and_heads_learn_to_foresee(corpus, tmp_path):
    config = tiny(corpus, steps=100, lr=1e-2, eval_every=5, objective=JOINT | {"ramp_start": 0.0, "ramp_end": 0.1})
    found = lines(finished(config, tmp_path / "run"))
    first, last = found[0], found[-1]["heldout"]
    assert first["step"] == 1 and first["terms"]["lm"] == pytest.approx(math.log(8192), abs=0.1)
    assert last["val_loss"] < 3.0  # of ln 8192 = 9.01: a fixed cycle of 17 words
    dev = [line["dev"]["hit"]["cotrained"] for line in found if "dev" in line]
    for h in ("1", "2"):
        assert last["hit"]["cotrained"][h] > max(0.8, dev[0][h] + 0.1)  # chance is k/E = 0.5


def test_the_log_says_what_was_trained_and_has_no_clock(uninterrupted, corpus):
    found = lines(uninterrupted)
    assert [(line["step"], next(name for name in line if name != "step")) for line in found] == [
        (1, "terms"), (12, "dev"), (24, "dev"), (LOG_EVERY, "terms"), (STEPS, "terms"), (STEPS, "heldout")]  # fmt: skip
    assert all(line["terms"].keys() == {"lm", "balance", "pred"} for line in found if "terms" in line)
    assert found[0]["terms"]["pred"] == 0.0 and found[-2]["terms"]["pred"] > 0.0  # the ramp
    assert not {"second", "time", "tokens_per_second"} & set((uninterrupted / "metrics.jsonl").read_text().split('"'))
    end = json.loads((uninterrupted / "finished.json").read_text())
    assert end["val_loss"] == found[-1]["heldout"]["val_loss"]
    assert json.loads((uninterrupted / "timing.json").read_text())["steps"] == STEPS
    assert not (uninterrupted / "state.pt").exists()  # weights and heads are in checkpoint/, the optimiser is not needed
    assert not list(uninterrupted.rglob("*.partial"))


def test_the_checkpoint_holds_the_model_that_was_evaluated(uninterrupted, corpus, tmp_path):
    config = tiny(corpus)
    trainer = Trainer(config, tmp_path)
    trainer.model = load_checkpoint(uninterrupted / "checkpoint", config.model)
    trainer.predictor = load_predictor(uninterrupted / "checkpoint", config)
    assert trainer.evaluate_on("heldout") == lines(uninterrupted)[-1]["heldout"]
    assert load_predictor(uninterrupted / "checkpoint", tiny(corpus, objective={})) is None


# -------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("objective", [JOINT, {}], ids=["joint", "baseline"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(corpus, tmp_path, objective):
    run = lambda name, seed: results(finished(tiny(corpus, seed=seed, objective=objective), tmp_path / name))  # noqa: E731
    first = run("first", 0)
    assert run("second", 0) == first
    other = run("other", 1)
    assert all(other[name] != first[name] for name in first.keys() - {"config.json"})
    assert ("predictor.safetensors" in first) == bool(objective)


def test_two_threads_give_the_same_bits_each_time(corpus, tmp_path):
    config = tiny(corpus, threads=2, steps=3, batch_size=16)
    assert results(finished(config, tmp_path / "first")) == results(finished(config, tmp_path / "second"))
    assert torch.get_num_threads() == 2


def test_the_order_of_the_text_is_a_seed_of_its_own(corpus, tmp_path):
    first, *others = (
        build(RunConfig, to_dict(tiny(corpus, seed=seed, objective={})) | {"data": {"corpus": corpus, "heldout_tokens": 256, "dev_tokens": 128, "order_seed": order}})
        for seed, order in [(0, 0), (0, 1), (1, 0)]
    )
    batch = lambda config: Trainer(config, tmp_path).stream.batch(0, 4, 16).tolist()  # noqa: E731
    order, init = (batch(config) for config in others)
    assert init == batch(first) and order != batch(first)


# ------------------------------------------------------------------------------------------------ ended at any moment


def in_child(target, *arguments) -> int:
    """Exit code of `target(*arguments)` in a fresh process; negative: the signal that ended it."""
    process = CONTEXT.Process(target=_in_child, args=(dict(os.environ), target, arguments))
    process.start()
    process.join(300)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def _in_child(environment, target, arguments):
    os.environ.update(environment)
    sys.exit(target(*arguments))


def resume(folder: Path, **options) -> int:
    """The worker on `folder`, its output in log.txt; one that is to die saves after every step before, others at the end."""
    return in_child(_worker, folder, options)


def _worker(folder, options) -> int:
    out = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if limit := options.get("file_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if calls := options.get("die_after_calls"):
        _replaced(Trainer, "train", before=lambda *_: _die_after(calls))
    if place := options.get("die_at"):
        PLACES[place]()
    default = 0.0 if "die_at" in options or "die_after_calls" in options else 1e9
    return worker.main([str(folder), "--checkpoint-seconds", str(options.get("checkpoint_seconds", default))])


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after(calls: int):
    """kill -9 at the `calls`-th Python or C function called or left: in the middle of whatever that is."""

    def count(frame, event, argument):
        nonlocal calls
        calls -= 1
        if not calls:
            _die()

    sys.setprofile(count)


def _replaced(owner, name, before=lambda *_: None, after=lambda *_: None):
    real = getattr(owner, name)

    def both(*arguments, **keywords):
        before(*arguments)
        result = real(*arguments, **keywords)
        after(*arguments)
        return result

    setattr(owner, name, both)


def _half_a_save():
    """Half of the third checkpoint is written when the process ends."""
    real, saves = torch.save, []

    def half(state, file):
        saves.append(1)
        real(state, file)
        if len(saves) == 3:
            file.flush()
            os.ftruncate(file.fileno(), file.tell() // 2)
            _die()

    torch.save = half


def _when(count, then=_die):
    seen = []
    return lambda *_: (seen.append(1), len(seen) == count and then())


PLACES = {
    "before the first checkpoint": lambda: _replaced(Trainer, "training_step", before=_when(9)),
    "half of a checkpoint written": _half_a_save,
    "checkpoint written, not yet in its place": lambda: _replaced(os, "fsync", after=_when(3)),
    "between the update and its log line": lambda: _replaced(Trainer, "log", before=_when(4)),
    "between a log line and the checkpoint": lambda: _replaced(Trainer, "save", before=_when(26)),
    "evaluated at the end, no model yet": lambda: _replaced(train, "save_checkpoint", before=_die),
    "model written, not yet finished": lambda: _replaced(train, "save_checkpoint", after=_die),
    "finished, the last state still there": lambda: _replaced(Path, "unlink", before=lambda path: path.name == "state.pt" and _die()),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_a_bad_moment_changes_nothing(corpus, tmp_path, uninterrupted, place):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    never = place == "before the first checkpoint"
    assert resume(folder, die_at=place, checkpoint_seconds=1e9 if never else 0.0) == -signal.SIGKILL
    assert (folder / "state.pt").exists() != never
    assert resume(folder) == 0
    assert results(folder) == results(uninterrupted)
    assert not (folder / "state.pt").exists() and not list(folder.rglob("*.partial"))
    resumed = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("resumed")]
    assert len(resumed) == (0 if never or place.startswith("finished") else 1)


def test_kills_at_random_calls_change_nothing(corpus, tmp_path, uninterrupted):
    """A checkpoint after every step, so that most kills hit the middle of a save."""
    rng, folder = random.Random(0), folder_of(tiny(corpus), tmp_path / "run")
    for _ in range(5):
        assert resume(folder, die_after_calls=rng.randrange(100_000, 250_000)) == -signal.SIGKILL, (folder / "log.txt").read_text()
    assert resume(folder) == 0
    assert (folder / "log.txt").read_text().count("resumed at step") >= 3
    assert results(folder) == results(uninterrupted)


def test_kill_9_at_three_random_moments_changes_nothing(corpus, tmp_path):
    """The real worker, killed from outside: the final weights, heads and metrics equal an uninterrupted run's bit for bit."""
    config = tiny(corpus, steps=200, eval_every=90)
    reference = finished(config, tmp_path / "reference")
    folder = folder_of(config, tmp_path / "run")
    command = [sys.executable, "-m", "predmoe.worker", str(folder), "--checkpoint-seconds", "0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    rng = random.Random(0)
    for kill in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            next(line for line in child.stdout if line.startswith("step"))
            time.sleep(rng.random() * 0.5)
            child.kill()
        assert child.returncode == -signal.SIGKILL, f"kill {kill} came too late"
        assert not (folder / "finished.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "resumed at step" in done.stdout, done.stderr
    assert results(folder) == results(reference)
    timing = json.loads((folder / "timing.json").read_text())
    assert timing["steps"] == 200 and timing["tokens_per_second"] == pytest.approx(200 * 64 / timing["seconds"])


def test_a_finished_run_is_left_alone_and_a_lost_checkpoint_is_trained_again(corpus, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    stamp = lambda: {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}  # noqa: E731
    before = stamp()
    worker.train(folder, tiny(corpus))
    assert stamp() == before
    (folder / "checkpoint" / "predictor.safetensors").unlink()
    worker.train(folder, tiny(corpus), progress=lambda line: None)
    assert results(folder) == results(uninterrupted)


# ----------------------------------------------------------------------------------------------------------- full disk


def full_disk_sentence(text: str) -> str:
    last = text.strip().splitlines()[-1]
    assert last.startswith("predmoe: cannot save step") and "free some space and run again" in last and "Traceback" not in text, text
    assert any(said in last for said in ("File too large", "No space left on device")), "the system's own words, not those that torch hides them behind"
    return last


def test_a_full_disk_before_the_first_checkpoint_stops_the_run_with_a_sentence(corpus, tmp_path, uninterrupted):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    assert resume(folder, file_bytes=1_000_000, checkpoint_seconds=0.0) == 2
    assert "no earlier checkpoint exists" in full_disk_sentence((folder / "log.txt").read_text())
    assert not (folder / "state.pt").exists() and not list(folder.rglob("*.partial"))
    assert resume(folder) == 0
    assert results(folder) == results(uninterrupted)


def test_a_full_disk_while_saving_keeps_the_last_good_checkpoint(corpus, tmp_path, uninterrupted):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    assert resume(folder, die_at="half of a checkpoint written") == -signal.SIGKILL
    good = (folder / "state.pt").read_bytes()
    assert resume(folder, file_bytes=len(good) - 100_000) == 2
    assert "step 30 " in (last := full_disk_sentence((folder / "log.txt").read_text())) and "the last good checkpoint stays" in last
    assert (folder / "state.pt").read_bytes() == good and not list(folder.rglob("*.partial"))
    assert resume(folder) == 0
    assert results(folder) == results(uninterrupted)


def test_a_full_disk_while_the_model_is_written_loses_nothing(corpus, tmp_path, uninterrupted):
    folder = folder_of(tiny(corpus), tmp_path / "run")
    assert resume(folder, die_at="evaluated at the end, no model yet") == -signal.SIGKILL
    assert resume(folder, file_bytes=1_000_000) == 2  # less than the model, enough for the heads
    assert "the last good checkpoint stays" in full_disk_sentence((folder / "log.txt").read_text())
    assert not (folder / "finished.json").exists() and not list(folder.rglob("*.partial"))
    assert resume(folder) == 0
    assert results(folder) == results(uninterrupted)


@pytest.mark.parametrize("name", ["metrics.jsonl", "state.partial"])
def test_no_space_left_on_the_device_is_said_in_one_sentence(corpus, tmp_path, capsys, monkeypatch, name):
    """/dev/full: a device on which every write fails as on a full disk."""
    folder = folder_of(tiny(corpus), tmp_path / "run")
    if name == "state.partial":   # made anew each time, so that a link there would go
        monkeypatch.setattr(train, "open", lambda path, *mode: open("/dev/full" if path == folder / name else path, *mode), raising=False)
    else:
        (folder / name).symlink_to("/dev/full")
    assert worker.main([str(folder)]) == 2
    assert "No space left on device" in full_disk_sentence(capsys.readouterr().err)
    assert not (folder / "finished.json").exists()


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    write_json(tmp_path / "a.json", {"old": 1})
    (tmp_path / f"a.json.{os.getpid()}-{threading.get_ident()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: .*a.json"):
        write_json(tmp_path / "a.json", {"new": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# ----------------------------------------------------------------------------------------------------------- bad heads


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"no tensors"), lambda path: save_file({"weights.1_0": torch.zeros(2)}, path)],
                         ids=["missing", "damaged", "another shape"])  # fmt: skip
def test_heads_that_do_not_fit_are_a_sentence(uninterrupted, corpus, tmp_path, damage):
    folder = shutil.copytree(uninterrupted / "checkpoint", tmp_path / "checkpoint")
    damage(folder / "predictor.safetensors")
    with pytest.raises(ConfigError, match=f"^{folder / 'predictor.safetensors'} does not hold the heads of this run .*; restore it from a copy, or remove it"):
        load_predictor(folder, tiny(corpus))
