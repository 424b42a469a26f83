"""Tables and sentences made of results: paired, corrected, named once, and following the data."""

import re

import numpy as np
import pytest
from fake_measurements import finished, measurement, study

from predmoe import experiments, findings, headline, measurements, overview, paths, refit, results, stats


# --- experiments: tables and sentences -------------------------------------------------------------------------------

def test_holm_runs_over_the_horizons_of_one_predictor():
    effects = experiments.hit_effects(study(), "joint", "baseline", predictors=["linear", "ranking"], confirm="ranking")
    for predictor in ("linear", "ranking"):
        mine = [e for e in effects if e["predictor"] == predictor]
        assert [e["p_holm"] for e in mine] == stats.holm([e["p"] for e in mine])
    assert {e["family"] for e in effects if e["predictor"] == "ranking"} == {"confirmatory"}
    assert {e["family"] for e in effects if e["predictor"] == "linear"} == {"exploratory"}


def test_effects_and_table_of_variations_are_paired_within_each():
    measured = {"as it stands": study(arms={"baseline": 0.0, "joint": 1.0}), "weight": study(seeds=(0,), arms={"baseline": 0.0, "joint": 2.0})}
    effects, table = experiments.variation_effects(measured), experiments.variation_table(measured)
    assert [(e["variation"], e["horizon"], e["n"]) for e in effects] == [(v, h, n) for v, n in (("as it stands", 3), ("weight", 1)) for h in (1, 2, 4)]
    assert len({e["name"] for e in effects}) == 6
    means = table.groupby(["variation", "horizon"])["gain (points)"].mean()
    for e in effects:
        assert means[e["variation"], e["horizon"]] == pytest.approx(100 * e["mean"])
    assert np.allclose(table["gain (points)"], table["of the token-id lookup"] + table["of the margin"])
    assert experiments.forest_table(effects).group.unique().tolist() == ["as it stands", "weight"]
    first, second, last = findings.say_variations(effects, measured)
    assert second.startswith("Weight: joint training moved hit@k by +") and "at h = 1, +" in second and ", in one seed, untested." in second and "the quality gate" in first and "the quality gate" in second
    ordered = sorted((e["mean"], e["variation"]) for e in effects if e["horizon"] == 4)
    assert last == f"So at h = 4 the gain goes from {100 * ordered[0][0]:+.1f} points ({ordered[0][1]}) to {100 * ordered[1][0]:+.1f} ({ordered[1][1]})."


def test_what_does_not_survive_the_correction_is_told_apart():
    effect = {"ci95": [0.001, 0.02], "mean": 0.01, "n": 3}
    family = [effect | {"horizon": h, "p_holm": p} for h, p in ((1, 0.09), (4, 0.04))]
    told = findings.say_confirmed(family, "It", "hit@k")
    assert findings.corrected(family) == "Corrected for 2 horizons (Holm), p = 0.090 / 0.040 at h = 1 / 4."
    assert told.startswith("It raises hit@k at h = 4 (") and told.endswith("Not established after Holm's correction: at h = 1 (+1.0 points [+0.1, +2.0], p = 0.090).")
    assert findings.say_confirmed(family[:1], "It", "hit@k").endswith("None of it is established after Holm's correction.")
    assert "Holm" not in findings.say_confirmed(family[1:], "It", "hit@k")


def test_a_quantity_is_named_once_and_levels_stand_beside_a_difference():
    up, level = ({"ci95": [low, 0.03], "mean": 0.01, "n": 3, "horizon": h} for low, h in ((0.001, 1), (-0.01, 2)))
    told = findings.say_by_horizon([up, level], "It", "what a lookup foretells")
    assert told.count("what a lookup foretells") == 1 and " and does not measurably change it at h = 2 (" in told
    arms = study(seeds=(0, 1))
    for row, hit in zip((row for row in arms if row["arm"] != "alternative"), (0.80, 0.83, 0.82, 0.85)):
        row["hit"]["ranking"]["4"] = hit
    (effect,) = experiments.with_levels(arms, experiments.hit_effects(arms, "joint", "baseline", predictors=["ranking"], horizons=[4]))
    assert effect["levels"] == pytest.approx((0.81, 0.84)) and "at h = 4 (81.0% → 84.0%, +3.0 points [+3.0, +3.0])" in findings.say_by_horizon([effect], "It", "hit@k")


