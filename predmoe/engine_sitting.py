"""What 11_engine has measured, kept: timings need the trained weights and a machine that does nothing else, so what a sitting measured outlives both.

    outputs/PROFILE/engine/KEY/     asked.json, and for each stage its tables (CSV), for the race its traces and machine.json as well, and STAGE.json (when,
                                    where, by which code, of which weights, and a hash of each file), written last: a stage without it is measured again

KEY is of all that was asked for: it names runs. A run that has since been trained to other bits makes the stages that measured it void, which is said. What the tables say, and what the simulator says of the same traces, is computed from them each time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from . import engine_study as study, paths, peers as contenders, provenance, runs
from .config import ConfigError, PosthocConfig, RunConfig
from .engine_study import Machine
from .files import read_json, write_json
from .finished import ended_with
from .simulator import Compute, Disk
from .traces.schema import Trace, load, save

STAGES = {"exactness": "exact", "rounding": "rounded", "race": "raced", "peers": "compared"}   # stage -> in words


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a sitting measures: `pairs` (arm, model) with predictors fitted by `fit`, and the notebook's parameters; `sources`: arm -> the sources of its prefetches."""

    pairs: Sequence[tuple[str, RunConfig]]
    fit: PosthocConfig
    generation: study.Generation
    sources: Mapping[str, Sequence[str]]
    dtype: str
    shares: Sequence[float]
    per_domain: int
    prompt: int
    exact_policies: Sequence[str]
    exact_horizons: Sequence[int]
    disk_reads: int
    peers: Sequence[str]
    peer_rounds: int
    peer_tokens: int
    peers_memory_mb: float
    threads: int

    def as_dict(self) -> dict:
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in ("pairs", "fit", "generation")}
        return {"models": [[arm, run.hash] for arm, run in self.pairs], "fit": runs.posthoc_name(self.fit), "generation": dataclasses.asdict(self.generation), **rest}

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:12]


