"""12_downstream: which tasks are run, effects, McNemar's test, sentences; the measurement in the store; the notebook on drawn answers."""

import dataclasses
import json
import shutil

import nbformat
import numpy as np
import pandas as pd
import pytest
from eval_files import write
from fake_downstream import downstream, drawn, row
from fake_measurements import finished
from figures import cut_off
from tiny_runs import POSTHOC, clone, stored, tiny

from predmoe import downstream_study, downstream_tasks, execute, experiments, headline, measure_downstream, paths, plots_downstream, results, runs, stats
from predmoe.config import EVAL_TASKS, ConfigError, DownstreamConfig, stable_hash
from predmoe.downstream_tasks import CLOZE
from predmoe.measure_downstream import compare, pack_bits, pack_numbers, summary, unpack_bits, unpack_numbers

HOW = DownstreamConfig(items=2, cloze=3, peer_items=2)


def study(seeds=(0, 1, 2), **more):
    return [found for seed in seeds for found in (row("baseline", seed), row("joint", seed, **more))]


# --- items ----------------------------------------------------------------------------------------------------------------

def test_items_come_back_as_they_were_packed():
    rng = np.random.default_rng(0)
    bits, numbers = rng.random(1003) < 0.3, rng.normal(-30, 5, 1003)
    assert np.array_equal(unpack_bits(pack_bits(bits), 1003), bits)
    assert np.array_equal(unpack_numbers(pack_numbers(numbers)), numbers.astype(np.float32)) and len(pack_numbers(numbers)) < 6 * 1003


def test_means_and_standard_errors_by_hand():
    samples = [{"acc": a, "acc_norm": 1.0, "target": "1", "filtered_resps": [(-9.0, False), (g, False)]} for a, g in ((1.0, -1.0), (0.0, -2.0), (0.0, -3.0), (1.0, -6.0))]
    found, packed = summary(samples, 0.5, "piqa")
    assert (found["items"], found["accuracy"], found["accuracy_norm"], found["gold"], found["chance"]) == (4, 0.5, 1.0, -3.0, 0.5)
    assert found["accuracy_se"] == pytest.approx(np.sqrt(1 / 3) / 2) and found["accuracy_norm_se"] == 0.0 and unpack_numbers(packed["gold"]).tolist() == [-1, -2, -3, -6]
    with pytest.raises(ConfigError, match="^piqa: the log-likelihood of item 1 is nan: the model.s weights are damaged"):
        summary([samples[0], samples[1] | {"filtered_resps": [(0.0, False), (float("nan"), False)]}], 0.5, "piqa")


def test_two_classes_are_compared_item_for_item():
    ours = [{"acc": 1.0, "acc_norm": 0.0, "filtered_resps": [(-1.0, False), (-2.0, False)]}, {"acc": 0.0, "filtered_resps": [(-3.0, True)]}]
    theirs = [{"acc": 1.0, "acc_norm": 1.0, "filtered_resps": [(-1.0, False), (-2.5, False)]}, {"acc": 0.0, "filtered_resps": [(-3.0, True)]}]
    assert compare(ours, ours) == {"items": 2, "largest_difference": 0.0, "judged_otherwise": 0, "apart": 0, "ties": 0}
    assert compare(ours, theirs) == {"items": 2, "largest_difference": 0.0, "judged_otherwise": 1, "apart": 1, "ties": 0}
    assert compare(ours, theirs, lambda sample: 1e-8)["ties"] == 1 and compare(ours, theirs, lambda sample: 1e-4)["ties"] == 0


# --- statistics -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mine, theirs, only, p", [
    ([1, 1, 0, 0], [1, 0, 1, 0], (1, 1), 1.0), ([1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], (5, 0), 2 / 32), ([1, 0], [1, 0], (0, 0), 1.0), ([0] * 6, [1] * 6, (0, 6), 2 / 64),
])  # fmt: skip
def test_mcnemar_by_hand(mine, theirs, only, p):
    found = stats.mcnemar(mine, theirs, "joint", "baseline")
    assert (found["only joint"], found["only baseline"]) == only and found["p"] == pytest.approx(p)


