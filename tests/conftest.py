"""Shared by the tests: a small repository of notebooks to run in, and where the public traces lie."""

import os
import textwrap
from types import SimpleNamespace

import nbformat
import pytest

from predmoe import cache_study, paths

os.environ.setdefault("MPLBACKEND", "Agg")
PUBLIC = cache_study.public_folder()
needs_public = pytest.mark.skipif(PUBLIC is None, reason="the public traces are not there (PREDMOE_TRACES names their folder)")


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An empty repository in a temporary folder: house.notebook(name, parameters, *cells), house.params(name, profile, text), house.outputs."""
    for name in ("notebooks", "params"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(paths, name.upper(), tmp_path / name)
    monkeypatch.setenv("PREDMOE_OUTPUTS", str(tmp_path / "outputs"))

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