@pytest.mark.parametrize("middle, held, words", [
    ((-0.006, -0.001), 0.14, "of its 2 intervals 1 excludes zero uncorrected (at h = 2 -0.6 points [-1.1, -0.1]), none after Holm's correction"),
    ((-0.006, -0.001), 0.01, "-0.1]), 1 after Holm's correction"), ((-0.006, 0.004), 0.3, "of its 2 intervals none excludes zero"),
])  # fmt: skip
def test_what_a_placebo_moves_is_told_with_how_many_intervals_were_looked_at(middle, held, words):
    mean, high = middle
    placebo = [{"variation": "Placebo (1e-8)", "horizon": h, "mean": m, "ci95": [m - 0.005, top], "n": 3, "p_holm": p} for h, m, top, p in ((1, 0.0, 0.005, 0.5), (2, mean, high, held))]
    other = [{"variation": "more", "horizon": h, "mean": 0.1, "ci95": [0.09, 0.11], "n": 3, "p_holm": 0.001} for h in (1, 2)]
    (told,) = findings.say_placebo(placebo + other)
    assert words in told and "4 intervals were looked at" in told and told.startswith("Placebo (1e-8): ")
    assert findings.say_placebo(other) == [] == findings.say_placebo([e | {"ci95": None} for e in placebo])


def test_domain_gains_are_weighted_by_tokens():
    base, joint = measurement("baseline", 0, gain=0.0), measurement("joint", 0)
    for row, values in ((base, [0.5, 0.5, 0.5]), (joint, [0.6, 0.9, 0.4])):
        row["documents"] = {"domain": ["code", "code", "plays"], "tokens": [30, 10, 5], "hit": {"ranking": {"1": values}}}
    gains = experiments.gains(experiments.per_domain([base, joint], "ranking")).set_index("domain").gain
    assert gains["code"] == pytest.approx((30 * 0.1 + 10 * 0.4) / 40) and gains["plays"] == pytest.approx(-0.1)


def test_doses_and_what_is_said_of_them_by_hand():
    arms = study(seeds=(0, 1), arms={"baseline": 0.0, "input 0.1": 0.5, "input 1": 2.0}) + study(seeds=(0,), arms={"both 1": 1.0})
    for row in arms:
        row["val_loss"] = 4.0 * {"baseline": 1.0, "input 0.1": 1.004, "input 1": 1.02, "both 1": 0.99}[row["arm"]]
        row["hit"]["ranking"]["4"] = 0.7 + {"baseline": 0.0, "input 0.1": 0.01, "input 1": 0.04, "both 1": 0.02}[row["arm"]]
    table = experiments.doses(arms, "ranking")
    deepest = table[table.horizon == 4].set_index(["arm", "dose", "seed"])
    assert deepest.gain["input", 1.0, 1] == pytest.approx(0.04) and deepest.loss_change["input", 0.1, 0] == pytest.approx(0.004)
    for row in arms:
        row["load_entropy"] = 0.36 if row["arm"] == "both 1" else 0.9
    first, second = findings.say_doses(table, experiments.gates(arms))
    assert first == ("Gradient input: the gain in hit@k at h = 4 is +1.0 points at lambda 0.1, +4.0 at 1; it rises in 1 of 1 steps of the weight; "
                     "the arm FAILS the quality gate at lambda 1 (validation loss +2.0%) (means of 2 seeds).")  # fmt: skip
    assert "the arm FAILS the quality gate at lambda 1 (load entropy 0.40 times the baseline's) (a single seed, exploratory)" in second
    assert "passes the quality gate at every weight" in findings.say_doses(table[table.dose < 1], experiments.gates(arms))[0]


def test_an_arm_with_fewer_seeds_is_paired_with_those_of_the_control_and_never_the_other_way_round():
    arms = study(seeds=(0, 1, 2), arms={"baseline": 0.0}) + study(seeds=(0, 1), arms={"joint": 1.0})
    (effect,) = experiments.hit_effects(arms, "joint", "baseline", predictors=["ranking"], horizons=[1])
    assert effect["n"] == 2 and experiments.gates(arms)[0]["arm"] == "joint"
    with pytest.raises(ValueError, match="needs the same"):
        experiments.hit_effects(arms, "baseline", "joint", predictors=["ranking"], horizons=[1])


