"""The frontier by hand: what is known by construction, who dominates whom, and a verdict that follows the table whichever way it falls."""

import pandas as pd
import pytest
from fake_locality import frontier as study

from predmoe import frontier

ARMS = study()


def known(*rows):
    """(arm, family, loss_change, known) at one horizon and one seed."""
    return pd.DataFrame([{"arm": arm, "family": family, "seed": 0, "horizon": 1, "known": value, "exact": family == frontier.EARLY, "loss_change": loss} for arm, family, loss, value in rows])


def test_families_and_what_is_known_by_construction():
    assert {row["arm"]: frontier.family(row) for row in ARMS} == {
        "baseline": frontier.BASE, "joint 0.3": frontier.TRAINED, "joint 1": frontier.TRAINED, "early 1": frontier.EARLY, "hash": frontier.HASH, "sticky 1": frontier.CONTROL}  # fmt: skip
    table = frontier.known_ahead(ARMS)
    exact = table[table.exact]
    assert (exact.known == 1.0).all() and set(zip(exact.arm, exact.horizon)) == {("early 1", 1), ("hash", 1), ("hash", 2), ("hash", 4)}
    early = next(row for row in ARMS if row["arm"] == "early 1")
    assert table[(table.arm == "early 1") & (table.seed == early["seed"]) & (table.horizon == 2)].known.item() == early["hit"]["ranking"]["2"]


def test_losses_are_paired_with_the_same_seeds_baseline():
    table = frontier.known_ahead(ARMS)
    loss = {(row["arm"], row["seed"]): row["val_loss"] for row in ARMS}
    for row in table.itertuples():
        assert row.loss_change == loss[row.arm, row.seed] / loss["baseline", row.seed] - 1
    assert (frontier.local(ARMS).groupby("measure").size() == len(ARMS)).all()


@pytest.mark.parametrize("a, b, expected", [((0.0, 0.9), (0.0, 0.8), True), ((-0.1, 0.8), (0.0, 0.8), True), ((0.0, 0.8), (0.0, 0.8), False), ((0.1, 0.9), (0.0, 0.8), False)])
def test_dominance_by_hand(a, b, expected):
    one, other = ({"loss_change": loss, "known": value} for loss, value in (a, b))
    assert frontier.dominates(one, other, "known") is expected


def test_the_frontier_is_what_nobody_dominates():
    table = known(("baseline", frontier.BASE, 0.0, 0.8), ("joint", frontier.TRAINED, 0.01, 0.9), ("bad", frontier.TRAINED, 0.02, 0.85), ("early", frontier.EARLY, 0.03, 1.0))
    found = frontier.on_frontier(table, "known").set_index("arm").frontier
    assert found.to_dict() == {"baseline": True, "joint": True, "bad": False, "early": True}
    sentence = frontier.say_frontier(table, "known", "what is known 1 layers ahead")
    assert sentence.index("baseline") < sentence.index("joint") < sentence.index("early 1".split()[0]) and "1 of 4 arms are dominated" in sentence


@pytest.mark.parametrize("early, winner, verdict", [
    ((0.005, 1.0), "early router", "No: at every horizon, every early router dominates"),   # cheaper and better than both trained arms
    ((0.05, 0.85), "training", "Yes: at every horizon, every early router is dominated"),    # dearer and worse than one of them, were it not exact
    ((0.05, 1.0), "neither", "It depends on what is to be bought"),
])
def test_the_verdict_falls_whichever_way_the_table_does(early, winner, verdict):
    table = known(("baseline", frontier.BASE, 0.0, 0.8), ("joint 0.3", frontier.TRAINED, 0.01, 0.9), ("joint 1", frontier.TRAINED, 0.02, 0.95), ("early 1", frontier.EARLY, *early))
    compared = frontier.against_early(table)
    assert compared.winner.tolist() == [winner]
    sentences = frontier.say_verdict(compared)
    assert verdict in sentences[-1] and "exploratory" in sentences[-1] and len(sentences) == 2
    best = compared["best trained at no greater loss"].item()
    assert best == ("" if early[0] < 0.01 else "joint 1")
    assert ("no trained arm costs as little" in sentences[0]) == (best == "")


def test_equal_loss_means_the_best_trained_arm_that_costs_no_more():
    table = known(("joint 0.3", frontier.TRAINED, 0.01, 0.9), ("joint 1", frontier.TRAINED, 0.02, 0.95), ("early 1", frontier.EARLY, 0.015, 1.0))
    (row,) = frontier.against_early(table).to_dict("records")
    assert (row["best trained at no greater loss"], row["its known"]) == ("joint 0.3", 0.9) and row["gap"] == pytest.approx(0.1)


def test_without_an_early_router_the_question_is_left_open():
    assert "compared with none" in frontier.say_verdict(frontier.against_early(known(("joint", frontier.TRAINED, 0.0, 0.9))))[0]


def test_three_seeds_of_every_arm_are_not_called_exploratory():
    sentences = frontier.say_verdict(frontier.against_early(frontier.known_ahead(ARMS)))
    assert "exploratory" not in sentences[-1] and len(sentences) == 2   # a router moved by one layer is an answer at h = 1 alone


def test_losses_of_early_and_trained_arms_are_paired_on_their_common_seeds():
    arms = [row for row in ARMS if row["arm"] != "early 1" or row["seed"] < 2]
    effects = frontier.early_effects(arms, frontier.known_ahead(arms))
    assert [(e["treatment"], e["control"], e["n"]) for e in effects] == [("early 1", "joint 0.3", 2), ("early 1", "joint 1", 2)]
    loss = {(row["arm"], row["seed"]): row["val_loss"] for row in arms}
    assert effects[0]["per_seed"] == pytest.approx([loss["early 1", s] / loss["joint 0.3", s] - 1 for s in (0, 1)])


def test_the_best_on_both_is_the_largest_sum_within_the_gate():
    table = frontier.both(ARMS)
    assert set(table.arm) == {"joint 0.3", "joint 1"} and table["sum"].tolist() == pytest.approx((table.lookahead + table.locality).tolist())
    rows = pd.DataFrame([{"arm": "a", "lookahead": 2.0, "locality": 1.0, "sum": 3.0, "passes the gate": True, "n": 1},
                         {"arm": "b", "lookahead": 6.0, "locality": -2.0, "sum": 4.0, "passes the gate": True, "n": 3},
                         {"arm": "c", "lookahead": 9.0, "locality": 9.0, "sum": 18.0, "passes the gate": False, "n": 3}])  # fmt: skip
    assert frontier.best_on_both(rows).arm == "b" and "gains on lookahead alone" in frontier.say_own(rows)
    assert "a does best on lookahead and locality together and gains on both" in frontier.say_own(rows[rows.arm == "a"]) and "single seed" in frontier.say_own(rows[rows.arm == "a"])
    assert "None of the 1 arms" in frontier.say_own(rows[rows.arm == "c"])
