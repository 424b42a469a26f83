"""results.json and claims.json: schema, completeness, atomic writes, figures, claims."""

import copy
import json
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
import yaml
from fake_measurements import finished, study
from matplotlib.figure import Figure

from predmoe import experiments, paths, results


@pytest.mark.parametrize("text", ["[]", "3", "{", "\xff"])
def test_damaged_results_are_a_sentence_that_says_what_to_do(outputs, text):
    (outputs / "smoke" / "02_horizons").mkdir(parents=True)
    (outputs / "smoke" / "02_horizons" / "results.json").write_text(text, encoding="latin-1")
    with pytest.raises(results.ResultError, match="^results.json of 02_horizons is damaged .*: run the notebook again$"):
        results.load("smoke", "02_horizons")
    with pytest.raises(results.ResultError, match="is damaged"):
        results.load_all("smoke")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_neither_read_nor_written(outputs, constant):
    """Python's reader takes what JSON has no word for; the schema's "number" takes it too."""
    path = finished().folder / "results.json"
    path.write_text(path.read_text().replace('"val_loss": ', f'"val_loss": {constant}, "was": ', 1))
    with pytest.raises(results.ResultError, match=f"^results.json of 02_horizons is damaged .it holds {constant}, which is not a finite number.: run the notebook again$"):
        results.load("smoke", "02_horizons")
    arms = study()
    arms[0]["val_loss"] = float(constant)
    with pytest.raises(results.ResultError, match="not a finite number"):
        results.start("03_dose", "smoke", {}).finish(arms, [])
    assert not (outputs / "03_dose" / "results.json").exists() and not (path.parents[1] / "03_dose" / "results.json").exists()


def test_a_profile_that_there_is_not_is_told_with_those_that_there_are(outputs):
    for read in (lambda: results.load("nope", "02_horizons"), lambda: results.borrow("nope", "02_horizons"), lambda: results.load_claims("nope")):
        with pytest.raises(results.paths.ConfigError, match="^unknown profile 'nope'; there are parameters for .*cpu.*smoke"):
            read()


@pytest.mark.parametrize("text, said", [("{}", "is damaged .it holds a dict"), ("{", "is damaged"), ("[]", "non-empty"), ("[{}]", "is a required property")])
def test_damaged_claims_are_a_sentence_that_says_what_to_do(outputs, text, said):
    (outputs / "smoke").mkdir()
    (outputs / "smoke" / "claims.json").write_text(text)
    with pytest.raises(results.ResultError, match=f"^claims.json of smoke.*{said}.* run 00_report again$"):
        results.load_claims("smoke")


# --- results.json ----------------------------------------------------------------------------------------------------

def test_what_was_finished_is_what_is_loaded(outputs):
    arms = study()
    run = results.start("02_horizons", "smoke", {"seeds": [0, 1, 2], "lambda_pred": 0.3})
    run.found("One finding.", "Another.")
    run.save_table("hits", experiments.hits(arms))
    path = run.finish(arms, [])
    assert path == outputs / "smoke" / "02_horizons" / "results.json"
    loaded = results.load("smoke", "02_horizons")
    assert loaded["findings"] == ["One finding.", "Another."] and loaded["provenance"]["parameters"]["lambda_pred"] == 0.3
    assert [(row["arm"], row["seed"]) for row in loaded["arms"]] == [(row["arm"], row["seed"]) for row in arms]
    assert loaded["arms"][1]["hit"] == arms[1]["hit"]
    assert pd.read_csv(outputs / "smoke" / "02_horizons" / "hits.csv").shape == experiments.hits(arms).shape
    assert list(results.load_all("smoke")) == ["02_horizons"]


def test_speed_and_provenance_of_each_model_are_kept_apart_from_what_it_measured(outputs):
    finished()
    loaded = results.load("smoke", "02_horizons")
    assert not {"seconds", "tokens_per_second", "provenance", "documents", "curves"} & loaded["arms"][0].keys()
    assert loaded["provenance"]["runs"][loaded["arms"][0]["config_hash"]]["tokens_per_second"] == 3600.0


def test_two_executions_differ_in_provenance_only(outputs):
    finished()
    first = results.load("smoke", "02_horizons")
    finished()
    second = results.load("smoke", "02_horizons")
    del first["provenance"], second["provenance"]
    assert first == second


REQUIRED = (
    "val_loss", "hit", "exact_set", "margin_over_token_id", "router_entropy", "load_entropy", "static_hit", "token_id_hit", "reuse", "lambda_pred",
)  # fmt: skip


@pytest.mark.parametrize("metric", REQUIRED)
def test_a_missing_metric_is_an_error_and_leaves_the_old_file(outputs, metric):
    finished()
    before = (outputs / "smoke" / "02_horizons" / "results.json").read_bytes()
    arms = study()
    del arms[2][metric]
    run = results.start("02_horizons", "smoke", {})
    with pytest.raises(results.ResultError, match=rf"arms\[2\].*{metric}"):
        run.finish(arms, [])
    assert (outputs / "smoke" / "02_horizons" / "results.json").read_bytes() == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.8"])
def test_a_value_that_is_no_finite_number_is_an_error(outputs, value):
    arms = study()
    arms[0]["hit"]["linear"]["1"] = value
    with pytest.raises(results.ResultError):
        results.start("02_horizons", "smoke", {}).finish(arms, [])
    assert not (outputs / "smoke" / "02_horizons" / "results.json").exists()


