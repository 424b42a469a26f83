"""What the paper says in numbers: every value, table and computed sentence of main.tex, by name, from the results of a profile.

A name is dotted: `claim.ranking-gain.verdict`, `say.effect`, `table.hits`, `findings.07_controls`. Words with a direction come from
`findings`, verdicts from `stats`, so that the text cannot say the opposite of its numbers. What has not been run says so in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from . import claims as deciding
from . import config, experiments, findings, results, stats
from .plots import PREDICTORS
from .tex import escape, listed, prose

EXPERIMENTS = {
    "01_mechanism": "mechanism", "02_horizons": "horizons", "03_dose": "dose", "04_isolation": "isolation", "05_cache_simulation": "simulator", "06_seeds": "seeds",
    "07_controls": "controls", "08_latency_sensitivity": "sensitivity", "09_longer_training": "longer training", "10_olmoe_lora": "fine-tune of a pretrained model", "11_engine": "engine",
    "12_downstream": "zero-shot quality", "13_olmoe_dose": "dose of the fine-tune", "14_ranking_seeds": "seeds and sizes", "15_frontier": "frontier",
}  # fmt: skip
# Findings that the paper says elsewhere or that speak of the notebook itself.
LEFT_OUT = r"post-hoc fits converged|^All \d+ .* fits|^Our accuracies are|^The public traces are|^Recorded traces|claims of the reference study are decided"
DETAILS = {   # name -> (experiment, the beginning of its finding): single sentences that have a place of their own
    "say.reproduction": ("05_cache_simulation", "With a Zipf exponent"), "say.waste": ("05_cache_simulation", "Waste by an ever-used set"),
    "say.ranked": ("05_cache_simulation", "The study's guesses"), "say.traces": ("05_cache_simulation", "On our models' traces"),
    "say.policies": ("05_cache_simulation", r"With \d+% of the experts in memory"),
    "say.fit": ("05_cache_simulation", "Fitted on"), "say.field-prefetch": ("05_cache_simulation", "Colibri's prefetch"),
    "say.prompt": ("08_latency_sensitivity", "From cold"), "say.best": ("08_latency_sensitivity", "With the best setting"),
    "say.map": ("08_latency_sensitivity", "Without the guard prefetching harms"), "say.map-guarded": ("08_latency_sensitivity", "With the guard prefetching harms in"),
    "say.term": ("01_mechanism", "At the end of training"), "say.chosen": ("02_horizons", r"(Of \d+|None of the|No) candidates?"), "say.documents": ("02_horizons", "Resampling"),
    "say.variations": ("02_horizons", "So at h"),
}  # fmt: skip
VERDICTS = {stats.REPLICATED: "replicated", stats.PARTLY: "partly replicated", stats.NOT_REPLICATED: "not replicated", stats.NOT_TESTED: "not tested"}


def values(found: Mapping[str, Mapping], decided: Sequence[Mapping]) -> dict[str, str]:
    """Every named value of the paper as LaTeX. `found`: results by experiment; `decided`: the claims with their verdicts (`claims.evaluate`).

    A name is there whether or not its experiment has been run, so that main.tex is checked against all of them. Raises ResultError where results that
    are there lack what the paper says of them.
    """
    made = _protocol(found) | _claims(decided) | _sentences(found, decided)
    for name in EXPERIMENTS:
        said = [text for text in found.get(name, {}).get("findings", []) if not re.search(LEFT_OUT, text)]
        made[f"findings.{name}"] = " ".join(map(prose, said)) if name in found else notrun(name)
    for key, (name, start) in DETAILS.items():
        if name not in found:
            made[key] = notrun(name)
            continue
        said = [text for text in found[name]["findings"] if re.match(start, text)]
        made[key] = " ".join(map(prose, said)) if said else rf"\notreported{{{name}}}"
    return made


def notrun(experiment: str) -> str:
    return rf"\notrun{{{experiment}}}"


def number(value: float, digits: int) -> str:
    """A level: fixed digits, no sign."""
    return f"{value:.{digits}f}"


def effect(e: Mapping, unit: str) -> str:
    """An effect with its interval, without the name of its unit: for a column that names it."""
    return prose(re.sub(r" (points|nats)|%", "", results.effect_text(e, unit)))


# --- what was fixed ----------------------------------------------------------------------------------------------------

def _protocol(found) -> dict[str, str]:
    horizons = found.get("02_horizons")
    asked = horizons["provenance"]["parameters"] if horizons else {}
    tier = config.TIERS[asked.get("tier", "cpu")]
    objective, fit = tier.objective, tier.posthoc
    tokens = tier.train.steps * tier.train.batch_size * tier.model.context
    ran, missing = [name for name in EXPERIMENTS if name in found], [name for name in EXPERIMENTS if name not in found]
    status = f"Of {len(EXPERIMENTS)} planned experiments {len(ran)} have been run; where the others will stand, the text says so." if missing else f"All {len(EXPERIMENTS)} planned experiments have been run."
    size = _size(tier)
    return {
        "status": prose(status), "gate.loss": f"{100 * stats.MAX_LOSS_INCREASE:g}\\%", "gate.entropy": f"{stats.MIN_LOAD_ENTROPY_RATIO:g}",
        "weight.balance": f"{objective.balance:g}", "weight.joint": f"{asked['lambda_pred']:g}" if asked else notrun("02_horizons"),
        "horizons": listed([str(h) for h in asked["horizons"]]) if asked else notrun("02_horizons"),
        "horizons.set": ", ".join(map(str, asked["horizons"])) if asked else r"\\dots", "seeds": str(len(asked["seeds"])) if asked else notrun("02_horizons"),
        "ramp.start": f"{100 * objective.ramp_start:g}\\%", "ramp.end": f"{100 * objective.ramp_end:g}\\%", "heads.lr": f"{tier.train.predictor_lr_scale:g}",
        "fit.every": str(fit.eval_every), "fit.divisor": "4", "fit.patience": str(fit.patience), "heldout.tokens": f"{tier.data.heldout_tokens:,}".replace(",", "\\,"),
        "factor": f"{stats.MAGNITUDE_FACTOR:g}", "least.seeds": str(stats.LEAST_SEEDS), "train.lr": f"{tier.train.lr:g}", "train.tokens": f"{tokens / 1e6:.3g} million",
        "model.total": f"{size['total'] / 1e6:.3g} million", "model.active": f"{size['active'] / 1e6:.3g} million", "model.layers": str(tier.model.num_layers),
        "model.experts": str(tier.model.num_experts), "model.k": str(tier.model.top_k), "model.chance": number(tier.model.top_k / tier.model.num_experts, 3),
    }  # fmt: skip


def _size(tier) -> dict[str, int]:
    from . import model   # imports torch, which takes seconds

    return model.count_parameters(tier.model)


# --- claims ------------------------------------------------------------------------------------------------------------

def _claims(decided) -> dict[str, str]:
    made = {}
    for claim in decided:
        name, run = f"claim.{claim['id']}", claim["effects"] or "has not been run" not in claim["why"]
        made |= {f"{name}.statement": prose(claim["statement"]), f"{name}.reference": prose(claim["reference"]), f"{name}.verdict": VERDICTS[claim["verdict"]],
                 f"{name}.measured": prose(claim["measured"]) if claim["effects"] else notrun(claim["notebook"]), f"{name}.why": _why(claim["why"]) if run else notrun(claim["notebook"]),
                 f"{name}.n": str(claim["n"]) if claim["effects"] else notrun(claim["notebook"])}  # fmt: skip
    return made


def _why(text: str) -> str:
    """A verdict's reason with, of the internal names of effects that follow it, only the horizons."""
    reason, _, names = text.partition(": ")
    at = dict.fromkeys(re.findall(r"h=\d+", names))
    return prose(reason + (f": {', '.join(at)}" if at else ""))


