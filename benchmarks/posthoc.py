"""Time of one backbone's post-hoc predictors, all horizons, linear and ranking MLP, to convergence, as a share of its training's.

Reads what the runs of a store measured of themselves, or (`--train TIER`) trains and measures one run first. A run and its
predictors are timed in the same process, with the same threads.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from steps import arguments, markdown, write

PARTS = ("capture", "linear", "ranking")


def measurements(store: Path) -> list[dict]:
    files = [path for path in sorted(store.glob("*/posthoc-*.json")) if not path.name.endswith(".config.json")]
    return [json.loads(path.read_text()) for path in files]


def trained(tier: str, steps: int | None, store: Path) -> list[dict]:
    """One baseline run of a tier, trained and measured in `store`."""
    from predmoe import config, runs

    changes = {"steps": steps} if steps else {}
    run = config.tier(tier, train=changes)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    return runs.get_or_measure([run], config.TIERS[tier].posthoc, profile=tier, store=store, report=say)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu", help="read outputs/PROFILE/runs")
    parser.add_argument("--store", type=Path, help="read (or, with --train, fill) this folder of runs instead")
    parser.add_argument("--train", metavar="TIER", help="train and measure one run of this tier now")
    parser.add_argument("--steps", type=int, help="with --train: training steps, instead of the tier's")
    options = parser.parse_args()
    from predmoe.runs import default_store

    if options.train:
        with tempfile.TemporaryDirectory() as temporary:
            found = trained(options.train, options.steps, options.store or Path(temporary))
    else:
        store = options.store or default_store(options.profile)
        found = measurements(store)
        if not found:
            raise SystemExit(f"{store} holds no measured run; make some (predmoe report --profile {options.profile}), or use --train TIER")
    rows, shares = [], []
    for m in found:
        seconds = m["seconds"]
        spent = sum(seconds[part] for part in PARTS)
        shares.append(spent / seconds["train"])
        steps = {kind: curve[-1]["step"] for kind, curve in m["curves"].items()}
        rows.append({
            "run": f"lambda {m['lambda_pred']:g}, seed {m['seed']}",
            "training": f"{seconds['train']:,.0f} s",
            **{part: f"{seconds[part]:,.1f} s" + (f" ({steps[part]} steps{'' if m['converged'][part] else ', not converged'})" if part in steps else "") for part in PARTS},
            "predictors of training": f"{shares[-1]:.0%}",
        })  # fmt: skip
    print(markdown(rows))
    answer = (f"Post-hoc predictors of one backbone, all horizons, linear and ranking, to convergence, take {statistics.median(shares):.0%} "
              f"of their run's training time (median of {len(shares)} runs; {min(shares):.0%} to {max(shares):.0%}).")  # fmt: skip
    print(f"\n{answer}")
    write(options.json, {"runs": [{"config_hash": m["config_hash"], "seconds": m["seconds"], "converged": m["converged"]} for m in found], "shares": shares}, markdown=answer)


if __name__ == "__main__":
    main()
