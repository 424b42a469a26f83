"""The parts of README.md that are numbers: computed from outputs/, put between markers, and checked by a test.

`predmoe readme` rewrites them. Nothing between the markers is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import budget, config, corpora, corpora_large, model, paths, results
from .files import write_text

README = paths.ROOT / "README.md"
DOCS = paths.ROOT / "docs" / "many_gpus.md"
PEAK = "of the matrix-product peak"   # a column of benchmarks/train_step.py
STEP_GOAL = 1.3   # times the speed of transformers' fastest implementation, set before it was measured
BENCHMARKS = paths.ROOT / "outputs" / "benchmarks"


def render(text: str) -> str:
    """README's text with every computed part brought up to date."""
    parts = {
        "results:cpu": summary("cpu"), "answers:cpu": answers("cpu"), "state:cpu": state("cpu"), "figures:cpu": figures("cpu", _around(text, "figures:cpu", "README.md")[1]),
        "explorer": screenshot("cpu"), "benchmarks": benchmarks(), "sources": sources(), "sources large": sources(large=True), "tiers": tiers(),
    }  # fmt: skip
    for name, part in parts.items():
        text = _filled(text, name, part, "README.md")
    return text


def render_docs(text: str) -> str:
    """The text of docs/many_gpus.md with the plan on paper as `budget` gives it."""
    return _filled(text, "budget", budget.table() + "\n\n", "docs/many_gpus.md")


def _filled(text: str, name: str, part: str, where: str) -> str:
    before, _, after = _around(text, name, where)
    return before + part + after