def test_choose_takes_the_largest_gain_among_those_that_pass_the_gate():
    arms = study((7, 8), {"baseline": 0.0, "a": 0.5, "b": 1.0, "c": 2.0})
    for row in arms:
        row["val_loss"] = 4.5 * (1.01 if row["arm"] == "c" else 1.0)
    assert experiments.choose(arms) == "b"
    for row in arms:
        row["val_loss"] = 4.5 if row["arm"] == "baseline" else 4.7
    assert experiments.choose(arms) is None


@pytest.mark.parametrize("mean, half, verb", [(0.02, 0.01, "raises"), (-0.02, 0.01, "lowers"), (0.02, 0.03, "does not measurably change")])
def test_the_verb_follows_the_data(mean, half, verb):
    effect = {"mean": mean, "ci95": [mean - half, mean + half], "n": 3, "horizon": 1, "predictor": "ranking"}
    assert f"It {verb} hit@k" in findings.say(effect, "It", "hit@k", "points")
    assert f"It {verb} hit@k" in findings.say_by_horizon([effect], "It", "hit@k")


def test_one_seed_is_called_untested():
    effect = {"mean": 0.02, "ci95": None, "n": 1, "horizon": 1}
    assert findings.say(effect, "It", "hit@k", "points") == "It moved hit@k by +2.0 points in one seed, untested."
    assert findings.say_by_horizon([effect], "It", "hit@k") == "It moved hit@k by +2.0 points at h = 1, in one seed, untested."


@pytest.mark.parametrize("ours, words", [(0.058, "on the same side, 2.0 times its size"), (-0.0145, "on the other side, 0.5 times its size")])
def test_comparison_with_the_reference(ours, words):
    assert words in findings.compare({"mean": ours, "ci95": sorted([0.9 * ours, 1.1 * ours])}, 0.029)
    assert "times" not in findings.compare({"mean": ours, "ci95": None}, 0.029) and "a single seed" in findings.compare({"mean": ours, "ci95": None}, 0.029)
    assert "times" not in findings.compare({"mean": ours, "ci95": [-0.1, 0.1]}, 0.029) and "our interval contains zero; our interval contains its value" in findings.compare({"mean": ours, "ci95": [-0.1, 0.1]}, 0.029)


@pytest.mark.parametrize("ours, theirs", [(0.0, 0.029), (0.02, 0.0), (0.0, 0.0)])
def test_what_is_zero_lies_on_neither_side_and_has_no_multiple(ours, theirs):
    for ci95 in ([ours - 0.01, ours + 0.01], None):
        told = findings.compare({"mean": ours, "ci95": ci95}, theirs)
        assert "on neither side" in told and "other side" not in told and "times" not in told and "-0.0" not in told


HEADS = ["Does it ", "How much", "What is ", "At what ", "How sure", "Is there", "Can a lo", "What fai"]


def test_answers_without_results_say_so_and_with_them_give_every_answer(outputs):
    (outputs / "smoke").mkdir()
    (nothing,) = headline.answers(results.update_claims("smoke"), {})
    assert "Not known in this profile" in nothing
    finished()
    lines = headline.answers(results.update_claims("smoke"), results.load_all("smoke"))
    assert [line.split("**")[1][:8] for line in lines] == HEADS
    assert "→" in lines[0] and "points" in lines[0] and "05_cache_simulation has not been run" in lines[2] and "(02_horizons)" in lines[4]
    assert all(line.split("** ")[1].split(". ")[0] for line in lines) and headline.details(results.load_claims("smoke"), results.load_all("smoke")) and headline.details([], {}) == []


def test_answers_of_one_seed_call_nothing_known(outputs):
    finished(arms=study(seeds=(0,)))
    lines = headline.answers(results.update_claims("smoke"), results.load_all("smoke"))
    assert "Not known: one seed tests nothing." in lines[0] and "One seed (02_horizons)" in lines[4] and "Not known: one seed" in lines[5] and "(single seed)" in lines[3]


def of_seeds(name, seeds, joint, outputs):
    """Results of an experiment whose joint model gains `joint` at every horizon, a little more or less by seed."""
    arms = study(seeds, {"baseline": 0.0, "joint": 1.0} | ({"alternative": 1.3} if name == "02_horizons" else {}))
    for row in arms:
        gain = {"baseline": 0.0, "joint": joint, "alternative": 0.02}[row["arm"]] + (0.001 * row["seed"] if row["arm"] != "baseline" else 0)
        row["hit"]["ranking"] = {h: 0.8 + gain for h in ("1", "2", "4")}
    finished(name, arms)


