"""What the paper says in numbers: every value, table and computed sentence of main.tex, by name, from the results of a profile.

A name is dotted: `claim.ranking-gain.verdict`, `say.effect`, `table.hits`, `findings.07_controls`. Words with a direction come from
`findings`, verdicts from `stats`, so that the text cannot say the opposite of its numbers. What has not been run says so in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from . import claims as deciding
from . import config, experiments, findings, results, spread, stats
from .plots_simulator import ARMS
from .tex import listed, prose

EXPERIMENTS = {   # name -> what it is about, in the words in which the abstract lists what has not been run
    "01_mechanism": "the mechanism", "02_horizons": "the horizons", "03_dose": "the dose", "04_isolation": "isolation of the backbone", "05_cache_simulation": "the simulator", "06_seeds": "more seeds",
    "07_controls": "sticky losses and measured locality", "08_latency_sensitivity": "latency and disks", "09_longer_training": "longer training and sharper routers",
    "10_olmoe_lora": "a pretrained model's fine-tune", "11_engine": "the engine", "12_downstream": "zero-shot tasks", "13_olmoe_dose": "the dose of that fine-tune",
    "14_ranking_seeds": "further seeds and sizes", "15_frontier": "early and hash routers",
}  # fmt: skip
# Findings that the paper says elsewhere or that speak of the notebook itself.
LEFT_OUT = r"post-hoc fits converged|^All \d+ .* fits|^Our accuracies are|^The public traces are|^Recorded traces|claims of the reference study are decided"
AGAIN = r"^Under the ranking MLP|^Corrected for|^The joint arm|^Joint training [^:]*(validation loss|margin)|^It [^:]*exact-set"   # said of the primary experiment
BESIDE = {   # experiment -> findings that stand in a table of the paper (`paper_studies`), are said elsewhere, or have no room in it
    "04_isolation": r"^Linear, |^Ranking MLP, gain|^On the joint backbone|^At h = \d+ the joint model's own head|^Under a fresh ranking MLP", "06_seeds": AGAIN + r"|^To find|^Standard deviations|^Pairing by seed",
    "07_controls": r"^Of the baseline model's|^Against the baseline, (joint|sticky [\d.]+ is)", "09_longer_training": r"^As it stands, joint training [^.]*hit@k|^With [\d.]+ times the tokens it [^.]*hit@k|^At h = \d+ sharper routers",
    "10_olmoe_lora": r"^Under a fresh linear|^In the arm|^Against the stock", "12_downstream": r"^Every task|normalised accuracy|^Joint training moves the accuracy|^The accuracy",
    "13_olmoe_dose": r"^The ranking MLP is|^LoRA at weight|^Joint against baseline under the linear predictor|^Of what|^Against the stock", "14_ranking_seeds": AGAIN, "15_frontier": r"^On S[RC]",
}  # fmt: skip
RUNNING = ("12_downstream",)   # whose findings are running text however many they are
REWORDED = (   # what a sentence says beside a table or another sentence of the paper, and what is left of it here
    (r"so their hit@k is a lower bound: .*", "so their hit@k is a lower bound."), (r", by what is trained: .*? From the least to the most, ", ", from the least that is trained to the most: "),
    (r" \([\d.]+%, chance [\d.]+%\)", ""), (r"(the baseline model .*): a model of this size knows little, and near chance an accuracy says nothing\.$", r"\1."),
    (r"^So at", "Across the variations of the recipe, at"), (r"(With the guard prefetching harms in \d+ of \d+ cells) of the map, which has .*?, bad ones too \(gains", r"\1 (gains"),
)  # fmt: skip
SOURCES = {name: words for name, words in ARMS.items() if name in ("demand", "next_router", "ranking", "far_ranking", "far_oracle")}   # the engine's own names for what it prefetches by
DETAILS = {   # name -> (experiment, the beginning of its finding): single sentences that have a place of their own
    "say.reproduction": ("05_cache_simulation", "With a Zipf exponent"), "say.waste": ("05_cache_simulation", "Waste by an ever-used set"),
    "say.ranked": ("05_cache_simulation", "The study's guesses"), "say.traces": ("05_cache_simulation", "On our models' traces"),
    "say.policies": ("05_cache_simulation", r"With \d+% of the experts in memory"),
    "say.fit": ("05_cache_simulation", "Fitted on"), "say.field-prefetch": ("05_cache_simulation", "Colibri's prefetch"),
    "say.prompt": ("08_latency_sensitivity", "From cold"), "say.best": ("08_latency_sensitivity", "With the best setting"),
    "say.map": ("08_latency_sensitivity", "Without the guard prefetching harms"), "say.map-guarded": ("08_latency_sensitivity", "With the guard prefetching harms in"),
    "say.term": ("01_mechanism", "At the end of training"), "say.chosen": ("02_horizons", r"(?:Of \d+|None of the \d+|No) candidates?"), "say.documents": ("02_horizons", "Resampling"),
    "say.stated": ("05_cache_simulation", "Of Colibri's machines .*?(Whatever the cache.*)"), "say.own-text": ("05_cache_simulation", r"A model's own continuations .*?\. (\w[^.:]*(?:excludes? zero)[^;]*)$"), "say.exact": ("11_engine", "Greedy tokens"), "say.peers": ("11_engine", "The engine with"),
    "say.machine": ("11_engine", "The disk:|What reads cost|Computing alone"), "say.reads": ("11_engine", "Reads were"), "say.foretold": ("11_engine", "Simulated against|Without prefetch the simulator|Bytes are off"),
    "say.bound": ("11_engine", "Time per token over"), "say.measured": ("11_engine", "Measured on"), "say.tuned": ("10_olmoe_lora", "Under a fresh ranking MLP"),
    "say.variations": ("02_horizons", "So at h"), "say.placebo": ("02_horizons", r"Placebo \([^)]*\): its loss"),
}  # fmt: skip
NONE = "--"   # in a column of numbers
LACKING = (LookupError, AttributeError, StopIteration, TypeError, ValueError)   # what arises where results or a table lack what is made of them
VERDICTS = {stats.REPLICATED: "replicated", stats.PARTLY: "partly replicated", stats.NOT_REPLICATED: "not replicated", stats.NOT_TESTED: "not tested"}


def values(found: Mapping[str, Mapping], decided: Sequence[Mapping]) -> dict[str, str]:
    """Every named value of the paper as LaTeX. `found`: results by experiment; `decided`: the claims with their verdicts (`claims.evaluate`).

    A name is there whether or not its experiment has been run, so that main.tex is checked against all of them. Raises ResultError where results that
    are there lack what the paper says of them.
    """
    made = _protocol(found) | _claims(decided) | _sentences(found, decided)
    for name in EXPERIMENTS:
        said = [text for text in found.get(name, {}).get("findings", []) if not re.search(LEFT_OUT, text) and not re.search(BESIDE.get(name, "^$"), text)]
        made[f"findings.{name}"] = _told(name, said) if name in found else notrun(name)
    for key, (name, start) in DETAILS.items():
        if name not in found:
            made[key] = notrun(name)
            continue
        matches = [match for text in found[name]["findings"] if (match := re.match(start, text))]
        said = [match[1] if match.re.groups else match.string for match in matches]   # of a beginning with a group only what the group holds
        made[key] = " ".join(_worded(name, text) for text in said) if said else rf"\notreported{{{name}}}"
    return made


def _told(name: str, sentences: Sequence[str]) -> str:
    """An experiment's findings as running text, or, where there are more than three, as a list."""
    told = [_worded(name, text) for text in sentences]
    if len(told) <= 3 or name in RUNNING:
        return " ".join(told)
    return "\n".join([r"\begin{findinglist}", *(rf"\item {text}" for text in told), r"\end{findinglist}"])


