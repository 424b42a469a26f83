"""What each notebook needs, and what a profile still has to train."""

import json

import pytest

from predmoe import cli, config, execute, paths, plan, runs, studies
from predmoe.config import ConfigError, to_dict

SHARED = {"tier": "smoke", "horizons": [1], "changes": {"train": {"threads": 2}, "data": {}}}


def told(pairs):
    return [(arm, run.train.seed, run.objective.lambda_pred, run.train.steps) for arm, run in pairs]


def test_a_variation_of_the_objective_touches_the_joint_arm_alone_and_one_of_training_both():
    explanations = [{"name": "weight", "objective": {"lambda_pred": 1.0}}, {"name": "steps", "train": {"steps": 40}, "seeds": 1}]
    found = studies.variations(explanations, {"lambda_pred": 0.3}, [5, 6], **SHARED)
    assert list(found) == [studies.AS_IT_STANDS, "weight", "steps"]
    assert told(found[studies.AS_IT_STANDS]) == [("baseline", 5, 0.0, 120), ("joint", 5, 0.3, 120), ("baseline", 6, 0.0, 120), ("joint", 6, 0.3, 120)]
    assert told(found["weight"]) == [("baseline", 5, 0.0, 120), ("joint", 5, 1.0, 120), ("baseline", 6, 0.0, 120), ("joint", 6, 1.0, 120)]
    assert told(found["steps"]) == [("baseline", 5, 0.0, 40), ("joint", 5, 0.3, 40)]
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


def test_isolation_and_seeds_need_no_models_but_those_of_the_first_notebooks():
    first = {run.hash for _, run in studies.pairs_of("01_mechanism", execute.check(paths.NOTEBOOKS / "01_mechanism.ipynb", {}))}
    for name in ("04_isolation", "06_seeds"):
        assert {run.hash for _, run in studies.pairs_of(name, execute.check(paths.NOTEBOOKS / f"{name}.ipynb", {}))} == first
    ranking = {run.hash for _, run in studies.pairs_of("14_ranking_seeds", execute.check(paths.NOTEBOOKS / "14_ranking_seeds.ipynb", {}))}
    assert first < ranking and len(ranking - first) == 2   # a pair of another width


# --- the plan ----------------------------------------------------------------------------------------------------------

def measured(store, item, *, train=120.0, posthoc=24.0):
    """A store's folder of a finished and measured run, as far as the plan looks."""
    folder = store / item.run.hash
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{runs.posthoc_name(item.posthoc)}.json").write_text(json.dumps({"config": to_dict(item.run), "seconds": {"train": train, "posthoc": posthoc}}))


def test_each_run_is_planned_once_and_told_by_every_notebook_that_needs_it(tmp_path):
    items = plan.plan("smoke", ["01", "02", "03"], store=tmp_path)
    assert len({item.run.hash for item in items}) == len(items) == 11
    assert items[0].notebooks == ("01_mechanism", "02_horizons", "03_dose") and ("02_horizons",) in [item.notebooks for item in items]
    assert all(item.state == "missing" and item.seconds is None for item in items)
    assert "11 of 11 runs are missing; about unknown hours" in plan.tell(items, 2)


def test_time_left_is_what_like_runs_took(tmp_path):
    first, second, *_ = plan.plan("smoke", ["01", "02", "03"], store=tmp_path)
    measured(tmp_path, first)
    (tmp_path / second.run.hash).mkdir()
    (tmp_path / second.run.hash / "timing.json").write_text(json.dumps({"steps": 30}))
    items = plan.plan("smoke", ["01", "02", "03"], store=tmp_path)
    assert [item.state for item in items[:3]] == ["done", "part", "missing"]
    assert [item.seconds for item in items[:3]] == pytest.approx([0.0, 90.0 + 24.0, 144.0])
    text = plan.tell(items, 2)
    assert "10 of 11 runs are missing; about 0.2 hours with 2 side by side" in text and first.run.hash not in text and f"{second.run.hash}  part" in text


def test_a_larger_model_is_estimated_by_its_active_parameters(tmp_path):
    small = plan.plan("smoke", store=tmp_path)[0]
    measured(tmp_path, small)
    large = config.tier("cpu")
    (seconds,) = [plan._estimate(large, runs.Run(tmp_path / large.hash, large), plan._timings(tmp_path))]
    ratio = plan.count_parameters(large.model)["active"] / plan.count_parameters(small.run.model)["active"]
    tokens = large.train.steps * large.train.batch_size * large.model.context / (120 * 16 * 64)
    assert seconds == pytest.approx(ratio * (120.0 * tokens + 24.0))


def test_training_works_off_what_is_missing_in_order(tmp_path, monkeypatch):
    first = plan.plan("smoke", store=tmp_path)[0]
    measured(tmp_path, first)
    asked = []
    monkeypatch.setattr(runs, "get_or_measure", lambda configs, posthoc, **options: asked.append((configs, options)))
    items = plan.plan("smoke", store=tmp_path)
    plan.train(items, "smoke", parallel=2, store=tmp_path)
    ((configs, options),) = asked
    assert [run.hash for run in configs] == [item.run.hash for item in items[1:]] and options["parallel"] == 2


def test_the_command_prints_the_plan_and_refuses_what_is_unknown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))
    assert cli.main(["plan", "--profile", "smoke", "--only", "01"]) == 0
    out = capsys.readouterr().out
    assert "01_mechanism" in out and "4 of 4 runs are missing" in out and "02_horizons" not in out
    assert cli.main(["plan", "--profile", "nosuch"]) == 2
    assert "unknown profile 'nosuch'" in capsys.readouterr().err
    assert cli.main(["plan", "--profile", "smoke", "--train", "--parallel", "0"]) == 2
    assert "parallel=0 must be at least 1" in capsys.readouterr().err