# --- sentences ---------------------------------------------------------------------------------------------------------

def _sentences(found, decided) -> dict[str, str]:
    counts = {word: sum(claim["verdict"] == word for claim in decided) for word in VERDICTS}
    told = ", ".join(f"{counts[word]} {'are' if i == 0 else ''} {VERDICTS[word]}".replace("  ", " ") for i, word in enumerate(VERDICTS) if counts[word])
    made = {"say.counts": prose(f"Of {len(decided)} claims of the study {told}."), "claims.count": str(len(decided))}
    made |= {f"count.{word.replace(' ', '-')}": str(n) for word, n in counts.items()}
    return made | _of_horizons(found) | _of_mechanism(found) | _of_simulator(found)


HORIZONS = ("effect", "corrected", "compared", "linear", "free", "lookup", "popular", "margin", "exact", "cost", "loss", "reuse", "alternative", "alternative-cost", "converged")


def _of_horizons(found) -> dict[str, str]:
    if "02_horizons" not in found:
        return {f"say.{name}": notrun("02_horizons") for name in HORIZONS}
    result = found["02_horizons"]
    arms, gates = result["arms"], {gate["arm"]: gate["sentence"] for gate in result["gates"]}

    def by(predictor, metric="hit", arm="joint", control="baseline"):
        return experiments.hit_effects(arms, arm, control, metric=metric, predictors=[predictor])

    main = by("ranking")
    known = {h: value for (predictor, h), value in experiments.reference_effects().items() if predictor == "ranking"}
    compared = [f"at h = {e['horizon']}, {findings.compare(e, known[e['horizon']])}" for e in main if e["horizon"] in known]
    loss, reuse = experiments.scalar_effects(arms, "joint", "baseline", {"val_loss": "nats/token", "reuse": "share of k"})
    own = any(row["arm"] == "alternative" for row in arms)
    said = {
        "effect": findings.say_confirmed(main, "Under the ranking MLP on both sides, joint training", "hit@k"), "corrected": findings.corrected(main),
        "compared": "; ".join(compared) + "." if compared else "No horizon is in common with the reference study.",
        "linear": findings.say_by_horizon(by("linear"), "Under a fresh linear predictor it", "hit@k"),
        "free": findings.say_by_horizon(by("next_router"), "For the next layer's router applied early, which costs nothing, it", "hit@k"),
        "lookup": findings.say_by_horizon(by("token_id"), "Joint training", "what a token-id lookup foretells"),
        "popular": findings.say_by_horizon(by("static"), "It", "what naming the most popular experts foretells"),
        "margin": findings.say_by_horizon(by("ranking", "margin_over_token_id"), "It", "the ranking MLP's margin over the lookup"),
        "exact": findings.say_by_horizon(by("ranking", "exact_set"), "It", "exact-set accuracy"),
        "cost": f"The joint arm {gates['joint']}.", "loss": findings.say(loss, "Joint training", "validation loss", "nats"),
        "reuse": findings.say(reuse, "Joint training", "the reuse of experts from one token to the next", "points"),
        "alternative": findings.say_by_horizon(by("ranking", arm="alternative", control="joint"), "Against the study's objective, the best alternative, chosen on other seeds,", "hit@k")
        if own else "This profile reports no alternative objective.",
        "alternative-cost": f"It {gates['alternative']}." if own else "",
        "converged": next((text for text in result["findings"] if "post-hoc fits" in text), ""),
    }  # fmt: skip
    return {f"say.{name}": prose(said[name]) for name in HORIZONS}