class Sitting:
    """The stages of a sitting, each measured where `folder` does not hold it. Models are trained and exported when the first stage needs them; `close` removes
    the exports."""

    def __init__(self, asked: Asked, *, profile: str, report: Callable[[str], None] = print):
        self.asked, self.profile, self._report, self._open = asked, profile, report, ExitStack()
        self.folder = paths.outputs(profile) / "engine" / asked.key
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "asked.json", asked.as_dict())

    # --- stages -----------------------------------------------------------------------------------------------------------

    def exactness(self) -> pd.DataFrame:
        """`engine_study.exactness` of the first model."""
        a = self.asked
        return self._stage("exactness", [self._first], lambda: {"exactness": study.exactness(
            study.model_of(self._first, self.profile), self._exports[self._key(0)], self._prompts[0], a.generation, policies=a.exact_policies, shares=a.shares,
            sources=[source for source in a.sources[a.pairs[0][0]] if source != study.DEMAND], horizons=a.exact_horizons)})["exactness"]  # fmt: skip

    def rounding(self) -> pd.DataFrame:
        """`engine_study.rounding` of the first model."""
        return self._stage("rounding", [self._first], lambda: {"rounding": study.rounding(self._first, self.profile, ["float32", "bf16", "int8"])})["rounding"]

    def race(self) -> tuple[pd.DataFrame, Machine, dict[tuple[str, int], Trace]]:
        """`engine_study.race`, the machine measured in turns with it, and the traces of what every cell of a model did."""
        traces = [self._trace(*self._key(i)).name for i in range(len(self.asked.pairs))]
        rows = self._stage("race", [run for _, run in self.asked.pairs], self._race, also=["machine.json", *traces])["race"]
        machine = read_json(self.folder / "machine.json")
        times = {source: (Compute(**_tuples(compute)), ms) for source, (compute, ms) in machine["times"].items()}
        found = Machine(disk=Disk(**_tuples(machine["disk"])), times=times, table=_read(self.folder / "disk.csv"), gb_per_s=machine["gb_per_s"])
        return rows, found, {(arm, run.train.seed): load(self._trace(arm, run.train.seed)) for arm, run in self.asked.pairs}

    def _race(self) -> dict[str, pd.DataFrame]:
        a, (prompts, domains) = self.asked, self._prompts
        futures = {key: study.record(folder, prompts, a.generation, sources=a.sources[key[0]], source_text=domains) for key, folder in self._exports.items()}
        calibration = study.calibration_prompts(self._first, count=4, tokens=a.prompt)
        gauge = study.Gauge(self._exports[self._key(0)], calibration, a.generation, sources=a.sources[a.pairs[0][0]], reads=a.disk_reads)
        rows = study.race(self._exports, futures, prompts, a.generation, sources=a.sources, shares=a.shares, between=gauge.turn)
        machine = gauge.machine()
        for (arm, seed), future in futures.items():
            save(future, self._trace(arm, seed))
        times = {source: [dataclasses.asdict(compute), ms] for source, (compute, ms) in machine.times.items()}
        write_json(self.folder / "machine.json", {"disk": dataclasses.asdict(machine.disk), "times": times, "gb_per_s": machine.gb_per_s})
        return {"race": rows, "disk": machine.table}

    def peers(self) -> pd.DataFrame:
        """`peers.compare` of the first model, whose prompts are the first four."""
        a = self.asked
        return self._stage("peers", [self._first], lambda: {"peers": contenders.compare(
            a.peers, runs.default_store(self.profile) / self._first.hash / "checkpoint", self._exports[self._key(0)], self._prompts[0][:4], new_tokens=a.peer_tokens,
            share=0.25, threads=a.threads, lanes=a.generation.lanes, rounds=a.peer_rounds, memory_mb=a.peers_memory_mb)})["peers"].astype(contenders.TYPES)  # fmt: skip

    # --- what they share --------------------------------------------------------------------------------------------------

    @property
    def domains(self) -> str:
        """The prompts in words, as the traces have them."""
        return load(self._trace(*self._key(0)), check=False).meta.source

    def say(self) -> str:
        """When, where and by which code the stages that are done were measured."""
        made = {stage: read_json(self.folder / f"{stage}.json") for stage in STAGES if (self.folder / f"{stage}.json").exists()}
        where: dict[str, list[str]] = {}
        for stage, by in made.items():
            machine = by["hardware"]
            code = f"commit {by['commit'][:12]}{', changed' if by['dirty'] else ''}" if by["dirty"] is not None else "code of no commit"
            where.setdefault(f"on {by['started'][:10]} by {code}, on {machine['cores']} cores of {machine['cpu']} with {machine['memory_gb']:g} GB of memory", []).append(stage)
        return "Measured " + "; ".join(f"{place}" if len(where) == 1 else f"{place} ({', '.join(stages)})" for place, stages in where.items()) + "."

    def close(self) -> None:
        self._open.close()

    @property
    def _first(self) -> RunConfig:
        return self.asked.pairs[0][1]

    def _key(self, index: int) -> tuple[str, int]:
        arm, run = self.asked.pairs[index]
        return arm, run.train.seed

    def _trace(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}.trace.safetensors"

    @cached_property
    def _exports(self) -> dict[tuple[str, int], Path]:
        place = Path(self._open.enter_context(study.workplace(self.profile)))
        return study.exported(self.asked.pairs, self.asked.fit, profile=self.profile, dtype=self.asked.dtype, folder=place)

    @cached_property
    def _prompts(self) -> tuple[list[list[int]], str]:
        return study.held_out_prompts(self._first, per_domain=self.asked.per_domain, tokens=self.asked.prompt)

    def _stage(self, stage: str, models: Sequence[RunConfig], measure: Callable[[], dict[str, pd.DataFrame]], also: Sequence[str] = ()) -> dict[str, pd.DataFrame]:
        """The tables of a stage from `folder`, measured and kept there first where they are not. `models`: the runs whose weights it takes. `also`: other files that `measure` writes.

        Raises ConfigError where a file is not the one that was measured, or a run of the store has ended with other weights since.
        """
        done, again = self.folder / f"{stage}.json", f"remove the folder {self.folder} to measure again"
        if not done.exists():
            began = provenance.capture()
            self._exports   # noqa: B018  first of all the models are there
            tables = measure()
            for name, table in tables.items():
                table.to_csv(self.folder / f"{name}.csv", index=False)
            files = {name: _hash(self.folder / name) for name in sorted([*(f"{table}.csv" for table in tables), *also])}
            write_json(done, began | {"tables": sorted(tables), "weights": {run.hash: self._weights(run) for run in models}, "files": files})
            self._report(f"{STAGES[stage]}: kept in {self.folder.name}")
        kept = read_json(done, {"tables": list, "files": dict, "weights": dict, "hardware": dict, "started": str, "commit": str}, remedy=again)
        for name, was in kept["files"].items():
            if _hash(self.folder / name) != was:
                raise ConfigError(f"{self.folder / name} is missing or not as it was measured; restore it from a copy, or {again}")
        for run in models:
            was, now = kept["weights"].get(run.hash), self._weights(run)
            if now is not None and was != now:
                raise ConfigError(f"{done} was measured with the weights {was} of run {run.hash}, which has ended with {now} since; restore the run from a copy, or {again}")
        return {name: _read(self.folder / f"{name}.csv") for name in kept["tables"]}

    def _weights(self, run: RunConfig) -> str | None:
        """What the store says of a run's weights, which need not be there; None where it does not know the run."""
        return ended_with(runs.default_store(self.profile) / run.hash)


def _hash(path: Path) -> str | None:
    """Of the file's bytes; None where there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read(path: Path) -> pd.DataFrame:
    """A table to the bit, or ConfigError."""
    try:
        return pd.read_csv(path)   # in full: pandas writes and reads floats to the bit
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing or damaged ({error}); restore it from a copy, or remove the folder {path.parent} to measure again") from None


def _tuples(fields: Mapping) -> dict:
    """JSON's lists as the dataclasses have them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
