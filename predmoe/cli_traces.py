"""The commands about traces: `predmoe trace import|check|info|record` and `predmoe simulate`. See `cli` for how errors are told."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import arguments, cli_hf
from .config import ConfigError
from .files import replaced_by, write_text
from .strict import shown

ARMS = {"baseline": {}, "joint": {"lambda_pred": 0.3}}
SHOWN = ("tok_s", "stall_ms", "hit_rate", "in_flight_rate", "demand_mb", "prefetch_mb", "wasted_mb", "p50_ms", "p99_ms", "ttft_ms", "issued", "useful", "late", "wasted", "energy_j")
LOCALITY = {   # figure of `locality` -> its name, and what it is
    "srp": ("SRP", "F1 of the best router that chooses once for 16 tokens (arXiv 2505.16056)"),
    "srp_size": ("SRP size", "experts that this router holds for each that the model chooses"),
    "sch_global": ("SCH, global", "hit rate of a cache that knows the next 16 tokens; twice a token's experts, one cache for all layers"),
    "sch": ("SCH", "the same with a cache for each layer"),
    "lru": ("LRU", "hit rate of the cache that drops what was used longest ago, as large, one for each layer"),
    "belady": ("Belady", "hit rate of the cache that knows the whole future, as large, one for each layer"),
    "reuse": ("reuse", "share of a token's experts that the token before chose in the same layer"),
    "switch_rate": ("switch rate", "share of tokens and layers whose experts are not exactly those of the token before"),
}
AHEAD = ("horizon", "budget", "threshold", "guard", "expire", "cancel", "promote", "cross_token")   # what concerns a prefetch alone
COLUMNS = {"policy": "predictor", "cache_policy": "policy"}   # a sweep's names for what the options call so


def add(commands) -> None:
    """Add the commands to the parser's subcommands."""
    trace = commands.add_parser("trace", help="import, check, describe or record routing traces").add_subparsers(required=True, metavar="COMMAND")

    command = trace.add_parser("import", help="read a public trace format and write it as a trace")
    command.add_argument("source", type=arguments.path, help="a route_trace CSV, token JSONL, per-prompt JSON, npz, or ROUTE_TRACE lines")
    command.add_argument("out", type=arguments.path, help="the trace to write")
    command.add_argument("--format", "--kind", dest="kind", help="route, tokens, prompts, arrays or colibri (default: by the file's name and first line)")
    command.add_argument("--num-experts", type=int, help="experts per layer, where the format does not say")
    command.add_argument("--expert-bytes", type=_sizes, metavar="N[,N...]", help="bytes of one expert, or of each layer's, where the format does not say")
    command.add_argument("--prompt", help="only this prompt of a per-prompt JSON")
    command.add_argument("--sequences", type=int, nargs="+", help="only these sequences of an npz")
    for name, text in (("model", "the model's name"), ("source", "where the trace comes from"), ("domain", "what text it is of")):
        command.add_argument(f"--{name}", dest=f"said_{name}", metavar="TEXT", help=f"{text}, kept in the trace")
    policy = command.add_mutually_exclusive_group()
    policy.add_argument("--on-policy", dest="on_policy", action="store_true", default=None, help="the text is the model's own output")
    policy.add_argument("--teacher-forced", dest="on_policy", action="store_false", help="the text was given to the model")
    command.set_defaults(command=_told(_import))

    command = trace.add_parser("check", help="validate a trace: exit code 0 where it is sound")
    command.add_argument("file", type=arguments.path)
    command.set_defaults(command=_told(_check))

    command = trace.add_parser("info", help="say what a trace holds")
    command.add_argument("file", type=arguments.path)
    command.add_argument("--locality", action="store_true", help="also SRP and SCH (arXiv 2505.16056) and cache hit rates, which takes longer")
    command.set_defaults(command=_told(_info))

    command = trace.add_parser("record", help="record a profile's model on held-out text or its own generations, training it where need be; or, with --model, any transformers MoE on given text")
    command.add_argument("--profile", help="smoke, cpu, tier_b or tier_a (default: smoke)")
    command.add_argument("--arm", choices=ARMS, help="the ordinary model, or the one trained with lambda_pred = 0.3 (default: baseline)")
    command.add_argument("--seed", type=int, help="initialisation seed (default: 0)")
    command.add_argument("--set", nargs="+", default=[], action="extend", metavar="SECTION.FIELD=VALUE", dest="changes", help="change the model's configuration, as in `predmoe train`")
    command.add_argument("--generated", action="store_true", help="on the model's own generations")
    for name, kind, what in (("per-domain", int, "sequences of each domain of text (default: 2)"), ("tokens", int, "tokens of a sequence, at most the context (default: 96)"),
                             ("prompt", int, "of them, those of its prefill pass (default: 32)"), ("guesses", int, "experts that each predictor names (default: 2k + 2)"),
                             ("temperature", arguments.number(0), "at which --generated text is drawn; 0 takes the likeliest token (default: 1)"),
                             ("generation-seed", int, "of the draws (default: 0)")):   # fmt: skip
        command.add_argument(f"--{name}", type=kind, help=what)
    command.add_argument("--predictors", nargs="+", help="linear, ranking, next_router, cotrained, token_id, static (default: the first three)")
    command.add_argument("--out", type=arguments.path, help="the trace's file (default: outputs/PROFILE/traces/ARM.trace.safetensors)")
    cli_hf.add_recording(command)
    command.set_defaults(command=_told(_record), again="the same command begins anew, but for what it has trained")

    _add_simulate(commands)


