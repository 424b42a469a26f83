"""The run store: a run is its configuration, its folder is named by the configuration's hash.

    STORE/HASH/config.json provenance.json metrics.jsonl timing.json finished.json   small, kept in git for real profiles
    STORE/HASH/posthoc-HASH.json                                                     a measurement of the finished run
    STORE/HASH/checkpoint/ state.pt log.txt                                          never in git

`get_or_train` and `get_or_measure` return what is there, resume what is broken and start what is missing, each run in a
child process of its own, so that a notebook can be interrupted at any moment without loss.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predmoe.config import PREDICTORS, ConfigError, PosthocConfig, RunConfig, build, stable_hash, to_dict
from predmoe.posthoc import heads_file
from predmoe.train import is_complete, read_json, read_lines, write_json

POLL_SECONDS = 0.5
REPORT_SECONDS = 20.0
# glibc gives large blocks back at each free and faults them in again at each step: told not to, a step is 5% faster.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


class RunFailed(RuntimeError):
    """A child process ended with an error; the message has its last words and where its log lies."""


@dataclass(frozen=True)
class Run:
    """A folder of the store."""

    path: Path
    config: RunConfig

    @property
    def finished(self) -> bool:
        return (self.path / "finished.json").exists()

    @property
    def has_checkpoint(self) -> bool:
        return is_complete(self.path, self.config)

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl: training terms, dev evaluations, and the final held-out one."""
        return read_lines(self.path / "metrics.jsonl")

    def measurement(self, posthoc: PosthocConfig) -> dict | None:
        source = self.path / f"{posthoc_name(posthoc)}.json"
        return read_json(source) if source.exists() else None

    def has_heads(self, posthoc: PosthocConfig) -> bool:
        """Whether the checkpoint and the post-hoc heads of a measurement are there: a clone of a repository has neither."""
        return self.has_checkpoint and all(heads_file(self.path, posthoc_name(posthoc), kind).exists() for kind in PREDICTORS)


def posthoc_name(posthoc: PosthocConfig) -> str:
    return f"posthoc-{stable_hash(posthoc)}"


def default_store(profile: str) -> Path:
    """$PREDMOE_STORE where it is set (a disk shared by machines), else outputs/PROFILE/runs."""
    from predmoe import paths

    return Path(os.environ["PREDMOE_STORE"]) if os.environ.get("PREDMOE_STORE") else paths.outputs(profile) / "runs"


def open_run(config: RunConfig, store: Path) -> Run:
    """The run's folder, made if need be. Refuses a folder that holds another configuration."""
    path = Path(store) / config.hash
    path.mkdir(parents=True, exist_ok=True)
    source = path / "config.json"
    if not source.exists():
        write_json(source, to_dict(config))
    elif (found := build(RunConfig, read_json(source)).hash) != config.hash:
        raise ConfigError(f"{source} describes run {found}, not {config.hash}; restore it, or remove its folder")
    return Run(path, config)


def get_or_train(config: RunConfig, *, store: Path, report=print) -> Run:
    """The finished run of `config` with its checkpoint; trained or resumed in a child process where need be."""
    run = open_run(config, store)
    if not run.has_checkpoint:
        _work([(run, None)], parallel=1, report=report)
    return run


def get_or_fit(config: RunConfig, posthoc: PosthocConfig, *, store: Path, report=print) -> Run:
    """The finished run of `config` with its checkpoint and its post-hoc heads; what is missing is made in a child process.

    A measurement that is there is not changed by fitting its heads again.
    """
    run = open_run(config, store)
    if not run.has_heads(posthoc):
        write_json(run.path / f"{posthoc_name(posthoc)}.config.json", to_dict(posthoc))
        _work([(run, posthoc)], parallel=1, report=report)
    return run


def get_or_measure(configs: Sequence[RunConfig], posthoc: PosthocConfig, *, profile: str, store: Path | None = None,
                   parallel: int = 2, report=print) -> list[dict]:
    """Measurements of `configs`, in their order; what is missing is trained and measured, `parallel` runs side by side.

    A measurement that is there needs no checkpoint: a fresh clone reads the committed ones. Raises RunFailed when a
    child fails, after the others have ended; what they finished stays.
    """
    store = Path(store) if store else default_store(profile)
    runs = [open_run(config, store) for config in configs]
    missing = {run.path: run for run in runs if run.measurement(posthoc) is None}
    for run in missing.values():
        write_json(run.path / f"{posthoc_name(posthoc)}.config.json", to_dict(posthoc))
    _work([(run, posthoc) for run in missing.values()], parallel=parallel, report=report)
    return [run.measurement(posthoc) for run in runs]


def _work(jobs: list[tuple[Run, PosthocConfig | None]], *, parallel: int, report) -> None:
    """Run the jobs' child processes, `parallel` at a time, telling of each one's progress now and then."""
    if parallel < 1:
        raise ConfigError(f"parallel={parallel} must be at least 1")
    waiting, running, failures, done, told = list(jobs), {}, [], 0, time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                run, posthoc = waiting.pop(0)
                running[_start(run, posthoc)] = run
            time.sleep(POLL_SECONDS)
            for child in [c for c in running if c.poll() is not None]:
                run = running.pop(child)
                done += 1
                if child.returncode:
                    how = f"was ended by signal {-child.returncode} after" if child.returncode < 0 else "failed"
                    failures.append(f"run {run.config.hash} {how}: {_last_line(run)} (log: {run.path / 'log.txt'})")
                report(f"[{done}/{len(jobs)}] {describe(run.config)}: {'failed' if child.returncode else 'done'}")
            if running and time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                report("; ".join(f"{describe(run.config)}: {_last_line(run)}" for run in running.values()))
    finally:
        for child in running:  # an interrupt: the children stop too, and resume from their checkpoints next time
            child.terminate()
        for child in running:
            child.wait()
    if failures:
        raise RunFailed("; ".join(failures))


def _start(run: Run, posthoc: PosthocConfig | None) -> subprocess.Popen:
    threads = str(run.config.train.threads)
    command = [sys.executable, "-m", "predmoe.worker", str(run.path)]
    if posthoc is not None:
        command += ["--posthoc", posthoc_name(posthoc)]
    environment = KEEP_MEMORY | os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with open(run.path / "log.txt", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)


def _last_line(run: Run) -> str:
    lines = (run.path / "log.txt").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "starting"


def describe(config: RunConfig) -> str:
    """A run in a few words: what differs from an ordinary model, and its seed."""
    o, m = config.objective, config.model
    words = [] if m.routing == "topk" else [f"{m.routing} router" + (f" by {m.early_by}" if m.early_by else "")]
    if o.lambda_pred:
        words.append(f"joint {o.lambda_pred:g} {o.target}/{o.gradient}")
    if o.lambda_sticky:
        words.append(f"sticky {o.lambda_sticky:g}")
    if o.lambda_ent:
        words.append(f"entropy {o.lambda_ent:g}")
    return f"{' + '.join(words) or 'baseline'}, seed {config.train.seed}"
