"""The paper's figures as vector PDF, redrawn at the width of its column from what is committed: results.json and CSV tables, nothing else.

Each is drawn by the function that drew it in its notebook and then fitted to print; its alternative text is the notebook's own, computed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from . import controls, experiments, frontier, isolation, overview, paper_captions, plots, plots_controls, plots_engine, plots_isolation, plots_simulator, results, scaling, sensitivity, spread, stats
from .config import ConfigError
from .paper_text import LACKING
from .tex import prose

WIDTH = 6.4   # inches: the text's width in main.tex


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One figure: of which experiment, which of its figures (whose alternative text it takes), how it is drawn and how tall it is in print."""

    experiment: str | None   # None: the one on which the main comparison stands (`experiments.primary`)
    figure: str
    height: float   # inches
    draw: Callable[[Mapping, Callable[[str], pd.DataFrame]], Figure]   # (results of the experiment, read a table) -> Figure
    says: Callable[[Mapping, Callable[[str], pd.DataFrame]], str]      # the same -> the sentence with which its caption begins
    text: float = 0.78   # of the notebook's text size, which is made for a screen

    def __post_init__(self):
        if not 0.5 < self.text <= 1.0 or not 1.0 < self.height < 8.0:
            raise ValueError(f"{self.experiment}, {self.figure}: text={self.text} or height={self.height} is not for print")

    def of(self, found: Mapping[str, Mapping]) -> str | None:
        """The experiment whose results are drawn; None where none of them has been run."""
        return experiments.primary(found) if self.experiment is None else self.experiment if self.experiment in found else None


def _summary(result, table):
    return plots.summary(*overview.summary_tables({result["experiment"]: result}), gate=stats.MAX_LOSS_INCREASE)


def _bandwidth(result, table):
    rows = table("bandwidth")
    shown = [rows[rows.accuracies == "reference"].assign(variant=lambda r: "the study's accuracies, " + r.variant), rows[rows.accuracies == "ours"].assign(variant=lambda r: "our accuracies, " + r.variant)]
    return plots_simulator.bandwidth_gain(pd.concat(shown), results.reference()["simulator"]["sensitivity"], sensitivity.LAYER_MS)


def _map(result, table):
    atlas = table("map")
    return plots_simulator.gain_map(atlas[atlas.guard == "none"])


def _locality(result, table):
    own = [row for row in result["arms"] if not row["arm"].endswith("(order)")]
    return plots.forest(controls.effects_forest(controls.locality_effects(own, "joint")), label="joint − baseline (points)")


def _many(name: str, panel: str, value: str, label: str, title: str):
    return lambda result, table: plots_controls.many_arms(table(name), panel=panel, value=value, label=label, gate=stats.MAX_LOSS_INCREASE, families=frontier.FAMILIES, title=title)


FIGURES: dict[str, Spec] = {
    "summary": Spec(experiment=None, figure="effects", height=2.35, says=paper_captions.summary, draw=_summary),
    "dose": Spec(experiment="03_dose", figure="dose", height=2.4, says=paper_captions.dose, draw=lambda r, t: plots.dose(t("doses"), gate=stats.MAX_LOSS_INCREASE)),
    "six": Spec(experiment="04_isolation", figure="six_arms", height=2.5, says=paper_captions.six, draw=lambda r, t: plots_isolation.six_arms(t("six_arms"), isolation.reference_levels())),
    "power": Spec(experiment="06_seeds", figure="power", height=2.3, says=paper_captions.power, draw=lambda r, t: plots_isolation.power(t("power"), wanted=spread.POWER)),
    "locality": Spec(experiment="07_controls", figure="cost", height=2.4, says=paper_captions.locality, draw=_locality),
    "ladder": Spec(experiment="09_longer_training", figure="ladder", height=2.4, says=paper_captions.ladder, draw=lambda r, t: plots_controls.ladder(t("ladder"))),
    "sizes": Spec(experiment="14_ranking_seeds", figure="sizes", height=2.3, says=paper_captions.sizes,
                  draw=lambda r, t: plots_isolation.sizes(scaling.same_experts(t("sizes")), scaling.reference_points("ranking"))),
    "frontier": Spec(experiment="15_frontier", figure="known", height=3.4, says=paper_captions.known, text=0.72, draw=_many("known", "horizon", "known", "known ahead (% of the true top-k)", "h = {}")),
    "curves": Spec(experiment="05_cache_simulation", figure="hit_curves", height=3.2, says=paper_captions.curves, text=0.74, draw=lambda r, t: plots_simulator.hit_curves(t("hit_curves"))),
    "fit": Spec(experiment="05_cache_simulation", figure="engine_fit", height=2.1, says=paper_captions.fit, text=0.72, draw=lambda r, t: plots_simulator.engine_fit(t("engine_fit"))),
    "bandwidth": Spec(experiment="08_latency_sensitivity", figure="bandwidth", height=2.9, says=paper_captions.bandwidth, draw=_bandwidth),
    "map": Spec(experiment="08_latency_sensitivity", figure="map", height=4.2, says=paper_captions.harm, text=0.85, draw=_map),
    "race": Spec(experiment="11_engine", figure="race", height=3.0, says=paper_captions.race, text=0.74, draw=lambda r, t: plots_engine.race(t("race"))),
    "prediction": Spec(experiment="11_engine", figure="prediction", height=2.4, says=paper_captions.prediction, text=0.74, draw=lambda r, t: plots_engine.prediction(t("prediction"))),
}  # fmt: skip


