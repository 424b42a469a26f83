"""The child process of a run: `python -m predmoe.worker FOLDER [--posthoc NAME] [--locality NAME] [--downstream NAME]`.

Trains the run that FOLDER/config.json describes, or goes on where it was interrupted, and measures it where asked to.
Progress goes to standard output, line by line; a failure ends with one sentence on standard error and a non-zero exit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from predmoe import distributed, locking, provenance, sharding
from predmoe.budget import check_memory, out_of_memory, too_large
from predmoe.checkpoint import load_checkpoint
from predmoe.children import FAILED, end_with_parent, last_words, remains, say
from predmoe.config import PREDICTORS, ConfigError, DownstreamConfig, LocalityConfig, PosthocConfig, RunConfig
from predmoe.data import Tokens, prepare
from predmoe.files import read_config, read_json, read_lines, reason, write_json
from predmoe.finished import TIMING, check_weights, is_complete, weights_hash
from predmoe.locking import FolderLock, describe
from predmoe.posthoc import heads_file, measure
from predmoe.runs import open_run
from predmoe.train import CHECKPOINT_SECONDS, Trainer, TrainingError, check_device, load_predictor

FURTHER = {"locality": LocalityConfig, "downstream": DownstreamConfig}   # measurements besides the post-hoc one


def train(folder: Path, config: RunConfig, *, checkpoint_seconds: float = CHECKPOINT_SECONDS, pause_after: float | None = None, team=None, engine: str = "ddp",
          progress=print, owned=lambda: None) -> None:  # fmt: skip
    """Bring the run to its end, or to a pause, unless it is finished and its checkpoint is there. `team`, `engine`: as `distributed` has them;
    `owned`: as `Trainer` has it."""
    if is_complete(folder, config):
        (folder / "state.pt").unlink(missing_ok=True)  # left by a kill in the very last step
        sharding.remove(folder)
        return
    if (folder / "checkpoint").exists() and not (folder / "checkpoint").is_dir():
        raise ConfigError(f"{folder / 'checkpoint'} is no folder; remove it, the weights are written there")
    distributed.check(config, team.size if team else 1, engine)
    if team is None and config.train.device == "cpu":
        check_memory(config)
    options = {"checkpoint_seconds": checkpoint_seconds, "pause_after": pause_after, "progress": progress, "owned": owned}
    if config.finetune is not None:
        if config.finetune.stock is not None and not train_stock(folder, config.finetune.stock, **options):
            return
        from predmoe.finetune import FinetuneTrainer   # transformers and peft, which nothing else needs

        trainer = FinetuneTrainer(config, folder, **options)
    else:
        trainer = Trainer(config, folder, **options) if team is None else distributed.DistributedTrainer(config, folder, team, engine=engine, **options)
    source, origin = folder / "provenance.json", trainer.origin()
    begun = read_json(source) if trainer.resumable and source.exists() else {}
    for what, key in ((f"the text of {config.data.corpus!r}", "data_hash"), ("the stock model", "stock_weights")):
        if key in origin and begun.get(key, origin[key]) != origin[key]:
            raise TrainingError(f"{what} has changed since this run began (it was {begun[key]}, now {origin[key]}): restore it, or remove {folder} to train the run anew")
    if trainer.leader:
        if not trainer.resumable or not source.exists():
            write_json(source, provenance.capture() | origin | ({"device": trainer.device_report} if trainer.device_report else {}))
        distributed.record(source, distributed.description(team.size if team else 1, engine, config.train.device))
    trainer.train()


def train_stock(folder: Path, stock: RunConfig, *, progress=print, **options) -> bool:
    """Bring the run that the run in `folder` starts from to its end, in the same store; waits where another works on it. False where it paused."""
    path = open_run(stock, folder.parent).path
    with FolderLock(path, waiting=lambda who: progress(f"waiting: {who} works on the stock model"), lost=lambda who: leave(path, who)) as lock:
        train(path, stock, progress=lambda line: progress(f"stock model: {line}"), **options | {"owned": lock.check})
        if complete := is_complete(path, stock):
            text_of(path, stock)   # raises where its weights are no longer what it ended with
        return complete


def text_of(folder: Path, config: RunConfig) -> Tokens:
    """The text of a finished run. Raises ConfigError where it, or the checkpoint, is no longer what the run ended with."""
    if config.finetune is None:
        tokens = prepare(config.data)
    else:
        from predmoe.finetune import prepare_text

        tokens = prepare_text(config)
    if (ended := read_json(folder / "finished.json").get("data_hash", tokens.hash)) != tokens.hash:
        raise ConfigError(f"the text of {config.data.corpus!r} changed after the run {folder} ended (it was {ended}, now {tokens.hash}): restore it, or remove the folder to train the run again")
    check_weights(folder)
    return tokens


def measure_run(folder: Path, config: RunConfig, posthoc: PosthocConfig, target: Path, *, progress=print) -> None:
    """Write the measurement of a finished run to `target`, and the fitted heads beside the checkpoint.

    A measurement that is there already stays: in a clone of a repository it is there and its heads are not.
    """
    check_device(config.train.device)
    torch.set_num_threads(config.train.threads)
    # Read before the fit, which takes minutes: a damaged file stops it at once.
    timing, trained_by = read_json(folder / "timing.json", TIMING), read_json(folder / "provenance.json")
    logged = [line for line in read_lines(folder / "metrics.jsonl") if line.get("step") == config.train.steps]
    terms, moved = [line["terms"] for line in logged if "terms" in line], [line for line in logged if "drift" in line]
    if not terms:
        raise ConfigError(f"{folder / 'metrics.jsonl'} has not the last training step; restore it from a copy, or remove the folder {folder} to train the run again")
    model = load_checkpoint(folder / "checkpoint", config.model).to(config.train.device)
    cotrained = load_predictor(folder / "checkpoint", config)
    result, fitted = measure(model, cotrained, config, text_of(folder, config), posthoc, progress=progress)
    result["terms_nats"] = terms[-1]
    if moved:   # of a fine-tune
        result |= {"drift": moved[-1]["drift"], "trained": moved[-1]["trained"]}
    result["seconds"]["train"] = timing["seconds"]
    result["tokens_per_second"] = timing["tokens_per_second"]
    result["weights"] = weights_hash(folder / "checkpoint")
    result["provenance"] = trained_by
    result["measured_by"] = provenance.capture()
    for kind, predictor in fitted.items():
        final = heads_file(folder, target.stem, kind)
        partial = final.with_suffix(".partial")
        try:
            save_file(predictor.state_dict(), partial)
            partial.chmod(0o644)   # the library leaves it to its owner alone
        except Exception:
            partial.unlink(missing_ok=True)   # a full disk needs the room
            raise
        partial.replace(final)
    if not target.exists():
        write_json(target, result)


def measure_further(folder: Path, config: RunConfig, how: LocalityConfig | DownstreamConfig, target: Path, *, progress=print) -> None:
    """Write another measurement of a finished run to `target`."""
    check_device(config.train.device)
    torch.set_num_threads(config.train.threads)
    model = load_checkpoint(folder / "checkpoint", config.model).to(config.train.device)
    tokens = text_of(folder, config)
    # Imported here: one loads numba, the other the harness, neither of which training needs.
    if isinstance(how, LocalityConfig):
        from predmoe import measure_locality

        result = measure_locality.measure(model, load_predictor(folder / "checkpoint", config), config, tokens, how, progress=progress)
    else:
        from predmoe import measure_downstream

        result = measure_downstream.measure(model, folder / "checkpoint", config, tokens, how, progress=progress)
    write_json(target, result | {"weights": weights_hash(folder / "checkpoint"), "provenance": read_json(folder / "provenance.json"), "measured_by": provenance.capture()})


def claim(lock: FolderLock, *, look_seconds: float = 1.0) -> None:
    """Take the lock of a run that several processes share. Where it is held, as long is waited as it takes to find out that the holder is dead
    (a job that ended early and was submitted again, elsewhere), and no longer: the other processes have a time limit. Raises ConfigError."""
    told, until = False, time.monotonic() + 1.2 * locking.STALE_SECONDS
    while not lock.claim():
        if time.monotonic() > until:
            raise ConfigError(f"{describe(lock.path)} works on the run in {lock.path.parent}; wait until it has ended")
        if not told:
            lock.waiting(describe(lock.path))
            told = True
        time.sleep(look_seconds)


def leave(folder: Path, who: str) -> None:
    """End this process at once: the run is another one's now, and two that write would spoil it."""
    error = ConfigError(f"{who} has taken over the run in {folder}, since nothing had been heard of this process for a minute; this one ends, and nothing is lost")
    distributed.report(error)
    last_words(str(error))
    os._exit(FAILED)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="predmoe.worker", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--posthoc", action="append", default=[], help="name of the measurement, once or several times: FOLDER/NAME.config.json says how, FOLDER/NAME.json is written")
    for kind in FURTHER:
        parser.add_argument(f"--{kind}", help="the same of a further measurement")
    parser.add_argument("--checkpoint-seconds", type=float, default=CHECKPOINT_SECONDS)
    parser.add_argument("--pause-after", type=float, help="seconds of training after which to save and end, the run unfinished")
    parser.add_argument("--engine", default="ddp", help="under torchrun: ddp (each process has the whole model) or fsdp (each has a part) or hsdp (a part of its node's)")
    options = parser.parse_args(arguments)
    folder = options.folder
    try:
        end_with_parent(folder)
        config = read_config(folder / "config.json", RunConfig)
        with contextlib.ExitStack() as held:
            team = held.enter_context(distributed.team(config.train.device)) if distributed.world_size() > 1 else None
            lock = FolderLock(folder, waiting=lambda who: say(f"waiting: {who} works on this run"), lost=lambda who: leave(folder, who))
            if team is None:
                held.enter_context(lock)
            elif team.leader:
                claim(lock)
                held.callback(lock.release)
            train(folder, config, checkpoint_seconds=options.checkpoint_seconds, pause_after=options.pause_after, team=team, engine=options.engine, progress=say,
                  owned=lock.check if team is None or team.leader else lambda: None)  # fmt: skip
            if team is not None and not team.leader or not is_complete(folder, config):
                return 0   # measured by the leader alone; a paused run is not measured
            for name in options.posthoc:
                if not ((target := folder / f"{name}.json").exists() and all(heads_file(folder, name, kind).exists() for kind in PREDICTORS)):
                    measure_run(folder, config, read_config(folder / f"{name}.config.json", PosthocConfig), target, progress=say)
            for kind, made_by in FURTHER.items():
                name = getattr(options, kind)
                if name and not (target := folder / f"{name}.json").exists():
                    measure_further(folder, config, read_config(folder / f"{name}.config.json", made_by), target, progress=say)
    except (ConfigError, TrainingError) as error:
        distributed.report(error)
        return last_words(str(error))
    except (MemoryError, RuntimeError) as error:
        if distributed.connection_lost(error):   # not reported to the launcher: it is never the cause
            return last_words(distributed.lost_sentence(error, remains(folder)))
        if not out_of_memory(error):
            raise
        distributed.report(error)
        return last_words(too_large(config, (str(error).splitlines() or [type(error).__name__])[0]))
    except (OSError, SafetensorError) as error:
        distributed.report(error)
        return last_words(f"cannot work in {folder}: {reason(error)}; what is finished stays; remove the cause and run again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
