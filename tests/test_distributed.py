"""Several processes for one run: they train what one process trains, and any number goes on from what another has written."""

import contextlib
import json
import os
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from team import together
from torch.utils._python_dispatch import TorchDispatchMode
from tiny_runs import JOINT, finished, folder_of, lines, results, tiny

from predmoe import budget, cli, distributed, fleet, runs, sharding, worker
from predmoe.checkpoint import load_checkpoint
from predmoe.config import ConfigError, DataConfig
from predmoe.data import prepare
from predmoe.distributed import ENGINES, DistributedTrainer, description, record
from predmoe.files import write_json
from predmoe.train import Trainer, TrainingError, load_predictor

STEPS = 50


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def curve(trainer) -> list[dict]:
    """Train to the end; the terms of every step."""
    seen, step = [], trainer.training_step
    trainer.training_step = lambda: seen.append(step()) or seen[-1]
    trainer.train()
    return seen


def curves_of(team, config, folder):
    """Every engine trains the run in a folder of its own; for "hsdp" each process is a node."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return {engine: curve(DistributedTrainer(config, folder / engine, team, engine=engine)) for engine in ENGINES}


def numbers(value, name="") -> dict[str, float]:
    """Every number of a nested result by its path."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in numbers(inner, f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in numbers(inner, f"{name}/{i}").items()}
    return {name: value}


@pytest.mark.parametrize("objective", [JOINT, {"lambda_pred": 0.1, "lambda_sticky": 0.1, "lambda_ent": 0.01, "lambda_lookup": 0.1}], ids=["joint", "every term"])
def test_two_processes_train_what_one_does(corpus, tmp_path, objective):
    """Not the same bits, since sums are taken in another order, but the same curve to 1e-4 nats over 50 steps, and the same held-out metrics."""
    config = tiny(corpus, steps=STEPS, objective=objective, lr=2e-3)   # a rate at which one rounding does not grow into another routing
    for name in ("alone", *ENGINES):
        folder_of(config, tmp_path / name)
    alone = curve(Trainer(config, tmp_path / "alone"))
    found = together(2, curves_of, config, tmp_path)
    assert found[0] == found[1]   # every process is told the whole batch's terms
    held = numbers(lines(tmp_path / "alone")[-1]["heldout"])
    for engine in ENGINES:
        for mine, single in zip(found[0][engine], alone, strict=True):
            assert mine.keys() == single.keys() and all(abs(mine[name] - single[name]) < 1e-4 for name in single)
        other = numbers(lines(tmp_path / engine)[-1]["heldout"])
        assert other.keys() == held.keys()
        # Of 512 tokens with 4 choices, one that falls on the other side of a tie moves a hit rate by 0.001.
        assert max(abs(other[name] - held[name]) for name in held if "loss" in name or "entropy" in name) < 1e-4
        assert max(abs(other[name] - held[name]) for name in held) < 5e-3
        assert [line["step"] for line in lines(tmp_path / engine)] == [line["step"] for line in lines(tmp_path / "alone")]
        ours = load_checkpoint(tmp_path / engine / "checkpoint", config.model).state_dict()
        reference = load_checkpoint(tmp_path / "alone" / "checkpoint", config.model).state_dict()
        assert max((ours[name] - reference[name]).abs().max().item() for name in ours) < 1e-3
        assert load_predictor(tmp_path / engine / "checkpoint", config) is not None
        assert not list((tmp_path / engine).glob("state*"))


def compiled(team, config, folder):
    """Some steps of each engine with attention compiled as on a GPU, but for the code generator."""
    seen = {}
    for engine in ("ddp", "fsdp"):
        build = DistributedTrainer.parts

        def parts(trainer):
            model, *rest = build(trainer)
            for layer in model.layers:
                layer.attention.compile(fullgraph=True, dynamic=False, backend="aot_eager")
            return model, *rest

        DistributedTrainer.parts = parts
        trainer = DistributedTrainer(config, folder / engine, team, engine=engine)
        DistributedTrainer.parts = build
        seen[engine] = [trainer.training_step() for _ in range(2)]
    return seen


def test_compiled_attention_trains_the_same_under_every_engine(corpus, tmp_path):
    config = tiny(corpus)
    for name in ("alone", "ddp", "fsdp"):
        folder_of(config, tmp_path / name)
    trainer, found = Trainer(config, tmp_path / "alone"), together(2, compiled, config, tmp_path)[0]
    alone = [trainer.training_step() for _ in range(2)]
    for engine, steps in found.items():
        assert all(abs(a[name] - b[name]) < 1e-5 for a, b in zip(alone, steps, strict=True) for name in a), engine


