"""The explorer's numbers are the simulator's, its extremes are sentences, its table of positions holds what it would simulate, and its pages are whole."""

import base64
import dataclasses
import errno
import hashlib
import io
import json
import warnings
import zipfile
import zlib

import bs4
import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from predmoe import cache_study, execute, explore, explorer_grid, explorer_widget, plots_explorer, report, results, simulator, traces
from predmoe.config import ConfigError
from predmoe.explore import Held, Settings
from predmoe.simulator import Cache, Compute, Disk, Prefetch, SimulationError
from predmoe.traces import Accuracy, TraceError

MB = 1_000_000


def trace(tokens=60, layers=4, **more):
    predictors = {name: Accuracy(recall={1: 0.7, 2: 0.6}, spare=2) for name in ("linear", "ranking", "next_router")}
    return traces.synthetic(**{"tokens": tokens, "layers": layers, "num_experts": 8, "top_k": 2, "expert_bytes": 5 * MB, "prompt": 6, "predictors": predictors} | more)


@pytest.fixture(scope="module")
def held():
    return Held(trace(), "Sixty tokens.")


def settings(**more):
    return Settings(**{"trace": "t", "arm": "a", "predictor": "ranking", "slots": 8, "gb_per_s": 2.0, "layer_ms": 2.0} | more)


@pytest.fixture
def widget(held):
    return explorer_widget.explorer({"t": {"a": held, "b": Held(trace(seed=1), "Others.")}, "bare": {"c": Held(trace(predictors={}), "No guesses.")}})


# --- a view ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("more", [{}, {"horizon": 2, "budget": 2}, {"policy": "lfu", "guard": "window"}, {"slots": 3, "latency_ms": 1.0}, {"policy": "belady", "gb_per_s": 12.0}])
@pytest.mark.filterwarnings("ignore:prefetch is on:predmoe.simulator.SimulationWarning")
def test_each_number_is_the_simulators(held, more):
    s = settings(**more)
    shown = {row["row"]: row for row in explore.view(held, s)["rows"]}
    cache = Cache(slots=s.slots, policy=s.policy, streaming=True)
    disk, compute = Disk(latency_ms=s.latency_ms, gb_per_s=s.gb_per_s), Compute(attention_ms=0.0, expert_ms=0.0, shared_ms=s.layer_ms)
    ahead = {"demand": None, "router": Prefetch(source="next_router", horizon=s.horizon, budget=s.budget, guard=s.guard),
             "predictor": Prefetch(source="ranking", horizon=s.horizon, budget=s.budget, guard=s.guard), "oracle": Prefetch(horizon=s.horizon, guard=s.guard)}  # fmt: skip
    for row, prefetch in ahead.items():
        outcome = simulator.replay(held.trace, cache, disk, compute=compute, prefetch=prefetch)
        line = outcome.summary()
        assert shown[row]["tok_s"] == line["tok_s"] and shown[row]["hit_rate"] == line["hit_rate"]
        assert shown[row]["stall_ms"] == line["stall_ms"] and shown[row]["wasted_mb"] == line["wasted_mb"]
        assert shown[row]["read_mb"] == pytest.approx(line["demand_mb"] + line["prefetch_mb"])


def test_the_timeline_adds_up_to_the_passes_it_shows(held):
    first, end = held.shown
    outcome = simulator.replay(held.trace, *settings().machine()[:2], compute=settings().machine()[2])
    drawn = explore.view(held, settings())["timeline"][0]
    assert drawn["ms"] == pytest.approx(outcome.end_S[end - 1] - outcome.start_S[first])
    stalled = sum(length for kind, _, length in drawn["rows"] if kind == 1) * drawn["ms"] / explore.UNITS
    assert stalled == pytest.approx(outcome.stall_S[first:end].sum(), rel=0.02)
    assert drawn["ends"][-1] == explore.UNITS and len(drawn["ends"]) == end - first == 3
    assert {kind for kind, *_ in explore.view(held, settings())["timeline"][1]["rows"]} == {0, 1, 2, 3}


