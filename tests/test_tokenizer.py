"""The tokenizer: no text is lost by it, and its file is what the script makes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predmoe import corpora, tokenizer
from predmoe.config import ConfigError
from predmoe.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def builder():
    """scripts/build_tokenizer.py as a module."""
    spec = importlib.util.spec_from_file_location("build_tokenizer", ROOT / "scripts" / "build_tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rank_file_has_8192_entries_and_end_of_text_is_the_last():
    tokenizer = load_tokenizer("bpe8k")
    entries = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(8191)]
    assert len(set(entries)) == 8191
    assert {bytes([b]) for b in range(256)} <= set(entries)
    assert tokenizer.vocab_size == 8192 and tokenizer.eot == 8191
    assert tokenizer.decode([8191]) == "<|endoftext|>"


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = load_tokenizer("bpe8k")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["naïve café 日本語 עברית 👩‍👩‍👧 \u200b\ufeff\x00", "\r\n\t  \n    x  \n", "<|endoftext|>", "a" * 50_000, "\n" * 50_000 + "x"])
def test_odd_text_survives_and_is_never_a_special_token(text):
    tokenizer = load_tokenizer("bpe8k")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.eot not in ids


@pytest.mark.slow
def test_the_rank_file_is_rebuilt_bit_for_bit_and_encodes_as_its_trainer(builder, tmp_path):
    documents = builder.sample()
    if corpora.contents_key(iter(documents)) != builder.SAMPLE:
        pytest.skip(f"the standard library of Python {sys.version.split()[0]} differs in the tokenizer's training modules")
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "build_tokenizer.py", tmp_path / "one_thread"], check=True, capture_output=True,
        env=os.environ | {"RAYON_NUM_THREADS": "1"},
    )
    trained = builder.train([document.text for document in documents])  # with as many threads as there are
    asset = builder.ASSET.read_bytes()
    assert (tmp_path / "one_thread").read_bytes() == asset
    assert builder.rank_file(builder.ranks(trained)) == asset
    tokenizer = load_tokenizer("bpe8k")
    for document in documents[::40]:
        assert tokenizer.encode(document.text) == trained.encode(document.text).ids, document.name
    text = "Naïve: 日本語 👩‍👩‍👧, it's  they'll\n\n\n    x = 12345  # 'tis\t \n"
    assert tokenizer.encode(text) == trained.encode(text).ids


def test_gpt2_is_fetched_or_refused_with_advice(monkeypatch):
    def fail(name):
        import requests

        raise requests.exceptions.ConnectionError("no route")

    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", fail)
    load_tokenizer.cache_clear()
    with pytest.raises(ConfigError, match="gpt2.*cannot be fetched.*bpe8k"):
        load_tokenizer("gpt2")
    with pytest.raises(ConfigError, match="tokenizer='gpt3' is unknown; choose one of bpe8k, gpt2"):
        load_tokenizer("gpt3")
