"""The probe of a transformers model: our own checkpoint gives our own figures, whatever the memory; the commands and what they refuse."""

import json
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_families import CONTEXT, D, E, K, V, tiny
from tiny_backbone import finished_run
from predmoe import cli, traces
from predmoe.activations import DiskRows, plan
from predmoe.checkpoint import save_checkpoint
from predmoe.config import ConfigError, DataConfig, PosthocConfig
from predmoe.hf import Backbone, NextGate
from predmoe.hf_models import load, tokenizer_of
from predmoe.hf_record import load_heads, record_texts
from predmoe.model import MoEModel, Output
from predmoe.posthoc import capture, dev_hit, fit, measure
from predmoe.predictor import membership, predicted_top_k
from predmoe.probe import ProbeConfig, probe, table
from predmoe.tokenizer import load_tokenizer

# N tokens, D model width, E experts, K chosen, L MoE layers

FEW = PosthocConfig(tokens=800, batch_tokens=128, eval_every=10, max_steps=30)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A run that is not trained, its tokens, and its model as a checkpoint that transformers loads; the corpus is encoded already."""
    run, tokens = finished_run(tmp_path_factory.mktemp("corpus"))
    folder = save_checkpoint(MoEModel(run.model).initialise(0), tmp_path_factory.mktemp("model") / "checkpoint")
    return run, tokens, folder, tokens.folder.parent.parent


def probe_config(run, **changes):
    return ProbeConfig(horizons=run.predictor.horizons, context=run.model.context, data=run.data, fit=FEW, **changes)


@pytest.fixture(scope="module")
def probed(ours):
    run, _, folder, cache = ours
    return probe(load(str(folder), dtype="float32"), load_tokenizer("bpe8k"), probe_config(run), name="ours", cache=cache)


def test_our_own_checkpoint_gives_our_own_figures(ours, probed):
    run, tokens, _, _ = ours
    want, got = measure(MoEModel(run.model).initialise(0), None, run, tokens, FEW)[0], probed[0]
    for name in ("linear", "ranking", "next_router", "token_id", "static"):
        for h in ("1", "2"):
            assert got["hit"][name][h] == pytest.approx(want["hit"][name][h], abs=0.002)
            assert got["exact_set"][name][h] == pytest.approx(want["exact_set"][name][h], abs=0.002)
    assert got["val_loss"] == pytest.approx(want["val_loss"], abs=1e-4) and got["data_hash"] == want["data_hash"]
    assert len({round(value["1"], 4) for value in got["hit"].values()}) == 5   # five predictors, not one five times


def test_the_same_bits_from_a_file_and_from_any_piece_size(ours, probed):
    run, _, folder, cache = ours
    backbone = load(str(folder), dtype="float32")
    assert not probed[0]["activations"]["on_disk"]
    small = next(budget for budget in range(10_000, 10**8, 5_000) if fits(budget, backbone, run))
    result, fitted = probe(backbone, load_tokenizer("bpe8k"), probe_config(run, memory=small), name="ours", cache=cache)
    assert result["activations"] == {"on_disk": True, "bytes": probed[0]["activations"]["bytes"], "budget": small}
    assert close(result["hit"], probed[0]["hit"])
    for kind in fitted:
        assert all(torch.equal(tensor, probed[1][kind].state_dict()[name]) for name, tensor in fitted[kind].state_dict().items())


def fits(budget, backbone, run):
    try:
        plan(budget, backbone.config, tokens=1000, batch_tokens=FEW.batch_tokens, horizons=2, T=run.model.context)
        return True
    except ConfigError:
        return False


def close(a, b):
    return all(abs(a[name][h] - b[name][h]) < 1e-9 for name in b for h in b[name])


def test_the_table_has_a_row_per_layer_and_the_mean(probed):
    shown = table(probed[0], 1)
    assert list(shown.index) == ["1", "2", "all"] and list(shown.columns) == ["linear", "ranking", "next_router", "token_id", "static"]
    assert shown.loc["all"].tolist() == pytest.approx(shown.iloc[:2].mean().tolist()) and table(probed[0], 2).index.tolist() == ["2", "all"]


# --- activations within a budget -----------------------------------------------------------------------------------------------------------


def test_rows_on_disk_are_what_was_written(tmp_path):
    want = torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    rows = DiskRows(50, 3, 4, dtype=torch.float16, folder=tmp_path)
    rows[20:50] = want[20:]
    rows[0:20] = want[:20].float()
    for asked in ([], [49], [0, 1, 2, 30, 31, 7, 7, 6], list(range(50))):
        assert torch.equal(rows[torch.tensor(asked, dtype=torch.long)], want[torch.tensor(asked, dtype=torch.long)])
    assert list(tmp_path.iterdir()) == []   # the file has no name: nothing is left behind
    with pytest.raises(ConfigError, match="activations need .* GB free"):
        DiskRows(10**12, 64, 64, dtype=torch.float16, folder=tmp_path)
    with pytest.raises(OSError, match="ends at byte"):
        DiskRows(9, 3, 4, dtype=torch.float16, folder=tmp_path)[torch.tensor([3])]


def test_memory_stays_within_the_budget():
    """200 MB of activations of a model that is nothing but their source, with a budget of 40 MB, in a process of its own."""
    code = """
    import sys, types, torch
    sys.path.insert(0, sys.argv[1])
    from steps import memory
    from predmoe.activations import plan
    from predmoe.config import PosthocConfig
    from predmoe.hf import Shape
    from predmoe.model import Routing
    from predmoe.posthoc import capture, fit

    shape = Shape(vocab_size=100, hidden_size=512, num_layers=4, num_experts=8, top_k=2, context=64)
    def body(tokens):
        N = tokens.numel()
        return None, [Routing(torch.randn(N, 512), torch.randn(N, 8), torch.rand(N, 8).argsort(1)[:, :2], torch.rand(N, 2)) for _ in range(4)]
    model = types.SimpleNamespace(config=shape, device=torch.device("cpu"), body=body)
    settings = PosthocConfig(tokens=51200, batch_tokens=64, eval_every=5, max_steps=5)
    budget = int(sys.argv[2])
    held = plan(budget, shape, tokens=54400, batch_tokens=64, horizons=1, T=64)
    fit("linear", *(capture(model, torch.zeros(n, 65, dtype=torch.long), batch_size=1) for n in (2, 2)), shape, (1,), settings)   # what libraries take at first use
    before = memory("VmHWM")
    train, dev = (capture(model, torch.zeros(n, 65, dtype=torch.long), batch_size=held.capture_windows, room=held.room, rows_at_once=held.rows_at_once) for n in (800, 50))
    fit("linear", train, dev, shape, (1,), settings)
    print(held.on_disk, held.cache_bytes, (memory("VmHWM") - before) * 2**20)
    """
    from predmoe import paths

    grown = {}
    for budget in (40_000_000, 1_000_000_000):
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(paths.ROOT / "benchmarks"), str(budget)], capture_output=True, text=True, check=True)
        on_disk, cache, grown[budget] = run.stdout.split()
        assert (on_disk == "True") == (budget == 40_000_000) and int(cache) == 54400 * 4 * 512 * 2
    assert float(grown[40_000_000]) < 40_000_000 < 200_000_000 < float(grown[1_000_000_000])


def test_a_budget_that_holds_no_batch_is_refused():
    with pytest.raises(ConfigError, match="a budget of 1 MB does not hold one batch"):
        plan(1_000_000, Backbone(tiny("olmoe")).config, tokens=100, batch_tokens=4096, horizons=3, T=32)


# --- traces of texts -----------------------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of tests: an id per character."""

    name, eot, vocab_size, hash = "letters", 2, V, "0"

    def encode(self, text):
        return [3 + ord(letter) % (V - 3) for letter in text]


