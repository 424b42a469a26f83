"""Claims decided by numbers that can be checked by hand: one measure, several parts, and a control at equal entropy."""

import json
import re

import jsonschema
import numpy as np
import pandas as pd
import pytest
import yaml
from fake_measurements import measurement, study

from predmoe import claim_words, claims, experiments, paths, results, stats

CLAIMS = {spec["id"]: spec for spec in yaml.safe_load((results.ASSETS / "claims.yaml").read_text())}
DECIDING = {"measure", "rule", "expected", "unit"}


def made(values, metric="hit", predictor="ranking"):
    """Three seeds of baseline and joint whose hit@k differ by exactly `values` (one per horizon) plus a little per seed."""
    arms = study(arms={"baseline": 0.0, "joint": 1.0})
    for base, joint in zip(arms[::2], arms[1::2]):
        for h, value in zip(("1", "2", "4"), values):
            joint[metric][predictor][h] = base[metric][predictor][h] + value + 0.001 * (base["seed"] - 1)
    return {"02_horizons": {"arms": arms}}


@pytest.mark.parametrize(
    "values, word",
    [
        ((0.029, 0.043, 0.052), "replicated"), ((0.005, 0.043, 0.052), "partly"), ((0.0, 0.043, 0.052), "partly"),
        ((0.0, 0.001, -0.001), "not replicated"), ((-0.03, -0.04, -0.05), "not replicated"),
    ],
)  # fmt: skip
def test_the_headline_claim_by_hand(values, word):
    claim = claims.evaluate(CLAIMS["ranking-gain"], made(values))
    assert claim["verdict"] == word
    assert [e["mean"] for e in claim["effects"]] == pytest.approx(values)
    # three differences d - 0.001, d, d + 0.001: half-width 4.3027 * 0.001 / sqrt(3) = 0.00248
    assert claim["effect"]["ci95"] == pytest.approx([values[0] - 0.002484, values[0] + 0.002484], abs=1e-6)


def test_the_measured_text_has_every_horizon_with_its_interval():
    text = claims.evaluate(CLAIMS["ranking-gain"], made((0.029, 0.043, 0.052)))["measured"]
    assert text == "+2.90 points [+2.65, +3.15] / +4.30 points [+4.05, +4.55] / +5.20 points [+4.95, +5.45] at h = 1 / 2 / 4 (3 seeds)"


def test_growth_with_the_horizon_by_hand():
    claim = claims.evaluate(CLAIMS["gain-grows-with-horizon"], made((0.029, 0.043, 0.052)))
    assert claim["effect"]["mean"] == pytest.approx(0.023) and claim["verdict"] == "replicated"


def test_isolation_compares_two_heads_of_the_same_arm():
    arms = study(arms={"baseline": 0.0, "joint": 1.0})
    for row in arms[1::2]:
        row["hit"]["cotrained"] = {h: value + 0.002 + 0.0001 * row["seed"] for h, value in row["hit"]["linear"].items()}
    claim = claims.evaluate(CLAIMS["predictable-backbone"], {"02_horizons": {"arms": arms}})
    assert claim["effect"]["mean"] == pytest.approx(0.0021) and claim["verdict"] == "replicated"
    assert claim["effect"]["name"] == "joint hit.cotrained - joint hit.linear, h=1"


def test_quality_cost_is_relative():
    arms = study(arms={"baseline": 0.0, "joint": 1.0})
    for base, joint in zip(arms[::2], arms[1::2]):
        joint["val_loss"] = base["val_loss"] * (1.004 + 0.0001 * base["seed"])
    claim = claims.evaluate(CLAIMS["quality-cost"], {"02_horizons": {"arms": arms}})
    assert claim["effect"]["mean"] == pytest.approx(0.0041) and claim["verdict"] == "replicated" and claim["measured"].startswith("+0.410% [+0.385, +0.435]")


def test_the_best_experiment_decides():
    found = made((0.029, 0.043, 0.052)) | {"14_ranking_seeds": made((0.0, 0.0, 0.0))["02_horizons"]}
    claim = claims.evaluate(CLAIMS["ranking-gain"], found)
    assert claim["notebook"] == "14_ranking_seeds" and claim["verdict"] == "not replicated"


