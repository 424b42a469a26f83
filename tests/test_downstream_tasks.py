"""Local items become the harness's own: prompts, targets, choices; bad files are one sentence that names file, line and field; the cloze of our own text."""

import bz2
import json
import re

import pytest
from eval_files import QUESTIONS, lines, write
from tiny_runs import tiny

from predmoe import downstream_tasks
from predmoe.config import EVAL_TASKS, ConfigError, DownstreamConfig
from predmoe.data import prepare
from predmoe.downstream_tasks import BENCHMARKS, CLOZE, Unavailable, chosen, cloze, fingerprint, missing, read

ALL = DownstreamConfig(items=0, cloze=0)
REAL = downstream_tasks.folder()
needs_real = pytest.mark.skipif(REAL is None, reason="the public evaluation items are not there (PREDMOE_EVAL_DATA names their folder)")
COUNTS = {"hellaswag": 10_042, "arc_easy": 2376, "arc_challenge": 1172, "piqa": 1838, "openbookqa": 500, "lambada_openai": 5153}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(tmp_path))
    return write(tmp_path)


def asked(task):
    """(context, continuation) of every request, as the harness makes them."""
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances]


# --- what the harness makes of them ------------------------------------------------------------------------------------

def test_prompts_and_answers_are_the_harness_own(files):
    tasks = downstream_tasks.load(ALL, None)
    assert tuple(tasks) == EVAL_TASKS and all(len(task.eval_docs) == 3 for task in tasks.values())
    first = {name: asked(task)[0] for name, task in tasks.items()}
    assert first["arc_easy"] == ("Question: What does a cache keep\nAnswer:", " what is used again")
    assert first["arc_challenge"] == ("Question: Which reads first\nAnswer:", " the last")
    assert first["openbookqa"] == ("What does a cache keep", " what is used again")
    assert first["piqa"] == ("Question: What does a cache keep\nAnswer:", " what is used again")
    assert first["lambada_openai"] == ("the cache reads before and after the", " cache")
    assert [context for context, _ in asked(tasks["hellaswag"])[::4]] == [
        "Reading: A man opens a book. He", "Health: How to rest. Lie down. Close your eyes.", "Cooking: Someone stirs a pot. The lady in red"]   # fmt: skip
    golds = {name: [task.doc_to_target(doc) for doc in task.eval_docs] for name, task in tasks.items()}
    assert golds["arc_easy"] == [0, 1, 2] and golds["piqa"] == [0, 1, 0] and golds["hellaswag"] in ([3, 0, 2], ["3", "0", "2"]) and golds["lambada_openai"][1] == " disk"


def test_the_same_items_are_drawn_for_all_models(files):
    assert chosen(100, 5, 0) == chosen(100, 5, 0) == sorted(chosen(100, 5, 0)) != chosen(100, 5, 1)
    assert chosen(3, 5, 0) == chosen(3, 0, 0) == [0, 1, 2]
    one, other = (downstream_tasks.load(DownstreamConfig(tasks=("piqa",), items=2, cloze=0, seed=seed), None)["piqa"] for seed in (0, 0))
    assert fingerprint(one) == fingerprint(other) and len(one.eval_docs) == 2
    assert fingerprint(one) != fingerprint(one.of([0])) and len(one.of([0]).eval_docs) == 1


def test_a_compressed_file_reads_the_same(files):
    plain = files / "hellaswag_val_full.txt"
    before = read("hellaswag")
    (files / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress(plain.read_bytes()))
    plain.unlink()
    assert read("hellaswag") == before


