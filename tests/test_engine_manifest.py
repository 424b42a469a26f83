"""An export as it is read: a manifest or a file that is not the one that was written is one sentence."""

import json
import shutil

import pytest
import torch
from engine_models import heads, opened
from safetensors.torch import load_file, save_file
from tiny_models import lively

from predmoe.checkpoint import save_checkpoint
from predmoe.config import ConfigError
from predmoe.engine import ReadError, export, load_manifest
from predmoe.engine.layout import CHECKSUM, EXPERTS, HEADS, MANIFEST, RESIDENT, TOKENIZER
from predmoe.engine.resident import check_tensors
from predmoe.engine.text import Text
from predmoe.simulator import Cache


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = lively()
    return model, save_checkpoint(model, tmp_path_factory.mktemp("run") / "checkpoint")


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """An export with both predictors."""
    place = tmp_path_factory.mktemp("whole")
    export(checkpoint[1], place / "out", dtype="float32", heads={kind: heads(place / f"{kind}.safetensors", checkpoint[0], kind) for kind in ("linear", "ranking")})
    return place / "out"


# --- the manifest ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, message", [
    ({"version": 1}, "version 1, this program reads version 3; export the checkpoint again"),
    ({"version": 2, "checksum": None}, "version 2, this program reads version 3; export the checkpoint again"),
    ({"format": "gguf"}, "is not the manifest of an exported model"),
    ({"dtype": "fp4"}, "dtype='fp4' is unknown"),
    ({"model": {"vocab_size": 3}}, "manifest.json is damaged: ModelConfig lacks .*; export the checkpoint again"),
    ({"tokenizer": []}, "tokenizer is not one of an export"), ({"tokenizer": "../x"}, "tokenizer is not one of an export"), ({"name": None}, "name is not one of an export"),
    ({"offsets": [[0]]}, "offsets and checksums must be"),
    ({"files": {}}, "files are not those of an export; export"), ({"files": {RESIDENT: "0"}}, "files are not those of an export"), ({"files": None}, "is damaged"),
    ({"heads": {"cotrained": [1]}}, "heads are not those of an export"), ({"heads": {"linear": [0]}}, "heads are not those of an export"), ({"heads": []}, "is damaged"),
    ({"crc32": None}, "is damaged"), ({"offsets": [[0, None]]}, "is damaged: offsets must be whole numbers"), ({"offsets": [["0"]]}, "is damaged: offsets must be whole numbers"),
    ({"crc32": [[-1]]}, "is damaged: crc32 must be whole numbers"), ({"alignment": 0}, "alignment=0 must be a power of two"), ({"alignment": -4096}, "must be a power of two"),
    ({"alignment": 12288}, "must be a power of two"), ({"alignment": "4096"}, "alignment='4096' must be a power of two"), ({"alignment": 1e40}, "must be a power of two"),
])
def test_a_manifest_of_another_version_or_model_is_refused(checkpoint, tmp_path, change, message):
    export(checkpoint[1], tmp_path / "out")
    path = tmp_path / "out" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_manifest(tmp_path / "out")


@pytest.mark.parametrize("name", ["offsets", CHECKSUM])
def test_a_manifest_without_an_entry_is_refused(checkpoint, tmp_path, name):
    export(checkpoint[1], tmp_path / "out")
    path = tmp_path / "out" / MANIFEST
    path.write_text(json.dumps({other: value for other, value in json.loads(path.read_text()).items() if other != name}))
    with pytest.raises(ConfigError, match=f"is damaged: it has no '{name}'; export the checkpoint again"):
        load_manifest(tmp_path / "out")


@pytest.mark.parametrize("change", [
    {"model": {"rope_theta": 9999.0}}, {"model": {"rms_norm_eps": 1e-4}}, {"model": {"context": 8}}, {"model": {"top_k": 1}}, {"name": "other"}, {"heads": {"linear": [1]}},
    {"files": {RESIDENT: 0}}, {"offsets": "reversed"}, {"crc32": "reversed"}, {"tokenizer": "bpe8k"}, {"block": {"bytes": 0}}, {"experts_bytes": 1}, {"more": 1}, {CHECKSUM: 0}, {CHECKSUM: None},
])  # fmt: skip
def test_what_would_give_other_text_is_known_by_the_manifests_checksum(whole, tmp_path, change):
    """Each of these is an entry that might be so: nothing but the checksum knows better."""
    folder = shutil.copytree(whole, tmp_path / "out")
    path = folder / MANIFEST
    held = json.loads(path.read_text())
    ((name, value),) = change.items()
    new = held[name][::-1] if value == "reversed" else held[name] | value if isinstance(value, dict) else value
    assert held.get(name) != new
    path.write_text(json.dumps(held | {name: new}))
    with pytest.raises(ConfigError) as caught:
        load_manifest(folder)
    assert str(caught.value) == f"{path} is damaged: its entries are not those that were exported (checksum); export the checkpoint again"


