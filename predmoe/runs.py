"""The run store: a run is its configuration, its folder is named by the configuration's hash.

    STORE/HASH/config.json provenance.json metrics.jsonl timing.json finished.json   small, kept in git for real profiles
    STORE/HASH/posthoc-HASH.json locality-HASH.json downstream-HASH.json             measurements of the finished run
    STORE/HASH/checkpoint/ state.pt log.txt                                          never in git

`get_or_train` and `get_or_measure` return what is there, resume what is broken and start what is missing, each run in a
child process of its own, so that a notebook can be interrupted at any moment without loss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predmoe import children, corpora, distributed, variables
from predmoe.checkpoint import find_checkpoint
from predmoe.config import PREDICTORS, ConfigError, DownstreamConfig, LocalityConfig, PosthocConfig, RunConfig, stable_hash, to_dict
from predmoe.files import read_config, read_json, read_lines, write_json
from predmoe.finished import TIMING, check_weights, is_complete, is_finished
from predmoe.measured import read_measurement
from predmoe.posthoc import heads_file
from predmoe.train import check_device, load_predictor

POLL_SECONDS = 0.5
REPORT_SECONDS = 20.0
Measurement = PosthocConfig | LocalityConfig | DownstreamConfig
KINDS = {"posthoc": PosthocConfig, "locality": LocalityConfig, "downstream": DownstreamConfig}   # what the file of a measurement begins with
# glibc gives large blocks back at each free and faults them in again at each step: told not to, a step is 5% faster.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}



def same_bits() -> dict[str, str]:
    """What a child process is told so that processors with and without AVX-512 give the same bits: torch takes AVX2 kernels on both."""
    info = Path("/proc/cpuinfo")
    return {"ATEN_CPU_CAPABILITY": "avx2"} if info.exists() and " avx2 " in info.read_text() else {}


class RunFailed(RuntimeError):
    """A child process ended with an error; the message has its last words and where its log lies."""


@dataclass(frozen=True)
class Run:
    """A folder of the store."""

    path: Path
    config: RunConfig

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    @property
    def has_checkpoint(self) -> bool:
        return is_complete(self.path, self.config)

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl: training terms, dev evaluations, and the final held-out one."""
        return read_lines(self.path / "metrics.jsonl")

    def check(self) -> None:
        """Raise ConfigError where a small file of the run is damaged; one that is missing is not."""
        if (source := self.path / "config.json").exists() and (found := read_config(source, RunConfig).hash) != self.config.hash:
            raise ConfigError(f"{source} describes run {found}, not {self.config.hash}; restore it, or remove its folder")
        for name, needed in (("timing.json", TIMING), ("provenance.json", {})):
            if (source := self.path / name).exists():
                read_json(source, needed)
        if self.finished and (self.path / "metrics.jsonl").exists():   # of an unfinished run the last line may be half written
            self.metrics()

    def measurement(self, how: Measurement) -> dict | None:
        """The measurement, or None where there is none. Raises ConfigError where its file is damaged."""
        source = self.path / f"{measurement_name(how)}.json"
        return read_measurement(source, type(how)) if source.exists() else None

    def has_heads(self, posthoc: PosthocConfig) -> bool:
        """Whether the checkpoint and the post-hoc heads of a measurement are there: a clone of a repository has neither. Heads without their measurement do not
        count: of a run that was trained again to other bits they are left over."""
        return self.has_checkpoint and (self.path / f"{posthoc_name(posthoc)}.json").exists() and all(heads_file(self.path, posthoc_name(posthoc), kind).exists() for kind in PREDICTORS)


def kind_of(how: Measurement) -> str:
    """Which of KINDS a measurement is."""
    return next(kind for kind, made_by in KINDS.items() if type(how) is made_by)


def measurement_name(how: Measurement) -> str:
    """A measurement's address: its kind and the hash of its configuration."""
    return f"{kind_of(how)}-{stable_hash(how)}"


def posthoc_name(posthoc: PosthocConfig) -> str:
    return measurement_name(posthoc)


def default_store(profile: str) -> Path:
    """$PREDMOE_STORE where it is set (a disk shared by machines), else outputs/PROFILE/runs."""
    from predmoe import paths

    return variables.folder("PREDMOE_STORE") or paths.outputs(profile) / "runs"