@pytest.mark.parametrize("task", EVAL_TASKS)
def test_line_ends_of_another_system_and_a_byte_order_mark_change_nothing(files, task):
    source = files / BENCHMARKS[task].file
    before, raw = read(task), source.read_bytes()
    for changed in (raw.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + raw, b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n"), raw.rstrip(b"\n")):
        source.write_bytes(changed)
        assert read(task) == before
    source.write_bytes(raw.decode().encode("utf-16"))
    with pytest.raises(ConfigError, match=f"^{source.name} cannot be read as UTF-8 text: "):
        read(task)


def test_what_is_not_there_is_named_with_what_to_do(files, monkeypatch):
    assert missing(EVAL_TASKS) == {}
    (files / "piqa.jsonl").unlink()
    (reason,) = missing(EVAL_TASKS).values()
    assert "has no piqa.jsonl" in reason and "put it there" in reason
    with pytest.raises(Unavailable):
        downstream_tasks.load(ALL, None)
    monkeypatch.setenv("PREDMOE_EVAL_DATA", "/nowhere")
    assert set(missing(EVAL_TASKS)) == set(EVAL_TASKS) and "PREDMOE_EVAL_DATA names no folder that is there" in missing(["piqa"])["piqa"]


def test_the_hub_gives_the_same_task_and_without_a_network_a_sentence(monkeypatch):
    import datasets

    rows = [BENCHMARKS["arc_easy"].row(row) for row in QUESTIONS]
    seen = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: seen.append((args, options)) or rows)
    hub = DownstreamConfig(tasks=("arc_easy",), items=0, cloze=0, hub=True)
    assert asked(downstream_tasks.load(hub, None)["arc_easy"])[0] == ("Question: What does a cache keep\nAnswer:", " what is used again")
    assert seen[0] == (("allenai/ai2_arc", "ARC-Easy"), {"split": "test"})

    told = []

    def refuse(*_, **__):
        from huggingface_hub.utils import logging

        told.append(logging.get_verbosity())
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert missing(["arc_easy"], hub=True)["arc_easy"].startswith("the hub gives no allenai/ai2_arc (ConnectionError: no route to host): connect to the network")
    assert told == [40]   # logging.ERROR: the library's line for each retry is not shown


