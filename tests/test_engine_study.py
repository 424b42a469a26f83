"""What 11_engine measures: cells in turns, the simulator's figures beside them, and sentences that follow the numbers."""

import numpy as np
import pandas as pd
import pytest
from engine_models import house
from figures import cut_off

from predmoe import engine_study, plots_engine
from predmoe.engine.machine import measure_compute, measure_disk
from predmoe.engine_study import DEMAND, Gauge, Generation, Machine
from predmoe.simulator import Cache, Compute, Disk, Prefetch, replay

G = Generation(new_tokens=10, horizon=1, far=(1, 2), budget=1, lanes=2, temperature=1.0, seed=3)
KEY, SOURCES, SHARES = ("baseline", 0), {"baseline": ["demand", "next_router", "far_ranking", "oracle", "far_oracle"]}, [0.1, 0.4]


@pytest.fixture(scope="module")
def raced():
    h = house()
    folders, prompts = {KEY: h.folder}, h.prompts[:3]
    futures = {KEY: engine_study.record(h.folder, prompts, G, sources=SOURCES["baseline"], source_text="three prompts")}
    return prompts, futures, engine_study.race(folders, futures, prompts, G, sources=SOURCES, shares=SHARES)


def test_every_cell_goes_on_with_every_prompt(raced):
    prompts, futures, rows = raced
    assert len(rows) == 3 * 5 * 2 and rows.groupby(["source", "share", "prompt"]).size().eq(1).all()
    assert (rows.tokens == 9).all() and (rows.ms > 0).all() and (rows.hits <= rows.accesses).all() and (rows.decode_bytes <= rows.read_bytes).all()
    assert set(rows.slots) == {3, 13} and rows[rows.source == DEMAND].issued.eq(0).all() and rows[rows.source == "oracle"].issued.gt(0).any() and rows[rows.source == "far_oracle"].issued.gt(0).any()
    trace = futures[KEY]
    assert trace.predictors == {"next_router": (1,), "ranking": (1, 2)} and trace.num_passes == 3 * 10 and trace.meta.source == "three prompts"


def test_without_prefetch_every_count_is_the_simulators(raced):
    _, futures, rows = raced
    table = engine_study.cells(rows)
    times = {source: (Compute(), 0.5) for source in SOURCES["baseline"]}
    beside = engine_study.predicted(table, futures, Machine(disk=Disk(gb_per_s=(1.0, 2.0), lanes=2), times=times, table=pd.DataFrame(), gb_per_s=2.0), G)
    demand = beside[beside.source == DEMAND]
    assert len(demand) == 2 and (demand.sim_hits == demand.hits).all() and (demand.sim_read_bytes == demand.read_bytes).all()
    assert (demand.error_bytes == 0).all() and (beside.error_tok_s == beside.sim_tok_s / beside.tok_s - 1).all()
    for row in beside.itertuples():
        assert row.bound_ms == pytest.approx(max(0.5, row.decode_bytes / row.tokens / 2e6)) and row.over_bound == pytest.approx(row.ms_per_token / row.bound_ms)
    outcome = replay(futures[KEY], Cache(slots=13), Disk(gb_per_s=(1.0, 2.0), lanes=2), compute=Compute(), prefetch=Prefetch(source="ranking", horizon=(1, 2), budget=1))
    assert beside[(beside.source == "far_ranking") & (beside.slots == 13)].sim_tok_s.item() == outcome.tokens_per_s
    whole = replay(futures[KEY], Cache(slots=13, policy="belady"), Disk(gb_per_s=(1.0, 2.0), lanes=2), compute=Compute(), prefetch=Prefetch(source="oracle", horizon=(1, 2, 3, 4), cross_token=True))
    assert beside[(beside.source == "far_oracle") & (beside.slots == 13)].sim_tok_s.item() == whole.tokens_per_s >= beside[(beside.source == "oracle") & (beside.slots == 13)].sim_tok_s.item()
    sentences = engine_study.say_prediction(beside)
    low, high = demand.error_tok_s.min(), demand.error_tok_s.max()
    within = sum(low <= error <= high for error in beside[beside.source != DEMAND].error_tok_s)
    assert f"off by {low:+.1%} to {high:+.1%} all the same" in sentences[2] and f"{within} of 8 cells with prefetch" in sentences[2]
    off = beside.error_bytes.abs().groupby(beside.source).max().sort_values()
    assert len(sentences) == 3 if not off.iloc[-1] else f"most for {off.index[-1]}" in sentences[3] and f"by more than {off.iloc[-2]:.2%}" in sentences[3]
    assert len(engine_study.say_prediction(beside.assign(error_hits=0.1))) < len(sentences), "what is not counted alike says nothing of drift"
    assert "2 cells" in sentences[0] and "8 cells" in sentences[1] and "0.00% at most" in sentences[0]
    assert f"demand {demand.over_bound.min():.2f} to {demand.over_bound.max():.2f}" in engine_study.say_roofline(beside)
    assert f"2 of {len(beside)} cells lie below 1" in engine_study.say_roofline(beside.assign(over_bound=[0.9, 0.8] + [1.0] * (len(beside) - 2)))
    assert "below 1" not in engine_study.say_roofline(beside.assign(over_bound=1.2))
    assert plots_engine.prediction(beside).axes and plots_engine.roofline(beside).axes


