"""The paper: its numbers are generated, what is asked for exists, and results of several commits are refused."""

import copy
import json
import re

import pandas as pd
import pytest
import yaml
from paper_copy import change

from predmoe import cli, experiments, paper, paper_captions, paper_figures, paper_tables, paper_text, paths, results, tex
from predmoe.config import ConfigError

MAIN = (paper.FOLDER / "main.tex").read_text()
SPECS = yaml.safe_load((results.ASSETS / "claims.yaml").read_text())


def made(profile, found):
    """Every value of the paper for these results."""
    decided = paper_text.decide(found, SPECS)
    return paper_text.values(found, decided) | paper_tables.values(profile, found, decided) | paper_tables.sources(found) | paper_figures.conclusions(profile, found) | {"source.doubts": ""}, decided


@pytest.fixture(scope="module")
def committed():
    return paper.load("cpu")


@pytest.fixture(scope="module")
def told(committed):
    """The values of the committed results, and the claims as they decide them."""
    return made("cpu", committed)


# --- numbers ---------------------------------------------------------------------------------------------------------------

def test_no_number_is_typed_into_abstract_results_or_conclusion():
    assert paper.typed(MAIN) == []


@pytest.mark.parametrize("sentence", ["It gains 3.4 points.", "It gains three points.", r"\val{say.effect} by 2\%", "$p=0.04$"])
@pytest.mark.parametrize("place", [r"\begin{abstract}", "% --- results begin ---", r"\section{Conclusion}"])
def test_a_typed_number_is_found_wherever_it_stands(place, sentence):
    (only,) = paper.typed(MAIN.replace(place, f"{place}\n{sentence}"))
    assert re.search(r"\d|three", only)


def test_a_part_that_cannot_be_found_is_an_error():
    with pytest.raises(ConfigError, match="results end"):
        paper.typed(MAIN.replace("% --- results end ---", ""))


def test_every_name_exists_whatever_has_been_run(told):
    """Otherwise main.tex would build today and break when the next experiment is run, or the other way round."""
    assert made("cpu", {})[0].keys() == told[0].keys()


def test_what_has_not_been_run_says_so_and_has_no_number():
    values, _ = made("cpu", {})
    assert values["say.effect"] == values["claim.ranking-gain.measured"] == r"\notrun{02_horizons}" and values["findings.07_controls"] == r"\notrun{07_controls}"
    assert "[0" not in values["table.headline"] and values["table.headline"].count(r"\notrun") == sum(spec["headline"] for spec in SPECS)
    assert "not run yet" in values["table.provenance"] and values["table.effects"] == r"\multicolumn{5}{c}{\notrun{02_horizons}} \\"


@pytest.mark.parametrize("asked, said", [
    (r"\claim{no-such-claim}{verdict}", "claim 'no-such-claim'"), (r"\claim{ranking-gain}{colour}", "value 'claim.ranking-gain.colour'"), (r"\val{say.nothing}", "value 'say.nothing'"),
    (r"\ifrun{99_nothing}{a}{b}", "experiment '99_nothing'"), (r"\findings{99_nothing}", "findings.99_nothing"), (r"\figref{nothing}", "figure 'nothing'"),
])  # fmt: skip
def test_what_does_not_exist_is_named(told, asked, said):
    values, decided = told
    paper.check(MAIN, values, decided)
    with pytest.raises(ConfigError, match="asks for what does not exist: .*" + re.escape(said)):
        paper.check(MAIN.replace("% --- results begin ---", "% --- results begin ---\n" + asked), values, decided)