TEXTS = ["four score and seven", "years ago", "our fathers brought for"]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_texts_of_different_lengths_are_recorded_without_their_padding(family, tmp_path):
    backbone = Backbone(tiny(family))
    trace = record_texts(backbone, Letters(), TEXTS, ["a", "b", "c"], model="m", prompt=4)
    path = tmp_path / "t.trace.safetensors"
    traces.save(trace, path)
    trace = traces.load(path)
    lengths = [len(text) for text in TEXTS]
    assert trace.num_tokens == sum(lengths) and trace.sequence.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert trace.meta.layers == backbone.layers and trace.meta.model_layers == 4 and trace.meta.on_policy is False
    assert trace.num_passes == sum(1 + n - 4 for n in lengths) and np.diff(trace.starts)[:2].tolist() == [4, 1]
    scorer, first = NextGate(backbone), 0
    for text, n in zip(TEXTS, lengths):   # alone, without padding, each is what the trace says
        tokens = torch.tensor([Letters().encode(text)])
        _, routing = backbone.body(tokens)
        rows = slice(first, first + n)
        assert trace.token_ids[rows].tolist() == tokens[0].tolist()
        hidden = torch.stack([record.hidden_ND for record in routing])
        for place, record in enumerate(routing):
            same = [set(a) == set(b) for a, b in zip(trace.experts_NLK[rows, place].tolist(), record.experts_NK.tolist())]
            assert np.mean(same) > 0.95   # a batch rounds otherwise than a sequence alone
        guessed = membership(predicted_top_k(scorer(hidden, 1, tokens[0]), K), E)
        told = membership(torch.from_numpy(trace.prediction("next_router", 1).experts_NLM[rows, : len(routing) - 1, :K].astype(np.int64)).transpose(0, 1), E)
        assert (guessed != told).float().mean() < 0.02
        first += n


