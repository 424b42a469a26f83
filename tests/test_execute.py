import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from predmoe import execute, paths, strict
from predmoe.config import ConfigError

PARAMETERS = """\
profile = "smoke"           # which outputs folder is written
lambda_pred = 0.3           # weight of the prediction loss
seeds = [0]                 # initialisation seeds
# dose ladder,
# in order
lambdas = [
    0.0,
    0.1,
]
tier = "smoke"              # size of the model
resume = True               # carry on a broken run
steps = 100                 # optimiser steps
limit = None                # at most so many documents
disk = {"latency_ms": 0.1, "gb_per_s": 5.0}   # the simulated disk
offset = -1                 # a negative literal
"""


@pytest.fixture
def notebook(house):
    return house.notebook("02_horizons", PARAMETERS, "print(lambda_pred, seeds)")


# --- the parameters cell -----------------------------------------------------------------------------------------------

def test_the_parameters_cell_is_read_without_running_it(notebook):
    assert execute.inspect(notebook) == {
        "profile": "smoke", "lambda_pred": 0.3, "seeds": [0], "lambdas": [0.0, 0.1], "tier": "smoke", "resume": True, "steps": 100,
        "limit": None, "disk": {"latency_ms": 0.1, "gb_per_s": 5.0}, "offset": -1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "line", ["x = 1 + y", "import os", "x = list()", "a = b = 1", "x += 1", "a, b = 1, 2", "print('x')", "x[0] = 1", "x: int = 1"]
)
def test_anything_but_a_literal_is_refused(house, line):
    with pytest.raises(ConfigError, match="line 2 .* is not a name and a literal value"):
        execute.inspect(house.notebook("01_x", f"steps = 1  # steps\n{line}  # comment"))


def test_a_parameter_needs_its_own_comment(house):
    with pytest.raises(ConfigError, match="parameter steps has no comment"):
        execute.inspect(house.notebook("01_x", "seed = 0  # the seed\nsteps = 1\n"))
    with pytest.raises(ConfigError, match="parameter tag has no comment"):
        execute.inspect(house.notebook("01_x", "tag = '# not a comment'\n"))


def test_a_parameter_is_defined_once(house):
    with pytest.raises(ConfigError, match="steps is defined twice"):
        execute.inspect(house.notebook("01_x", "steps = 1  # steps\nsteps = 2  # steps\n"))


def test_exactly_one_cell_is_tagged(house):
    with pytest.raises(ConfigError, match="01_none.ipynb has 0 cells tagged"):
        execute.inspect(house.notebook("01_none", None, "x = 1"))
    path = house.notebook("01_two", "x = 1  # x", "y = 1")
    two = nbformat.read(path, as_version=4)
    two.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(two, path)
    with pytest.raises(ConfigError, match="has 2 cells tagged"):
        execute.inspect(path)


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no notebook .*absent.ipynb"):
        execute.inspect(tmp_path / "absent.ipynb")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(ConfigError, match="text.ipynb is not a notebook"):
        execute.inspect(tmp_path / "text.ipynb")