def write(profile: str, found: Mapping[str, Mapping], folder: Path) -> dict[str, str]:
    """Draw what has been run as folder/NAME.pdf; name -> alternative text of what was drawn.

    A table that its experiment did not write (public traces that are not there, say) leaves its figure out. The same data gives the same bytes.
    """
    drawn, pages = {}, {}
    for name, spec in FIGURES.items():
        if (alt := alternative(name, found)) is None:
            continue
        figure = fit(_made(spec, spec.draw, profile, found), WIDTH, spec.height, spec.text)
        with plots.style(), rc_context({"pdf.fonttype": 42}):   # TrueType, as print shops and arXiv want it
            figure.savefig(page := io.BytesIO(), format="pdf", metadata={"CreationDate": None, "Title": alt})
        drawn[name], pages[folder / f"{name}.pdf"] = alt, page.getvalue()
    folder.mkdir(parents=True, exist_ok=True)   # from here on: what cannot be drawn leaves the old figures
    for old in set(folder.glob("*.pdf")) - set(pages):
        old.unlink()
    for path, page in pages.items():
        path.write_bytes(page)
    return drawn


def conclusions(profile: str, found: Mapping[str, Mapping]) -> dict[str, str]:
    """`shows.NAME` -> the sentence with which a figure's caption begins, as LaTeX; empty where the figure is not drawn."""
    return {f"shows.{name}": "" if alternative(name, found) is None else prose(_made(spec, spec.says, profile, found)) for name, spec in FIGURES.items()}


def _made(spec: Spec, make: Callable, profile: str, found: Mapping[str, Mapping]):
    """`make` (draw or says) on an experiment's results and tables. Raises ConfigError where a table lacks a column that it takes."""
    experiment = spec.of(found)
    try:
        return make(found[experiment], lambda name: results.load_table(profile, experiment, name))
    except ConfigError:
        raise
    except LACKING as error:
        raise ConfigError(f"the tables of {experiment} do not make its figure {spec.figure} ({error}): run the notebook again") from error


def alternative(name: str, found: Mapping[str, Mapping]) -> str | None:
    """What a figure shows in words, as its notebook says it; None where the experiment has not been run or has no such figure."""
    spec = FIGURES[name]
    described = {figure["name"]: figure["alt"] for figure in found.get(spec.of(found), {}).get("figures", [])}
    return described.get(spec.figure)


def fit(figure: Figure, width: float, height: float, text: float) -> Figure:
    """A figure that was made for a screen at a size in print (inches), its text, lines and markers smaller by `text`, its legend in as few even rows as fit."""
    figure.set_size_inches(width, height)
    for item in figure.findobj(Text):
        item.set_fontsize(item.get_fontsize() * text)
    for ax in figure.axes:
        for line in ax.get_lines():
            line.set_markersize(line.get_markersize() * text)
            line.set_linewidth(line.get_linewidth() * max(text, 0.75))
    for old in list(figure.legends):
        handles, labels, size = old.legend_handles, [item.get_text() for item in old.get_texts()], old.get_texts()[0].get_fontsize()
        for rows in range(1, len(labels) + 1):
            old.remove()
            old = figure.legend(handles=handles, labels=labels, loc="outside upper center", ncols=-(-len(labels) // rows), fontsize=size, handlelength=2.6, columnspacing=1.4, frameon=False)
            if old.get_window_extent().width < 0.98 * figure.bbox.width:
                break
    return figure
