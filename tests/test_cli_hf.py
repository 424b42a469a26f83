"""The commands on transformers models: `predmoe probe --model` and `predmoe trace record --model`, and what they refuse."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from hf_families import CONTEXT, D, E, V, tiny
from predmoe import cli, traces
from predmoe.config import ConfigError
from predmoe.hf_models import load, tokenizer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of its own, as from_pretrained finds it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("hub") / "tiny"
    tiny("glm4_moe").save_pretrained(place)
    words = ["<pad>", "<unk>", "<eos>", "the", "cache", "reads", "disk", "of", "expert"]
    held = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    held.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=held, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>").save_pretrained(place)
    return place


def told(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_recording_by_command(folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\ufeffthe disk of the cache")   # with the mark that some editors set before a text
    out = tmp_path / "t.trace.safetensors"
    code, said, _ = told(capsys, "trace", "record", "--model", folder, "--text", "the cache reads the disk", "--text-file", tmp_path / "a.txt", "--prompt", 2, "--horizon", 1, "--out", out)
    assert code == 0 and "10 tokens in 2 sequences, 3 MoE layers x 8 experts, top-2" in said
    trace = traces.load(out)
    assert trace.meta.layers == (1, 2, 3) and trace.meta.model == "tiny" and trace.token_ids.tolist() == [3, 4, 5, 3, 6, 3, 6, 7, 3, 4] and trace.meta.shared_experts == 1
    assert trace.predictors == {"next_router": (1,)}


def test_probing_by_command(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PREDMOE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "texts"
    text.mkdir()
    rng = np.random.default_rng(0)
    with open(text / "a.jsonl", "w") as file:
        for _ in range(120):
            file.write(json.dumps({"text": " ".join(rng.choice(["the", "cache", "reads", "disk", "of", "expert"], size=int(rng.integers(8, 30))))}) + "\n")
    asked = ["probe", "--model", folder, "--corpus", f"files:{text}", "--tokens", 640, "--heldout-tokens", 256, "--dev-tokens", 128, "--context", 16, "--max-steps", 20,
             "--batch-tokens", 64, "--json", tmp_path / "out.json", "--save", tmp_path / "heads"]  # fmt: skip
    code, said, errors = told(capsys, *asked)
    assert code == 0, errors
    assert "3 MoE layers of 4 x 8 experts, top-2" in said and "hit@2, 1 MoE layer ahead (chance 0.2500)" in said and "hit@2, 2 MoE layers ahead" in said
    assert "had not converged after 20 steps" in errors
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["config"]["fit"]["ranking_loss"] == "margin_all"   # the loss that does not fail where many experts are chosen
    assert result["layers"] == [1, 2, 3] and set(result["hit"]) == {"linear", "ranking", "next_router", "token_id", "static"}
    shown = [line.split() for line in said.splitlines() if line.startswith(("2 ", "3 ", "all "))]
    assert [line[0] for line in shown] == ["2", "3", "all", "3", "all"]
    assert [float(line[1]) for line in shown[:2]] == pytest.approx(result["hit_per_layer"]["linear"]["1"], abs=1e-4)
    assert (tmp_path / "heads" / "ranking.safetensors").is_file()
    shutil.copytree(folder, tmp_path / "nan")   # its routing is whole
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * float("nan")}, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    asked[2], asked[-3], asked[-1] = tmp_path / "nan", tmp_path / "nan.json", tmp_path / "nan_heads"
    code, said, errors = told(capsys, *asked)
    assert (code, said) == (2, "") and errors == f"predmoe: {tmp_path / 'nan'}: the weight lm_head.weight is not finite in float32 (NaN or infinite numbers): the checkpoint is damaged, or its numbers are too large for that dtype\n"
    assert not (tmp_path / "nan.json").exists() and not (tmp_path / "nan_heads").exists()


def test_the_libraries_retries_are_not_told(tmp_path, capsys, monkeypatch):
    import logging

    from huggingface_hub.utils import _http

    heard = []

    class Ear(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    def unreachable(source, **_):
        _http.logger.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect")

    ear = Ear()
    logging.getLogger("huggingface_hub").addHandler(ear)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", unreachable)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unreachable)
    try:
        for ask in (load, tokenizer_of):
            with pytest.raises(ConfigError, match="nobody/model: no such folder, and the hub gave no .* .OSError: We couldn't connect.; without a network, download it elsewhere"):
                ask("nobody/model")
        assert not heard
        with pytest.raises(OSError):
            unreachable("nobody/model")
        assert heard == ["Retrying in 1s [Retry 1/5]."], "elsewhere they are told as before"
    finally:
        logging.getLogger("huggingface_hub").removeHandler(ear)


def test_results_are_not_written_into_the_models_folder(folder, capsys):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in (["probe", "--model", folder, "--json"], ["trace", "record", "--model", folder, "--text", "the", "--out"], ["evaluate", folder, "--json"]):
        for name in ("config.json", "new"):
            code, _, said = told(capsys, *command, folder / name)
            assert code == 2 and said == f"predmoe: {folder / name} would lie in the model's own folder, {folder}; name a file elsewhere\n"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_cannot_be_used_is_told_in_one_sentence(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24)).save_pretrained(tmp_path / "dense")
    tiny("olmoe").save_pretrained(tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "short")
    weights = load_file(tmp_path / "short" / "model.safetensors")
    lost = next(name for name in sorted(weights) if "self_attn.q_proj" in name)
    save_file({key: tensor for key, tensor in weights.items() if key != lost}, tmp_path / "short" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name, changed in (("many", {"num_experts_per_tok": E + 1}), ("none", {"num_experts_per_tok": 0}), ("word", {"num_experts_per_tok": "two"}), ("wide", {"moe_intermediate_size": 40})):
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changed))
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    out = ["--out", tmp_path / "t.trace.safetensors"]
    record = lambda *more: ["trace", "record", *more]  # noqa: E731
    long = "the " * (CONTEXT + 1)
    cases = [
        (record("--model", tmp_path / "dense", "--text", "the", "--tokenizer", "bpe8k", *out), f"{tmp_path / 'dense'}: LlamaForCausalLM has no recognisable gate"),
        (record("--model", "nobody/no-such-model", "--text", "the", *out), "nobody/no-such-model: no such folder, and the hub gave no model of that name"),
        (record("--model", tmp_path / "gone", "--text", "the", *out), f"{tmp_path / 'gone'}: no such folder"),
        (record("--model", tmp_path / "empty", "--text", "the", *out), "holds no config.json"),
        (record("--model", tmp_path / "broken", "--text", "the", *out), f"{tmp_path / 'broken'}: its model cannot be loaded"),
        (record("--model", tmp_path / "short", "--text", "the", *out), f"the checkpoint has no {lost}"),
        (record("--model", tmp_path / "many", "--text", "the", *out), f"{tmp_path / 'many'}: two tokens do not pass through the model that its config.json describes"),
        (record("--model", tmp_path / "none", "--text", "the", *out), "chooses no expert: its configuration's top-k is 0"),
        (record("--model", tmp_path / "word", "--text", "the", *out), "expected int, got str (value: 'two')"),
        (record("--model", tmp_path / "wide", "--text", "the", *out), ".experts.down_proj of the shape that its config.json asks for"),
        (record("--text", "the", "--device", "cpu"), "--text, --device can only go with --model"),
        (record("--model", folder, "--text", "the disk", "--tokenizer", "bpe8k", *out), "the tokenizer bpe8k has 8,192 ids, the vocabulary of"),
        (record("--model", tmp_path / "bare", "--text", "the disk", *out), f"{tmp_path / 'bare'} has no tokenizer: name one with --tokenizer"),
        (record("--model", folder, "--text", "the", long, *out), f"text 2 has {CONTEXT + 1} tokens, the model's context takes {CONTEXT}"),
        (record("--model", folder, "--text", "the", "", *out), "text 2 is empty"),
        (record("--model", folder, "--text-file", tmp_path / "bytes.txt", *out), "bytes.txt is not UTF-8 text"),
        (record("--model", folder, "--text", "the", "a \udcff", *out), "--text: it is not UTF-8 text: character 3 cannot be read"),
        (record("--model", folder, "--text-file", tmp_path / "nothing.txt", *out), "nothing.txt: No such file"),
        (record("--model", folder, *out), "--model needs text to record"),
        (record("--model", folder, "--text", "the"), "--model needs --out"),
        (record("--model", folder, "--text", "the", "--arm", "joint", "--generated", *out), "--arm, --generated cannot go with --model"),
        (record("--text", "the"), "--text can only go with --model"),
        (record("--model", folder, "--text", "the", "--seed", "0", "--temperature", "0", *out), "--seed, --temperature cannot go with --model"),
        (record("--model", folder, "--text", "the disk", "--horizon", "3", *out), "horizon 3 is beyond the last layer"),
        (record("--model", folder, "--text", "the disk", "--horizon", "0", *out), "horizon 0 is no number of layers ahead: a model of 3 layers can be asked at 1..2"),
        (record("--model", folder, "--text", "the disk", "--dtype", "int3", *out), "dtype='int3' is unknown"),
        (["probe", "--model", folder, "--horizon", "3"], "horizon 3 is beyond the last layer: a model of 3 MoE layers"),
        (["probe", "--model", folder, "--context", "64"], f"context=64 exceeds the model's, which is {CONTEXT} tokens"),
        (["probe", "--model", folder, "--tokenizer", "bpe8k"], "the tokenizer bpe8k has 8,192 ids"),
        (["probe", "--model", folder, "--memory-mb", "0.1"], "a budget of 0.1 MB does not hold one batch"),
        (["probe", "--model", folder, "--batch-tokens", "1000000"], "a budget of 4,000 MB does not hold one batch (1000000 tokens)"),
        (["probe", "--model", folder, "--max-steps", "0"], "max_steps=0 must be at least 1"),
        (["probe", "--model", folder, "--json", tmp_path / "no" / "x.json"], "no such folder to write x.json in"),
    ]
    capsys.readouterr()   # the libraries' bar of what was saved above
    for arguments, message in cases:
        code, _, said = told(capsys, *arguments)
        *before, last = said.strip().splitlines()
        assert code == 2 and message in last, (arguments, said)
        assert len(before) == ("nobody/no-such-model" in arguments) and all("asking the hub for it" in line for line in before)   # which takes a while
    assert not (tmp_path / "t.trace.safetensors").exists()


def test_special_tokens_written_in_a_text_are_ordinary_text(folder):
    held = tokenizer_of(str(folder))
    assert held.eot == 2 and held.encode("the <eos> disk") == held.encode_batch(["the <eos> disk"])[0]
    assert 2 not in held.encode("the <eos> disk") and held.encode("the disk") == [3, 6]
    assert tokenizer_of(str(folder)).hash == held.hash and held.decode([3, 6]) == "the disk"