def _worded(name: str, text: str) -> str:
    """A finding as LaTeX, without what the paper says beside it."""
    for pattern, words in REWORDED:
        text = re.sub(pattern, words, text)
    if name == "11_engine":
        text = re.sub(rf"\b({'|'.join(SOURCES)})\b(?! MLP)", lambda match: SOURCES[match[1]], text)
    return prose(text)


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
    main = experiments.primary(found)
    asked = found[main]["provenance"]["parameters"] if main else {}
    tier = config.TIERS[asked.get("tier", "cpu")]
    objective, fit = tier.objective, tier.posthoc
    tokens = _tokens(tier)
    ran, missing = [name for name in EXPERIMENTS if name in found], [name for name in EXPERIMENTS if name not in found]
    status = f"Of {len(EXPERIMENTS)} planned experiments {len(ran)} have been run; not yet: {', '.join(EXPERIMENTS[name] for name in missing)}." if missing else f"All {len(EXPERIMENTS)} planned experiments have been run."
    size = _size(tier)
    return {
        "tuned.model": _tuned(found),
        "status": prose(status), "gate.loss": f"{100 * stats.MAX_LOSS_INCREASE:g}\\%", "gate.entropy": f"{stats.MIN_LOAD_ENTROPY_RATIO:g}",
        "weight.balance": f"{objective.balance:g}", "weight.joint": f"{asked.get('lambda_pred', 0.3):g}" if asked else notrun("02_horizons"),
        "horizons": listed([str(h) for h in asked["horizons"]]) if asked else notrun("02_horizons"),
        "horizons.set": ", ".join(map(str, asked["horizons"])) if asked else r"\dots", "seeds": counted(len(asked["seeds"])) if asked else notrun("02_horizons"),
        "ramp.start": f"{100 * objective.ramp_start:g}\\%", "ramp.end": f"{100 * objective.ramp_end:g}\\%", "heads.lr": f"{tier.train.predictor_lr_scale:g}",
        "fit.every": str(fit.eval_every), "fit.divisor": "4", "fit.patience": str(fit.patience), "heldout.tokens": f"{tier.data.heldout_tokens:,}".replace(",", "\\,"),
        "level.interval": f"{100 * (1 - stats.SIGNIFICANCE):g}\\%", "level.test": f"{stats.SIGNIFICANCE:g}", "level.power": f"{100 * spread.POWER:g}\\%",
        "scale.parameters": f"{size['total'] / results.reference()['tiers']['A']['total']:.2g}", "scale.tokens": f"{tokens / _tokens(config.TIERS['a']):.2g}",
        "factor": f"{stats.MAGNITUDE_FACTOR:g}", "least.seeds": str(stats.LEAST_SEEDS), "train.lr": f"{tier.train.lr:g}", "train.tokens": f"{tokens / 1e6:.3g} million",
        "model.total": f"{size['total'] / 1e6:.3g} million", "model.active": f"{size['active'] / 1e6:.3g} million", "model.layers": str(tier.model.num_layers),
        "model.width": str(tier.model.hidden_size), "model.heads": str(tier.model.num_heads), "model.vocab": f"{tier.model.vocab_size:,}".replace(",", "\\,"), "model.context": str(tier.model.context),
        "train.batch": str(tier.train.batch_size), "train.steps": str(tier.train.steps), "train.warmup": str(tier.train.warmup_steps), "train.decay": f"{tier.train.weight_decay:g}",
        "model.experts": str(tier.model.num_experts), "model.k": str(tier.model.top_k), "model.chance": number(tier.model.top_k / tier.model.num_experts, 3),
    }  # fmt: skip


