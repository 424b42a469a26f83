"""The small files of a run: whatever is in them is read, or refused with a sentence that names the file."""

import math
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from predmoe.cli_traces import may_write
from predmoe.config import ConfigError, DataConfig, ModelConfig, build
from predmoe.files import parse_json, parse_yaml, read_config, read_json, read_lines, write_json, write_text

DEEP, LONG = '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"


@pytest.mark.parametrize("text", ["", "{", DEEP, LONG, b"\xff"])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json('{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("value, said", [
    ({"val_loss": float("nan")}, "val_loss is nan"), ({"seed": 1, "hit": {"linear": {"1": 0.5, "2": [0.1, np.float64("inf")]}}}, "hit.linear.2.1 is inf"), ([(1.0, -math.inf)], "0.1 is -inf"),
])  # fmt: skip
def test_what_is_no_number_is_no_result(tmp_path, value, said):
    write_json(tmp_path / "a.json", {"old": 1.0})
    for path in (tmp_path / "a.json", tmp_path / "b.json"):
        with pytest.raises(ConfigError, match=f"^{path} is not written: {said}, which is no result$"):
            write_json(path, value)
    assert read_json(tmp_path / "a.json") == {"old": 1.0} and [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_result_replaces_a_file_whole_or_leaves_it_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_text(path, "whole é")
    path.chmod(0o640)
    write_text(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é" and path.stat().st_mode & 0o777 == 0o640
    real = Path.write_text

    def stopped(error):
        def write(path, text, **how):
            real(path, text[:2], **how)
            raise error

        return write

    monkeypatch.setattr(Path, "write_text", stopped(OSError(28, "No space left on device")))
    for place in (path, tmp_path / "b"):
        with pytest.raises(ConfigError, match=f"^{place} cannot be written: No space left on device; name a file elsewhere"):
            write_text(place, "text")
    monkeypatch.setattr(Path, "write_text", stopped(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "text")
    assert list(tmp_path.iterdir()) == [path] and path.read_text(encoding="utf-8") == "new é"


def test_a_result_goes_where_a_link_leads(tmp_path):
    (tmp_path / "folder").mkdir()
    for link, target in (("to_a_file", "a"), ("to_nothing", "b")):
        (tmp_path / link).symlink_to(tmp_path / "folder" / target)
        (tmp_path / "folder" / "a").write_text("old")
        write_text(tmp_path / link, "new")
        assert (tmp_path / link).is_symlink() and (tmp_path / "folder" / target).read_text() == "new"
    write_text(tmp_path / ("x" * 255), "new")   # the longest name that there can be
    assert len(list(tmp_path.iterdir())) == 4 and len(list((tmp_path / "folder").iterdir())) == 2


@pytest.fixture
def ordinary():
    """A folder of its own to work in as an ordinary user, which a container's root is not: permissions do not count for that."""
    with tempfile.TemporaryDirectory() as name:   # pytest's own folders are closed to others
        folder = Path(name)
        folder.chmod(0o777)
        for part, mode in (("closed", 0o555), ("sticky", 0o1777), ("open", 0o777)):
            (folder / part).mkdir()
            (folder / part / "a").write_text("old")
            (folder / part / "a").chmod(0o444 if part == "open" else 0o666)
            (folder / part).chmod(mode)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        yield folder
        if root:
            os.seteuid(0)
        (folder / "closed").chmod(0o755)


def test_a_file_that_cannot_be_replaced_is_written_into(ordinary):
    """Of a folder that takes no new file, or of somebody else in one such as /tmp."""
    for part in ("closed", "sticky"):
        may_write(ordinary / part / "a")
        write_text(ordinary / part / "a", "new")
        assert (ordinary / part / "a").read_text() == "new" and len(list((ordinary / part).iterdir())) == 1


def test_a_write_protected_file_is_left(ordinary):
    path = ordinary / "open" / "a"
    for write in (may_write, lambda path: write_text(path, "new")):
        with pytest.raises(ConfigError, match=f"^{path} cannot be written: Permission denied; name a file elsewhere"):
            write(path)
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_a_file_that_is_mounted_by_itself_is_written_into(tmp_path, monkeypatch):
    def busy(path, target):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    path = tmp_path / "a"
    path.write_text("old")
    write_text(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(ConfigError, match="b cannot be written: Device or resource busy"):
        write_text(tmp_path / "b", "new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_too_long_and_links_in_a_circle_are_sentences(tmp_path):
    (tmp_path / "a").symlink_to("a")
    for name, said in (("a", "Too many levels of symbolic links"), ("b" * 300, "File name too long")):
        with pytest.raises(ConfigError, match=f"^{tmp_path / name} cannot be written: {said}; name a file elsewhere"):
            write_text(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_result_goes_into_pipes_devices_and_what_is_printed(tmp_path, capfd):
    with pytest.raises(ConfigError, match="^/dev/full cannot be written: No space left on device; name a file elsewhere"):
        write_text(Path("/dev/full"), "text")
    write_text(Path("/dev/null"), "text")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo() and Path("/dev/null").is_char_device()
    os.close(reader)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):   # files here: nothing of what they hold is lost
        print("before", file=stream)
        write_text(Path(f"/dev/{name}"), "é\n")
        print("after", file=stream)
    assert capfd.readouterr() == ("before\né\nafter\n",) * 2
    with open(tmp_path / "gone", "w+") as file:
        (tmp_path / "gone").unlink()
        write_text(Path(f"/dev/fd/{file.fileno()}"), "text")
        assert file.read() == "text" and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("text, said", [(DEEP, "nested too deeply"), (LONG, "Exceeds the limit"), ("[1]", "holds a list"), ("{}", "without a usable a")])
def test_a_damaged_file_is_a_sentence_that_names_it(tmp_path, text, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path} is damaged .*{said}.*; restore it from a copy, or remove the folder {tmp_path}"):
        read_json(path, {"a": list})


@pytest.mark.parametrize("text", [DEEP, LONG, "[1]"])
def test_a_damaged_line_is_named_by_its_number(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + text + "\n")
    with pytest.raises(ConfigError, match=f"^{path}, line 2 is damaged"):
        read_lines(path)


@pytest.mark.parametrize("text, said", [('{"seed": 1}', "unknown parameter seed"), ('{"order_seed": "1"}', "order_seed='1' is str"), ("{", "is damaged")])
def test_a_configuration_that_cannot_be_used_is_told_with_its_path_once(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path} is damaged.*; restore it from a copy, or remove the folder {tmp_path} to make it again$") as error:
        read_config(path, DataConfig)
    assert said in str(error.value) and str(error.value).count(str(path)) == 1


def test_an_integer_too_large_for_a_float_is_a_sentence():
    with pytest.raises(ConfigError, match="ModelConfig.init_std is an integer of 1329 bits, too large for a float"):
        build(ModelConfig, {"init_std": 10**400} | dict.fromkeys(("vocab_size", "hidden_size", "num_layers", "num_heads", "expert_size", "num_experts", "top_k", "context"), 4))


@pytest.mark.parametrize("text, said", [
    ("seeds: [0]\nseeds: [1]", "seeds is there twice .*line 2"), ("data: {corpus: a, corpus: b}", "corpus is there twice"), ("a: [", "expected the node content"),
    ("[" * 3000, "."), ("a: " + "9" * 5000, "."), ("? [a]\n: 1", "."), ("\0", "."),
])  # fmt: skip
def test_yaml_that_cannot_be_read_is_a_value_error_of_one_line(text, said):
    with pytest.raises(ValueError, match=said) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)


def test_yaml_that_can_be_read():
    assert parse_yaml("a: {b: 1}\nc: {b: 2}") == {"a": {"b": 1}, "c": {"b": 2}}   # the same name in two places is not twice in one
    assert parse_yaml("x: &x {a: 1}\ny: {<<: *x, b: 2}") == {"x": {"a": 1}, "y": {"a": 1, "b": 2}} and parse_yaml("") is None