def test_how_a_manifest_is_laid_out_does_not_count(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "out")
    held = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(dict(reversed(held.items())), indent=3))
    assert load_manifest(folder) == load_manifest(whole)


@pytest.mark.parametrize("file, said", [(EXPERTS, r"expert \d of layer 0: its bytes"), (RESIDENT, "resident.safetensors is damaged: its bytes"), (MANIFEST, "resident.safetensors is damaged: its bytes")])
def test_a_file_of_another_export_of_the_same_shape_is_refused(whole, tmp_path, file, said):
    other = lively(seed=1)
    export(save_checkpoint(other, tmp_path / "other"), tmp_path / "second", dtype="float32", heads={kind: heads(tmp_path / f"{kind}.safetensors", other, kind) for kind in ("linear", "ranking")})
    folder = shutil.copytree(whole, tmp_path / "mixed")
    shutil.copyfile(tmp_path / "second" / file, folder / file)
    with pytest.raises((ConfigError, ReadError), match=f"{said} are not those that were exported .checksum.; export the checkpoint again"):
        with opened(folder, cache=Cache(slots=8)) as engine:
            engine.generate([list(range(20))], max_new_tokens=1)


def test_an_incomplete_export_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="holds no manifest.json: it is not an exported model"):
        load_manifest(tmp_path)
    export(checkpoint[1], tmp_path / "out")
    whole = (tmp_path / "out" / EXPERTS).read_bytes()
    (tmp_path / "out" / EXPERTS).write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=f"is cut short: {len(whole) - 1} bytes of {len(whole)}"):
        load_manifest(tmp_path / "out")
    (tmp_path / "out" / EXPERTS).unlink()
    with pytest.raises(ConfigError, match="lacks experts.bin: the export is incomplete"):
        load_manifest(tmp_path / "out")


# --- the files that are read whole ---------------------------------------------------------------------------------------

def rewritten(change):
    def damage(path):
        state = load_file(path)
        change(state, next(iter(state)))
        save_file(state, path)

    return damage


def flipped(at):
    def damage(path):
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)

    return damage


@pytest.mark.parametrize("file", [RESIDENT, HEADS])
@pytest.mark.parametrize("damage, said", [
    (lambda path: None, None),
    (flipped(-1), "its bytes are not those that were exported (checksum)"), (flipped(8), "is damaged: "),
    (lambda path: path.write_bytes(path.read_bytes()[:-4]), "is damaged: "), (lambda path: path.write_bytes(b""), "is damaged: "),
    (rewritten(lambda state, name: state.pop(name)), " lacks "),
    (rewritten(lambda state, name: state.update(more=torch.zeros(1))), " holds more, which this model has not"),
    (rewritten(lambda state, name: state.update({name: torch.zeros(3, 5)})), "is (3, 5), the manifest says ("),
    (rewritten(lambda state, name: state.update({name: state[name].to(torch.int32)})), "holds I32, not one of F64"),
    (rewritten(lambda state, name: state.update({name: state[name] + 1})), "(checksum)"),
])  # fmt: skip
def test_damage_to_what_stays_in_memory_is_one_sentence(whole, tmp_path, file, damage, said):
    folder = shutil.copytree(whole, tmp_path / "out")
    damage(folder / file)
    manifest = load_manifest(folder)
    if said is None:
        return check_tensors(folder, manifest, heads=True, sums=True)
    with pytest.raises(ConfigError) as caught:
        check_tensors(folder, manifest, heads=True, sums=True)
    sentence = str(caught.value)
    assert sentence.startswith(str(folder / file)) and said in sentence and sentence.endswith("; export the checkpoint again") and "\n" not in sentence
    if file == HEADS:
        check_tensors(folder, manifest, heads=False, sums=True)   # nobody asked for a predictor
    if "checksum" in said:
        check_tensors(folder, manifest, heads=True, sums=False)


def test_a_tokenizer_that_came_with_the_checkpoint_is_checked_as_well(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint[1], tmp_path / "checkpoint")
    (folder / TOKENIZER).write_text(json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}))
    export(folder, tmp_path / "out", tokenizer=TOKENIZER)
    manifest = load_manifest(tmp_path / "out")
    assert manifest.files.keys() == {RESIDENT, TOKENIZER} and Text(tmp_path / "out", manifest).encode("b") == [1]
    (tmp_path / "out" / TOKENIZER).write_text((folder / TOKENIZER).read_text().replace('"b": 1', '"b": 2'))
    with pytest.raises(ConfigError, match="tokenizer.json is damaged: .*; export the checkpoint again"):
        Text(tmp_path / "out", manifest)
    (tmp_path / "out" / TOKENIZER).unlink()
    with pytest.raises(ConfigError, match="lacks tokenizer.json: the export is incomplete; export the checkpoint again"):
        load_manifest(tmp_path / "out")
