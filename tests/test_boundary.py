"""10_olmoe_lora and 13_olmoe_dose: what they need, and what they say of drawn measurements, whichever way these fall."""

import nbformat
import numpy as np
import pytest
from fake_measurements import measurement
from figures import cut_off

from predmoe import boundary, claim_words, claims, cli, config, execute, experiments, headline, paper_text, paths, plan, plots_controls, results, studies
from predmoe.config import ConfigError

NAMES = ("10_olmoe_lora", "13_olmoe_dose")
HEADS = 0.042   # what a head that was trained along has over a fresh one, as in the reference study


def drawn(pairs, gains, fit=None):
    """Measurements of a study's arms by the predictor fit `fit`; `gains`: part -> the joint arm's gain, in units of the drawn effect."""
    found = []
    for arm, run in pairs:
        part = next(part for part, prefix in reversed(boundary.PARTS.items()) if arm.startswith(prefix))
        seed, joint = run.train.seed, "joint" in arm
        row = measurement(arm, seed, gain=gains[part] if joint else 0.0, loss=4.4 if arm == "stock" else 4.3)
        own = np.random.default_rng([seed, len(arm)])
        if run.objective.lambda_pred:
            row["hit"]["cotrained"] = {h: value + (HEADS if joint else 0.0) + own.normal(0, 0.001) for h, value in row["hit"]["linear"].items()}
            row["exact_set"]["cotrained"] = row["exact_set"]["linear"]
        row |= {"lambda_pred": run.objective.lambda_pred, "config_hash": run.hash, "posthoc_config": config.to_dict(fit) if fit else {}}
        if run.finetune is not None:
            row |= {"drift": {"kept": 0.9 - 0.1 * joint + own.normal(0, 0.01), "kept_per_layer": [0.9] * 8, "weights": {"router": 0.1, "experts": 0.2, "attention": 0.3}},
                    "trained": {"parameters": 100, "experts": 60}}  # fmt: skip
        found.append(row)
    return found


def told(folder, gains) -> dict:
    """results.json of both notebooks by name, their cells run in this process with the committed profile's parameters; "claims" by id."""
    params, found = {job.name: job.params for job in execute.plan("cpu", ["10", "13"])}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_OUTPUTS", str(folder))
        patch.setattr(experiments, "measure_arms", lambda pairs, fit, **__: drawn(pairs, gains, fit))
        for name in NAMES:
            scope = {}
            for cell in nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
                if cell.cell_type == "code":
                    exec(compile(cell.source, name, "exec"), scope)
                    if "parameters" in cell.metadata.get("tags", []):
                        scope |= params[name] | {"profile": "drawn"}
            found[name] = results.load("drawn", name)
        return found | {"claims": {claim["id"]: claim for claim in results.load_claims("drawn")}}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """As in the reference study: LoRA moves nothing (its noise is the baseline's), and the more of the model is trained the more it moves."""
    return told(tmp_path_factory.mktemp("without"), dict(zip(boundary.PARTS, (-1e-4, 0.4, 0.9, 2.0))))


@pytest.fixture(scope="module")
def with_transfer(tmp_path_factory):
    """The other way: LoRA moves most."""
    return told(tmp_path_factory.mktemp("with"), dict(zip(boundary.PARTS, (1.1, 0.4, 0.9, 2.0))))


def test_the_claims_follow_what_was_measured(without, with_transfer):
    assert {name: without["claims"][name]["verdict"] for name in ("no-retrofit", "lora-coadaptation")} == dict.fromkeys(("no-retrofit", "lora-coadaptation"), "replicated")
    assert with_transfer["claims"]["no-retrofit"]["verdict"] == "not replicated" and with_transfer["claims"]["lora-coadaptation"]["verdict"] != "replicated"
    assert without["claims"]["lora-dose"]["verdict"] != "replicated" and with_transfer["claims"]["lora-dose"]["verdict"] in ("replicated", "partly")
    assert all(without["claims"][name]["n"] == 3 for name in ("no-retrofit", "lora-coadaptation", "lora-dose"))


