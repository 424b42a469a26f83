"""The paper's computed tables: a line for each comparison, signs that follow the data, and no list of findings that fills a page."""

import copy
import re

import numpy as np
import pytest

from predmoe import isolation, paper, paper_studies, paper_text, plots_simulator, refit, results

MAIN = (paper.FOLDER / "main.tex").read_text()


@pytest.fixture(scope="module")
def committed():
    return paper.load("cpu")


def lines_of(table):
    """The lines between \\midrule and \\bottomrule, rules left out, as cells."""
    body = table.partition("\\midrule\n")[2].partition("\n\\bottomrule")[0]
    return [line.removesuffix(r" \\").split(" & ") for line in body.splitlines() if " & " in line]


def effect(mean, half, *, horizon=1, **keys):
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": 3, "horizon": horizon} | keys


def test_every_computed_table_has_its_place_a_caption_and_a_reference():
    made = {key.removeprefix("table.") for key in paper_studies.MADE if key.startswith("table.")}
    assert set(re.findall(r"^\\resulttable\{([\w-]+)\}\{\S", MAIN, flags=re.MULTILINE)) == made
    assert all(rf"\ref{{tab:{name}}}" in MAIN for name in made)


def test_a_table_that_nobody_makes_is_named(committed):
    with pytest.raises(paper.ConfigError, match="table.nothing"):
        paper.check(MAIN.replace("% --- results begin ---", "% --- results begin ---\n\\resulttable{nothing}{None.}"), {}, [])


def test_what_has_not_been_run_says_so_in_place_of_its_table():
    values = paper_studies.values("cpu", {})
    assert values.keys() == paper_studies.MADE.keys() and values["table.race"] == r"\notrun{11_engine}" and values["table.lora"] == r"\notrun{10_olmoe_lora}"


def test_results_that_lack_what_a_table_is_made_of_are_named(committed):
    result = copy.deepcopy(committed["11_engine"])
    del result["provenance"]["parameters"]["shares"]
    with pytest.raises(paper.ConfigError, match="the results of 11_engine do not make the paper's say.race .*shares.*: run the notebook again"):
        paper_studies.values("cpu", {"11_engine": result})


def test_no_experiment_fills_a_page_with_a_list(committed):
    decided = paper_text.decide(committed, results.claim_specs())
    values = paper_text.values(committed, decided)
    assert max(values[f"findings.{name}"].count(r"\item ") for name in re.findall(r"\\findings\{(\d\w+)\}", MAIN)) <= 6


def test_columns_of_the_study_stand_only_where_it_has_a_number_and_a_missing_horizon_is_a_dash():
    ours = {1: effect(0.01, 0.005), 4: effect(-0.02, 0.001, horizon=4)}
    alone = paper_studies.by_horizon("points", [[("a", ours, {})], []])
    assert "study" not in alone and lines_of(alone) == [["a", r"+1.0 \mbox{[+0.5, +1.5]}", r"$-$2.00 \mbox{[$-$2.10, $-$1.90]}"]]
    both = paper_studies.by_horizon("points", [[("a", ours, {4: 0.03}), ("  b", {1: ours[1]}, {})]])
    assert lines_of(both) == [["a", r"+1.0 \mbox{[+0.5, +1.5]}", r"$-$2.00 \mbox{[$-$2.10, $-$1.90]}", "--", "+3.0"], [r"\quad b", r"+1.0 \mbox{[+0.5, +1.5]}", "--", "--", "--"]]


@pytest.fixture
def raced():
    """A race of three model seeds: the ranking predictor is faster than none by about a tenth on each, the two models alike."""
    speeds = {"baseline-demand": (100, 110, 120), "baseline-ranking": (110, 121.5, 132), "joint-ranking": (111, 120, 133), "joint-demand": (99, 111, 121)}
    arms = [{"arm": arm, "seed": seed, "tok_s": speed} for arm, values in speeds.items() for seed, speed in enumerate(values)]
    pairs = (("baseline-ranking", "baseline-demand"), ("joint-ranking", "baseline-ranking"), ("joint-demand", "baseline-demand"))
    effects = [effect(0.1, 0.02) | {"treatment": a, "control": b, "model_seed": seed} for a, b in pairs for seed in range(3)]
    return {"arms": arms, "effects": effects, "provenance": {"parameters": {"shares": [0.25]}}}


def test_the_race_has_a_line_for_each_comparison_and_a_column_for_each_seed(raced):
    table = paper_studies.race(raced, None)
    lines = lines_of(table)
    assert [line[0] for line in lines[:]] == [r"\quad ranking MLP", r"\quad ranking MLP", r"\quad no prefetch"] and {len(line) for line in lines} == {5}
    mean = 100 * np.mean([110 / 100 - 1, 121.5 / 110 - 1, 132 / 120 - 1])
    assert lines[0][1].startswith(f"+{mean:.1f} ") and lines[0][2] == r"+10.0 \mbox{[+8.0, +12.0]}"
    assert r"\emph{baseline model, prefetch $-$ none}" in table and r"\emph{joint $-$ baseline, same prefetch}" in table


