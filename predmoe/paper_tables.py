"""The bodies of the paper's tables and lists, by name, as LaTeX. Our numbers and the reference study's never share a column; its columns say that they are its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from . import config, experiments, model, paper_studies, reference_table, results, stats
from . import claims as deciding
from .paper_text import EXPERIMENTS, NONE, VERDICTS, counted, effect, notrun, number
from .plots import PREDICTORS
from .tex import escape, listed, prose, rows

READ = ("ranking", "linear", "next_router", "token_id", "static")   # predictors, the strongest first
FAULTS = {"1": "a", "2": "b", "4": "c", "5": "d", "6": "e"}   # the simulator's faults: their number in `reference_table.VARIANTS` -> the paper's letter


def values(profile: str, found: Mapping[str, Mapping], decided: Sequence[Mapping]) -> dict[str, str]:
    """Every table by name. A table whose experiment has not been run is one line that says so."""
    made = {"table.sizes": _sizes(found), "table.headline": claims((c for c in decided if c["headline"]), parts=False), "table.claims": claims(decided), "table.provenance": provenance(found)}
    main = experiments.primary(found)
    asked = found[main]["provenance"]["parameters"]["horizons"] if main else (1, 2, 4)
    made["head.horizons"] = " & ".join(f"${h}$" for h in asked)
    made["list.failed"], made["list.partly"] = failed(decided), partly(decided)
    made |= _simulated()
    made["quality.seeds"] = counted(len({row["seed"] for row in found["02_horizons"]["arms"]})) if "02_horizons" in found else notrun("02_horizons")
    drawn = {"table.hits": (main or "02_horizons", 8, hits), "table.effects": (main or "02_horizons", 5, effects), "table.quality": ("02_horizons", 7, quality)}
    for name, (experiment, columns, make) in drawn.items():
        made[name] = make(found[experiment]) if experiment in found else _absent(experiment, columns)
    worth = "05_cache_simulation"
    made["table.mended"] = mended(profile) if worth in found else _absent(worth, 5)
    made |= machines(profile) if worth in found else dict.fromkeys(("say.machines", "say.machines-short"), notrun(worth))
    made["say.fits"] = fits(profile) if "08_latency_sensitivity" in found else notrun("08_latency_sensitivity")
    made["table.reproduced"] = reproduced(profile) if worth in found else _absent(worth, 4)
    return made | paper_studies.values(profile, found)


def _simulated() -> dict[str, str]:
    """The machine that the price is simulated on, which is the reference study's."""
    study = reference_table
    return {
        "sim.layers": str(study.L), "sim.experts": str(study.E), "sim.k": str(study.K), "sim.slots": str(study.SLOTS), "sim.mb": f"{study.REFERENCE['expert_bytes'] / 1e6:g}",
        "sim.ms": f"{study.COMPUTE.shared_ms:g}", "sim.latency": f"{study.DISK.latency_ms:g}", "sim.bandwidth": f"{study.DISK.gb_per_s:g}", "sim.skew": f"{study.SKEW:g}", "sim.reuse": f"{study.REUSE:.0%}".replace("%", r"\%"),
    }  # fmt: skip


def _absent(experiment: str, columns: int) -> str:
    return rf"\multicolumn{{{columns}}}{{c}}{{{notrun(experiment)}}} \\"


def _sizes(found) -> str:
    known, lines = results.reference()["tiers"], []
    main = experiments.primary(found)
    for name in [found[main]["provenance"]["parameters"]["tier"] if main else "cpu"]:
        tier = config.TIERS[name]
        shape, size = tier.model, model.count_parameters(tier.model)
        tokens = tier.train.steps * tier.train.batch_size * shape.context
        lines.append(["here", f"{size['total'] / 1e6:.3g}M", f"{size['active'] / 1e6:.3g}M", f"{shape.num_layers}", f"{shape.num_experts}, {shape.top_k}", f"{tokens / 1e6:.3g}M", "open text and code"])
    for name in ("A", "B"):
        shape, layout = known[name], config.TIERS[name.lower()]
        tokens = layout.train.steps * layout.train.batch_size * layout.model.context
        lines.append([f"reference study, tier {name}", f"{shape['total'] / 1e6:.0f}M", f"{shape['active'] / 1e6:.0f}M", f"{layout.model.num_layers}", f"{shape['experts']}, {shape['top_k']}",
                      f"{tokens / 1e6:.3g}M", "FineWeb-Edu"])  # fmt: skip
    return rows(lines)


