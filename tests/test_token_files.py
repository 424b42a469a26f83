"""Token files are a cache: damage is noticed where they are opened, told, and mended by encoding anew."""

import json
import os
from pathlib import Path

import pytest

from predmoe import carry, token_files
from predmoe.config import ConfigError, DataConfig
from predmoe.data import prepare


@pytest.fixture
def small(tmp_path):
    """A corpus of 120 documents in the cache."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "text.jsonl").write_text("".join(json.dumps({"text": f"Document {i}. " + "router token layer " * (i % 30)}) + "\n" for i in range(120)))
    return prepare(config_of(tmp_path), cache=tmp_path / "cache")


def config_of(folder: Path) -> DataConfig:
    return DataConfig(corpus=f"files:{folder / 'text'}", heldout_tokens=300, dev_tokens=150)


def zero(path: Path, start: int, count: int) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(count))


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


DAMAGE = {
    "cut": (lambda folder: os.truncate(folder / "tokens.bin", 1000), "has 500 tokens instead of"),
    "zeroed at the right length": (lambda folder: zero(folder / "tokens.bin", 1000, 1000), "another hash"),
    "all zero": (lambda folder: [zero(path, 0, path.stat().st_size) for path in folder.iterdir()], "Expecting value"),
    "empty": (lambda folder: os.truncate(folder / "tokens.bin", 0), "empty file"),
    "no table": (lambda folder: (folder / "documents.npz").unlink(), "documents.npz"),
    "a table's number": (lambda folder: zero(folder / "documents.npz", 300, 4), "CRC"),
    "half a table": (lambda folder: os.truncate(folder / "documents.npz", 500), "zip file"),
    "a list": (lambda folder: (folder / "meta.json").write_text("[]"), "list"),
    "deep": (lambda folder: (folder / "meta.json").write_text("[" * 100_000), "recursion"),
    "names": (lambda folder: zero(folder / "names.json", 10, 4), "names.json is not what was written"),
    "no names": (lambda folder: (folder / "names.json").unlink(), "names.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_token_files_are_noticed_and_encoded_anew(small, tmp_path, capsys, damage):
    inflict, said = DAMAGE[damage]
    before = {path.name: path.read_bytes() for path in small.folder.iterdir()}
    inflict(small.folder)
    again = prepare(small.config, cache=tmp_path / "cache")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"the token files in {small.folder} are damaged (") and said in line and line.endswith(f"encoding {small.config.corpus} anew")
    assert again.hash == small.hash and {path.name: path.read_bytes() for path in small.folder.iterdir()} == before
    assert [path.name for path in small.folder.parent.iterdir()] == [small.folder.name]
    prepare(small.config, cache=tmp_path / "cache")
    assert not capsys.readouterr().err


def test_of_a_large_token_file_some_blocks_are_summed(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(token_files, "WHOLE", 0)
    monkeypatch.setattr(token_files, "BLOCK", 256)
    monkeypatch.setattr(token_files, "SAMPLED", 1000)   # all of them
    zero(small.folder / "names.json", 10, 4)   # encoded anew, with blocks of this size
    prepare(small.config, cache=tmp_path / "cache")
    assert "names.json" in capsys.readouterr().err
    zero(small.folder / "tokens.bin", 256 * 3 + 10, 4)
    prepare(small.config, cache=tmp_path / "cache")
    assert "block 3 of tokens.bin is not what was written" in capsys.readouterr().err
    monkeypatch.setattr(token_files, "SAMPLED", 2)   # the first and the last one
    zero(small.folder / "tokens.bin", small.tokens.nbytes - 10, 8)
    prepare(small.config, cache=tmp_path / "cache")
    assert "tokens.bin is not what was written" in capsys.readouterr().err


def test_what_an_earlier_version_wrote_is_hashed_as_well(small, tmp_path, capsys):
    meta = json.loads((small.folder / "meta.json").read_text())
    (small.folder / "meta.json").write_text(json.dumps({name: value for name, value in meta.items() if name not in ("names", "sums")}))
    assert prepare(small.config, cache=tmp_path / "cache").hash == small.hash and not capsys.readouterr().err
    zero(small.folder / "tokens.bin", 1000, 100)
    assert prepare(small.config, cache=tmp_path / "cache").hash == small.hash and "another hash" in capsys.readouterr().err


def test_damaged_files_stay_where_they_cannot_be_encoded_anew(small, tmp_path, monkeypatch):
    zero(small.folder / "tokens.bin", 1000, 100)
    monkeypatch.setattr(token_files.np, "savez", no_space)
    with pytest.raises(ConfigError, match="cannot write token files .*No space left on device; set PREDMOE_CACHE"):
        prepare(small.config, cache=tmp_path / "cache")
    assert [path.name for path in small.folder.parent.iterdir()] == [small.folder.name]


def test_an_archive_replaces_damaged_files(small, tmp_path):
    carry.pack(small.config, tmp_path / "tokens.tar.xz", cache=tmp_path / "cache")
    zero(small.folder / "tokens.bin", 1000, 100)
    assert carry.unpack(tmp_path / "tokens.tar.xz", cache=tmp_path / "cache") == small.folder and token_files.sound(small.folder)


def test_files_are_on_the_disk_before_they_have_their_name(small, tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(token_files.os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}").rsplit("/", 1)[1]), fsync(handle)))
    monkeypatch.setattr(token_files.os, "rename", lambda a, b: (done.append("renamed"), rename(a, b)))
    prepare(small.config, cache=tmp_path / "another")
    assert {"documents.npz", "meta.json", "names.json", "tokens.bin"} <= set(done[: done.index("renamed")]) and done[-1] == "tokens"