def _around(text: str, name: str, where: str) -> tuple[str, str, str]:
    """The text up to the end of a part's opening marker, what stands in the part, and the rest from its closing marker on."""
    closing = f"{name.split(':')[0]}:end"
    found = list(re.finditer(rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- {re.escape(closing)} -->)", text, flags=re.DOTALL))
    if len(found) != 1:
        raise results.ResultError(f"{where} needs exactly one part between <!-- {name} --> and <!-- {closing} -->; it has {len(found)}")
    return text[: found[0].start()], found[0][0], text[found[0].end() :]


def update(path: Path = README) -> bool:
    """Rewrite README.md and docs/many_gpus.md in place; returns whether anything changed."""
    changed = False
    for source, fill in ((path, render), (DOCS, render_docs)):
        before = source.read_text()
        after = fill(before)
        if before != after:
            write_text(source, after)
            changed = True
    return changed


def summary(profile: str) -> str:
    """The summary figure of a profile and the first sentence of each answer of its 00_report."""
    report = results.load(profile, "00_report")
    pictures = [f"![{figure['alt']}](outputs/{profile}/00_report/{figure['png']})" for figure in report["figures"] if figure["name"] == "summary"]
    return "\n" + "\n\n".join([*pictures, "\n".join(f"- {_first(answer)}" for answer in report["findings"])]) + "\n\n"


def _first(answer: str) -> str:
    """An answer's question and first sentence."""
    return f"{answer.partition('. ')[0].removesuffix('.')}."


def answers(profile: str) -> str:
    """The answers of a profile's 00_report, whole."""
    return "\n" + "\n".join(f"- {answer}" for answer in results.load(profile, "00_report")["findings"]) + "\n\n"


def _executed(profile: str) -> dict[str, bool]:
    """Every notebook by name, the explorer last: whether the profile has an executed copy."""
    names = [*sorted(path.stem for path in paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), *(path.stem for path in paths.NOTEBOOKS.glob("explore.ipynb"))]
    return {name: (paths.outputs(profile) / name / f"{name}.ipynb").exists() for name in names}


def state(profile: str) -> str:
    """Which notebooks are executed at a profile, which are not, and how to rebuild those that are."""
    executed = _executed(profile)
    done, missing = ([name for name, ran in executed.items() if ran is which] for which in (True, False))
    numbers = [name.split("_")[0] for name in done if not name.startswith("00")]
    listed = lambda names: ", ".join(f"`{name}`" for name in names)  # noqa: E731
    said = [f"{len(done)} of {len(executed)} notebooks are executed at the `{profile}` profile: {listed(done) or 'none'}."]
    if done:
        said.append(f"`predmoe report --profile {profile} --only {' '.join([*numbers, '00'])}` rebuilds them from the committed measurements, without training.")
    if "05_cache_simulation" in done:
        said.append("What `05_cache_simulation` says of public traces needs their files, which are not part of the project (`$PREDMOE_TRACES` names their folder); without them it says that they are not there.")
    if missing:
        said.append(f"Written, and still to be executed at this profile: {listed(missing)}; `predmoe plan --profile {profile}` lists the models that are to be trained for them.")
    return "\n".join(said) + "\n\n"


def figures(profile: str, table: str) -> str:
    """The table of questions, notebooks and parameters: the questions as `table` has them (a notebook that it lacks takes its title), the links to the
    executed copies where there are any."""
    asked = {name: question for question, name in re.findall(r"^\| (.+?) \| \[(\w+)\]", table, flags=re.MULTILINE)}
    rows = ["| question | notebook | parameters of the committed run |", "|---|---|---|"]
    for name, ran in _executed(profile).items():
        where = f"outputs/{profile}/{name}/{name}.ipynb" if ran else f"notebooks/{name}.ipynb"
        parameters = paths.ROOT / "params" / name / f"{profile}.yaml"
        given = f"[{profile}.yaml](params/{name}/{profile}.yaml)" if parameters.exists() else "none"
        rows.append(f"| {asked.get(name) or results.title(name)} | [{name}]({where}){'' if ran else ', not run yet'} | {given} |")
    return "\n".join(["", *rows, "", ""])


def screenshot(profile: str) -> str:
    """The picture of the explorer that scripts/screenshot.py made of a profile's report, where it did."""
    picture = paths.outputs(profile) / "explore" / "screenshot.png"
    if not picture.exists():
        return "\n"
    alt = "The explorer: controls for trace, model, predictor, cache and disk; the speed with each kind of prefetch; the harm map with the predictor's place on it; the timeline of the last tokens."
    return f"\n![{alt}](outputs/{profile}/explore/screenshot.png)\n\n"


def benchmarks() -> str:
    """The tables that the commands under benchmarks/ measured, each with the machine it ran on."""
    parts = {path.stem: results.benchmark(path.stem, BENCHMARKS) for path in sorted(BENCHMARKS.glob("*.json"))}
    goal = [step_goal(parts["train_step"]["tables"])] if "train_step" in parts else []
    told = [part["markdown"].strip() + (beyond_peak(part["markdown"]) if name == "train_step" else "") for name, part in parts.items()]
    return "".join(f"\n{text.strip()}\n" for text in [*goal, *told]) + "\n"


def beyond_peak(table: str) -> str:
    """A footnote to the table of benchmarks/train_step.py where a row has more than all of the matrix-product peak; empty where none has."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line.startswith("|")]
    shares = [row[rows[0].index(PEAK)] for row in rows[2:]] if rows and PEAK in rows[0] else []
    beyond = [share for share in shares if share.rstrip("%").isdigit() and int(share.rstrip("%")) > 100]
    return (f"\n\n{' and '.join(beyond)} of the peak is no mistake in the row: what stands for the peak is the speed of one large square product, measured in turns with the steps, and "
            "a step's own products, of other shapes, can exceed that a little.") if beyond else ""  # fmt: skip


def step_goal(tables: Sequence[Mapping]) -> str:
    """Whether the training step reaches its goal in every row of benchmarks/train_step.py, and how much of it are matrix products."""
    ratios, shares = [], []
    for table in tables:
        speed = {row["name"]: row.get("tokens_per_second") for row in table["contenders"]}
        profile = table["profiles"]["ours"]
        ratios.append(speed["ours"] / speed[table["peer"]])
        shares.append(profile["matrix products"] / sum(profile.values()))
    reached = sum(ratio >= STEP_GOAL for ratio in ratios)
    verdict = "and is" if reached == len(ratios) else "and is not" if not reached else f"and is in {reached} of {len(ratios)} rows"
    return (f"The training step was meant to be {STEP_GOAL:g} times as fast as transformers' fastest implementation {verdict} ({_spread(ratios, '.2f')} times). "
            f"Matrix products, which any implementation has to do, are {_spread([100 * share for share in shares], '.0f')}% of its time.")  # fmt: skip


def _spread(values: Sequence[float], digits: str) -> str:
    """The smallest and the largest of them, once where they are written alike."""
    return " to ".join(dict.fromkeys(f"{value:{digits}}" for value in (min(values), max(values))))


def sources(*, large: bool = False) -> str:
    """The offline corpus, or what the large one has besides: domain, origin, licence and the package that ships it."""
    found = [s for s in corpora_large.OfflineLarge().sources if "Debian" in s.requirement] if large else corpora.Offline.sources
    rows = [f"| {s.domain} | {s.origin} | {s.licence} | {f'`{s.requirement}`' if s.requirement else 'Python itself'} |" for s in found]
    return "\n".join(["", "| domain | text | licence | from |", "|---|---|---|---|", *rows, "", ""])


def tiers() -> str:
    """The sizes: shape, parameters in all and active per token, and training tokens."""
    use = {"smoke": "a check that everything runs", "cpu": "the committed report, on two CPU cores",
           "b": "one GPU; the reference's tier B", "a": "one GPU; the reference's tier A"}  # fmt: skip
    rows = ["| tier | width | layers | experts, top-k | parameters, active | tokens | for |", "|---|---|---|---|---|---|---|"]
    for name, tier in config.TIERS.items():
        m, t, size = tier.model, tier.train, model.count_parameters(tier.model)
        tokens = t.steps * t.batch_size * m.context
        rows.append(f"| {name} | {m.hidden_size} | {m.num_layers} | {m.num_experts}, {m.top_k} | {size['total'] / 1e6:.3g}M, "
                    f"{size['active'] / 1e6:.3g}M | {tokens / 1e6:.3g}M | {use[name]} |")  # fmt: skip
    return "\n".join(rows) + "\n"