def test_answers_figure_claims_and_paper_stand_on_the_experiment_with_most_seeds(outputs):
    """02 has three seeds and the alternative, 06 five, 14 as many: of equals the first that the claim names."""
    from predmoe import paper_figures

    of_seeds("02_horizons", (0, 1, 2), 0.01, outputs)
    for name, gain in (("06_seeds", 0.03), ("14_ranking_seeds", 0.04)):
        of_seeds(name, range(5), gain, outputs)
        found = results.load_all("smoke")
        claim = next(claim for claim in results.update_claims("smoke") if claim["id"] == "ranking-gain")
        lines = headline.answers(results.load_claims("smoke"), found)
        hits, effects, costs = overview.summary_tables(found)
        means = effects.set_index(["arm", "horizon"])["mean"]
        assert experiments.primary(found) == claim["notebook"] == paper_figures.FIGURES["summary"].of(found) == name
        assert f"({name})" in lines[4] and f"{100 * gain + 0.2:+.2f} points" in lines[0] and claim["n"] == 5
        assert means["joint", 1] == pytest.approx(gain + 0.002) and means["alternative", 1] == pytest.approx(0.021) and "(3 seeds)" in lines[5]
        assert hits.groupby("arm").seed.nunique().to_dict() == {"baseline": 5, "joint": 5, "alternative": 3} and len(costs) == 8
        assert not hits.duplicated(["arm", "seed", "horizon"]).any()
    of_seeds("14_ranking_seeds", (0, 1), 0.04, outputs)
    assert experiments.primary(results.load_all("smoke")) == "06_seeds", "fewer seeds do not decide, whatever the order"


def race(joint, oracle=1.2):
    """Arms of a simulation by seed: the joint model's speed against the baseline's 1.0."""
    speeds = {"demand": 0.8, "baseline-ranking": 1.0, "oracle": oracle}
    arms = [{"arm": arm, "seed": seed, "tok_s": speed} for seed in range(len(joint)) for arm, speed in (speeds | {"joint-ranking": joint[seed]}).items()]
    return {"05_cache_simulation": {"arms": arms, "effects": [], "provenance": {"parameters": {"models": "cpu"}}}}


@pytest.mark.parametrize("joint, words", [
    ((1.01, 1.011, 1.012), "is worth +1.10% [+0.85, +1.35] (3 seeds) in tokens per second, with ranking predictors: from 1.000 to 1.011 tok/s"), ((0.99, 0.989, 0.988), "COSTS speed, -1.10%"),
    ((0.99, 1.0, 1.01), "is worth nothing that can be told from zero, +0.00%"), ((1.02,), "moved tokens per second by +2.00% in one seed, untested"),
])  # fmt: skip
def test_what_it_is_worth_is_said_plainly_whichever_way_it_falls(joint, words):
    told = headline.say_worth(race(joint))
    assert words in told[0] and told[1] == "Prefetching itself is worth +25.0% on the ordinary model (0.800 tok/s without), and an oracle would add 20.0% to that." and "our small cpu models" in told[2] and len(told) == 3
    assert "5 GB/s" in headline.say_machine(race(joint))[0]
    gains = [{"arm": "joint-linear", "seed": seed, "gain_over_baseline": {"fits": 0.02 + 0.001 * seed, "beyond": 0.0}} for seed in range(3)]
    assert headline.say_worth(race(joint) | {"08_latency_sensitivity": {"arms": gains}})[3].endswith("(3.5 GB/s) it is worth nothing.")


