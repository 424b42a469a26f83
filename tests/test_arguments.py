import argparse
from pathlib import Path

import pytest

from predmoe import arguments, cli
from commands import refused


def options(parser=None):
    """Every option of every command, with its command's name."""
    parser = parser or cli._parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options(below)
        else:
            yield parser.prog, action


def test_every_number_and_every_path_of_the_command_line_is_read_by_this_module():
    found = list(options())
    assert len(found) > 100 and not [(prog, action.dest) for prog, action in found if action.type in (float, Path)]


NUMBERS = {(prog, action.option_strings[0]): action.type for prog, action in options() if getattr(action.type, "__qualname__", "").startswith("number.")}


@pytest.mark.parametrize("text", ["nan", "-inf", "", "much"])
@pytest.mark.parametrize("option", NUMBERS, ids=" ".join)
def test_no_option_takes_nonsense_for_a_number(option, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
        NUMBERS[option](text)


def test_bounds_by_hand():
    assert arguments.number(0)("0") == 0 and arguments.number(above=0, infinite=True)("inf") == float("inf") and arguments.number()("-2.5") == -2.5
    for kind, text in ((arguments.number(0), "-1"), (arguments.number(above=0), "0"), (arguments.number(), "inf"), (arguments.number(0), "inf")):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


HUGE = "9" * 300


@pytest.mark.parametrize("text", ["1e300", "-1e300", HUGE, "1e16", "x" * 300])
@pytest.mark.parametrize("option", NUMBERS, ids=" ".join)
def test_a_number_beyond_all_is_told_in_short(option, text):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        NUMBERS[option](text)
    assert len(str(caught.value)) < 120


WHOLE = [(prog, action.option_strings[0]) for prog, action in options() if action.type is int and action.option_strings]


@pytest.mark.parametrize("option", WHOLE, ids=" ".join)
def test_a_whole_number_of_hundreds_of_digits_is_told_in_short(option, capsys):
    prog, name = option
    given = ["SOURCE", "OUT"] if prog.endswith("import") else ["M"] if prog.endswith(("simulate", "evaluate")) else []
    refused(capsys, [*prog.split()[1:], *given, name, HUGE], f"{name}")
    assert cli.main([*prog.split()[1:], *given, name, HUGE]) == 2
    told = capsys.readouterr().err
    assert "999... is not a whole number of at most 30 digits" in told and len(told) < 200


def test_whole_numbers_by_hand(capsys):
    assert arguments.whole("-7") == -7 and arguments.whole("9" * 30) == 10**30 - 1
    refused(capsys, ["train", "--seed", "x"], "--seed: invalid int value: 'x'")
    for options_ in (["--prompt-ids", HUGE], ["--prompt-ids", f"1,{HUGE}"], ["--horizon", f"1+{HUGE}"], ["--prompt-ids", "x" * 300]):
        assert cli.main(["generate", *options_]) == 2 and len(capsys.readouterr().err) < 260


@pytest.mark.parametrize("command, said", [
    (["probe", "--model", "M", "--device", "tpu"], "--device: device='tpu' is unknown; choose one of cpu, cuda, cuda:N"),
    (["probe", "--model", "M", "--memory-mb", "nan"], "--memory-mb: nan is not a finite number above 0"),
    (["probe", "--model", "M", "--save", "FILE"], "FILE is a file: name a folder"),
    (["probe", "--model", "M", "--save", "FILE/below"], "FILE is a file: name a folder"),
    (["trace", "record", "--temperature", "nan"], "--temperature: nan is not a finite number of at least 0"),
    (["trace", "record", "--temperature", "-1"], "--temperature: -1 is not"),
    (["trace", "record", "--out", ""], "--out: it is empty: name a file or a folder"),
    (["gpu-report", "--out", "OUT", "--minutes", "nan"], "--minutes: nan is not a finite number above 0"),
    (["gpu-report", "--out", "OUT", "--minutes", "inf"], "--minutes: inf is not"),
    (["gpu-report", "--out", "FILE"], "FILE is a file: name a folder"),
    (["train", "--store", ""], "--store: it is empty"),
    (["train", "--store", "FILE"], "FILE is a file: name a folder"),
    (["evaluate", "M", "--device", "cuda:x"], "device='cuda:x' is unknown"),
    (["train", "--nonsense"], "unrecognized arguments: --nonsense"),
    (["nonsense"], "invalid choice: 'nonsense'"),
    ([], "COMMAND"),
])  # fmt: skip
def test_nonsense_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, command, said):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("kept")
    refused(capsys, command, said)
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"] and Path("FILE").read_text() == "kept"
