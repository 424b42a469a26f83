"""Which models each notebook needs, from its parameters alone: the notebooks measure them, `predmoe plan` counts them.

A study is a function of a notebook's parameters. It returns named groups of (arm, run) pairs, in the order in which they
are best trained; the same run in several groups or notebooks is trained once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from . import config, measurements

Pairs = list[tuple[str, config.RunConfig]]

BASELINE = {"lambda_pred": 0.0}
FINETUNE_ORDER = 1000   # added to a fine-tune's seed: the order of its text
AS_IT_STANDS = "the recipe as it stands"


def run_configs(arms: Mapping[str, Mapping], seeds: Sequence[int], *, tier: str, horizons: Sequence[int], changes: Mapping[str, Mapping],
                finetune: config.FinetuneConfig | None = None) -> Pairs:  # fmt: skip
    """(arm, run) pairs, seed by seed so that whole pairs are finished first.

    `arms`: name -> changes to the tier's objective; `changes`: section -> changed fields of the tier, for every arm; `finetune`: what each starts from.
    """
    if len(set(seeds)) != len(seeds):
        raise config.ConfigError(f"seeds={list(seeds)} must be distinct: a seed that is there twice would count as two")
    return [
        (arm, config.tier(tier, seed=seed, objective=dict(changes.get("objective", {})) | dict(objective),
                          predictor={"horizons": list(horizons)}, finetune=finetune, **{k: dict(v) for k, v in changes.items() if k != "objective"}))
        for seed in seeds for arm, objective in arms.items()
    ]  # fmt: skip


def posthoc_config(tier: str, changes: Mapping) -> config.PosthocConfig:
    """The tier's predictor fit with some fields changed; unknown fields and wrong types are refused."""
    if tier not in config.TIERS:
        raise config.ConfigError(f"tier={tier!r} is unknown; choose one of {', '.join(config.TIERS)}")
    return config.build(config.PosthocConfig, dataclasses.asdict(config.TIERS[tier].posthoc) | dict(changes))


def first_fit(parameters: Mapping) -> config.PosthocConfig:
    """A notebook's predictor fit, from its parameters tier, posthoc and, where it has one, ranking_loss. Raises ConfigError where the two name different losses."""
    changes = {name: parameters[name] for name in ("ranking_loss",) if name in parameters}
    for name, value in changes.items():
        if (other := parameters["posthoc"].get(name, value)) != value:
            raise config.ConfigError(f"posthoc: {name}={other!r} contradicts the parameter {name}={value!r}: set {name} alone, and leave it out of posthoc")
    return posthoc_config(parameters["tier"], dict(parameters["posthoc"]) | changes)


def second_fit(parameters: Mapping) -> config.PosthocConfig:
    """The same with the other loss of the ranking MLP: for the notebooks of REFITTED, which ask how far an effect hangs on it."""
    first = first_fit(parameters)
    (other,) = (name for name in measurements.RANKING_LOSSES if name != first.ranking_loss)
    return dataclasses.replace(first, ranking_loss=other)


def locality_config(tier: str, changes: Mapping) -> config.LocalityConfig:
    """The second measurement; its predictors are fitted as the post-hoc ones, `changes` included."""
    return config.LocalityConfig(fit=posthoc_config(tier, changes))


def downstream_config(p: Mapping) -> config.DownstreamConfig:
    """The third measurement of 12_downstream with every task that it asks for; `downstream_study.settle` leaves out what cannot be run."""
    return config.build(config.DownstreamConfig, {name: p[name] for name in ("tasks", "items", "cloze", "hub", "peer_items")})


def name_of(objective: Mapping) -> str:
    """An objective in a few words: target, gradient and final weight."""
    if missing := [name for name in ("target", "gradient", "lambda_pred") if name not in objective]:
        raise config.ConfigError(f"the objective {dict(objective)} lacks {', '.join(missing)}")
    return f"{objective['target']} target, {objective['gradient']} gradient, lambda {objective['lambda_pred']:g}"


def variations(explanations: Sequence[Mapping], joint: Mapping, seeds: Sequence[int], *, tier: str, horizons: Sequence[int],
               changes: Mapping[str, Mapping]) -> dict[str, Pairs]:  # fmt: skip
    """Baseline and joint under each variation of the recipe, a group each, the recipe as it stands first.

    An explanation has a `name`, changed fields by section, and `seeds`, how many of the seeds it takes (default: all). A
    change of `objective` touches the joint arm alone, any other section both arms, so that a pair is always like with like.
    """
    plans = {}
    for explanation in [{"name": AS_IT_STANDS}, *explanations]:
        change = dict(explanation)
        name = config.coerce("explanation: name", change.pop("name", None), str)
        count = config.coerce(f"{name}: seeds", change.pop("seeds", len(seeds)), int)
        arms = {"baseline": BASELINE, "joint": dict(joint) | dict(change.pop("objective", {}))}
        both = {section: dict(changes.get(section, {})) | dict(change.get(section, {})) for section in (changes | change)}
        plans[name] = run_configs(arms, seeds[:count], tier=tier, horizons=horizons, changes=both)
    return plans