# --- strictness --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "text, said",
    [
        ("lambda_predd: 0.3", "no parameter 'lambda_predd'; did you mean lambda_pred\\? its parameters cell has profile, lambda_pred, seeds,"),
        ("zzz: 1", "no parameter 'zzz'; its parameters cell has"),
        ("lambda_pred: 3e-1", "lambda_pred='3e-1' is str, not float like its default 0.3; YAML reads 3e-1 as text: write 3.0e-1, without quotes"),
        ("lambda_pred: '0.3'", "it was given in quotes: write 0.3 without them"),
        ("lambda_pred: 'inf'", "lambda_pred='inf' is str, not float like its default 0.3$"),
        ("steps: '200'", "steps='200' is str, not int like its default 100; it was given in quotes: write 200 without them"),
        ("lambda_pred: high", "lambda_pred='high' is str, not float like its default 0.3$"),
        ("lambda_pred: null", "lambda_pred=None is NoneType, not float"),
        ("lambda_pred: true", "lambda_pred=True is bool, not float"),
        ("seeds: 0", "seeds=0 is int, not list"),
        ("seeds: [0, '1']", r"seeds\[1\]='1' is str, not int"),
        ("seeds: [0.5]", r"seeds\[0\]=0.5 is float, not int"),
        ("lambdas: [0.1, 1e-1]", r"lambdas\[1\]='1e-1' is str, not float .* write 1.0e-1"),
        ("tier: 1", "tier=1 is int, not str"),
        ("resume: 1", "resume=1 is int, not bool"),
        ("steps: 1.0", "steps=1.0 is float, not int"),
        ("disk: {latency: 0.2}", "disk has no entry latency; it has latency_ms, gb_per_s"),
        ("disk: {latency_ms: fast}", r"disk\['latency_ms'\]='fast' is str, not float"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused(notebook, text, said):
    with pytest.raises(ConfigError, match=f"02_horizons.ipynb.*{said}"):
        execute.check(notebook, yaml.safe_load(text))


def test_what_fits_replaces_the_defaults(notebook):
    checked = execute.check(notebook, yaml.safe_load("{lambda_pred: 1, lambdas: [0, 2.5e-1], seeds: [], disk: {latency_ms: 2}}"))
    assert checked == execute.inspect(notebook) | {"lambda_pred": 1.0, "lambdas": [0.0, 0.25], "seeds": [], "disk": {"latency_ms": 2.0}}
    assert type(checked["lambda_pred"]) is float and type(checked["lambdas"][0]) is float


def test_a_default_without_a_type_is_not_checked_and_says_so(notebook):
    with pytest.warns(UserWarning, match="limit='many' is not checked, since its default None does not tell a type"):
        assert execute.check(notebook, {"limit": "many"})["limit"] == "many"


def test_changes_to_a_section_of_the_configuration_pass_without_a_word(house, recwarn):
    """The configuration itself refuses what is wrong in them."""
    notebook = house.notebook("10_x", 'train = {}  # changes\nstock = {"model": {}}  # of the stock model\nlimits = {}  # of some kind')
    changes = {"train": {"steps": 40}, "stock": {"model": {"num_experts": 64}}}
    assert execute.check(notebook, changes) == changes | {"limits": {}}
    assert not recwarn.list
    with pytest.warns(UserWarning, match="limits=.* is not checked"):
        execute.check(notebook, {"limits": {"low": 1}})
    with pytest.raises(ConfigError, match="train='40' is str, not dict"):
        execute.check(notebook, {"train": "40"})


@given(st.sampled_from(["3e-1", "1e5", "2E+3", "1e10", "-4e-2", "0.3", "1.5e3", "+7e1"]) | st.floats(allow_nan=False, allow_infinity=False).map(repr))
def test_the_advised_spelling_is_a_number_to_yaml(text):
    advised = strict.number_hint(text, float).split("write ")[1].removesuffix(", without quotes").removesuffix(" without them")
    assert yaml.safe_load(advised) == float(text)


# --- execution ---------------------------------------------------------------------------------------------------------

def texts(path):
    return "".join(output.get("text", "") for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", []))


def test_the_kernel_is_this_interpreter_whatever_is_registered(house, monkeypatch):
    wrong = house.root / "jupyter" / "kernels" / "python3"
    wrong.mkdir(parents=True)
    (wrong / "kernel.json").write_text(json.dumps({"argv": ["/nonexistent/python"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(house.root / "jupyter"))
    notebook = house.notebook("01_x", "rate = 0.5  # a rate\nname = 'a'  # a name", "import sys; print(sys.executable, rate, name)")
    out = execute.execute(notebook, house.root / "deep" / "01_x.ipynb", {"rate": 2})
    assert texts(out).split() == [sys.executable, "2.0", "a"]
    assert str(house.root) not in json.dumps(nbformat.read(out, as_version=4).metadata), "the executed copy names a folder of this machine"
    assert sorted(path.name for path in out.parent.iterdir()) == ["01_x.ipynb"]
    assert os.environ["JUPYTER_PATH"] == str(house.root / "jupyter")


def test_a_failing_cell_leaves_the_last_good_copy(house):
    out = house.root / "out" / "01_x.ipynb"
    notebook = house.notebook("01_x", "x = 0  # divisor", "print('before')", "1 / x")
    out.parent.mkdir()
    out.write_text("the last good copy")
    with pytest.raises(execute.NotebookFailed, match=r"01_x.ipynb: cell \[3\] raised ZeroDivisionError: division by zero .*01_x.failed.ipynb"):
        execute.execute(notebook, out)
    assert out.read_text() == "the last good copy"
    assert "before" in texts(out.with_name("01_x.failed.ipynb"))
    execute.execute(notebook, out, {"x": 1})
    assert sorted(path.name for path in out.parent.iterdir()) == ["01_x.ipynb"]


def test_a_kernel_that_dies_is_a_failure_with_a_sentence(house):
    notebook = house.notebook("01_x", "x = 0  # x", "import os; os._exit(1)")
    with pytest.raises(execute.NotebookFailed, match="01_x.ipynb: Kernel died .*out of memory"):
        execute.execute(notebook, house.root / "out.ipynb")


def test_a_wrong_parameter_runs_nothing(house):
    notebook = house.notebook("01_x", "x = 0  # x", "1 / 0")
    with pytest.raises(ConfigError, match="did you mean x"):
        execute.execute(notebook, house.root / "out" / "01_x.ipynb", {"xx": 1})
    assert not (house.root / "out").exists()


def test_papermill_as_it_stands_runs_from_any_working_directory(house):
    notebook = house.notebook("02_horizons", PARAMETERS, "import predmoe.paths; print(lambda_pred, seeds, predmoe.paths.ROOT)")
    house.params("02_horizons", "cpu", "lambda_pred: 1.0e-1\nseeds: [0, 1, 2]\n")
    command = [sys.executable, "-m", "papermill", str(notebook), "out.ipynb", "-f", str(house.root / "params/02_horizons/cpu.yaml"), "-y", "seeds: [0]"]
    elsewhere = house.root / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(command, cwd=elsewhere, check=True, capture_output=True)
    assert texts(elsewhere / "out.ipynb").split() == ["0.1", "[0]", str(paths.ROOT)]


# --- a whole profile ---------------------------------------------------------------------------------------------------

@pytest.fixture
def three(house, monkeypatch):
    """Notebooks 00, 01 and 02, and a stand-in for the execution, which is tested above: it notes what ran, and fails where told to."""
    house.notebook("00_report", 'profile = "smoke"  # profile')
    house.notebook("01_mechanism", 'profile = "smoke"  # profile\nsteps = 1  # steps')
    house.notebook("02_horizons", "steps = 1  # steps")
    house.ran, house.broken = [], set()

    def stand_in(notebook, out, params, stdout=None):
        house.ran.append((notebook.stem, params))
        if notebook.stem in house.broken:
            raise execute.NotebookFailed(f"{notebook.name}: cell [2] raised ValueError: no")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(notebook.read_text())
        (out.parent / "results.json").write_text(json.dumps(params))

    monkeypatch.setattr(execute, "execute", stand_in)
    house.lines = []

    def run(profile="smoke", only=(), **options):
        house.ran.clear(), house.lines.clear()
        failures = execute.run(execute.plan(profile, only), say=house.lines.append, **options)
        return [name for name, _ in house.ran], failures

    house.run = run
    return house


def test_notebooks_run_in_order_with_the_report_last_and_only_once(three):
    assert three.run() == (["01_mechanism", "02_horizons", "00_report"], {})
    assert three.ran == [("01_mechanism", {"profile": "smoke"}), ("02_horizons", {}), ("00_report", {"profile": "smoke"})]
    assert three.run() == ([], {})
    assert all("up to date" in line for line in three.lines) and len(three.lines) == 3
    assert three.run(only=["02"], force=True)[0] == ["02_horizons"]


@pytest.mark.parametrize("only, names", [(["2"], ["02_horizons"]), (["02"], ["02_horizons"]), (["0", "1"], ["01_mechanism", "00_report"]), (["02_horizons", "2"], ["02_horizons"])])
def test_a_notebook_is_named_by_its_number_with_or_without_the_zero(three, only, names):
    assert [job.name for job in execute.plan("smoke", only)] == names


@pytest.mark.parametrize("name", ["", "002", "2_", "0_horizons", "ex", "²"])
def test_what_is_neither_a_name_nor_a_number_is_unknown(three, name):
    with pytest.raises(ConfigError, match=f"unknown notebook '{name}'; there are "):
        execute.plan("smoke", [name])


def test_a_notebook_that_takes_long_says_what_it_printed_last(house, monkeypatch):
    """The real thing: what a cell prints comes from the kernel while the cell runs."""
    monkeypatch.setattr(execute.progress, "LOG_SECONDS", 0.05)
    told, notebook = [], """
        import pathlib, time
        print("baseline, seed 0: step 25/1000, loss 5.5")
        while not pathlib.Path({!r}).exists():
            time.sleep(0.02)
    """.format(str(house.root / "heard"))
    house.notebook("02_horizons", "steps = 1  # steps", notebook)

    def say(line):
        told.append(line)
        if "loss 5.5" in line:
            (house.root / "heard").touch()

    assert execute.run(execute.plan("smoke"), say=say) == {}
    assert re.fullmatch(r"\[1/1\] 02_horizons: \d+ s so far; baseline, seed 0: step 25/1000, loss 5\.5", told[-2]) and "executed in" in told[-1]
    printed = texts(house.outputs / "smoke" / "02_horizons" / "02_horizons.ipynb")
    assert printed == "baseline, seed 0: step 25/1000, loss 5.5\n"   # heard, and not taken away


@pytest.mark.parametrize("content", ["", "{", '{"cells": [], "nbformat": 5}'])
def test_an_executed_copy_that_is_damaged_is_made_again(three, content):
    three.run()
    (three.outputs / "smoke" / "02_horizons" / "02_horizons.ipynb").write_text(content)
    assert three.run(only=["02"])[0] == ["02_horizons"] and three.lines == ["[1/1] 02_horizons: running (its executed copy is damaged)", three.lines[-1]]


def test_results_that_another_execution_wrote_are_made_again(three):
    three.run()
    (three.outputs / "smoke" / "02_horizons" / "results.json").write_text(json.dumps({"steps": 9}))   # as papermill with other parameters does
    assert three.run()[0] == ["02_horizons"] and "[2/3] 02_horizons: running (results.json is of another execution)" in three.lines
    (three.outputs / "smoke" / "01_mechanism" / "executed.json").write_text('{"seconds": ')
    assert three.run()[0] == ["01_mechanism"] and "[1/3] 01_mechanism: running (executed.json is damaged)" in three.lines


def test_what_changed_runs_again_and_the_report_after_it(three):
    three.run()
    three.params("02_horizons", "smoke", "steps: 5")
    assert three.run()[0] == ["02_horizons", "00_report"]
    assert "[2/3] 02_horizons: running (parameters changed)" in three.lines and "[3/3] 00_report: running (results changed)" in three.lines
    three.notebook("01_mechanism", "steps = 2  # fewer steps")
    assert three.run()[0] == ["01_mechanism", "00_report"]


def test_a_change_of_the_package_runs_everything_again(three, monkeypatch, tmp_path):
    package = tmp_path / "package"
    (package / "assets").mkdir(parents=True)
    for name in ("execute.py", "model.py", "cli.py"):
        (package / name).write_text("1")
    monkeypatch.setattr(execute, "__file__", str(package / "execute.py"))
    three.run()
    (package / "cli.py").write_text("the command line changes no result")
    assert three.run()[0] == []
    (package / "model.py").write_text("2")
    assert three.run()[0] == ["01_mechanism", "02_horizons", "00_report"]
    (package / "assets" / "ranks").write_text("2")
    assert three.run()[0] == ["01_mechanism", "02_horizons", "00_report"]


def test_a_failure_stops_only_what_sums_up(three):
    three.broken = {"01_mechanism"}
    ran, failures = three.run()
    assert ran == ["01_mechanism", "02_horizons"] and list(failures) == ["01_mechanism", "00_report"]
    assert "cell [2] raised ValueError: no" in failures["01_mechanism"] and "waits for 01_mechanism" in failures["00_report"]
    three.broken = set()
    assert three.run() == (["01_mechanism", "00_report"], {}), "the next call goes on where this one stopped"


def test_a_notebook_without_parameters_for_the_profile_is_skipped(three):
    three.params("02_horizons", "cpu", "steps: 7")
    assert three.run("cpu") == (["02_horizons", "00_report"], {})
    assert three.ran == [("02_horizons", {"steps": 7}), ("00_report", {"profile": "cpu"})]
    assert "[1/3] 01_mechanism: skipped, there is no params/01_mechanism/cpu.yaml" in three.lines


def test_every_parameter_is_checked_before_anything_runs(three):
    three.params("02_horizons", "smoke", "stepps: 7")
    with pytest.raises(ConfigError, match=r"smoke.yaml: 02_horizons.ipynb has no parameter 'stepps'; did you mean steps\?"):
        three.run()
    three.params("02_horizons", "smoke", "steps: [7")
    with pytest.raises(ConfigError, match="smoke.yaml is not YAML"):
        three.run()
    three.params("02_horizons", "smoke", "- steps")
    with pytest.raises(ConfigError, match="smoke.yaml holds a list; it needs"):
        three.run()
    assert three.ran == []


def test_unknown_profile_and_notebook_are_named_with_what_there_is(three):
    three.params("02_horizons", "cpu", "steps: 7")
    with pytest.raises(ConfigError, match="unknown profile 'gpu'; there are parameters for cpu, smoke"):
        three.run("gpu")
    with pytest.raises(ConfigError, match="unknown notebook '03'; there are 01_mechanism, 02_horizons, 00_report"):
        three.run(only=["03"])


def test_a_file_of_parameters_for_another_profile_than_its_name_says_is_refused(house):
    house.notebook("01_x", 'profile = "smoke"  # profile\nx = 0  # x', "x")
    house.params("01_x", "cpu", "profile: cpu\nx: 1\n")
    assert execute.plan("cpu")[0].params == {"profile": "cpu", "x": 1}
    house.params("01_x", "cpu", "profile: smoke\nx: 1\n")
    with pytest.raises(ConfigError, match="cpu.yaml says `profile: smoke`, and its name says cpu: results go to outputs/cpu, so change that line or rename the file"):
        execute.plan("cpu")
