"""The second fit of the ranking MLP: its effects are told apart from the first's, and its levels are said whichever way they fall."""

import pytest
from fake_measurements import measurement

from predmoe import experiments, refit, results


def arms(loss="margin", *, seeds=(0, 1, 2), ranking=None, linear=None):
    """baseline and joint of every seed, MLPs fitted by `loss`; `ranking`, `linear`: horizon -> hit@k of all baselines in place of the drawn."""
    rows = [measurement(arm, seed, gain=gain) | {"posthoc_config": {"ranking_loss": loss}} for seed in seeds for arm, gain in (("baseline", 0.0), ("joint", 1.0))]
    for row in rows:
        if row["arm"] == "baseline":
            row["hit"] |= {name: values for name, values in (("ranking", ranking), ("linear", linear)) if values}
    return rows


def hits(*values):
    return dict(zip("124", values))


# --- effects -----------------------------------------------------------------------------------------------------------

def test_the_effects_are_the_mlps_alone_paired_by_seed_and_named_as_the_other_fits():
    again = arms("margin_all")
    found = refit.effects(again, "joint", "baseline")
    assert [(e["predictor"], e["horizon"], e["n"]) for e in found] == [("ranking", h, 3) for h in (1, 2, 4)]
    assert all(e["variation"] == refit.VARIATION and e["name"] == f"{refit.VARIATION}: joint - baseline, ranking, h={e['horizon']}" for e in found)
    plain = experiments.hit_effects(again, "joint", "baseline", predictors=["ranking"])
    kept = [name for name in plain[0] if name != "name"]
    assert [[e[name] for name in kept] for e in found] == [[e[name] for name in kept] for e in plain] and not any("variation" in e for e in plain)
    by_hand = [row["hit"]["ranking"]["4"] for row in again if row["arm"] == "joint"], [row["hit"]["ranking"]["4"] for row in again if row["arm"] == "baseline"]
    assert found[2]["mean"] == pytest.approx(sum(by_hand[0]) / 3 - sum(by_hand[1]) / 3) and found[2]["per_seed"] == pytest.approx([a - b for a, b in zip(*by_hand)])


@pytest.mark.parametrize("loss", refit.LOSSES)
def test_an_effect_is_said_with_the_loss_that_its_mlps_were_fitted_by(loss):
    again = arms(loss)
    told = refit.say_effects(refit.effects(again, "joint", "baseline"), again, "joint training")
    assert told.startswith(f"Under the MLP fitted {refit.LOSSES[loss]}, joint training raises hit@k at h = 1 (+") and told.endswith("(3 seeds).")
    single = arms(loss, seeds=(0,))
    assert "moved hit@k by +" in (said := refit.say_effects(refit.effects(single, "joint", "baseline"), single, "joint training")) and said.endswith("in one seed, untested.")


# --- levels ------------------------------------------------------------------------------------------------------------

def test_levels_are_means_over_the_seeds_of_one_arm():
    rows = arms(ranking=hits(0.5, 0.4, 0.3))
    rows[0]["hit"] = rows[0]["hit"] | {"ranking": hits(0.8, 0.4, 0.0)}
    assert refit.levels(rows, "baseline") == pytest.approx({1: 0.6, 2: 0.4, 4: 0.2})
    assert refit.levels(rows, "baseline", "linear") != refit.levels(rows, "baseline") != refit.levels(rows, "joint")


@pytest.mark.parametrize("second, order", [
    (hits(0.91, 0.81, 0.71), "The second is stronger at every horizon."),
    (hits(0.89, 0.79, 0.69), "The second is weaker at every horizon."),
    (hits(0.91, 0.79, 0.69), "The second is stronger at h = 1, weaker at h = 2 / 4."),
    (hits(0.9, 0.8, 0.7), "The second is as strong as the first at every horizon."),
    (hits(0.9, 0.79, 0.69), "The second is weaker at h = 2 / 4, as strong as the first at h = 1."),
])  # fmt: skip
def test_which_fit_is_the_better_is_said_whichever_way_it_falls(second, order):
    linear = hits(0.6, 0.5, 0.4)
    told = refit.say_levels(arms(ranking=hits(0.9, 0.8, 0.7), linear=linear), arms("margin_all", ranking=second), "baseline")
    numbers = " / ".join(f"{100 * value:.1f}" for value in second.values())
    assert told.startswith(f"On the baseline model the MLP fitted {refit.LOSSES['margin']} has hit@k 90.0 / 80.0 / 70.0% at h = 1 / 2 / 4; fitted {refit.LOSSES['margin_all']}, {numbers}%; ")
    assert "; a linear one 60.0 / 50.0 / 40.0%. " in told and told.endswith(order)


def test_a_fit_below_the_linear_predictor_is_named_with_its_horizons():
    first, second, linear = hits(0.9, 0.7, 0.5), hits(0.7, 0.72, 0.7), hits(0.8, 0.75, 0.6)
    told = refit.say_levels(arms(ranking=first, linear=linear), arms("margin_all", ranking=second), "baseline")
    assert told.endswith("The second is stronger at h = 2 / 4, weaker at h = 1; the first is weaker than the linear predictor at h = 2 / 4; the second is weaker than the linear predictor at h = 1 / 2.")


def test_a_measurement_from_before_there_were_two_losses_counts_as_the_reference_studys():
    old = [row | {"posthoc_config": {}} for row in arms()]
    assert refit.loss_of(old) == "margin" and refit.loss_of([*old, *arms()]) == "margin" and refit.loss_of(arms("margin_all")) == "margin_all"


def test_what_cannot_be_told_is_one_sentence():
    with pytest.raises(results.ResultError, match="^the ranking MLPs of these arms were fitted by margin and margin_all, not by one loss: they cannot be compared$"):
        refit.say_levels([*arms(), *arms("margin_all", seeds=(3,))], arms("margin_all"), "baseline")
    with pytest.raises(results.ResultError, match="^there is no arm 'stock' among baseline, joint$"):
        refit.say_levels(arms(), arms("margin_all"), "stock")
    with pytest.raises(results.ResultError, match="^there is no arm 'stock' among no measurements$"):
        refit.levels([], "stock")