def counted(seeds: int) -> str:
    return f"{seeds} seed{'' if seeds == 1 else 's'}"


def _tokens(tier) -> int:
    return tier.train.steps * tier.train.batch_size * tier.model.context


def _tuned(found) -> str:
    """Which model the fine-tunes started from, so that none is taken for a published one."""
    if "10_olmoe_lora" not in found:
        return notrun("10_olmoe_lora")
    asked = found["10_olmoe_lora"]["provenance"]["parameters"]
    return prose(str(asked["checkpoint"])) if asked.get("checkpoint") else "a model that was trained here for it, not a published one"


def _size(tier) -> dict[str, int]:
    from . import model   # imports torch, which takes seconds

    return model.count_parameters(tier.model)


# --- claims ------------------------------------------------------------------------------------------------------------

def _claims(decided) -> dict[str, str]:
    made = {}
    for claim in decided:
        name, run = f"claim.{claim['id']}", claim["effects"] or "has not been run" not in claim["why"]
        made |= {f"{name}.statement": prose(claim["statement"]), f"{name}.reference": prose(claim["reference"]), f"{name}.verdict": VERDICTS[claim["verdict"]],
                 f"{name}.measured": prose(claim["measured"]) if claim["effects"] else notrun(claim["notebook"]), f"{name}.why": reason(claim) if run else notrun(claim["notebook"]),
                 f"{name}.n": str(claim["n"]) if claim["effects"] else notrun(claim["notebook"])}  # fmt: skip
    return made


