"""The notebooks as documents (no output, one explained parameters cell, short cells) and as programs (they run)."""

import ast
import json
import re

import nbformat
import pytest

from predmoe import execute, paths, results, runs, studies

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
EXPERIMENTS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.name)]
PROFILES = ("cpu", "tier_b", "tier_a")
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
experiments = pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)


def code(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


# --- as documents ----------------------------------------------------------------------------------------------------

def test_the_first_notebooks_are_there():
    assert {"00_report", "01_mechanism", "02_horizons", "04_isolation", "05_cache_simulation", "06_seeds", "08_latency_sensitivity", "11_engine", "14_ranking_seeds"} <= {path.stem for path in NOTEBOOKS}


@notebooks
def test_sources_are_free_of_outputs(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    for cell in code(path):
        assert not cell.outputs and cell.execution_count is None
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text()), "a path of somebody's machine"


@experiments
def test_one_parameters_cell_of_explained_literals(path):
    defaults = execute.inspect(path)
    assert defaults["profile"] == "smoke", "the defaults are the smoke profile"


@notebooks
def test_cells_call_the_package(path):
    """No training loop, no function longer than ten lines, no import of a private name."""
    for cell in code(path):
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.While), "a loop that belongs in the package"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 10, f"{node.name} belongs in the package"
        assert ".backward(" not in cell.source and "._" not in cell.source


