"""The schema refuses every fault with its row, files come back as they were written, and readers give what the sources say."""

import json
import os
import struct
import warnings

import numpy as np
import pytest
from conftest import PUBLIC, needs_public
from tiny_traces import META, ROUTE, skewed

from predmoe import traces
from predmoe.traces import ABSENT, Accuracy, Meta, Prediction, TraceError, TraceWarning, build, generate


@pytest.fixture
def trace():
    rng = np.random.default_rng(0)
    ids = np.stack([np.stack([rng.permutation(8)[:3] for _ in range(3)]) for _ in range(40)])
    guess = Prediction(2, ids, np.sort(rng.random((40, 3, 3)))[..., ::-1])
    experts = skewed(rng)
    experts[3, 2] = ABSENT
    return build(META, experts, starts=[0, 5, *range(6, 41)], phase=[0] + [1] * 35, sequence=[0] * 20 + [1] * 20, weights_NLK=rng.random((40, 3, 2)),
                 token_ids=range(40), predictions=[("linear", guess)])  # fmt: skip


# --- the file -------------------------------------------------------------------------------------------------------

def test_a_trace_comes_back_as_it_was_saved(trace, tmp_path):
    traces.save(trace, tmp_path / "t.trace")
    back = traces.load(tmp_path / "t.trace")
    assert back.meta == trace.meta and back.predictors == {"linear": (2,)}
    for name, array in trace._arrays().items():
        assert back._arrays()[name].dtype == array.dtype and (back._arrays()[name] == array).all()
    assert not list(tmp_path.glob(".*"))


def test_loading_reads_nothing_before_it_is_used(trace, tmp_path):
    traces.save(trace, tmp_path / "t.trace")
    before = (tmp_path / "t.trace").read_bytes()
    back = traces.load(tmp_path / "t.trace", check=False)
    assert not back.experts_NLK.flags.owndata
    back.experts_NLK[0, 0, 0] = 7
    assert (tmp_path / "t.trace").read_bytes() == before   # a change stays in memory


def test_the_file_opens_in_other_tools(trace, tmp_path):
    from safetensors.numpy import load_file

    traces.save(trace, tmp_path / "t.trace")
    assert (load_file(tmp_path / "t.trace")["experts"] == trace.experts_NLK).all()


@pytest.mark.parametrize("keep", [0, 4, 40, 700, -1])
def test_a_file_cut_short_is_noticed(trace, tmp_path, keep):
    path = tmp_path / "t.trace"
    traces.save(trace, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TraceError, match="cut short|empty|not a trace"):
        traces.load(path)


def test_another_version_is_refused(trace, tmp_path):
    path = tmp_path / "t.trace"
    traces.save(trace, path)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["predmoe_trace"] = json.dumps({**json.loads(header["__metadata__"]["predmoe_trace"]), "version": 2})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(TraceError, match="trace version 2, this program reads version 1"):
        traces.load(path)


def test_passes_are_a_trace_of_their_own(trace):
    part = trace.passes(1, 11)
    part.validate()
    assert part.num_passes == part.num_tokens == 10 and (part.experts_NLK == trace.experts_NLK[5:15]).all()
    assert np.shares_memory(part.experts_NLK, trace.experts_NLK) and part.prediction("linear", 2).experts_NLM.shape == (10, 3, 3)


# --- faults ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, message", [
    ((7, 1, 0, -3), r"row 22 \(token 7, layer 1\): a negative expert id"),
    ((7, 1, 1, 8), r"row 22 \(token 7, layer 1\): an expert id is not below num_experts=8"),
    ((7, 1, 1, 70000), r"row 22 .*not below num_experts=8"),
    ((19, 2, 0, -1), r"row 59 .*: fewer than the top-2 experts"),
])
def test_a_faulty_row_is_named(change, message):
    experts = skewed(np.random.default_rng(1), 20).astype(np.int64)
    experts[change[:3]] = change[3]
    with pytest.raises(TraceError, match=message):
        build(META, experts)


def test_a_duplicate_is_named():
    experts = skewed(np.random.default_rng(1), 20)
    experts[4, 0] = [5, 5]
    with pytest.raises(TraceError, match=r"row 12 \(token 4, layer 0\): an expert appears twice"):
        build(META, experts)


@pytest.mark.parametrize("value, message", [(np.nan, "not finite"), (-0.5, "negative")])
def test_a_faulty_weight_is_named(value, message):
    weights = np.ones((20, 3, 2))
    weights[2, 1, 1] = value
    with pytest.raises(TraceError, match=rf"row 7 \(token 2, layer 2\): a gate weight is {message}"):
        build(META, skewed(np.random.default_rng(1), 20), weights_NLK=weights)