def test_an_arm_without_a_model_needs_no_training_metrics(outputs):
    results.start("05_cache_simulation", "smoke", {}).finish([{"arm": "demand", "seed": 0, "tokens_per_second": 1.0}], [])
    assert results.load("smoke", "05_cache_simulation")["arms"][0]["arm"] == "demand"


def test_absent_and_older_results_say_what_to_do(outputs):
    with pytest.raises(results.ResultError, match="02_horizons has no results in profile smoke: run its notebook first"):
        results.load("smoke", "02_horizons")
    finished()
    path = outputs / "smoke" / "02_horizons" / "results.json"
    old = json.loads(path.read_text())
    del old["schema_version"]
    path.write_text(json.dumps(old))
    with pytest.raises(results.ResultError, match="schema version none, this code reads 1: run the notebook again"):
        results.load("smoke", "02_horizons")


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(outputs, monkeypatch):
    finished()
    folder = outputs / "smoke" / "02_horizons"
    before = (folder / "results.json").read_bytes()
    write = Path.write_bytes

    def full(self, content):
        write(self, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        finished()
    assert (folder / "results.json").read_bytes() == before and not list(folder.glob(".*"))


# --- figures and findings --------------------------------------------------------------------------------------------

def line():
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([0, 1], [0, 1])
    return figure


def test_a_figure_is_saved_twice_with_its_text_and_shows_it_in_the_notebook(outputs):
    run = results.start("02_horizons", "smoke", {})
    picture = run.save_figure("line", line(), "A line that rises.")
    run.finish(study(), [])
    folder = outputs / "smoke" / "02_horizons"
    (entry,) = results.load("smoke", "02_horizons")["figures"]
    assert entry["alt"] == "A line that rises." and (folder / entry["svg"]).exists() and (folder / entry["png"]).exists()
    data, metadata = picture._repr_mimebundle_()
    assert metadata["image/png"] == {"alt": "A line that rises.", "width": 288}


def test_the_same_figure_gives_the_same_bytes(outputs):
    run = results.start("02_horizons", "smoke", {})
    files = []
    for _ in range(2):
        run.save_figure("line", line(), "A line.")
        files.append([(run.folder / "figures" / f"line.{kind}").read_bytes() for kind in ("svg", "png")])
    assert files[0] == files[1]


def test_a_figure_needs_an_alternative_text(outputs):
    with pytest.raises(results.ResultError, match="alternative text"):
        results.start("02_horizons", "smoke", {}).save_figure("line", line(), " ")


def test_findings_are_shown_as_a_quoted_block(outputs):
    assert results.start("02_horizons", "smoke", {}).found("A.", "B.")._repr_markdown_() == "> A.\n>\n> B.\n>"


# --- claims ----------------------------------------------------------------------------------------------------------

CLAIMS = {spec["id"]: spec for spec in yaml.safe_load((results.ASSETS / "claims.yaml").read_text())}
# What 01 and 02 can decide; everything else waits for its experiment.
DECIDED = {
    "ranking-gain", "predictable-backbone", "quality-cost", "mechanism", "linear-gain", "gain-grows-with-horizon", "ranking-is-stronger",
    "not-popularity", "not-token-identity", "margin-gain", "less-reuse", "cotrained-gain",
}  # fmt: skip


def test_without_results_every_claim_is_not_tested_and_says_why(outputs):
    (outputs / "smoke").mkdir()
    claims = results.update_claims("smoke")
    assert {claim["id"] for claim in claims} == set(CLAIMS) and len(claims) == len(CLAIMS)
    assert {claim["verdict"] for claim in claims} == {"not tested"}
    assert all(claim["effect"] is None and claim["why"] for claim in claims)
    assert results.load_claims("smoke") == claims


def test_three_seeds_decide_the_claims_of_the_first_notebooks_and_no_others(outputs):
    finished("01_mechanism")
    finished("02_horizons")
    claims = results.update_claims("smoke")
    assert {claim["id"] for claim in claims if claim["verdict"] != "not tested"} == DECIDED
    assert all(claim["n"] == 3 and len(claim["effect"]["ci95"]) == 2 for claim in claims if claim["id"] in DECIDED)


@pytest.mark.parametrize("seeds, words", [((0,), "single seed"), ((0, 1), "2 seeds")])
def test_too_few_seeds_show_an_effect_but_no_verdict(outputs, seeds, words):
    finished(arms=study(seeds))
    gain = next(claim for claim in results.update_claims("smoke") if claim["id"] == "ranking-gain")
    assert gain["verdict"] == "not tested" and words in gain["why"] and gain["effect"]["n"] == len(seeds)


@pytest.mark.parametrize("kind", ["results", "claims"])
def test_schemas_are_schemas(kind):
    jsonschema.Draft202012Validator.check_schema(json.loads((results.ASSETS / f"{kind}.schema.json").read_text()))


def test_the_claims_schema_refuses_an_unknown_verdict(outputs):
    (outputs / "smoke").mkdir()
    claims = copy.deepcopy(results.update_claims("smoke"))
    claims[0]["verdict"] = "confirmed"
    (outputs / "smoke" / "claims.json").write_text(json.dumps(claims))
    with pytest.raises(results.ResultError, match="verdict"):
        results.load_claims("smoke")


@pytest.mark.parametrize("path", sorted((paths.ROOT / "outputs").glob("*/*/results.json")) or [None], ids=str)
def test_committed_results_meet_the_schema(path):
    if path is None:
        pytest.skip("no results are committed yet")
    assert results.load(path.parents[1].name, path.parent.name)["experiment"] == path.parent.name