@experiments
def test_it_reads_top_to_bottom(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert cells[0].source.startswith("# ") and "## Limits" in text and "reads" in text.lower() and "writes" in text.lower()
    if not path.name.startswith("00_"):
        assert "**Question.**" in text and "$$" in text and "## Compared with the reference study" in text


@experiments
def test_every_figure_has_its_own_alternative_text(path):
    calls = [
        node for cell in code(path) for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "save_figure"
    ]  # fmt: skip
    assert calls and all(any(keyword.arg == "alt" for keyword in call.keywords) for call in calls)


@experiments
@pytest.mark.parametrize("profile", PROFILES)
def test_parameter_files_are_there_and_pass_the_strict_check(path, profile):
    jobs = {job.name: job for job in execute.plan(profile)}   # checks every file of the profile
    assert jobs[path.stem].params["profile"] == profile and (paths.PARAMS / path.stem / f"{profile}.yaml").exists()


@pytest.mark.parametrize("profile", PROFILES)
def test_the_alternative_is_chosen_on_seeds_that_the_report_does_not_use(profile):
    params = execute.inspect(paths.NOTEBOOKS / "02_horizons.ipynb") | {job.name: job for job in execute.plan(profile)}["02_horizons"].params
    assert not set(params["seeds"]) & set(params["selection_seeds"])
    assert len(params["seeds"]) >= 3, "a verdict takes three seeds"


@pytest.mark.parametrize("name", ["04_isolation", "06_seeds", "14_ranking_seeds"])
def test_seeds_of_the_committed_profile_are_enough_for_a_verdict(name):
    params = execute.inspect(paths.NOTEBOOKS / f"{name}.ipynb") | {job.name: job for job in execute.plan("cpu")}[name].params
    assert len(params["seeds"]) >= 3 and params["tier"] == "cpu"


@pytest.mark.parametrize("name", ["05_cache_simulation", "08_latency_sensitivity"])
def test_simulations_of_the_committed_profile_have_seeds_enough_for_a_verdict_and_use_its_models(name):
    params = execute.inspect(paths.NOTEBOOKS / f"{name}.ipynb") | {job.name: job for job in execute.plan("cpu")}[name].params
    assert params["models"] == params["profile"] == "cpu" and len(params["model_seeds"]) >= 3 and len(params["seeds"]) >= 3


@pytest.mark.parametrize("params, message", [({"lambda_predd": 0.3}, "lambda_pred"), ({"lambda_pred": "3e-1"}, "lambda_pred"), ({"seeds": 0}, "seeds")])
def test_the_strict_check_names_the_parameter(params, message):
    with pytest.raises(ValueError, match=message):
        execute.check(paths.NOTEBOOKS / "02_horizons.ipynb", params)


# --- as programs -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("copy", sorted((paths.ROOT / "outputs").glob("*/*/*.ipynb")), ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_committed_copy_is_small_enough_to_be_read_on_the_web(copy):
    assert copy.stat().st_size < 500_000


@pytest.mark.parametrize("copy", sorted((paths.ROOT / "outputs").glob("*/*/*.ipynb")), ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_committed_copy_shows_no_warnings(copy):
    outputs = [output for cell in json.loads(copy.read_text())["cells"] for output in cell.get("outputs", [])]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []


# Real, but as small as it goes: two layers more than the deepest horizon, four steps.
TINY = {
    "tier": "smoke", "seeds": [0, 1],
    "train": {"steps": 4, "warmup_steps": 1, "batch_size": 4, "eval_every": 2},
    "data": {"heldout_tokens": 4096, "dev_tokens": 1024},
    "posthoc": {"tokens": 2048, "batch_tokens": 256, "eval_every": 5, "max_steps": 10, "patience": 1},
}  # fmt: skip


# The engine on the models that 02 has trained.
ENGINE = TINY | {"shares": [0.4], "per_domain": 1, "prompt": 6, "new_tokens": 3, "exact_policies": ["lru"], "exact_horizons": [1], "disk_reads": 8, "peers": []}


# Simulations, as small as they go.
SMALL = {
    "05_cache_simulation": {"seeds": [0], "model_seeds": [0], "tokens": 24, "warmup": 8, "lengths": [4, 8], "model_shares": [0.5], "curve_shares": [0.5],
                            "sequences": 1, "colibri_tokens": 14, "model_tokens": 8},
    "08_latency_sensitivity": {"seeds": [0], "model_seeds": [0], "tokens": 6, "warmup": 3, "bandwidths": [3.5, 5.0], "prompt": 2, "sequences": 1, "map_recalls": [0.5, 0.9],
                               "map_precisions": [0.2, 0.9], "map_horizons": [1], "map_bandwidths": [5.0], "grid_bandwidths": [5.0], "grid_horizons": [1]},
}  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def simulated(request, tmp_path_factory):
    """05 and 08 executed into a folder of their own: the accuracies and traces of the cpu profile are the repository's."""
    folder = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_OUTPUTS", str(folder))
        patch.setenv("PREDMOE_TRACES", str(folder / "none"))   # as in a fresh clone
        name = request.param
        execute.execute(paths.NOTEBOOKS / f"{name}.ipynb", folder / "smoke" / name / f"{name}.ipynb", SMALL[name])
        yield folder / "smoke", name


@pytest.mark.slow
def test_a_simulation_runs_in_a_fresh_clone_and_says_what_was_not_there(simulated):
    folder, name = simulated
    leaves_what_it_promises(folder, name)
    claims = {claim["id"]: claim for claim in results.load_claims("smoke") if claim["notebook"] == name}
    assert claims and all(claim["verdict"] == "not tested" and claim["n"] == 1 for claim in claims.values())
    if name.startswith("05"):
        assert any("public traces are NOT here" in sentence for sentence in results.load("smoke", name)["findings"])


# In order: what needs no other models than 01's and 02's costs no training.
TRAINED = {
    "01_mechanism": TINY, "02_horizons": TINY, "04_isolation": TINY, "06_seeds": TINY | {"most_seeds": 4}, "11_engine": ENGINE,
    "14_ranking_seeds": TINY | {"sizes": [{"name": "d = 32", "seeds": 1, "model": {"hidden_size": 32, "expert_size": 32}}]},
    "00_report": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebooks that train, and 00, executed for real into a folder of their own; all but the first find most of their models in the store."""
    folder = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_OUTPUTS", str(folder))
        for name, params in TRAINED.items():
            execute.execute(paths.NOTEBOOKS / f"{name}.ipynb", folder / "smoke" / name / f"{name}.ipynb", params)
        yield folder / "smoke"


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_notebook_runs_and_leaves_what_it_promises(executed, name):
    leaves_what_it_promises(executed, name)


def needed_by(notebooks, **shared):
    """Hashes of the models that these notebooks' studies name, from notebook -> parameters: one for each notebook that needs it."""
    asked = {name: execute.check(paths.NOTEBOOKS / f"{name}.ipynb", shared | params) for name, params in notebooks.items() if name in studies.STUDIES}
    return [run for name, params in asked.items() for run in dict.fromkeys(run.hash for _, run in studies.pairs_of(name, params))]


def trained(folder):
    """Hashes of the models in a store, once for each time that one was trained to its end."""
    last = re.compile(r"^step (\d+)/\1,", re.MULTILINE)
    return sorted(log.parent.name for log in (folder / "runs").glob("*/log.txt") for _ in last.findall(log.read_text()))


def leaves_what_it_promises(executed, name):
    """results.json, its figures and tables as files, a small executed copy that shows every figure and every finding."""
    result = results.load("smoke", name)
    assert result["findings"] and (name == "00_report" or (result["arms"] and result["effects"]))
    for figure in result["figures"]:
        assert (executed / name / figure["svg"]).stat().st_size and (executed / name / figure["png"]).stat().st_size
    for table in result["tables"]:
        assert (executed / name / table["csv"]).stat().st_size
    copy = executed / name / f"{name}.ipynb"
    assert copy.stat().st_size < 500_000, "an executed notebook stays below 500 kB"
    images = [out for cell in code(copy) for out in cell.outputs if "image/png" in out.get("data", {})]
    assert len(images) == len(result["figures"]) and all(out.metadata["image/png"]["alt"] for out in images)
    shown = "".join("".join(out.get("data", {}).get("text/markdown", "")) for cell in code(copy) for out in cell.outputs)
    assert all(sentence in shown for sentence in result["findings"])


@pytest.mark.slow
def test_the_notebooks_train_what_their_studies_name_once_each(executed):
    """Most of these models several notebooks need."""
    needed = needed_by(TRAINED)
    assert trained(executed) == sorted(set(needed)) and len(set(needed)) < len(needed)


@pytest.mark.slow
def test_two_seeds_decide_nothing_and_the_report_says_so(executed):
    claims = json.loads((executed / "claims.json").read_text())
    assert {claim["verdict"] for claim in claims} == {"not tested"}
    gain = next(claim for claim in claims if claim["id"] == "ranking-gain")
    assert gain["effect"]["n"] == 2 and "at least 3 seeds" in gain["why"]


@pytest.mark.slow
def test_a_second_execution_trains_nothing_and_differs_in_provenance_only(executed):
    before = results.load("smoke", "02_horizons")
    runs = sorted(path.stat().st_mtime_ns for path in (executed / "runs").glob("*/posthoc-*.json"))
    execute.execute(paths.NOTEBOOKS / "02_horizons.ipynb", executed / "02_horizons" / "02_horizons.ipynb", TINY)
    after = results.load("smoke", "02_horizons")
    assert sorted(path.stat().st_mtime_ns for path in (executed / "runs").glob("*/posthoc-*.json")) == runs
    del before["provenance"], after["provenance"]
    assert before == after


@pytest.mark.slow
def test_the_engines_measurements_outlive_the_weights(executed):
    """Executed again where the weights are gone, 11 gives the same results: a later commit needs no new timings."""
    before = results.load("smoke", "11_engine")
    kept = [(path, path.rename(path.with_name("away"))) for path in (executed / "runs").glob("*/checkpoint")]
    try:
        execute.execute(paths.NOTEBOOKS / "11_engine.ipynb", executed / "11_engine" / "11_engine.ipynb", ENGINE)
    finally:
        for path, away in kept:
            away.rename(path)
    after = results.load("smoke", "11_engine")
    del before["provenance"], after["provenance"]
    assert kept and before == after


@pytest.mark.slow
def test_one_seed_is_enough_to_run_and_is_called_untested(executed):
    execute.execute(paths.NOTEBOOKS / "02_horizons.ipynb", executed / "02_horizons" / "single.ipynb", TINY | {"seeds": [0]})
    assert any("in one seed, untested" in sentence for sentence in results.load("smoke", "02_horizons")["findings"])


# What these take on top of the models of 01 and 02, in the same store: one seed of everything. 01's baseline is the model that is fine-tuned.
FINETUNED = {"seeds": [0], "stock": {"model": {}, "train": TINY["train"]}, "rank": 2}
FURTHER = {
    "10_olmoe_lora": FINETUNED | {"isolation_seeds": 0}, "13_olmoe_dose": FINETUNED | {"parts": ["half"]},
    "07_controls": {"seeds": [0], "order_seeds": [0]},
    "12_downstream": {"seeds": [0], "items": 4, "cloze": 10, "peer_items": 4},
    "09_longer_training": {"seeds": [0], "times": 0.5},
    "15_frontier": {"seeds": [0], "entries": [{"name": "early 1", "seeds": 1, "model": {"routing": "early", "early_by": 1}},
                                            {"name": "next", "seeds": 1, "predictor": {"next_token": True}, "objective": {"lambda_pred": 0.3, "lambda_lookup": 0.1}}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def further(executed):
    """07, 09, 10, 12, 13 and 15 executed for real after 01 and 02; the report's claims are then theirs too."""
    for name, params in FURTHER.items():
        execute.execute(paths.NOTEBOOKS / f"{name}.ipynb", executed / name / f"{name}.ipynb", TINY | params)
    return executed


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_a_further_notebook_runs_on_the_models_that_are_there(further, name):
    leaves_what_it_promises(further, name)
    arms = {row["arm"]: row for row in results.load("smoke", name)["arms"]}
    assert arms["stock" if "stock" in arms else "baseline"]["config_hash"] == next(row["config_hash"] for row in results.load("smoke", "01_mechanism")["arms"] if (row["arm"], row["seed"]) == ("baseline", 0))
    if name == "12_downstream":
        assert all("heldout_cloze" in row["downstream"]["tasks"] and not row["downstream"]["harness"]["heldout_cloze"]["judged_otherwise"] for row in arms.values())
    elif "stock" in arms:
        fine = {arm: row for arm, row in arms.items() if "drift" in row}
        assert fine.keys() == {"10_olmoe_lora": {"baseline", "joint 0.1"}, "13_olmoe_dose": {"baseline", "joint 1", "half baseline", "half joint 1"}}[name]
        assert all(row["trained"]["experts"] for row in fine.values()) and all(("cotrained" in row["hit"]) == ("joint" in arm) for arm, row in fine.items())
    elif name == "09_longer_training":
        assert "sharpened" in arms and {"baseline 0.5x", "joint 0.5x", "entropy 0.01"} <= arms.keys()
    else:
        assert all(set(row["locality"]["lru"]) == {"1/8", "1/4", "1/2"} for row in arms.values())
        assert all(("cotrained" in row["locality"]["next_token"]) == (arm == "next") for arm, row in arms.items())


@pytest.mark.slow
def test_the_further_notebooks_add_what_their_studies_name_beyond_that_and_measure_twice_what_they_must(further):
    before, more = needed_by(TRAINED), needed_by(FURTHER, **TINY)
    assert trained(further) == sorted({*before, *more}) and set(before) & set(more)
    for kind in ("locality", "downstream"):
        twice = {path.parent.name for path in (further / "runs").glob(f"*/{kind}-*.json") if not path.name.endswith(".config.json")}
        asking = [name for name, how in studies.FURTHER.items() if runs.kind_of(how(execute.inspect(paths.NOTEBOOKS / f"{name}.ipynb"))) == kind]
        assert twice == set(needed_by({name: FURTHER[name] for name in asking}, **TINY))
