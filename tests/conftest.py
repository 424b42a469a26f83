"""Shared by the tests: a small repository of notebooks to run in, where the public traces lie, corpora, and children that only seem to train.

What loads torch is imported where it is needed: many tests do without. Helpers that are no fixtures are in the modules beside this one."""

import os
import signal
import textwrap
from types import SimpleNamespace

import nbformat
import pytest

from predmoe import cache_study, paths

os.environ.setdefault("MPLBACKEND", "Agg")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:   # a suite that runs in the background was told to ignore it, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
PUBLIC = cache_study.public_folder()
needs_public = pytest.mark.skipif(PUBLIC is None, reason="the public traces are not there (PREDMOE_TRACES names their folder)")


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An empty repository in a temporary folder: house.notebook(name, parameters, *cells), house.params(name, profile, text), house.outputs."""
    for name in ("notebooks", "params"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name.upper(), tmp_path / name)
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(paths, "COMMITTED", tmp_path / "outputs")

    def notebook(name, parameters, *cells):
        built = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells]
        if parameters is not None:
            built.insert(0, nbformat.v4.new_code_cell(textwrap.dedent(parameters), metadata={"tags": ["parameters"]}))
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=built, metadata=kernel), path)
        return path

    def params(name, profile, text):
        folder = tmp_path / "params" / name
        folder.mkdir(exist_ok=True)
        (folder / f"{profile}.yaml").write_text(textwrap.dedent(text))

    return SimpleNamespace(notebook=notebook, params=params, root=tmp_path, outputs=tmp_path / "outputs")


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """An empty outputs/."""
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(paths, "COMMITTED", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus whose token files lie in a temporary cache, for child processes as well."""
    from tiny_runs import write_corpus

    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_CACHE", str(folder / "cache"))
        yield write_corpus(folder / "text")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An untrained model as a finished run of a small corpus, and that corpus's tokens."""
    from tiny_backbone import finished_run

    return finished_run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the committed results and of the paper's sources, to change (`paper_copy.change`); returns (profile's folder, paper's folder)."""
    import paper_copy

    outputs, profile, paper = paper_copy.made(tmp_path)
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(outputs))
    return profile, paper


@pytest.fixture
def one_thread():
    """What a run sets of torch's threads is set back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_children(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a child process was started")

    from predmoe import runs

    monkeypatch.setattr(runs.subprocess, "Popen", refuse)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Children that run this shell script instead of the worker: $run is the folder, $name the measurement."""

    from predmoe import runs

    def script(text):
        path = tmp_path / "stand-in.sh"
        path.write_text(f'#!/bin/sh\nrun=$3; name=$5; events={tmp_path}/events\n{text}\n')
        path.chmod(0o755)
        monkeypatch.setattr(runs.sys, "executable", str(path))

    monkeypatch.setattr(runs, "POLL_SECONDS", 0.01)
    return script
