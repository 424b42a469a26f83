"""A copy of the committed results and of the paper's sources, to change (the fixture `copied`)."""

import json
import shutil

from predmoe import paper, paper_text, paths


def made(folder):
    """Copy into `folder` what the paper is made of; returns (the folder of outputs, that of the profile, the paper's)."""
    for name in [*paper_text.EXPERIMENTS, "00_report"]:
        if (paths.ROOT / "outputs" / "cpu" / name).exists():
            shutil.copytree(paths.ROOT / "outputs" / "cpu" / name, folder / "outputs" / "cpu" / name, ignore=shutil.ignore_patterns("*.ipynb", "*.svg", "*.png"))
    (folder / "paper").mkdir()
    for name in ("main.tex", "references.bib"):
        shutil.copy(paper.FOLDER / name, folder / "paper")
    return folder / "outputs", folder / "outputs" / "cpu", folder / "paper"


def change(folder, experiment, edit):
    """Change the results of an experiment below the profile's `folder` by `edit`, a function of results.json."""
    path = folder / experiment / "results.json"
    result = json.loads(path.read_text())
    edit(result)
    path.write_text(json.dumps(result))