def test_mcnemar_needs_the_same_items():
    with pytest.raises(ValueError, match="3 answers of joint and 2 of baseline"):
        stats.mcnemar([1, 0, 0], [1, 0], "joint", "baseline")


def test_effects_are_paired_by_seed_and_corrected_over_the_tasks_of_a_metric():
    effects = downstream_study.effects(study(nats=-0.5))
    gold = [e for e in effects if e["measure"] == "gold"]
    assert [e["task"] for e in gold] == [*EVAL_TASKS, CLOZE] and all(e["mean"] == pytest.approx(-0.5, abs=0.05) and e["n"] == 3 and e["ci95"][1] < 0 for e in gold)
    assert [e["p_holm"] for e in gold] == stats.holm([e["p"] for e in gold])
    assert "lambada_openai" not in {e["task"] for e in effects if e["measure"] == "accuracy_norm"}   # nothing to normalise, and nothing made up
    said = downstream_study.say_effects(effects, "gold")
    assert said.startswith("The gold answer's log-likelihood (nats, 3 seeds): joint training lowers it on HellaSwag (-0.") and "7 of them are established" in said
    assert "a single seed, exploratory" in downstream_study.say_effects(downstream_study.effects(study(seeds=(0,))), "accuracy")


def test_the_verdict_names_what_is_established_and_what_the_rest_excludes():
    def made(task, measure, low, high, p):
        return {"task": task, "measure": measure, "mean": (low + high) / 2, "ci95": [low, high], "n": 5, "p_holm": p}

    found = [made("lambada_openai", "gold", -0.1015, -0.0433, 0.016), made("piqa", "gold", -0.5, 0.301, 1.0), made("piqa", "accuracy", -0.0061, 0.0115, 1.0), made("arc_easy", "accuracy", -0.0053, 0.0141, 0.06)]
    assert downstream_study.say_verdict(found) == (
        "In zero-shot tasks joint training lowers the gold answer's log-likelihood on LAMBADA (-0.0724 nats [-0.1015, -0.0433], p = 0.016), which is established after Holm's correction over the "
        "tasks of each measure (5 seeds). Of the other 3 comparisons none is. Their intervals exclude what lies beyond -0.50 to +0.31 nats of the gold answer's log-likelihood, -0.7 to +1.5 points of accuracy.")
    none = downstream_study.say_verdict(found[1:])
    assert none.startswith("In zero-shot tasks no change by joint training is established (3 comparisons, 5 seeds).") and "LAMBADA" not in none
    better = downstream_study.say_verdict([made("piqa", "accuracy", 0.01, 0.03, 0.01), *found[:1]])
    assert "joint training raises the accuracy on PIQA (+2.0 points [+1.0, +3.0], p = 0.010); lowers the gold" in better and "which are established" in better and "Of the other" not in better
    assert "a single seed tests nothing" in downstream_study.say_verdict(downstream_study.effects(study(seeds=(0,))))


def test_the_cost_among_the_first_lines_names_what_is_established_of_tasks(outputs):
    """Not only that the gate is passed: the first sentence, which is all that README's summary takes, has it too."""
    finished()
    result, claim = results.load("smoke", "02_horizons"), {"verdict": "replicated"}
    found = downstream_study.effects(study(nats=-0.5))
    told = headline.say_cost(result, claim, None, {"effects": [*found, {"name": "another", "mean": 1.0}]})
    assert told[-1] == downstream_study.say_verdict(found) and "of zero-shot tasks, joint training lowers the gold answer's log-likelihood on HellaSwag; " in told[0]
    quiet = headline.say_cost(result, claim, None, {"effects": [e | {"p_holm": 1.0} for e in found]})
    assert "zero-shot" not in quiet[0] and "no change by joint training is established" in quiet[-1]
    assert len(headline.say_cost(result, claim, None)) == len(told) - 1


