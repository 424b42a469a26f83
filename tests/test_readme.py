"""README.md: its numbers are those of outputs/, and what it points at exists."""

import re
import shlex

import pytest

from predmoe import cli, config, paths, readme, results


def test_the_computed_parts_are_up_to_date():
    text = readme.README.read_text()
    assert text == readme.render(text), "README.md differs from what outputs/ gives: run `predmoe readme`"


def test_every_link_points_at_a_file_of_the_repository():
    links = re.findall(r"\]\(([^)#]+)\)", readme.README.read_text())
    assert links
    missing = [link for link in links if "://" not in link and not (paths.ROOT / link).exists()]
    assert not missing


def test_every_profile_is_named_and_one_that_few_notebooks_have_with_these():
    text = readme.README.read_text()
    for profile in paths.profiles():
        assert f"`{profile}`" in text and f"`{profile}`" in results.glossary(), profile
        having = sorted(path.parent.name for path in paths.PARAMS.glob(f"*/{profile}.yaml"))
        if 0 < len(having) < len(list(paths.PARAMS.iterdir())) // 2:
            assert f"`{profile}`, which {' and '.join(f'`{name}`' for name in having)} alone have" in text


def test_it_names_the_notebook_that_decides_a_claim():
    """As the committed results decide it (`claims.deciding`)."""
    told = re.findall(r"`([a-z-]+)`, which `(\d\d_\w+)`\s+decides", readme.README.read_text())
    decided, specs = {claim["id"]: claim["notebook"] for claim in results.load_claims("cpu")}, {spec["id"]: spec["notebook"] for spec in results.claim_specs()}
    assert told and {name: decided[name] for name, _ in told} == dict(told) and all("06_seeds" in specs[name] for name, _ in told)


def test_the_commands_for_many_gpus_are_ones():
    """Their options exist, and what is behind --set makes a configuration."""
    text = readme.DOCS.read_text() + readme.README.read_text().partition("### On GPUs")[2].partition("\n## ")[0]
    given = [command.split("  ")[0] for command in re.findall(r"predmoe (?:train|plan|gpu-report) [^`#\n]*", text)]
    assert len(given) >= 9
    for command in given:
        options = cli._parser().parse_args(shlex.split(command)[1:])
        if getattr(options, "changes", None):
            config.tier(options.tier, **cli.sections(options.changes))


def test_the_goal_of_the_training_step_is_judged_by_what_was_measured():
    def row(ours, peer, products):
        return {"peer": "p", "contenders": [{"name": "ours", "tokens_per_second": ours}, {"name": "p", "tokens_per_second": peer}, {"name": "q", "failed": "a CUDA kernel"}],
                "profiles": {"ours": {"matrix products": products, "the rest": 100.0 - products}}}  # fmt: skip

    missed, met = row(110.0, 100.0, 57.0), row(150.0, 100.0, 40.0)
    assert "and is not (1.10 times)" in readme.step_goal([missed]) and readme.step_goal([missed]).endswith("are 57% of its time.")
    assert "and is (1.50 times)" in readme.step_goal([met])
    assert "and is in 1 of 2 rows (1.10 to 1.50 times)" in readme.step_goal([missed, met]) and "are 40 to 57%" in readme.step_goal([missed, met])


def test_the_run_store_it_names_is_the_one_that_is_committed():
    """With PREDMOE_OUTPUTS elsewhere alone, a notebook would train again what is committed."""
    (named,) = set(re.findall(r"PREDMOE_STORE=\$PWD/(\S+?)`", readme.README.read_text()))
    assert any((paths.ROOT / named).glob("*/*.json"))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_benchmark_is_a_sentence_that_says_which_command_makes_it(tmp_path, monkeypatch, text):
    (tmp_path / "simulator.json").write_text(text)
    monkeypatch.setattr(readme, "BENCHMARKS", tmp_path)
    with pytest.raises(readme.results.ResultError, match="simulator.json is damaged: run benchmarks/simulator.py"):
        readme.benchmarks()


def test_the_table_links_what_is_executed_and_says_what_is_not(tmp_path, monkeypatch):
    """Questions stay as they are written, a notebook without one takes its title, and the state follows the files."""
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    (tmp_path / "cpu" / "01_mechanism").mkdir(parents=True)
    (tmp_path / "cpu" / "01_mechanism" / "01_mechanism.ipynb").write_text("{}")
    table = readme.figures("cpu", "| does it move? | [01_mechanism](anything), not run yet | x |\n")
    assert "| does it move? | [01_mechanism](outputs/cpu/01_mechanism/01_mechanism.ipynb) | [cpu.yaml](params/01_mechanism/cpu.yaml) |" in table
    assert "| How much weight? Predictability and quality by dose | [03_dose](notebooks/03_dose.ipynb), not run yet |" in table
    assert table.count("](params/") == len(list(paths.NOTEBOOKS.glob("*.ipynb")))
    done, missing = readme.state("cpu").split("still to be executed")
    assert done.startswith("1 of ") and "--only 01 00`" in done and "`03_dose`" in missing and "01_mechanism" not in missing


def test_a_lost_marker_is_an_error_that_names_it():
    with pytest.raises(readme.results.ResultError, match="<!-- benchmarks -->"):
        readme.render(readme.README.read_text().replace("<!-- benchmarks -->", ""))


def test_the_summary_is_the_first_sentence_of_each_answer_and_the_rest_follows_whole():
    found = readme.results.load("cpu", "00_report")["findings"]
    short, whole = readme.summary("cpu"), readme.answers("cpu")
    assert all(f"- {answer}" in whole for answer in found) and short.count("\n- **") == len(found)
    assert readme._first("**Does it?** Yes: +0.4 points. And more. ") == "**Does it?** Yes: +0.4 points." and readme._first("**Sure?** One sentence.") == "**Sure?** One sentence."


def test_a_share_above_the_peak_has_a_footnote_and_others_have_none():
    table = "| step | of the matrix-product peak | bound by |\n| --- | --- | --- |\n| one | 59% | x |\n| two | {}% | x (120%) |\n\nMeasured."
    assert readme.beyond_peak(table.format(103)).startswith("\n\n103% of the peak is no mistake") and readme.beyond_peak(table.format(100)) == "" == readme.beyond_peak("text")


def test_update_rewrites_what_has_changed_whole_or_not_at_all(tmp_path, monkeypatch):
    from pathlib import Path

    from predmoe.config import ConfigError

    text, docs = tmp_path / "README.md", tmp_path / "docs.md"
    text.write_text("old"), docs.write_text("same")
    monkeypatch.setattr(readme, "DOCS", docs)
    monkeypatch.setattr(readme, "render", lambda text: "new")
    monkeypatch.setattr(readme, "render_docs", lambda text: text)

    def full(path, *_, **__):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            readme.update(text)
    assert text.read_text() == "old" and sorted(tmp_path.iterdir()) == [text, docs]
    inode = docs.stat().st_ino
    assert readme.update(text) and not readme.update(text) and text.read_text() == "new" and docs.stat().st_ino == inode
