"""Claims for reading: what is subtracted from what, one line per effect, and a row of their own for the parts of a claim that has several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from . import claims as deciding
from . import results, stats

METRICS = {
    "hit.ranking": "hit@k of a fresh ranking MLP", "hit.linear": "hit@k of a fresh linear predictor", "hit.cotrained": "hit@k of the co-trained head",
    "static_hit": "hit@k of the most popular experts", "token_id_hit": "hit@k of a token-id lookup", "margin_over_token_id.ranking": "hit@k of a fresh ranking MLP above a token-id lookup's", "val_loss": "validation loss", "reuse": "reuse",
    "router_entropy": "router entropy", "router_entropy_fraction": "router entropy as a share of its maximum", "tok_s": "tokens per second", "wasted_mb": "wasted bytes",
    "ttft_ms": "time to the first token", "gain_over_baseline": "gain in tokens per second over the baseline's",
}  # fmt: skip
PLACES = {"fits": "where a read fits into a layer", "beyond": "where it does not"}


def compared(measure: Mapping) -> str:
    """What a claim's effects are, in words, of its `measure` (assets/claims.yaml): "joint minus baseline, hit@k of a fresh ranking MLP"."""
    arm, metric = measure.get("arm"), _metric(measure["metric"])
    minus, other = measure.get("minus", arm), _metric(measure.get("minus_metric", measure["metric"]))
    share = f", relative to {'the latter' if 'pairs' in measure else minus}" if measure.get("relative") else ""
    if "pairs" in measure:   # each of which has a line of its own
        return f"{metric}{share}"
    if at := measure.get("minus_at"):
        return f"{arm} minus what {', '.join(at['arms'])} have at its {METRICS[at['match']]}: {metric}{share}"
    if (arm, metric) == (minus, other):
        said = f"{arm}: {metric}"
    elif metric == other:
        said = f"{arm} minus {minus}{share}: {metric}"
    elif arm == minus:
        said = f"{metric} minus {other}, both on {arm}{share}"
    else:
        said = f"{metric} on {arm} minus {other} on {minus}{share}"
    if "contrast" in measure:
        far, near = (PLACES.get(key, f"at h = {key}") for key in measure["contrast"])
        said += f", {far} minus {near}"
    return said


def _metric(path: str) -> str:
    """A metric in words; of a path that ends in a horizon, that too."""
    name, _, last = path.rpartition(".")
    return f"{METRICS[name]} at h = {last}" if last.isdigit() else METRICS[path]


def lines(measured: Mapping, measure: Mapping | None) -> list[str]:
    """What was measured of a claim or a part, as claims.json holds it, for reading: what is subtracted from what over how many seeds, then a line per effect with
    its interval. `measure`: of assets/claims.yaml; None (a claim that is not in there) leaves the text as it is."""
    effects = measured["effects"]
    if measure is None or not effects:
        return [measured["measured"]]
    fewest, most = min(e["n"] for e in effects), max(e["n"] for e in effects)
    seeds = f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'s' if most > 1 else ''}"
    places = [_whole(f"h = {h}: ") for h in measure.get("horizons", [])] or [f"{a} minus {b}: " for a, b in measure.get("pairs", [])] or [""]
    fit = f" (fitted by {measured['fit']})" if "fit" in measured else ""
    return [f"{compared(measure)}{fit}, {seeds}:", *(place + _whole(deciding.effect_text(e, e["unit"])) for place, e in zip(places, effects, strict=True))]


def _whole(text: str) -> str:
    """Text that is not broken over lines."""
    return text.replace(" ", "\u00a0")


def rows(claims: Iterable[Mapping]) -> list[dict]:
    """The rows of the claims table, headline claims first: statement, verdict, why, lines (`lines`), reference, notebook, headline, ran (whether the
    notebook was executed), part (True: of the claim above it), several (True: its parts follow)."""
    specs, found = {spec["id"]: spec for spec in results.claim_specs()}, []
    for claim in sorted(claims, key=lambda claim: not claim["headline"]):
        spec, parts = specs.get(claim["id"], {}), claim.get("parts", []) if claim["effects"] else []
        shared = {"notebook": claim["notebook"], "headline": claim["headline"], "ran": claim["why"] != deciding.not_run(claim["notebook"])}
        why = stats.count_parts([part["verdict"] for part in parts]) if parts else deciding.reason(claim)
        found.append(shared | {"statement": claim["statement"], "verdict": claim["verdict"], "why": why, "reference": claim["reference"], "part": False, "several": bool(parts),
                               "lines": [f"{len(parts)} parts, a row each below"] if parts else lines(claim, spec.get("measure"))})  # fmt: skip
        measures = {part["name"]: part["measure"] for part in spec.get("parts", [])}
        found += [shared | {"statement": deciding.part_name(part), "verdict": part["verdict"], "why": deciding.plain_reason(part["why"]), "reference": "", "part": True, "several": False,
                            "lines": lines(part, measures.get(part["name"]))} for part in parts]  # fmt: skip
    return found


def table(claims: Iterable[Mapping]) -> pd.DataFrame:
    """Claims for reading (`rows`); a notebook that has not been executed is marked as not run. `experiments.show` breaks the lines of a cell."""
    columns = ["verdict", "claim of the reference study", "measured here, with 95% interval", "reference", "notebook"]

    def cells(row: Mapping) -> list[str]:
        measured = "\n".join([*row["lines"], *([row["why"]] if row["several"] else [])])
        if row["part"]:
            return [row["verdict"], f"↳ part: {row['statement']}", measured, "", ""]
        return [row["verdict"], row["statement"], measured, row["reference"], row["notebook"] + ("" if row["ran"] else " (not run)")]

    shown = pd.DataFrame(map(cells, rows(claims)), columns=columns)
    shown.attrs["class"] = "prose"   # read, not added up: aligned to the left
    return shown
