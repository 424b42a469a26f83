"""`predmoe gpu-report`: tier A on a machine with one GPU and no network, some minutes at a time.

Every call goes on where the last one stopped: it trains the next missing arm, fits the post-hoc predictors, records a small trace, and
rewrites report.md and results.json of what there is. What a later call needs lies in the folder:

    OUT/runs/HASH/          the run store: measurements, logs; state.pt of a run that is not finished
    OUT/traces/             a trace per arm and seed, at most 16 MB each
    OUT/throughput.json     measured once per device
    OUT/settings.json       of what the folder is a report: one of other settings needs another folder
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import carry, config, provenance, recording, runs, studies, traces
from .config import to_dict
from .files import read_json, write_json

SPEED, SETTINGS = "throughput.json", "settings.json"
ARMS = {"baseline": {"lambda_pred": 0.0}, "joint": {"lambda_pred": 0.3}}
TRACE_BYTES = 16_000_000
LEAST_SECONDS = 45.0     # with less left, nothing new is begun
FINISHING = 60.0         # kept for the post-hoc fit, the trace and the report


@dataclass(frozen=True)
class Job:
    arm: str
    seed: int
    run: config.RunConfig


def jobs(tier: str, seeds: Sequence[int], changes: dict[str, dict]) -> list[Job]:
    """Baseline and joint, seed by seed, so that whole pairs come first; `changes` to the tier by section."""
    objective = changes.get("objective", {})
    rest = {name: section for name, section in changes.items() if name != "objective"}
    return [Job(arm, seed, config.tier(tier, seed=seed, objective=objective | ARMS[arm], **rest)) for seed in seeds for arm in ARMS]


def run(out: Path, *, tier: str = "a", seeds: Sequence[int] = (0, 1, 2), minutes: float = 8.0, changes: dict[str, dict] | None = None, posthoc: dict | None = None,
        tokens: Path | None = None, keep_weights: bool = False, peers: bool = True, report: Callable[[str], None] = print) -> int:  # fmt: skip
    """One call: as much as goes in `minutes`. Returns how many arms are still missing.

    `tokens`: an archive of `carry.pack`, unpacked where its tokens are not here. `keep_weights`: leave checkpoints of finished arms (1.4 GB each).
    Raises ConfigError for settings that cannot be used, runs.RunFailed where a child process fails.
    """
    config.positive("minutes", minutes)
    if len(set(seeds)) < len(seeds):
        raise config.ConfigError(f"seeds {' '.join(map(str, seeds))}: one is there twice; name each once")
    ending = time.monotonic() + 60 * minutes
    left = lambda: ending - time.monotonic()  # noqa: E731
    out, todo, fit = Path(out), jobs(tier, seeds, changes or {}), studies.posthoc_config(tier, posthoc or {})
    if todo[0].run.train.device.startswith("cuda") and not torch.cuda.is_available():
        raise config.ConfigError(f"no CUDA device here, which tier {tier} is for; on a CPU a small tier shows every stage: predmoe gpu-report --tier smoke --seeds 0 --out {out}")
    out.mkdir(parents=True, exist_ok=True)
    settle(out, todo[0].run, fit)
    if tokens is not None and (folder := carry.bring(tokens, todo[0].run.data)):   # the machine may be a fresh one in every call
        report(f"tokens: {folder.name}")
    if speed_of(out) is None:
        from . import throughput

        found = throughput.measure(todo[0].run, peers=peers, say=report)
        write_json(out / SPEED, found | {"provenance": provenance.capture()})
    write(out, todo, fit)   # now and after each arm: a call that is ended from outside comes no further
    for job in todo:
        if is_done(out, job, fit):
            if not keep_weights:   # of a call that ended between the trace and this
                discard_weights(out, job)
            continue
        if left() < LEAST_SECONDS:
            break
        report(f"{job.arm}, seed {job.seed}: {left() / 60:.1f} minutes left")
        store = out / "runs"
        runs.measure_missing([(job.run, [fit])], store=store, parallel=1, report=report, options=("--pause-after", f"{max(1.0, left() - FINISHING):.0f}"))
        found = runs.open_run(job.run, store)
        if found.measurement(fit) is None:
            report(f"{job.arm}, seed {job.seed}: paused, goes on with the next call")
            break
        finish(out, job, fit, keep_weights=keep_weights, report=report)
        write(out, todo, fit)
    missing = sum(not is_done(out, job, fit) for job in todo)
    report(f"{len(todo) - missing} of {len(todo)} arms are done; {out / 'report.md'}")
    return missing


def settle(out: Path, run: config.RunConfig, fit: config.PosthocConfig) -> None:
    """Write down of which settings, seeds aside, the folder is a report. Raises ConfigError where it holds results of others: its traces and its throughput would
    be taken for these."""
    source, mine = out / SETTINGS, {"run": to_dict(dataclasses.replace(run, train=dataclasses.replace(run.train, seed=0))), "posthoc": to_dict(fit)}
    if not source.exists() or not any((out / part).exists() for part in (SPEED, "runs", "traces")):
        return write_json(source, mine)
    found = read_json(source, {"run": dict, "posthoc": dict}, remedy="remove it where the folder is of the same settings")
    for part in mine:
        other, own = _flat(found[part]), _flat(mine[part])
        if differing := [name for name in own if name in other and other[name] != own[name]]:   # a setting that came later has nothing to be compared with
            name = differing[0]
            raise config.ConfigError(f"{out} is a report of other settings ({name}={other[name]!r}, now {own[name]!r}): give the same --tier and --set as before, or name another folder with --out")


def _flat(settings: dict, within: str = "") -> dict:
    return {name: value for key, entry in settings.items()
            for name, value in (_flat(entry, f"{within}{key}.") if isinstance(entry, dict) else {f"{within}{key}": entry}).items()}  # fmt: skip


def speed_of(out: Path) -> dict | None:
    """The table of throughput, or None where it is not measured, or was on another device. Raises ConfigError where its file is damaged."""
    if not (source := out / SPEED).exists():
        return None
    found = read_json(source, {"rows": list, "provenance": dict}, remedy="remove it to measure anew")
    device = lambda provenance: [provenance.get("hardware", {}).get(part) for part in ("gpu", "cpu")]  # noqa: E731
    return found if device(found["provenance"]) == device(provenance.capture()) else None


def trace_file(out: Path, job: Job) -> Path:
    return out / "traces" / f"{job.arm}-{job.seed}.trace.safetensors"


def is_done(out: Path, job: Job, fit: config.PosthocConfig) -> bool:
    """Whether the arm is measured and its trace is there."""
    return trace_file(out, job).exists() and runs.Run(out / "runs" / job.run.hash, job.run).measurement(fit) is not None


def finish(out: Path, job: Job, fit: config.PosthocConfig, *, keep_weights: bool, report: Callable[[str], None]) -> None:
    """Record the arm's trace from its weights, which then may go."""
    store, target = out / "runs", trace_file(out, job)
    how = recording.Recording(tokens=min(96, job.run.model.context), prompt=min(32, job.run.model.context // 2))
    trace = recording.record_run(runs.get_or_fit(job.run, fit, store=store, report=report), fit, how)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"partial-{target.name}")
    traces.save(trace, partial)
    if (size := partial.stat().st_size) > TRACE_BYTES:
        partial.unlink()
        raise config.ConfigError(f"the trace of {job.arm}, seed {job.seed}, has {size / 1e6:.0f} MB, more than {TRACE_BYTES / 1e6:.0f}")
    partial.replace(target)
    if not keep_weights:
        discard_weights(out, job)


def discard_weights(out: Path, job: Job) -> None:
    folder = out / "runs" / job.run.hash
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    for heads in folder.glob("*.safetensors"):
        heads.unlink()


def write(out: Path, todo: Sequence[Job], fit: config.PosthocConfig) -> None:
    """results.json and report.md of the arms that are measured; the difference between the arms where a seed has both."""
    from . import throughput

    rows = []
    for job in todo:
        measured = runs.Run(out / "runs" / job.run.hash, job.run).measurement(fit)
        if measured is not None:
            rows.append({"arm": job.arm, "seed": job.seed, "config_hash": job.run.hash, "val_loss": measured["val_loss"], "load_entropy": measured["load_entropy"],
                         "hit": measured["hit"], "tokens_per_second": measured["tokens_per_second"], "seconds": measured["seconds"]})  # fmt: skip
    speed = speed_of(out)
    missing = [f"{job.arm}, seed {job.seed}" for job in todo if job.run.hash not in {row["config_hash"] for row in rows}]
    made_by = provenance.capture()
    write_json(out / "results.json", {"arms": rows, "missing": missing, "throughput": speed, "provenance": made_by})
    horizons = [str(h) for h in todo[0].run.predictor.horizons]
    first = todo[0].run
    lines = ["# Tier report", "", f"Each arm: {first.train.steps:,} steps on the text {first.data.corpus}, from one random start per seed; settings.json has the rest. Code: {made_by['commit']}. The ranking MLP's columns are "
             "hit@k on held-out text, the share of a token's k experts in a layer that it names h layers ahead."]  # fmt: skip
    lines += ["", f"Missing yet: {'; '.join(missing)}."] if missing else []
    lines += ["", "| arm | seed | validation loss | " + " | ".join(f"ranking MLP, h = {h}" for h in horizons) + " | tokens/s in training |", "|---" * (4 + len(horizons)) + "|"]
    for row in rows:
        lines.append(f"| {row['arm']} | {row['seed']} | {row['val_loss']:.4f} | " + " | ".join(f"{row['hit']['ranking'][h]:.3f}" for h in horizons) + f" | {row['tokens_per_second']:,.0f} |")
    pairs = {seed: found for seed in {row["seed"] for row in rows} if len(found := {row["arm"]: row for row in rows if row["seed"] == seed}) == len(ARMS)}
    for seed, found in sorted(pairs.items()):
        gains = ", ".join(f"{100 * (found['joint']['hit']['ranking'][h] - found['baseline']['hit']['ranking'][h]):+z.1f} points at h = {h}" for h in horizons)
        lines.append(f"\nSeed {seed}, joint - baseline under the ranking MLP: {gains}; validation loss {found['joint']['val_loss'] - found['baseline']['val_loss']:+z.4f} nats.")
    device = speed["provenance"]["hardware"]
    lines += ["", f"## Throughput ({device['gpu'] or device['cpu']})", "", throughput.table(speed), ""]
    partial = out / "report.partial"
    partial.write_text("\n".join(lines))
    partial.replace(out / "report.md")