def test_every_figure_that_is_drawn_is_shown_and_every_experiment_has_its_place():
    assert set(re.findall(r"^\\resultfigure\{(\w+)\}", MAIN, flags=re.MULTILINE)) == set(paper_figures.FIGURES)
    assert set(paper_text.EXPERIMENTS) >= {path.stem for path in paths.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")} - {"00_report"}
    told = set(re.findall(r"(?:findings|ifrun)\{(\d\w+)\}", MAIN)) | {name for name, _ in paper_text.DETAILS.values()}
    assert told == set(paper_text.EXPERIMENTS)


def test_single_sentences_are_found_in_the_committed_results(committed, told):
    """A notebook whose words change loses its sentence in the paper: the list of beginnings must follow."""
    lost = [key for key, (name, _) in paper_text.DETAILS.items() if name in committed and "notreported" in told[0][key]]
    assert not lost
    cut = [key for key, (name, _) in paper_text.DETAILS.items() if name in committed and not re.search(r"[.)]$", told[0][key])]
    assert not cut   # whole sentences, though a pattern may hold a group


def test_what_it_costs_follows_the_arms_that_the_tables_are_made_of(committed):
    found = copy.deepcopy(committed)
    for row in found[experiments.primary(found)]["arms"]:
        row["val_loss"] *= 1.1 if row["arm"] == "joint" else 1
    decided = paper_text.decide(found, SPECS)
    before, after = (paper_text.values(these, decided)["say.cost"] for these in (committed, found))
    assert "passes" in before and "fails" in after and float(re.search(r"loss \+([\d.]+)", after)[1]) == pytest.approx(10, abs=0.5)


def test_one_seed_is_one_seed_and_the_scale_is_computed(committed):
    found = {name: copy.deepcopy(committed[name]) for name in ("02_horizons", "05_cache_simulation")}
    for result in found.values():
        result["arms"] = [row for row in result["arms"] if row["seed"] == 0]
    found["02_horizons"]["provenance"]["parameters"]["seeds"] = [0]
    values = paper_text.values(found, [])
    assert values["seeds"] == "1 seed" and not [key for key, text in values.items() if re.search(r"\b1[ ~]seeds", text)] and "single seed" in values["say.price"]
    assert float(values["scale.parameters"]) < 0.1 and float(values["scale.tokens"]) < 0.5
    found["02_horizons"]["provenance"]["parameters"]["tier"] = "a"
    large = paper_text.values(found, [])
    assert large["scale.parameters"] == large["scale.tokens"] == "1"


def test_the_direction_of_a_sentence_follows_the_data(committed, told):
    """With the two arms exchanged, what was raised is lowered: no verb is typed."""
    found = copy.deepcopy(committed)
    for row in found[experiments.primary(found)]["arms"]:
        row["arm"] = {"joint": "baseline", "baseline": "joint"}.get(row["arm"], row["arm"])
    before, after = told[0], paper_text.values(found, told[1])
    for key in ("say.effect", "say.linear", "say.free"):
        assert "raises" in before[key] and "lowers" not in before[key] and "lowers" in after[key] and "raises" not in after[key]
    assert before["say.worth"] == after["say.worth"]   # another experiment
    if "say.smaller" in before and (signs := re.findall(r"it is ([^;]*) points", before["say.smaller"])):   # of which experiment the sign is said, so that two that disagree are seen to
        assert signs[0].count("+") == len(signs[0].split("/")) and before["say.smaller"] == after["say.smaller"]


@pytest.mark.parametrize("text, said", [(None, "has no claims.json yet: run 00_report"), ("[1,", "is damaged"), ("[1, 2]", "run 00_report again"), ("{}", "it holds a dict")])
def test_claims_that_are_missing_and_claims_that_are_damaged_are_told_apart(tmp_path, monkeypatch, text, said):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    (tmp_path / "cpu").mkdir()
    if text is not None:
        (tmp_path / "cpu" / "claims.json").write_text(text)
    (told,) = paper.behind("cpu", [])
    assert said in told and told.endswith("(the paper follows the results)") and ("has no claims.json" in told) == (text is None)


def test_the_committed_claims_are_those_that_the_results_give(told):
    assert paper.behind("cpu", told[1]) == []


def test_a_claim_of_several_parts_has_a_line_for_each_and_its_unit_once(told):
    whole = next(claim for claim in told[1] if claim["id"] == "dose-response")
    lines = paper_tables.claims([whole]).split(r" \\ ")
    assert len(lines) == 1 + len(whole["parts"]) and all(part["name"] in line for part, line in zip(whole["parts"], lines[1:]))
    assert max(line.count(r"\mbox{[") for line in lines) <= 3   # one effect per horizon: no cell that fills a page
    counted = paper_tables.claims([whole], parts=False)
    assert counted.count(r"\\") == 1 and f"of {len(whole['parts'])} parts" in counted and r"\mbox{[" not in counted


@pytest.mark.parametrize("measured, set_", [
    ("+1.2 points [+0.7, +1.7] / -2.0 points [-3.0, -1.0] at h = 1 / 2 (5 seeds)", r"+1.2 \mbox{[+0.7, +1.7]} / $-$2.0 \mbox{[$-$3.0, $-$1.0]} points at $h=1/2$ (5~seeds)"),
    ("+0.1 points [+0.0, +0.2] (3 seeds)", r"+0.1~points \mbox{[+0.0, +0.2]} (3~seeds)"), ("+0.1 points (single seed) / +0.2 points (single seed) at h = 1 / 2 (1 seed)",
     r"+0.1 (single seed) / +0.2 (single seed) points at $h=1/2$ (1~seed)"),
])  # fmt: skip
def test_a_unit_that_repeats_is_said_once(measured, set_):
    assert paper_tables.compact(measured) == set_


@pytest.mark.parametrize("p, said", [(None, "--"), (0.0004, "$<$0.001"), (0.0006, "0.001"), (0.5, "0.500")])
def test_no_p_value_is_zero(p, said):
    assert paper_tables._p(p) == said


def test_what_differs_in_size_alone_is_counted_and_what_else_is_partly_replicated_is_listed(told):
    held = [claim for claim in told[1] if claim["verdict"] == "partly"]
    listed = re.findall(r"claim\.([\w-]+)\.why", paper_tables.partly(told[1]))
    sizes = [claim for claim in held if claim["id"] not in listed]
    assert f"Of the {len(held)} claims that are partly replicated {len(sizes)} hold" in paper_tables.partly(told[1])
    assert all("differs more than twofold" in claim["why"] for claim in sizes) and all("partly replicated (size" in paper_tables.claims([claim]) for claim in sizes)


def test_many_findings_are_a_list_and_few_are_running_text(committed, told):
    found = copy.deepcopy(committed)
    found["03_dose"]["findings"] = [f"It is {word}." for word in ("so", "thus", "true", "right")]
    many = made("cpu", found)[0]["findings.03_dose"]
    assert many.count(r"\item ") == 4 and "itemize" not in told[0]["findings.03_dose"] and r"\item" not in told[0]["findings.03_dose"]


def test_the_abstract_names_what_has_not_been_run(committed, told):
    missing = [words for name, words in paper_text.EXPERIMENTS.items() if name not in committed]
    assert all(words in told[0]["status"] for words in missing) and r"\val{status}" in MAIN.partition(r"\end{abstract}")[0]
    assert "not yet" in made("cpu", {})[0]["status"]


def test_a_caption_begins_with_what_its_figure_shows(committed, told):
    """Computed from what is drawn: with the two arms exchanged the sign turns; what is not drawn has none."""
    found = copy.deepcopy(committed[experiments.primary(committed)])
    before = paper_captions.summary(found, None)
    for row in found["arms"]:
        row["arm"] = {"joint": "baseline", "baseline": "joint"}.get(row["arm"], row["arm"])
    after = paper_captions.summary(found, None)
    assert re.findall(r"[+-][\d.]+", before) == [("-" if sign == "+" else "+") + size for sign, size in re.findall(r"([+-])([\d.]+)", after)][::-1]
    drawn = {name for name in paper_figures.FIGURES if paper_figures.alternative(name, committed)}
    assert {name for name in paper_figures.FIGURES if told[0][f"shows.{name}"]} == drawn


# --- where results come from -------------------------------------------------------------------------------------------------

def test_results_of_one_clean_commit_raise_no_doubt(committed):
    one = copy.deepcopy(committed)
    for result in one.values():
        result["provenance"] |= {"commit": "c" * 40, "dirty": False}
    assert paper.mixture(one) == []


@pytest.mark.parametrize("edit, said", [
    (lambda r: r["provenance"].update(dirty=True), "02_horizons was run on changed code"), (lambda r: r["provenance"].update(dirty=None), "02_horizons was run on code outside a git checkout"),
    (lambda r: r["provenance"].update(commit="f" * 40), "commits are mixed: .*02_horizons at ffffffffff"),
    (lambda r: next(iter(r["provenance"]["runs"].values()))["provenance"].update(dirty=True), "02_horizons reads 1 models trained on changed code"),
])  # fmt: skip
def test_dirty_or_mixed_results_are_refused_by_name_unless_told_otherwise(copied, edit, said):
    folder, target = copied
    change(folder, "02_horizons", edit)
    with pytest.raises(ConfigError, match=said + ".*--any-commit"):
        paper.write("cpu", target, figures=False)
    assert not (target / "numbers.tex").exists()
    notes = paper.write("cpu", target, any_commit=True, figures=False)
    assert any(re.search(said, note) for note in notes) and re.search("not of one clean commit:.*" + said.replace("_", r"\\_"), (target / "numbers.tex").read_text())


@pytest.mark.parametrize("harm, said", [
    (lambda cpu, paper: (cpu / "04_isolation" / "six_arms.csv").unlink(), "^six_arms.csv of 04_isolation is missing: run the notebook again$"),
    (lambda cpu, paper: (cpu / "04_isolation" / "six_arms.csv").write_text(""), "six_arms.csv of 04_isolation is damaged"),
    (lambda cpu, paper: (cpu / "03_dose" / "doses.csv").write_text("arm,dose,seed,horizon\nboth,1,0,1\n"), "the tables of 03_dose do not make its figure dose .*: run the notebook again"),
    (lambda cpu, paper: (cpu / "06_seeds" / "results.json").rename(cpu / "06_seeds" / "06_seeds.ipynb"), "06_seeds of profile cpu has an executed notebook and no results.json"),
    (lambda cpu, paper: change(cpu, "06_seeds", lambda r: [row["hit"].pop("ranking") for row in r["arms"]]), "06_seeds of profile cpu.*ranking.*: run the notebook again"),
    (lambda cpu, paper: (cpu / "08_latency_sensitivity" / "bandwidth.csv").write_text("a,b\n1,2\n"), "08_latency_sensitivity of profile cpu lacks what the paper says of it .at its fits: .*: run the notebook again"),
    (lambda cpu, paper: change(cpu, "06_seeds", lambda r: r["arms"][0]["hit"]["ranking"].update({"1": float("nan")})), "^results.json of 06_seeds is damaged .it holds NaN, which is not a finite number.: run the notebook again$"),
    (lambda cpu, paper: change(cpu, "03_dose", lambda r: r["provenance"].update(hardware={})), "03_dose of profile cpu lacks what the paper says of it .at its sources: KeyError.'cpu'"),
    (lambda cpu, paper: change(cpu, "06_seeds", lambda r: r["findings"].append("A 中 sign.")), "06_seeds of profile cpu: no LaTeX is known for the character '中'"),
    (lambda cpu, paper: (paper / "references.bib").open("a").write("@misc{doe2024none,\n  title = {{None}},\n}\n"), "references.bib: doe2024none has an entry and is never cited"),
])  # fmt: skip
def test_what_is_lost_or_damaged_is_named_before_anything_is_written(copied, harm, said):
    harm(*copied)
    with pytest.raises(ConfigError, match=said):
        paper.write("cpu", copied[1], any_commit=True)
    assert {path.name for path in copied[1].iterdir()} == {"main.tex", "references.bib"}


def without(result, arm, seed):
    result["arms"] = [row for row in result["arms"] if (row["arm"], row["seed"]) != (arm, seed)]


@pytest.mark.parametrize("experiment, arm, seed, said", [
    ("06_seeds", "joint", 2, "06_seeds lacks joint, seed 2"), ("06_seeds", "baseline", 0, "06_seeds lacks baseline, seed 0"), ("03_dose", "both 0.1", 0, "03_dose lacks both 0.1"),
    ("10_olmoe_lora", "stock", 0, "10_olmoe_lora lacks stock"), ("11_engine", "joint-oracle", 1, "11_engine lacks joint-oracle, seed 1"),
    ("05_cache_simulation", "joint-ranking", 1, "05_cache_simulation lacks joint-ranking, seed 1"),
])  # fmt: skip
def test_a_result_that_lacks_one_model_is_refused_by_name(copied, experiment, arm, seed, said):
    """Otherwise its effects would be worked out over the seeds that are left."""
    before = json.loads((copied[0] / experiment / "results.json").read_text())["arms"]
    change(copied[0], experiment, lambda r: without(r, arm, seed))
    assert len(json.loads((copied[0] / experiment / "results.json").read_text())["arms"]) == len(before) - 1
    with pytest.raises(ConfigError, match=f"results of profile cpu are not whole, .*: {said}: run the notebook again"):
        paper.write("cpu", copied[1], any_commit=True)
    assert {path.name for path in copied[1].iterdir()} == {"main.tex", "references.bib"}


def test_every_row_of_the_committed_results_would_be_missed(committed):
    for name, result in committed.items():
        for i, row in enumerate(result["arms"]):
            assert paper.missing_rows(result | {"arms": result["arms"][:i] + result["arms"][i + 1 :]}), (name, row["arm"], row["seed"])
        assert paper.missing_rows(result) == [], name


def test_an_unknown_profile_is_told_with_those_that_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    assert cli.main(["paper", "--profile", "nope", "--no-pdf"]) == 2
    assert re.fullmatch(r"predmoe: unknown profile 'nope'; there are parameters for cpu, .*smoke.*\n", capsys.readouterr().err)


def test_a_profile_without_results_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    assert cli.main(["paper", "--profile", "cpu", "--no-pdf"]) == 2
    assert capsys.readouterr().err == "predmoe: profile cpu has no results for a paper: run `predmoe report --profile cpu` first\n"


# --- words and figures -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, set_", [
    ("-0.3 points [-1.5, +1.4]", r"$-$0.3~points \mbox{[$-$1.5, +1.4]}"), ("at h = 4, hit@k", "at $h=4$, hit@$k$"), ("5% of a_b & c", r"5\% of a\_b \& c"), ("run 02_horizons", r"run \code{02\_horizons}"),
    ("a - b, 1e-8", "a $-$ b, 1e-8"), ("+0.02 +- 0.01", r"+0.02 $\pm$ 0.01"), ("**so** it is", r"\textbf{so} it is"), ("at h = 1 / 2 / 4", "at $h=1/2/4$"),
])  # fmt: skip
def test_sentences_are_set_as_a_paper_sets_them(text, set_):
    assert tex.prose(text) == set_