def open_run(config: RunConfig, store: Path) -> Run:
    """The run's folder, made if need be. Refuses a folder that holds another configuration."""
    path = Path(store) / config.hash
    path.mkdir(parents=True, exist_ok=True)
    source = path / "config.json"
    if not source.exists():
        write_json(source, to_dict(config))
    elif (found := read_config(source, RunConfig).hash) != config.hash:
        raise ConfigError(f"{source} describes run {found}, not {config.hash}; restore it, or remove its folder")
    return Run(path, config)


def get_or_train(config: RunConfig, *, store: Path, nproc: int = 1, engine: str = "ddp", report=print) -> Run:
    """The finished run of `config` with its checkpoint; trained or resumed in a child process where need be.

    `nproc` processes share each batch, as `engine` ("ddp", "fsdp", "hsdp") says; the run is the same one, and its provenance says how. Raises ConfigError where they cannot (`distributed.check`).
    """
    distributed.check(config, nproc, engine)
    run = open_run(config, store)
    if run.has_checkpoint:
        find_checkpoint(run.path / "checkpoint", config.model)
        check_weights(run.path)
        load_predictor(run.path / "checkpoint", config)
    else:
        _work([(run, [])], parallel=1, report=report, nproc=nproc, engine=engine)
    return run


def get_or_fit(config: RunConfig, posthoc: PosthocConfig, *, store: Path, report=print) -> Run:
    """The finished run of `config` with its checkpoint and its post-hoc heads; what is missing is made in a child process.

    A measurement that is there is not changed by fitting its heads again. Raises ConfigError where the checkpoint is not the one that the run ended with.
    """
    run = open_run(config, store)
    if run.has_heads(posthoc):
        check_weights(run.path)
    else:   # whose child checks them
        write_json(run.path / f"{posthoc_name(posthoc)}.config.json", to_dict(posthoc))
        _work([(run, [posthoc])], parallel=1, report=report)
    return run


def get_or_measure(configs: Sequence[RunConfig], posthoc: PosthocConfig, *, profile: str, store: Path | None = None, parallel: int = 2, report=print,
                   **further: LocalityConfig | DownstreamConfig | None) -> list[dict]:  # fmt: skip
    """Measurements of `configs`, in their order; what is missing is trained and measured, `parallel` runs side by side.

    `further`: other measurements by their kind (`locality=`, `downstream=`); each record has them under that name. A measurement
    that is there needs no checkpoint: a fresh clone reads the committed ones. One that is missing where the checkpoint is gone, as in a clone, is reported and the
    run trained again, to the same bits; the measurements that are there stay (where a machine gives other bits, all are made anew). Raises RunFailed when a child fails, after the
    others have ended; what they finished stays.
    """
    store = Path(store) if store else default_store(profile)
    further = {kind: how for kind, how in further.items() if how is not None}
    if wrong := [kind for kind, how in further.items() if kind not in KINDS or type(how) is not KINDS[kind]]:
        raise ConfigError(f"{wrong[0]}={further[wrong[0]]!r} is no measurement of that name; there are {', '.join(KINDS)}")
    measure_missing([(config, [posthoc, *further.values()]) for config in configs], store=store, parallel=parallel, report=report)
    found = [open_run(config, store) for config in configs]
    return [run.measurement(posthoc) | {kind: run.measurement(how) for kind, how in further.items()} for run in found]


def measure_missing(wanted: Sequence[tuple[RunConfig, Sequence[Measurement]]], *, store: Path, parallel: int, report=print, **how_many) -> None:
    """Train and measure what is missing of the `wanted` measurements of each run, in this order; errors as `get_or_measure`.

    `how_many`: nproc and engine as `get_or_train` takes them, and further options of the worker; one of them may let a run pause.
    """
    jobs = _missing(wanted, store)
    if again := [describe(run.config) for run, _ in jobs if run.finished and not run.has_checkpoint]:
        report(f"{len(again)} finished runs have no checkpoint here, and a measurement that is missing needs one, so they are trained again: {'; '.join(again)}")
    _work(jobs, parallel=parallel, report=report, **how_many)
    if discarded := [job for job in _missing(wanted, store) if job[0].finished]:
        report(f"trained again to other bits, on another kind of machine, so all their measurements are made anew: {'; '.join(describe(run.config) for run, _ in discarded)}")
        _work(discarded, parallel=parallel, report=report, **how_many)