@pytest.mark.parametrize("settings, message", [
    (dict(layers=[2, 1, 3]), "layers out of order"),
    (dict(layers=[1, 2, 9]), "layer 9 does not exist in a model of 5 layers"),
    (dict(top_k=9), "top_k=9 of num_experts=8"),
    (dict(expert_bytes=[1, 2]), "one positive size for each of the 3 layers"),
    (dict(expert_bytes=[1, 0, 1]), "one positive size"),
])
def test_impossible_metadata_is_refused(settings, message):
    with pytest.raises(TraceError, match=message):
        Meta(**{**dict(model="m", num_experts=8, top_k=2, layers=[1, 2, 3], expert_bytes=[1, 1, 1], model_layers=5), **settings})


@pytest.mark.parametrize("settings, message", [
    (dict(starts=[0, 10, 10, 20], phase=[0, 1, 1]), "starts must rise"),
    (dict(starts=[0, 19], phase=[1]), "starts must rise"),
    (dict(starts=[0, 20], phase=[2]), "phase must be 0"),
    (dict(sequence=[0]), "sequence has 1 entries for 20 tokens"),
])
def test_passes_that_do_not_add_up_are_refused(settings, message):
    with pytest.raises(TraceError, match=message):
        build(META, skewed(np.random.default_rng(1), 20), **settings)


def test_an_empty_trace_is_refused():
    with pytest.raises(TraceError, match="the trace is empty"):
        build(META, np.zeros((0, 3, 2)))


@pytest.mark.parametrize("change, message", [
    (lambda ids, scores: scores.__setitem__((3, 1, 0), np.nan), r"linear at horizon 1, row 10 .*a score is not finite"),
    (lambda ids, scores: scores.__setitem__((3, 1, 1), 9.0), "scores must fall"),
    (lambda ids, scores: ids.__setitem__((3, 1, 0), 8), "outside 0..7"),
    (lambda ids, scores: ids.__setitem__((3, 1, 0), ABSENT), "follows an absent one"),
    (lambda ids, scores: ids.__setitem__((3, 1), 4), "predicted twice"),
])
def test_a_faulty_prediction_is_named(change, message):
    ids, scores = np.tile(np.arange(3), (20, 3, 1)), np.tile([0.5, 0.3, 0.2], (20, 3, 1))
    change(ids, scores)
    with pytest.raises(TraceError, match=message):
        build(META, skewed(np.random.default_rng(1), 20), predictions=[("linear", Prediction(1, ids, scores))])


def test_a_missing_predictor_names_those_there_are(trace):
    with pytest.raises(TraceError, match="no predictor 'ranking' at horizon 1; it holds linear at horizons 2"):
        trace.prediction("ranking", 1)