def test_where_transfer_begins_is_said_by_the_first_interval_above_zero(without, with_transfer):
    said = [next(f for f in found["13_olmoe_dose"]["findings"] if f.startswith("Joint against baseline under the ranking MLP")) for found in (without, with_transfer)]
    assert said[0].endswith("the first of these with an interval above zero, by however little, is: last half of the blocks; below zero lies that of LoRA; of one seed, and so without an interval, is pretraining.")
    assert said[1].endswith("the first of these with an interval above zero, by however little, is: LoRA; of one seed, and so without an interval, is pretraining.")
    assert "pretraining" in said[0] and "a single seed, exploratory" in said[0] and "(single seed)" not in said[0]
    none = {"horizon": 4, "predictor": "ranking", "variation": "LoRA", "mean": 0.0, "ci95": [-0.01, 0.01], "n": 3}
    assert boundary.say_boundary([none], "ranking").endswith("no interval of these lies above zero.")
    assert boundary.say_boundary([none | {"ci95": None, "n": 1}], "ranking").endswith("a single seed of each has no interval to tell where it begins.")
    assert boundary.say_boundary([none | {"mean": -0.02, "ci95": [-0.03, -0.01]}], "ranking").endswith("no interval of these lies above zero; below zero lies that of LoRA.")
    beside = [none, none | {"horizon": 2}, none | {"variation": "all weights", "mean": 0.02}]
    assert boundary.say_against(beside, "LoRA", "all weights") == "Joint against baseline with LoRA trained, beside the same with all weights: +0.0 against +2.0 points at h = 4 (means over the seeds of each)."


def effect(predictor, horizon, low, high, **more):
    """An effect whose Holm-corrected p is small where the interval excludes zero."""
    return {"predictor": predictor, "horizon": horizon, "mean": (low + high) / 2, "ci95": [low, high], "n": 3, "p_holm": 0.01 if low * high > 0 else 0.3, "treatment": "joint 1"} | more


@pytest.mark.parametrize("ranking, linear, words", [
    ((0.012, 0.03), (-0.001, 0.002), ("Yes: a LoRA fine-tune with the prediction loss (weight 1) raises a trained model's hit@k by more than 1 point (3 seeds).", "That is so under the ranking MLP at h = 4 (+2.1 points [+1.2, +3.0]).")),
    ((-0.006, 0.0061), (0.0002, 0.0012), ("No: a LoRA fine-tune with the prediction loss (weight 1) raises a trained model's hit@k by no more than 1 point (3 seeds).",
        "exclude a gain of more than 0.7 points under the ranking MLP and a gain of more than 0.2 points under the linear predictor.", "A gain that is not shown to exceed 1 point is established after Holm's correction under the linear predictor at h = 4")),
    ((-0.01, 0.0131), (0.0, 0.001), ("Undecided: ", "is not shown to raise a trained model's hit@k by more than 1 point, but that is not excluded either (3 seeds).", "exclude a gain of more than 1.4 points under the ranking MLP")),
    ((-0.03, -0.012), (-0.002, 0.001), ("No: ", "exclude any gain under the ranking MLP and a gain of more than 0.1 points under the linear", "A loss is established after Holm's correction under the ranking MLP at h = 4 (-2.1 points")),
])  # fmt: skip
def test_whether_a_fine_tune_retrofits_is_answered_by_the_claims_margin(ranking, linear, words):
    told = boundary.say_retrofit([effect("ranking", 4, *ranking), effect("linear", 4, *linear), effect("next_router", 4, 0.5, 0.6)])
    assert all(part in told for part in words) and told.startswith(words[0]) and ("A gain that" in told) is any("A gain that" in part for part in words)
    single = [effect(name, 4, 0.1, 0.2) | {"ci95": None, "p_holm": None, "n": 1} for name in boundary.FRESH]
    assert boundary.say_retrofit(single) == "Not known: one seed tests nothing (a single seed, exploratory)."