def _missing(wanted: Sequence[tuple[RunConfig, Sequence[Measurement]]], store: Path) -> list[tuple[Run, list[Measurement]]]:
    """Each run that lacks one of its measurements, once, with those that it lacks; their descriptions are written for the child."""
    jobs: dict[Path, tuple[Run, list]] = {}
    for config, measurements in wanted:
        run = open_run(config, store)
        if missing := [how for how in measurements if run.measurement(how) is None]:
            jobs[run.path] = run, missing
            for how in missing:
                write_json(run.path / f"{measurement_name(how)}.config.json", to_dict(how))
    return list(jobs.values())


def _work(jobs: list[tuple[Run, list[Measurement]]], *, parallel: int, report, **how_many) -> None:
    """Run the jobs' child processes, `parallel` at a time, telling of each one's progress now and then. A job is a run and what to measure."""
    if parallel < 1:
        raise ConfigError(f"parallel={parallel} must be at least 1")
    refused = {run.path: why for run, _ in jobs if (why := _unusable(run.config))}   # as the child would find out, after some seconds
    jobs, failures = [job for job in jobs if job[0].path not in refused], [f"run {path.name} not started: {why}" for path, why in refused.items()]
    for failure in failures if jobs else ():   # now, and not when the others have ended
        report(failure)
    waiting, running, done, told, label = list(jobs), {}, 0, time.monotonic(), labels([run.config for run, _ in jobs])
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                run, measurements = waiting.pop(0)
                log = run.path / "log.txt"
                begun = log.stat().st_size if log.exists() else 0
                running[_start(run, measurements, **how_many)] = run, begun
            time.sleep(POLL_SECONDS)
            for child in [c for c in running if c.poll() is not None]:
                run, begun = running.pop(child)
                done += 1
                if child.returncode:
                    failures.append(f"run {run.config.hash} {_why(run, child.returncode, begun)}")
                report(f"[{done}/{len(jobs)}] {label[run.config.hash]}: {'failed' if child.returncode else 'done'}")
            if running and time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                report("; ".join(f"{label[run.config.hash]}: {_last_line(run, begun)}" for run, begun in running.values()))
    finally:
        for child in running:  # an interrupt: the children stop too, and resume from their checkpoints next time
            child.terminate()
        for child in running:
            child.wait()
    if failures:
        raise RunFailed("; ".join(failures))


def _unusable(config: RunConfig) -> str:
    """Why this machine cannot train or measure a run, as far as a glance tells: no such device, no such files. Empty where it can."""
    try:
        check_device(config.train.device)
        corpora.check(config.data.corpus)
    except ConfigError as error:
        return str(error)
    return ""


def _start(run: Run, measurements: list[Measurement], *, nproc: int = 1, engine: str = "ddp", options: Sequence[str] = ()) -> subprocess.Popen:
    threads = str(run.config.train.threads)
    several = ["predmoe.launch", "--nproc", str(nproc), str(run.path), "--engine", engine]
    command = [sys.executable, "-m", *(several if nproc > 1 else ["predmoe.worker", str(run.path)])]
    for how in measurements:
        command += [f"--{kind_of(how)}", measurement_name(how)]
    command += options
    exact = same_bits() if run.config.train.dtype == "float32" else {}   # torch's bf16 attention has no AVX2 kernel where there is AVX-512
    own = {name: value for name, value in os.environ.items() if name not in variables.TEAM}   # a child is no part of a team that this process may be of
    told = KEEP_MEMORY | exact | own | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | children.work_for_parent()
    with open(run.path / "log.txt", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=told)


