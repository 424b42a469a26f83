"""Damaged headers and archives: one sentence, whatever is wrong with them."""

import json
import struct

import numpy as np
import pytest

from predmoe import traces
from predmoe.simulator import SimulationError, count_keys


@pytest.fixture
def file(tmp_path):
    meta = traces.Meta(model="m", num_experts=4, top_k=2, layers=range(2), expert_bytes=[10, 10])
    traces.save(traces.build(meta, [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]), tmp_path / "t")
    return tmp_path / "t"


def damaged(file, change):
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    inner = json.loads(header["__metadata__"]["predmoe_trace"])
    change(header, inner["meta"])
    header["__metadata__"]["predmoe_trace"] = json.dumps(inner)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return file


@pytest.mark.parametrize("change, said", [
    (lambda h, m: h["experts"].update(shape=None), "not that of a safetensors file"),
    (lambda h, m: h["experts"].update(data_offsets=[0]), "not that of a safetensors file"),
    (lambda h, m: h["experts"].update(shape=[2**32, 2**32, 1], data_offsets=[0, 0]), "which is not the shape"),
    (lambda h, m: h["experts"].update(shape=[True, 8]), "not whole numbers"),
    (lambda h, m: h["experts"].update(dtype=[1]), "which no trace uses"),
    (lambda h, m: h["phase"].update(shape=[], data_offsets=[0, 1]), "starts must rise"),
    (lambda h, m: m.update(on_policy="yes"), "on_policy='yes' must be true, false or null"),
    (lambda h, m: m.update(source=None), "source=None must be text"),
    (lambda h, m: m.update(layers=[0, float("inf")]), "incomplete"),
])
def test_a_damaged_header_is_refused(file, change, said):
    with pytest.raises(traces.TraceError, match=said):
        traces.load(damaged(file, change))


def test_a_trace_in_which_nothing_is_routed_is_empty():
    with pytest.raises(traces.TraceError, match="no token was routed"):
        traces.build(traces.Meta(model="m", num_experts=4, top_k=2, layers=[0], expert_bytes=[1]), np.full((3, 1, 2), -1))


@pytest.mark.parametrize("name, text, said", [
    ("t.jsonl", '{"layers": [[]]}\n', "no expert id"),
    ("t.json", '{"prompts":' + "[" * 100_000, "nested too deep"),
    ("t.json", '{"prompts": {}, "num_layers": Infinity, "top_k": 1, "num_experts": 4}', "not a per-prompt trace"),
    ("t.json", '{"prompts": [1],\n "num_layers": 1, "top_k": 1, "num_experts": 4}', "not a per-prompt trace"),
    ("t.csv", "# route_trace v1\n# n_expert=4 n_expert_used=1 n_layer=" + "9" * 5000 + "\n# layer=0 expert_bytes=1\nturn,phase,step,layer,slot,expert,weight\n0,1,0,0,0,1,1\n", "n_layer is"),
])
def test_a_damaged_text_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(traces.TraceError, match=said):
        traces.read(tmp_path / name)


@pytest.mark.parametrize("more, said", [
    (dict(ids=np.zeros((3, 0, 2), np.uint8)), "the trace is empty"),
    (dict(weight_offsets=np.array([0.0, 3.0])), "weight_offsets is no list of whole numbers"),
    (dict(weight_seq=np.array(0)), "weight_seq is no list"),
    (dict(weights_bf16_bits=np.full((3, 2, 2), 0.5)), "weights_bf16_bits is no list"),
])
def test_a_damaged_archive_is_refused(tmp_path, more, said):
    arrays = dict(ids=np.arange(12, dtype=np.uint8).reshape(3, 2, 2), seq_offsets=np.array([0, 3]), weight_seq=np.array([0]), weight_offsets=np.array([0, 3]),
                  weights_bf16_bits=np.zeros((3, 2, 2), np.uint16))  # fmt: skip
    np.savez(tmp_path / "t.npz", **{**arrays, **more})
    with pytest.raises(traces.TraceError, match=said):
        traces.read(tmp_path / "t.npz")


def test_an_array_named_npz_is_refused(tmp_path):
    with open(tmp_path / "t.npz", "wb") as out:
        np.save(out, np.zeros(3))
    with pytest.raises(traces.TraceError, match="not an npz"):
        traces.read(tmp_path / "t.npz")


@pytest.mark.parametrize("keys", [[1.5], [2**32, 0], [-1], ["a"], []])
def test_keys_that_a_cast_would_change_are_refused(keys):
    with pytest.raises(SimulationError, match="keys must be"):
        count_keys(np.array(keys), 1)