def test_answers_are_paired_within_a_seed():
    table = downstream_study.within_seeds(study(better=0.2))
    assert len(table) == 21 and (table["only joint"] > table["only baseline"]).all() and (table["p (Holm)"] >= table.p).all()
    assert "21 of 21 pairs of models differ" in downstream_study.say_within(table)
    same = downstream_study.within_seeds([row("baseline", 0), row("baseline", 0) | {"arm": "joint"}])
    assert (same.p == 1).all() and "0 of 7" in downstream_study.say_within(same)
    with pytest.raises(results.ResultError, match="seed 1 of joint has no baseline"):
        downstream_study.within_seeds([row("baseline", 0), row("joint", 1)])


def test_chance_is_told_by_two_standard_errors():
    said = downstream_study.say_chance(downstream_study.scores(study()), "baseline")
    above, near = said.split("; cannot be told from chance on ")
    assert "held-out cloze (ours) (" in above and "ARC easy" in near and "PIQA" in near and "chance 50.0%" in near and "says nothing of what training costs" in near
    worse = downstream_study.say_chance(downstream_study.scores([row("baseline", 0, better=-0.2)]), "baseline")
    assert "is below chance on " in worse and "PIQA" in worse.split("is below chance on ")[1]
    best = downstream_study.say_chance(downstream_study.scores([row("baseline", 0, better=0.3)]), "baseline")
    assert best.startswith("By two standard errors of its items, the baseline model is above chance on HellaSwag") and "says nothing" not in best


def test_the_tables_name_no_number_that_is_not_there():
    table = downstream_study.scores(study())
    assert table[table.task == "LAMBADA"].accuracy_norm.isna().all() and not table[table.task != "LAMBADA"].isna().any().any()
    shown = downstream_study.for_reading(table)
    assert shown[shown.task == "LAMBADA"]["normalised (%)"].tolist() == ["–", "–"] and len(shown) == 14 and set(shown.seeds) == {3}
    assert "1 of PIQA" in downstream_study.say_left_out(study()) and len(downstream_study.effect_table(downstream_study.effects(study()))) == 20


def test_models_that_answered_other_items_are_told_apart():
    arms = study(seeds=(0,))
    assert downstream_study.same_items(arms) and downstream_study.equals_harness(arms) and "items as our adaptor does;" in downstream_study.say_harness(arms)
    arms[1]["downstream"]["tasks"]["piqa"]["fingerprint"] = "f" * 12
    arms[1]["downstream"]["harness"]["piqa"]["judged_otherwise"] = 2
    arms[0]["downstream"]["harness"]["arc_easy"] |= {"apart": 2, "ties": 2}
    assert downstream_study.equals_harness(arms) and "In 2 of them a router's choice is a tie" in downstream_study.say_harness(arms)
    arms[0]["downstream"]["harness"]["arc_easy"]["ties"] = 1
    assert not downstream_study.same_items(arms) and not downstream_study.equals_harness(arms) and "items as our adaptor does, but for 2;" in downstream_study.say_harness(arms)


def test_the_figure_has_a_panel_per_task_and_a_line_of_chance():
    figure = plots_downstream.levels(downstream_study.scores(study()))
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in shown] == list(downstream_study.TITLES.values()) and cut_off(figure) == []
    assert "chance" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert all(np.ptp(ax.get_ylim()) >= plots_downstream.LEAST for ax in plots_downstream.levels(downstream_study.scores([row(arm, 0, better=-1.0) for arm in ("baseline", "joint")])).axes if ax.get_visible())
    for ax, task in zip(shown, downstream_study.TITLES):
        assert any(list(line.get_ydata()) == [100 * downstream("baseline", 0)["tasks"][task]["chance"]] * 2 for line in ax.lines)


def test_where_nothing_is_right_the_marks_lie_above_the_axis_and_it_is_written():
    """LAMBADA of small models: a mark on the axis itself is half hidden, and a scale of two points says nothing of 0."""
    arms = study()
    for found in arms:
        found["downstream"]["tasks"]["lambada_openai"]["accuracy"] = 0.0
    panels = {ax.get_title(loc="left"): ax for ax in plots_downstream.levels(downstream_study.scores(arms)).axes if ax.get_visible()}
    low, high = panels["LAMBADA"].get_ylim()
    assert low < -0.05 * high and [text.get_text() for text in panels["LAMBADA"].texts] == ["none of 200 right,\nby any of 6 models"] and not panels["PIQA"].texts


