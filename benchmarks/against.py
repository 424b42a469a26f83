"""Our training step in this checkout against the one in another (`git worktree add CHECKOUT COMMIT`), at the size of the cpu tier.

Both take turns, round by round; the median of the rounds' ratios is told, and exit code 1 where this one is slower by more than 2%.
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


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time instead of elapsed time: for a machine that does other work")
    options = parser.parse_args()
    root, other, clock = Path(__file__).resolve().parents[1], options.checkout.resolve(), "cpu" if options.cpu_time else "wall"
    commits = {root: described(root), other: described(other)}
    rows, found, slowest = [], {}, 0.0
    for threads in options.threads:
        for name in (OURS, JOINT):
            pair = [Stepper(name, size="cpu", threads=threads, warmup=options.warmup, checkout=checkout) for checkout in (root, other)]
            if failed := [f"{checkout}: {stepper.failed}" for checkout, stepper in zip((root, other), pair) if stepper.failed]:
                raise SystemExit(f"against: {failed[0]}")
            for turn in range(options.rounds):
                for stepper in pair[:: 1 if turn % 2 else -1]:   # neither is always first
                    stepper.rounds.append(stepper.ask({"steps": options.steps}))
            here, there = pair
            times = ratio(here.rounds, there.rounds, clock)
            slowest = max(slowest, times)
            rows.append({"step": f"{name}, {threads} thread(s)", f"ms here ({commits[root]})": f"{1e3 * median(here.rounds, clock):.1f}",
                         f"ms there ({commits[other]})": f"{1e3 * median(there.rounds, clock):.1f}", "time here of there": f"{times:.3f}x"})  # fmt: skip
            found[f"{name}, {threads}"] = {"here": here.rounds, "there": there.rounds, "ratio": times}
            for stepper in pair:
                stepper.end()
    text = markdown(rows)
    print(text)
    write(options.json, {"commits": {"here": commits[root], "there": commits[other]}, "clock": clock, "rounds": found}, markdown=text)
    return int(slowest > 1 + ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