@pytest.mark.parametrize("seeds, decides", [((3, 5, 3), "b"), ((5, 5, 3), "a"), ((None, 3, 3), "b"), ((2, None, 3), "c"), ((None, None, None), None)])
def test_the_experiment_with_most_seeds_decides_and_of_equals_the_first(seeds, decides):
    """Models of other sizes, arms of another name, count for nothing."""
    found = {name: {"arms": [{"arm": arm, "seed": seed} for seed in range(n) for arm in ("baseline", "joint")] + [{"arm": "baseline, d = 64", "seed": seed} for seed in range(9)]}
             for name, n in zip("abc", seeds) if n}  # fmt: skip
    assert claims.deciding(["a", "b", "c"], found) == decides


def test_what_differs_in_size_alone_names_its_horizons_and_nothing_else_does():
    assert claims.other_size(claims.evaluate(CLAIMS["ranking-gain"], made((0.005, 0.043, 0.052)))) == "h = 1"
    assert claims.other_size(claims.evaluate(CLAIMS["ranking-gain"], made((0.029, 0.043, 0.052)))) is None   # replicated
    partly = {"verdict": "partly", "why": "every interval excludes zero, but the size differs more than twofold: joint tok_s - baseline tok_s"}
    assert claims.other_size(partly) == "" and claims.other_size(partly | {"parts": [partly]}) is None and claims.other_size(partly | {"why": "in part"}) is None


def test_a_reason_is_read_without_the_names_of_effects():
    claim = claims.evaluate(CLAIMS["ranking-gain"], made((0.005, 0.043, 0.052)))
    assert "joint hit.ranking" in claim["why"] and claims.reason(claim).endswith("but the size differs more than twofold: h = 1") and "uncorrected" in claims.reason(claim)
    whole = claims.evaluate(CLAIMS["dose-response"], doses(LEVELS, LOSSES))
    assert claims.reason(whole).startswith("6 of 6 parts replicated. 0.03 against none: replicated (") and "input 0.03 hit" not in claims.reason(whole)
    assert claims.reason(claims.evaluate(CLAIMS["dose-response"], {})) == claims.not_run("03_dose")


def test_a_limit_is_told_in_the_unit_of_its_effects():
    arms = study(arms={"baseline": 0.0, "joint": 1.0})
    assert claims.evaluate(CLAIMS["quality-cost"], {"02_horizons": {"arms": arms}})["why"].endswith("at most 0.5%")
    for row in arms:
        row["hit"]["cotrained"] = {h: value + 0.002 + 0.0001 * row["seed"] for h, value in row["hit"]["linear"].items()}
    assert claims.evaluate(CLAIMS["predictable-backbone"], {"02_horizons": {"arms": arms}})["why"].endswith("at most 1 point")


def test_a_missing_arm_or_metric_is_named():
    found = made((0.029, 0.043, 0.052))
    without = {"02_horizons": {"arms": [row for row in found["02_horizons"]["arms"] if row["arm"] == "baseline"]}}
    assert "no arm 'joint'" in claims.evaluate(CLAIMS["ranking-gain"], without)["why"]
    del found["02_horizons"]["arms"][0]["hit"]["ranking"]["4"]
    assert "has no hit.ranking.4" in claims.evaluate(CLAIMS["ranking-gain"], found)["why"]


def test_values_by_seed_refuses_a_seed_twice():
    with pytest.raises(claims.ResultError, match="seed twice"):
        claims.values_by_seed([measurement("joint", 0), measurement("joint", 0)], "joint", "val_loss")


@pytest.mark.parametrize("spec", CLAIMS.values(), ids=CLAIMS)
def test_claims_are_well_formed(spec):
    assert set(spec) <= {"id", "headline", "statement", "reference", "notebook", "parts", *DECIDING}
    assert spec["statement"].endswith(".") and spec["notebook"] and all(re.fullmatch(r"\d\d_\w+", name) for name in spec["notebook"])
    assert not ("parts" in spec and DECIDING & set(spec))
    for part in spec.get("parts", [spec]):
        assert part is spec or set(part) == {"name", *DECIDING}
        assert DECIDING <= set(part) or not DECIDING & set(part)
        assert set(part.get("measure", {})) <= {"arm", "metric", "minus", "minus_metric", "relative", "horizons", "contrast", "pairs", "minus_at"}
        if part.get("rule") == "direction":
            assert len(part["expected"]) == len(part["measure"].get("horizons") or part["measure"].get("pairs") or [1])
    names = [part["name"] for part in spec.get("parts", [])]
    assert len(names) == len(set(names)) != 1


