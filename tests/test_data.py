"""Token files, the split that keeps held-out text out of training, and the stream."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predmoe import corpora, data, token_files, tokenizer
from predmoe.config import ConfigError, DataConfig
from predmoe.data import buffer_shuffle, prepare

ROOT = Path(__file__).parents[1]
WORDS = "the of and expert router token layer disk cache reads before after predicts nothing else in time".split()


def write_corpus(folder: Path, documents: int = 120, domains=("north", "south"), seed: int = 0) -> str:
    """A JSONL corpus of distinct documents of 5 to 80 words; returns its spec."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "text.jsonl", "w") as file:
        for i in range(documents):
            text = f"Document {i}. " + " ".join(rng.choice(WORDS, size=rng.integers(5, 80)))
            file.write(json.dumps({"text": text, "domain": domains[i % len(domains)]}) + "\n")
    return f"files:{folder}"


@pytest.fixture
def small(tmp_path):
    """A corpus of 120 documents, encoded and split: 300 held-out and 150 dev tokens."""
    return prepare(DataConfig(corpus=write_corpus(tmp_path / "text"), heldout_tokens=300, dev_tokens=150), cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    return prepare(DataConfig(), cache=tmp_path_factory.mktemp("cache"))


def text_of(tokens, index: int) -> str:
    *ids, end = tokens.document(index)
    assert end == tokens.tokenizer.eot
    return tokens.tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------------------- token files


def test_a_vocabulary_above_65536_is_stored_in_32_bits(tmp_path, monkeypatch):
    """Ids shifted beyond 16 bits come back unharmed."""

    class Wide(tokenizer.Tokenizer):
        vocab_size, eot = 100_000, 99_999

        def encode_batch(self, texts):
            return [[90_000 + b for b in text.encode()] for text in texts]

    monkeypatch.setattr(data, "load_tokenizer", lambda name: Wide("wide", None, "w"))
    tokens = prepare(DataConfig(corpus=write_corpus(tmp_path / "text"), heldout_tokens=300, dev_tokens=150), cache=tmp_path / "cache")
    assert tokens.tokens.dtype == np.uint32
    assert tokens.document(0)[:9].tolist() == [90_000 + b for b in b"Document "] and tokens.document(0)[-1] == 99_999


def test_the_token_file_holds_every_document_once_with_its_domain(small, tmp_path):
    rows = [json.loads(line) for line in open(tmp_path / "text" / "text.jsonl")]
    held = {text_of(small, i): small.domains[small.domain[i]] for i in range(len(small.domain))}
    assert held == {row["text"]: row["domain"] for row in rows}
    assert len(small.domain) == len(small.names) == 120
    assert small.tokens.dtype == np.uint16 and small.offsets[-1] == len(small.tokens)


def test_equal_texts_and_empty_ones_are_dropped_and_the_order_on_disk_is_mixed(tmp_path):
    spec = write_corpus(tmp_path / "text")
    lines = (tmp_path / "text" / "text.jsonl").read_text()
    (tmp_path / "text" / "zzz.jsonl").write_text(lines + '{"text": ""}\n\n{"text": "  \\n"}\n')
    tokens = prepare(DataConfig(corpus=spec, heldout_tokens=300, dev_tokens=150), cache=tmp_path / "cache")
    assert len(tokens.domain) == 120
    runs = np.flatnonzero(np.diff(tokens.domain)).size + 1  # of one domain; a fair coin gives 60.5 +- 5.5
    assert 40 < runs < 80


def test_files_lines_and_directories_are_documents(tmp_path):
    (tmp_path / "books" / "deep").mkdir(parents=True)
    (tmp_path / "books" / "b.txt").write_bytes("zwei\r\nZeilen\n".encode())
    (tmp_path / "books" / "deep" / "a.md").write_text("# Titel")
    (tmp_path / "books" / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "single.jsonl").write_text('{"text": "eins"}\n\n{"text": "zwei", "domain": "zahl"}\n')
    spec = f"files:{tmp_path / 'books'},{tmp_path / 'single.jsonl'}"
    assert list(corpora.corpus(spec).documents()) == [
        ("books", "0/b.txt", "zwei\nZeilen"), ("books", "0/deep/a.md", "# Titel"), ("text", "1/single.jsonl:1", "eins"), ("zahl", "1/single.jsonl:3", "zwei"),
    ]


def test_a_corpus_is_encoded_once_and_anew_when_its_text_changes(small, tmp_path, monkeypatch):
    encode = token_files._encode
    monkeypatch.setattr(token_files, "_encode", lambda *_: pytest.fail("encoded again"))
    again = prepare(small.config, cache=tmp_path / "cache")
    assert again.hash == small.hash and np.array_equal(again.tokens, small.tokens)
    monkeypatch.setattr(token_files, "_encode", encode)
    path = tmp_path / "text" / "text.jsonl"
    path.write_text(path.read_text().replace("Document 7.", "Dokument 7."))
    changed = prepare(small.config, cache=tmp_path / "cache")
    assert changed.hash != small.hash
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 2


def test_the_hash_covers_the_split_as_well(small, tmp_path):
    other = prepare(DataConfig(corpus=small.config.corpus, heldout_tokens=400, dev_tokens=150), cache=tmp_path / "cache")
    assert other.folder == small.folder and other.hash != small.hash


def test_processes_that_encode_at_once_agree(tmp_path):
    spec = write_corpus(tmp_path / "text", documents=3000)
    program = "import sys; from predmoe.data import *; print(prepare(DataConfig(corpus=sys.argv[1])).hash)"
    environment = os.environ | {"PREDMOE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen([sys.executable, "-c", program, spec], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)
    ]
    hashes = [child.communicate()[0] for child in children]
    assert all(child.returncode == 0 for child in children) and len(set(hashes)) == 1
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()  # nothing temporary is left
    assert sorted(path.name for path in folder.iterdir()) == ["documents.npz", "meta.json", "names.json", "tokens.bin"]


def test_an_interrupted_encode_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files.np, "savez", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    config = DataConfig(corpus=write_corpus(tmp_path / "text"), heldout_tokens=300, dev_tokens=150)
    with pytest.raises(ConfigError, match="cannot write token files .*No space left on device; set PREDMOE_CACHE"):
        prepare(config, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").iterdir())


# ------------------------------------------------------------------------------------------- held-out and dev sets


def sets(tokens):
    return tokens.split.heldout, tokens.split.dev, tokens.split.train


@pytest.mark.parametrize("corpus", ["small", "offline"])
def test_the_split_is_disjoint_by_document_and_by_text(corpus, request):
    tokens = request.getfixturevalue(corpus)
    heldout, dev, train = sets(tokens)
    everything = np.concatenate([heldout, dev, train])
    assert np.array_equal(np.sort(everything), np.arange(len(tokens.domain)))  # each document in exactly one set
    texts = [{tokens.document(i).tobytes() for i in part} for part in sets(tokens)]
    assert sum(map(len, texts)) == len(set().union(*texts)) == len(tokens.domain)  # and no text in two


def test_no_document_of_the_held_out_sets_is_ever_streamed(small):
    stream = small.stream(0, 1000)
    flat = stream.read(0, 3 * stream.epoch_tokens).tolist()
    streamed, document = set(), []
    for token in flat:
        document.append(token)
        if token == small.tokenizer.eot:
            streamed.add(tuple(document))
            document = []
    heldout, dev, train = ({tuple(small.document(i).tolist()) for i in part} for part in sets(small))
    assert streamed == train and not streamed & (heldout | dev)


def test_the_sets_have_the_size_asked_for_and_every_domain_in_proportion(offline):
    lengths = offline.lengths
    for part, size in ((offline.split.heldout, 65_536), (offline.split.dev, 32_768)):
        assert size < lengths[part].sum() < 1.25 * size
        for domain in range(5):
            share = lengths[offline.domain == domain].sum() / lengths.sum()
            chosen = lengths[part[offline.domain[part] == domain]]
            assert 0.8 * share < chosen.sum() / lengths[part].sum() < 1.2 * share
            assert chosen.max() < 0.1 * size


def test_reports_rest_on_many_documents_of_every_domain(offline):
    heldout = offline.heldout(128)
    assert heldout.tokens.shape == (512, 129)
    assert len(np.unique(heldout.document)) >= 60
    counts = np.bincount(heldout.domain.ravel(), minlength=5) / heldout.domain.size
    shares = np.array([offline.lengths[offline.domain == d].sum() for d in range(5)]) / len(offline.tokens)
    assert (np.abs(counts / shares - 1) < 0.2).all()  # whole documents of up to a quarter of a share leave this much


@pytest.mark.parametrize("name, size", [("heldout", 300), ("dev", 150)])
@pytest.mark.parametrize("context", [7, 32, 100])
def test_each_window_token_is_the_token_its_document_index_says(small, name, size, context):
    windows = getattr(small, name)(context)
    assert windows.tokens.shape == (size // context, context + 1) and windows.tokens.dtype == np.int64
    assert windows.document.shape == windows.domain.shape == (size // context, context)
    assert np.array_equal(windows.tokens[:-1, -1], windows.tokens[1:, 0])  # the last target begins the next window
    flat, owner = windows.tokens[:, :-1].ravel(), windows.document.ravel()
    at = 0
    for document in dict.fromkeys(owner.tolist()):
        assert document in getattr(small.split, name)
        expected = small.document(document)[: len(flat) - at]
        assert np.array_equal(flat[at : at + len(expected)], expected) and (owner[at : at + len(expected)] == document).all()
        at += len(expected)
    assert at == len(flat)
    assert np.array_equal(windows.domain, small.domain[windows.document])
    assert len(np.unique(windows.domain)) == 2


def test_domains_alternate_in_reading_order_by_hand():
    """Two documents of 10 tokens begin at 0 and 1/2 of their domain, four of 5 at 0, 1/4, 1/2 and 3/4."""
    lengths = np.array([10, 10, 5, 5, 5, 5])
    assert data._interleave([np.array([1, 0]), np.array([2, 3, 4, 5])], lengths).tolist() == [1, 2, 3, 0, 4, 5]


@pytest.mark.parametrize("size", [40, 111, 256, 700, 1300])
def test_a_set_always_fills_its_last_window(small, tmp_path, size):
    tokens = prepare(DataConfig(corpus=small.config.corpus, heldout_tokens=size, dev_tokens=size), cache=tmp_path / "cache")
    assert min(tokens.lengths[part].sum() for part in (tokens.split.heldout, tokens.split.dev)) > size
    assert tokens.heldout(size).tokens.shape == tokens.dev(size).tokens.shape == (1, size + 1)


def test_the_held_out_sets_depend_on_no_seed(small, tmp_path):
    other = prepare(DataConfig(corpus=small.config.corpus, heldout_tokens=300, dev_tokens=150, order_seed=5, shuffle_buffer=3), cache=tmp_path / "cache")
    assert all(np.array_equal(a, b) for a, b in zip(sets(small), sets(other))) and other.hash == small.hash


def test_one_huge_document_is_left_to_training(tmp_path):
    spec = write_corpus(tmp_path / "text", domains=("text",))
    (tmp_path / "text" / "huge.jsonl").write_text(json.dumps({"text": "over and over " * 400, "domain": "text"}) + "\n")
    tokens = prepare(DataConfig(corpus=spec, heldout_tokens=300, dev_tokens=150), cache=tmp_path / "cache")
    assert int(tokens.lengths.argmax()) in tokens.split.train


# ------------------------------------------------------------------------------------------------------------ stream


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32))
def test_a_shuffle_buffer_lets_every_item_go_once_and_none_too_early(count, buffer, seed):
    order = buffer_shuffle(count, buffer, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(count))
    place = np.argsort(order)
    assert (place >= np.arange(count) - buffer + 1).all()


def test_a_buffer_of_one_keeps_the_order_and_a_large_one_is_a_fair_shuffle():
    rng = np.random.default_rng(0)
    assert buffer_shuffle(50, 1, rng).tolist() == list(range(50))
    orders = np.array([buffer_shuffle(5, 1000, rng) for _ in range(6000)])
    assert np.abs((orders == 3).mean(axis=0) - 0.2).max() < 0.02  # std 0.005
    first = np.array([buffer_shuffle(50, 10, rng)[0] for _ in range(6000)])
    assert first.max() == 9 and np.abs(np.bincount(first) / 6000 - 0.1).max() < 0.02


def test_a_batch_is_a_pure_function_of_its_step(small):
    stream = small.stream(3, 20)
    steps = range(3 * stream.epoch_tokens // (4 * 16))
    batches = [stream.batch(step, 4, 16) for step in steps]
    for step in np.random.default_rng(0).permutation(len(steps)):  # another order, another object
        assert np.array_equal(small.stream(3, 20).batch(step, 4, 16), batches[step])
        assert np.array_equal(stream.batch(step, 4, 16), batches[step])


def test_each_row_reads_on_in_its_own_lane_and_targets_overlap_by_one(small):
    stream = small.stream(0, 20)
    flat = stream.read(0, 2 * stream.epoch_tokens)
    for step in range(40):
        batch = stream.batch(step, 4, 16)
        assert batch.shape == (4, 17) and batch.dtype == np.int64
        for row in range(4):
            start = row * stream.epoch_tokens // 4 + step * 16
            assert np.array_equal(batch[row], flat[start : start + 17])


def test_lanes_read_every_token_of_an_epoch_once(small):
    stream = small.stream(0, 20)
    length = stream.epoch_tokens // 4
    read = np.concatenate([stream.batch(step, 4, 1)[:, 0] for step in range(length)])
    lanes = [stream.read(row * stream.epoch_tokens // 4, length) for row in range(4)]
    assert np.array_equal(np.sort(read), np.sort(np.concatenate(lanes)))
    assert 4 * length > stream.epoch_tokens - 4


def test_a_batch_holds_many_documents_and_most_domains(offline):
    """Rows that followed one another in the stream held about four documents of fewer than two domains."""
    stream = offline.stream(0, 1000)
    documents, ends = stream.epoch(0)
    for step in (0, 7, 300):
        starts = np.arange(16) * stream.epoch_tokens // 16 + step * 128
        touched = documents[np.searchsorted(ends, starts, side="right")]
        assert len(np.unique(touched)) == 16 and len(np.unique(offline.domain[touched])) >= 4


def test_the_stream_is_the_documents_of_each_epoch_in_order(small):
    """Against the plain concatenation, over three epochs and their seams."""
    stream = small.stream(1, 20)
    expected = np.concatenate([small.document(d) for epoch in range(3) for d in stream.epoch(epoch)[0]])
    assert len(expected) == 3 * stream.epoch_tokens
    assert np.array_equal(stream.read(0, len(expected)), expected)
    for start, count in ((0, 1), (5, 40), (stream.epoch_tokens - 3, 6), (stream.epoch_tokens, 1), (2 * stream.epoch_tokens - 1, 50)):
        assert np.array_equal(stream.read(start, count), expected[start : start + count])


def test_each_document_comes_exactly_once_per_epoch_and_epochs_and_seeds_differ(small):
    orders = [tuple(small.stream(seed, 20).epoch(epoch)[0].tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(small.split.train.tolist())}
    assert orders[0] == tuple(small.stream(0, 20).epoch(0)[0].tolist())


def test_a_shuffle_buffer_mixes_the_domains(offline):
    documents, _ = offline.stream(0, 1000).epoch(0)
    everything = offline.lengths[offline.split.train]
    for part in np.array_split(documents, 4):  # of a quarter of an epoch, each domain has about its share
        for domain in range(5):
            share = everything[offline.domain[offline.split.train] == domain].sum() / everything.sum()
            assert 0.7 * share < offline.lengths[part][offline.domain[part] == domain].sum() / offline.lengths[part].sum() < 1.3 * share


def test_configuration_gives_the_stream_its_order(small):
    config = small.config
    assert np.array_equal(small.stream().batch(0, 2, 16), small.stream(config.order_seed, config.shuffle_buffer).batch(0, 2, 16))
    with pytest.raises(ConfigError, match="order_seed=-1 must be at least 0"):
        small.stream(order_seed=-1)


# ----------------------------------------------------------------------------------------------------- too little text


def test_a_domain_of_two_documents_cannot_be_split(tmp_path):
    spec = write_corpus(tmp_path / "text")
    (tmp_path / "text" / "more.jsonl").write_text('{"text": "one", "domain": "tiny"}\n{"text": "two", "domain": "tiny"}\n')
    with pytest.raises(ConfigError, match="domain 'tiny' of .* has 2 documents, but held-out, dev and training sets need one each"):
        prepare(DataConfig(corpus=spec, heldout_tokens=300, dev_tokens=150), cache=tmp_path / "cache")


def test_a_domain_whose_documents_are_all_needed_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} " + "word " * (10 if i else 300))
    with pytest.raises(ConfigError, match="domain 'text' of .* has too few documents to take 101 tokens for heldout_tokens=100 and keep one"):
        prepare(DataConfig(corpus=f"files:{tmp_path / 'text'}", heldout_tokens=100, dev_tokens=20), cache=tmp_path / "cache")


def test_a_context_longer_than_a_held_out_set_is_refused(small):
    with pytest.raises(ConfigError, match="dev_tokens=150 must be at least one context of 200 tokens"):
        small.dev(200)