def mechanism(p: Mapping) -> dict[str, Pairs]:
    """01_mechanism: baseline and joint."""
    arms = {"baseline": BASELINE, "joint": {"lambda_pred": p["lambda_pred"], "target": p["target"], "gradient": p["gradient"]}}
    return {"models": run_configs(arms, p["seeds"], **_shared(p))}


def horizons(p: Mapping) -> dict[str, Pairs]:
    """02_horizons: the candidates on the selection seeds; baseline, joint and alternative on the others."""
    if shared := sorted(set(p["seeds"]) & set(p["selection_seeds"])):
        raise config.ConfigError(f"seeds and selection_seeds share {', '.join(map(str, shared))}: the alternative must be chosen on seeds that the report does not use")
    if not p["seeds"]:
        raise config.ConfigError("seeds=[] names no seed: a report needs one at least")
    candidates = {"baseline": BASELINE} | {name_of(objective): objective for objective in p["selection_objectives"]}
    alternative = {"target": p["alternative_target"], "gradient": p["alternative_gradient"], "lambda_pred": p["alternative_lambda"]}
    arms = {"baseline": BASELINE, "joint": {"lambda_pred": p["lambda_pred"]}} | ({"alternative": alternative} if p["alternative_lambda"] else {})
    return {
        "selection": run_configs(candidates, p["selection_seeds"] if p["selection_objectives"] else [], **_shared(p)),
        "models": run_configs(arms, p["seeds"], **_shared(p)),
    }


def horizons_varied(p: Mapping) -> dict[str, Pairs]:
    """02_horizons: what explains the size of its effect."""
    return variations(p["explanations"], {"lambda_pred": p["lambda_pred"]}, p["seeds"], **_shared(p))


def dose(p: Mapping) -> dict[str, Pairs]:
    """03_dose: the baseline and every weight under every gradient mode; the modes after the first on fewer seeds."""
    groups = {"baseline": run_configs({"baseline": BASELINE}, p["seeds"], **_shared(p))}
    for gradient in p["gradients"]:
        arms = {f"{gradient} {weight:g}": {"lambda_pred": weight, "target": p["target"], "gradient": gradient} for weight in p["lambdas"] if weight}
        seeds = p["seeds"] if gradient == p["gradients"][0] else p["seeds"][: p["other_seeds"]]
        groups[gradient] = run_configs(arms, seeds, **_shared(p))
    return groups


def pair(p: Mapping) -> dict[str, Pairs]:
    """04_isolation, 06_seeds, 11_engine, 12_downstream: baseline and joint, on all seeds."""
    return {"models": run_configs({"baseline": BASELINE, "joint": {"lambda_pred": p["lambda_pred"]}}, p["seeds"], **_shared(p))}


def at_equal_tokens(size: Mapping, base: config.RunConfig) -> dict:
    """A size as an explanation for `variations`: training as long as that of `base` in tokens per active parameter, warm-up the same share of it.

    `size`: name, seeds, changed fields of the model and of training; what it says of training itself stands.
    """
    from .model import count_parameters   # not at the top: it loads torch

    model = config.build(config.ModelConfig, config.to_dict(base.model) | dict(size.get("model", {})))
    active = [count_parameters(shape)["active"] for shape in (model, base.model)]
    train = dict(size.get("train", {}))
    batches = [train.get("batch_size", base.train.batch_size) * model.context, base.train.batch_size * base.model.context]
    scale = active[0] / active[1] * batches[1] / batches[0]
    return dict(size) | {"train": {"steps": round(base.train.steps * scale), "warmup_steps": round(base.train.warmup_steps * scale)} | train}


def ranking_seeds(p: Mapping) -> dict[str, Pairs]:
    """14_ranking_seeds: baseline and joint on all seeds; then every other size and number of experts, each on its first `seeds` (0: left out)."""
    base = config.tier(p["tier"], train=dict(p["train"]), data=dict(p["data"]), predictor={"horizons": list(p["horizons"])})
    sizes = [at_equal_tokens(size, base) for size in [*p["sizes"], *p["experts"]] if size.get("seeds") != 0]
    return variations(sizes, {"lambda_pred": p["lambda_pred"]}, p["seeds"], **_shared(p))


