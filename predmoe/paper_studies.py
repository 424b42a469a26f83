"""Tables of the paper in place of findings that are many and alike: a seed, a horizon, a task each. And the sentences that say their result.

Every table is a whole tabular, since how many columns it has (horizons, seeds) follows the data. Intervals are over seeds; an effect without one is of a single seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from . import boundary, downstream_study, experiments, findings, isolation, refit, results, spread
from .config import ConfigError
from .paper_text import LACKING, NONE, effect, notrun, number
from .plots import PREDICTORS
from .plots_simulator import ARMS
from .tex import escape, prose, rows

Table = Callable[[str], pd.DataFrame]   # reads a table of the experiment by its name


def values(profile: str, found: Mapping[str, Mapping]) -> dict[str, str]:
    """`table.NAME` and `say.NAME` of what stands here, as LaTeX; of an experiment that has not been run, that it has not.

    Raises ConfigError where results or a table lack what they are made of.
    """
    made = {}
    for key, (name, make) in MADE.items():
        try:
            made[key] = make(found[name], lambda table, name=name: results.load_table(profile, name, table)) if name in found else notrun(name)
        except ConfigError:
            raise
        except LACKING as error:
            raise ConfigError(f"the results of {name} do not make the paper's {key} ({error!r}): run the notebook again") from error
    return made


def cell(e: Mapping | None, unit: str = "points") -> str:
    """An effect in a column that names its unit: the mean with its interval, of a single seed the mean alone."""
    return NONE if e is None else effect(e, unit).replace(" (single seed)", "")


def tabular(columns: str, head: Sequence[str], lines: Iterable[Sequence[str] | str], above: str = "") -> str:
    """A tabular with the three rules of booktabs; `above`: a line over the heads, with its own rules."""
    begin, heads = rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", " & ".join(head) + r" \\"
    return "\n".join([begin, r"\toprule", *([above] if above else []), heads, r"\midrule", rows(lines), r"\bottomrule", r"\end{tabular}"])


Line = tuple[str, Mapping[int, Mapping], Mapping[int, float]]   # what is compared, our effect by horizon, the reference study's


def by_horizon(what: str, groups: Iterable[Sequence[Line]]) -> str:
    """Effects in points, a line each, a column per horizon; where one of them is known of the reference study, its own in columns of their own. Groups are set apart."""
    groups = [group for group in groups if group]
    horizons = sorted({h for group in groups for _, ours, _ in group for h in ours})
    known = any(theirs for group in groups for _, _, theirs in group)
    n, at = len(horizons), [f"${h}$" for h in horizons]
    above, rules = rf" & \multicolumn{{{n}}}{{c}}{{here, $h=$}}", rf" \\ \cmidrule(lr){{2-{n + 1}}}"
    if known:
        above, rules = above + rf" & \multicolumn{{{n}}}{{c}}{{the study's, $h=$}}", rules + rf"\cmidrule(l){{{n + 2}-{2 * n + 1}}}"
    lines: list[Sequence[str] | str] = []
    for group in groups:
        lines += [r"\addlinespace[2pt]"] if lines else []
        for name, ours, theirs in group:
            published = [prose(f"{100 * theirs[h]:+z.1f}") if h in theirs else NONE for h in horizons] if known else []
            lines.append([(r"\quad " if name != name.lstrip() else "") + prose(name.strip()), *(cell(ours.get(h)) for h in horizons), *published])
    return tabular("l" + "c" * n + "r" * (n if known else 0), [what, *at, *(at if known else [])], lines, above + rules)


def _by_h(effects: Iterable[Mapping]) -> dict[int, Mapping]:
    """Effects by horizon. Raises ResultError where one horizon has two: then a line would not say which it shows."""
    found: dict[int, Mapping] = {}
    for e in effects:
        if e["horizon"] in found:
            raise results.ResultError(f"two effects stand for one line of a table at h = {e['horizon']}: {found[e['horizon']]['name']} and {e['name']}")
        found[e["horizon"]] = e
    return found


# --- 04, 06: the backbone's part, and how many seeds ------------------------------------------------------------------------

def backbone(result: Mapping, table: Table) -> str:
    """What of the co-trained head's lead is the backbone's and what co-adaptation; the gain by half of the layers and by two domains."""
    known, held = isolation.reference_contrasts(), [e for e in result["effects"] if e.get("metric") == "hit" and e["family"] != "within one seed"]

    def line(name: str, contrast: str) -> Line:
        return name, _by_h(e for e in held if e["predictor"] == contrast), {h: value for (which, h), value in known.items() if which == contrast}

    parts: dict[str, dict[int, Mapping]] = {}
    for e in held:
        if e["treatment"] != e["control"] and e["predictor"] in (PREDICTORS["ranking"], PREDICTORS["linear"]):
            parts.setdefault(f"{e['treatment']} − {e['control']}, {e['predictor']}", {})[e["horizon"]] = e
    return by_horizon("difference in hit@$k$ (points)", [
        [line("co-trained head − fresh linear on the baseline", isolation.WHOLE), line("   of it, the backbone's", isolation.BACKBONE),
         line("   of it, co-adaptation of the head", isolation.COADAPTATION)],
        [line("ranking MLP − linear, both on the joint model", isolation.MLP_JOINT)],
        [(f"gain: {name}", ours, {}) for name, ours in parts.items()],
    ])  # fmt: skip


def seeds(result: Mapping, table: Table) -> str:
    """How far seeds differ under the primary predictor, what pairing leaves of the variance, and how many seeds an effect of a given size takes."""
    spreads, pairing, needs = (table(name) for name in ("spreads", "pairing", "needs"))
    std = spreads[spreads.predictor == experiments.PRIMARY].set_index(["arm", "horizon"])["std"]
    left = pairing[pairing.predictor == experiments.PRIMARY].set_index("horizon").variance_left
    sizes, count = sorted(needs.effect.unique()), lambda n: "$>$1000" if pd.isna(n) else f"{n:.0f}"
    lines = []
    for h in sorted(left.index):
        mine = needs[needs.horizon == h].set_index("effect")
        lines.append([f"${h}$", *(number(100 * std[arm, h], 2) for arm in ("baseline", "joint", spread.DIFFERENCE)), f"{100 * left[h]:.0f}",
                      *(f"{count(mine.paired[size])} ({count(mine.unpaired[size])})" for size in sizes)])  # fmt: skip
    above = (rf" & \multicolumn{{3}}{{c}}{{standard deviation (points)}} & variance & \multicolumn{{{len(sizes)}}}{{c}}{{seeds to find an effect of}}"
             rf" \\ \cmidrule(lr){{2-4}}\cmidrule(l){{6-{5 + len(sizes)}}}")
    named = [prose(f"{100 * size:g} point{'' if size == 0.01 else 's'}") for size in sizes]
    return tabular("l" + "r" * (4 + len(sizes)), ["$h$", "baseline", "joint", "difference", r"left (\%)", *named], lines, above)


def longer(result: Mapping, table: Table) -> str:
    """The gain by length of training under each fresh predictor, by how much it grows, and what of it sharper routers alone would give."""
    held = [e for e in result["effects"] if e["control"] != "baseline" or e["treatment"] in ("joint", "sharpened")]
    words = {"sharpness": "of the gain, sharper routers alone", "structure": "of the gain, the rest (structure)"}
    groups: dict[str, dict[str, dict[int, Mapping]]] = {"length": {}, "part": {}}
    for e in held:
        if e.get("horizon") is None:
            continue
        name = words[e["part"]] if e.get("part") else f"longer − shorter training, {PREDICTORS[e['predictor']]}" if e["metric"] == "gain" else f"gain {e['variation']}, {PREDICTORS[e['predictor']]}"
        groups["part" if e.get("part") else "length"].setdefault(name, {})[e["horizon"]] = e
    return by_horizon("hit@$k$ (points)", [[(name, ours, {}) for name, ours in group.items()] for group in groups.values()])


# --- 10, 13, 12: models that are trained already, and zero-shot tasks -------------------------------------------------------

def fine_tune(result: Mapping, table: Table) -> str:
    """A joint fine-tune against a baseline one, under fresh predictors; the head that was trained along against a fresh one on the same model."""
    joint = next(e["treatment"] for e in result["effects"] if e["control"] == "baseline")
    known = boundary.reference_effects(joint)
    held = [e for e in result["effects"] if e["treatment"] == joint and e.get("metric") == "hit"]
    first, again = ([e for e in held if (e.get("variation") == refit.VARIATION) is second] for second in (False, True))
    gains = [(f"{joint} − baseline, {PREDICTORS[predictor]}", _by_h(e for e in first if e["predictor"] == predictor),
              {h: value for (which, h), value in known.items() if which == predictor}) for predictor in ("ranking", "linear", "next_router")]  # fmt: skip
    heads: dict[str, list[Mapping]] = {}
    for e in result["effects"]:
        if e.get("predictor") == "cotrained":
            heads.setdefault(e["treatment"], []).append(e)
    levels = {row["predictor"]: row for row in results.reference()["lora"] if row["arm"] == joint}
    own = {int(h): level - levels["linear"][h] for h, level in levels.get("cotrained", {}).items() if h.isdigit()}
    along = [(f"{arm}: head trained along − fresh linear", _by_h(mine), own if arm == joint else {}) for arm, mine in heads.items()]
    gains.insert(1, (f"{joint} − baseline, MLP by the other loss", _by_h(again), {}))
    return by_horizon("difference in hit@$k$ (points)", [[line for line in gains if line[1]], along])


def parts(result: Mapping, table: Table) -> str:
    """The gain of joint over baseline by what is trained and with which weight, under each fresh predictor."""
    arms, groups = result["arms"], []
    for predictor in boundary.FRESH:
        lines = []
        for part, prefix in boundary.parts_of(arms).items():
            for arm in dict.fromkeys(row["arm"] for row in arms if row["arm"].startswith(f"{prefix}joint ")):
                dose, known = arm.removeprefix(f"{prefix}joint "), {} if prefix else boundary.reference_effects(arm)
                effects = experiments.hit_effects(arms, arm, f"{prefix}baseline", predictors=[predictor])
                lines.append((f"{part}, lambda {dose}, {PREDICTORS[predictor]}", _by_h(effects), {h: value for (which, h), value in known.items() if which == predictor}))
        groups.append(lines)
    return by_horizon("what is trained, weight, predictor", groups)


def drift(result: Mapping, table: Table) -> str:
    """How far the routing of each fine-tuned model has moved from the stock model's, its entropies and loss against it, and the gate against the baseline of its part."""
    gates = {gate["arm"]: gate for gate in result.get("gates", [])}
    lines = []
    for arm in dict.fromkeys(e["treatment"] for e in result["effects"] if e["control"] == "stock"):
        mine = {e["metric"]: e for e in result["effects"] if e["control"] == "stock" and e["treatment"] == arm}
        gate = gates.get(arm)
        lines.append([escape(arm), number(100 * (1 + mine["kept"]["mean"]), 1), cell(mine["router_entropy_fraction"]), cell(mine["load_entropy"]), cell(mine["val_loss"], "nats"),
                      ("passes" if gate["passes"] else "fails") + ("" if gate["certain"] else " (uncertain)") if gate else NONE])  # fmt: skip
    return tabular("lrcccl", ["arm", r"kept (\%)", r"router ent. (\%)", r"load ent. (\%)", "loss (nats)", "gate"], lines)


