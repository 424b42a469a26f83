"""Many runs over many machines: `predmoe plan --run --worker` on each, against one run store on a disk that all of them see.

A worker claims a run by an atomic lock with a heartbeat, trains and measures it in a child process, and looks for the next.
A dead worker's claim is taken over, and its run goes on from the last checkpoint. Workers come and go as they like.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import distributed, runs
from .config import RunConfig
from .locking import FolderLock

LOOK_SECONDS = 5.0   # between looks for a claim that its holder has left or lost
CLAIM = "lock.claim"   # beside the child's own "lock": a claim also covers the time before and between child processes

Wanted = Sequence[tuple[RunConfig, Sequence[runs.Measurement]]]


def work(wanted: Wanted, *, store: Path, report: Callable[[str], None] = print, nproc: int = 1, engine: str = "ddp") -> int:
    """Work on the `wanted` runs, in this order, until each is done by this worker or another; returns how many this one did.

    A run that fails is tried once by each worker; the others go on. Raises runs.RunFailed at the end where some have failed, and
    ConfigError at the start where `nproc` processes cannot share one of them; a fine-tune is trained by one, whatever `nproc` is.
    """
    for config, _ in wanted:
        distributed.check(config, _processes(config, nproc), engine)
    left, done, failed, waiting = list(wanted), 0, [], False
    while left := [job for job in left if missing(job, store)]:
        for job in left:
            mine = _claimed(job, store, report, nproc, engine)
            if mine is not None:
                waiting = False
                break
        else:
            if not waiting:
                report(f"runs left: {len(left)}, each being worked on by another worker; waiting in case one of these dies")
                waiting = True
            time.sleep(LOOK_SECONDS)
            continue
        done += mine == ""
        if mine:
            report(f"failed here, and left to other workers: {mine}")   # the end may be hours away
            failed.append(mine)
            left.remove(job)
    if failed:
        raise runs.RunFailed("; ".join(failed))
    return done


def missing(job: tuple[RunConfig, Sequence], store: Path) -> bool:
    """Whether a measurement of the job is not there yet; without measurements, whether the run is not finished."""
    config, measurements = job
    run = runs.Run(Path(store) / config.hash, config)
    return any(run.measurement(how) is None for how in measurements) if measurements else not run.has_checkpoint


def _processes(config: RunConfig, nproc: int) -> int:
    return nproc if config.finetune is None else 1


def _claimed(job, store: Path, report, nproc: int, engine: str) -> str | None:
    """None where the job is somebody else's, "" where it was done here, else why it failed."""
    config, measurements = job
    claim = FolderLock(runs.open_run(config, store).path, name=CLAIM)
    if not claim.claim():
        return None
    try:
        if missing(job, store):   # another may have finished it since we looked
            count = _processes(config, nproc)
            report(f"claimed {runs.describe(config)}{'' if count == nproc else ', by one process as every fine-tune'}")
            if measurements:
                runs.measure_missing([(config, measurements)], store=store, parallel=1, report=report, nproc=count, engine=engine)
            else:
                runs.get_or_train(config, store=store, report=report, nproc=count, engine=engine)
            return ""
        return None
    except runs.RunFailed as error:
        return str(error) if claim.held() else None   # another took it over while this machine slept
    finally:
        claim.release()