def test_parts_of_a_batch_add_up_to_it(corpus, tmp_path):
    """Without the balance loss, whose statistics are of a part, two parts are one batch."""
    objective = JOINT | {"balance": 0.0, "lambda_sticky": 0.1}
    whole, parts = (curve(Trainer(tiny(corpus, steps=20, objective=objective, accumulate=n), folder_of(tiny(corpus), tmp_path / str(n)))) for n in (1, 2))
    assert all(abs(a[name] - b[name]) < 1e-4 for a, b in zip(whole, parts) for name in a)
    assert tiny(corpus, accumulate=2).hash != tiny(corpus).hash == tiny(corpus, accumulate=1).hash
    with pytest.raises(ConfigError, match="batch_size=4 must be a multiple of accumulate=3"):
        tiny(corpus, accumulate=3)


def test_parts_of_a_batch_are_the_same_for_any_number_of_processes(corpus, tmp_path):
    config = tiny(corpus, steps=12, accumulate=2)
    for name in ("alone", *ENGINES):
        folder_of(config, tmp_path / name)
    alone, found = curve(Trainer(config, tmp_path / "alone")), together(2, curves_of, config, tmp_path)
    for engine in ENGINES:
        assert all(abs(a[name] - b[name]) < 1e-4 for a, b in zip(alone, found[0][engine], strict=True) for name in a), engine


def four(team, config, folder):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    trainer = DistributedTrainer(config, folder, team, engine="hsdp")
    trainer.restore()
    first = trainer.training_step()
    trainer.step += 1
    trainer.save()
    return [first, trainer.training_step()]


def test_two_nodes_of_two_processes_each_hold_a_copy_in_parts(corpus, tmp_path):
    config = tiny(corpus)
    folder = folder_of(config, tmp_path / "run")
    steps = together(4, four, config, folder)[0]
    alone = Trainer(config, shutil.copytree(folder, tmp_path / "alone"))
    first = Trainer(config, tmp_path).training_step()
    alone.restore()
    assert alone.step == 1
    for mine, theirs in zip([first, alone.training_step()], steps, strict=True):
        assert all(abs(mine[name] - theirs[name]) < 1e-5 for name in mine)


# ------------------------------------------------------------------------------------------------------------ the text