def reason(claim: Mapping) -> str:
    """Why a claim has its verdict; of one with several parts, each part's own verdict."""
    parts = claim.get("parts", [])
    if not parts:
        return prose(deciding.plain_reason(claim["why"]))
    return prose(f"{stats.count_parts([part['verdict'] for part in parts])}: " + "; ".join(f"{deciding.part_name(part)}, {VERDICTS[part['verdict']]}" for part in parts))


# --- sentences ---------------------------------------------------------------------------------------------------------

def _sentences(found, decided) -> dict[str, str]:
    counts = {word: sum(claim["verdict"] == word for claim in decided) for word in VERDICTS}
    told = ", ".join(f"{counts[word]} {'are' if i == 0 else ''} {VERDICTS[word]}".replace("  ", " ") for i, word in enumerate(VERDICTS) if counts[word])
    made = {"say.counts": prose(f"Of {len(decided)} claims of the study {told}."), "claims.count": str(len(decided))}
    made |= {f"count.{word.replace(' ', '-')}": str(n) for word, n in counts.items()}
    return made | _of_horizons(found) | _of_simulator(found) | {"say.dose-both": _of_dose(found)}


def _of_dose(found) -> str:
    """What the gradient through the target router does to the margin over a token-id lookup and to the routers' entropy, over all weights and horizons."""
    if "03_dose" not in found:
        return notrun("03_dose")
    table = experiments.doses(found["03_dose"]["arms"], experiments.PRIMARY)
    part = table[table.arm == "both"]
    if part.empty:
        return r"\notreported{03_dose}"
    means = part.groupby(["dose", "horizon"])[["margin", "entropy"]].mean() * 100
    ends = [f"{means[name].max():+z.1f} to {means[name].min():+z.1f}" for name in ("margin", "entropy")]
    seeds = part.seed.nunique()
    return prose(f"With the gradient through the target router the margin over the token-id lookup changes by {ends[0]} points, over weights and horizons, "
                 f"and router entropy by {ends[1]}% of its maximum ({counted(seeds)}).")


MAIN = ("effect", "corrected", "smaller", "compared", "linear", "free", "lookup", "margin", "cost", "loss", "reuse", "converged")
OTHER = ("alternative", "alternative-cost")


def _of_horizons(found) -> dict[str, str]:
    """Joint against baseline, of the primary experiment; the alternative objective, of 02_horizons, which alone has it."""
    made = {f"say.{name}": notrun("02_horizons") for name in MAIN + OTHER}
    if (main := experiments.primary(found)) is None:
        return made
    result = found[main]
    arms, gates = result["arms"], {gate["arm"]: gate["sentence"] for gate in experiments.gates(result["arms"])}

    def by(predictor, metric="hit"):
        return experiments.hit_effects(arms, "joint", "baseline", metric=metric, predictors=[predictor])

    confirmatory = by("ranking")
    known = {h: value for (predictor, h), value in experiments.reference_effects().items() if predictor == "ranking"}
    compared = [f"at h = {e['horizon']}, {findings.compare(e, known[e['horizon']])}" for e in confirmatory if e["horizon"] in known]
    smaller = ""
    if main != "02_horizons" and "02_horizons" in found:
        fewer = experiments.hit_effects(found["02_horizons"]["arms"], "joint", "baseline", predictors=["ranking"])
        told, moved = findings.corrected(fewer), " / ".join(f"{100 * e['mean']:+z.1f}" for e in fewer)
        smaller = f"Over the {counted(fewer[0]['n'])} of 02_horizons, the smaller comparison that these extend, it is {moved} points; {told[0].lower()}{told[1:]} Where the two differ, what is established hangs on the further seeds."
    loss, reuse = experiments.scalar_effects(arms, "joint", "baseline", {"val_loss": "nats/token", "reuse": "share of k"})
    said = {
        "effect": findings.say_confirmed(confirmatory, "Under the ranking MLP on both sides, joint training", "hit@k"), "corrected": findings.corrected(confirmatory), "smaller": smaller,
        "compared": "; ".join(compared) + "." if compared else "No horizon is in common with the reference study.",
        "linear": findings.say_by_horizon(by("linear"), "Under a fresh linear predictor it", "hit@k"),
        "free": findings.say_by_horizon(by("next_router"), "For the next layer's router applied early, which costs nothing, it", "hit@k"),
        "lookup": findings.say_by_horizon(by("token_id"), "Joint training", "what a token-id lookup foretells"),
        "margin": findings.say_by_horizon(by("ranking", "margin_over_token_id"), "It", "the ranking MLP's margin over the lookup"),
        "cost": f"The joint arm {gates['joint']}.", "loss": findings.say(loss, "Joint training", "validation loss", "nats"),
        "reuse": findings.say(reuse, "Joint training", "the reuse of experts from one token to the next", "points"),
        "converged": next((text for text in result["findings"] if "post-hoc fits" in text), ""),
    }  # fmt: skip
    if "02_horizons" in found:
        said |= _alternative(found["02_horizons"])
    return made | {f"say.{name}": prose(text) for name, text in said.items()}