def test_a_narrow_interval_beside_wide_ones_is_seen_on_a_scale_of_its_own():
    effects = [e | {"ci95": [-5.0, 6.0], "per_seed": [-5.0, 0.5, 6.0]} if e["task"] == "piqa" else e for e in downstream_study.effects(study(nats=-0.5)) if e["measure"] == "gold"]
    figure = plots_downstream.differences(downstream_study.forest(effects, ["gold"]), label="joint − baseline (nats per answer)")
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in shown] == [downstream_study.TITLES[e["task"]] for e in effects] and cut_off(figure) == [] and "nats" in figure.get_supxlabel()
    for ax, e in zip(shown, effects):
        reach = max(0.0, *e["ci95"], *e["per_seed"]) - min(0.0, *e["ci95"], *e["per_seed"])
        assert reach <= np.ptp(ax.get_xlim()) < 1.6 * reach


# --- in the store ---------------------------------------------------------------------------------------------------------------

def test_the_addresses_of_the_third_measurement_do_not_move():
    """Committed files lie under these names; see test_config.GOLDEN for what may move them."""
    assert runs.measurement_name(DownstreamConfig()) == f"downstream-{stable_hash(DownstreamConfig())}" == "downstream-cd2a6d5d445d"


def test_a_run_is_measured_once_and_a_clone_without_weights_or_items_has_it_all(corpus, tmp_path, monkeypatch):
    """Its model's context of 16 tokens is too short for some answers, and cuts most questions."""
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(write(tmp_path / "items")))
    config, how = tiny(corpus, steps=6, objective={}, model={"context": 32}), dataclasses.replace(HOW, cloze=0)
    assert downstream_study.settle(how, [config], tmp_path / "a") == how and downstream_study.not_run(how, how) == []
    ask = lambda store: runs.get_or_measure([config], POSTHOC, profile="none", downstream=how, store=store, parallel=1, report=lambda line: None)  # noqa: E731
    (first,) = ask(tmp_path / "a")
    found = first["downstream"]
    assert tuple(found["tasks"]) == EVAL_TASKS and found["config_hash"] == config.hash and not any(found["left_out"].values())
    assert all(task["items"] == 2 and -300 < task["gold"] < 0 for task in found["tasks"].values())
    assert all(check["items"] == 2 and check["apart"] == check["ties"] and check["largest_difference"] < 1e-3 for check in found["harness"].values())
    here = clone(tmp_path / "a", tmp_path / "b")
    monkeypatch.setenv("PREDMOE_EVAL_DATA", "/nowhere")
    assert downstream_study.settle(how, [config], here) == how and ask(here) == [first] and not list(here.rglob("*.safetensors"))


def test_tasks_without_items_are_left_out_and_named(tmp_path, monkeypatch):
    folder = write(tmp_path / "items")
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(folder))
    (folder / "piqa.jsonl").unlink()
    settled = downstream_study.settle(HOW, [], tmp_path)
    assert settled.tasks == tuple(task for task in EVAL_TASKS if task != "piqa") and settled.cloze == 3
    (said,) = downstream_study.not_run(HOW, settled)
    assert said.startswith("Not run: PIQA (the folder of local items has no piqa.jsonl")
    monkeypatch.setenv("PREDMOE_EVAL_DATA", "/nowhere")
    nothing = downstream_study.settle(HOW, [], tmp_path)
    (said,) = downstream_study.not_run(HOW, nothing)
    assert nothing.tasks == () and said.startswith("Not run: HellaSwag, ARC easy, ARC challenge, PIQA, OpenBookQA, LAMBADA (PREDMOE_EVAL_DATA names no folder")
    with pytest.raises(ConfigError, match="no task can be run: PREDMOE_EVAL_DATA names no folder"):
        downstream_study.settle(dataclasses.replace(HOW, cloze=0), [], tmp_path)


