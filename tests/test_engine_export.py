"""Export: what is written is the checkpoint, streamed; damaged, foreign or unwritable things are one sentence and leave nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import lively, their_model

from predmoe.checkpoint import olmoe_config, save_checkpoint, to_olmoe
from predmoe.config import ConfigError, PredictorConfig
from predmoe.engine import export, load_manifest
from predmoe.engine.export import Checkpoint, _locked, as_stored, needed_bytes, quantise, stored_model
from predmoe.engine.layout import EXPERTS, HEADS, RESIDENT, TOKENIZER, Block, aligned
from predmoe.predictor import Predictor

# D model width, F expert width, E experts, L layers: lively() has D=32, F=24, E=8, L=4
D, F, E, L = 32, 24, 8, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = lively()
    return model, save_checkpoint(model, tmp_path_factory.mktemp("run") / "checkpoint")


def matrices(folder, manifest, layer, expert):
    """gate, up and down of one expert as float32, from the bytes of the file."""
    raw = (folder / EXPERTS).read_bytes()[manifest.offsets[layer][expert] :][: manifest.block.size]
    kind = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[manifest.dtype]
    flat = torch.frombuffer(bytearray(raw[: manifest.block.weights]), dtype=kind).float()
    parts = [flat[: F * D].view(F, D), flat[F * D : 2 * F * D].view(F, D), flat[2 * F * D :].view(D, F)]
    if manifest.dtype == "int8":
        scales = torch.frombuffer(bytearray(raw[manifest.block.weights : manifest.block.payload]), dtype=torch.float32).split([F, F, D])
        parts = [part * scale.unsqueeze(1) for part, scale in zip(parts, scales)]
    assert zlib.crc32(raw) == manifest.crc32[layer][expert] and not any(raw[manifest.block.payload :])
    return parts


@pytest.mark.parametrize("dtype", ["float32", "bf16", "int8"])
def test_every_block_is_its_experts_three_matrices(checkpoint, tmp_path, dtype):
    model, folder = checkpoint
    export(folder, tmp_path / "out", dtype=dtype)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.model == model.config and manifest.dtype == dtype and manifest.name == "checkpoint"
    assert manifest.block.size % manifest.alignment == 0 and np.diff(np.array(manifest.offsets).reshape(-1)).tolist() == [manifest.block.size] * (L * E - 1)
    assert (tmp_path / "out" / EXPERTS).stat().st_size == L * E * manifest.block.size
    for layer in range(L):
        for expert in range(E):
            gate_up, down = model.layers[layer].experts.gate_up[expert], model.layers[layer].experts.down[expert]
            for stored, whole in zip(matrices(tmp_path / "out", manifest, layer, expert), (*gate_up.chunk(2), down)):
                assert torch.equal(stored, as_stored(whole.detach(), dtype))
    resident = load_file(tmp_path / "out" / RESIDENT)
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            assert torch.equal(resident[name], tensor.bfloat16() if dtype == "bf16" else tensor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing but the export is left"


def test_int8_has_one_scale_per_row_and_is_off_by_half_a_step_at_most():
    matrix = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 7).unsqueeze(1)
    weights, scale = quantise(matrix)
    assert weights.dtype == torch.int8 and scale.shape == (7,) and weights.abs().amax(1).tolist() == [127] * 7
    assert ((weights * scale.unsqueeze(1) - matrix).abs() <= 0.5001 * scale.unsqueeze(1)).all()
    assert torch.equal(as_stored(torch.zeros(2, 3), "int8"), torch.zeros(2, 3)), "a row of zeros stays one"


def test_the_stored_model_is_the_one_whose_loss_can_be_measured(checkpoint):
    import copy

    model, _ = checkpoint
    for dtype in ("bf16", "int8", "float32"):
        stored = stored_model(copy.deepcopy(model), dtype)
        for (name, a), b in zip(stored.named_parameters(), model.parameters()):
            rounds = dtype != "float32" and (".experts." in name or dtype == "bf16")
            assert torch.equal(a, b) != (rounds and not torch.equal(b.bfloat16().float(), b))


def test_a_sharded_checkpoint_of_transformers_exports_as_it_is(tmp_path):
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    export(tmp_path / "theirs", tmp_path / "out", dtype="float32")
    manifest = load_manifest(tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / RESIDENT)["embed.weight"], theirs.model.embed_tokens.weight)
    gate, up, down = matrices(tmp_path / "out", manifest, 1, 5)
    source = Checkpoint(tmp_path / "theirs")
    for name, stored in (("gate", gate), ("up", up), ("down", down)):
        assert torch.equal(stored, source.get(f"model.layers.1.mlp.experts.5.{name}_proj.weight"))


def test_only_one_expert_is_in_memory_at_a_time(checkpoint, tmp_path):
    """The source is asked for each expert's tensors once, in order, and a tensor is given up before the next expert's."""
    import weakref

    class Watched(Checkpoint):
        alive, most = [], 0

        def get(self, name):
            tensor = super().get(name)
            if ".experts." in name:
                self.alive.append(weakref.ref(tensor))
                self.most = max(self.most, sum(r() is not None for r in self.alive))
            return tensor

    source = Watched(checkpoint[1])
    export(source, tmp_path / "out", dtype="bf16")
    assert len(source.alive) == 3 * L * E and source.most <= 6


# --- heads and tokenizers ----------------------------------------------------------------------------------------------

def heads(path, kind, horizons=(1, 2), layers=L):
    predictor = Predictor(PredictorConfig(kind=kind, horizons=horizons), hidden_size=D, num_experts=E, num_layers=layers).initialise(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(predictor.state_dict(), path)
    return path


def test_heads_and_tokenizer_beside_a_runs_checkpoint_come_with_it(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint[1], tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"data": {"tokenizer": "bpe8k"}}))
    for kind in ("linear", "ranking"):
        heads(folder / f"posthoc-abc_{kind}.safetensors", kind)
    export(folder, tmp_path / "out")
    manifest = load_manifest(tmp_path / "out")
    assert manifest.heads == {"linear": (1, 2), "ranking": (1, 2)} and manifest.tokenizer == "bpe8k"
    held, own = load_file(tmp_path / "out" / HEADS), load_file(folder / "posthoc-abc_ranking.safetensors")
    assert all(torch.equal(held[f"ranking/{name}"], tensor) for name, tensor in own.items())
    heads(folder / "posthoc-def_linear.safetensors", "linear")
    with pytest.raises(ConfigError, match="several linear predictors .posthoc-abc_linear.safetensors, posthoc-def_linear.safetensors.: name one"):
        export(folder, tmp_path / "second")


@pytest.mark.parametrize("kind, asked, message", [
    ("linear", "ranking", "does not hold a ranking predictor of this model"),
    ("linear", "cotrained", "'cotrained' is unknown; choose one of linear, ranking"),
])
def test_heads_of_another_kind_are_refused(checkpoint, tmp_path, kind, asked, message):
    with pytest.raises(ConfigError, match=message):
        export(checkpoint[1], tmp_path / "out", heads={asked: heads(tmp_path / "h.safetensors", kind)})
    with pytest.raises(ConfigError, match="does not hold a linear predictor of this model"):
        export(checkpoint[1], tmp_path / "out", heads={"linear": heads(tmp_path / "deep.safetensors", "linear", layers=L + 1)})


# --- refused, and nothing left ------------------------------------------------------------------------------------------

@pytest.fixture
def untouched(tmp_path):
    """A folder for the export in which nothing may be left."""
    place = tmp_path / "place"
    place.mkdir()
    yield place / "out"
    assert not list(place.iterdir())


def test_what_is_no_olmoe_checkpoint_is_refused(checkpoint, tmp_path, untouched):
    model, folder = checkpoint
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no config.json: it is not a checkpoint"):
        export(tmp_path / "empty", untouched)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(olmoe_config(model.config) | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type='llama' is not an OLMoE checkpoint"):
        export(copy, untouched)
    (copy / "config.json").write_text(json.dumps(olmoe_config(model.config) | {"num_experts": 9}))
    with pytest.raises(ConfigError, match="the checkpoint has no model.layers.0.mlp.experts.8"):
        export(copy, untouched)
    (copy / "config.json").write_text(json.dumps(olmoe_config(model.config)))
    state = to_olmoe(model.state_dict(), model.config)
    save_file(state | {"model.layers.3.mlp.experts.7.up_proj.weight": torch.zeros(F, D + 1)}, copy / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts.7.up_proj.weight is \(24, 33\), config.json says \(24, 32\)"):
        export(copy, untouched)
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="model.safetensors is damaged: .*; copy the checkpoint again$"):
        export(copy, untouched)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks model.safetensors: the checkpoint is incomplete; copy the checkpoint again$"):
        export(copy, untouched)


@pytest.mark.parametrize("change, said", [
    ({"num_hidden_layers": 10**9}, "the checkpoint has no model.layers.4.input_layernorm.weight"), ({"num_hidden_layers": -1}, "num_layers=-1 must be at least 1"),
    ({"num_experts": 10**9}, "the checkpoint has no model.layers.0.mlp.experts.8.gate_proj.weight"), ({"num_experts": 2**70}, "must be at least 1 and at most"),
    ({"hidden_size": 10**9}, "is (61, 32), config.json says (61, 1000000000)"), ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
    ({"vocab_size": 10**9}, "is (61, 32), config.json says (1000000000, 32)"), ({"intermediate_size": 10**9}, "gate_proj.weight is (24, 32), config.json says"),
    ({"num_experts_per_tok": 10**9}, "top_k=1000000000 must lie in 1..num_experts=8"), ({"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, "must be num_heads=1000000000 times"),
    ({"max_position_embeddings": 10**9}, "context of 1000000000 tokens (max_position_embeddings) is beyond 16777216"),
    ({"num_hidden_layers": "4"}, "num_layers"), ({"hidden_size": 32.5}, "hidden_size"),
])  # fmt: skip
def test_absurd_numbers_are_one_sentence_before_anything_is_written(checkpoint, tmp_path, untouched, change, said):
    copy = shutil.copytree(checkpoint[1], tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(olmoe_config(checkpoint[0].config) | change))
    told = []
    with pytest.raises(ConfigError) as caught:
        export(copy, untouched, progress=told.append)
    assert said in str(caught.value) and "\n" not in str(caught.value) and not told


def test_a_tokenizer_that_there_is_not_is_refused_before_anything_is_written(checkpoint, tmp_path, untouched):
    told = []
    for name, said in (("foo", "tokenizer='foo' is unknown; choose one of bpe8k, gpt2, or tokenizer.json"), ("", "tokenizer='' is unknown"), (TOKENIZER, "tokenizer.json: no such file")):
        with pytest.raises(ConfigError, match=said):
            export(checkpoint[1], untouched, tokenizer=name, progress=told.append)
    assert not told
    folder = shutil.copytree(checkpoint[1], tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"data": {"tokenizer": "someone/else"}}))
    assert export(folder, tmp_path / "out", progress=told.append).tokenizer is None and "someone/else, is none of bpe8k, gpt2" in told[0]


KILLED = """
import os, signal, sys
from predmoe.engine import export
export(sys.argv[1], sys.argv[2], progress=lambda line: "layer 2" in line and os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_a_killed_export_left_is_removed_by_the_next_one_and_nothing_else(checkpoint, tmp_path):
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", KILLED, checkpoint[1], out]).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and (left / EXPERTS).exists()
    living = tmp_path / ".out.abcdefgh.unfinished"
    others = [living, *(tmp_path / name for name in (".out-abcdefgh", ".out.abcdefgh", ".out.more.abcdefgh.unfinished", ".other.abcdefgh.unfinished"))]
    for folder in others:
        folder.mkdir()
    lock, told = _locked(living), []
    export(checkpoint[1], out, progress=told.append)
    assert told[0] == f"removed {left}, left by an export that was killed" and {*tmp_path.iterdir()} == {out, *others}
    os.close(lock)
    export(checkpoint[1], tmp_path / "second")
    assert living.exists(), "an export to another folder lets it be"
    shutil.rmtree(out)
    export(checkpoint[1], out)
    assert not living.exists() and _locked(living) is None


def test_two_exports_to_one_folder_at_a_time_do_not_harm_each_other(checkpoint, tmp_path):
    def another(line):
        if "layer 2" in line:
            export(checkpoint[1], tmp_path / "out", name="the other")

    with pytest.raises(ConfigError, match="out has come to be there meanwhile, of another export perhaps: this one is removed; use that one, or export to another folder$"):
        export(checkpoint[1], tmp_path / "out", progress=another)
    assert load_manifest(tmp_path / "out").name == "the other" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_too_full_is_found_out_before_the_first_byte(checkpoint, untouched, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"the export needs \d\.\d MB, and .* has 0.0 MB free: free some there, or export to another disk"):
        export(checkpoint[1], untouched)


def test_the_space_asked_for_is_what_the_export_takes(checkpoint, tmp_path):
    for dtype in ("float32", "bf16", "int8"):
        export(checkpoint[1], tmp_path / dtype, dtype=dtype)
        taken = sum(path.stat().st_size for path in (tmp_path / dtype).iterdir())
        assert taken <= needed_bytes(checkpoint[0].config, dtype) <= taken + (1 << 20) + 4096


def test_a_write_that_fails_leaves_nothing(checkpoint, untouched, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device; nothing is left of it: mend that"):
        export(checkpoint[1], untouched)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-100])])