def test_the_margins_are_those_of_the_claim_and_change_the_answer(monkeypatch):
    claim = next(spec for spec in results.claim_specs() if spec["id"] == "no-retrofit")
    assert boundary.margins() == {"ranking": claim["parts"][0]["expected"], "linear": claim["parts"][1]["expected"]} and set(boundary.margins()) == set(boundary.FRESH)
    monkeypatch.setattr(boundary, "margins", lambda: {"ranking": 0.02, "linear": 0.001})
    told = boundary.say_retrofit([effect("ranking", 4, 0.012, 0.019), effect("linear", 4, 0.002, 0.004)])
    assert told.startswith("Yes: ") and "by more than 2 points (ranking MLP) or 0.1 points (linear predictor)" in told and "That is so under the linear predictor" in told


@pytest.mark.parametrize("least, middle, words", [
    ((-0.01, 0.005), (0.012, 0.03), ("At weight 1 transfer begins with the last half of the blocks: of what is trained", "That much is excluded with LoRA.", "So does training all weights.")),
    ((-0.01, 0.02), (0.012, 0.03), ("At weight 1 transfer begins with the last half of the blocks, at the latest: ", "That much is neither shown nor excluded with LoRA.")),
    ((-0.01, 0.005), (-0.01, 0.02), ("At weight 1 transfer begins with all weights, at the latest: ", "excluded with LoRA.", "neither shown nor excluded with the last half of the blocks.")),
])  # fmt: skip
def test_where_transfer_begins_is_answered_by_the_same_margin(least, middle, words):
    ends = {"LoRA": least, "last half of the blocks": middle, "all weights": (0.02, 0.04)}
    effects = [effect(name, 4, *pair, variation=part) for part, pair in ends.items() for name in boundary.FRESH]
    alone = [effect(name, 4, 0.1, 0.1, variation="pretraining") | {"ci95": None, "p_holm": None, "n": 1} for name in boundary.FRESH]
    told = boundary.say_transfer([*effects, *alone])
    assert told.startswith(words[0]) and all(part in told for part in words)
    assert "of what is trained, from the least to the most (LoRA, the last half of the blocks, all weights, pretraining), the first to raise" in told
    assert told.endswith("Of pretraining there is a single seed and so no interval: +10.0 points under the ranking MLP at h = 4.")
    assert boundary.say_transfer([e for e in effects if e["variation"] == "LoRA"]).startswith("Transfer is not shown to begin at weight 1: nothing that is trained (LoRA) raises")
    assert boundary.say_transfer(alone).startswith("Where transfer begins at weight 1 is not known: single seeds test nothing.")


def test_the_order_from_the_least_to_the_most_is_that_of_the_parameters_that_the_committed_fine_tunes_train():
    rows = results.load("cpu", "13_olmoe_dose")["arms"]
    trained = [row["trained"]["parameters"] for prefix in boundary.parts_of(rows).values() for row in rows if row["arm"] == f"{prefix}baseline" and "trained" in row]
    assert trained == sorted(trained) and len(set(trained)) == 3


def test_both_notebooks_and_the_reports_first_lines_answer_their_title(without, with_transfer):
    for found, first, begins in ((without, "No: ", "the last half of the blocks"), (with_transfer, "Yes: ", "LoRA")):
        retrofit, model, judge, other, transfer, built, price = headline.say_trained(found)
        assert "(`margin_all`)" in judge and all(judge in found[name]["findings"] for name in NAMES)
        assert model == "The trained model is a small one of our own." and other.startswith("Under the ranking MLP of the other loss the fine-tune ")
        assert built.startswith("(Heads of a horizon of half the layers") and price in found["13_olmoe_dose"]["findings"]
        assert found["10_olmoe_lora"]["findings"][0] == retrofit and retrofit.startswith(first)
        assert transfer in found["13_olmoe_dose"]["findings"] and transfer.startswith(f"At weight 1 transfer begins with {begins}:")
    assert headline.say_trained({}) == ["Not known in this profile: 10_olmoe_lora has not been run."]
    alone = headline.say_trained({"10_olmoe_lora": without["10_olmoe_lora"]})
    assert len(alone) == 4 and alone[0] == without["10_olmoe_lora"]["findings"][0]