def test_a_claim_of_several_pairs_has_an_effect_for_each():
    arms = [{"arm": arm, "seed": seed, "ttft_ms": value + seed} for arm, value in (("demand", 2400.0), ("base", 2150.0), ("joint", 2125.0)) for seed in range(3)]
    spec = CLAIMS["ttft"] | {"measure": {"pairs": [["base", "demand"], ["joint", "base"]], "metric": "ttft_ms", "relative": True}}
    claim = claims.evaluate(spec, {"08_latency_sensitivity": {"arms": arms}})
    assert [round(effect["mean"], 3) for effect in claim["effects"]] == [-0.104, -0.012] and claim["verdict"] == "replicated"
    assert claim["effects"][1]["name"] == "joint - base, ttft_ms"


def test_a_contrast_between_named_keys_says_their_names():
    arms = [{"arm": "joint-linear", "seed": seed, "gain_over_baseline": {"fits": 0.03 + 0.001 * seed, "beyond": 0.0}} for seed in range(3)]
    claim = claims.evaluate(CLAIMS["window-boundary"], {"08_latency_sensitivity": {"arms": arms}})
    assert claim["verdict"] == "replicated" and claim["effect"]["name"].endswith("fits minus beyond")


# --- several parts -----------------------------------------------------------------------------------------------------

def doses(levels, losses):
    """Results of 03_dose, three seeds: hit@k of the linear predictor (the same at every horizon) and validation loss by arm."""
    def off(arm, seed):   # differences that are not all the same, or an interval has no width
        return (seed - 1) * (arm != "baseline")

    arms = [
        {"arm": arm, "seed": seed, "val_loss": losses[arm] + 0.002 * off(arm, seed),
         "hit": {"linear": {h: level + 0.01 * seed + 0.001 * off(arm, seed) * (1 + len(arm) % 2) for h in ("1", "2", "4")}}}
        for arm, level in levels.items() for seed in range(3)
    ]  # fmt: skip
    return {"03_dose": {"arms": arms}}


LEVELS = {"baseline": 0.80, "input 0.03": 0.83, "input 0.1": 0.85, "input 0.3": 0.883, "input 1": 0.91}
LOSSES = {"baseline": 5.0, "input 0.03": 5.0, "input 0.1": 5.0, "input 0.3": 5.01, "input 1": 5.3}


def test_every_part_has_its_own_verdict_and_reason():
    claim = claims.evaluate(CLAIMS["dose-response"], doses(LEVELS, LOSSES))
    found = {part["name"]: part for part in claim["parts"]}
    assert [part["verdict"] for part in claim["parts"][:2]] == ["replicated", "replicated"]
    assert found["the loss at 1 is higher"]["verdict"] == "replicated" and found["the loss at 1 is higher"]["effects"][0]["mean"] == pytest.approx(0.3)
    assert "within" not in found["0.1 against 0.03"]["measured"] and found["0.1 against 0.03"]["measured"].startswith("+2.00 points [+1.75, +2.25]")
    assert all(part["why"] in claim["why"] and part["measured"] in claim["measured"] for part in claim["parts"])
    assert claim["effects"] == [effect for part in claim["parts"] for effect in part["effects"]] and claim["effect"] == claim["effects"][0]
    jsonschema.validate([claim], json.loads((results.ASSETS / "claims.schema.json").read_text()))


@pytest.mark.parametrize("changed, word, replicated", [
    ({}, "replicated", 6), ({"input 1": 0.88}, "partly", 5), ({"input 0.1": 0.80}, "partly", 4),
])  # fmt: skip
def test_a_claim_of_several_parts_is_as_good_as_all_of_them(changed, word, replicated):
    losses = LOSSES | {"input 0.3": 4.99}
    steady = {"input 0.3": 0.85 + 0.035, "input 1": 0.85 + 0.035 + 0.03}
    claim = claims.evaluate(CLAIMS["dose-response"], doses(LEVELS | steady | changed, losses))
    assert claim["verdict"] == word, claim["why"]
    assert claim["why"].startswith(f"{replicated} of 6 parts replicated" + (". " if replicated == 6 else ", "))


