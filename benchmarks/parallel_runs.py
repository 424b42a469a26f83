"""Two independent runs side by side with one thread each, against two in sequence with two threads each: total tokens/s.

Both are measured in turns, round by round; medians over the rounds are compared. The step is that of the trainer.
"""

from __future__ import annotations

import statistics
import sys
import time

from steps import OURS, SIZES, Stepper, arguments, config_of, markdown, write


def timed(groups: list[list[Stepper]], steps: int) -> float:
    """Seconds until every group has taken its steps, one group after the other, a group's members at the same time."""
    begun = time.perf_counter()
    for group in groups:
        for runner in group:
            runner.send({"steps": steps})
        for runner in group:
            runner.receive()
    return time.perf_counter() - begun


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--runs", type=int, default=2, help="independent runs, and threads of each where they go in sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of each run per round")
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    rows, found = [], []
    for size in options.sizes:
        print(f"{size}: {options.rounds} rounds", file=sys.stderr, flush=True)
        side, sequence = (
            [Stepper(OURS, size=size, threads=threads, warmup=options.warmup) for _ in range(options.runs)] for threads in (1, options.runs)
        )
        seconds = [
            {"side by side": timed([side], options.steps), "in sequence": timed([[runner] for runner in sequence], options.steps)}
            for _ in range(options.rounds)
        ]
        total = options.runs * options.steps * side[0].tokens_per_step
        rates = {name: total / statistics.median(r[name] for r in seconds) for name in seconds[0]}
        for runner in side + sequence:
            runner.end()
        found.append({"size": size, "seconds": seconds, "tokens_per_second": rates})
        rows.append({
            "independent runs": f"{size}, d = {config_of(size, threads=1).model.hidden_size}",
            f"{options.runs} side by side, 1 thread each": f"{rates['side by side']:,.0f} tokens/s",
            f"{options.runs} in sequence, {options.runs} threads each": f"{rates['in sequence']:,.0f} tokens/s",
            "ratio": f"{rates['side by side'] / rates['in sequence']:.2f}x",
        })  # fmt: skip
    print(markdown(rows))
    write(options.json, {"runs": options.runs, "steps": options.steps, "sizes": found}, markdown=markdown(rows))


if __name__ == "__main__":
    main()