def test_by_which_loss_the_ranking_mlp_was_fitted_is_said_where_it_is_not_the_reference_studys(without):
    claim = without["claims"]["no-retrofit"]
    assert {part["name"]: part.get("fit") for part in claim["parts"]} == {"ranking MLP": "margin_all", "linear": None} and "fit" not in claim
    row, linear = claim_words.table([claim]).iloc[1:].itertuples()
    assert row[2] == "↳ part: ranking MLP (fitted by margin_all)" and row[3].startswith("joint 0.1 minus baseline: hit@k of a fresh ranking MLP (fitted by margin_all), 3 seeds:")
    assert "fitted" not in linear[2] + linear[3] and "ranking MLP (fitted by margin_all): replicated (" in claims.reason(claim) and "ranking MLP (fitted by margin\\_all), replicated" in paper_text.reason(claim)
    spec, fitted = next(spec for spec in results.claim_specs() if spec["id"] == "no-retrofit"), lambda name, **asked: without[name] | {"provenance": {"parameters": without[name]["provenance"]["parameters"] | asked}}
    for as_published in (fitted("10_olmoe_lora", ranking_loss="margin"), fitted("10_olmoe_lora", posthoc={"ranking_loss": "margin"})):
        assert not any("fit" in part for part in claims.evaluate(spec, {"10_olmoe_lora": as_published})["parts"])
    whole = spec | spec["parts"][0]
    del whole["parts"]
    assert claims.evaluate(whole, without)["fit"] == "margin_all"
    other = headline.say_trained({"10_olmoe_lora": without["10_olmoe_lora"], "13_olmoe_dose": fitted("13_olmoe_dose", ranking_loss="margin")})
    assert sum(sentence.startswith("The ranking MLP is the one fitted ") for sentence in other) == 2


def test_a_fine_tune_that_lowers_predictability_retrofits_none():
    """The claim says that nothing is gained, and is judged by that side alone."""
    specs = {spec["id"]: spec for spec in results.claim_specs()}
    arms = [measurement(arm, seed, gain=gain) for seed in range(3) for arm, gain in (("baseline", 0.0), ("joint 0.1", -1.0))]
    decided = claims.evaluate(specs["no-retrofit"], {"10_olmoe_lora": {"arms": arms}})
    assert all(e["ci95"][1] < 0 for e in decided["effects"]) and decided["verdict"] == "replicated"
    assert claims.evaluate(specs["lora-coadaptation"], {"10_olmoe_lora": {"arms": arms}})["parts"][1]["verdict"] == "replicated"


def test_the_drift_table_has_whole_counts_and_words_and_the_figure_a_unit_in_each_title(without):
    table = boundary.drifts(without["13_olmoe_dose"]["arms"])
    shown = boundary.drifts_table(table).set_index("arm")
    assert shown["parameters trained"].tolist()[0] == "100" and shown["of these in experts"].tolist()[0] == "60" and shown.seeds.tolist() == [3] * len(shown)
    assert "joint 1 (all weights)" in shown.index and "baseline (last half of the blocks)" in shown.index and "joint 0.1" in shown.index
    assert "change of router entropy (% of its maximum)" in shown.columns and not any("point" in name for name in shown.columns)
    assert not set(shown.columns) & set(table.columns) and not any("_" in name for name in shown.columns)
    assert shown["experts kept (% of k)"]["baseline"] == f"{100 * table[table.arm == 'baseline'].kept.mean():.1f}" and shown["change of validation loss (nats/token)"]["baseline"].startswith("-0.")
    panels = boundary.drift_panels(table)
    assert set(panels.measure) == {"experts kept (% of k)", "change of the routers (% of their norm)", "change of the experts (% of their norm)", "change of attention (% of its norm)"}
    figure = plots_controls.measures(panels, label="share or change (%)")
    assert all([tick.get_text() for tick in ax.get_xticklabels()] == list(dict.fromkeys(table.arm)) for ax in figure.axes) and cut_off(figure) == []