@pytest.mark.parametrize("size, accumulate", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)])
def test_no_document_is_seen_twice_or_missed(corpus, size, accumulate):
    """Over an epoch the processes' inputs together are every training token that one process reads, each as often."""
    config = tiny(corpus, batch_size=16, accumulate=accumulate)
    stream = prepare(DataConfig(corpus=corpus, heldout_tokens=256, dev_tokens=128)).stream()
    steps = stream.epoch_tokens // (16 * 16)
    assert steps >= 4
    members = [SimpleNamespace(config=config, team=SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
    for step in range(steps):
        parts = [stream.batch(step, 16, 16, DistributedTrainer.rows(member, part)) for part in range(accumulate) for member in members]
        assert np.array_equal(np.concatenate(parts), stream.batch(step, 16, 16))
    # And one process reads no position twice: lanes of an epoch's 16th part do not reach into one another.
    starts = np.arange(16) * stream.epoch_tokens // 16
    assert (starts[:-1] + steps * 16 <= starts[1:]).all() and starts[-1] + steps * 16 <= stream.epoch_tokens


def encoders(team, config, folder, cache):
    """How often this process encodes text that nobody has encoded before."""
    from predmoe import token_files

    os.environ["PREDMOE_CACHE"] = str(cache)
    count, encode = [], token_files._encode
    token_files._encode = lambda *arguments: (count.append(1), encode(*arguments))
    DistributedTrainer(config, folder, team)
    return len(count)


def test_of_a_machines_processes_one_encodes_the_text(corpus, tmp_path):
    config = tiny(corpus)
    assert together(2, encoders, config, folder_of(config, tmp_path / "run"), tmp_path / "cache") == [1, 0]


# --------------------------------------------------------------------------------------------------------- checkpoints


def written(team, config, folder, engine):
    """Ten steps, a checkpoint, and the terms of the step after it."""
    trainer = DistributedTrainer(config, folder, team, engine=engine)
    trainer.restore()
    for _ in range(10):
        trainer.log(terms=trainer.training_step())
        trainer.step += 1
    trainer.save()
    return trainer.training_step()


def resumed(team, config, folder, engine):
    trainer = DistributedTrainer(config, folder, team, engine=engine)
    trainer.restore()
    return [trainer.step, trainer.training_step()]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_what_two_processes_wrote_any_number_goes_on_from(corpus, tmp_path, engine):
    config = tiny(corpus, objective=JOINT | {"lambda_lookup": 0.1})
    folder = folder_of(config, tmp_path / "two")
    following = together(2, written, config, folder, engine)[0]
    assert (folder / "state.json").exists() == (engine == "fsdp") != (folder / "state.pt").exists()
    copies = [shutil.copytree(folder, tmp_path / f"copy {i}") for i in range(3)]
    single = Trainer(config, copies[0])
    single.restore()
    found = [[single.step, single.training_step()], together(4, resumed, config, copies[1], "fsdp")[0], together(2, resumed, config, copies[2], "ddp")[0]]
    for step, terms in found:
        assert step == 10
        assert all(abs(terms[name] - following[name]) < 1e-5 for name in following)
    single.step += 1
    single.save()   # one process writes a whole file, and what the two wrote goes
    assert (copies[0] / "state.pt").exists() and not list(copies[0].glob("state-*")) and sharding.saved(copies[0]) is None


def test_a_damaged_part_is_a_sentence_that_names_it(corpus, tmp_path, capfd):
    config = tiny(corpus)
    folder = folder_of(config, tmp_path / "run")
    together(2, written, config, folder, "fsdp")
    part, head = folder / "state-00000010" / "__1_0.distcp", folder / "state-00000010" / ".metadata"
    good, described = part.read_bytes(), head.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 16   # torch loads it without a word
    for path, text, said in ((part, flipped, "__1_0.distcp: the checksum of .* is not that of its bytes"), (part, good[: len(good) // 2], "__1_0.distcp: it is cut off"),
                             (part, b"", "it is cut off"), (head, described[:100], "truncated")):
        path.write_bytes(text)
        with pytest.raises(TrainingError, match=rf"cannot resume from .*state-00000010: it is damaged or of another run \([^\n]*{said}\); .*or remove {folder / 'state.json'} to train"):
            Trainer(config, folder).restore()
        part.write_bytes(good)
    assert capfd.readouterr().err == ""   # no page of torch's beside the sentence
    head.write_bytes(described)
    Trainer(config, folder).restore()
    for path in (part, head):
        path.unlink()
        with pytest.raises(TrainingError, match=f"No such file or directory: .*{path.name}.*or remove"):
            Trainer(config, folder).restore()


def full(team, config, folder):
    """A checkpoint, and another one for which the second process has no room; the sentence."""
    from torch.distributed.checkpoint import FileSystemWriter

    trainer = DistributedTrainer(config, folder, team, engine="fsdp")
    trainer.restore()
    for step in range(2):
        trainer.log(terms=trainer.training_step())
        trainer.step += 1
        if step == 0:
            trainer.save()
    if team.rank == 1:
        FileSystemWriter.write_data = no_space
    try:
        trainer.save()
    except TrainingError as error:
        return str(error)


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_last_checkpoint_and_no_remains(corpus, tmp_path):
    config = tiny(corpus)
    folder = folder_of(config, tmp_path / "run")
    for said in together(2, full, config, folder):
        assert said.startswith(f"cannot save step 2 in {folder}: ") and "No space left on device" in said
        assert said.endswith("; the last good checkpoint stays; free some space and run again")
    assert [path.name for path in folder.glob("state-*")] == ["state-00000001"]
    assert together(1, resumed, config, folder, "fsdp")[0][0] == 1


def test_a_part_that_cannot_be_written_says_what_the_system_said(corpus, tmp_path):
    """A limit on the size of files in the disk's place: torch's own error is one about positions in an archive."""
    trainer = Trainer(tiny(corpus), folder_of(tiny(corpus), tmp_path / "run"))
    trainer.restore()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"^OSError: \[Errno 27\] File too large$"):
            sharding.save(trainer, leader=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(trainer.folder.glob("state*"))


def sent(team, config, folder):
    """Bytes that an FSDP step gathers from the other process and scatters to it, by torch's own calls."""
    trainer = DistributedTrainer(config, folder, team, engine="fsdp")
    trainer.training_step()
    seen = {"gathered": 0, "scattered": 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            name = function.overloadpacket.__name__
            if name in ("_allgather_base_", "_reduce_scatter_base_"):
                whole = max(x.nbytes for x in arguments if isinstance(x, torch.Tensor))
                seen["gathered" if "gather" in name else "scattered"] += whole * (team.size - 1) // team.size
            return function(*arguments, **(keywords or {}))

    with Watch():
        trainer.training_step()
    return seen


def test_what_a_step_sends_is_what_the_plan_on_paper_says(corpus, tmp_path):
    config = tiny(corpus)
    folder = folder_of(config, tmp_path / "run")
    plan = budget.communication(config, budget.Cluster(gpus=2, gpus_per_node=2), engine="fsdp")
    for seen in together(2, sent, config, folder):
        assert seen["gathered"] == pytest.approx(plan["gathered"], rel=0.01) and seen["scattered"] == pytest.approx(plan["scattered"], rel=0.01)


# ---------------------------------------------------------------------------------------------------------- what is said


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_built(corpus, tmp_path, capsys):
    team = SimpleNamespace(rank=0, size=3, leader=True)
    with pytest.raises(ConfigError, match="batch_size=4 in 1 parts cannot be divided among 3 processes"):
        DistributedTrainer(tiny(corpus), tmp_path, team)
    with pytest.raises(ConfigError, match="engine='zero' is unknown; choose one of ddp, fsdp, hsdp"):
        DistributedTrainer(tiny(corpus), tmp_path, team, engine="zero")
    for several, said in (({"nproc": 0}, "nproc=0 must be at least 1"), ({"nproc": 8}, "cannot be divided among 8 processes"),
                          ({"engine": "zero"}, "engine='zero' is unknown"), ({"nproc": 3, "engine": "fsdp"}, "among 3 processes: choose a number that divides 4")):
        with pytest.raises(ConfigError, match=said):
            runs.get_or_train(tiny(corpus), store=tmp_path / "store", **several)
        with pytest.raises(ConfigError, match=said):
            fleet.work([(tiny(corpus), [])], store=tmp_path / "store", **several)
    assert not (tmp_path / "store").exists()
    folder = folder_of(tiny(corpus), tmp_path / "run")
    assert worker.main([str(folder), "--engine", "zero"]) == 2 and "engine='zero' is unknown" in capsys.readouterr().err


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="process 2 of this machine has no GPU of its own, as there are 2: start at most 2"), distributed.team("cuda"):
        pass


@pytest.mark.parametrize("own, said", [([4] * 8, ""), ([2, 2], ""), ([1, 1, 1], ""), ([4, 4, 4, 4, 2, 2], "of 6 processes a node has 2 or 4"),
                                       ([4, 4, 4, 4, 2, 2, 2, 2], "of 8 processes a node has 2 or 4"), ([4, 4, 4], "of 3 processes a node has 4")])  # fmt: skip
def test_nodes_of_unlike_size_cannot_hold_a_copy_each(own, said):
    with pytest.raises(ConfigError, match=f"^hsdp: every node holds a copy, .*{said}: start equally many on each node, or take fsdp$") if said else contextlib.nullcontext():
        distributed.check_nodes(own)


def test_provenance_says_how_many_processes_and_nothing_where_it_was_one(corpus, tmp_path):
    source = tmp_path / "provenance.json"
    write_json(source, {"commit": "c"})
    record(source, description(1, "ddp", "cpu"))
    assert json.loads(source.read_text()) == {"commit": "c"}
    for size, engine in ((4, "fsdp"), (4, "fsdp"), (1, "ddp")):
        record(source, description(size, engine, "cuda:0"))
    assert json.loads(source.read_text())["processes"] == [
        {"processes": 4, "engine": "fsdp", "device": "cuda"}, {"processes": 1, "engine": "one process", "device": "cuda"}]  # fmt: skip


def test_a_paused_run_goes_on_to_the_same_bits(corpus, tmp_path):
    whole = finished(tiny(corpus), tmp_path / "whole")
    folder = folder_of(tiny(corpus), tmp_path / "paused")
    told = []
    Trainer(tiny(corpus), folder, pause_after=0.0, progress=told.append).train()
    assert told[-1] == "paused at step 1/30" and (folder / "state.pt").exists() and not (folder / "finished.json").exists()
    Trainer(tiny(corpus), folder).train()
    assert results(folder) == results(whole)


def test_the_command_passes_on_how_many_processes(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(runs, "get_or_train", lambda run, *, store, report, **several: seen.append(several) or SimpleNamespace(path=tmp_path))
    assert cli.main(["train", "--store", str(tmp_path)]) == 0
    assert cli.main(["train", "--store", str(tmp_path), "--nproc", "4", "--engine", "hsdp"]) == 0
    assert cli.main(["train", "--store", str(tmp_path), "--nproc", "1", "--engine", "hsdp"]) == 0   # goes on from what several left
    assert seen == [{}, {"nproc": 4, "engine": "hsdp"}, {}] and not capsys.readouterr().err
    assert cli.main(["train", "--store", str(tmp_path), "--engine", "fsdp"]) == 2 and len(seen) == 3
    assert "--engine would have no effect on a run of one process" in capsys.readouterr().err
