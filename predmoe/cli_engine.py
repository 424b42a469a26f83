"""The commands of the engine: `predmoe export` and `predmoe generate`. See `cli` for how errors are told."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from . import arguments
from .cli_traces import _horizon, _told, _whole_numbers, may_write
from .config import SEEDS, ConfigError, within
from .files import write_text


NEW_TOKENS = 64
PREFETCH = {"horizon": "--horizon", "budget": "--budget", "threshold": "--threshold", "guard": "--guard", "expire": "--no-expire", "cancel": "--cancel"}
THREADS_PER_CORE = 4   # beyond that they only wait for one another


def add(commands) -> None:
    """Add the commands to the parser's subcommands."""
    command = commands.add_parser("export", help="write a checkpoint as the engine reads it: experts in aligned blocks of one file")
    command.add_argument("checkpoint", type=arguments.path, help="a run's folder, its checkpoint, or any OLMoE-format folder")
    command.add_argument("out", type=arguments.path, help="the folder to write, which must not exist")
    command.add_argument("--dtype", default="bf16", help="of the experts: bf16, float32 or int8 (weights alone, a scale per output row; default: bf16)")
    command.add_argument("--heads", nargs="+", default=[], metavar="KIND=FILE", help="predictors: linear=FILE ranking=FILE (default: those beside the checkpoint)")
    command.add_argument("--tokenizer", help="bpe8k, gpt2, or tokenizer.json: the checkpoint's own (default: the run's, or the checkpoint's own where it has one)")
    command.add_argument("--name", type=arguments.text, help="the model's name, kept in the export and in its traces (default: the folder's)")
    command.set_defaults(command=_told(_export), again="what is not whole is removed, and the same command begins anew")

    command = commands.add_parser("generate", help="go on with a prompt, experts read from disk")
    command.add_argument("--model", type=arguments.path, required=True, help="a folder that `predmoe export` wrote")
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", type=arguments.text, metavar="TEXT", help="text to go on with; several are one batch")
    prompts.add_argument("--prompt-ids", nargs="+", type=_ids, metavar="N,N,...", help="the same as token ids")
    command.add_argument("--max-new-tokens", type=int, metavar="N", help=f"(default: {NEW_TOKENS}, or what the prompt leaves of the context)")
    command.add_argument("--temperature", type=arguments.number(0), default=0.0, help="0: the likeliest token (default: 0)")
    command.add_argument("--seed", type=int, help="of the drawing (default: 0)")
    command.add_argument("--no-stop", action="store_true", help="go on after an end-of-text token")
    cache = command.add_argument_group("cache")
    cache.add_argument("--cache-mb", type=arguments.number(above=0), required=True, metavar="N", help="memory for experts, the reads under way included")
    cache.add_argument("--policy", default="lru", help="lru, fifo, lfu, lfru, least-stale, belady, static (default: lru)")
    cache.add_argument("--scope", default="global", help="global or layer (default: global)")
    cache.add_argument("--pinned", type=int, default=0, metavar="N", help="most used experts that never leave, by --future's uses (default: 0)")
    ahead = command.add_argument_group("prefetch")
    ahead.add_argument("--prefetch", default="none", help="none, next_router, linear, ranking, or oracle (which needs --future; default: none)")
    ahead.add_argument("--horizon", type=_horizon, metavar="H[+H...]", help="layers ahead; 1+2 asks at both (default: 1)")
    ahead.add_argument("--budget", type=int, metavar="N", help="guesses beyond the top-k (default: 0)")
    ahead.add_argument("--threshold", type=arguments.number(), help="least probability of a guess (default: none)")
    ahead.add_argument("--guard", help="none, or idle: guess only while nothing is read (default: none)")
    ahead.add_argument("--no-expire", dest="expire", action="store_const", const=False, help="keep queued guesses whose layer has run")
    ahead.add_argument("--cancel", action="store_const", const=True, help="drop queued guesses that a shorter horizon leaves out")
    ahead.add_argument("--future", type=arguments.path, metavar="TRACE", help="the trace of the same generation, recorded before: for oracle, belady, pinned and static")
    disk = command.add_argument_group("disk")
    disk.add_argument("--lanes", type=int, default=4, metavar="N", help="reads at a time (default: 4)")
    disk.add_argument("--buffered", action="store_true", help="read through the page cache")
    disk.add_argument("--verify", default="first", help="checksums: first (each expert's first read, and the other files), always (each read), never (default: first)")
    command.add_argument("--threads", type=int, metavar="N", help="of the computation (default: torch's)")
    command.add_argument("--record", type=arguments.path, metavar="TRACE", help="write the routing, with every predictor's guesses, as a trace")
    command.add_argument("--json", type=arguments.path, help="write the summary")
    command.set_defaults(command=_told(_generate))


