"""What each notebook needs, and what a profile still has to train."""

import dataclasses
import json
import re

import pytest
from tiny_runs import stored, tiny

from predmoe import cli, config, execute, paths, plan, runs, studies
from predmoe.config import ConfigError, to_dict
from predmoe.measurements import RANKING_LOSSES

STEPS = config.TIERS["smoke"].train.steps
SHARED = {"tier": "smoke", "horizons": [1], "changes": {"train": {"threads": 2}, "data": {}}}


def told(pairs):
    return [(arm, run.train.seed, run.objective.lambda_pred, run.train.steps) for arm, run in pairs]


def test_a_variation_of_the_objective_touches_the_joint_arm_alone_and_one_of_training_both():
    explanations = [{"name": "weight", "objective": {"lambda_pred": 1.0}}, {"name": "steps", "train": {"steps": STEPS // 2}, "seeds": 1}]
    found = studies.variations(explanations, {"lambda_pred": 0.3}, [5, 6], **SHARED)
    assert list(found) == [studies.AS_IT_STANDS, "weight", "steps"]
    assert told(found[studies.AS_IT_STANDS]) == [("baseline", 5, 0.0, STEPS), ("joint", 5, 0.3, STEPS), ("baseline", 6, 0.0, STEPS), ("joint", 6, 0.3, STEPS)]
    assert told(found["weight"]) == [("baseline", 5, 0.0, STEPS), ("joint", 5, 1.0, STEPS), ("baseline", 6, 0.0, STEPS), ("joint", 6, 1.0, STEPS)]
    assert told(found["steps"]) == [("baseline", 5, 0.0, STEPS // 2), ("joint", 5, 0.3, STEPS // 2)]
    everything = [run for pairs in found.values() for _, run in pairs]
    assert all(run.train.threads == 2 for run in everything) and len({run.hash for run in everything}) == 8


@pytest.mark.parametrize("explanation, words", [
    ({"name": "more steps", "seeds": "3"}, "more steps: seeds='3' is str, not int"), ({"train": {"steps": 4}}, "explanation: name=None"),
    ({"name": "x", "trian": {"steps": 4}}, "unknown section 'trian'"), ({"name": "x", "train": {"step": 4}}, "unknown parameter step"),
])  # fmt: skip
def test_an_explanation_is_checked(explanation, words):
    with pytest.raises(ConfigError, match=words):
        studies.variations([explanation], {"lambda_pred": 0.3}, [0], **SHARED)


def test_every_notebook_that_trains_has_a_study():
    for job in execute.plan("smoke"):
        assert ("tier" in execute.inspect(job.notebook)) == (job.name in studies.STUDIES)


def test_other_weights_add_only_their_own_models():
    parameters = execute.check(paths.NOTEBOOKS / "03_dose.ipynb", {})
    before, after = (
        {run.hash for _, run in studies.pairs_of("03_dose", parameters | {"lambdas": lambdas, "gradients": ["input"]})} for lambdas in ([0.0, 0.3], [0.0, 0.3, 0.2])
    )
    assert before < after and len(after - before) == 1
    (joint,) = (run.hash for arm, run in studies.pairs_of("01_mechanism", execute.check(paths.NOTEBOOKS / "01_mechanism.ipynb", {"seeds": [0]})) if arm == "joint")
    assert joint in before  # shared with the other notebooks


def test_the_alternative_is_chosen_among_several_on_seeds_that_no_result_uses():
    (job,) = execute.plan("cpu", ["02"])
    groups = studies.horizons(execute.check(job.notebook, job.params))
    assert len({arm for arm, _ in groups["selection"]} - {"baseline"}) >= 2 and "alternative" in dict(groups["models"])
    assert not {run.train.seed for _, run in groups["selection"]} & {run.train.seed for _, run in groups["models"]}


def test_isolation_and_seeds_need_no_models_but_those_of_the_first_notebooks():
    first = {run.hash for _, run in studies.pairs_of("01_mechanism", execute.check(paths.NOTEBOOKS / "01_mechanism.ipynb", {}))}
    for name in ("04_isolation", "06_seeds"):
        assert {run.hash for _, run in studies.pairs_of(name, execute.check(paths.NOTEBOOKS / f"{name}.ipynb", {}))} == first
    ranking = {run.hash for _, run in studies.pairs_of("14_ranking_seeds", execute.check(paths.NOTEBOOKS / "14_ranking_seeds.ipynb", {}))}
    assert first < ranking and len(ranking - first) == 2   # a pair of another width


FIRST = ["01", "02", "03"]   # the notebooks that the tests of the plan look at


def checked(notebook, **params):
    return execute.check(paths.NOTEBOOKS / f"{notebook}.ipynb", params)


@pytest.mark.parametrize("profile", ["smoke", "cpu"])
def test_arms_that_several_notebooks_have_are_the_same_runs(profile):
    """Equal by construction: what 02 and 03 train is not trained again, and 07, 09 and 15 share among themselves."""
    params = {job.name: execute.check(job.notebook, job.params) for job in execute.plan(profile)}
    runs_of = lambda notebook: {(arm, run.train.seed): run.hash for arm, run in studies.pairs_of(notebook, params[notebook])}  # noqa: E731
    base, doses = runs_of("01_mechanism"), runs_of("03_dose")
    for notebook in ("07_controls", "09_longer_training", "15_frontier"):
        mine = runs_of(notebook)
        assert mine["baseline", 0] == base["baseline", 0] and mine.get(("joint", 0), mine.get(("joint 0.3", 0))) == base["joint", 0]
    frontier = runs_of("15_frontier")
    shared = {(arm.replace("joint ", "input "), seed): found for (arm, seed), found in frontier.items() if arm.startswith("joint ")}
    assert shared and all(doses[key] == found for key, found in shared.items() if key in doses)
    for key, found in (runs_of("07_controls") | runs_of("09_longer_training")).items():
        assert key not in frontier or frontier[key] == found
    assert ("sticky 1", 0) in frontier


def test_the_first_order_seed_is_the_order_of_the_other_runs():
    pairs = {(arm, run.train.seed): run for arm, run in studies.pairs_of("07_controls", checked("07_controls", seeds=[0, 1], order_seeds=[0, 1]))}
    for arm in ("baseline", "joint"):
        assert pairs[f"{arm} (order)", 0].hash == pairs[arm, 0].hash and pairs[f"{arm} (order)", 1].hash != pairs[arm, 1].hash
        assert pairs[f"{arm} (order)", 1].data.order_seed == 1 and pairs[arm, 1].data.order_seed == 0


def test_controls_have_the_arms_that_claims_refer_to():
    arms = {arm for arm, _ in studies.pairs_of("07_controls", checked("07_controls", stickies=[0.3, 1.0, 3.0], stacked_seeds=1))}
    assert arms == {"baseline", "joint", "baseline (order)", "joint (order)", "sticky 0.3", "sticky 1", "sticky 3", "sticky 1 + joint"}
    longer = checked("09_longer_training", times=4, penalties=[0.005, 0.01, 0.05], penalty_seeds=[2, 1, 0], seeds=[0, 1], long_seeds=1)
    found = studies.pairs_of("09_longer_training", longer)
    assert {arm for arm, _ in found} == {"baseline", "joint", "baseline 4x", "joint 4x", "entropy 0.005", "entropy 0.01"}
    assert [(arm, run.train.steps) for arm, run in found if arm.endswith("4x")] == [("baseline 4x", 4 * STEPS), ("joint 4x", 4 * STEPS)]
    assert [run.train.seed for arm, run in found if arm == "entropy 0.005"] == [0, 1]
    with pytest.raises(ConfigError, match="penalty_seeds=.* one number for each"):
        studies.pairs_of("09_longer_training", longer | {"penalty_seeds": [1]})


def test_an_entry_changes_what_it_says_and_is_checked():
    p = checked("15_frontier", seeds=[0, 1, 2], lambdas=[0.0, 0.3])
    changed = {"name": "mine", "seeds": 2, "predictor": {"next_token": True}, "objective": {"lambda_pred": 0.3, "lambda_lookup": 0.1}, "model": {"routing": "early", "early_by": 2}}
    found = studies.frontier(p | {"entries": [changed]})
    assert [arm for arm, _ in found["joint"]] == ["baseline", "joint 0.3"] * 3
    (first, second) = (run for _, run in found["entries"])
    assert (first.train.seed, second.train.seed, first.predictor.next_token, first.predictor.horizons) == (0, 1, True, (1, 2, 4))
    assert (first.objective.lambda_lookup, first.model.early_by, first.objective.ramp_end) == (0.1, 2, 0.5)
    for entry, words in (({"seeds": 1}, "entry: name=None"), ({"name": "x", "seeds": "1"}, "x: seeds='1'"), ({"name": "x", "modle": {}}, "unknown section 'modle'")):
        with pytest.raises(ConfigError, match=words):
            studies.frontier(p | {"entries": [entry]})


# --- the plan ----------------------------------------------------------------------------------------------------------

def measured(store, item, *, train=120.0, posthoc=24.0):
    """A store's folder of a finished and measured run, as far as the plan looks."""
    folder = store / item.run.hash
    folder.mkdir(parents=True, exist_ok=True)
    for how in (item.posthoc, *item.further):
        (folder / f"{runs.measurement_name(how)}.json").write_text(stored(type(how), config=to_dict(item.run), seconds={"train": train, "posthoc": posthoc}))


def test_each_run_is_planned_once_and_told_by_every_notebook_that_needs_it(tmp_path):
    items = plan.plan("smoke", FIRST, store=tmp_path)
    assert len({item.run.hash for item in items}) == len(items)
    assert items[0].notebooks == ("01_mechanism", "02_horizons", "03_dose") and ("02_horizons",) in [item.notebooks for item in items]
    assert all(item.state == "missing" and item.seconds is None for item in items)
    assert f"0 of {len(items)} runs are done; {len(items)} not begun (missing). How many hours are left is unknown" in plan.tell(items, 2)


def test_the_last_line_counts_a_run_once_that_several_notebooks_share_and_a_single_notebook_has_none(tmp_path):
    first = plan.plan("smoke", FIRST, store=tmp_path)[0]
    measured(tmp_path, first)
    items = plan.plan("smoke", FIRST, store=tmp_path)
    head, *lines = plan.tell(items, 2).partition("\n\n")[0].splitlines()
    assert lines.pop().endswith("the last line counts each run once.") and len(first.notebooks) > 1
    names, counts = [line[:22].strip() for line in lines], [line[22:].split() for line in lines]
    assert names == [*dict.fromkeys(name for item in items for name in item.notebooks), plan.ALL] and head[22:].split()[:2] == ["runs", "done"]
    assert counts[-1][:4] == [str(len(items)), "1", "0", str(len(items) - 1)] and sum(int(count[0]) for count in counts[:-1]) > len(items)
    assert float(counts[-1][4]) == pytest.approx(sum(float(count[4]) for count in counts[:-1]), abs=0.06 * len(counts))
    alone = plan.tell(plan.plan("smoke", ["01"], store=tmp_path), 2)
    assert plan.ALL not in alone and "counts each run once" not in alone


def test_time_left_is_what_like_runs_took(tmp_path):
    first, second, *_ = plan.plan("smoke", FIRST, store=tmp_path)
    measured(tmp_path, first)
    (tmp_path / second.run.hash).mkdir()
    (tmp_path / second.run.hash / "timing.json").write_text(json.dumps({"steps": STEPS // 4, "seconds": 1.0, "tokens_per_second": 1.0}))
    items = plan.plan("smoke", FIRST, store=tmp_path)
    assert [item.state for item in items[:3]] == ["done", "begun", "missing"]
    assert [item.seconds for item in items[:3]] == pytest.approx([0.0, 90.0 + 24.0, 144.0])
    text = plan.tell(items, 2)
    hours = sum(item.seconds for item in items) / 3600 / 2
    assert f"1 of {len(items)} runs are done; 1 begun (begun); {len(items) - 2} not begun (missing). About {hours:.1f} hours are left with 2 side by side" in text
    assert first.run.hash not in text and f"{second.run.hash}  begun" in text


@pytest.mark.parametrize("name, text", [("posthoc", "{}"), ("posthoc", "[]"), ("posthoc", "no seconds"), ("timing", "{}"), ("timing", "[]")])
def test_a_damaged_file_of_the_store_is_a_sentence_of_the_plan(tmp_path, monkeypatch, capsys, name, text):
    first, second, *_ = plan.plan("smoke", ["01"], store=tmp_path)
    measured(tmp_path, first)
    (tmp_path / second.run.hash).mkdir(exist_ok=True)
    at = tmp_path / (second.run.hash if name == "timing" else first.run.hash) / ("timing.json" if name == "timing" else f"{runs.posthoc_name(first.posthoc)}.json")
    at.write_text(stored(config=to_dict(first.run)) if text == "no seconds" else text)
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"predmoe: {at} is damaged") and said.count("\n") == 1


def test_a_larger_model_is_estimated_by_its_active_parameters(tmp_path):
    small = plan.plan("smoke", FIRST, store=tmp_path)[0]
    measured(tmp_path, small)
    large = config.tier("cpu")
    (seconds,) = [plan._estimate(large, runs.Run(tmp_path / large.hash, large), plan._timings(tmp_path))]
    ratio = plan.count_parameters(large.model)["active"] / plan.count_parameters(small.run.model)["active"]
    tokens = large.train.steps * large.train.batch_size * large.model.context / (STEPS * 16 * 64)
    assert seconds == pytest.approx(ratio * (120.0 * tokens + 24.0))


def test_training_works_off_what_is_missing_in_order(tmp_path, monkeypatch):
    first = plan.plan("smoke", FIRST, store=tmp_path)[0]
    measured(tmp_path, first)
    asked = []
    monkeypatch.setattr(runs, "measure_missing", lambda wanted, **options: asked.append((wanted, options)))
    items = plan.plan("smoke", FIRST, store=tmp_path)
    plan.train(items, "smoke", parallel=2, store=tmp_path)
    ((wanted, options),) = asked
    assert [run.hash for run, _ in wanted] == [item.run.hash for item in items[1:]] and options["parallel"] == 2
    assert all(measurements == [items[0].posthoc] for _, measurements in wanted)


def test_a_run_that_one_notebook_measures_twice_is_measured_twice_once(tmp_path):
    """07 needs the locality of runs that 01 has; the plan asks for both in one go, and calls the run done when both are there."""
    together = plan.plan("smoke", ["01", "07"], store=tmp_path)
    shared = [item for item in together if item.notebooks == ("01_mechanism", "07_controls")]
    assert shared and all([type(how) for how in item.further] == [config.LocalityConfig] for item in shared)
    assert all(item.further == () for item in plan.plan("smoke", ["01"], store=tmp_path))
    measured(tmp_path, dataclasses.replace(shared[0], further=()))
    before = next(item for item in plan.plan("smoke", ["01", "07"], store=tmp_path) if item.run == shared[0].run)
    assert before.state == "missing" and next(item for item in plan.plan("smoke", ["01"], store=tmp_path) if item.run == shared[0].run).state == "done"
    measured(tmp_path, shared[0])
    assert next(item for item in plan.plan("smoke", ["01", "07"], store=tmp_path) if item.run == shared[0].run).state == "done"


def test_a_finished_run_without_its_weights_counts_as_untrained_where_it_must_be_measured_again(tmp_path):
    item = next(item for item in plan.plan("smoke", ["07"], store=tmp_path))
    measured(tmp_path, dataclasses.replace(item, further=()))
    folder = tmp_path / item.run.hash
    (folder / "timing.json").write_text(json.dumps({"steps": item.run.train.steps, "seconds": 1.0, "tokens_per_second": 1.0}))
    seconds = lambda: next(i.seconds for i in plan.plan("smoke", ["07"], store=tmp_path) if i.run == item.run)  # noqa: E731
    assert seconds() == pytest.approx(24.0)   # the measurement alone
    (folder / "finished.json").write_text('{"val_loss": 5.0}')
    assert seconds() == pytest.approx(120.0 + 24.0)


def test_the_plan_says_in_words_how_far_a_run_is_and_which_command_makes_the_rest(tmp_path, monkeypatch, capsys):
    """Of 01's four runs: one done, one trained and not measured, one the same without its weights, as in a clone, one never begun."""
    items = plan.plan("smoke", ["01"], store=tmp_path)
    done, trained, again, never = items
    measured(tmp_path, done)
    for item in (trained, again):
        folder = tmp_path / item.run.hash
        folder.mkdir()
        (folder / "finished.json").write_text('{"val_loss": 5.0}')
    (tmp_path / trained.run.hash / "checkpoint").mkdir()
    for name in ("config.json", "model.safetensors", "predictor.safetensors"):
        (tmp_path / trained.run.hash / "checkpoint" / name).touch()
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 0
    out = capsys.readouterr().out
    assert [item.state for item in plan.plan("smoke", ["01"], store=tmp_path)] == [plan.DONE, plan.TRAINED, plan.AGAIN, plan.MISSING]
    assert out.splitlines()[1].split()[:5] == ["01_mechanism", "4", "1", "2", "1"]
    assert ("1 of 4 runs are done; 1 trained, and to be measured (trained); 1 trained and to be measured, but without their weights here, so they are trained "
            "again first (again); 1 not begun (missing). About") in out  # fmt: skip
    assert all(f"{item.run.hash}  {state} " in out for item, state in ((trained, "trained"), (again, "again"), (never, "missing")))
    assert out.endswith("To train and measure what is left (it can be interrupted and goes on): predmoe plan --profile smoke --only 01 --parallel 2 --train\n")
    for item in items:
        measured(tmp_path, item)
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 0
    assert capsys.readouterr().out.endswith("All 4 runs are done.\n")


@pytest.mark.parametrize("name", ["config.json", "finished.json", "timing.json", "provenance.json", "metrics.jsonl"])
def test_a_run_with_a_damaged_file_is_not_called_done(tmp_path, monkeypatch, capsys, name):
    first = plan.plan("smoke", ["01"], store=tmp_path)[0]
    measured(tmp_path, first)
    folder = tmp_path / first.run.hash
    (folder / "finished.json").write_text('{"val_loss": 5.0}')
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 0
    capsys.readouterr()
    (folder / name).write_text("{")
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"predmoe: {folder / name}") and "is damaged" in said and said.count("\n") == 1


def test_the_command_prints_the_plan_and_refuses_what_is_unknown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 0
    out = capsys.readouterr().out
    assert "01_mechanism" in out and "0 of 4 runs are done" in out and "02_horizons" not in out
    assert cli.main(["plan", "--profile", "nosuch"]) == 2
    assert "unknown profile 'nosuch'" in capsys.readouterr().err
    assert cli.main(["plan", "--profile", "smoke", "--train", "--parallel", "0"]) == 2
    assert "--parallel 0: at least one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tier": "huge"}, "tier='huge' is unknown"), ({"seeds": [0, 0]}, "must be distinct"), ({"seeds": []}, "names no seed"),
        ({"seeds": [0], "selection_seeds": [0]}, "share 0"), ({"selection_objectives": [{"target": "soft"}]}, "lacks gradient, lambda_pred"),
    ],
)  # fmt: skip
def test_a_study_that_could_not_be_reported_is_refused_before_it_trains(change, said):
    p = execute.inspect(paths.NOTEBOOKS / "02_horizons.ipynb") | change
    with pytest.raises(config.ConfigError, match=said):
        studies.posthoc_config(p["tier"], p["posthoc"])
        studies.horizons(p)


def test_labels_name_what_tells_runs_apart_and_nothing_else():
    base, alike = tiny("files:a"), tiny("files:a", objective={})
    assert set(runs.labels([base, alike, base]).values()) == {"joint 0.3 topk/input, seed 0", "baseline, seed 0"}
    sizes = [tiny("files:a", model={"hidden_size": size, "expert_size": size}, steps=size) for size in (32, 64)] + [tiny("files:a", model={"num_experts": 8})]
    label = runs.labels([*sizes, alike])
    assert [label[run.hash] for run in [*sizes, alike]] == [
        "joint 0.3 topk/input, seed 0 (hidden_size 32, num_experts 4)", "joint 0.3 topk/input, seed 0 (hidden_size 64, num_experts 4)",
        "joint 0.3 topk/input, seed 0 (hidden_size 32, num_experts 8)", "baseline, seed 0",
    ]  # fmt: skip
    longer = tiny("files:a", objective={}, steps=60)
    assert runs.labels([alike, longer]) == {alike.hash: "baseline, seed 0 (steps 30)", longer.hash: "baseline, seed 0 (steps 60)"}
    assert set(runs.labels([alike, longer], besides=["steps"]).values()) == {"baseline, seed 0"}, "what the caller tells of each run is not told twice"


@pytest.mark.parametrize("profile", ["smoke", "cpu"])
def test_no_two_runs_of_a_plan_have_one_label(profile, tmp_path):
    wanted = [item.run for item in plan.plan(profile, store=tmp_path)]
    label = runs.labels(wanted)
    assert len(set(label.values())) == len(label) == len({run.hash for run in wanted}) > 10
    lines = [line.split("missing  ", 1)[1] for line in plan.tell(plan.plan(profile, store=tmp_path), 2).splitlines() if line.startswith("  ")]
    names = [re.match(r".*?, (\d+) steps(?=  \()", line)[0] for line in lines]
    assert len(set(names)) == len(names) == len(label) and not any("steps " in name for name in names), "one form for all, and no two alike"


def test_a_notebook_that_fits_twice_asks_for_the_other_loss_and_its_plan_has_both(tmp_path):
    for name in studies.REFITTED:
        (job,) = execute.plan("smoke", [name])
        parameters = execute.check(job.notebook, job.params)
        first, second = studies.first_fit(parameters), studies.second_fit(parameters)
        assert {first.ranking_loss, second.ranking_loss} == set(RANKING_LOSSES) and dataclasses.replace(second, ranking_loss=first.ranking_loss) == first
        assert all({item.posthoc, *item.further} == {first, second} for item in plan.plan("smoke", [name], store=tmp_path))


@pytest.mark.parametrize("name", ["10_olmoe_lora", "13_olmoe_dose"])
def test_two_losses_asked_of_one_fit_are_refused_and_the_same_twice_is_not(name):
    parameters = execute.inspect(paths.NOTEBOOKS / f"{name}.ipynb")
    with pytest.raises(config.ConfigError, match="^posthoc: ranking_loss='margin' contradicts the parameter ranking_loss='margin_all': set ranking_loss alone, and leave it out of posthoc$"):
        studies.first_fit(parameters | {"ranking_loss": "margin_all", "posthoc": {"ranking_loss": "margin"}})
    for loss in RANKING_LOSSES:
        twice, once = (studies.first_fit(parameters | {"ranking_loss": loss, "posthoc": posthoc}) for posthoc in ({"ranking_loss": loss, "patience": 2}, {"patience": 2}))
        assert twice == once and (once.ranking_loss, once.patience) == (loss, 2)


def test_a_notebook_without_the_parameter_takes_the_loss_from_its_fit():
    parameters = execute.inspect(paths.NOTEBOOKS / "06_seeds.ipynb")
    assert studies.first_fit(parameters | {"posthoc": {"ranking_loss": "margin_all"}}).ranking_loss == "margin_all"
    with pytest.raises(config.ConfigError, match="ranking_loss='hinge' is unknown"):
        studies.first_fit(parameters | {"posthoc": {"ranking_loss": "hinge"}})