def test_the_maps_predictors_are_as_good_as_they_say(held):
    for recall, precision, guesses, with_map in held.guesses(1):
        (point,) = explore.points(with_map, settings(predictor="map", budget=guesses - 2))
        assert point["recall"] == pytest.approx(recall, abs=0.08) and point["precision"] == pytest.approx(precision, abs=0.08)


def test_on_the_map_perfection_is_the_oracle(held):
    s = settings()
    gain = explore.gain_map(held, s)["gain"]
    cache, disk, compute = s.machine()
    base, oracle = (simulator.replay(held.beginning, cache, disk, compute=compute, prefetch=p).tokens_per_s for p in (None, Prefetch()))
    assert gain[-1][-1] == pytest.approx(oracle / base - 1, abs=0.01)   # right guesses are read in another order
    assert gain[0][0] < gain[-1][-1]


def test_the_map_leaves_out_a_prompt_that_is_too_long_for_it(held):
    long = Held(trace(prompt=2000))
    assert long.without_prompt and (long.beginning.phase == traces.DECODE).all() and long.beginning.num_tokens == 60
    assert not held.without_prompt and held.beginning.phase[0] == traces.PREFILL
    assert explore.gain_map(long, settings())["prompt"] and not explore.gain_map(held, settings())["prompt"]


def test_more_experts_than_a_map_can_be_drawn_for_are_a_sentence():
    ids = np.arange(400)[:, None, None] + np.arange(4)[None, :, None] * 500
    wide = Held(traces.build(traces.Meta(model="", num_experts=30_000, top_k=1, layers=range(4), expert_bytes=[MB] * 4), ids))
    drawn = explore.gain_map(wide, settings(predictor="none"))
    assert "30,000 experts in each of 4 layers takes too much memory" in drawn["problem"] and not any(v for line in drawn["gain"] for v in line)


def test_a_predictors_place_on_the_map_is_its_hit_rate(held):
    (router, point) = explore.points(held.trace, settings())
    from predmoe.locality import hit_at_k

    assert point["recall"] == point["precision"] == pytest.approx(hit_at_k(held.trace, "ranking", 1)) and router["row"] == "router"


@pytest.mark.parametrize("more, row, words", [
    ({"horizon": 4}, "oracle", "beyond the last layer, so there is nothing to foretell (of 4 MoE layers, at most 3)"), ({"horizon": 3}, "predictor", "holds no predictor 'ranking' at horizon 3"),
    ({"budget": 5}, "predictor", "guesses per layer"), ({"predictor": "none"}, "predictor", "holds no guesses"),
])  # fmt: skip
def test_what_cannot_be_foretold_is_a_sentence_in_its_row(held, more, row, words):
    shown = explore.view(held, settings(**more))
    line = next(line for line in shown["rows"] if line["row"] == row)
    assert words in line["problem"] and "tok_s" not in line and shown["rows"][0]["tok_s"] > 0
    json.dumps(shown, allow_nan=False)


@pytest.mark.parametrize("more", [{"slots": 1}, {"slots": 32}, {"latency_ms": 0.0}, {"layer_ms": 0.0}, {"slots": 32, "latency_ms": 0.0, "layer_ms": 0.0, "gb_per_s": 25.0},
                                  {"slots": 1, "policy": "static"}, {"slots": 1, "policy": "least-stale", "budget": 2}])  # fmt: skip
def test_extremes_have_an_answer(held, more):
    shown = explore.view(held, settings(**more))
    assert all(row.get("tok_s") or row.get("note") or row.get("problem") for row in shown["rows"])
    json.dumps(shown, allow_nan=False)


def test_a_guard_that_holds_everything_back_says_so(held):
    rows = explore.view(held, settings(guard="window", gb_per_s=0.5, layer_ms=0.5))["rows"]
    assert "held back" in next(row for row in rows if row["row"] == "predictor")["note"]