def tasks(result: Mapping, table: Table) -> str:
    """Zero-shot tasks: chance and both models' accuracy, and what joint training moves, in accuracy and in the gold answer's log-likelihood."""
    scores, lines = table("scores"), []
    for task in downstream_study.tasks_of(result["arms"]):
        mine, title = {e["measure"]: e for e in result["effects"] if e.get("task") == task}, downstream_study.TITLES[task]
        part = scores[scores.task == title]
        means = part.groupby("arm").accuracy.mean()
        lines.append([prose(title), f"{part['items'].iloc[0]:.0f}", number(100 * part.chance.iloc[0], 1), *(number(100 * means[arm], 1) for arm in ("baseline", "joint")),
                      cell(mine.get("accuracy")), cell(mine.get("accuracy_norm")), NONE if "gold" not in mine else cell(mine["gold"], "nats")])  # fmt: skip
    above = r" & & \multicolumn{3}{c}{right answers (\%)} & \multicolumn{3}{c}{joint $-$ baseline} \\ \cmidrule(lr){3-5}\cmidrule(l){6-8}"
    return tabular("lrrrrccc", ["task", "items", "chance", "baseline", "joint", "accuracy (points)", "normalised (points)", "gold answer (nats)"], lines, above)


# --- 11: the race in the engine ----------------------------------------------------------------------------------------------

