"""Several processes for one run on this machine: `python -m predmoe.launch --nproc N FOLDER ...`, torchrun's engine with a clear last sentence.

On a cluster torchrun itself starts `-m predmoe.worker` on every node (docs/many_gpus.md). What follows the folder goes to the worker.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from predmoe.children import end_with_parent, last_words, remains, work_for_parent
from predmoe.strict import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Start the processes and wait; 0 where all ended well, else 2 after one sentence on standard error."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    parser = argparse.ArgumentParser(prog="predmoe.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, required=True, help="processes, on GPUs one per GPU")
    parser.add_argument("folder", type=Path)
    options, rest = parser.parse_known_args(arguments)
    try:
        end_with_parent(options.folder)
    except ConfigError as error:
        return last_words(str(error))
    os.environ |= work_for_parent()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)   # pages about what the last sentence says
    how = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=options.nproc, run_id=f"predmoe-{options.folder.name}", rdzv_backend="c10d",
                       rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1)  # fmt: skip
    try:
        elastic_launch(how, sys.executable)("-u", "-m", "predmoe.worker", str(options.folder), *rest)
    except ChildFailedError as error:
        return last_words(sentence(*first(error.failures), left=remains(options.folder)))
    except SignalException as error:   # its own processes have ended by now
        return last_words(f"stopped by {error.sigval.name}; {remains(options.folder)}")
    return 0


def first(failures: dict) -> tuple[int, object]:
    """The process whose end is the cause: one that was killed, else one that says why, else the first; the others fail for want of it, or
    are ended by the launcher (SIGTERM)."""
    kind = lambda failure: 0 if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM else 1 if _said(failure) else 2  # noqa: E731
    return min(failures.items(), key=lambda item: (kind(item[1]), item[1].timestamp))


def _said(failure) -> str:
    """The sentence that the worker left (`distributed.report`), or nothing."""
    message = failure.message["message"] if isinstance(failure.message, dict) else str(failure.message)   # a dict has the traceback as well
    text = message.split("\n")[0] if failure.exitcode > 0 else ""
    return "" if text.startswith("To enable traceback") else text


def sentence(rank: int, failure, *, left: str) -> str:
    """What ended first and what to do, from torch's ProcessFailure. `left`: what `children.remains` says of the run."""
    how = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    why = f" ({_said(failure)})" if _said(failure) else ""
    return f"process {rank} {how}{why}, so the others were stopped; {left}"


if __name__ == "__main__":
    sys.exit(main())