def test_fitted_heads_go_to_a_file_and_into_a_trace(probed, ours, tmp_path):
    from predmoe.hf_record import save_heads

    backbone = load(str(ours[2]), dtype="float32")
    files = {path.stem: path for path in save_heads(probed[1], tmp_path / "heads")}
    assert files.keys() == {"linear", "ranking"}
    again = load_heads("ranking", files["ranking"], backbone)
    assert all(torch.equal(tensor, probed[1]["ranking"].state_dict()[name]) for name, tensor in again.state_dict().items())
    trace = record_texts(backbone, load_tokenizer("bpe8k"), ["the cache reads the disk"], ["text 1"], model="m", heads=files, prompt=2)
    assert trace.predictors == {"linear": (1, 2), "next_router": (1, 2), "ranking": (1, 2)}
    with pytest.raises(ConfigError, match="does not hold a linear predictor of this model"):
        load_heads("linear", files["linear"], Backbone(tiny("olmoe")))


# --- commands ------------------------------------------------------------------------------------------------------------------------------


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


def test_a_run_of_the_store_brings_its_tokenizer(ours, tmp_path):
    run = ours[0]
    save_checkpoint(MoEModel(run.model).initialise(0), tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"data": {"tokenizer": "bpe8k"}}))
    assert tokenizer_of(str(tmp_path / "run")) is load_tokenizer("bpe8k")
    assert load(str(tmp_path / "run")).config.num_experts == run.model.num_experts


@pytest.mark.parametrize("changes, message", [(dict(horizons=(0,)), "horizons=(0,)"), (dict(horizons=()), "horizons=()"), (dict(context=1), "context=1"), (dict(memory=0), "memory=0")])
def test_a_probe_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ConfigError) as error:
        ProbeConfig(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_told_before_the_fits(ours, monkeypatch, loss):
    """Finite weights may overflow where they are multiplied."""
    run, _, folder, cache = ours
    backbone = load(str(folder), dtype="float32")
    monkeypatch.setattr(Backbone, "__call__", lambda *_: Output(torch.tensor(loss), None, None, []))
    monkeypatch.setattr("predmoe.probe.capture", lambda *_, **__: pytest.fail("it goes on"))
    with pytest.raises(ConfigError, match=f"^ours: the loss of held-out text is {loss}: the model's weights are damaged, or overflow in this --dtype$"):
        probe(backbone, load_tokenizer("bpe8k"), probe_config(run), name="ours", cache=cache)


def test_a_model_of_one_gated_layer_has_nothing_ahead():
    backbone = Backbone(tiny("glm4_moe", first_k_dense_replace=3))
    with pytest.raises(ConfigError, match="the model has 1 MoE layer: there is no layer ahead"):
        probe(backbone, Letters(), ProbeConfig(data=DataConfig(), fit=PosthocConfig()))


def test_a_fit_on_captured_activations_is_posthocs_own():
    """A backbone goes through `capture` and `fit` as our model does: its activations are its own records."""
    backbone = Backbone(tiny("mixtral"))
    windows = np.random.default_rng(0).integers(3, V, (12, CONTEXT + 1))
    got = capture(backbone, windows, batch_size=5)
    _, routing = backbone.body(torch.from_numpy(windows[:, :-1]))
    assert torch.equal(got.experts_NLK[:, 2].long(), routing[2].experts_NK) and torch.allclose(got.hidden_NLD[:, 2].float(), routing[2].hidden_ND, rtol=2e-3, atol=1e-4)
    predictor, curve, _ = fit("linear", got, got, backbone.config, (1, 3), PosthocConfig(batch_tokens=64, eval_every=20, max_steps=40))
    assert dev_hit(predictor, got) == max(point["dev_hit"] for point in curve)