def controls(p: Mapping) -> dict[str, Pairs]:
    """07_controls: baseline and joint, every sticky weight, one of them with the joint loss on top; and, where the order of the
    text varies with the initialisation, both again."""
    pair = {"baseline": BASELINE, "joint": {"lambda_pred": p["lambda_pred"]}}
    sticky = {f"sticky {weight:g}": {"lambda_sticky": weight} for weight in p["stickies"]}
    stacked = {f"sticky {p['stacked']:g} + joint": {"lambda_sticky": p["stacked"], "lambda_pred": p["lambda_pred"]}} if p["stacked_seeds"] else {}
    groups = {"models": run_configs(pair, p["seeds"], **_shared(p)), "order": []}
    for seed in p["order_seeds"]:
        both = _shared(p) | {"changes": {"train": p["train"], "data": dict(p["data"]) | {"order_seed": seed}}}
        groups["order"] += run_configs({f"{arm} (order)": objective for arm, objective in pair.items()}, [seed], **both)
    groups["sticky"] = run_configs(sticky, p["seeds"], **_shared(p))
    groups["stacked"] = run_configs(stacked, p["seeds"][: p["stacked_seeds"]], **_shared(p))
    return groups


def longer(p: Mapping) -> dict[str, Pairs]:
    """09_longer_training: baseline and joint as they stand and with `times` the steps; the ladder of entropy penalties."""
    pair = {"baseline": BASELINE, "joint": {"lambda_pred": p["lambda_pred"]}}
    if len(p["penalties"]) != len(p["penalty_seeds"]):
        raise config.ConfigError(f"penalty_seeds={p['penalty_seeds']} must have one number for each of penalties={p['penalties']}")
    steps = round(p["times"] * dict(p["train"]).get("steps", config.TIERS[p["tier"]].train.steps))
    long = _shared(p) | {"changes": {"train": dict(p["train"]) | {"steps": steps}, "data": p["data"]}}
    groups = {"models": run_configs(pair, p["seeds"], **_shared(p)), "entropy": []}
    for weight, count in zip(p["penalties"], p["penalty_seeds"]):
        groups["entropy"] += run_configs({f"entropy {weight:g}": {"lambda_ent": weight}}, p["seeds"][:count], **_shared(p))
    groups["longer"] = run_configs({f"{arm} {p['times']:g}x": objective for arm, objective in pair.items()}, p["seeds"][: p["long_seeds"]], **long)
    return groups


def stock_of(p: Mapping) -> config.RunConfig | None:
    """10_olmoe_lora, 13_olmoe_dose: the run whose model is fine-tuned; None where a checkpoint is named instead."""
    if p["checkpoint"]:
        return None
    return config.tier(p["tier"], data=dict(p["data"]), predictor={"horizons": list(p["horizons"])}, **{name: dict(changes) for name, changes in p["stock"].items()})


def finetunes(arms: Mapping[str, Mapping], seeds: Sequence[int], p: Mapping, **start) -> Pairs:
    """Fine-tunes of the stock model, seed by seed. `start`: fields of FinetuneConfig. The text comes in an order of the seed's own, which
    is not the stock model's: where all weights are trained nothing else depends on the seed."""
    begun = config.FinetuneConfig(stock=stock_of(p), checkpoint=p["checkpoint"], rank=p["rank"], alpha=p["alpha"], **start)
    found = []
    for seed in seeds:
        order = {"data": dict(p["data"]) | {"order_seed": FINETUNE_ORDER + seed}, "model": dict(p["stock"].get("model", {})), "train": p["train"]}
        found += run_configs(arms, [seed], tier=p["tier"], horizons=p["horizons"], changes=order, finetune=begun)
    return found


def stock_model(p: Mapping) -> Pairs:
    """The stock model to be measured: its own run, or what a checkpoint holds as a run that trains nothing."""
    stock = stock_of(p)
    if stock is not None:
        return [("stock", stock)]
    return finetunes({"stock": BASELINE}, p["seeds"][:1], p | {"train": dict(p["train"]) | {"steps": 1}}, trained="none")