def _add_simulate(commands) -> None:
    command = commands.add_parser("simulate", help="replay a trace against a cache and a disk; lists of values make a grid",
                                  epilog="An option with several values is an axis: every combination is replayed.")  # fmt: skip
    command.add_argument("trace", type=arguments.path)
    whole, number, text = dict(type=int, nargs="+", metavar="N"), dict(nargs="+", metavar="X"), dict(nargs="+", metavar="NAME")
    cache = command.add_argument_group("cache")
    cache.add_argument("--slots", **whole, help="experts that the cache holds (each layer's own cache with --scope layer)")
    cache.add_argument("--bytes", **whole, help="capacity in bytes instead of slots")
    cache.add_argument("--policy", **text, help="lru, fifo, lfu, lfru, least-stale, belady, static (default: lru)")
    cache.add_argument("--scope", **text, help="global or layer (default: global)")
    cache.add_argument("--pinned", **whole, help="most used experts that never leave (default: 0)")
    cache.add_argument("--streaming", action="store_true", help="allow a cache smaller than a top-k set")
    cache.add_argument("--cold", default="trace", help="trace: empty once; sequence: at each sequence's start (default: trace)")
    ahead = command.add_argument_group("prefetch")
    ahead.add_argument("--predictor", **text, default=["demand", "oracle"], help="demand (no prefetch), oracle, or predictors of the trace (default: demand oracle)")
    ahead.add_argument("--horizon", nargs="+", type=_horizon, metavar="H[+H...]", help="layers ahead; 1+2 asks at both horizons (default: 1)")
    ahead.add_argument("--budget", **whole, help="guesses beyond the top-k (default: 0)")
    ahead.add_argument("--threshold", type=arguments.number(), **number, help="least score of a guess (default: none)")
    ahead.add_argument("--guard", **text, help="none, idle or window (default: none)")
    ahead.add_argument("--no-expire", dest="expire", action="store_const", const=[False], help="keep queued guesses whose layer has run")
    ahead.add_argument("--cancel", action="store_const", const=[True], help="drop queued guesses that a shorter horizon leaves out")
    ahead.add_argument("--no-promote", dest="promote", action="store_const", const=[False], help="leave a queued guess that is demanded in its place among the guesses")
    ahead.add_argument("--cross-token", action="store_const", const=[True], help="guess past the last layer, for the next token")
    disk = command.add_argument_group("disk and compute")
    for name, what in (("latency-ms", "latency of a read (default: 0.1)"), ("gb-per-s", "bandwidth (default: 5; inf: only latency)"), ("noise", "spread of read times (default: 0)"),
                       ("attention-ms", "time of a layer up to its router (default: 1)"), ("expert-ms", "time of one expert (default: 0.25)"),
                       ("shared-ms", "time of a layer's other work (default: 0)"), ("head-ms", "time of a pass's end (default: 0)")):  # fmt: skip
        disk.add_argument(f"--{name}", type=arguments.number(above=0, infinite=True) if name == "gb-per-s" else arguments.number(0), **number, help=what)
    disk.add_argument("--lanes", **whole, help="reads at a time (default: 1)")
    disk.add_argument("--overlap", action="store_const", const=[True], help="compute experts as they arrive")
    command.add_argument("--joules-per-gb", type=arguments.number(0), metavar="X", help="energy of reading 1 GB (1e9 bytes): adds a column energy_j, joules per token")
    command.add_argument("--warmup", type=int, default=0, help="passes that fill the cache and enter no figure (default: 0)")
    command.add_argument("--workers", type=int, help="threads (default: one per core)")
    command.add_argument("--csv", type=arguments.path, help="write the whole table")
    command.add_argument("--json", type=arguments.path, help="write the whole table with the trace's metadata")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(command=_told(_simulate))