def test_cells_are_sums_over_their_prompts(raced):
    rows = raced[2]
    cell = engine_study.cells(rows).query("source == 'far_ranking' and share == 0.4").iloc[0]
    part = rows.query("source == 'far_ranking' and share == 0.4")
    assert cell.tok_s == pytest.approx(1000 * part.tokens.sum() / part.ms.sum()) and cell.hit_rate == part.hits.sum() / part.accesses.sum()
    assert cell.issued == part.issued.max() and cell.read_bytes == part.read_bytes.sum()
    records = engine_study.arm_records(engine_study.cells(rows), 0.4)
    assert {record["arm"] for record in records} == {"baseline-demand", "baseline-next_router", "baseline-far_ranking", "baseline-oracle", "baseline-far_oracle"}
    assert [ax.get_title(loc="left") for ax in plots_engine.race(rows).axes] == [f"{share:.0%} in the cache" for share in sorted(rows.share.unique())]


def test_effects_are_paired_by_prompt_and_said_as_they_fall():
    rows = pd.DataFrame([dict(arm="baseline", seed=1, source=source, share=0.5, prompt=prompt, tokens=10, ms=ms)
                         for source, times in (("demand", [10.0, 20.0, 40.0]), ("oracle", [5.0, 10.1, 19.9])) for prompt, ms in enumerate(times)])  # fmt: skip
    (effect,) = engine_study.effects(rows, 0.5, [(("baseline", "oracle"), ("baseline", "demand"))])
    assert effect["per_seed"] == pytest.approx([1.0, 20 / 10.1 - 1, 40 / 19.9 - 1]) and effect["n"] == 3 and effect["model_seed"] == 1
    assert engine_study.say_effect(effect).startswith("baseline-oracle is faster than baseline-demand (model seed 1): +99")
    assert "slower than" in engine_study.say_effect(effect | {"ci95": [-0.2, -0.1], "mean": -0.15})
    assert "not measurably faster or slower than" in engine_study.say_effect(effect | {"ci95": [-0.2, 0.1]})


def test_exactness_says_how_many_tokens_are_equal(monkeypatch):
    h = house()
    asked = dict(policies=["lru", "lfu"], shares=[0.5], sources=["next_router", "oracle", "far_ranking", "far_oracle"], horizons=[1, 2])
    table = engine_study.exactness(h.model, h.folder, h.prompts, G, **asked)
    assert len(table) == 2 * 2 + 2 * 2 * 2 + 2 * 2 and table.policy.eq("belady").sum() == 2 and (table.tokens == 80).all() and (table.equal == 80).all() and table.logit_difference.max() < 1e-4
    assert engine_study.say_exactness(table).startswith("Greedy tokens equal the resident model's in 16 of 16 settings")
    other = engine_study.resident_greedy(h.model, h.prompts, G.new_tokens)
    wrong = [[(token + 1) % 61 for token in tokens] for tokens in other[0]], other[1]
    monkeypatch.setattr(engine_study, "resident_greedy", lambda *_: wrong)
    assert engine_study.exactness(h.model, h.folder, h.prompts, G, **asked).equal.eq(0).all(), "it can fail"


def test_the_machine_is_measured():
    h = house()
    disk, table = measure_disk(h.folder, lanes=2, reads=20, rounds=2)
    assert disk.lanes == 2 and len(disk.table) == 2 and min(disk.table) > 0 and 0 < disk.latency_ms < table.ms[1:].min()
    assert table.depth.tolist() == [1, 1, 2] and (table.bytes[1:] == 12288).all() and (table.gb_per_s > 0).all()
    for row, speed in zip(table[1:].itertuples(), disk.table):   # blocks that are handed over together take in the simulator what they took
        assert disk.latency_ms + row.depth * 12288 / speed / 1e6 == pytest.approx(row.ms)
    compute, ms = measure_compute(h.folder, h.prompts[:2], max_new_tokens=8, prefetch=Prefetch(source="ranking"))
    parts = np.sum(compute.attention_ms) + 2 * np.sum(compute.expert_ms) + compute.head_ms
    assert parts == pytest.approx(ms) and min(compute.expert_ms) > 0 and compute.overlap and compute.extra_token >= 0