@pytest.mark.parametrize("named", [True, False])
def test_what_it_is_worth_by_other_versions_of_the_simulator_is_said_too(named):
    """On our accuracies, which an effect names; of results from before it did, those of our seeds, where ours come after the reference's."""
    found = race((1.01, 1.011, 1.012))

    def effect(kind, variant, mean, whose, seeds=(0, 1, 2)):
        pair = {"metric": "tok_s", "treatment": f"joint-{kind}", "control": f"baseline-{kind}", "variant": variant} | ({"accuracies": whose} if named else {})
        return pair | {"mean": mean, "ci95": (mean - 0.0035, mean + 0.0035), "n": len(seeds), "seeds": list(seeds)}

    theirs = [effect("ranking", "as published", 0.5, results.THEIRS, range(5)), effect("linear", "all mended", 0.6, results.THEIRS), effect("ranking", "one LRU", 0.7, results.THEIRS, range(5))]
    ours = [effect(kind, variant, mean, results.OURS) for kind, variant, mean in (("linear", "all mended", 0.008), ("ranking", "as published", -0.002), ("ranking", "all mended", 0.011), ("ranking", "unchecked", 0.007))]
    found["05_cache_simulation"]["effects"] = [*ours, *theirs] if named else [*theirs, *ours]
    told = headline.say_worth(found)
    assert "2 other versions of the simulator give -0.20% to +0.70%; 1 of 2 intervals excludes zero." in told
    assert "With linear predictors, by which the claims are judged, it is worth +0.80% [+0.45, +1.15]." in told
    assert headline.say_machine(found)[1] == "By other versions of the simulator, with ranking predictors: as published -0.20% [-0.55, +0.15]; unchecked +0.70% [+0.35, +1.05]."


@pytest.mark.parametrize("means, words", [
    ((0.006,), "Another version of the simulator gives +0.60%, by an interval that excludes zero."), ((0.001,), "Another version of the simulator gives +0.10%, by an interval that contains zero."),
    ((0.008, 0.006), "2 other versions of the simulator give +0.60% to +0.80%; both intervals exclude zero."), ((0.001, -0.001), "2 other versions of the simulator give -0.10% to +0.10%; both intervals contain zero."),
    ((0.008, -0.006, 0.001), "3 other versions of the simulator give -0.60% to +0.80%; 2 of 3 intervals exclude zero."), ((0.008, 0.008, 0.008), "3 other versions of the simulator give +0.80%; all intervals exclude zero."),
])  # fmt: skip
def test_how_many_intervals_of_other_versions_exclude_zero_is_said_whatever_their_number(means, words):
    assert headline._others([{"mean": mean, "ci95": [mean - 0.0035, mean + 0.0035]} for mean in means]) == words
    assert headline._others([{"mean": mean, "ci95": None} for mean in means]).endswith("%, in one seed, untested.")


@pytest.mark.parametrize("means, held, words", [
    ((0.01, 0.03), (0.01, 0.02), "Yes: a jointly trained model is easier to foretell at h = 1 and 4."),
    ((0.01, 0.03), (0.09, 0.02), "In part: a jointly trained model is easier to foretell at h = 4; at h = 1 that is not established."),
    ((0.01, 0.03), (0.09, 0.09), "Not shown: nothing is established at h = 1 and 4."),
    ((-0.01, 0.03), (0.01, 0.02), "No: a jointly trained model is harder to foretell at h = 1, easier at h = 4."), ((0.01, 0.03), (None, None), "Not known: one seed tests nothing."),
])  # fmt: skip
def test_the_first_word_follows_what_is_established(means, held, words):
    assert headline._whether([{"horizon": h, "mean": mean, "p_holm": p} for h, mean, p in zip((1, 4), means, held)]) == words


def test_the_gain_beside_the_reference_s_by_hand():
    effects = [{"horizon": h, "mean": mean, "ci95": ci95, "p_holm": 0.01} for h, mean, ci95 in ((1, 0.0145, [0.01, 0.02]), (4, 0.052, [0.04, 0.06]))]
    assert headline.say_size(effects) == ("In points of hit@k, +1.5 / +5.2 here and +2.9 / +5.2 there at h = 1 / 4; our interval contains its value at h = 4. "
                                          "The gain is 0.5 to 1.0 times that of the reference study.")  # fmt: skip
    assert "h = 1 / 4; each of our intervals lies below its value. The gain" in headline.say_size([effects[0], effects[1] | {"ci95": [0.04, 0.0519]}])
    assert "h = 1 / 4; none of our intervals contains its value. The gain" in headline.say_size([effects[0], effects[1] | {"ci95": [0.0525, 0.06]}])
    assert "-0.5 to 1.0 times that of the reference study; at h = 1 it lies on the other side." in headline.say_size([effects[0] | {"mean": -0.0145}, effects[1]])
    assert "The gain is 1.0 times that of the reference study at h = 4, where it is established." in headline.say_size([effects[0] | {"p_holm": 0.2}, effects[1]])
    for nothing in ({"p_holm": 0.2}, {"p_holm": None, "ci95": None}):
        said = headline.say_size([e | nothing for e in effects])
        assert said.startswith("In points of hit@k, +1.5 / +5.2 here") and said.endswith("No gain is established here that could be set against the reference study's.") and "times" not in said


