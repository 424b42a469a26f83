"""The command line: `predmoe report`, `plan`, `train`, `explore`, `paper` and `readme`; `trace` and `simulate` are in `cli_traces`, `export` and `generate`
in `cli_engine`, `probe` in `cli_hf`, `evaluate` in `cli_downstream`. What a person can mend is one sentence and exit code 2; a bug is a traceback."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import arguments as kinds
from . import cli_downstream, cli_engine, cli_hf, cli_traces, config, variables
from .config import ConfigError
from .files import parse_yaml


UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)   # of a folder that a person named


AGAIN_SECONDS = 10.0   # longer than it takes to end children and to clean up


GOES_ON, ANEW = "the same command goes on where this one stopped", "the same command begins anew"   # what is true of a command that was stopped


class Stopped(KeyboardInterrupt):
    """The process was told to end by a signal, its first argument. What cleans up after Ctrl-C cleans up after it."""


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Within, SIGTERM (and SIGHUP, of a terminal that is closed) raise Stopped: by themselves they end Python without a word and without
    ending its children. Where a caller has a handler of its own, or ignores them as nohup does, that stays. A library may keep what is raised
    within its callback to itself and wait on: so it is raised again every AGAIN_SECONDS until all that cleans up is done."""
    asked: list[int] = []
    again: list[threading.Timer] = []

    def stop(number, _):
        asked.append(number)
        again.append(threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number)))
        again[-1].daemon = True
        again[-1].start()
        raise Stopped(number)

    main_thread = threading.current_thread() is threading.main_thread()   # elsewhere no handler can be set
    mine = [number for number in (signal.SIGTERM, signal.SIGHUP) if main_thread and signal.getsignal(number) == signal.SIG_DFL]
    for number in mine:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for timer in again:
            timer.cancel()
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
        if asked:   # whatever came of it: where it is raised within a library's callback, it may stay there
            raise Stopped(asked[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 a notebook or a run failed, 2 it could not be used, 130 interrupted, 143 terminated (129: its terminal closed, 141: its reader)."""
    if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):   # as standard error has it: else a character that the terminal's encoding lacks is a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _run(arguments)
    if arguments is None and code > 128:   # as a program: whoever stops it waits for it
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process after its cleaning up, without taking the interpreter apart: with torch and numba in it that takes most of a second of a core, and many on a busy machine."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)   # a second Ctrl-C ends it at once, where it would be a traceback
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):   # closed
            stream.flush()
    os._exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    options = argparse.Namespace(again=ANEW)
    try:
        options = _parser().parse_args(arguments)
        variables.check()
        with _stopping():
            code = options.command(options)
            _flush()
            return code
    except ConfigError as error:
        return _say(str(error), 2)
    except BrokenPipeError:
        _print_no_more()
        return _say("whoever read what is printed has closed it (head, for instance): the rest is not computed", 128 + signal.SIGPIPE)
    except OSError as error:
        if (unprinted := _unprinted(error)) is not None:
            return _say(f"what is printed cannot be written: {os.strerror(unprinted)}; free some space there or print it elsewhere, and run the same command again", 2)
        if error.errno in UNUSABLE and error.filename:
            return _say(f"cannot use {error.filename}: {error.strerror}; name another folder or change its permissions", 2)
        if error.errno == errno.ENOENT and "temporary directory" in str(error):   # what torch imports asks for one, which a full disk has not
            return _say(f"{error.strerror}: free some space there, or set TMPDIR to a folder that has some", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _say(f"no space left for {error.filename or 'a file'}; free some and run the same command again, what is finished is kept", 2)
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        kept = "the last checkpoint and all that is finished are kept, and the same command goes on from there"
        return _say(f"stopped by {number.name}; {kept if options.again == GOES_ON else _again(options)}", 128 + number)
    except KeyboardInterrupt:
        return _say(f"interrupted; {_again(options)}", 130)


def _again(options) -> str:
    """What the same command would do: a sentence, or what finds it out once all has ended."""
    return options.again() if callable(options.again) else options.again


def _flush() -> None:
    """Print what is still to be printed: where that fails at Python's own end, it is no sentence."""
    if sys.stdout:   # None where it was closed from the start
        sys.stdout.flush()


def _unprinted(error: OSError) -> int | None:
    """The error's number where `error` is of standard output, which is given up then; else None."""
    try:
        _flush()
        if error.filename is None:   # where nothing is buffered, nothing is left that would fail again: one line more shows it
            print(flush=True)
    except OSError as again:
        _print_no_more()
        return again.errno
    return None


def _print_no_more() -> None:
    """Else Python would write what is left to standard output once more, at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str, code: int) -> int:
    with contextlib.suppress(OSError):   # where nobody can be told, the code tells
        print(f"predmoe: {sentence}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = kinds.Parser(prog="predmoe", description="Train mixtures of experts whose activations are predictable, and report what that is worth.")
    parser.set_defaults(again=ANEW)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("report", help="run the notebooks of a profile and write its HTML report")
    command.add_argument("--profile", default="smoke", help="smoke, or a name that params/*/NAME.yaml has (default: smoke)")
    command.add_argument("--only", nargs="+", default=[], metavar="NB", help="only these notebooks, by name or number: 02_horizons, 02 or 2")
    command.add_argument("--force", action="store_true", help="run notebooks that are up to date as well")
    command.add_argument("--verbose", action="store_true", help="show what the notebooks print while they run")
    command.set_defaults(command=_report, again=GOES_ON)

    command = commands.add_parser("plan", help="print the runs that a profile's notebooks need: done, to be measured, missing, and the time left")
    command.add_argument("--profile", default="cpu", help="smoke, or a name that params/*/NAME.yaml has (default: cpu)")
    command.add_argument("--only", nargs="+", default=[], metavar="NB", help="only these notebooks, by name or number: 02_horizons, 02 or 2")
    command.add_argument("--train", "--run", action="store_true", help="train and measure what is missing, in this order; interrupted, the same command goes on")
    command.add_argument("--parallel", type=int, help="runs side by side (default: 2; a worker has one)")
    command.add_argument("--worker", action="store_true", help="with --run: claim one run after the other from a store that other machines work on too ($PREDMOE_STORE)")
    command.add_argument("--nproc", type=int, help="with --worker: processes for each run, on GPUs one per GPU (default: 1)")
    command.add_argument("--engine", choices=("ddp", "fsdp", "hsdp"), help="how they share it: each has the whole model, or a part, of all or of its node (default: ddp)")
    command.set_defaults(command=_plan, again=GOES_ON)

    command = commands.add_parser("train", help="train one model and print its folder")
    command.add_argument("--tier", default="smoke", help=f"one of {', '.join(config.TIERS)} (default: smoke)")
    command.add_argument("--seed", type=int, help="initialisation seed, the same as --set train.seed=N (default: 0)")
    command.add_argument("--set", nargs="+", default=[], action="extend", metavar="SECTION.FIELD=VALUE", dest="changes",
                         help="change the tier, for instance objective.lambda_pred=0.3 train.steps=200 predictor.horizons=[1,2]")  # fmt: skip
    command.add_argument("--store", type=kinds.folder, help="the run store's folder (default: the one of the tier's profile)")
    command.add_argument("--nproc", type=int, help="processes that share the run, on GPUs one per GPU (default: 1)")
    command.add_argument("--engine", choices=("ddp", "fsdp", "hsdp"), help="how they share it: each has the whole model, or a part, of all or of its node (default: ddp)")
    command.set_defaults(command=_train, again=GOES_ON)

    command = commands.add_parser("gpu-report", help="tier A on one GPU without a network, some minutes at a time; each call goes on where the last stopped")
    command.add_argument("--out", type=kinds.folder, required=True, help="the folder of everything: runs, traces, throughput, report.md")
    command.add_argument("--tokens", type=kinds.path, help="a token file of scripts/prepare_corpus.py, unpacked where it is not yet")
    command.add_argument("--tier", default="a", help="the size (default: a)")
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="initialisation seeds, a pair of arms each (default: 0 1 2)")
    command.add_argument("--minutes", type=kinds.number(above=0), default=8.0, help="of this call (default: 8)")
    command.add_argument("--keep-weights", action="store_true", help="keep the checkpoints of finished arms")
    command.add_argument("--no-peers", action="store_true", help="leave transformers out of the table of throughput")
    command.add_argument("--set", nargs="+", default=[], action="extend", metavar="SECTION.FIELD=VALUE", dest="changes",
                         help="change the tier, as in `predmoe train`; posthoc.FIELD changes the predictors' fit")  # fmt: skip
    command.set_defaults(command=_gpu_report, again=GOES_ON)

    command = commands.add_parser("explore", help="open the explorer in JupyterLab: sliders over cache, disk and prefetch, each position simulated by a kernel")
    command.add_argument("--port", type=int, default=8888, help="port of the server; the next free one where it is taken (default: 8888)")
    command.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    command.set_defaults(command=_explore, again="the server and its kernels have ended, and what was saved is kept")

    cli_traces.add(commands)
    cli_engine.add(commands)
    cli_hf.add(commands)
    cli_downstream.add(commands)

    command = commands.add_parser("paper", help="write the paper's numbers and figures from a profile's results, and build its PDF")
    command.add_argument("--profile", default="cpu", help="whose results the paper reports (default: cpu)")
    command.add_argument("--any-commit", action="store_true", help="take results of several commits or of changed code as well; the paper then says so")
    command.add_argument("--no-pdf", action="store_true", help="write numbers.tex and figures/ only; needs no LaTeX")
    command.add_argument("--bundle", nargs="?", type=kinds.path, const=Path("paper/predmoe-arxiv.tar.gz"), metavar="FILE",
                         help="also write the sources as an archive for arXiv that compiles on its own (default: paper/predmoe-arxiv.tar.gz)")  # fmt: skip
    command.set_defaults(command=_paper)

    command = commands.add_parser("readme", help="bring the computed parts of README.md up to date with outputs/")
    command.set_defaults(command=_readme)
    return parser


def _report(options) -> int:
    from . import execute, report

    failures = execute.run(execute.plan(options.profile, options.only), force=options.force, verbose=options.verbose)
    print(f"report: {report.write(options.profile, failures)}")
    return _say(f"{len(failures)} of the notebooks failed: {', '.join(failures)}", 1) if failures else 0


def _plan(options) -> int:
    from . import fleet, plan, runs

    if options.parallel is not None and options.parallel < 1:
        raise ConfigError(f"--parallel {options.parallel}: at least one run goes at a time")
    nproc = _nproc(options)
    if options.worker and not options.train:
        raise ConfigError("--worker works runs off: write --run --worker")
    if options.worker:
        kinds.unused({"--parallel": options.parallel}, "on a worker, which has one run at a time: start as many workers as runs should go side by side")
    else:
        kinds.unused({"--nproc": options.nproc}, "here: give --run --worker, or --parallel for runs side by side")
    parallel = options.parallel or (1 if options.worker else 2)
    items = plan.plan(options.profile, options.only)
    only = f" --only {' '.join(options.only)}" if options.only else ""
    print(plan.tell(items, parallel, "" if options.train else f"predmoe plan --profile {options.profile}{only} --parallel {parallel} --train"))
    report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    if options.train:
        try:
            if options.worker:
                done = fleet.work(plan.wanted(items), store=runs.default_store(options.profile), report=report, nproc=nproc, engine=options.engine or "ddp")
                report(f"runs done by this worker: {done}; nothing is left")
            else:
                plan.train(items, options.profile, parallel=parallel, report=report)
        except runs.RunFailed as error:
            return _say(str(error), 1)
    return 0


def _nproc(options) -> int:
    """Processes of a run. Raises ConfigError where there is none, or --engine says how they share it and no --nproc how many: with --nproc 1 a run of several
    goes on by the same command."""
    nproc = 1 if options.nproc is None else options.nproc
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: a run needs at least one process")
    if options.nproc is None:
        kinds.unused({"--engine": options.engine}, "on a run of one process: give --nproc")
    return nproc


def _train(options) -> int:
    nproc = _nproc(options)
    changes = sections(options.changes)
    if options.seed is not None and changes.get("train", {}).get("seed", options.seed) != options.seed:
        raise ConfigError(f"--seed {options.seed} and --set train.seed={changes['train']['seed']} differ; give one of them")
    run_config = config.tier(options.tier, seed=options.seed, **changes)
    from . import children, runs

    profile = {"a": "tier_a", "b": "tier_b"}.get(options.tier, options.tier)
    store = options.store or runs.default_store(profile)
    if run_config.finetune is None:   # a fine-tune goes on with the stock model, too, which has a folder of its own
        options.again = lambda: children.remains(store / run_config.hash)
    several = {} if nproc == 1 else {"nproc": nproc, "engine": options.engine or "ddp"}
    try:
        run = runs.get_or_train(run_config, store=store, report=lambda line: print(line, file=sys.stderr), **several)
    except runs.RunFailed as error:
        return _say(str(error), 1)
    print(run.path)
    return 0


def _gpu_report(options) -> int:
    from . import gpu_report, runs

    changes = sections(options.changes)
    posthoc = changes.pop("posthoc", {})
    changes = {"data": {"corpus": "offline-large"}} | changes if options.tier in ("a", "b") else changes
    try:
        gpu_report.run(options.out, tier=options.tier, seeds=options.seeds, minutes=options.minutes, changes=changes, posthoc=posthoc, tokens=options.tokens,
                       keep_weights=options.keep_weights, peers=not options.no_peers, report=lambda line: print(line, file=sys.stderr, flush=True))  # fmt: skip
    except runs.RunFailed as error:
        return _say(str(error), 1)
    return 0


def _explore(options) -> int:
    """JupyterLab rather than Voila: it is here already, a reader may look at and change the cells, and what runs is the notebook as it is."""
    from . import lab

    return lab.explore(options.port, browser=not options.no_browser)


def _paper(options) -> int:
    from . import paper, paper_build

    if options.no_pdf and options.bundle:
        raise ConfigError("--no-pdf and --bundle: an archive is compiled before it is written, so it needs LaTeX")
    if not options.no_pdf:
        paper_build.need_latex()   # before anything is drawn
    if options.bundle:
        paper_build.target_of(options.bundle)
    for note in paper.write(options.profile, any_commit=options.any_commit):
        print(f"predmoe: note: {note}", file=sys.stderr)
    if options.no_pdf:
        print(paper.FOLDER / "numbers.tex")
        return 0
    print(paper_build.compile(paper.FOLDER))
    if options.bundle:
        print(paper_build.bundle(paper.FOLDER, options.bundle))
    return 0


def _readme(options) -> int:
    from . import readme

    print("README.md " + ("rewritten" if readme.update() else "is up to date"))
    return 0


def sections(changes: Sequence[str]) -> dict[str, dict]:
    """["train.steps=200", ...] as {"train": {"steps": 200}, ...}; values are YAML."""
    sections: dict[str, dict] = {}
    for change in changes:
        target, equals, text = change.partition("=")
        section, dot, field = target.partition(".")
        if not (equals and dot and section and field):
            raise ConfigError(f"--set {change!r} is not SECTION.FIELD=VALUE, such as train.steps=200")
        try:
            sections.setdefault(section, {})[field] = parse_yaml(text)
        except ValueError:
            raise ConfigError(f"--set {change!r}: the value is not YAML") from None
    return sections