def test_a_gauge_takes_turns_and_tells_the_simulator_what_reads_cost(raced):
    h = house()
    calls = []
    gauge = Gauge(h.folder, h.prompts[4:6], G, sources=["ranking", "oracle"], reads=4)

    def between():
        calls.append(1)
        gauge.turn()

    engine_study.race({KEY: h.folder}, raced[1], h.prompts[:2], G, sources={"baseline": ["demand", "oracle"]}, shares=SHARES, between=between)
    assert len(calls) == 2 * 2 * 2, "once after each cell's prompt"
    machine = gauge.machine()
    assert set(machine.times) == {"demand", "ranking", "oracle"} and machine.times["oracle"] == machine.times["demand"] != machine.times["ranking"]
    assert all(compute.fresh_ms == machine.times["demand"][0].fresh_ms >= 0 for compute, _ in machine.times.values())
    assert machine.gb_per_s == machine.table.gb_per_s.max() and machine.disk.lanes == G.lanes and machine.disk.issue_ms >= 0
    told = engine_study.say_machine(machine)
    best = int(machine.table.depth[machine.table.gb_per_s.idxmax()])
    assert f"and at {machine.gb_per_s:.2f} GB/s at best, with {best}." in told[0] and f"none {machine.times['demand'][1]:.2f}, ranking" in told[2] and "oracle" not in told[2]


def test_calibration_prompts_are_none_of_the_race(tmp_path, monkeypatch):
    from types import SimpleNamespace

    windows = np.arange(60).reshape(10, 6)
    monkeypatch.setattr(engine_study, "prepare", lambda data: SimpleNamespace(dev=lambda context: SimpleNamespace(tokens=windows)))
    config = SimpleNamespace(data=None, model=SimpleNamespace(context=5))
    assert engine_study.calibration_prompts(config, count=3, tokens=2) == [[0, 1], [24, 25], [54, 55]]


def test_no_two_rows_of_the_race_share_a_place_and_every_prompt_is_there():
    """A cell's strokes and mean lie in a row of their own, and the axis names its source."""
    sources, n = ["demand", "linear", "ranking", "oracle"], 4
    rows = pd.DataFrame([dict(arm=arm, seed=0, source=source, share=share, prompt=prompt, tokens=10, ms=10.0 + i + prompt)
                         for arm in ("baseline", "joint") for i, source in enumerate(sources) if (arm, source) != ("joint", "linear") for share in (0.25, 0.5) for prompt in range(n)])  # fmt: skip
    figure = plots_engine.race(rows)
    for ax in figure.axes:
        strokes, means = ([line for line in ax.get_lines() if len(line.get_xdata()) == count and line.get_marker() not in ("None", None)] for count in (n, 1))
        places = [round(float(line.get_ydata()[0]), 6) for line in (*strokes, *means)]
        assert len(strokes) == len(means) == 2 * len(sources) - 1 and len(set(places)) == len(places)
        assert [stroke.get_xdata().mean() for stroke in strokes] == pytest.approx([float(mean.get_xdata()[0]) for mean in means])
        assert all(round(float(mean.get_ydata()[0])) == round(float(stroke.get_ydata()[0])) for mean, stroke in zip(means, strokes))
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == [plots_engine.ARMS[name] for name in sources] and cut_off(figure) == []


def test_every_source_has_a_look_of_its_own_and_the_legend_fits():
    names = ["demand", "next_router", "linear", "ranking", "far_ranking", "oracle", "far_oracle"]
    rows = pd.DataFrame([dict(arm=arm, seed=0, source=source, share=share, prompt=prompt, tokens=10, ms=10.0 + i + prompt, tok_s=1000 / (10 + i), sim_tok_s=1010 / (10 + i), error_tok_s=0.01, over_bound=1.5)
                         for arm in ("baseline", "joint") for i, source in enumerate(names) for share in (0.25, 0.5) for prompt in (0, 1)])  # fmt: skip
    looks = plots_engine._sources(rows)
    assert list(looks) == names and len({(look["color"], look["marker"]) for look in looks.values()}) == len(names)
    assert looks["far_oracle"]["color"] == looks["oracle"]["color"] != looks["ranking"]["color"] == looks["far_ranking"]["color"]
    for draw in (plots_engine.race, plots_engine.prediction, plots_engine.roofline):
        figure = draw(rows)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