@pytest.mark.parametrize("means, words", [
    ((0.04, 0.03), "+4.0 points [+3.0, +5.0] at h = 1, +3.0 points [+2.0, +4.0] at h = 2 (3 seeds): more at h = 1, 2."),
    ((0.04, -0.03), "(3 seeds): more at h = 1; less at h = 2."), ((0.0, -0.03), ": neither measurably more nor less at h = 1; less at h = 2."),
])  # fmt: skip
def test_co_adaptation_is_told_whichever_way_it_falls(means, words):
    effects = [{"treatment": "joint 0.1", "horizon": h, "mean": mean, "ci95": [mean - 0.01, mean + 0.01], "n": 3} for h, mean in zip((1, 2), means)]
    assert boundary.say_coadaptation(effects)[0].endswith(words)
    (alone,) = boundary.say_coadaptation([effects[0] | {"ci95": None, "n": 1}])
    assert alone.endswith("at h = 1 (a single seed, exploratory): untested.")


def test_what_the_model_did_for_its_head_is_joint_minus_isolated_of_the_same_seeds():
    """By hand: seed 1 has no isolated run, so that it does not count."""
    gap = {"n": 2, "ci95": [0.0, 0.1], "mean": 0.05}
    gaps = [gap | {"treatment": "joint 0.1", "horizon": h, "seeds": [0, 1], "per_seed": [0.03 * h, 0.9]} for h in (1, 2)]
    gaps += [gap | {"treatment": "isolated 0.1", "horizon": h, "seeds": [0], "per_seed": [0.01]} for h in (1, 2)]
    found = boundary.for_its_head(gaps, "joint 0.1", "isolated 0.1")
    assert [(e["horizon"], e["mean"], e["seeds"], e["ci95"], e["family"]) for e in found] == [(1, pytest.approx(0.02), [0], None, "exploratory"), (2, pytest.approx(0.05), [0], None, "exploratory")]
    assert boundary.say_for_its_head(found) == ["In the arm joint 0.1, what the model did for its head alone, this difference minus that in the arm isolated 0.1 of the same seed, "
                                                "is +2.0 points at h = 1, +5.0 points at h = 2 (a single seed, exploratory): untested."]  # fmt: skip
    both = [e | {"seeds": [0, 1, 2], "per_seed": [0.051, 0.05, 0.049] if e["treatment"] == "joint 0.1" else [0.01, 0.01, 0.01]} for e in gaps]
    (told,) = boundary.say_for_its_head(boundary.for_its_head(both, "joint 0.1", "isolated 0.1"))
    assert "+4.00 points [+3.75, +4.25] at h = 1" in told and told.endswith("(3 seeds): more at h = 1, 2.")
    for nothing in (gaps[:2], [gaps[0] | {"seeds": [1], "per_seed": [0.9]}, gaps[2]]):   # no isolated arm; no seed in common
        assert boundary.say_for_its_head(boundary.for_its_head(nothing, "joint 0.1", "isolated 0.1")) == []


def test_effects_of_a_part_are_against_its_own_baseline(without):
    rows, effects = without["13_olmoe_dose"]["arms"], without["13_olmoe_dose"]["effects"]
    for e in effects:
        if e.get("variation") == "all weights":
            sides = [results.values_by_seed(rows, f"full {arm}", f"hit.{e['predictor']}.{e['horizon']}") for arm in ("joint 1", "baseline")]
            assert e["mean"] == pytest.approx(np.mean([sides[0][seed] - sides[1][seed] for seed in (0, 1, 2)])) and e["n"] == 3
    assert {gate["arm"] for gate in without["13_olmoe_dose"]["gates"]} == {"joint 0.1", "joint 1", "half joint 1", "full joint 1", "pretraining joint 1"}