def test_no_part_replicated_is_not_replicated():
    flat = dict.fromkeys(LEVELS, 0.8)
    claim = claims.evaluate(CLAIMS["dose-response"], doses(flat, dict.fromkeys(LOSSES, 5.0) | {"input 0.3": 5.3}))
    assert claim["verdict"] == "not replicated" and {part["verdict"] for part in claim["parts"]} == {"not replicated"}


def test_a_part_without_its_arm_leaves_the_claim_untested_and_keeps_what_the_others_say():
    found = doses(LEVELS, LOSSES)
    found["03_dose"]["arms"] = [row for row in found["03_dose"]["arms"] if row["arm"] != "input 1"]
    claim = claims.evaluate(CLAIMS["dose-response"], found)
    assert claim["verdict"] == "not tested" and "there is no arm 'input 1'" in claim["why"]
    assert [part["verdict"] for part in claim["parts"]][:2] == ["replicated", "replicated"] and claim["parts"][3]["measured"] == "not measured"


def test_what_has_not_run_is_said_once():
    claim = claims.evaluate(CLAIMS["dose-response"], {})
    assert claim["why"] == "03_dose has not been run in this profile" and claim["measured"] == "not measured" and claim["n"] == 0


@pytest.mark.parametrize("words, whole", [
    (["replicated", "replicated"], "replicated"), (["not replicated", "not replicated"], "not replicated"), (["partly", "partly"], "partly"),
    (["replicated", "not replicated"], "partly"), (["not replicated", "partly"], "partly"), (["replicated", "not tested"], "not tested"),
    (["not tested", "not replicated"], "not tested"),
])  # fmt: skip
def test_the_verdict_of_all_parts(words, whole):
    decided = stats.verdict_all({f"part {i}": stats.Verdict(word, f"reason {i}") for i, word in enumerate(words)})
    assert decided.word == whole and all(f"part {i}: {word} (reason {i})" in decided.why for i, word in enumerate(words))


@pytest.mark.parametrize("words, said", [
    (["replicated", "replicated"], "2 of 2 parts replicated"), (["not replicated"] * 3, "0 of 3 parts replicated, 3 not replicated"),
    (["replicated", "partly", "not replicated", "not replicated"], "1 of 4 parts replicated, 1 partly, 2 not replicated"),
    (["partly", "not replicated"], "0 of 2 parts replicated, 1 partly, 1 not replicated (it counts as not replicated only where no part is even partly)"),
    (["partly", "not tested"], "0 of 2 parts replicated, 1 partly, 1 not tested"),
])  # fmt: skip
def test_parts_are_counted_by_verdict_and_a_claim_without_a_whole_one_says_why_it_is_partly(words, said):
    parts = {f"part {i}": stats.Verdict(word, "so") for i, word in enumerate(words)}
    decided = stats.verdict_all(parts)
    assert stats.count_parts(words) == said and decided.why.startswith(f"{said}. part 0: ") and ("it counts as" in said) is (decided.word == "partly" and "replicated" not in words)
    told = [{"name": name, "verdict": part.word, "why": part.why} for name, part in parts.items()]
    assert claims.reason({"parts": told, "effects": [{}], "why": ""}).startswith(f"{said}. part 0: ")


def test_a_claim_none_of_whose_parts_is_whole_says_so_in_the_table():
    claim = claims.evaluate(CLAIMS["high-dose-cost"], {"03_dose": {"arms": [row | {"router_entropy": 2.0 + 0.01 * row["seed"]} for row in doses(LEVELS, LOSSES | {"input 1": 5.1})["03_dose"]["arms"]]}})
    assert claim["verdict"] == "partly" and [part["verdict"] for part in claim["parts"]] == ["partly", "not replicated"]
    assert claim_words.table([claim])["measured here, with 95% interval"][0].splitlines() == ["2 parts, a row each below", stats.count_parts(["partly", "not replicated"])]


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="at least one part"):
        stats.verdict_all({})


# --- a control at equal entropy, and controls of other seeds -----------------------------------------------------------

def ladder(joint_entropy, seeds=(0, 1, 2), ladder_seeds=(0, 1, 2)):
    """Baseline and penalties on a straight line: a nat less of entropy is 0.1 more hit@k."""
    rows = []
    for seed in seeds:
        rows.append({"arm": "joint", "seed": seed, "router_entropy": joint_entropy, "hit": {"ranking": {"1": 0.93 + 0.001 * seed}}})
        rows += [{"arm": arm, "seed": seed, "router_entropy": entropy, "hit": {"ranking": {"1": 0.9 + 0.1 * (2.4 - entropy)}}}
                 for arm, entropy in (("baseline", 2.4), ("entropy 0.005", 1.6), ("entropy 0.01", 1.2), ("entropy 0.05", 0.3))
                 if seed in ladder_seeds]  # fmt: skip
    return rows


