"""The large offline corpus is read from Debian packages, and its tokens travel in one file to a machine that has none of them."""

import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest

from predmoe import carry, corpora_large
from predmoe.config import ConfigError, DataConfig
from predmoe.corpora import corpus
from predmoe.corpora_large import Debian, OfflineLarge
from predmoe.data import prepare
from predmoe.tokenizer import carried_gpt2, load_tokenizer

DICTIONARY = "Aard\n   A beast.\n" + "Word\n   " + "meaning " * 1200 + "\nZebra\n   Another.\n"
PAGE = "<html><head><title>no</title></head><body><h1>Sums</h1><p>One &amp; one<br>is <b>two</b>.</p><script>var x;</script></body></html>"
MANUAL = '.\\" a comment\n.TH READ 2 "2023"\n.SH NAME\nread \\- read from a file\n.B "fd"\nis \\fIopen\\fP\n'
SYNSET = "00001740 03 n 02 being 0 living_thing 0 001 ~ 00002137 n 0000 | that which is; \"it lives\"\n"


def deb(path, files: dict[str, bytes]):
    """A package as Debian writes one: an ar archive of debian-binary, control and data."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", inner.getvalue())):
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Four packages of one of each kind in place of Debian's, and a cache folder of its own."""
    monkeypatch.setenv("PREDMOE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "packages"
    found = []
    for package, read, name, text in (("dict", "entries", "./usr/share/dictd/x.dict.dz", DICTIONARY), ("doc", "pages", "./doc/chap1.html", PAGE),
                                      ("man", "manuals", "./man/man2/read.2.gz", MANUAL), ("net", "glosses", "./wordnet/data.noun", "  1 licence\n" + SYNSET * 150)):
        raw = text.encode()
        digest = deb(folder / f"{package}_1-1_all.deb", {name: gzip.compress(raw, mtime=0) if name.endswith("z") else raw, "./other": b"not text"})
        found.append(Debian(domain=package, package=package, version="1-1", sha256=digest, pattern=f"*{name[-8:]}", read=read, licence="free", origin="a test"))
    monkeypatch.setattr(corpora_large, "DEBIAN", tuple(found))
    return folder


def test_every_kind_of_package_is_read_as_its_text(packages):
    documents = [d for d in OfflineLarge().documents() if d.domain in ("dict", "doc", "man", "net")]
    text = {d.name: d.text for d in documents}
    assert text["doc/doc/chap1.html"] == "Sums\nOne & one\nis two."
    assert text["man/man2/read.2"] == "READ 2 2023\nNAME\nread - read from a file\nfd\nis open"
    assert text["net/data.noun/000000"].splitlines()[0] == 'being, living thing: that which is; "it lives"'
    assert len(text["net/data.noun/000000"].splitlines()) == 100 and len(text["net/data.noun/000100"].splitlines()) == 50
    pieces = [text[name] for name in sorted(text) if name.startswith("dict/")]
    assert len(pieces) == 2 and pieces[0].startswith("Aard") and pieces[1] == "Zebra\n   Another."   # a piece ends where an entry begins
    assert len({(d.domain, d.name) for d in documents}) == len(documents)


def test_a_missing_package_and_another_version_are_sentences(packages):
    (packages / "doc_1-1_all.deb").write_bytes(b"!<arch>\nother")
    with pytest.raises(ConfigError, match="doc_1-1_all.deb is not doc=1-1: its SHA-256 begins with"):
        list(OfflineLarge().documents())
    (packages / "doc_1-1_all.deb").unlink()
    with pytest.raises(ConfigError, match=r"needs doc=1-1 of Debian 12 .* or a token file that was made of it; run python scripts/prepare_corpus.py"):
        list(OfflineLarge().documents())
    with pytest.raises(ConfigError, match="the file is damaged"):
        corpora_large._member(b"!<arch>\n", "data.tar")


def test_the_key_is_the_list_of_sources_and_moves_with_it(packages, monkeypatch):
    before = OfflineLarge().key()
    for file in packages.iterdir():
        file.unlink()
    assert OfflineLarge().key() == before == corpus("offline-large").key()   # known without the text
    monkeypatch.setattr(corpora_large, "DEBIAN", corpora_large.DEBIAN[:3])
    assert OfflineLarge().key() != before


def test_the_real_list_names_version_licence_and_digest_of_each():
    for source in corpora_large.DEBIAN:
        assert len(source.sha256) == 64 and source.licence and source.origin and source.read in corpora_large.READ and source.requirement.count("=") == 1
    assert len({source.package for source in corpora_large.DEBIAN}) == len(corpora_large.DEBIAN)


def small_corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(f"Document {i}. " + "a few words " * 30)
    return DataConfig(corpus=f"files:{folder}", heldout_tokens=256, dev_tokens=128)


def test_tokens_that_are_carried_are_those_that_were_made(tmp_path, monkeypatch):
    config = small_corpus(tmp_path)
    made = carry.pack(config, tmp_path / "tokens.tar.xz", cache=tmp_path / "here")
    monkeypatch.setenv("PREDMOE_CACHE", str(tmp_path / "there"))
    assert not carry.is_here(config)
    folder = carry.unpack(tmp_path / "tokens.tar.xz")
    assert carry.is_here(config) and carry.unpack(tmp_path / "tokens.tar.xz") == folder   # twice does no harm
    here, there = prepare(config, cache=tmp_path / "here"), prepare(config)
    assert there.folder == folder and np.array_equal(here.tokens, there.tokens) and here.hash == there.hash == made["hash"]
    assert made["documents"] == 40 and made["tokens"] == len(there.tokens) and made["bytes"] == (tmp_path / "tokens.tar.xz").stat().st_size


def test_tokens_are_brought_where_they_are_not_and_only_the_wanted_ones(tmp_path, monkeypatch):
    """A machine that is a fresh one in every call: the archive is unpacked whenever its tokens are not in the cache."""
    config = small_corpus(tmp_path)
    archive = tmp_path / "tokens.tar.xz"
    carry.pack(config, archive, cache=tmp_path / "here")
    for name in ("there", "another"):
        monkeypatch.setenv("PREDMOE_CACHE", str(tmp_path / name))
        folder = carry.bring(archive, config)
        assert folder.is_relative_to(tmp_path / name) and carry.bring(archive, config) is None
    (tmp_path / "text" / "00.txt").write_text("Another text.")
    with pytest.raises(ConfigError, match="tokens.tar.xz was made by another version of this project"):
        carry.bring(archive, config)
    wanted = DataConfig(corpus="offline-large", tokenizer="bpe8k")
    with pytest.raises(ConfigError, match=r"tokens.tar.xz holds the tokens of corpus='files:.*' under tokenizer='bpe8k', and wanted are those of 'offline-large' .* add --set data.corpus=files:"):
        carry.bring(archive, wanted)
    for config in (wanted, config):   # whether or not its tokens are here already
        with pytest.raises(ConfigError, match="^there is no file .*nothing.tar.xz: name the archive that scripts/prepare_corpus.py made, or leave --tokens out"):
            carry.bring(tmp_path / "nothing.tar.xz", config)


def test_damaged_tokens_in_an_archive_replace_nothing(tmp_path):
    config = small_corpus(tmp_path)
    tokens = prepare(config, cache=tmp_path / "here")
    with open(tokens.folder / "tokens.bin", "r+b") as file:
        file.write(bytes(100))
    with tarfile.open(tmp_path / "tokens.tar.xz", "w:xz") as archive:
        for name in carry.PARTS:
            archive.add(tokens.folder / name, f"tokens/{tokens.folder.name}/{name}")
    with pytest.raises(ConfigError, match="the token files in .*tokens.tar.xz are damaged: make it anew"):
        carry.unpack(tmp_path / "tokens.tar.xz", cache=tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_a_damaged_vocabulary_is_a_sentence_and_the_archive_brings_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_CACHE", str(tmp_path))
    (tmp_path / "gpt2.tiktoken").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="gpt2.tiktoken is damaged: remove it, or unpack the token file again"):
        carried_gpt2()


def test_what_is_too_large_or_no_archive_is_refused(tmp_path, monkeypatch):
    config = small_corpus(tmp_path)
    monkeypatch.setattr(carry, "LIMIT", 1000)
    with pytest.raises(ConfigError, match="MB packed, more than 0: take fewer documents"):
        carry.pack(config, tmp_path / "tokens.tar.xz", cache=tmp_path / "here")
    assert not list(tmp_path.glob("tokens*"))
    (tmp_path / "x").write_bytes(b"nothing")
    whole = tmp_path / "whole.tar.xz"
    with tarfile.open(whole, "w:xz") as archive:
        archive.add(tmp_path / "text", "tokens")
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:200])
    flipped = bytearray(whole.read_bytes())
    flipped[len(flipped) // 2] ^= 255
    (tmp_path / "flipped").write_bytes(flipped)
    for name in ("x", "cut", "flipped"):
        with pytest.raises(ConfigError, match=f"^cannot unpack .*{name}: it is cut off, damaged or no archive [^\n]*; carry it anew$"):
            carry.unpack(tmp_path / name, cache=tmp_path / "there")
    with pytest.raises(ConfigError, match="^cannot unpack .*absent into .*: No such file or directory; name the archive"):
        carry.unpack(tmp_path / "absent", cache=tmp_path / "there")
    (tmp_path / "a file").touch()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="^cannot write .*a file/tokens.tar.xz: File exists; name a place"):
        carry.pack(config, tmp_path / "a file" / "tokens.tar.xz", cache=tmp_path / "here")
    monkeypatch.setattr(carry, "_write", lambda tokens, path: (path.write_bytes(b"half"), (_ for _ in ()).throw(OSError(28, "No space left on device"))))
    with pytest.raises(ConfigError, match="^cannot write .*tokens.tar.xz: No space left on device; name a place"):
        carry.pack(config, tmp_path / "tokens.tar.xz", cache=tmp_path / "here")
    assert not list(tmp_path.glob("tokens*"))

    def interrupted(tokens, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(carry, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry.pack(config, tmp_path / "tokens.tar.xz", cache=tmp_path / "here")
    assert not list(tmp_path.glob("tokens*"))
    with pytest.raises(ConfigError, match="^.*text is a folder: name the file that the archive is to be, such as .*tokens.tar.xz"):
        carry.pack(config, tmp_path / "text", cache=tmp_path / "here")
    with pytest.raises(ConfigError, match="^cannot unpack .*whole.tar.xz into .*a file: .*; name the archive .* or set PREDMOE_CACHE"):
        carry.unpack(whole, cache=tmp_path / "a file")
    with tarfile.open(tmp_path / "y", "w") as archive:
        archive.add(tmp_path / "x", "tokens/folder/x")
    with pytest.raises(ConfigError, match="is no archive of tokens"):
        carry.unpack(tmp_path / "y", cache=tmp_path / "there")


def test_a_carried_vocabulary_is_gpt2s_tokenizer(tmp_path, monkeypatch):
    """Ranks in the cache folder are taken without a network; here a small vocabulary stands in for GPT-2's."""
    import base64

    monkeypatch.setenv("PREDMOE_CACHE", str(tmp_path))
    assert carried_gpt2() is None
    (tmp_path / "gpt2.tiktoken").write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256)))
    load_tokenizer.cache_clear()
    try:
        tokenizer = load_tokenizer("gpt2")
        assert tokenizer.vocab_size == 257 and tokenizer.eot == 256 and tokenizer.decode(tokenizer.encode("as it is")) == "as it is"
    finally:
        load_tokenizer.cache_clear()