def test_what_the_prediction_term_costs_is_the_median_of_the_rounds_and_its_share_of_operations():
    rounds = {"alone": [{"wall": 1.0}, {"wall": 2.0}, {"wall": 1.0}], "joint": [{"wall": 1.02}, {"wall": 1.9}, {"wall": 1.1}], "operations": {"model": 200.0, "term": 3.0}}
    (told,) = headline.say_step(rounds)
    assert "adds 1.5% to the operations" in told and "+2.0% to its time (one thread, median of 3 rounds" in told and "-5.0% to +10.0%" in told and headline.say_step(None) == []
    with pytest.raises(results.ResultError, match="distributed.json has no step with the prediction term: run benchmarks/distributed.py"):
        headline.say_step({"alone": rounds["alone"], "markdown": "older"})


def test_the_cost_has_the_losses_of_both_arms(outputs):
    finished()
    result = results.load("smoke", "02_horizons")
    first = headline.say_cost(result, {"verdict": "partly"}, None)[0]
    means = [np.mean([row["val_loss"] for row in result["arms"] if row["arm"] == arm]) for arm in ("baseline", "joint")]
    assert "validation loss goes from {:.3f} to {:.3f} nats per token".format(*means) in first


def test_answers_tell_what_was_not_shown_from_what_was_refuted(outputs):
    arms = study()
    for row in arms:
        if row["arm"] == "joint":
            row["hit"]["ranking"] = {h: value - 0.05 + 0.02 * row["seed"] for h, value in row["hit"]["ranking"].items()}
    finished(arms=arms)
    claims = results.update_claims("smoke")
    last = headline.answers(claims, results.load_all("smoke"))[-1]
    unclear = [c for c in claims if c["verdict"] == "not replicated" and ("no interval excludes zero" in c["why"] or "nothing is established" in c["why"])]
    assert unclear and f"For {len(unclear)} of these" in last


def test_a_claim_whose_notebook_has_not_run_says_so_in_the_table(outputs):
    finished()
    table = experiments.claims_table(results.update_claims("smoke")).set_index("claim of the reference study").notebook
    assert table["A LoRA fine-tune does not retrofit predictability into a pretrained model."] == "10_olmoe_lora (not run)"
    assert "02_horizons" in set(table) and not any(name == "02_horizons (not run)" for name in table)
    assert experiments.claims_table([]).empty


def test_the_glossary_gives_the_limits_that_hold():
    text = results.glossary()
    assert f"at most {stats.MAX_LOSS_INCREASE:.1%} above" in text and f"at least {stats.MIN_LOAD_ENTROPY_RATIO:g} of" in text and f"at most {stats.SIGNIFICANCE:g}." in text
    for word in ("Mixture of experts", "hit@k", "point", "arm", "Backbone", "Seed", "Paired", "Established", "Holm's", "Quality gate", "placebo", "Ranking MLP", "Fine-tune", "LoRA", "adapters", "Drift"):
        assert f"**{word}" in text or f"*{word}*" in text, word


def test_the_glossary_explains_every_loss_of_the_ranking_mlp():
    (line,) = (line for line in results.glossary().splitlines() if line.startswith("- **Ranking MLP**"))
    assert all(f"(`{name}`" in line for name in measurements.RANKING_LOSSES) and set(measurements.RANKING_LOSSES) == set(refit.LOSSES)


def test_the_reference_study_is_named_and_linked_where_it_is_first_spoken_of():
    it = results.reference()
    for text in ((paths.ROOT / "README.md").read_text(), (paths.NOTEBOOKS / "00_report.ipynb").read_text()):
        assert it["name"] in text and it["url"] in text
    assert it["url"] in (paths.ROOT / "paper" / "references.bib").read_text() and it["name"] in (paths.ROOT / "paper" / "references.bib").read_text()