@pytest.mark.parametrize("entropy, control", [(2.4, 0.9), (2.2, 0.92), (1.4, 1.0), (2.6, 0.9), (0.1, 1.11)])
def test_the_control_at_equal_entropy_by_hand(entropy, control):
    """On the line between its neighbours; beyond the ends, the nearest arm."""
    found = claims.matched(ladder(entropy), "joint", "hit.ranking.1", along=["baseline", "entropy 0.005", "entropy 0.01", "entropy 0.05"], match="router_entropy")
    assert found == pytest.approx(dict.fromkeys(range(3), control))


def test_more_than_sharpening_is_measured_at_the_joint_models_own_entropy():
    claim = claims.evaluate(CLAIMS["more-than-sharpening"], {"09_longer_training": {"arms": ladder(2.2)}})
    assert claim["effect"]["mean"] == pytest.approx(0.931 - 0.92) and claim["verdict"] == "replicated" and claim["n"] == 3
    few = claims.evaluate(CLAIMS["more-than-sharpening"], {"09_longer_training": {"arms": ladder(2.2, ladder_seeds=(0,))}})
    assert few["verdict"] == "not tested" and few["n"] == 1 and "single seed" in few["why"]
    none = claims.evaluate(CLAIMS["more-than-sharpening"], {"09_longer_training": {"arms": ladder(2.2, seeds=(1,), ladder_seeds=()) + ladder(2.2, seeds=(0,))[1:]}})
    assert "no seed has all of joint, baseline" in none["why"]


def test_the_control_may_have_more_seeds_and_never_fewer():
    rows = [{"arm": arm, "seed": seed, "val_loss": 5.0 + 0.01 * seed * (arm != "baseline 4x")} for arm in ("baseline 4x", "joint 4x") for seed in range(4)]
    spec = CLAIMS["cost-becomes-gain"]
    more = claims.evaluate(spec, {"09_longer_training": {"arms": [row for row in rows if row["arm"] != "joint 4x" or row["seed"] < 3]}})
    assert more["n"] == 3 and more["effect"]["mean"] == pytest.approx(0.01)
    fewer = claims.evaluate(spec, {"09_longer_training": {"arms": [row for row in rows if row["arm"] != "baseline 4x" or row["seed"] < 3]}})
    assert fewer["verdict"] == "not tested" and "arm 'baseline 4x' lacks seed 3" in fewer["why"]


# --- for reading ------------------------------------------------------------------------------------------------------------

def test_every_measure_of_every_claim_has_words():
    for spec in CLAIMS.values():
        for part in spec.get("parts", [spec]):
            assert not re.search(r"hit\.|_|None", claim_words.compared(part["measure"])), spec["id"]


@pytest.mark.parametrize("name, words", [
    ("ranking-gain", "joint minus baseline: hit@k of a fresh ranking MLP"), ("quality-cost", "joint minus baseline, relative to baseline: validation loss"),
    ("predictable-backbone", "hit@k of the co-trained head minus hit@k of a fresh linear predictor, both on joint"),
    ("cotrained-gain", "hit@k of the co-trained head on joint minus hit@k of a fresh linear predictor on baseline"),
    ("gain-grows-with-horizon", "joint minus baseline: hit@k of a fresh ranking MLP, at h = 4 minus at h = 1"),
])  # fmt: skip
def test_what_is_subtracted_from_what_is_said(name, words):
    assert claim_words.compared(CLAIMS[name]["measure"]) == words