def test_the_race_is_told_as_its_intervals_are(raced):
    said = paper_studies.say_race(raced, None)
    assert "With 25\\% of the experts" in said and "1 of 1 prefetches are faster than none (baseline, ranking MLP) and 0 slower" in said and "of 2 comparisons" in said and "0 have an interval" in said
    for row in raced["arms"]:   # slower now, on every seed
        row["tok_s"] *= 0.5 if row["arm"] == "baseline-ranking" else 1
    said = paper_studies.say_race(raced, None)
    assert "0 of 1 prefetches are faster than none and 1 slower (baseline, ranking MLP)" in said and "1 has an interval that excludes zero (joint, ranking MLP)" in said
    one = {**raced, "arms": [row for row in raced["arms"] if row["seed"] == 0]}
    assert "nothing is tested over models" in paper_studies.say_race(one, None)


def test_the_committed_race_says_what_its_claims_say(committed):
    """The column over model seeds is what decides the claims of the engine."""
    (claim,) = (c for c in paper_text.decide(committed, results.claim_specs()) if c["id"] == "engine-throughput")
    mean = 100 * claim["effects"][0]["mean"]
    held = [line for line in lines_of(paper_studies.values("cpu", {"11_engine": committed["11_engine"]})["table.race"]) if plots_simulator.ARMS["ranking"] == line[0].removeprefix(r"\quad ")]
    assert any(line[1].replace("$-$", "-").startswith(f"{mean:+.1f} ") for line in held)


def test_the_heads_lead_is_the_sum_of_its_parts_and_turns_with_the_data(committed):
    result = copy.deepcopy(committed["04_isolation"])
    number = lambda cell: float(cell.split(" ")[0].replace("$-$", "-"))  # noqa: E731
    whole, backbone, head = lines_of(paper_studies.backbone(result, None))[:3]
    assert all(abs(number(whole[i]) - number(backbone[i]) - number(head[i])) < 0.11 for i in range(1, 4))   # each rounded to a tenth of a point
    for e in result["effects"]:
        if e.get("predictor") == isolation.BACKBONE:
            e["mean"], e["ci95"] = -e["mean"], [-end for end in e["ci95"][::-1]]
    assert all(number(lines_of(paper_studies.backbone(result, None))[1][i]) == -number(backbone[i]) for i in range(1, 4))


def test_the_fits_of_the_mlp_stand_in_lines_of_their_own(committed):
    """Of the same models and predictor: which fit a line shows is not left to which effect comes last."""
    result = committed["10_olmoe_lora"]
    table = lines_of(paper_studies.fine_tune(result, None))
    first, again = ([e for e in result["effects"] if e["treatment"] == "joint 0.1" and e.get("predictor") == "ranking" and (e.get("variation") == refit.VARIATION) is second] for second in (False, True))
    for line, effects in zip(table[:2], (first, again)):
        assert len(effects) == 3 and line[1:4] == [paper_text.effect(e, "points") for e in effects], line
    assert table[0][0].endswith("ranking MLP") and table[1][0].endswith("MLP by the other loss") and table[0][1:4] != table[1][1:4]
    with pytest.raises(results.ResultError, match="two effects stand for one line of a table at h = 1"):
        paper_studies._by_h(first + again)


def test_where_transfer_begins_is_said_in_the_paper(committed):
    decided = paper_text.decide(committed, results.claim_specs())
    said = paper_text.values(committed, decided)["findings.13_olmoe_dose"]
    assert re.search(r"At weight .{1,6} transfer begins", said) and "Joint against baseline under the linear predictor" not in said


@pytest.mark.parametrize("name, text, left", [
    ("07_controls", "2 of 8 post-hoc fits reached the step limit before they converged, so their hit@k is a lower bound: joint, seed 0, linear.", "2 of 8 post-hoc fits reached the step limit before they converged, so their hit@$k$ is a lower bound."),
    ("13_olmoe_dose", "Joint against baseline under the ranking MLP at h = 4, by what is trained: LoRA +1.0 points; all +2.0 points. From the least to the most, the first of these with an interval above zero, by however little, is: LoRA.",
     "Joint against baseline under the ranking MLP at $h=4$, from the least that is trained to the most: the first of these with an interval above zero, by however little, is: LoRA."),
    ("12_downstream", "By two standard errors of its items, the baseline model is above chance on PIQA (55.1%, chance 50.0%): a model of this size knows little, and near chance an accuracy says nothing.",
     "By two standard errors of its items, the baseline model is above chance on PIQA."),
    ("11_engine", "Bytes are off most for far_oracle; for no other source by more than 2.18%.", r"Bytes are off most for oracle, far; for no other source by more than 2.18\%."),
    ("08_latency_sensitivity", "In demand.", "In demand."), ("02_horizons", "The joint arm FAILS the quality gate.", r"The joint arm \emph{fails} the quality gate."),
])  # fmt: skip
def test_a_finding_loses_what_stands_beside_it(name, text, left):
    assert paper_text._worded(name, text) == left
