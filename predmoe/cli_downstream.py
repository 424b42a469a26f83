"""The command `predmoe evaluate`: zero-shot tasks of a run, a checkpoint or an export. See `cli` for how errors are told."""

from __future__ import annotations

import json

from . import arguments
from .cli_traces import _told, may_write
from .config import EVAL_TASKS, ConfigError, DownstreamConfig
from .files import write_text


def add(commands) -> None:
    """Add the command to the parser's subcommands."""
    command = commands.add_parser("evaluate", help="zero-shot tasks of the lm-evaluation-harness, items from $PREDMOE_EVAL_DATA or the hub")
    command.add_argument("model", type=arguments.path, help="a run's folder, its checkpoint, any OLMoE-format folder, or what `predmoe export` wrote")
    command.add_argument("--tasks", nargs="+", default=list(EVAL_TASKS), metavar="TASK", help=f"of {', '.join(EVAL_TASKS)} (default: all)")
    command.add_argument("--items", type=int, default=1000, metavar="N", help="of each task, always the same ones; 0: all (default: 1000)")
    command.add_argument("--hub", action="store_true", help="items from the hub, which takes a network")
    command.add_argument("--tokenizer", help="bpe8k or gpt2 (default: the run's own, or the folder's tokenizer.json)")
    command.add_argument("--device", type=arguments.device, default="cpu", help="cpu or cuda (default: cpu)")
    command.add_argument("--json", type=arguments.path, help="write the numbers")
    command.set_defaults(command=_told(_evaluate))


def _evaluate(options) -> int:
    from . import downstream, downstream_tasks, measure_downstream

    may_write(options.json, outside=options.model)   # before the work, not after it
    wanted = DownstreamConfig(tasks=tuple(options.tasks), items=options.items, cloze=0, hub=options.hub)
    lacking = downstream_tasks.missing(wanted.tasks, hub=wanted.hub)
    if len(lacking) == len(wanted.tasks):
        raise ConfigError(f"no task can be run: {next(iter(lacking.values()))}")
    lm = downstream.load(options.model, tokenizer=options.tokenizer, device=options.device)
    here = DownstreamConfig(tasks=tuple(task for task in wanted.tasks if task not in lacking), items=options.items, cloze=0, hub=options.hub)
    found, tasks = {}, downstream_tasks.load(here, None)   # damaged items are told before anything is printed
    for name, task in tasks.items():
        kept, total = measure_downstream.fitting(lm, task), len(task.eval_docs)
        if not kept:
            lacking[name] = "every item has an answer longer than the model's context"
            continue
        task = task.of(kept)
        scores, _ = measure_downstream.summary(measure_downstream.run_task(lm, name, task), measure_downstream.chance_of(name, task), name)
        if not found:
            print(f"{'task':<15} {'items':>6} {'chance':>7} {'accuracy':>16} {'normalised':>16} {'gold answer (nats)':>20}", flush=True)
        found[name] = scores
        found[name]["left_out"] = total - len(kept)   # answers longer than the model's context
        row, told = found[name], [_told_number(found[name], *how) for how in (("accuracy", 100, "%"), ("accuracy_norm", 100, "%"), ("gold", 1, ""))]
        print(f"{name:<15} {row['items']:>6} {row['chance']:>7.1%} {told[0]:>16} {told[1]:>16} {told[2]:>20}", flush=True)
    if not found:
        raise ConfigError(f"no task can be run: {'; '.join(f'{name}: {reason}' for name, reason in lacking.items())}")
    for name, row in found.items():
        if row["left_out"]:
            print(f"{name}: {row['left_out']} left out, whose answer is longer than the model's context")
    for name, reason in lacking.items():
        print(f"{name}: not run: {reason}")
    if options.json:
        write_text(options.json, json.dumps({"tasks": found, "not_run": lacking}, indent=1) + "\n")
    return 0


def _told_number(row: dict, metric: str, scale: int, unit: str) -> str:
    return f"{scale * row[metric]:.2f}{unit} ± {scale * row[f'{metric}_se']:.2f}" if metric in row else "-"
