"""`predmoe trace` and `predmoe simulate`: what they print and write, and one clear sentence for whatever is wrong."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commands import refused
from tiny_traces import ROUTE, sound

from predmoe import cli, cli_traces, locality, traces
from predmoe.simulator import Cache, Compute, Disk, Prefetch, replay
from predmoe.traces import Prediction

LINES = '{"tok": 1, "layers": [[0, 3], [1, 2]]}\n{"tok": 2, "layers": [[0, 1], [3, 2]]}\n'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.trace"
    traces.save(sound(), path)
    return path


# --- import, check, info ----------------------------------------------------------------------------------------------

def test_import_writes_a_trace_that_check_finds_sound_and_info_describes(tmp_path, capsys):
    (tmp_path / "t.csv").write_text(ROUTE)
    out = tmp_path / "t.trace"
    assert cli.main(["trace", "import", str(tmp_path / "t.csv"), str(out), "--source", "by hand", "--domain", "none", "--on-policy"]) == 0
    assert capsys.readouterr().out == f"{out}: 3 tokens in 1 sequence, 2 MoE layers x 4 experts, top-2\n"
    trace = traces.load(out)
    assert (trace.meta.source, trace.meta.domain, trace.meta.on_policy, trace.meta.expert_bytes) == ("by hand", "none", True, (100, 200))
    assert cli.main(["trace", "check", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: sound; 3 tokens in 1 sequence, 2 MoE layers x 4 experts, top-2\n"
    assert cli.main(["trace", "info", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    said = dict(re.split("  +", line, maxsplit=1) for line in printed[: printed.index("")])
    assert said["model"] == "tiny" and said["text"] == "the model's own output" and said["expert size"] == "0.0001 MB to 0.0002 MB"
    assert said["prefill"] == "2 tokens in 1 pass" and said["decode"] == "1 token in 1 pass"
    assert printed[printed.index("") + 2] == "reuse        0.5000  share of a token's experts that the token before chose in the same layer"


def test_import_takes_what_a_format_does_not_say(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(LINES)
    out = tmp_path / "t.trace"
    assert cli.main(["trace", "import", str(tmp_path / "t.jsonl"), str(out), "--num-experts", "9", "--expert-bytes", "5,6", "--teacher-forced", "--format", "tokens"]) == 0
    meta = traces.load(out).meta
    assert (meta.num_experts, meta.expert_bytes, meta.on_policy) == (9, (5, 6), False)


def test_info_gives_each_predictors_hit_at_k_and_on_request_the_locality(file, capsys):
    trace = traces.load(file)
    expected = (trace.prediction("linear", 2).experts_NLM[:, :1, :2, None] == trace.experts_NLK[:, 2:, None, :]).any(-2).mean()
    assert cli.main(["trace", "info", str(file), "--locality"]) == 0
    facts, predictors, figures = capsys.readouterr().out.split("\n\n")
    assert "also holds   gate weights" in facts
    head, first, second, legend = predictors.splitlines()   # numbers stand under their column's name, to the right
    assert head.split("  ") == ["predictor", "layers ahead", "guesses per layer", " hit@2"] and len({len(line) for line in (head, first, second)}) == 1
    assert first.split()[:3] == ["linear", "1", "4"] and second.split() == ["linear", "2", "4", f"{expected:.4f}"]
    assert legend == "hit@2: the share of a token's 2 experts of a layer that a predictor has among its first 2 guesses"
    head, *rows = figures.splitlines()
    assert head.split() == ["locality", "value"] and len(rows) == 8
    for row, (name, value) in zip(rows, locality.locality(trace).items()):
        told, words = cli_traces.LOCALITY[name]
        assert row.startswith(told + " ") and row.endswith(f" {value:.4f}  {words}")


@pytest.mark.parametrize("old, new, said", [
    ("0,0,1,1,1,1,0.1,0,200\n", "", "line 10: 1 experts, not top-2"),                       # wrong k
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,0,0.1,0,200", "line 10: an expert appears twice"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,-1,0.1,0,200", "line 11: expert id -1 is outside 0..3"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,4,0.1,0,200", "line 11: expert id 4 is outside 0..3"),
    ("0,0,1,1,1,1,0.1,0,200", "0,0,1,1,1,1,nan,0,200", "line 11: the gate weight is not finite"),
    ("0,1,2,0,0,3,0.5,1,0\n0,1,2,0,1,2,0.5,1,0\n0,1,2,1,0,0,0.5,1,0\n", "0,1,2,1,0,0,0.5,1,0\n0,1,2,0,0,3,0.5,1,0\n", "line 13: layers out of order"),
    ("0,1,2,1,1,2,0.5,0,200\n", "0,1,2,1,1", "line 15: 5 fields of 9; is the file cut short"),
    ("route_trace v1", "route_trace v3", "line 1: '# route_trace v3'"),
    (ROUTE[ROUTE.index("0,0,0,0"):], "", "the trace is empty"),
    ("n_expert=4", "n_expert=four", "do not give n_expert as a number"),
])
def test_a_faulty_csv_is_refused_with_its_line(tmp_path, capsys, old, new, said):
    path = tmp_path / "t.csv"
    assert old in ROUTE
    path.write_text(ROUTE.replace(old, new))
    refused(capsys, ["trace", "import", path, tmp_path / "out.trace"], said)
    assert not (tmp_path / "out.trace").exists()


@pytest.mark.parametrize("text, said", [
    (LINES.replace("[3, 2]", "[3]"), "line 2, layer 1: 1 experts, not top-2"),
    (LINES.replace("[3, 2]", "[3, 3]"), "line 2, layer 1: an expert appears twice"),
    (LINES.replace("[3, 2]", "[3, -2]"), "line 2, layer 1: [3, -2] are not all expert ids"),
    (LINES.replace("[3, 2]", "[3, 4]"), "line 2, layer 1: an expert id is not below num_experts=4"),
    (LINES.replace("[3, 2]", "7"), "line 2: not a list of expert ids for each layer"),
    (LINES[:-9], "line 2: no JSON object with layers; is the file cut short?"),
    ("", "the file is empty"),
    ("hello\n", "the format is not recognised"),
    (LINES.replace("[3, 2]", "[3, true]"), "line 2, layer 1: [3, True] are not all expert ids"),
    (LINES.replace("[3, 2]", f"[3, {10**30}]"), "are not all expert ids"),
])
def test_faulty_token_lines_are_refused_with_their_line(tmp_path, capsys, text, said):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    refused(capsys, ["trace", "import", path, tmp_path / "out.trace", *(["--num-experts", 4] if "layers" in text else [])], said)


def test_a_faulty_per_prompt_file_is_refused(tmp_path, capsys):
    path = tmp_path / "t.json"
    head = {"model": "g", "num_layers": 1, "num_experts": 4, "top_k": 2}
    for prompts, said in (({"a": [1]}, "not a per-prompt trace"), ({"a": {"decode": [[[0, 1], 3]]}}, "a, decode 0: not a list of expert ids"), ({}, "the trace is empty")):
        path.write_text(json.dumps(head | {"prompts": prompts}))
        refused(capsys, ["trace", "import", path, tmp_path / "out.trace"], said)
    path.write_text(json.dumps(head)[:20])
    refused(capsys, ["trace", "import", path, tmp_path / "out.trace"], "not a per-prompt trace, or cut short")


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_bytes(ROUTE.replace("tiny", "t\xefny").encode("latin-1"))
    refused(capsys, ["trace", "import", path, tmp_path / "o"], "not UTF-8 text (byte 26)")
    refused(capsys, ["trace", "import", tmp_path / "none.csv", tmp_path / "o"], "none.csv: No such file or directory")
    refused(capsys, ["trace", "import", tmp_path, tmp_path / "o"], "Is a directory")
    path.write_text(ROUTE)
    refused(capsys, ["trace", "import", path, tmp_path / "nowhere" / "o"], "nowhere: no such folder to write o in")
    refused(capsys, ["trace", "import", path, tmp_path], "is a folder; name a file to write")
    refused(capsys, ["trace", "import", path, tmp_path / "o", "--num-experts", 4], "the format route takes no num_experts; it takes source, domain, on_policy")
    refused(capsys, ["trace", "import", path, tmp_path / "o", "--format", "colibri"], "the format colibri does not say num_experts: give it")
    refused(capsys, ["trace", "import", path, path], "would overwrite a file that the same command reads")
    assert path.read_text() == ROUTE
    refused(capsys, ["trace", "import", path, tmp_path / "o", "--format", "gguf"], "unknown format 'gguf'; it must be one of route, tokens")


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


EXPERTS = sound().experts_NLK
GUESS = sound().prediction("linear", 1)


@pytest.mark.parametrize("change, said", [
    (dict(experts_NLK=changed(EXPERTS, (7, 1, 1), -1)), "row 22 (token 7, layer 2): fewer than the top-2 experts"),                # wrong k
    (dict(experts_NLK=changed(EXPERTS, (7, 1), 5)), "row 22 (token 7, layer 2): an expert appears twice"),
    (dict(experts_NLK=changed(EXPERTS, (7, 1, 0), -3)), "row 22 (token 7, layer 2): a negative expert id"),
    (dict(experts_NLK=changed(EXPERTS, (7, 1, 0), 8)), "row 22 (token 7, layer 2): an expert id is not below num_experts=8"),
    (dict(weights_NLK=changed(np.full((40, 3, 2), 0.5, np.float32), (7, 1, 0), np.nan)), "row 22 (token 7, layer 2): a gate weight is not finite"),
    (dict(predictions={("linear", 1): Prediction(1, changed(GUESS.experts_NLM, (7, 1, 0), 9), GUESS.scores_NLM)}), "linear at horizon 1, row 22 (token 7, layer 2): a predicted id"),
    (dict(predictions={("linear", 1): Prediction(1, GUESS.experts_NLM[:9], GUESS.scores_NLM[:9])}), "predictions of the shape (9, 3, 4) for 40 tokens"),
    (dict(experts_NLK=EXPERTS[:0]), "the trace is empty"),
    (dict(experts_NLK=EXPERTS.astype(np.int32)), "experts is int32, which it never is in a trace"),
    (dict(starts=np.arange(40)), "starts must rise from 0 to the 40 tokens"),
])
@pytest.mark.parametrize("command", [["trace", "check"], ["trace", "info"], ["simulate", "--slots", "4"]], ids=["check", "info", "simulate"])
def test_a_faulty_trace_is_refused_with_its_row(tmp_path, capsys, command, change, said):
    path = tmp_path / "t.trace"
    traces.save(sound(**change), path)
    refused(capsys, [*command[:2], path] if command[0] == "trace" else ["simulate", path, *command[1:]], said)


def test_layers_out_of_order_and_another_version_are_refused(file, tmp_path, capsys):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    for change, said in ((lambda h: h["meta"].update(layers=[2, 1, 3]), "layers out of order: [2, 1, 3]"), (lambda h: h.update(version=2), "trace version 2, this program reads version 1"),
                         (lambda h: h["meta"].pop("top_k"), "the trace is incomplete"),
                         (lambda h: h["meta"].update(num_experts=8.5), "num_experts=8.5 must be a whole number"),
                         (lambda h: h["meta"].update(expert_bytes=[10, 10**30, 10]), "none above 35184372088832 bytes"),
                         (lambda h: h.clear(), "a safetensors file, but no trace")):  # fmt: skip
        entries = json.loads(data[8 : 8 + length])
        header = json.loads(entries["__metadata__"]["predmoe_trace"])
        change(header)
        entries["__metadata__"]["predmoe_trace"] = json.dumps(header)
        text = json.dumps(entries).encode()
        (tmp_path / "other.trace").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        refused(capsys, ["trace", "check", tmp_path / "other.trace"], said)


def test_whatever_a_file_holds_check_ends_in_a_sentence(file, tmp_path, capsys):
    data, other = file.read_bytes(), tmp_path / "other.trace"
    header = lambda value: struct.pack("<Q", len(json.dumps(value))) + json.dumps(value).encode()  # noqa: E731
    for content in (b"", b"ab", data[:40], data[:500], data[:-1], b"not a trace at all, but text\n", os.urandom(300), header([1]), header({"experts": 3}), header({"experts": {"dtype": "I16"}}),
                    header({"experts": {"dtype": "I16", "shape": [2], "data_offsets": [0, 3]}}) + b"abc",
                    *(header({"experts": {"dtype": "I16", "shape": shape, "data_offsets": [0, 2]}}) + b"ab" for shape in (["a"], [-1, -1])), header({"__metadata__": {"predmoe_trace": "{"}}), ROUTE.encode()):  # fmt: skip
        other.write_bytes(content)
        refused(capsys, ["trace", "check", other], "other.trace")
    refused(capsys, ["trace", "check", tmp_path / "none.trace"], "none.trace: No such file or directory")
    refused(capsys, ["trace", "check", tmp_path], "Is a directory")


def test_uniform_usage_is_one_line_of_warning(tmp_path, capsys):
    rng = np.random.default_rng(0)
    drawn = np.stack([np.stack([rng.permutation(8)[:2] for _ in range(3)]) for _ in range(200)])
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"tok": n, "layers": layers}) + "\n" for n, layers in enumerate(drawn.tolist())))
    assert cli.main(["trace", "import", str(tmp_path / "t.jsonl"), str(tmp_path / "t.trace")]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("predmoe: warning: expert usage is uniform") and printed.err.count("\n") == 1 and "200 tokens" in printed.out


# --- simulate ---------------------------------------------------------------------------------------------------------

def test_simulate_is_a_grid_of_replays_as_table_csv_and_json(file, tmp_path, capsys):
    csv, out = tmp_path / "t.csv", tmp_path / "t.json"
    options = ["--slots", "6", "12", "--policy", "lru", "belady", "--predictor", "demand", "linear", "--horizon", "1", "1+2", "--budget", "2", "--gb-per-s", "0.00001", "inf", "--latency-ms", "0.2",
               "--attention-ms", "0.5", "--warmup", "3", "--csv", str(csv), "--json", str(out), "--quiet"]  # fmt: skip
    assert cli.main(["simulate", str(file), *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.count("\n") == 1 + 2 * 2 * 2 * (1 + 2)
    table, rows = pd.read_csv(csv), json.loads(out.read_text())["rows"]
    assert len(table) == len(rows) == 24 and set(printed.out.split("\n")[0].split()) >= {"slots", "policy", "predictor", "horizon", "gb_per_s", "tok_s", "stall_ms"}
    line = next(r for r in rows if (r["slots"], r["policy"], r["predictor"], r["horizon"], r["gb_per_s"]) == (12, "belady", "linear", [1, 2], 0.00001))
    outcome = replay(traces.load(file), Cache(slots=12, policy="belady"), Disk(gb_per_s=0.00001, latency_ms=0.2), compute=Compute(attention_ms=0.5),
                     prefetch=Prefetch(source="linear", horizon=(1, 2), budget=2), warmup=3)  # fmt: skip
    assert {name: line[name] for name in outcome.summary()} == outcome.summary()
    demand = next(r for r in rows if r["predictor"] == "demand" and r["gb_per_s"] == "inf")
    assert demand["horizon"] is None and json.loads(out.read_text())["trace"]["on_policy"] is False


@pytest.mark.parametrize("options, said", [
    (["--slots", 0], "slots=0: a cache needs at least one slot"),
    (["--slots", 1], "top-2"),                                                                                 # below one top-k set
    (["--bytes", 25], "top-2"),
    (["--slots", 4, "--latency-ms", "-1"], "--latency-ms: -1 is not a finite number of at least 0"),
    (["--slots", 4, "--attention-ms", "-0.5"], "--attention-ms: -0.5 is not"),
    (["--slots", 4, "--expert-ms", "nan"], "--expert-ms: nan is not"),
    (["--slots", 4, "--gb-per-s", "0"], "--gb-per-s: 0 is not a number above 0"),
    (["--slots", 4, "--gb-per-s", "-2"], "--gb-per-s: -2 is not a number above 0"),
    (["--slots", 4, "--horizon", 3], "horizon 3 is beyond the last layer: the trace has 3 MoE layers"),
    (["--slots", 4, "--horizon", 0], "horizon=0 must be"),
    (["--slots", 4, "--predictor", "ranking"], "holds no predictor 'ranking' at horizon 1; it holds linear at horizons 1, 2"),
    (["--slots", 4, "--predictor", "linear", "--budget", 3], "linear has 4 guesses per layer; top-2 and a budget of 3 need 5"),
    (["--slots", 4, "--threshold", 0.5], "the oracle has no scores"),
    (["--slots", 4, "--policy", "clever"], "policy='clever' is unknown; choose one of lru, fifo"),
    (["--slots", 4, "--guard", "dog"], "guard='dog' is unknown"),
    (["--slots", 4, "--warmup", 40], "warmup=40 must leave some of the trace's 40 passes"),
    (["--slots", 4, "--cold", "often"], "cold='often' is unknown"),
    (["--slots", 4, "--bytes", 100], "either --slots or --bytes"),
    ([], "either --slots or --bytes"),
    (["--slots", "99999999999999999999"], "slots=99999999999999999999 must be a whole number of at least 1 and at most"),
    (["--slots", 4, "--lanes", 0], "lanes=0 must be a whole number of at least 1"),
    (["--slots", 4, "--lanes", 1000000000], "lanes=1000000000 must be a whole number of at least 1 and at most 65536"),
    (["--slots", 4, "--noise", "nan"], "--noise: nan is not"),
    (["--slots", 4, "--noise", "9"], "noise=9.0: the logarithms of read times spread by at most 5"),
    (["--slots", 4, "--predictor", "linear", "--threshold", "nan"], "--threshold: nan is not a finite number"),
    (["--slots", 4, "--predictor", "linear", "--budget", "-1"], "budget=-1 must be a whole number of at least 0"),
    (["--slots", 4, "--predictor", "none"], "on the command line its name is demand"),
    (["--slots", 4, "--pinned", 3], "4 slots, 3 of them pinned, cannot hold one top-2 set"),
    (["--slots", 4, "--warmup", "-1"], "warmup=-1 must leave some"),
    (["--slots", 4, "--workers", 0], "workers=0: a sweep needs at least one"),
    (["--slots", 4, "--csv", "/nowhere/t.csv"], "/nowhere: no such folder to write t.csv in"),
    (["--slots", 4, "--joules-per-gb", "-1"], "--joules-per-gb: -1 is not a finite number of at least 0"),
    (["--slots", 4, "--predictor", "demand", "--horizon", 1, 2, "--no-promote"], "--horizon, --no-promote would have no effect where --predictor asks for demand alone"),
    (["--slots", 4, "--predictor", "demand", "--no-expire", "--cross-token"], "--no-expire, --cross-token would have no effect where"),
    (["--slots", 4, "--joules-per-gb", "inf"], "--joules-per-gb: inf is not a finite number of at least 0"),
])
def test_a_simulation_that_cannot_be_run_is_one_sentence(file, capsys, options, said):
    refused(capsys, ["simulate", file, "--quiet", *options], said)


@pytest.mark.parametrize("option, value", [("--horizon", "1+x"), ("--slots", "many"), ("--gb-per-s", "fast")])
def test_what_is_no_number_is_refused_before_anything_is_read(file, capsys, option, value):
    refused(capsys, ["simulate", file, option, value], option)
    refused(capsys, ["simulate", file, option, value], value)


def test_promotion_can_be_switched_off(file, tmp_path, capsys):
    """Four guesses a layer on a slow disk leave stale ones in the queue, behind which a demanded one waits longer than before them."""
    out, options = tmp_path / "t.csv", ["--slots", "8", "--predictor", "linear", "--budget", "2", "--gb-per-s", "0.00001", "--latency-ms", "1", "--no-expire", "--quiet"]
    tables = []
    for more in ([], ["--no-promote"]):
        assert cli.main(["simulate", str(file), *options, *more, "--csv", str(out)]) == 0
        tables.append(pd.read_csv(out).iloc[0])
    trace, machine = traces.load(file), (Cache(slots=8), Disk(gb_per_s=0.00001, latency_ms=1.0))
    for table, promote in zip(tables, (True, False)):
        outcome = replay(trace, *machine, prefetch=Prefetch(source="linear", budget=2, expire=False, promote=promote))
        assert table.stall_ms == pytest.approx(outcome.summary()["stall_ms"], rel=1e-12)
    assert tables[0].stall_ms != tables[1].stall_ms


def test_a_prefetch_that_issues_nothing_is_one_line_of_warning(file, capsys):
    assert cli.main(["simulate", str(file), "--slots", "6", "8", "--predictor", "linear", "--threshold", "0.99", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "predmoe: warning: prefetch is on (linear) but nothing was issued\n" and printed.out.count("\n") == 3


def test_energy_is_what_the_read_bytes_cost(file, tmp_path, capsys):
    out = tmp_path / "t.csv"
    assert cli.main(["simulate", str(file), "--slots", "6", "--joules-per-gb", "2.5", "--csv", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out.split("\n")[0].split()[-1] == "energy_j"
    table, trace = pd.read_csv(out), traces.load(file)
    outcome = replay(trace, Cache(slots=6), Disk())
    assert table.energy_j[0] == pytest.approx(2.5e-9 * outcome.read_bytes / trace.num_tokens) and (table.energy_j > 0).all()
    assert table.energy_j.to_numpy() == pytest.approx(2.5e-3 * (table.demand_mb + table.prefetch_mb).to_numpy())


@pytest.mark.parametrize("option", ["--csv", "--json"])
def test_a_table_that_cannot_be_written_is_told_before_the_work(file, tmp_path, capsys, monkeypatch, option):
    monkeypatch.setattr("predmoe.simulator.sweep", lambda *_, **__: pytest.fail("it works"))
    ask = lambda out, said: refused(capsys, ["simulate", file, "--slots", 6, "--quiet", option, out], said)  # noqa: E731
    ask(tmp_path, f"{tmp_path} is a folder; name a file to write")
    ask(file, "would overwrite a file that the same command reads")
    ask(tmp_path / ("x" * 300), "cannot be written: File name too long")
    ask("/proc/t", "cannot be written")
    refused(capsys, ["simulate", file, "--slots", 6, "--quiet", "--csv", tmp_path / "t", "--json", tmp_path / "t"], "would overwrite")
    before = file.read_bytes()
    assert sorted(tmp_path.iterdir()) == [file] and file.read_bytes() == before


def test_asking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path):
    (tmp_path / "old").write_text("kept")
    cli_traces.may_write(tmp_path / "old", tmp_path / "new", None, Path("/dev/null"), Path("/dev/null"))
    cli_traces.may_write(trace=tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept" and not (tmp_path / "new").exists()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    cli_traces.may_write(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"] and (tmp_path / "link").is_symlink()


def test_a_file_in_a_folder_that_takes_no_new_one_is_refused_before_the_work(file, tmp_path, capsys, monkeypatch):
    """It is replaced by one that is written beside it. (As root every folder takes one: hence the double.)"""
    asked = []

    def refusing(*, dir):
        asked.append(dir)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cli_traces.tempfile, "NamedTemporaryFile", refusing)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "old")
    refused(capsys, ["simulate", file, "--slots", 6, "--csv", tmp_path / "link"], f"{tmp_path / 'link'} cannot be written: Permission denied")
    assert asked == [tmp_path / "folder"] and (tmp_path / "folder" / "old").read_text() == "kept"
    cli_traces.may_write(Path("/dev/null"))
    assert len(asked) == 1


@pytest.mark.parametrize("option", ["--csv", "--json"])
def test_a_disk_that_fills_up_leaves_the_table_on_the_screen(file, capsys, option):
    assert cli.main(["simulate", str(file), "--slots", "6", "--quiet", option, "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "oracle" in printed.out and printed.err == "predmoe: /dev/full cannot be written: No space left on device; name a file elsewhere and run the same command again\n"


def test_traces_are_not_written_to_devices(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("predmoe.traces.read", lambda *_, **__: pytest.fail("it works"))
    refused(capsys, ["trace", "import", file, "/dev/full"], "/dev/full is no regular file, and a trace replaces what it is written over; name another file")


@pytest.mark.parametrize("compiled, quiet, told", [(True, False, 0), (False, False, 1), (False, True, 0)])
def test_a_first_simulation_says_that_it_compiles(file, capsys, monkeypatch, compiled, quiet, told):
    monkeypatch.setattr("predmoe.simulator.is_compiled", lambda: compiled)
    assert cli.main(["simulate", str(file), "--slots", "6", *["--quiet"] * quiet]) == 0
    assert capsys.readouterr().err.count("predmoe: compiling the simulator") == told


def test_machine_code_that_is_there_is_found(tmp_path):
    """In another process, whose cache folder is empty: not there, and after the first replay there, for the next process as well."""
    ask = ("from predmoe import simulator, traces; import numpy as np; before = simulator.is_compiled(); "
           "simulator.count_keys(np.array([1, 2]), 1); print(before, simulator.jit.is_compiled(simulator.counting._lru_misses))")  # fmt: skip
    first = "from predmoe.simulator import counting, jit; print(jit.is_compiled(counting._lru_misses))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    said = [subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True).stdout.split() for text in (first, ask, first)]
    assert said == [["False"], ["False", "True"], ["True"]]


def test_simulate_shows_its_progress(file, capsys):
    assert cli.main(["simulate", str(file), "--slots", "6"]) == 0
    assert "2/2" in capsys.readouterr().err


# --- record -----------------------------------------------------------------------------------------------------------

def test_record_asks_for_the_arms_run_and_says_where_the_trace_lies(house, monkeypatch, capsys):
    from predmoe import config, recording

    asked = []
    monkeypatch.setattr(recording, "get_or_record", lambda run, posthoc, what, **where: asked.append((run, posthoc, what, where)) or sound())
    assert cli.main(["trace", "record", "--profile", "cpu", "--arm", "joint", "--seed", "2", "--set", "train.steps=10", "--generated", "--tokens", "40", "--generation-seed", "5", "--predictors", "linear"]) == 0
    run, posthoc, what, where = asked[0]
    assert run == config.tier("cpu", seed=2, objective={"lambda_pred": 0.3}, train={"steps": 10}) and posthoc == config.TIERS["cpu"].posthoc
    assert what == recording.Recording(kind="generated", tokens=40, seed=5, predictors=("linear",))
    assert where["path"] == Path(house.outputs) / "cpu" / "traces" / "joint-generated.trace.safetensors" and where["store"] == house.outputs / "cpu" / "runs"
    assert capsys.readouterr().out == f"{where['path']}: 40 tokens in 1 sequence, 3 MoE layers x 8 experts, top-2\n"
    assert cli.main(["trace", "record", "--out", "x.trace"]) == 0 and asked[1][0] == config.tier("smoke", seed=0) and asked[1][3]["path"] == Path("x.trace")


@pytest.mark.parametrize("options, said", [
    (["--profile", "huge"], "tier='huge' is unknown"),
    (["--prompt", 500], "prompt=500 lie in 1..95"),
    (["--temperature", 0], "--temperature would have no effect on held-out text, where nothing is drawn: give --generated, or leave it out"),
    (["--generation-seed", 0, "--temperature", 1], "--temperature, --generation-seed would have no effect on held-out text"),
    (["--predictors", "psychic"], "must be different ones of linear"),
])
def test_a_recording_that_cannot_be_made_is_one_sentence(house, capsys, options, said):
    refused(capsys, ["trace", "record", *options], said)