def hits(result: Mapping) -> str:
    """Levels of hit@k: a line per predictor and model (baseline, joint); our three columns, then the reference study's."""
    frame, known = experiments.hits(result["arms"]), {(row["predictor"], row["arm"]): row for row in results.reference()["hit"]}
    horizons, lines = sorted(frame.horizon.unique()), []
    for predictor in READ:
        for arm in ("baseline", "joint"):
            mine = frame[(frame.predictor == predictor) & (frame.arm == arm)].groupby("horizon").hit.mean()
            theirs = known.get((predictor, arm), {})
            lines.append([escape(PREDICTORS[predictor]) if arm == "baseline" else "", escape(arm), *(number(mine[h], 3) for h in horizons),
                          *(number(theirs[str(h)], 3) if str(h) in theirs else NONE for h in horizons)])  # fmt: skip
        lines.append(r"\addlinespace[2pt]")
    return rows(lines[:-1])


def effects(result: Mapping) -> str:
    """Paired effects in points: predictor, horizon, ours with its interval, Holm's p, and the reference study's."""
    known, lines = experiments.reference_effects(), []
    for metric, predictor, name in (("hit", "ranking", "ranking MLP (confirmatory)"), ("hit", "linear", "linear"), ("hit", "next_router", "next layer's router"), ("hit", "token_id", "token-id lookup"),
                                    ("margin_over_token_id", "ranking", "ranking MLP, margin over lookup"), ("exact_set", "ranking", "ranking MLP, exact set")):  # fmt: skip
        for i, e in enumerate(experiments.hit_effects(result["arms"], "joint", "baseline", metric=metric, predictors=[predictor])):
            theirs = known.get((predictor, e["horizon"])) if metric == "hit" else None
            lines.append([prose(name) if not i else "", str(e["horizon"]), effect(e, "points"), _p(e["p_holm"]),
                          prose(f"{100 * theirs:+z.1f}") if theirs is not None else NONE])  # fmt: skip
        lines.append(r"\addlinespace[2pt]")
    return rows(lines[:-1])


def _p(value: float | None) -> str:
    return NONE if value is None else "$<$0.001" if value < 0.0005 else number(value, 3)


def quality(result: Mapping) -> str:
    """What an arm costs: loss, its change, load entropy against the baseline's, router entropy, reuse; means over seeds, and whether it passes the gate."""
    frame, gates = experiments.diagnostics(result["arms"]), {gate["arm"]: gate for gate in experiments.gates(result["arms"])}
    lines = []
    for arm in dict.fromkeys(frame.arm):
        means, gate = frame[frame.arm == arm].mean(numeric_only=True), gates.get(arm)
        lines.append([escape(arm), number(means.val_loss, 3), effect(gate["val_loss"], "percent") if gate else NONE, number(means.load_entropy, 3), number(means.router_entropy_fraction, 3),
                      number(means.reuse, 3), ("passes" if gate["passes"] else "fails") + ("" if gate["certain"] else " (uncertain)") if gate else NONE])  # fmt: skip
    return rows(lines)


def mended(profile: str) -> str:
    """The joint model's gain in every variant of the simulator: with the reference study's accuracies (tok/s linear and ranking, waste) and with ours (tok/s, linear)."""
    tables = [results.load_table(profile, "05_cache_simulation", name) for name in ("reference_table", "our_table")]

    def by(table, predictor, metric):
        return {e["variant"]: effect(e, "points") for e in reference_table.effects(table, f"joint-{predictor}", f"baseline-{predictor}", metric)}

    theirs, ours = [by(tables[0], *what) for what in (("linear", "tok_s"), ("ranking", "tok_s"), ("linear", "wasted_mb"))], by(tables[1], "linear", "tok_s")
    return rows([_variant(name), *(column[name] for column in theirs), ours.get(name, NONE)] for name in theirs[0])


def _variant(name: str) -> str:
    """A variant's name with its fault's letter set apart: "5 wrong guesses ..." as "(d) wrong guesses ..."."""
    first, _, rest = name.partition(" ")
    return prose(f"({FAULTS[first]}) {rest}" if first in FAULTS else name)