def test_drift_and_the_heads_gap_are_in_the_results(without):
    found = without["10_olmoe_lora"]
    gaps = {(e["treatment"], e["horizon"]): e for e in found["effects"] if "head trained along" in e["name"]}
    assert gaps["joint 0.1", 1]["mean"] == pytest.approx(HEADS, abs=0.003) and gaps["joint 0.1", 1]["n"] == 3
    assert gaps["isolated 0.1", 1]["mean"] == pytest.approx(0.0, abs=0.004) and gaps["isolated 0.1", 1]["ci95"] is None
    (alone,) = [sentence for sentence in found["findings"] if "what the model did for its head alone" in sentence]
    by_hand = [gaps["joint 0.1", h]["per_seed"][0] - gaps["isolated 0.1", h]["per_seed"][0] for h in (1, 2, 4)]
    assert f"is {100 * by_hand[0]:+z.1f} points at h = 1, {100 * by_hand[1]:+z.1f} points at h = 2, {100 * by_hand[2]:+z.1f} points at h = 4 (a single seed, exploratory): untested." in alone
    kept = next(e for e in found["effects"] if e["name"] == "baseline - stock model, experts kept")
    loss = next(e for e in found["effects"] if e["name"] == "baseline - stock model, validation loss")
    assert kept["mean"] == pytest.approx(-0.1, abs=0.02) and kept["n"] == 3 and loss["mean"] < 0
    assert any(sentence.startswith("Against the stock model the arm joint 0.1 keeps") for sentence in found["findings"])


def test_a_change_of_entropy_is_told_in_its_maximum_and_not_in_points_which_are_of_hit(without):
    told = boundary.say_drift(boundary.drift_effects(without["13_olmoe_dose"]["arms"]))
    assert told and not any("point" in sentence for sentence in told)
    (one,) = boundary.say_drift([{"treatment": "joint 1", "metric": name, "mean": mean, "ci95": ci95, "n": 3} for name, mean, ci95 in (
        ("kept", -0.1, [-0.2, -0.0]), ("router_entropy_fraction", -0.0011, [-0.0018, -0.0004]), ("load_entropy", 0.002, [0.001, 0.003]), ("val_loss", -0.01, [-0.02, -0.001]))])
    assert one == ("Against the stock model the arm joint 1 keeps 90.0% of a token's experts; router entropy -0.11% of its maximum [-0.18, -0.04], load entropy +0.20% of its maximum [+0.10, +0.30], "
                   "validation loss -0.0100 nats [-0.0200, -0.0010] (3 seeds).")  # fmt: skip


def test_the_reference_studys_fine_tunes_are_differences_of_its_levels():
    known = boundary.reference_effects("joint 0.1")
    assert [round(known["linear", h], 4) for h in (1, 2, 4)] == [0.001, 0.002, 0.003] and round(known["ranking", 4], 4) == 0.002
    assert round(boundary.reference_effects("joint 1")["linear", 4], 4) == 0.026 and boundary.reference_effects("joint 3") == {}


# --- what they need ----------------------------------------------------------------------------------------------------

def test_the_plan_lists_stock_model_and_fine_tunes_once_each_stock_first(tmp_path, capsys, monkeypatch):
    items = plan.plan("cpu", ["10", "13"], store=tmp_path)
    stock = items[0].run
    assert items[0].arm == "stock" and stock.finetune is None and stock.model.num_experts == 64 and items[0].notebooks == NAMES
    assert len({item.run.hash for item in items}) == len(items)
    assert all(item.run.finetune is None or item.run.finetune.stock.hash == stock.hash for item in items)
    shared = [item.arm for item in items if item.notebooks == NAMES]
    assert shared == ["stock"] + ["baseline", "joint 0.1"] * 3
    arms = {item.arm for item in items}
    assert {"isolated 0.1", "joint 1", "half baseline", "half joint 1", "full baseline", "full joint 1", "pretraining joint 1"} <= arms
    monkeypatch.setenv("PREDMOE_STORE", str(tmp_path))   # in the repository's own they are trained
    assert cli.main(["plan", "--profile", "cpu", "--only", "10"]) == 0
    assert "LoRA of rank 16 on run " in capsys.readouterr().out