def test_a_glyph_that_might_be_lost_is_an_error_and_accents_are_not():
    assert tex.escape("Kydlíček") == r"Kydl\'{\i}\v{c}ek"
    assert tex.escape("βΩ λ µ") == r"$\beta$$\Omega$ $\lambda$ $\mu$"
    for lost in ("中", "Α", "ο"):   # the last two are Greek and look Latin
        with pytest.raises(ConfigError, match=f"U\\+{ord(lost):04X}"):
            tex.escape(lost)


def test_a_figure_that_cannot_be_drawn_leaves_the_old_ones(committed, tmp_path, monkeypatch):
    (tmp_path / "old.pdf").write_text("old")
    monkeypatch.setattr(paper_figures, "FIGURES", {"fit": paper_figures.FIGURES["fit"]})
    monkeypatch.setattr(results, "load_table", lambda *_: pd.DataFrame({"half": []}))
    with pytest.raises(ConfigError, match="the tables of 05_cache_simulation do not make its figure engine_fit"):
        paper_figures.write("cpu", committed, tmp_path)
    assert (tmp_path / "old.pdf").read_text() == "old"


def test_figures_are_redrawn_to_the_same_bytes_with_words_for_who_cannot_see_them(committed, tmp_path, monkeypatch):
    monkeypatch.setattr(paper_figures, "FIGURES", {name: paper_figures.FIGURES[name] for name in ("summary", "fit", "dose")})
    first = paper_figures.write("cpu", committed, tmp_path / "a")
    paper_figures.write("cpu", committed, tmp_path / "b")
    assert set(first) == {name for name in ("summary", "fit", "dose") if paper_figures.FIGURES[name].of(committed)} and all(len(alt) > 40 for alt in first.values())
    for name in first:
        pdf = (tmp_path / "a" / f"{name}.pdf").read_bytes()
        assert pdf == (tmp_path / "b" / f"{name}.pdf").read_bytes() and b"/Type3" not in pdf
