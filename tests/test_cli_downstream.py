"""`predmoe evaluate`: what it prints and writes, and what it refuses in a sentence."""

import json

import pytest
from eval_files import lines, write
from safetensors.torch import load_file, save_file
from tiny_models import lively

from predmoe import cli
from predmoe.checkpoint import save_checkpoint

pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed")


@pytest.fixture
def items(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(tmp_path / "items"))
    return write(tmp_path / "items")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(lively(num_layers=2, vocab_size=8192, context=48), tmp_path_factory.mktemp("model") / "checkpoint")


def told(capsys, *arguments):
    code = cli.main(["evaluate", *map(str, arguments), "--tokenizer", "bpe8k"])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_table_and_the_same_numbers_as_json_and_what_is_not_here_named(items, model, tmp_path, capsys):
    (items / "arc_easy.jsonl").unlink()
    code, out, err = told(capsys, model, "--tasks", "piqa", "arc_easy", "lambada_openai", "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split()[:4] == ["task", "items", "chance", "accuracy"] and [row.split()[0] for row in rows] == ["piqa", "lambada_openai", "arc_easy:"]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tasks"].keys() == {"piqa", "lambada_openai"} and "has no arc_easy.jsonl" in found["not_run"]["arc_easy"] and "not run: the folder" in rows[2]
    assert rows[0].split()[1] == "3" == str(found["tasks"]["piqa"]["items"]) and f"{found['tasks']['piqa']['gold']:.2f} ±" in rows[0]


def test_where_nothing_can_be_scored_it_fails_with_the_reason_and_writes_nothing(items, model, tmp_path, capsys):
    long = {"query": "Question: q\n", "choices": [" ".join(["word"] * 100), "b"], "gold": 0}
    lines(items, "piqa.jsonl", [long])
    code, out, err = told(capsys, model, "--tasks", "piqa", "--json", tmp_path / "out.json")
    assert (code, out) == (2, "") and err == "predmoe: no task can be run: piqa: every item has an answer longer than the model's context\n" and not (tmp_path / "out.json").exists()
    lines(items, "piqa.jsonl", [long, long | {"choices": ["a", "b"]}])   # one that fits is scored
    code, out, err = told(capsys, model, "--tasks", "piqa", "--json", tmp_path / "out.json")
    assert (code, err) == (0, "") and json.loads((tmp_path / "out.json").read_text())["tasks"]["piqa"]["left_out"] == 1


def test_a_model_whose_answers_have_no_number_is_named_with_the_task(items, model, tmp_path, capsys):
    weights = load_file(model / "model.safetensors")
    (tmp_path / "nan").mkdir()
    (tmp_path / "nan" / "config.json").write_text((model / "config.json").read_text())
    for entry, words in (("lm_head.weight", "piqa: the log-likelihood of item 0 is nan: the model's weights are damaged, or it diverged in training"),
                         ("model.layers.1.mlp.gate.weight", "the model cannot be scored: router scores of token 0 are NaN")):   # fmt: skip
        save_file(weights | {entry: weights[entry] * float("nan")}, tmp_path / "nan" / "model.safetensors")
        code, out, err = told(capsys, tmp_path / "nan", "--tasks", "piqa", "--json", tmp_path / "nan.json")
        assert (code, out) == (2, "") and err.startswith(f"predmoe: {words}") and err.count("\n") == 1 and not (tmp_path / "nan.json").exists()