def olmoe_lora(p: Mapping) -> dict[str, Pairs]:
    """10_olmoe_lora: the stock model; LoRA without and with the prediction loss; and with heads that are trained beside it in isolation."""
    joint, isolated = ({"lambda_pred": p["lambda_pred"], "gradient": gradient} for gradient in ("input", "none"))
    return {
        "stock": stock_model(p),
        "models": finetunes({"baseline": BASELINE, f"joint {p['lambda_pred']:g}": joint}, p["seeds"], p),
        "isolation": finetunes({f"isolated {p['lambda_pred']:g}": isolated}, p["seeds"][: p["isolation_seeds"]], p),
    }


def olmoe_dose(p: Mapping) -> dict[str, Pairs]:
    """13_olmoe_dose: the stock model; LoRA at every weight; other parts of the model, and training from nothing, at the last weight."""
    doses = {"baseline": BASELINE} | {f"joint {weight:g}": {"lambda_pred": weight} for weight in p["lambdas"] if weight}
    if len(doses) == 1:
        raise config.ConfigError(f"lambdas={p['lambdas']} has no weight above 0: there would be nothing to compare")
    last = list(doses)[-1]
    groups = {"stock": stock_model(p), "lora": finetunes(doses, p["seeds"], p)}
    for part in p["parts"]:
        groups[part] = finetunes({f"{part} {arm}": doses[arm] for arm in ("baseline", last)}, p["seeds"][: p["part_seeds"]], p, trained=part)
    scratch = {section: dict(changes) for section, changes in p["stock"].items()} | {"data": dict(p["data"])}
    seeds = p["seeds"][: 0 if p["checkpoint"] else p["pretraining_seeds"]]
    groups["pretraining"] = run_configs({f"pretraining {arm}": doses[arm] for arm in ("baseline", last)}, seeds, tier=p["tier"], horizons=p["horizons"], changes=scratch)
    return groups


def frontier(p: Mapping) -> dict[str, Pairs]:
    """15_frontier: the baseline and the joint model at every weight, and whatever else is listed as an entry."""
    doses = {f"joint {weight:g}": {"lambda_pred": weight} for weight in p["lambdas"] if weight}
    return {
        "joint": run_configs({"baseline": BASELINE} | doses, p["seeds"], **_shared(p)),
        "entries": [pair for entry in p["entries"] for pair in entry_configs(entry, p["seeds"], **_shared(p))],
    }


def entry_configs(entry: Mapping, seeds: Sequence[int], *, tier: str, horizons: Sequence[int], changes: Mapping[str, Mapping]) -> Pairs:
    """The runs of an entry: its `name`, `seeds` (how many of the seeds it takes, default all) and changed fields by section."""
    change = dict(entry)
    name = config.coerce("entry: name", change.pop("name", None), str)
    count = config.coerce(f"{name}: seeds", change.pop("seeds", len(seeds)), int)
    both = {section: dict(changes.get(section, {})) | dict(change.get(section, {})) for section in (dict(changes) | change)}
    both["predictor"] = {"horizons": list(horizons)} | both.get("predictor", {})
    return [(name, config.tier(tier, seed=seed, **both)) for seed in seeds[:count]]


def _shared(p: Mapping) -> dict:
    return {"tier": p["tier"], "horizons": p["horizons"], "changes": {"train": p["train"], "data": p["data"]}}


# Every notebook that trains, with the functions that say what it needs.
STUDIES: dict[str, tuple[Callable[[Mapping], dict[str, Pairs]], ...]] = {
    "01_mechanism": (mechanism,),
    "02_horizons": (horizons, horizons_varied),
    "03_dose": (dose,),
    "04_isolation": (pair,),
    "06_seeds": (pair,),
    "07_controls": (controls,),
    "09_longer_training": (longer,),
    "10_olmoe_lora": (olmoe_lora,),
    "11_engine": (pair,),
    "12_downstream": (pair,),
    "13_olmoe_dose": (olmoe_dose,),
    "14_ranking_seeds": (ranking_seeds,),
    "15_frontier": (frontier,),
}
# Notebooks that take another measurement of every run beside the post-hoc one.
FURTHER: dict[str, Callable[[Mapping], config.LocalityConfig | config.DownstreamConfig]] = {
    "07_controls": lambda p: locality_config(p["tier"], p["posthoc"]),
    "12_downstream": downstream_config,
    "15_frontier": lambda p: locality_config(p["tier"], p["posthoc"]),
}
REFITTED = ("06_seeds", "10_olmoe_lora")   # notebooks that measure every run by `second_fit` as well


def pairs_of(notebook: str, parameters: Mapping) -> Pairs:
    """All (arm, run) pairs that a notebook measures, in the order of its study."""
    return [pair for study in STUDIES[notebook] for group in study(parameters).values() for pair in group]