@pytest.mark.parametrize("more, error", [({"slots": 0}, SimulationError), ({"policy": "best"}, SimulationError), ({"gb_per_s": -1.0}, SimulationError),
                                         ({"slots": 2.5}, ConfigError), ({"gb_per_s": float("nan")}, ConfigError), ({"horizon": True}, ConfigError)])  # fmt: skip
def test_settings_refuse_nonsense(more, error):
    with pytest.raises(error):
        settings(**more)


def test_settings_from_a_browser_name_their_fields():
    with pytest.raises(ConfigError, match="the settings must be"):
        Settings.read({"trace": "t", "arm": "a", "predictor": "ranking", "speed": 3})
    assert Settings.read({"trace": "t", "arm": "a", "predictor": "ranking", "slots": 4.0}).slots == 4   # JavaScript has one kind of number


def test_a_trace_without_decoding_is_refused():
    with pytest.raises(TraceError, match="no decode pass"):
        Held(trace().passes(0, 1))


# --- the widget -----------------------------------------------------------------------------------------------------------

def test_a_change_is_simulated(widget, held):
    before = widget.view["rows"][1]["tok_s"]
    widget.settings = widget.settings | {"gb_per_s": 0.5}
    assert widget.view["rows"] == explore.view(held, Settings.read(widget.settings))["rows"] and widget.view["rows"][1]["tok_s"] < before


def test_another_trace_brings_its_own_controls(widget):
    widget.settings = widget.settings | {"trace": "bare"}
    assert widget.settings["arm"] == "c" and widget.settings["predictor"] == "none" and widget.view["about"] == "No guesses."
    assert {c["name"]: c["values"] for c in widget.controls}["budget"] == [0]
    assert [bool(row.get("problem")) for row in widget.view["rows"]] == [False, True, True, False]


def test_the_cache_keeps_its_share_on_a_model_of_another_size(held):
    large = Held(trace(layers=8), "Twice as large.")
    widget = explorer_widget.explorer({"t": {"a": held}, "large": {"a": large}}, slots=16)
    widget.settings = widget.settings | {"trace": "large"}
    assert widget.settings["slots"] == 32


@pytest.mark.parametrize("change, words", [({"trace": "nowhere"}, "no trace 'nowhere'"), ({"slots": -3}, "cache needs at least one slot"), ({"latency_ms": "long"}, "not a number")])
def test_what_is_wrong_is_a_sentence_in_the_widget(widget, change, words):
    widget.settings = widget.settings | change
    assert words in widget.view["problem"] and widget.view["rows"] == []
    widget.settings = {name: value for name, value in widget.settings.items() if name != "latency_ms"} | {"trace": "t", "arm": "a", "slots": 4}
    assert widget.view["problem"] is None