def test_one_level_decides_in_verdicts_and_in_words(monkeypatch):
    """Verdict and sentence look at the same constant, so they cannot part."""
    effects = [stats.over_seeds({0: mean - 0.01, 1: mean, 2: mean + 0.01}) for mean in (0.05, 0.0)]
    adjusted = stats.holm([e.p for e in effects])
    family = [e.as_dict() | {"horizon": h, "p_holm": p} for e, h, p in zip(effects, (1, 2), adjusted)]
    for level, word, said in ((0.05, "partly", "Not established after Holm's correction: at h = 2"), (0.01, "not replicated", "None of it is established")):
        monkeypatch.setattr(stats, "SIGNIFICANCE", level)
        assert 0.01 < adjusted[0] <= 0.05 and stats.verdict(effects, ["increase"] * 2).word == word and said in findings.say_confirmed(family, "It", "hit@k")


def test_the_reference_effects_are_differences_of_its_own_levels():
    reference = results.reference()
    level = {(row["arm"], row["predictor"]): row for row in reference["hit"]}
    for row in reference["effect"]:
        for h in ("1", "2", "4"):
            difference = level["joint", row["predictor"]][h] - level["baseline", row["predictor"]][h]
            assert row[h] == pytest.approx(difference, abs=0.0011)   # the study rounds each number by itself


def test_a_claim_of_parts_is_not_counted_among_those_of_another_size():
    size = {"verdict": stats.PARTLY, "why": f"every interval excludes zero; {stats.OTHER_SIZE}: h = 1", "statement": "It helps."}
    told = headline.say_failed([size, size, size | {"parts": [{"verdict": stats.PARTLY, "why": size["why"]}]}])
    assert told[-1] == "Of the 3 that are replicated in part, 2 hold in direction and differ more than twofold in size; 1 consists of several parts, not all of which are replicated (of 1 none is, but one at least is partly)."
    assert headline.say_failed([size])[-1] == "Of the 1 that are replicated in part, 1 hold in direction and differ more than twofold in size."


@pytest.mark.parametrize("counts, words", [
    ((6, 13, 4, 6), "4 of the 23 claims that were tested (6 replicated, 13 partly, 4 not replicated); 6 more are not tested."),
    ((2, 0, 0, 1), "None of the 2 claims that were tested (2 replicated, 0 partly, 0 not replicated); 1 more is not tested."),
    ((1, 0, 1, 0), "1 of the 2 claims that were tested (1 replicated, 0 partly, 1 not replicated)."), ((0, 0, 0, 3), "Not known: none of the 3 claims has been tested."),
])  # fmt: skip
def test_the_verdicts_in_brackets_add_up_to_the_claims_that_were_tested(counts, words):
    verdicts = (stats.REPLICATED, stats.PARTLY, stats.NOT_REPLICATED, stats.NOT_TESTED)
    claims = [{"verdict": word, "why": "so", "statement": "It is."} for word, count in zip(verdicts, counts) for _ in range(count)]
    first = headline.say_failed(claims)[0]
    assert first == words
    if bracket := re.search(r"of the (\d+) claims .*\((.*)\)", first):
        assert int(bracket[1]) == sum(map(int, re.findall(r"\d+", bracket[2]))) == sum(counts[:3])


def test_every_claim_that_is_replicated_in_part_is_accounted_for():
    size = {"verdict": stats.PARTLY, "why": f"every interval excludes zero; {stats.OTHER_SIZE}: h = 1", "statement": "It helps."}
    wide = {"verdict": stats.PARTLY, "why": "an interval reaches beyond 2 points, but none that does excludes zero", "statement": "It harms nobody."}
    parts = {"verdict": stats.PARTLY, "why": "", "statement": "Both.", "parts": [{"verdict": word, "why": ""} for word in (stats.REPLICATED, stats.NOT_REPLICATED)], "effects": []}
    said = headline.say_failed([size, wide, parts])[-1]
    assert said == ("Of the 3 that are replicated in part, 1 hold in direction and differ more than twofold in size; 1 consists of several parts, not all of which are replicated; "
                    "“It harms nobody”: an interval reaches beyond 2 points, but none that does excludes zero.")  # fmt: skip
    assert headline.say_failed([wide])[-1].startswith("Of the 1 that are replicated in part, “It harms nobody”") and "in part" not in headline.say_failed([])[-1]