def _pairs(result: Mapping) -> list[tuple[str, str]]:
    return list(dict.fromkeys((e["treatment"], e["control"]) for e in result["effects"]))


def _over_seeds(result: Mapping, pair: tuple[str, str]) -> dict:
    """The pair's change of decoding speed over model seeds, as the claims decide it."""
    return experiments.relative_effect(result["arms"], *pair, "tok_s")


def _same_prefetch(pair: tuple[str, str]) -> bool:
    return pair[0].partition("-")[2] == pair[1].partition("-")[2]


def race(result: Mapping, table: Table) -> str:
    """Every comparison of decoding speed, in per cent: over model seeds, and of each seed over its prompts."""
    per_seed = {(e["treatment"], e["control"], e["model_seed"]): e for e in result["effects"]}
    models, groups = sorted({seed for _, _, seed in per_seed}), {}
    for pair in _pairs(result):
        (model, _, source), (other, _, _) = (name.partition("-") for name in pair)
        group = f"{model} − {other}, same prefetch" if _same_prefetch(pair) else f"{model} model, prefetch − none"
        groups.setdefault(group, []).append([rf"\quad {escape(ARMS[source])}", cell(_over_seeds(result, pair)), *(cell(per_seed.get((*pair, seed))) for seed in models)])
    lines: list[Sequence[str] | str] = []
    for group, held in groups.items():
        lines += ([r"\addlinespace[2pt]"] if lines else []) + [rf"\emph{{{prose(group)}}} \\", *held]
    return tabular("l" + "c" * (1 + len(models)), ["decoding speed (\\%)", "over model seeds", *(f"seed {seed}, over prompts" for seed in models)], lines)