def test_damaged_items_are_told_before_anything_is_trained_but_only_where_they_are_needed(corpus, tmp_path, monkeypatch):
    folder, run = write(tmp_path / "items"), tiny(corpus)
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(folder))
    (folder / "arc_easy.jsonl").write_text('{"query": "q"}\n')
    (folder / "piqa.jsonl").unlink()
    with pytest.raises(ConfigError, match="^arc_easy.jsonl, line 1 lacks the field 'choices'"):
        downstream_study.settle(HOW, [run], tmp_path)
    assert downstream_study.settle(dataclasses.replace(HOW, tasks=("hellaswag",)), [run], tmp_path).tasks == ("hellaswag",)
    for tasks in (EVAL_TASKS, tuple(task for task in EVAL_TASKS if task != "piqa")):   # measured: all that was asked for, and all that was here at the time
        path = runs.open_run(run, tmp_path / "store").path
        (path / f"{runs.measurement_name(how := dataclasses.replace(HOW, tasks=tasks))}.json").write_text(stored(type(how)))
        assert downstream_study.settle(HOW, [run], path.parent).tasks == tasks
        shutil.rmtree(path)


def test_a_measurement_under_a_wrong_name_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="is no measurement of that name; there are posthoc, locality, downstream"):
        runs.get_or_measure([tiny(corpus)], POSTHOC, profile="none", locality=HOW, store=tmp_path)


def test_answers_too_long_for_the_context_are_left_out_for_every_model(tmp_path, monkeypatch):
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(write(tmp_path)))
    task = downstream_tasks.load(DownstreamConfig(tasks=("arc_easy",), items=0, cloze=0), None)["arc_easy"]
    from predmoe.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("bpe8k")
    lengths = [max(len(tokenizer.encode(f" {choice}")) for choice in doc["choices"]["text"]) for doc in task.eval_docs]

    class Short:
        max_length = sorted(lengths)[-1] - 1

        def length(self, context, continuation):
            return len(tokenizer.encode(context + continuation)) - len(tokenizer.encode(context))

    kept = measure_downstream.fitting(Short(), task)
    assert kept == [i for i, n in enumerate(lengths) if n <= Short.max_length] and len(kept) < 3


# --- the notebook on drawn answers ------------------------------------------------------------------------------------------------

def test_the_notebook_tells_what_was_drawn(tmp_path, monkeypatch):
    """The committed profile's arms and seeds, its cells run in this process, no model trained."""
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("PREDMOE_EVAL_DATA", str(write(tmp_path / "items")))
    monkeypatch.setattr(experiments, "measure_arms", lambda pairs, *_, downstream, **__: drawn(pairs, tasks=downstream.tasks))
    (tmp_path / "items" / "piqa.jsonl").unlink()
    params = next(job.params for job in execute.plan("cpu") if job.name == "12_downstream")
    scope: dict = {}
    for cell in nbformat.read(paths.NOTEBOOKS / "12_downstream.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "12_downstream", "exec"), scope)
            if "parameters" in cell.metadata.get("tags", []):
                scope |= params | {"profile": "drawn"}
    found = results.load("drawn", "12_downstream")
    said = " ".join(found["findings"])
    assert "Not run: PIQA (" in said and "joint training lowers it on HellaSwag" in said and "items as our adaptor does;" in said
    assert {row["arm"] for row in found["arms"]} == {"baseline", "joint"} and len(found["arms"]) == 2 * len(params["seeds"])
    assert all("answers" not in row["downstream"] and "piqa" not in row["downstream"]["tasks"] for row in found["arms"])
    assert results.values_by_seed(found["arms"], "joint", "downstream.tasks.arc_easy.gold").keys() == set(params["seeds"])
    assert "chance" in pd.read_csv(tmp_path / "drawn" / "12_downstream" / "scores.csv").columns and "PIQA" not in json.dumps(found["effects"])