def _alternative(result) -> dict[str, str]:
    if not any(row["arm"] == "alternative" for row in result["arms"]):
        return {"alternative": "This profile reports no alternative objective.", "alternative-cost": ""}
    against = experiments.hit_effects(result["arms"], "alternative", "joint", predictors=["ranking"])
    gate = next(gate["sentence"] for gate in experiments.gates(result["arms"]) if gate["arm"] == "alternative")
    return {"alternative": findings.say_by_horizon(against, "Against the study's objective, the best alternative, chosen on other seeds,", "hit@k"), "alternative-cost": f"It {gate}."}


def _of_simulator(found) -> dict[str, str]:
    worth, waiting = "05_cache_simulation", "08_latency_sensitivity"
    made = {}
    asked = (("worth", worth, "joint-linear", "baseline-linear", "tok_s", "With our linear predictors' accuracies, joint training", "simulated tokens per second"),
             ("worth-ranking", worth, "joint-ranking", "baseline-ranking", "tok_s", "With our ranking predictors' accuracies, it", "simulated tokens per second"),
             ("worth-same", worth, "joint-ranking", "baseline-ranking", "tok_s", "With that predictor on both models, joint training", "simulated tokens per second"),
             ("spared", worth, "joint-linear", "baseline-linear", "wasted_mb", "With linear predictors, it", "wasted bytes"),
             ("any", worth, "baseline-ranking", "demand", "tok_s", "Against no prefetch, an ordinary model's ranking predictor", "simulated tokens per second"),
             ("over-free", worth, "joint-ranking", "next-router", "tok_s", "Against prefetching with the next layer's router, which is free, the joint model's ranking predictor", "simulated tokens per second"),
             ("oracle", worth, "oracle", "demand", "tok_s", "Against no prefetch, an oracle", "simulated tokens per second"),
             ("ttft", waiting, "baseline-linear", "demand", "ttft_ms", "Against no prefetch, an ordinary model's linear predictor", "the cold time to first token"),
             ("ttft-joint", waiting, "joint-linear", "baseline-linear", "ttft_ms", "Against that, the joint model's linear predictor", "the cold time to first token"))  # fmt: skip
    for name, experiment, arm, minus, metric, subject, quantity in asked:
        ran = experiment in found
        made[f"say.{name}"] = prose(findings.say(experiments.relative_effect(found[experiment]["arms"], arm, minus, metric), subject, quantity, "percent")) if ran else notrun(experiment)
    return made | {"say.price": prose(_price(found[worth]["arms"])) if worth in found else notrun(worth)}


def _price(arms) -> str:
    """The abstract's sentence: what joint training changes in the simulator with both kinds of predictors, and what prefetching is worth without it."""
    def by(arm, minus):
        return results.effect_text(experiments.relative_effect(arms, arm, minus, "tok_s"), "percent")

    seeds = len({row["seed"] for row in arms if row["arm"] == "joint-ranking"})
    return (f"In the simulator, mended, joint training changes tokens per second by {by('joint-ranking', 'baseline-ranking')} with the ranking and by {by('joint-linear', 'baseline-linear')} with the "
            f"linear predictor; prefetching itself, without joint training, by {by('baseline-ranking', 'demand')}{f' ({seeds} seeds)' if seeds > 1 else ''}.")


def decide(found: Mapping[str, Mapping], specs: Iterable[Mapping]) -> list[dict]:
    """The claims with their verdicts, from the results themselves: a claims.json that is behind them is not read."""
    return [deciding.evaluate(spec, found) for spec in specs]