# --- damaged files ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("row, words", [
    ({"choices": ["a", "b"], "gold": 0}, "piqa.jsonl, line 4 lacks the field 'query': an item has query, choices, gold"),
    ({"query": "Question: q\n", "gold": 0}, "line 4 lacks the field 'choices'"),
    ({"query": "Question: q\n", "choices": ["a", "b"]}, "line 4 lacks the field 'gold'"),
    ({"query": "Question: q\n", "choices": ["a", "b"], "gold": "1"}, "line 4: gold='1' is no number"),
    ({"query": "Question: q\n", "choices": ["a", "b"], "gold": True}, "line 4: gold=True is no number"),
    ({"query": "Question: q\n", "choices": ["a", "b"], "gold": 2}, "line 4: gold=2 names none of the 2 choices"),
    ({"query": "Question: q\n", "choices": ["a"], "gold": 0}, "choices has 1 answers, piqa has 2"),
    ({"query": "Question: q\n", "choices": ["a", " "], "gold": 0}, r"choices\[1\]=' ' is no text"),
    ({"query": "", "choices": ["a", "b"], "gold": 0}, "query='' is no non-empty text"),
    ({"query": "Question:  ", "choices": ["a", "b"], "gold": 0}, "query='Question:  ' is no non-empty text"),
    ({"query": "q", "choices": ["a", "b\ud800"], "gold": 0}, "line 4 holds half of a surrogate pair"),
    ([1], "line 4 is list, not an object with query, choices, gold"),
])  # fmt: skip
def test_a_bad_item_is_named_by_file_line_and_field(files, row, words):
    with open(files / "piqa.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=words) as told:
        read("piqa")
    assert "correct or remove" in str(told.value) or "add it or remove" in str(told.value)
    assert not isinstance(told.value, Unavailable)   # damaged is not missing: it stops the run


def test_other_damage_is_named_too(files):
    with open(files / "arc_easy.jsonl", "a") as file:
        file.write("{not json\n")
    with pytest.raises(ConfigError, match="arc_easy.jsonl, line 4 is not JSON"):
        read("arc_easy")
    for row, words in (({"context": "a b", "continuation": "two words"}, "line 1: continuation='two words' must be one word"), ({"context": " ", "continuation": "word"}, "line 1: context=' ' is no non-empty text")):  # fmt: skip
        lines(files, "lambada_openai.jsonl", [row])
        with pytest.raises(ConfigError, match=words):
            read("lambada_openai")
    (files / "openbook_qa.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="openbook_qa.jsonl is empty"):
        read("openbookqa")
    text = (files / "hellaswag_val_full.txt").read_text().splitlines()
    for damaged, words in (([*text[:4], " ", *text[5:]], r"item 1 \(line 1\): the ending on line 5 is empty"), (text[:-1], r"item 3 \(line 13\) has 5 of its 6 lines"), (text[:7] + text[8:], r"item 2 \(line 7\): the label on line 8 is 'ending number 0.'"),
                           (["no activity", *text[1:]], r"item 1 \(line 1\): 'no activity' is not `activity: context`")):   # fmt: skip
        (files / "hellaswag_val_full.txt").write_text("\n".join(damaged) + "\n")
        with pytest.raises(ConfigError, match=words):
            read("hellaswag")
    (files / "hellaswag_val_full.txt").unlink()
    (files / "hellaswag_val_full.txt.bz2").write_bytes(b"BZh9 no archive")
    with pytest.raises(ConfigError, match="cannot be read as bzip2-compressed UTF-8 text"):
        read("hellaswag")


@pytest.mark.parametrize("settings, words", [({"tasks": ("piqqa",)}, "task='piqqa' is unknown"), ({"tasks": ("piqa", "piqa")}, "distinct"), ({"items": -1}, "items=-1"),
                                             ({"tasks": (), "cloze": 0}, "nothing to measure")])   # fmt: skip
def test_an_impossible_third_measurement_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        DownstreamConfig(**settings)


# --- the real files ----------------------------------------------------------------------------------------------------------

@needs_real
@pytest.mark.parametrize("task", EVAL_TASKS)
def test_the_public_items_are_read_whole(task):
    rows = read(task)
    assert len(rows) == COUNTS[task]
    if task == "hellaswag":
        assert sum(bool(row["ctx_b"]) for row in rows) == 3239   # ActivityNet's part of the benchmark has 3,243 items, whose contexts end in mid-sentence
        assert all(row["ctx_b"] == row["ctx_b"].lower() or not row["ctx_b"][0].isupper() for row in rows if row["ctx_b"])
    built = downstream_tasks.load(DownstreamConfig(tasks=(task,), items=5, cloze=0), None)[task]
    assert all(re.match(r"\s\S", continuation) for _, continuation in asked(built))


# --- a cloze of our own ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tokens(corpus):
    return prepare(tiny(corpus).data)


def test_a_cloze_ends_passages_of_heldout_text_by_the_true_word_or_by_others_of_its_kind(tokens, monkeypatch):
    monkeypatch.setattr(downstream_tasks, "CLOZE_WORDS", 8)
    rows = cloze(tokens, 0, 0)
    heldout = [tokens.tokenizer.decode(tokens.document(d)[:-1]) for d in tokens.split.heldout]
    ends = {row["words"][row["gold"]] for row in rows}
    assert len(rows) > 4 and len({row["gold"] for row in rows}) > 1
    for row in rows:
        assert any(f"{row['passage']} {row['words'][row['gold']]}" in text for text in heldout)
        assert len(set(row["words"])) == 4 and set(row["words"]) <= ends and all(re.fullmatch("[a-z]{4,}", word) for word in row["words"])
        assert len(row["passage"].split()) == 7
    assert cloze(tokens, 0, 0) == rows != cloze(tokens, 0, 1) and len(cloze(tokens, 3, 0)) == 3
    task = downstream_tasks.load(DownstreamConfig(tasks=(), cloze=3), tokens)[CLOZE]
    assert asked(task)[0][1][0] == " " and len(task.eval_docs) == 3


def test_too_little_text_for_a_cloze_is_a_sentence(tokens):
    with pytest.raises(ConfigError, match="too few passages of 40 words for a cloze of 4 answers: raise heldout_tokens, or set cloze: 0"):
        cloze(tokens, 10, 0)