def _why(run: Run, exit_code: int, begun: int) -> str:
    """How the run's child ended, in its own last words where its log has them beyond the `begun` bytes that it had before."""
    if unsaid := children.unsaid(exit_code):
        kept = "the last good checkpoint stays" if any((run.path / name).exists() for name in ("state.pt", "state.json")) else "no earlier checkpoint exists"
        return f"failed: cannot write to the disk of {run.path}, not even to its log: {unsaid}; {kept}; free some space there and run again"
    log = run.path / "log.txt"
    if exit_code > 0 and log.stat().st_size <= begun:
        return f"failed: exit code {exit_code} without a word in its log (log: {log}); {children.remains(run.path)}"
    if exit_code < 0:
        by = ", which is also how the kernel ends what needs more memory than there is" if exit_code == -signal.SIGKILL else ""
        return f"was ended by signal {-exit_code}{by}, after: {_last_line(run, begun)} (log: {log}); {children.remains(run.path)}"
    return f"failed: {_last_line(run, begun)} (log: {log})"


def _last_line(run: Run, begun: int) -> str:
    """What a run's child said last, beyond the `begun` bytes that its log had before, without the mark of a sentence on standard error: who passes it on has its own."""
    lines = (run.path / "log.txt").read_bytes()[begun:].decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix(children.MARK) if lines else "starting"


def describe(config: RunConfig) -> str:
    """A run in a few words: what differs from an ordinary model, and its seed."""
    o, m = config.objective, config.model
    words = [] if m.routing == "topk" else [f"{m.routing} router" + (f" by {m.early_by}" if m.early_by else "")]
    if o.lambda_pred:
        words.append(f"{'isolated' if o.gradient == 'none' else 'joint'} {o.lambda_pred:g} {o.target}/{o.gradient}{' and next token' if config.predictor.next_token else ''}")
    if o.lambda_sticky:
        words.append(f"sticky {o.lambda_sticky:g}")
    if o.lambda_ent:
        words.append(f"entropy {o.lambda_ent:g}")
    if o.lambda_lookup:
        words.append(f"lookup penalty {o.lambda_lookup:g}")
    if config.finetune is not None:
        f = config.finetune
        how = {"lora": f"LoRA of rank {f.rank}", "half": "fine-tune of the last half", "full": "fine-tune of all weights", "none": "no training"}[f.trained]
        words.append(f"{how} on {'run ' + f.stock.hash if f.stock else f.checkpoint}")
    order = f", data order {config.data.order_seed}" if config.data.order_seed else ""
    return f"{' + '.join(words) or 'baseline'}, seed {config.train.seed}{order}"


FOLLOWS = ("steps", "warmup_steps", "num_heads", "expert_size")   # what a change of size brings with it: named where nothing else tells runs apart


def labels(configs: Sequence[RunConfig], *, besides: Sequence[str] = ()) -> dict[str, str]:
    """Hash -> `describe`, and, where runs would read the same, few fields that tell them apart: "baseline, seed 0 (hidden_size 96, num_experts 16)".
    `besides`: fields that the caller tells of every run anyway, so that they need not tell runs apart here."""
    alike: dict[str, dict[str, RunConfig]] = {}
    for config in configs:
        alike.setdefault(describe(config), {})[config.hash] = config
    return {digest: f"{text} ({apart})" if apart else text for text, group in alike.items() for digest, apart in _apart(group, besides).items()}


def _apart(group: dict[str, RunConfig], besides: Sequence[str]) -> dict[str, str]:
    """The name and value of few fields for each of the runs, by hash, so that no two have the same; of equally telling fields the first."""
    fields = {digest: {(section, name): value for section, values in to_dict(config).items() if isinstance(values, dict) for name, value in values.items()}
              for digest, config in group.items()}  # fmt: skip
    told = lambda names: len({str([mine.get(name) for name in names]) for mine in fields.values()})  # noqa: E731
    known = list(dict.fromkeys(name for mine in fields.values() for name in mine if name[1] in besides))
    chosen = list(known)
    for follows in (False, True):
        names = [name for name in dict.fromkeys(name for mine in fields.values() for name in mine) if (name[1] in FOLLOWS) == follows]
        while names and told([*chosen, best := max(names, key=lambda name: told([*chosen, name]))]) > told(chosen):
            chosen.append(best)
    return {digest: ", ".join(f"{name[1]} {mine.get(name)}" for name in chosen[len(known) :]) for digest, mine in fields.items()}