def reproduced(profile: str) -> str:
    """The reference study's simulator table beside our reproduction of it."""
    known = results.load_table(profile, "05_cache_simulation", "beside_published")
    words, digits = {"distinct": "distinct experts of a token", "tok_s": "tokens per second", "wasted_mb": "wasted MB per token", "ttft_ms": "first token (ms)"}, {"distinct": 2, "tok_s": 3, "wasted_mb": 1, "ttft_ms": 0}
    lines, last = [], None
    for row in known.itertuples():
        lines.append([words[row.quantity] if row.quantity != last else "", escape(row.arm), number(row.published, digits[row.quantity]), number(row.here, digits[row.quantity])])
        last = row.quantity
    return rows(lines)


def claims(decided: Iterable[Mapping], *, parts: bool = True) -> str:
    """Claim, the reference study's number, ours, verdict. A claim of several parts has a line below it for each, or, without `parts`, how many of them hold."""
    lines = []
    for c in decided:
        held = c.get("parts", []) if c["effects"] else []
        here = notrun(c["notebook"]) if not c["effects"] else compact(c["measured"]) if not held else f"each of its {len(held)} parts:" if parts else parts_held(held)
        lines.append([prose(c["statement"].rstrip(".")), prose(c["reference"]), here, _verdict(c)])
        lines += [[rf"\hangindent=1em\hangafter=0\emph{{{prose(deciding.part_name(part))}}}", "", compact(part["measured"]), _verdict(part)] for part in held if parts]
    return (r" \\ \addlinespace[3pt]" + "\n").join(" & ".join(line) for line in lines) + r" \\"


def _verdict(claim: Mapping) -> str:
    """A verdict's word; of one that holds in direction and not in size, at which horizons."""
    at = deciding.other_size(claim)
    return VERDICTS[claim["verdict"]] + ("" if at is None else " (size" + (f": {prose(at)}" if at else "") + ")")


def parts_held(parts: Sequence[Mapping]) -> str:
    """How many parts of a claim have which verdict."""
    words = [part["verdict"] for part in parts]
    told = [f"{words.count(word)} {VERDICTS[word]}" for word in VERDICTS if word in words]
    return prose(f"of {len(parts)} parts {', '.join(told)}")


def compact(measured: str) -> str:
    """What was measured with its unit once: "+1.2 points [...] / +2.2 points [...] at h = 1 / 2 (5 seeds)" as "+1.2 [...] / +2.2 [...] points at ..."."""
    for unit in (" points", " nats"):
        if measured.count(unit) > 1:
            measured = re.sub(r"(( at h = [\d /]+)?( \(\d+ seeds?\))?)$", rf"{unit}\1", measured.replace(unit, ""), count=1)
    return prose(measured)


def failed(decided: Iterable[Mapping]) -> str:
    """The claims that did not replicate as items of a list, with what was published, what was measured and why; a sentence where there is none."""
    items = [rf"\item \textbf{{{prose(c['statement'].rstrip('.'))}.}} Here: {compact(c['measured'])}. In the reference study: {prose(c['reference'])}. Why: \val{{claim.{c['id']}.why}}."
             for c in decided if c["verdict"] == stats.NOT_REPLICATED]  # fmt: skip
    return "\n".join(items) or r"\item None of those tested."


def partly(decided: Iterable[Mapping]) -> str:
    """How many claims replicated in part only because of their size; the others as items of a list, with the reason."""
    held = [c for c in decided if c["verdict"] == stats.PARTLY]
    rest = [c for c in held if deciding.other_size(c) is None]
    said = f"Of the {len(held)} claims that are partly replicated {len(held) - len(rest)} hold in direction and differ more than {stats.MAGNITUDE_FACTOR:g}-fold in size."
    items = [rf"\item \emph{{{prose(c['statement'].rstrip('.'))}}}: \val{{claim.{c['id']}.why}}." for c in rest]
    return said + ("" if not items else " The others:\n\\begin{itemize}\\setlength{\\itemsep}{1pt}\\small\n" + "\n".join(items) + "\n\\end{itemize}")


def machines(profile: str) -> dict[str, str]:
    """How many of the published machines' hit rates and speeds lie inside what the simulator gives for them, and how far off the rest are; and in short."""
    known = results.load_table(profile, "05_cache_simulation", "published_machines")
    parts, short = [], []
    for name, words in (("hit", "published hit rates"), ("tok_s", "published speeds")):
        inside = (known[f"{name}_published"] >= known[f"{name}_low"]) & (known[f"{name}_published"] <= known[f"{name}_high"])
        below, above = known[known[f"{name}_published"] < known[f"{name}_low"]], known[known[f"{name}_published"] > known[f"{name}_high"]]
        off = [f"{len(part)} {side}, at {ratio.min():.2f} to {ratio.max():.2f} times that end" for part, end, side in ((below, "low", "below it"), (above, "high", "above it"))
               if len(part) for ratio in [part[f"{name}_published"] / part[f"{name}_{end}"]]]  # fmt: skip
        parts.append(f"of {len(known)} {words} {inside.sum()} {'lies' if inside.sum() == 1 else 'lie'} inside the simulated range" + (f" ({' and '.join(off)})" if off else ""))
        short.append(f"{inside.sum()} of {len(known)} {words}")
    return {"say.machines": prose(f"The range is over what is not published of a machine. {'; '.join(parts).capitalize()}."),
            "say.machines-short": prose(f"{' and '.join(short)} of machines in use lie inside what it gives for them.")}  # fmt: skip


