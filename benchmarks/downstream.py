"""How fast zero-shot items are scored: our adaptor against the lm-evaluation-harness's own transformers class, on the same checkpoint, tokenizer
and requests, in turns. Items are the local ones (`$PREDMOE_EVAL_DATA`), else those of the held-out cloze, which needs the corpus.

The benchmark stops if the two differ by more than a thousandth of a nat in any answer.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from steps import arguments, markdown, write


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tier", default="cpu", help="size of the model (default: cpu)")
    parser.add_argument("--items", type=int, default=100, help="of each task (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default: 3)")
    options = parser.parse_args()
    import torch

    from predmoe import downstream_tasks, measure_downstream
    from predmoe.config import DownstreamConfig, tier
    from predmoe.data import prepare
    from predmoe.downstream import load
    from predmoe.checkpoint import save_checkpoint
    from predmoe.model import MoEModel

    torch.set_num_threads(1)
    run = tier(options.tier)
    missing = downstream_tasks.missing(DownstreamConfig().tasks)
    tasks = tuple(task for task in DownstreamConfig().tasks if task not in missing)
    wanted = DownstreamConfig(tasks=tasks, items=options.items, cloze=0 if tasks else options.items)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_checkpoint(MoEModel(run.model).initialise(0), Path(folder) / "checkpoint")
        ours, theirs = load(checkpoint, tokenizer=run.data.tokenizer), measure_downstream.peer(checkpoint, run)
        for name, task in downstream_tasks.load(wanted, None if tasks else prepare(run.data)).items():
            kept = measure_downstream.fitting(ours, task)
            times: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(options.rounds):
                answers = {}
                for who, lm in (("ours", ours), ("theirs", theirs)):
                    fresh, began = task.of(kept), time.process_time()
                    answers[who] = measure_downstream.run_task(lm, name, fresh)
                    times[who].append(time.process_time() - began)
                found = measure_downstream.compare(answers["ours"], answers["theirs"])
                if found["apart"]:
                    raise SystemExit(f"{name}: the contenders do not agree, so their times are of different work: {found}")
            mine, his = (statistics.median(times[who]) for who in ("ours", "theirs"))
            rows.append({"task": name, "items": str(found["items"]), "our adaptor": f"{mine:.2f} s", "harness's transformers class": f"{his:.2f} s", "ratio": f"{his / mine:.1f}x",
                         "largest difference": f"{found['largest_difference']:.0e} nats"})   # fmt: skip
            print(f"{name}: {his / mine:.1f}x", file=sys.stderr, flush=True)
    table = markdown(rows)
    print(table)
    write(options.json, {"tier": options.tier, "rounds": options.rounds, "rows": rows}, markdown=table)


if __name__ == "__main__":
    main()