def _ids(text: str) -> list[int]:
    found = _whole_numbers(text, ",")
    return [found] if isinstance(found, int) else list(found)


def _export(options) -> int:
    from .engine import export

    heads = {}
    for given in options.heads:
        kind, equals, file = given.partition("=")
        if not (equals and file):
            raise ConfigError(f"--heads {given!r} is not KIND=FILE, such as ranking=heads.safetensors")
        if kind in heads:
            raise ConfigError(f"--heads names two {kind} predictors, {heads[kind]} and {file}; give one of them")
        heads[kind] = Path(file)
    folder = options.checkpoint
    if (folder / "checkpoint" / "config.json").is_file():   # a run of the store
        folder = folder / "checkpoint"
    manifest = export(folder, options.out, dtype=options.dtype, heads=heads or None, tokenizer=options.tokenizer, name=options.name or options.checkpoint.resolve().name,
                      progress=lambda line: print(line, file=sys.stderr))  # fmt: skip
    model, predictors = manifest.model, ", ".join(manifest.heads) or "no predictor"
    print(f"{options.out}: {model.num_layers} layers x {model.num_experts} experts of {manifest.block.size / 1e6:.6g} MB ({manifest.dtype}), {predictors}")
    return 0


def _generate(options) -> int:
    import torch

    from .engine import Engine, EngineError, load_manifest
    from .engine.asked import check_prompts
    from .engine.cache import MOST_LANES
    from .engine.export import LONGEST_CONTEXT
    from .engine.text import Text
    from .simulator import Cache, Prefetch

    within("--seed", options.seed or 0, *SEEDS)
    within("--lanes", options.lanes, 1, MOST_LANES)
    if options.max_new_tokens is not None:
        within("--max-new-tokens", options.max_new_tokens, 1, LONGEST_CONTEXT)
    if options.threads is not None:
        within("--threads", options.threads, 1, THREADS_PER_CORE * (os.cpu_count() or 1))
    _nothing_unused(options)
    own = [path for path in Path(options.model).glob("*") if path.is_file()]   # the model itself is not to be written over
    may_write(options.json, trace=options.record, but=[*own, *([options.future] if options.future else [])], outside=options.model)
    manifest = load_manifest(options.model)
    text = Text(options.model, manifest) if options.prompt or manifest.tokenizer else None
    prompts = options.prompt_ids or [text.encode(prompt) for prompt in options.prompt]
    asked = {name: getattr(options, name) for name in PREFETCH if getattr(options, name) is not None}
    ahead = Prefetch(source=options.prefetch, **asked) if options.prefetch != "none" else None
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.max_new_tokens is None:
        options.max_new_tokens = max(1, min(NEW_TOKENS, manifest.model.context - max(map(len, prompts))))
    check_prompts(prompts, options.max_new_tokens, options.temperature, manifest.model)
    cache = Cache(slots=_slots(options, manifest), policy=options.policy, scope=options.scope, pinned=options.pinned)
    shallow = lambda horizons: tuple(h for h in horizons if h < manifest.model.num_layers)  # noqa: E731
    record = {"next_router": shallow((1, 2, 4)), **manifest.heads} if options.record else None
    future = _load_future(options.future)
    _compile(manifest)
    engine = Engine(options.model, cache=cache, prefetch=ahead, lanes=options.lanes, direct=not options.buffered, verify=options.verify, future=future, record=record,
                    announce=lambda line: print(f"predmoe: {line}", file=sys.stderr))  # fmt: skip
    code = 0
    with engine:
        if engine.experts.buffers.bytes > options.cache_mb * 1e6:
            raise ConfigError(f"--cache-mb {options.cache_mb:g}: this disk's alignment makes each buffer {engine.experts.buffers.stride} bytes; give {engine.experts.buffers.bytes / 1e6:.1f}")
        try:
            _speak(engine, prompts, text, options)
            engine.experts.quiet()
        except KeyboardInterrupt as stopped:   # of another signal than Ctrl-C its number comes with it (`cli`)
            code = 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
        except EngineError as error:
            print(f"predmoe: {error}", file=sys.stderr)
            code = 1
        print(f"\n{engine.summary()}", file=sys.stderr)
        _keep(engine, options, code, source=f"{len(prompts)} prompts at temperature {options.temperature:g}, seed {options.seed or 0}")
    return code