def fits(profile: str) -> str:
    """The joint model's gain where a read fits behind a layer and where it does not, with both kinds of accuracies, means over seeds."""
    known, parts = results.load_table(profile, "08_latency_sensitivity", "bandwidth"), []
    for whose, words in (("reference", "With the study's accuracies"), ("ours", "with ours")):
        means = known[(known.accuracies == whose) & (known.variant == "all mended")].groupby(["fits", "gb_per_s"]).gain.mean()
        told = [" to ".join(dict.fromkeys(f"{100 * end:+z.1f}%" for end in (side.min(), side.max()))) + f" {where}" for flag, where in ((True, "where a read fits"), (False, "where none does"))
                if flag in means.index.get_level_values(0) for side in [means[flag]]]  # fmt: skip
        parts.append(f"{words} and all faults mended the joint model's gain is {' and '.join(told)}")
    return prose("; ".join(parts) + ".")


def provenance(found: Mapping[str, Mapping]) -> str:
    """Each experiment: commit, processor, cores, seeds, seconds of the notebook, and of the models it reads (how many, their training time)."""
    lines = []
    for name in EXPERIMENTS:
        if name not in found:
            lines.append([rf"\code{{{escape(name)}}}", r"\multicolumn{5}{l}{not run yet}"])
            continue
        made, seeds = found[name]["provenance"], {row["seed"] for row in found[name]["arms"]}
        times = [run["seconds"]["train"] for run in made.get("runs", {}).values() if isinstance(run.get("seconds"), Mapping) and "train" in run["seconds"]]
        trained = f"{len(times)} ({min(times) / 60:.0f} to {max(times) / 60:.0f} min each)" if times else NONE
        machine = made["hardware"]
        lines.append([rf"\code{{{escape(name)}}}", rf"\code{{{made['commit'][:10]}}}" + (" (changed)" if made["dirty"] else ""), str(len(seeds)), f"{made['seconds']:.0f} s", trained,
                      escape(f"{machine.get('gpu') or machine.get('cpu', 'unknown').replace('(R)', '')}, {machine.get('cores', '?')} cores")])  # fmt: skip
    return rows(lines)


def sources(found: Mapping[str, Mapping]) -> dict[str, str]:
    """Of what the results were made: commits of the results and of the models, machines, packages, total training time."""
    runs = {key: run for result in found.values() for key, run in result["provenance"].get("runs", {}).items()}
    trained = [run["provenance"] for run in runs.values() if "provenance" in run]
    commits = list(dict.fromkeys(result["provenance"]["commit"][:10] for result in found.values()))
    model_commits = list(dict.fromkeys(made["commit"][:10] for made in trained))
    machines = dict.fromkeys(f"{made['hardware']['cpu'].replace('(R)', '')}, {made['hardware']['cores']} cores, {made['hardware']['memory_gb']:g} GB" for made in
                             itertools.chain((result["provenance"] for result in found.values()), trained))  # fmt: skip
    packages = next((result["provenance"]["packages"] for result in found.values()), {})
    hours = sum(run["seconds"]["train"] for run in runs.values() if isinstance(run.get("seconds"), Mapping)) / 3600
    code = lambda names: listed([rf"\code{{{escape(name)}}}" for name in names])  # noqa: E731
    python = next((result["provenance"].get("python", "") for result in found.values()), "")
    return {
        "source.commits": code(commits), "source.model-commits": code(model_commits), "source.machines": escape("; ".join(machines)), "source.models": str(len(runs)),
        "source.hours": f"{hours:.1f}", "source.python": escape(python), "source.packages": escape(", ".join(f"{name} {packages[name]}" for name in ("torch", "numpy", "scipy", "numba", "transformers") if name in packages)),
    }  # fmt: skip