def test_a_fault_of_the_program_is_shown_and_told_to_the_log(widget, monkeypatch):
    monkeypatch.setattr(explore, "view", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        widget.settings = widget.settings | {"slots": 5}
    assert "ZeroDivisionError" in widget.view["problem"]


def chosen(widget, name, content):
    widget._receive(widget, {"kind": "import", "name": name}, [memoryview(content)])


def test_a_file_of_ones_own_is_replayed(widget, tmp_path):
    traces.save(trace(tokens=20), tmp_path / "mine.trace.safetensors")
    chosen(widget, "mine.trace.safetensors", (tmp_path / "mine.trace.safetensors").read_bytes())
    assert widget.settings["trace"] == "imported: mine.trace.safetensors" and widget.view["problem"] is None and "26 tokens" in widget.view["about"]
    lines = [json.dumps({"tok": n, "layers": [[n % 4, 4], [1, 2]]}) for n in range(9)]
    chosen(widget, "mine.jsonl", "\n".join(lines).encode())
    assert widget.settings["trace"] == "imported: mine.jsonl" and "19 MB are assumed" in widget.view["about"] and widget.view["rows"][3]["tok_s"] > 0


@pytest.mark.parametrize("name, content, words", [
    ("damaged.trace.safetensors", b"\x08\0\0\0\0\0\0\0{broken}", "damaged.trace.safetensors: not a trace file"), ("empty.csv", b"", "empty.csv: the file is empty"),
    ("notes.txt", b"hello\n", "format is not recognised; it must be a trace of predmoe (.safetensors), a route_trace CSV"), ("short.csv", b"# route_trace v1\n# n_expert=4 n_expert_used=2 n_layer=1\n", "the trace is empty"),
    ("é" * 255 + ".csv", b"", "é.csv: the file is empty"), ("a\0b\ud800.csv", b"", ".csv: the file is empty"), ("..", b"x", "format is not recognised"), ("x." + "y" * 250, b"", "the file is empty"),
    ("../../etc/bad.jsonl", b'{"tok": 0, "layers": [[1, 1]]}\n', "bad.jsonl"),
])  # fmt: skip
def test_a_file_that_is_no_trace_is_a_sentence_with_its_name_only(widget, name, content, words):
    before = widget.settings
    chosen(widget, name, content)
    assert words in widget.view["problem"] and "/tmp" not in widget.view["problem"] and "--format" not in widget.view["problem"] and widget.settings == before


def test_a_file_for_which_there_is_no_space_is_a_sentence(widget, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(explorer_widget.Path, "write_bytes", full)
    chosen(widget, "mine.csv", b"x")
    assert widget.view["problem"].startswith("mine.csv: the kernel cannot keep a copy to read (No space left on device): free some space in ")


def test_the_same_unsound_file_twice_is_answered_twice(widget):
    """An answer that is the last one over again would not be sent, and the browser would wait."""
    told = []
    widget.observe(lambda change: told.append(change.new["problem"]), "view")
    chosen(widget, "empty.csv", b"")
    chosen(widget, "empty.csv", b"")
    assert told == ["empty.csv: the file is empty"] * 2


def test_lines_that_do_not_say_how_many_experts_there_are_are_read_and_it_is_said(widget):
    lines = [f"{call} 0 {layer} {call % 5}:0.6 {5 + layer}:0.4" for call in range(12) for layer in range(3)]
    chosen(widget, "route.txt", "\n".join(lines).encode())
    assert widget.view["problem"] is None and "3 MoE layers of 8 experts of 19 MB" in widget.view["about"] and "8 are assumed" in widget.view["about"]
    chosen(widget, "cut.txt", "\n".join(lines)[:-8].encode())
    assert widget.view["problem"].startswith("cut.txt, line 36: ")


def test_a_small_file_that_unpacks_to_a_large_one_is_a_sentence(widget):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("ids.npy", bytes(explorer_widget.LARGEST_UNPACKED + 1))
    chosen(widget, "bomb.npz", packed.getvalue())
    assert "bomb.npz: unpacks to 256 MB" in widget.view["problem"]


def test_recorded_traces_are_offered_where_they_are_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    assert list(explorer_widget.sources("smoke")) == ["synthetic, our shape", "synthetic, large model"]
    for model in cache_study.MODELS:
        path = cache_study.trace_file("smoke", model)
        path.parent.mkdir(parents=True, exist_ok=True)
        traces.save(trace(), path)
    offered = explorer_widget.sources("smoke")
    assert next(iter(offered)) == "ours, given text"
    first = explorer_widget.explorer(offered)
    assert set(first.held("ours, given text", "joint").trace.meta.expert_bytes) == {19_000_000} and "here each counts as 19 MB" in first.view["about"]


# --- the table for pages ------------------------------------------------------------------------------------------------------

GRID = {"policy": ("lru",), "horizon": (1, 2, 9), "budget": (0, 1), "gb_per_s": (1.0, 5.0), "latency_ms": (0.1,), "layer_ms": (2.0,)}


@pytest.fixture(scope="module")
def table(held):
    widget = explorer_widget.explorer({"t": {"a": held, "b": Held(trace(seed=1), "Others.")}})
    return widget, json.loads(json.dumps(explorer_grid.tabulate(widget, grid=GRID), allow_nan=False))


def unpacked(table):
    block = zlib.decompress(base64.b64decode(table["packed"]))
    return {name: np.frombuffer(block, f"<{kind}", count, start) for name, kind, start, count in table["arrays"]}


def test_the_table_holds_what_would_be_simulated(table):
    widget, table = table
    arrays, values = unpacked(table), {c["name"]: c["values"] for c in table["controls"]}
    assert values["horizon"] == [1, 2] and values["slots"] == [4, 8, 16] and len(values["predictor"]) == 2
    for position in ({}, {"arm": "b", "horizon": 2, "gb_per_s": 1.0}, {"slots": 16, "budget": 1, "predictor": "linear"}):
        at = table["settings"] | position
        view = explore.view(widget.held(at["trace"], at["arm"]), Settings(**at))
        for row in view["rows"]:
            where = table["rows"][row["row"]]
            index = 0
            for name in where["axes"]:
                index = index * len(values[name]) + values[name].index(at[name])
            start = where["from"] + index * len(table["columns"])
            assert arrays["floats"][start : start + len(table["columns"])] == pytest.approx([row[name] for name in table["columns"]], rel=1e-6)
        drawn = view["timeline"][0]
        where, index = table["rows"]["demand"], 0
        for name in where["axes"]:
            index = index * len(values[name]) + values[name].index(at[name])
        first, last = arrays["offsets"][where["lines"] + index], arrays["offsets"][where["lines"] + index + 1]
        kinds, starts, lengths = arrays["kinds"][first:last], np.cumsum(arrays["starts"][first:last]), arrays["lengths"][first:last]
        assert sorted(zip(kinds[kinds < 4], starts[kinds < 4], lengths[kinds < 4])) == sorted(map(tuple, drawn["rows"])) and arrays["spans"][where["lines"] + index] == pytest.approx(drawn["ms"])


def test_the_table_keeps_the_guard_that_the_widget_stands_at(held):
    """05's explorer has the guard on, as its tables have: the page gives the same speeds, and says that the guard is held."""
    widget = explorer_widget.explorer({"t": {"a": held}}, guard="window", gb_per_s=1.0, layer_ms=2.0)   # a read of 5 MB outlasts a layer
    table = explorer_grid.tabulate(widget, grid=GRID | {"horizon": (1,), "budget": (0,), "gb_per_s": (1.0,)})
    at, where = table["settings"] | table["fixed"], table["rows"]["predictor"]
    assert table["fixed"] == {"guard": "window"}
    values, index = {c["name"]: c["values"] for c in table["controls"]}, 0
    for name in where["axes"]:
        index = index * len(values[name]) + values[name].index(at[name])
    speed = unpacked(table)["floats"][where["from"] + index * len(table["columns"])]
    guarded, unguarded = (next(row for row in explore.view(held, Settings(**at | {"guard": guard}))["rows"] if row["row"] == "predictor")["tok_s"] for guard in ("window", "none"))
    assert speed == pytest.approx(guarded, rel=1e-6) and guarded != unguarded


@pytest.mark.parametrize("marks", [[(2.0, 1.0)], [(2.0, 1.0), (2.05, 0.7)], [(2.0, 1.3), (1.6, 1.0)]])
def test_a_number_of_the_map_stands_clear_of_the_markers(marks):
    dx, dy = plots_explorer._clear(2.0, 1.0, marks)
    assert all(max(abs(px - 2 - dx), abs(py - 1 - dy)) > 0.25 for px, py in marks) and max(abs(dx), abs(dy)) < 0.4
    assert plots_explorer._clear(0.0, 0.0, marks) == (0.0, 0.0) == plots_explorer._clear(2.0, 1.0, [])


def test_a_table_of_another_version_is_a_sentence(table, tmp_path):
    path = tmp_path / "explorer.json"
    with pytest.raises(results.ResultError, match="is not there"):
        explorer_grid.load(path)
    for content, words in (("{", "damaged"), ('{"version": 0}', "version 0, this code reads 1"), ("[]", "version None")):
        path.write_text(content)
        with pytest.raises(results.ResultError, match=words):
            explorer_grid.load(path)
    explorer_grid.save(table[1], path)
    assert explorer_grid.load(path) == table[1] and [p.name for p in tmp_path.iterdir()] == ["explorer.json"]


@pytest.mark.parametrize("change", [{"packed": "cut"}, {"packed": "none"}, {"packed": 3}, {"arrays": [["floats", "f4", 0, 10**9]]}, {"arrays": []}, {"arrays": [["floats", "f4"]]}, {"rows": []}, {"about": None}], ids=str)
def test_a_table_of_which_a_part_is_missing_is_a_sentence(table, tmp_path, change):
    """A page would say it in its script's words."""
    whole = table[1]["packed"]
    change = change | ({"packed": base64.b64encode(base64.b64decode(whole)[:-40]).decode()} if change.get("packed") == "cut" else {})
    explorer_grid.save({key: value for key, value in (table[1] | change).items() if value != "none"}, tmp_path / "explorer.json")
    with pytest.raises(results.ResultError, match="is damaged"):
        explorer_grid.load(tmp_path / "explorer.json")


def test_a_folder_in_the_place_of_a_table_is_a_sentence(tmp_path):
    (tmp_path / "explorer.json").mkdir()
    with pytest.raises(results.ResultError, match="cannot be read"):
        explorer_grid.load(tmp_path / "explorer.json")


# --- in a notebook and in the report ------------------------------------------------------------------------------------------------

@pytest.fixture
def closed(house, held):
    """An executed notebook that ends with the explorer, as `execute` leaves it."""
    house.notebook("05_x", "x = 1  # x")
    run = results.start("05_x", "smoke", {})
    closing = explorer_grid.close(run, {"t": {"a": held}}, grid=GRID)
    data, metadata = closing._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data and data["text/plain"].startswith("The explorer at its first position")
    notebook = new_notebook(cells=[new_code_cell("close()", outputs=[new_output("execute_result", data, metadata=metadata, execution_count=1)], execution_count=1)])
    notebook.metadata["widgets"] = {"state": {}}
    execute._without_widgets(notebook)
    nbformat.write(notebook, run.folder / "05_x.ipynb")
    return run.folder


def test_an_executed_copy_shows_the_picture(closed):
    (cell,) = nbformat.read(closed / "05_x.ipynb", as_version=4).cells
    assert set(cell.outputs[0].data) == {"image/png", "text/plain", explorer_grid.MIME} and "widgets" not in nbformat.read(closed / "05_x.ipynb", as_version=4).metadata


def page(house):
    report.write("smoke")
    return bs4.BeautifulSoup((house.outputs / "smoke" / "html" / "05_x.html").read_text(), "html.parser")


def test_the_page_has_the_twin_and_allows_its_script_alone(house, closed):
    soup = page(house)
    (place,) = soup.select(".explorer-here")
    assert place.noscript.img["alt"].startswith("The explorer") and place.noscript.img["src"].startswith("data:image/png")
    assert json.loads(place.find_next_sibling("script").text)["version"] == explorer_grid.VERSION
    (script,) = soup.find_all("script", type="module")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert soup.find("meta", {"http-equiv": "Content-Security-Policy"})["content"] == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert not soup.find_all(src=lambda src: src and not src.startswith("data:")) and "import " not in script.text


def test_a_lost_table_is_a_sentence_beside_the_picture(house, closed):
    (closed / "explorer.json").write_text('{"version": 0}')
    soup = page(house)
    assert "has version 0" in soup.select_one(".problem").text and soup.find("img") and not soup.find_all("script")


def test_the_picture_is_drawn_without_guesses_too():
    bare = Held(trace(predictors={}), "")
    view = explore.view(bare, settings(predictor="none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plots_explorer.picture(view)
    assert len(figure.axes) == 3 and "oracle" in plots_explorer.say(view) and dataclasses.is_dataclass(settings())