def may_write(*outs: Path | None, trace: Path | None = None, but: Sequence[Path] = (), outside: Path | None = None) -> None:
    """Refuse files that cannot be written, or would overwrite one another or those in `but`, before any work is done. `trace`: one that is replaced as a whole,
    which a pipe or a device cannot be; `outside`: a model's folder that none of them may lie in. None stands for no file."""
    taken = [path for path in but if path.exists()]
    for out in filter(None, (trace, *outs)):
        try:
            _may_write(out, taken, out is trace)
            if outside and outside.is_dir() and any(place.is_relative_to(outside.resolve()) for place in (out.resolve(), out.parent.resolve())):
                raise ConfigError(f"{out} would lie in the model's own folder, {outside}; name a file elsewhere")
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {os.strerror(error.errno)}; name a file elsewhere") from None
        taken.append(out)


def _may_write(out: Path, taken: Sequence[Path], replaced: bool) -> None:
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such folder to write {out.name} in")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name a file to write")
    new = not out.exists()
    if not new and not out.is_file():
        if replaced:
            raise ConfigError(f"{out} is no regular file, and a trace replaces what it is written over; name another file")
        return   # a pipe or a device, which may not be opened twice
    if any(out.resolve() == other.resolve() or (not new and other.exists() and out.samefile(other)) for other in taken):
        raise ConfigError(f"{out} would overwrite a file that the same command reads or writes; name another file")
    out.open("ab").close()
    if new:
        out.resolve().unlink()   # not a link that led nowhere before
    if place := out if replaced else replaced_by(out):   # a trace replaces a link itself
        tempfile.NamedTemporaryFile(dir=place.parent).close()   # where it is written first


