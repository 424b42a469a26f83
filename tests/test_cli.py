import errno
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from predmoe import cli, config, execute


def test_report_executes_writes_pages_and_carries_on(house, capsys):
    """The real thing on tiny notebooks: papermill, a kernel, nbconvert."""
    house.notebook("00_report", 'profile = "smoke"  # profile', "print('all of', profile)")
    house.notebook("01_mechanism", "x = 0  # divisor", "1 / x")
    house.notebook("02_horizons", "x = 0.5  # x", "print('x is', x)")
    house.params("02_horizons", "smoke", "x: 1")

    assert cli.main(["report"]) == 1
    printed = capsys.readouterr()
    assert "[1/3] 01_mechanism: FAILED" in printed.out and "ZeroDivisionError" in printed.out
    assert "[2/3] 02_horizons: executed in" in printed.out and "[3/3] 00_report: not run, it waits for 01_mechanism" in printed.out
    assert printed.err == "predmoe: 2 of the notebooks failed: 01_mechanism, 00_report\n"
    html = house.outputs / "smoke" / "html"
    assert "x is 1.0" in (html / "02_horizons.html").read_text() and "failed: 01_mechanism.ipynb: cell [2]" in (html / "index.html").read_text()

    house.params("01_mechanism", "smoke", "x: 1")
    assert cli.main(["report", "--verbose"]) == 0
    printed = capsys.readouterr()
    assert "[2/3] 02_horizons: up to date" in printed.out and "all of smoke\n" in printed.out
    assert f"report: {html / 'index.html'}" in printed.out and printed.err == ""
    assert sorted(path.name for path in html.iterdir()) == ["00_report.html", "01_mechanism.html", "02_horizons.html", "index.html"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["report"], "there are no notebooks in"),
        (["train", "--tier", "huge"], "tier='huge' is unknown; choose one of smoke, cpu"),
        (["train", "--set", "train.stepps=3"], "unknown parameter stepps for TrainConfig"),
        (["train", "--set", "trian.steps=3"], "unknown section 'trian'"),
        (["train", "--set", "objective.lambda_pred=3e-1"], "lambda_pred='3e-1' is str, not float"),
        (["train", "--set", "steps=3"], "'steps=3' is not SECTION.FIELD=VALUE"),
        (["train", "--set", "train.steps=[3"], "the value is not YAML"),
        (["train", "--set", "predictor.horizons=[9]"], "horizon 9 must be below num_layers"),
        (["train", "--set", "data.corpus=nonsense"], "corpus='nonsense' is unknown; choose offline, fineweb-edu[:DOCUMENTS], offline-large or files:PATH"),
        (["train", "--set", "data.corpus=offline:3"], "corpus='offline:3' is unknown"),
        (["train", "--set", "data.corpus=fineweb-edu:many"], "what follows the colon must be a number of documents"),
        (["train", "--set", "data.corpus=files:,"], "names no path"),
        (["train", "--nproc", "0"], "--nproc 0: a run needs at least one process"),
        (["train", "--engine", "fsdp"], "--engine would have no effect on a run of one process: give --nproc, or leave it out"),
        (["plan", "--engine", "ddp"], "--engine would have no effect on a run of one process"),
        (["plan", "--train", "--nproc", "2"], "--nproc would have no effect here: give --run --worker, or --parallel for runs side by side, or leave it out"),
        (["train", "--set", "data.tokenizer=nonsense"], "tokenizer='nonsense' is unknown; choose one of bpe8k, gpt2"),
    ],
)
def test_what_a_person_can_mend_is_one_sentence_and_code_2(house, capsys, arguments, said):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("predmoe: ") and said in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def test_a_full_disk_and_a_folder_that_cannot_be_used_are_sentences_and_another_system_error_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(execute, "plan", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.pt")))
    assert cli.main(["report"]) == 2
    assert "no space left for state.pt; free some" in capsys.readouterr().err
    monkeypatch.setattr(execute, "plan", raising(PermissionError(errno.EACCES, "denied", "x")))
    assert cli.main(["report"]) == 2
    assert "cannot use x: denied" in capsys.readouterr().err
    monkeypatch.setattr(execute, "plan", raising(FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")))
    assert cli.main(["report"]) == 2
    assert "No usable temporary directory found in ['/tmp']: free some space there, or set TMPDIR" in capsys.readouterr().err
    monkeypatch.setattr(execute, "plan", raising(OSError(errno.EMFILE, "too many", "x")))
    with pytest.raises(OSError, match="too many"):
        cli.main(["report"])


@pytest.mark.parametrize("how, flush", [({}, True), ({}, False), ({"write_through": True}, False)], ids=["at once", "at the end", "unbuffered"])
def test_what_cannot_be_printed_is_one_sentence(monkeypatch, capsys, how, flush):
    monkeypatch.setattr(execute, "plan", lambda *_: print("text", flush=flush) or [])
    monkeypatch.setattr("predmoe.report.write", lambda *_: None)
    with open("/dev/full", "wb", buffering=0 if how else -1) as full, monkeypatch.context() as printed:
        printed.setattr(sys, "stdout", io.TextIOWrapper(full, **how))
        assert cli.main(["report"]) == 2
    assert capsys.readouterr().err == "predmoe: what is printed cannot be written: No space left on device; free some space there or print it elsewhere, and run the same command again\n"


def test_whoever_reads_no_more_or_nothing_at_all(monkeypatch, capsys):
    monkeypatch.setattr(execute, "plan", lambda *_: print("text") or [])
    monkeypatch.setattr("predmoe.report.write", lambda *_: None)
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as pipe, monkeypatch.context() as printed:   # what is printed is written at the end alone
        printed.setattr(sys, "stdout", pipe)
        assert cli.main(["report"]) == 141
    assert capsys.readouterr().err.startswith("predmoe: whoever read what is printed has closed it")
    monkeypatch.setattr(sys, "stdout", None)   # closed from the start
    assert cli.main(["report"]) == 0
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=raising(OSError(errno.ENOSPC, "full"))))
    assert cli.main(["report", "--nonsense"]) == 2   # and nobody can be told


def test_a_character_that_the_terminal_lacks_is_written_as_its_number(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", write_through=True))
    monkeypatch.setattr(cli, "_run", lambda _: print("é \udcff") or 0)
    assert cli.main() == 0 and printed.getvalue() == b"\\xe9 \\udcff\n"


def test_help_that_cannot_be_printed_is_one_sentence():
    with open("/dev/full", "w") as full:
        called = subprocess.run([sys.executable, "-m", "predmoe", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": ""})
    assert called.returncode == 2 and called.stderr.startswith("predmoe: what is printed cannot be written: No space left on device;") and called.stderr.count("\n") == 1


def test_an_interrupt_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(execute, "plan", raising(KeyboardInterrupt()))
    assert cli.main(["report"]) == 130
    assert "goes on where this one stopped" in capsys.readouterr().err


INTERRUPTED = "predmoe: interrupted; the same command goes on where this one stopped\n"
STOPPED = "predmoe: stopped by {}; the last checkpoint and all that is finished are kept, and the same command goes on from there\n"
ENDS = pytest.mark.parametrize("how, code, said", [
    (signal.SIGINT, 130, INTERRUPTED), (signal.SIGTERM, 143, STOPPED.format("SIGTERM")), (signal.SIGHUP, 129, STOPPED.format("SIGHUP")),
])  # fmt: skip


def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path):
    """Even where what is imported keeps the exception to itself, as some callbacks of Python's own import do."""
    program = f"""if True:
        import pathlib, sys, time
        class Slow:
            def find_spec(self, name, *_):
                if name == "predmoe.cli":
                    pathlib.Path({str(tmp_path / "started")!r}).touch()
                    try:
                        time.sleep(400)
                    except KeyboardInterrupt:
                        time.sleep(400)
        sys.meta_path.insert(0, Slow())
        from predmoe.__main__ import main
        sys.exit(main())
    """
    assert ended([sys.executable, "-c", program], signal.SIGINT, (tmp_path / "started").exists) == (130, "predmoe: interrupted before it began\n")


def test_the_program_hears_ctrl_c_as_it_did_once_it_is_imported(monkeypatch):
    from predmoe import __main__ as program, paths

    seen = []
    monkeypatch.setattr(cli, "main", lambda: seen.append(signal.getsignal(signal.SIGINT)) or 7)
    before = signal.getsignal(signal.SIGINT)
    try:
        for mine in (signal.default_int_handler, signal.SIG_IGN):   # the latter as in a shell's background
            signal.signal(signal.SIGINT, mine)
            assert program.main() == 7 and seen.pop() == mine
    finally:
        signal.signal(signal.SIGINT, before)
    assert tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"predmoe": "predmoe.__main__:main"}


@ENDS
def test_a_signal_within_a_cell_is_one_sentence_and_ends_the_kernel(house, how, code, said):
    """Sent to the whole group, as a terminal does. No word of the kernel's or of the libraries' around the sentence."""
    house.notebook("01_mechanism", 'profile = "smoke"  # profile', f"""
        import os, pathlib, time
        pathlib.Path({str(house.root / "partial")!r}).write_text(str(os.getpid()))
        os.rename({str(house.root / "partial")!r}, {str(house.root / "started")!r})
        time.sleep(400)
    """)  # fmt: skip
    program = "import sys; from pathlib import Path; from predmoe import cli, paths; paths.NOTEBOOKS, paths.PARAMS = map(Path, sys.argv[1:]); sys.exit(cli.main(['report']))"
    command = [sys.executable, "-c", program, *(str(house.root / name) for name in ("notebooks", "params"))]
    assert ended([*command], how, lambda: (house.root / "started").exists()) == (code, said)
    assert gone(int((house.root / "started").read_text()))


NOTHING, SAVED = "no checkpoint exists yet, so the same command begins anew", "the last checkpoint stays, and the same command goes on from it"


@pytest.mark.parametrize("how, code, kept, said", [
    (signal.SIGINT, 130, "nothing", f"interrupted; {NOTHING}"), (signal.SIGTERM, 143, "state.pt", f"stopped by SIGTERM; {SAVED}"), (signal.SIGHUP, 129, "nothing", f"stopped by SIGHUP; {NOTHING}"),
])  # fmt: skip
def test_a_signal_while_training_is_one_sentence_and_ends_the_child(tmp_path, how, code, kept, said):
    """The child sleeps in the place of a worker, with a checkpoint or without: what it saves, and that it goes on to the same bits, is tested with the trainer."""
    child = tmp_path / "python"
    child.write_text(f'#!/bin/sh\ntouch "$3/{kept}"; echo $$ > {tmp_path}/partial; mv {tmp_path}/partial {tmp_path}/started; exec sleep 400\n')
    child.chmod(0o755)
    program = "import sys; from predmoe import cli, runs; runs.sys.executable = sys.argv[1]; sys.exit(cli.main(['train', '--store', sys.argv[2]]))"
    command = [sys.executable, "-c", program, str(child), str(tmp_path / "store")]
    assert ended(command, how, lambda: (tmp_path / "started").exists()) == (code, f"predmoe: {said}\n")
    assert gone(int((tmp_path / "started").read_text()))


def ended(command: list[str], how: signal.Signals, started) -> tuple[int, str]:
    """Exit code and standard error of a command whose whole group gets the signal once it has `started`."""
    heard = lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]  # noqa: E731  nohup and a shell's & ignore some
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard) as process:
        try:
            deadline = time.monotonic() + 300
            while not started():
                assert process.poll() is None and time.monotonic() < deadline, process.stderr.read() if process.poll() is not None else "it did not begin"
                time.sleep(0.05)
            os.killpg(process.pid, how)
            _, said = process.communicate(timeout=180)
        finally:
            process.kill()
    return process.returncode, said


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked yet how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_signal_that_a_library_keeps_to_itself_is_told_all_the_same(monkeypatch, capsys):
    def plan(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            pass
        raise config.ConfigError("what came of it")

    monkeypatch.setattr(execute, "plan", plan)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert cli.main(["report"]) == 143 and capsys.readouterr().err == STOPPED.format("SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_kept_and_waited_on_is_raised_again(monkeypatch, capsys):
    def plan(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            time.sleep(60)

    monkeypatch.setattr(execute, "plan", plan)
    monkeypatch.setattr(cli, "AGAIN_SECONDS", 0.2)
    before, began = signal.signal(signal.SIGTERM, signal.SIG_DFL), time.monotonic()
    try:
        assert cli.main(["report"]) == 143 and capsys.readouterr().err == STOPPED.format("SIGTERM") and time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_callers_own_handling_of_a_signal_stays(monkeypatch, number):
    seen = []
    monkeypatch.setattr(execute, "plan", lambda *_: seen.append(signal.getsignal(number)) or [])
    monkeypatch.setattr("predmoe.report.write", lambda *_: None)
    before = signal.getsignal(number)
    try:
        for mine in (signal.SIG_IGN, signal.SIG_DFL):   # as nohup leaves it; as a shell does
            signal.signal(number, mine)
            assert cli.main(["report"]) == 0 and signal.getsignal(number) == mine
        assert seen[0] == signal.SIG_IGN and callable(seen[1])
    finally:
        signal.signal(number, before)


def test_train_builds_the_configuration_and_prints_the_folder(house, monkeypatch, capsys):
    from predmoe import runs

    seen = []
    monkeypatch.setattr(runs, "get_or_train", lambda run, *, store, report: seen.append((run, store)) or SimpleNamespace(path=store / run.hash))
    arguments = ["--set", "objective.lambda_pred=0.3", "train.steps=5", "--set", "predictor.horizons=[1, 2]"]
    assert cli.main(["train", "--tier", "smoke", "--seed", "7", *arguments]) == 0
    expected = config.tier("smoke", seed=7, objective={"lambda_pred": 0.3}, train={"steps": 5}, predictor={"horizons": [1, 2]})
    assert seen == [(expected, house.outputs / "smoke" / "runs")]
    assert capsys.readouterr().out.strip() == str(seen[0][1] / expected.hash)
    assert cli.main(["train", "--store", "elsewhere"]) == 0 and seen[1][1] == Path("elsewhere")


def test_a_seed_among_the_changes_counts_and_two_that_differ_are_refused(house, monkeypatch, capsys):
    from predmoe import runs

    seen = []
    monkeypatch.setattr(runs, "get_or_train", lambda run, *, store, report: seen.append(run.train.seed) or SimpleNamespace(path=store / run.hash))
    for arguments in ([], ["--set", "train.seed=5"], ["--seed", "5"], ["--seed", "5", "--set", "train.seed=5"], ["--seed", "0"]):
        assert cli.main(["train", *arguments]) == 0
    assert seen == [0, 5, 5, 5, 0]
    capsys.readouterr()
    assert cli.main(["train", "--seed", "4", "--set", "train.seed=5"]) == 2
    assert capsys.readouterr().err == "predmoe: --seed 4 and --set train.seed=5 differ; give one of them\n"


def test_a_run_that_fails_is_code_1(monkeypatch, capsys):
    from predmoe import runs

    monkeypatch.setattr(runs, "get_or_train", raising(runs.RunFailed("run abc failed: loss is not finite")))
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "predmoe: run abc failed: loss is not finite\n"


@pytest.mark.parametrize("command", [["-m", "predmoe"], [str(Path(sys.executable).parent / "predmoe")]], ids=["module", "script"])
def test_the_command_can_be_called(command):
    called = subprocess.run([sys.executable, *command, "train", "--tier", "huge"], capture_output=True, text=True)
    assert (called.returncode, called.stdout) == (2, "") and called.stderr.startswith("predmoe: tier='huge'")