def test_a_checkpoint_that_goes_away_while_it_is_read_is_what_is_blamed(checkpoint, tmp_path, untouched, damage):
    copy = shutil.copytree(checkpoint[1], tmp_path / "copy")
    with pytest.raises(ConfigError, match=f"^{copy / 'model.safetensors'} cannot be read any more: .*; copy the checkpoint again$"):
        export(copy, untouched, progress=lambda line: "layer 2" in line and damage(copy / "model.safetensors"))


def test_a_disk_that_fills_up_while_experts_are_written_leaves_nothing(checkpoint, untouched):
    """A limit on a file's size stands for the disk: the write itself fails, not a double of it."""
    code = "import resource, signal, sys; from predmoe import cli; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, -1)); sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "export", checkpoint[1], untouched], capture_output=True, text=True)
    assert done.returncode == 2 and "experts of layer 1" in done.stderr and done.stderr.splitlines()[-1].startswith(f"predmoe: {untouched} cannot be written: File too large; nothing is left")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_leaves_nothing(checkpoint, untouched, how):
    code = ("import os, signal, sys; from predmoe import cli; import predmoe.engine; real = sys.modules['predmoe.engine.export'].expert_entries; "
            f"[signal.signal(n, signal.SIG_DFL) for n in (1, 15)]; signal.signal(2, signal.default_int_handler); "
            f"sys.modules['predmoe.engine.export'].expert_entries = lambda layer, e: (layer == 2 and os.kill(os.getpid(), {int(how)}), real(layer, e))[1]; sys.exit(cli.main(sys.argv[1:]))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, "export", checkpoint[1], untouched], capture_output=True, text=True)
    assert done.returncode == 128 + how and done.stderr.splitlines()[-1].endswith("; what is not whole is removed, and the same command begins anew"), done.stderr


def test_folders_that_cannot_be_written_are_named(checkpoint, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out, said in ((tmp_path / "there", "is there already"), (tmp_path / "link", "is there already"), (tmp_path / "no" / "out", "no such folder to write out in"), ("/sys/out", "needs .* MB|/sys/out cannot be written")):
        with pytest.raises(ConfigError, match=said):
            export(checkpoint[1], out)
    with pytest.raises(ConfigError, match="dtype='fp4' is unknown; choose one of float32, bf16, int8"):
        export(checkpoint[1], tmp_path / "out", dtype="fp4")


def test_sizes_by_hand():
    assert aligned(1, 4096) == aligned(4096, 4096) == 4096 and aligned(4097, 4096) == 8192 and aligned(0, 4096) == 0
    config = lively().config
    assert Block.of(config, "float32", 4096) == Block(9216, 9216, 12288)       # 3 x 32 x 24 x 4
    assert Block.of(config, "bf16", 512) == Block(4608, 4608, 4608)
    assert Block.of(config, "int8", 4096) == Block(2304, 2304 + 4 * 80, 4096)   # a scale per row: 24 + 24 + 32