def test_uniform_usage_is_warned_of():
    rng = np.random.default_rng(0)
    drawn = np.stack([np.stack([rng.permutation(8)[:2] for _ in range(3)]) for _ in range(200)])
    with pytest.warns(TraceWarning, match="uniform"):
        build(META, drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(META, skewed(rng, 200))


# --- readers --------------------------------------------------------------------------------------------------------


def test_route_trace_by_hand(tmp_path):
    path = tmp_path / "t.route.csv"
    path.write_text(ROUTE)
    trace = traces.read(path)
    assert trace.meta.expert_bytes == (100, 200) and trace.starts.tolist() == [0, 2, 3] and trace.phase.tolist() == [0, 1]
    assert trace.experts_NLK.tolist() == [[[3, 1], [-1, -1]], [[2, 3], [0, 1]], [[3, 2], [0, 2]]]
    assert trace.weights_NLK[1, 1].tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("old, new, message", [
    ("route_trace v1", "route_trace v2", "line 1"),
    ("0,0,1,1,1,1,0.1,0,200\n", "", "line 10: 1 experts, not top-2"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,9,0.1,0,200", "line 11: expert id 9 is outside 0..3"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,-1,0.1,0,200", "line 11: expert id -1 is outside"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,0,0.1,0,200", "line 10: an expert appears twice"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,1,nan,0,200", "line 11: the gate weight is not finite"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,2,1,0.1,0,200", "line 11: slot 2 follows 1 experts"),
    ("0,1,2,0,0,3,0.5,1,0\n0,1,2,0,1,2,0.5,1,0\n0,1,2,1,0,0,0.5,1,0\n", "0,1,2,1,0,0,0.5,1,0\n0,1,2,0,0,3,0.5,1,0\n", "line 13: layers out of order"),
    ("0,1,2,1,1,2,0.5,0,200\n", "0,1,2,1,1", "line 15: 5 fields of 9; is the file cut short"),
    ("0,1,2,1,0,0,0.5,1,0\n0,1,2,1,1,2,0.5,0,200\n", "", "line 12: this pass has no row of layer 1; is the file cut short"),
    (ROUTE[ROUTE.index("\n0,0,1,1,0") + 1 :], "", "line 8: this pass has no row of layer 1; is the file cut short"),
    ("layer=1 expert_bytes=200", "layer=1 expert_bytes=-200", "the expert_bytes of layer 1 are negative"),
    ("n_expert=4", "n_expert=0", "t.route.csv: top_k=2 of num_experts=0 is impossible"),
    ("0,1,2,1,1,2,0.5,0,200", "0,1,2,7,1,2,0.5,0,200", "line 15: layer 7 is none of the 2"),
    ("0,1,2,1,1,2,0.5,0,200", "0,1,2,x,1,2,0.5,0,200", "line 15: layer is 'x', not a number"),
    ("slot,expert", "slot,expart", "line 5: the columns expert are missing"),
])
def test_route_trace_faults_name_the_line(tmp_path, old, new, message):
    path = tmp_path / "t.route.csv"
    assert old in ROUTE
    path.write_text(ROUTE.replace(old, new))
    with pytest.raises(TraceError, match=message):
        traces.read(path, "route")


def test_token_lines_by_hand(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"tok": 1, "layers": [[0, 3], [1, 2]]}\n{"tok": 2, "layers": [[0, 1], [3, 2]]}\n')
    trace = traces.read(path, num_experts=4, expert_bytes=[5, 6])
    assert trace.experts_NLK.tolist() == [[[0, 3], [1, 2]], [[0, 1], [3, 2]]] and trace.meta.expert_bytes == (5, 6)


@pytest.mark.parametrize("line, message", [
    ('{"tok": 2, "layers": [[0, 1], [3]]}', "line 2, layer 1: 1 experts, not top-2"),
    ('{"tok": 2, "layers": [[0, 1]]}', "line 2: 1 layers, not 2"),
    ('{"tok": 2, "layers": [[0, 1], [3, ', "line 2: no JSON object with layers; is the file cut short"),
    ('{"tok": 2, "layers": [[0, 1], [3, -1]]}', "line 2, layer 1: .* not all expert ids"),
    ('{"tok": 2, "layers": [[0, 1], [3, 9]]}', "line 2, layer 1: an expert id is not below"),
    ('{"tok": 2, "layers": [[0, 1], [3, 3]]}', "line 2, layer 1: an expert appears twice"),
])
def test_token_line_faults_name_the_line(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text('{"tok": 1, "layers": [[0, 3], [1, 2]]}\n' + line + "\n")
    with pytest.raises(TraceError, match=message):
        traces.read(path, "tokens", num_experts=4)


def test_prompts_by_hand(tmp_path):
    path = tmp_path / "t.json"
    data = dict(model="g", num_layers=1, num_experts=4, top_k=2,
                prompts=dict(a=dict(prefill=[[[0, 1]], [[1, 2]]], decode=[[[3, 0]]]), b=dict(prefill=[[[2, 1]]], decode=[[[1, 0]], [[0, 1]]])))  # fmt: skip
    path.write_text(json.dumps(data))
    trace = traces.read(path)
    assert trace.starts.tolist() == [0, 2, 3, 4, 5, 6] and trace.phase.tolist() == [0, 1, 0, 1, 1] and trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert traces.read(path, prompt="b").experts_NLK[:, 0].tolist() == [[2, 1], [1, 0], [0, 1]]
    with pytest.raises(TraceError, match="no prompt 'c'; it has a, b"):
        traces.read(path, prompt="c")
    data["prompts"]["b"]["decode"][1] = [[0]]
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError, match="b, decode 1, layer 0: 1 experts, not top-2"):
        traces.read(path)


def test_arrays_by_hand(tmp_path):
    path = tmp_path / "t.npz"
    ids = np.array([[[0, 1]], [[1, 2]], [[2, 3]]], np.uint8)
    np.savez(path, ids=ids, seq_offsets=[0, 2, 3], weight_seq=[1], weight_offsets=[0, 1], weights_bf16_bits=np.array([[[0x3F40, 0x3E80]]], np.uint16))
    assert traces.read(path).sequence.tolist() == [0, 0, 1] and traces.read(path).weights_NLK is None
    one = traces.read(path, sequences=[1])
    assert one.experts_NLK.tolist() == [[[2, 3]]] and one.weights_NLK.tolist() == [[[0.75, 0.25]]]
    for asked, message in ((dict(sequences=[1, 1]), "asked for twice"), (dict(sequences=[2]), "numbers of 0..1"), (dict(num_experts=0), "num_experts=0 is impossible")):
        with pytest.raises(TraceError, match=message):
            traces.read(path, **asked)
    whole = path.read_bytes()
    negative = np.where(ids == 2, -1, ids.astype(np.int8))
    for change, message in ((dict(ids=negative), "row 1: a negative expert id"), (dict(weight_offsets=[0]), "weight_offsets must have one entry more")):
        np.savez(path, **{**dict(ids=ids, seq_offsets=[0, 2, 3], weight_seq=[0, 1], weight_offsets=[0, 2, 3], weights_bf16_bits=np.zeros((3, 1, 2), np.uint16)), **change})
        with pytest.raises(TraceError, match=message):
            traces.read(path)
    path.write_bytes(whole[:60])
    with pytest.raises(TraceError, match="cut short"):
        traces.read(path)


def test_colibri_lines_by_hand(tmp_path):
    path = tmp_path / "route.txt"
    path.write_text("0 0 3 5:0.6 1:0.4\n0 1 3 2:0.5 1:0.5\n0 0 4 7:0.9 0:0.1\n0 1 4 7:0.8 6:0.2\n1 0 3 5:0.7 2:0.3\n1 0 4 0:0.5 7:0.5\n")
    trace = traces.read(path, num_experts=8)
    assert trace.meta.layers == (3, 4) and trace.starts.tolist() == [0, 2, 3] and trace.phase.tolist() == [0, 1]
    assert trace.experts_NLK[1].tolist() == [[2, 1], [7, 6]] and trace.weights_NLK[2, 0].tolist() == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("line, message", [
    ("1 0 3 5:0.7", "line 3: 1 experts, not top-2"),
    ("1 0 3 5:0.7 5:0.3", "line 3: an expert appears twice"),
    ("1 0 3 5:0.7 8:0.3", "line 3: an expert id is not below num_experts=8"),
    ("1 0 3 5:0.7 2:nan", "line 3: a gate weight is not finite"),
    ("1 0 3", "line 3: 3 fields"),
    ("0 0 2 5:0.7 2:0.3", "line 3: layers out of order"),
    ("1 0 3 -1:0.7 -1:0.3", "line 3: a negative expert id"),
    ("1 0 3 5:0.7 99999999999999999999:0.3", "line 3: an expert id is not below num_experts=8"),
    ("1 0 3 5:0.7 2:0.3", "line 3: this pass has no row of layer 4; is the file cut short"),
    ("0 0 4 5:0.7 2:0.3", "line 3: call 0, row 0, layer 4 appears twice"),
    ("1 0 3 5 2", "line 3: '5' is not expert:gate"),
])
def test_colibri_faults_name_the_line(tmp_path, line, message):
    path = tmp_path / "route.txt"
    path.write_text(f"0 0 3 5:0.6 1:0.4\n0 0 4 7:0.9 0:0.1\n{line}\n")
    with pytest.raises(TraceError, match=message):
        traces.read(path, num_experts=8)


def test_an_unknown_format_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("hello\n")
    with pytest.raises(TraceError, match="not recognised"):
        traces.read(tmp_path / "t.txt")
    (tmp_path / "e.txt").write_text("")
    with pytest.raises(TraceError, match="the file is empty"):
        traces.read(tmp_path / "e.txt")


@needs_public
def test_the_public_traces_are_read_whole(tmp_path):
    qwen = traces.read(PUBLIC / "bigmoe" / "qwen.route.csv")
    assert (qwen.num_tokens, qwen.num_passes, qwen.num_layers, qwen.meta.num_experts, qwen.meta.top_k) == (156, 129, 48, 128, 6)
    assert (qwen.experts_NLK[:27, 47] == ABSENT).all() and (qwen.experts_NLK[27:] != ABSENT).all()
    assert traces.read(PUBLIC / "granite" / "moe_expert_trace.json").num_tokens == 39 + 44 + 29 + 3 * 64
    assert traces.read(PUBLIC / "olmoe" / "trace_olmoe_299.jsonl", num_experts=64).experts_NLK.shape == (299, 16, 8)
    some = traces.read(PUBLIC / "gptoss20b" / "gptoss20b_routes.npz", sequences=[0, 2])
    assert some.weights_NLK is not None and some.meta.num_experts == 32 and set(some.sequence) == {0, 2}
    traces.save(qwen, tmp_path / "qwen.trace")
    assert (traces.load(tmp_path / "qwen.trace").experts_NLK == qwen.experts_NLK).all()


# --- synthetic ------------------------------------------------------------------------------------------------------

def recall_and_precision(trace, name, h):
    p = trace.prediction(name, h).experts_NLM[:, : trace.num_layers - h]
    true = trace.experts_NLK[:, h:]
    right = ((p[..., :, None] == true[..., None, :]).any(-1) & (p != ABSENT)).sum()
    return right / true.size, right / (p != ABSENT).sum()


def test_a_synthetic_trace_has_the_reuse_recall_and_precision_asked_for():
    trace = traces.synthetic(tokens=1500, layers=4, num_experts=32, top_k=4, skew=0.5, reuse=0.45, seed=1,
                             predictors=dict(even=Accuracy(recall={1: 0.8, 2: 0.6}), broad=Accuracy(recall={1: 0.8}, precision=0.4),
                                             careful=Accuracy(recall={1: 0.5}, precision=0.9)))  # fmt: skip
    assert traces.reuse_rate(trace) == pytest.approx(0.45, abs=0.03)
    for name, h, recall, precision in (("even", 1, 0.8, 0.8), ("even", 2, 0.6, 0.6), ("broad", 1, 0.8, 0.4), ("careful", 1, 0.5, 0.9)):
        assert recall_and_precision(trace, name, h) == pytest.approx((recall, precision), abs=0.03), name


def test_synthetic_mistakes_are_near_misses():
    """Of the experts guessed wrongly most are among the next k, of which chance would put 8 of 56."""
    rng = np.random.default_rng(0)
    logits_NE = generate._logits(500, 64, 0.0, 0.0, rng, np.arange(64))
    guesses, _ = generate._guess(logits_NE, 8, 0.5, rng)
    rank = np.argsort(np.argsort(-logits_NE, axis=1), axis=1)
    ranks = np.take_along_axis(rank, guesses.astype(np.int64), 1)
    assert (ranks[ranks >= 8] < 16).mean() > 0.6 and 0.5 < (ranks < 8).mean() < 0.9


def test_a_synthetic_trace_guesses_across_tokens():
    trace = traces.synthetic(tokens=200, layers=3, num_experts=16, top_k=2, sequences=2, predictors=dict(p=Accuracy(recall={1: 1.0})))
    guesses = np.sort(trace.prediction("p", 1).experts_NLM[:, 2])
    assert (guesses[:199] == np.sort(trace.experts_NLK[1:200, 0])).all() and (guesses[199] == ABSENT).all()


@pytest.mark.parametrize("settings, message", [
    (dict(reuse=0.001), "reuse=0.001 cannot be had"),
    (dict(reuse=1.0), "must stay below 1"),
    (dict(predictors=dict(p=Accuracy(recall={1: 0.02}))), "below what guessing at random gives"),
    (dict(predictors=dict(p=Accuracy(recall={1: 0.9}, precision=0.01))), "guesses of 16 experts"),
    (dict(predictors=dict(p=Accuracy(recall={4: 0.9}))), "beyond the last of 3 layers"),
])
def test_impossible_synthetic_traces_are_refused(settings, message):
    with pytest.raises(TraceError, match=message):
        traces.synthetic(tokens=10, layers=3, num_experts=16, top_k=2, **settings)


def test_spare_guesses_come_after_those_that_recall_counts():
    predictors = {name: traces.Accuracy(recall={1: 0.7}, spare=spare) for name, spare in (("plain", 0), ("spare", 4))}
    trace = traces.synthetic(tokens=400, layers=3, num_experts=32, top_k=4, predictors=predictors)
    true = trace.experts_NLK[:, 1:, :, None]
    found = lambda name, m: (true == trace.prediction(name, 1).experts_NLM[:, :-1, None, :m]).any(-1).mean()  # noqa: E731
    assert trace.prediction("spare", 1).experts_NLM.shape[2] == 8
    assert found("spare", 4) == pytest.approx(0.7, abs=0.03) and found("plain", 4) == pytest.approx(0.7, abs=0.03) and found("spare", 8) > 0.8
    with pytest.raises(traces.TraceError, match="34 guesses of 32 experts"):
        traces.synthetic(tokens=2, layers=2, num_experts=32, top_k=4, predictors={"p": traces.Accuracy(recall={1: 0.7}, spare=30)})
    with pytest.raises(traces.TraceError, match="spare=-1"):
        traces.Accuracy(recall={1: 0.7}, spare=-1)


def test_a_pipe_or_a_device_is_not_replaced_by_a_trace(trace, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="pipe is no regular file"):
        traces.save(trace, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]
