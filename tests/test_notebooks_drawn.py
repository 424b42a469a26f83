"""07, 09 and 15 on drawn measurements of the committed profile's arms: what they say of three seeds, without training a model."""

import nbformat
import pytest
from fake_locality import drawn

from predmoe import execute, experiments, paper_figures, paper_text, paths, results

NAMES = ("07_controls", "09_longer_training", "15_frontier")
PARAMS = {job.name: job.params for job in execute.plan("cpu") if job.name in NAMES}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """name -> results.json of each notebook, its cells run in this process; "figures": what the paper draws of them."""
    folder, found = tmp_path_factory.mktemp("outputs"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_OUTPUTS", str(folder))
        patch.setattr(experiments, "measure_arms", lambda pairs, *_, **__: drawn(pairs))
        for name in NAMES:
            scope = {}
            for cell in nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
                if cell.cell_type == "code":
                    exec(compile(cell.source, name, "exec"), scope)
                    if "parameters" in cell.metadata.get("tags", []):
                        scope |= PARAMS[name] | {"profile": "drawn"}
            found[name] = results.load("drawn", name)
        drawn_in_the_paper = paper_figures.write("drawn", found, folder / "paper")
    return found | {"figures": drawn_in_the_paper}


@pytest.mark.parametrize("name, arms", [
    ("07_controls", {"baseline", "joint", "sticky 0.3", "sticky 1", "sticky 3", "sticky 1 + joint", "baseline (order)", "joint (order)"}),
    ("09_longer_training", {"baseline", "joint", "baseline 4x", "joint 4x", "entropy 0.005", "entropy 0.01", "entropy 0.05", "sharpened"}),
    ("15_frontier", {"baseline", "joint 0.03", "joint 0.1", "joint 0.3", "joint 1", "early 1", "early 2", "early 4", "hash", "sticky 1", "entropy 0.01", "next token", "lookup penalty"}),
])  # fmt: skip
def test_the_arms_that_claims_refer_to_are_there_with_what_they_measure(told, name, arms):
    rows = told[name]["arms"]
    assert arms <= {row["arm"] for row in rows}
    assert results.values_by_seed(rows, "baseline", "hit.ranking.4").keys() == {0, 1, 2}
    if name != "09_longer_training":
        assert results.values_by_seed(rows, "baseline", "locality.lru.1/4").keys() == {0, 1, 2}


def test_findings_of_the_controls_follow_what_was_drawn(told):
    said = " ".join(told["07_controls"]["findings"])
    assert "sticky 3 is more local by reuse" in said and "at weight 3 reuse +" in said and "joint is less local by reuse" in said
    assert "Where they vary the order of the text too, it" in said and "sticky 1 + joint moves, in points" in said   # a single seed


def test_structure_and_sharpness_add_up_to_the_gain(told):
    effects = told["09_longer_training"]["effects"]
    for h in (1, 2, 4):
        gain = next(e for e in effects if e.get("variation") == "as it stands" and e["horizon"] == h and e["predictor"] == "ranking")
        parts = [e for e in effects if e.get("part") and e["horizon"] == h]
        assert len(parts) == 2 and sum(e["mean"] for e in parts) == pytest.approx(gain["mean"]) and {e["n"] for e in parts} == {3}


def test_the_verdict_of_the_frontier_is_given_once_and_called_exploratory_where_an_arm_has_one_seed(told):
    (verdict,) = [said for said in told["15_frontier"]["findings"] if "moving the router earlier?**" in said]
    assert "exploratory" in verdict
    assert len(told["15_frontier"]["gates"]) == len({row["arm"] for row in told["15_frontier"]["arms"]}) - 1


def test_the_paper_draws_and_tells_them(told):
    assert set(told["figures"]) == {"locality", "ladder", "frontier"}
    found = {name: told[name] for name in NAMES}
    values = paper_text.values(found, [])
    for name in NAMES:
        said = values[f"findings.{name}"]
        assert r"\notrun" not in said and "seeds" in said