def parameters(name, **changes):
    return execute.check(paths.NOTEBOOKS / f"{name}.ipynb", changes)


def test_a_named_checkpoint_takes_the_place_of_the_stock_run():
    """The parameters of the published model: what would be run is known without a network."""
    for name in NAMES:
        (job,) = execute.plan("olmoe_1b_7b", [name[:2]])
        p = parameters(name, **job.params)
        pairs = studies.pairs_of(name, p)
        assert all(run.finetune.checkpoint == "allenai/OLMoE-1B-7B-0924" and run.finetune.stock is None for _, run in pairs)
        (stock,) = [run for arm, run in pairs if arm == "stock"]
        assert stock.finetune.trained == "none" and stock.train.steps == 1 and {arm for arm, _ in pairs} >= {"stock", "baseline", "joint 0.1"}
        assert pairs[-1][1].model.top_k == 8 and not pairs[-1][1].model.norm_topk_prob and pairs[-1][1].train.dtype == "bfloat16"


def test_the_text_of_fine_tunes_comes_in_an_order_of_each_seeds_own():
    pairs = studies.pairs_of("10_olmoe_lora", parameters("10_olmoe_lora", seeds=[0, 1]))
    orders = {(arm, run.train.seed): run.data.order_seed for arm, run in pairs}
    assert orders == {("stock", 0): 0, ("baseline", 0): 1000, ("joint 0.1", 0): 1000, ("baseline", 1): 1001, ("joint 0.1", 1): 1001, ("isolated 0.1", 0): 1000}


@pytest.mark.parametrize("changes, words", [
    ({"lambdas": [0.0]}, "has no weight above 0"), ({"parts": ["third"]}, "trained='third' is unknown; choose one of lora"), ({"rank": 0}, "rank=0 must be at least 1"),
    ({"stock": {"model": {"top_k": 99}, "train": {}}}, "top_k=99 must lie in"), ({"tier": "huge"}, "tier='huge' is unknown"),
])  # fmt: skip
def test_wrong_parameters_are_one_sentence(changes, words):
    with pytest.raises(ConfigError, match=words):
        studies.pairs_of("13_olmoe_dose", parameters("13_olmoe_dose", **changes))


def test_a_fine_tune_is_named_on_the_command_line_as_any_run():
    run = config.tier("cpu", seed=1, **cli.sections(["finetune.checkpoint=some/model", "finetune.trained=half"]))
    assert (run.finetune.checkpoint, run.finetune.trained, run.train.seed) == ("some/model", "half", 1)
    with pytest.raises(ConfigError, match="unknown parameter chekpoint for FinetuneConfig"):
        config.tier("cpu", **cli.sections(["finetune.chekpoint=some/model"]))


def test_the_price_is_told_against_the_stock_model_too():
    """The gate compares with a baseline fine-tune, which may have lost as much."""
    drift = [{"metric": "val_loss", "treatment": arm, "mean": mean, "ci95": ci95, "n": 3} for arm, mean, ci95 in (
        ("baseline", 0.05, [0.04, 0.06]), ("full joint 1", 0.06, [0.052, 0.068]), ("joint 1", -0.004, None))]
    assert boundary.say_price([*drift, {"metric": "kept", "treatment": "joint 1", "mean": -0.1, "ci95": None, "n": 1}], 4.0) == (
        "The validation loss, against the stock model's own: joint 1 (all weights) +1.50% [+1.30, +1.70]; joint 1 -0.10% (single seed). "
        "The gate (at most +0.5%) compares each with its own baseline, which drifts as well.")
