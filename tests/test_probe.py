"""The probe of a transformers model: our own checkpoint gives our own figures, whatever the memory."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from hf_families import CONTEXT, E, K, V, tiny
from tiny_backbone import finished_run
from predmoe import traces
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