def _of_mechanism(found) -> dict[str, str]:
    if "01_mechanism" not in found:
        return {"say.mechanism": notrun("01_mechanism")}
    (first, *_) = experiments.hit_effects(found["01_mechanism"]["arms"], "joint", "baseline", predictors=["linear"], horizons=[1])
    return {"say.mechanism": prose(findings.say(first, "Under a fresh linear predictor one layer ahead, joint training", "hit@k", "points"))}


def relative(result: Mapping, arm: str, minus: str, metric: str, prefix: str = "") -> dict:
    """`arm` against `minus` as a share of it, paired by seed, from the arms of a simulation's results."""
    sides = [results.values_by_seed(result["arms"], prefix + name, metric) for name in (arm, minus)]
    return stats.paired(*sides, relative=True, name=f"{arm} - {minus}", unit="percent").as_dict()


def _of_simulator(found) -> dict[str, str]:
    worth, waiting = "05_cache_simulation", "08_latency_sensitivity"
    made = {}
    asked = (("worth", worth, "joint-linear", "baseline-linear", "tok_s", "With our linear predictors' accuracies, joint training", "simulated tokens per second"),
             ("worth-ranking", worth, "joint-ranking", "baseline-ranking", "tok_s", "With our ranking predictors' accuracies, it", "simulated tokens per second"),
             ("spared", worth, "joint-linear", "baseline-linear", "wasted_mb", "With linear predictors, it", "wasted bytes"),
             ("any", worth, "baseline-ranking", "demand", "tok_s", "For an ordinary model, prefetching what a ranking predictor foretells", "simulated tokens per second"),
             ("over-free", worth, "joint-ranking", "next-router", "tok_s", "Against the next layer's router, which is free, the joint model's ranking predictor", "simulated tokens per second"),
             ("oracle", worth, "oracle", "demand", "tok_s", "An oracle", "simulated tokens per second"),
             ("ttft", waiting, "baseline-linear", "demand", "ttft_ms", "Prefetching (linear predictor)", "the cold time to first token"),
             ("ttft-joint", waiting, "joint-linear", "baseline-linear", "ttft_ms", "Beyond that the joint model", "the cold time to first token"))  # fmt: skip
    for name, experiment, arm, minus, metric, subject, quantity in asked:
        ran = experiment in found
        made[f"say.{name}"] = prose(findings.say(relative(found[experiment], arm, minus, metric), subject, quantity, "percent")) if ran else notrun(experiment)
    return made


def decide(found: Mapping[str, Mapping], specs: Iterable[Mapping]) -> list[dict]:
    """The claims with their verdicts, from the results themselves: a claims.json that is behind them is not read."""
    return [deciding.evaluate(spec, found) for spec in specs]


__all__ = ["EXPERIMENTS", "PREDICTORS", "decide", "effect", "escape", "notrun", "number", "relative", "values"]