def test_the_table_has_a_line_per_effect_and_a_row_per_part():
    single, whole = claims.evaluate(CLAIMS["ranking-gain"], made((0.029, 0.043, 0.052))), claims.evaluate(CLAIMS["dose-response"], doses(LEVELS, LOSSES))
    table = claim_words.table([whole, single])
    names = table["claim of the reference study"].tolist()
    assert names == [whole["statement"], *(f"↳ part: {part['name']}" for part in whole["parts"]), single["statement"]]
    cell = table["measured here, with 95% interval"].iloc[-1]
    cell = cell.replace("\u00a0", " ")
    assert cell.splitlines()[:2] == ["joint minus baseline: hit@k of a fresh ranking MLP, 3 seeds:", "h = 1: +2.90 points [+2.65, +3.15]"] and len(cell.splitlines()) == 4
    assert max(len(text.splitlines()) for text in table["measured here, with 95% interval"]) <= 4
    shown = experiments.show(table).data
    assert "3 seeds:<br>h\u00a0=\u00a01:\u00a0+" in shown and 'class="dataframe prose"' in shown
    assert "&lt;b&gt;" in experiments.show(pd.DataFrame({"a": ["<b>"]})).data


def test_a_table_for_reading_has_words_and_its_file_the_names_of_the_results():
    arms = study()
    shown = experiments.show(experiments.diagnostics(arms)).data + experiments.show(experiments.hits(arms)).data
    raw = [name for name in (*experiments.diagnostics(arms), *experiments.hits(arms), "next_router", "token_id") if "_" in name]
    assert len(raw) > 8 and not [name for name in raw if name in shown] and "next layer&#x27;s router" not in shown and "next layer's router" in shown
    effects = experiments.hit_effects(arms, "joint", "baseline", predictors=["next_router"])
    assert experiments.effect_table(effects).effect[0] == "joint - baseline, next layer's router, h = 1"


# --- an effect as it is printed -------------------------------------------------------------------------------------------------

def printed(mean, half, unit):
    """Mean and ends as they are printed, the interval's true width in the unit, and the number of decimals of each of the three."""
    text = claims.effect_text({"mean": mean, "ci95": [mean - half, mean + half]}, unit)
    numbers = re.fullmatch(r"([+-][\d.]+)(?:%| \w+) \[([+-][\d.]+), ([+-][\d.]+)\]", text).groups()
    return [float(number) for number in numbers], 2 * half * claims.UNITS[unit][0], {len(number.partition(".")[2]) for number in numbers}, text


@pytest.mark.parametrize("unit", claims.UNITS)
def test_a_printed_mean_lies_in_its_printed_interval_and_all_have_the_same_decimals(unit):
    rng = np.random.default_rng(0)
    scale, fewest, _ = claims.UNITS[unit]
    for mean, half in zip(rng.normal(size=3000) * 10 ** rng.uniform(-6, 1, 3000) / scale, 10 ** rng.uniform(-6, 1, 3000) / scale):
        (middle, low, high), width, decimals, text = printed(mean, half, unit)
        assert low <= middle <= high and len(decimals) == 1, text
        (digits,) = decimals
        assert fewest <= digits <= fewest + claims.FINER and not re.search(r"-0\.?0*(?![\d.])", text), text
        assert digits == fewest + claims.FINER or (high > low and width * 10**digits > claims.STEPS - 1e-3), text   # two digits of its width, or as many as there may be
        coarser = width * 10 ** (digits - 1) >= claims.STEPS and all(round(scale * end, digits - 1) for end in (mean - half, mean + half))
        assert digits == fewest or not coarser, text   # and no more than that takes


@pytest.mark.parametrize("mean, ci95, unit, text", [
    (0.00055, [0.0002, 0.0009], "points", "+0.055 points [+0.020, +0.090]"), (0.013, [0.006, 0.019], "points", "+1.3 points [+0.6, +1.9]"),
    (0.01, [0.0004, 0.02], "points", "+1.00 points [+0.04, +2.00]"),   # an end near zero keeps its sign
    (-0.00001, [-0.01, 0.01], "points", "+0.0 points [-1.0, +1.0]"), (-0.0011, [-0.0025, 0.0004], "percent", "-0.11% [-0.25, +0.04]"),
    (0.0, [0.0, 0.0], "nats", "+0.0000 nats [+0.0000, +0.0000]"), (-0.00001, None, "points", "+0.0 points (single seed)"),
])
def test_decimals_follow_the_width_of_the_interval(mean, ci95, unit, text):
    assert claims.effect_text({"mean": mean, "ci95": ci95}, unit) == text


def test_no_sentence_of_the_package_can_hold_a_zero_with_a_minus():
    """A signed number is formatted with z, which makes -0.0 a +0.0."""
    wrong = [path.name for path in (paths.ROOT / "predmoe").rglob("*.py") if re.search(r":\+\.\d[f%]", path.read_text())]
    assert not wrong