def say_race(result: Mapping, table: Table) -> str:
    """How many prefetches are faster than none, and how many comparisons of the two models differ, by the interval over model seeds; at which cache."""
    found = [(pair, _over_seeds(result, pair)) for pair in _pairs(result)]
    share, n = result["provenance"]["parameters"]["shares"][0], found[0][1]["n"]
    if n == 1:
        return prose(f"With {share:.0%} of the experts in the cache; one model seed, so that nothing is tested over models.")
    ahead, between = [(p, e) for p, e in found if not _same_prefetch(p)], [(p, e) for p, e in found if _same_prefetch(p)]
    faster, slower = ([p for p, e in ahead if side(e)] for side in (lambda e: e["ci95"][0] > 0, lambda e: e["ci95"][1] < 0))
    apart = [p for p, e in between if e["ci95"][0] > 0 or e["ci95"][1] < 0]
    named = lambda pairs: f" ({'; '.join(f'{model}, {ARMS[source]}' for model, _, source in (p[0].partition('-') for p in pairs))})" if pairs else ""  # noqa: E731
    return prose(f"With {share:.0%} of the experts in the cache and intervals over {n} model seeds, {len(faster)} of {len(ahead)} prefetches are faster than none{named(faster)} and "
                 f"{len(slower)} slower{named(slower)}; of {len(between)} comparisons of the joint with the ordinary model under the same prefetch, {len(apart)} "
                 f"{'has' if len(apart) == 1 else 'have'} an interval that excludes zero{named(apart)}.")  # fmt: skip


def say_engine(result: Mapping, table: Table) -> str:
    """For the abstract: how well the simulator predicts the engine, and what joint training is worth in it."""
    off = table("prediction").error_tok_s.abs()
    worth = findings.say(_over_seeds(result, ("joint-ranking", "baseline-ranking")), "joint training", "decoding speed with the ranking MLP's prefetches", "percent")
    return prose(f"In our own engine, whose speed the simulator foretells to {off.median():.1%} in the median of {len(off)} cells, {worth}")


MADE: dict[str, tuple[str, Callable[[Mapping, Table], str]]] = {   # name -> (experiment, how it is made)
    "table.backbone": ("04_isolation", backbone), "table.seeds": ("06_seeds", seeds), "table.longer": ("09_longer_training", longer),
    "table.lora": ("10_olmoe_lora", fine_tune), "table.lora-drift": ("10_olmoe_lora", drift),
    "table.parts": ("13_olmoe_dose", parts), "table.parts-drift": ("13_olmoe_dose", drift), "table.tasks": ("12_downstream", tasks), "table.race": ("11_engine", race),
    "say.race": ("11_engine", say_race), "say.engine": ("11_engine", say_engine),
}  # fmt: skip
