"""Our training step in this checkout against the one in another (`git worktree add CHECKOUT COMMIT`), at the size of the cpu tier.

Both take turns, round by round, in several pairs of processes one after the other, since two processes of the same code may differ by some percent for
as long as they live (CHECKOUT may be a copy of this one, which shows how far). The median of the rounds' ratios is told, and exit code 1 where this one
is slower by more than 2%.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from steps import JOINT, OURS, Stepper, arguments, markdown, median, write

ALLOWED = 0.02


def described(checkout: Path) -> str:
    """The checkout's commit. Ends the benchmark where it is no copy of the project, or another package is found than its own."""
    if not (checkout / "benchmarks" / "steps.py").is_file():
        raise SystemExit(f"against: {checkout} is no checkout of the project with benchmarks/steps.py: make one with git worktree add {checkout} COMMIT")
    found = subprocess.run([sys.executable, "-c", "import predmoe; print(predmoe.__file__)"], env=os.environ | {"PYTHONPATH": str(checkout)}, cwd=checkout, capture_output=True, text=True)
    if not found.stdout.startswith(f"{checkout}{os.sep}"):
        raise SystemExit(f"against: with PYTHONPATH={checkout} the package is found at {found.stdout.strip() or found.stderr.strip().splitlines()[-1]}")
    return subprocess.run(["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=9"], capture_output=True, text=True).stdout.strip() or "unknown"


def ratio(here: list[dict], there: list[dict], clock: str) -> float:
    """How many times as long a step takes here, round by round, since the machine's speed drifts."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(here, there, strict=True))


def pair(name: str, threads: int, options, checkouts: tuple[Path, Path]) -> dict[Path, list[dict]]:
    """The rounds of one process of each checkout, in turns; the processes start in the order of the checkouts."""
    steppers = [Stepper(name, size="cpu", threads=threads, warmup=options.warmup, checkout=checkout) for checkout in checkouts]
    if failed := [f"{checkout}: {stepper.failed}" for checkout, stepper in zip(checkouts, steppers) if stepper.failed]:
        raise SystemExit(f"against: {failed[0]}")
    for turn in range(options.rounds):
        for stepper in steppers[:: 1 if turn % 2 else -1]:   # neither is always first
            stepper.rounds.append(stepper.ask({"steps": options.steps}))
    for stepper in steppers:
        stepper.end()
    return {checkout: stepper.rounds for checkout, stepper in zip(checkouts, steppers)}


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--processes", type=int, default=5, help="pairs of processes, one after the other")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each pair")
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time instead of elapsed time: for a machine that does other work")
    options = parser.parse_args()
    root, other, clock = Path(__file__).resolve().parents[1], options.checkout.resolve(), "cpu" if options.cpu_time else "wall"
    commits = {root: described(root), other: described(other)}
    rows, found, slowest = [], {}, 0.0
    for threads in options.threads:
        for name in (OURS, JOINT):
            here, there, single = [], [], []
            for number in range(options.processes):
                rounds = pair(name, threads, options, (root, other) if number % 2 else (other, root))
                here, there, single = here + rounds[root], there + rounds[other], single + [ratio(rounds[root], rounds[other], clock)]
            times = ratio(here, there, clock)
            slowest = max(slowest, times)
            rows.append({"step": f"{name}, {threads} thread(s)", f"ms here ({commits[root]})": f"{1e3 * median(here, clock):.1f}",
                         f"ms there ({commits[other]})": f"{1e3 * median(there, clock):.1f}", "time here of there": f"{times:.3f}x",
                         "single pairs of processes": f"{min(single):.3f} to {max(single):.3f}"})  # fmt: skip
            found[f"{name}, {threads}"] = {"here": here, "there": there, "ratio": times, "pairs": single}
    text = markdown(rows)
    print(text)
    write(options.json, {"commits": {"here": commits[root], "there": commits[other]}, "clock": clock, "rounds": found}, markdown=text)
    return int(slowest > 1 + ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