def _whole_numbers(text: str, separator: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(arguments.whole(part) for part in text.split(separator))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be whole numbers, several of them with {separator!r} between") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _sizes(text: str) -> int | tuple[int, ...]:
    return _whole_numbers(text, ",")


def _horizon(text: str) -> int | tuple[int, ...]:
    return _whole_numbers(text, "+")


def _told(command: Callable) -> Callable:
    """`command` with faults of traces, settings and named files as ConfigError, and each warning as one line."""

    def run(options) -> int:
        from .simulator import SimulationError, SimulationWarning
        from .traces import TraceError, TraceWarning

        with _one_line_warnings(TraceWarning, SimulationWarning):
            try:
                return command(options)
            except (TraceError, SimulationError) as error:
                raise ConfigError(str(error)) from None
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
                raise ConfigError(f"{error.filename2 or error.filename}: {os.strerror(error.errno)}") from None

    return run


@contextlib.contextmanager
def _one_line_warnings(*kinds: type[Warning]) -> Iterator[None]:
    """Warnings of these kinds as one line on stderr, each text once; other kinds as usual."""
    told: set[str] = set()

    def show(message, category, *rest, **more):
        if not issubclass(category, kinds):
            usual(message, category, *rest, **more)
        elif str(message) not in told:
            told.add(str(message))
            print(f"predmoe: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        usual, warnings.showwarning = warnings.showwarning, show
        for kind in kinds:
            warnings.simplefilter("always", kind)
        yield


def _import(options) -> int:
    from . import traces

    asked = {name: getattr(options, name) for name in ("num_experts", "expert_bytes", "prompt", "sequences", "on_policy")}
    asked |= {name: getattr(options, f"said_{name}") for name in ("model", "source", "domain")}
    may_write(trace=options.out, but=[options.source])
    trace = traces.read(options.source, options.kind, **{name: value for name, value in asked.items() if value is not None})
    traces.save(trace, options.out)
    print(f"{options.out}: {_size(trace)}")
    return 0


def _check(options) -> int:
    from . import traces

    print(f"{options.file}: sound; {_size(traces.load(options.file))}")
    return 0


def _size(trace) -> str:
    meta = trace.meta
    return f"{_count(trace.num_tokens, 'token')} in {_count(len(set(trace.sequence.tolist())), 'sequence')}, {_count(trace.num_layers, 'MoE layer')} x {meta.num_experts} experts, top-{meta.top_k}"


def _count(n: int, what: str, ending: str = "s") -> str:
    return f"{n:,} {what}{'' if n == 1 else ending}"


def _info(options) -> int:
    from . import locality, traces

    trace = traces.load(options.file)
    meta = trace.meta
    tokens = trace.starts[1:] - trace.starts[:-1]
    part = lambda phase: f"{_count(tokens[trace.phase == phase].sum(), 'token')} in {_count((trace.phase == phase).sum(), 'pass', 'es')}"  # noqa: E731
    sizes = sorted({size / 1e6 for size in meta.expert_bytes})
    lines = {
        "model": meta.model or "not given", "source": meta.source or "not given", "domain": meta.domain or "not given", "notes": meta.notes,
        "text": {True: "the model's own output", False: "teacher-forced", None: "not said whether the model's own"}[meta.on_policy],
        "size": _size(trace) + f"; {meta.model_layers} layers in the model, {meta.shared_experts} shared experts",
        "expert size": f"{sizes[0]:.6g} MB" + (f" to {sizes[-1]:.6g} MB" if len(sizes) > 1 else ""),
        "prefill": part(traces.PREFILL), "decode": part(traces.DECODE),
        "also holds": ", ".join(name for name, array in (("gate weights", trace.weights_NLK), ("token ids", trace.token_ids)) if array is not None) or "nothing",
    }  # fmt: skip
    for name, text in lines.items():
        if text:
            print(f"{name:12} {text}")
    if trace.predictions:
        rows = [_foretold(trace, name, h) for name, h in sorted(trace.predictions)]
        _print_table(("predictor", "layers ahead", "guesses per layer", f"hit@{meta.top_k}"), rows)
        print(f"hit@{meta.top_k}: the share of a token's {meta.top_k} experts of a layer that a predictor has among its first {meta.top_k} guesses"
              + ("; -: none of its guesses is for a layer of the same token" if any(row[-1] == "-" for row in rows) else ""))  # fmt: skip
    if options.locality:
        figures = locality.locality(trace)
    else:
        figures = {"reuse": locality.reuse(trace), "switch_rate": locality.switch_rate(trace)} if _adjacent(trace) else {}
    if figures:
        _print_table(("locality", "value", ""), [(LOCALITY[name][0], f"{value:.4f}", LOCALITY[name][1]) for name, value in figures.items()])
    return 0


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table under its columns' names, what looks like a number to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(head, *rows))
    numeric = [all(re.fullmatch(r"[\d.,]+|-", cell) for cell in column) for _, *column in columns]
    print()
    for row in (head, *rows):
        print("  ".join(f"{cell:>{max(map(len, column))}}" if right else f"{cell:{max(map(len, column))}}" for cell, column, right in zip(row, columns, numeric)).rstrip())


def _adjacent(trace) -> bool:
    return bool((trace.sequence[1:] == trace.sequence[:-1]).any())


def _foretold(trace, predictor: str, horizon: int) -> tuple[str, str, str, str]:
    """A row of the predictors' table."""
    from . import locality, traces

    try:
        hit = f"{locality.hit_at_k(trace, predictor, horizon):.4f}"
    except traces.TraceError:
        hit = "-"
    return predictor, str(horizon), str(trace.prediction(predictor, horizon).experts_NLM.shape[2]), hit


def _record(options) -> int:
    from . import config, recording, runs
    from .cli import sections

    if options.model is not None:
        print(f"{options.out}: {_size(cli_hf.record(options))}")
        return 0
    given = {"--text": options.text, "--text-file": options.text_file, "--horizon": options.horizon, "--heads": options.heads, "--tokenizer": options.tokenizer, "--dtype": options.dtype, "--device": options.device}
    if alone := [name for name, value in given.items() if value is not None and value != []]:
        raise ConfigError(f"{', '.join(alone)} can only go with --model: a profile's models are recorded on held-out text")
    if not options.generated:
        arguments.unused({"--temperature": options.temperature, "--generation-seed": options.generation_seed}, "on held-out text, where nothing is drawn: give --generated")
    profile, arm = options.profile or "smoke", options.arm or "baseline"
    asked = {name: getattr(options, name) for name in ("per_domain", "tokens", "prompt", "guesses", "temperature")}
    asked |= {"seed": options.generation_seed, "predictors": options.predictors and tuple(options.predictors)}
    what = recording.Recording(kind=recording.GENERATED if options.generated else recording.HELDOUT, **{n: v for n, v in asked.items() if v is not None})
    changes = sections(options.changes)
    changes["objective"] = ARMS[arm] | changes.get("objective", {})
    tier = profile.removeprefix("tier_")
    run = config.tier(tier, seed=options.seed or 0, **changes)
    path = options.out or recording.trace_path(profile, arm, what)
    if options.out:   # else the folder is made
        may_write(trace=path)
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    trace = recording.get_or_record(run, config.TIERS[tier].posthoc, what, path=path, store=runs.default_store(profile), report=say)
    print(f"{path}: {_size(trace)}")
    return 0


def _simulate(options) -> int:
    from . import simulator, traces

    if (options.slots is None) == (options.bytes is None):
        raise ConfigError("say what the cache holds: either --slots or --bytes")
    if set(options.predictor) == {"demand"}:
        arguments.unused({"--no-expire" if name == "expire" else "--no-promote" if name == "promote" else f"--{name.replace('_', '-')}": getattr(options, name) for name in AHEAD},
                         "where --predictor asks for demand alone: name a predictor")  # fmt: skip
    may_write(options.csv, options.json, but=[options.trace])
    trace = traces.load(options.trace)
    names = {"policy": "cache_policy", "predictor": "policy"}
    axes = ("predictor", "slots", "bytes", "policy", "scope", "pinned", *AHEAD,
            "latency_ms", "gb_per_s", "lanes", "noise", "attention_ms", "expert_ms", "shared_ms", "head_ms", "overlap")  # fmt: skip
    grid = {names.get(name, name): getattr(options, name) for name in axes if getattr(options, name) is not None}
    grid["policy"] = grid.pop("policy")   # last, so that the predictors of one setting stand together
    capacity = dict(slots=options.slots[0]) if options.slots else dict(bytes=options.bytes[0])
    if not options.quiet and not simulator.is_compiled():
        print("predmoe: compiling the simulator, which happens once after an installation and takes a while", file=sys.stderr)
    price = None if options.joules_per_gb is None else options.joules_per_gb / 1e9
    table = simulator.sweep(trace, cache=simulator.Cache(**capacity, streaming=options.streaming), warmup=options.warmup, cold=options.cold,
                            joules_per_byte=price, workers=options.workers, progress=not options.quiet, **grid)  # fmt: skip
    table = table.rename(columns=COLUMNS)
    asked = [COLUMNS.get(name, name) for name in grid]
    varied = [name for name in asked if name == "predictor" or len(grid[{v: k for k, v in COLUMNS.items()}.get(name, name)]) > 1]
    shown = table[[*varied, *(name for name in SHOWN if name in table)]]
    print(shown.to_string(index=False, na_rep="-", float_format=lambda value: f"{value:.4g}"))
    if options.csv:
        write_text(options.csv, table.to_csv(index=False))
    if options.json:
        rows = [{name: _plain(value) for name, value in row.items()} for row in table.to_dict("records")]
        facts = {"model": trace.meta.model, "source": trace.meta.source, "domain": trace.meta.domain, "on_policy": trace.meta.on_policy, "notes": trace.meta.notes}
        settings = {"warmup": options.warmup, "cold": options.cold, "streaming": options.streaming, "joules_per_gb": options.joules_per_gb}
        write_text(options.json, json.dumps({"trace": facts, "settings": settings, "rows": rows}, indent=1, allow_nan=False) + "\n")
    return 0


def _plain(value):
    """A table's value as JSON has it: no NaN, an infinite bandwidth as the text "inf"."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value.item() if hasattr(value, "item") else value