def _nothing_unused(options) -> None:
    """Raise ConfigError for options that were given and that nothing would come of."""
    if options.prefetch == "none":
        arguments.unused({option: getattr(options, name) for name, option in PREFETCH.items()}, "without a prefetch: name one with --prefetch")
    if not options.temperature:
        arguments.unused({"--seed": options.seed}, "at --temperature 0, where nothing is drawn: give a temperature")
    if options.prefetch != "oracle" and options.policy not in ("belady", "static") and not options.pinned:
        arguments.unused({"--future": options.future}, "here: give --prefetch oracle, --policy belady or static, or --pinned")


def _keep(engine, options, code: int, *, source: str) -> None:
    """Write the files that were asked for, each whether or not the other can be. Raises ConfigError for those that cannot."""
    from . import traces

    wrong = []
    for path, write in ((options.json, lambda: write_text(options.json, json.dumps(dataclasses.asdict(engine.summary()), indent=1) + "\n")),
                        (options.record if code == 0 else None, lambda: traces.save(engine.trace(source=source), options.record))):  # fmt: skip
        try:
            if path:
                write()
        except (ConfigError, traces.TraceError) as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("; ".join(wrong))


def _compile(manifest) -> None:
    """What is compiled once per machine, by a child process: the compiler, in this one, would not hear of Ctrl-C for seconds."""
    from .engine.decode import COMPILING, fits
    from .engine.loop import kernels_of
    from .engine.table import ready

    if not ready(kernels_of(fits(manifest))):
        print(f"predmoe: {COMPILING}", file=sys.stderr)
        program = f"from predmoe.engine import loop, table; table.prepare(loop.kernels_of({fits(manifest)}))"
        # of a session of its own: of what a terminal says only this process hears, and ends it. Where it fails, the engine compiles, or says why it cannot.
        subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _load_future(path: Path | None):
    from . import traces

    return traces.load(path) if path else None


def _slots(options, manifest) -> int:
    """Experts that fit in --cache-mb beside a buffer for each read under way (of each layer's own cache with --scope layer)."""
    size, K = manifest.block.size, manifest.model.top_k
    groups = manifest.model.num_layers if options.scope == "layer" else 1
    slots = min((int(options.cache_mb * 1e6) // size - options.lanes) // groups, manifest.model.num_layers * manifest.model.num_experts // groups)
    if slots < K:
        least = f"a top-{K} set{' of each layer' if groups > 1 else ''} and {options.lanes} reads at a time need {(K * groups + options.lanes) * size / 1e6:.3f}"
        raise ConfigError(f"--cache-mb {options.cache_mb:g} is too small: {least}")
    return slots


def _speak(engine, prompts, text, options) -> None:
    """Generate; the text of one prompt as it comes, of several when all are done."""
    from .engine.text import Stream

    stream = Stream(text) if text and len(prompts) == 1 else None

    def show(new) -> None:
        if stream:
            print(stream.add([token for _, token in new]), end="", flush=True)
        elif len(prompts) == 1:
            print(new[0][1], end=" ", flush=True)

    stop = None if options.no_stop or text is None else text.end
    found = engine.generate(prompts, max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed or 0, stop=stop, on_tokens=show)
    if len(prompts) > 1:
        for number, tokens in enumerate(found):
            print(f"[{number}] {text.decode(tokens) if text else ' '.join(map(str, tokens))}")
    else:
        print()
