"""JupyterLab on the notebooks, for `predmoe explore`: started, and ended with its kernels. As an extension of the server (`--ServerApp.jpserver_extensions=predmoe.lab=True`,
which `make lab` gives as well) it keeps outputs out of the files in notebooks/: JupyterLab saves by itself every two minutes, and the sources carry none;
and it keeps JupyterLab from asking whether one would like its news, which covers a corner of the page.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from . import execute, paths
from .config import ConfigError

NEWS = "@jupyterlab/apputils-extension:announcements"   # asks about Jupyter's news, whatever LabApp.news_url is, and looks for a newer JupyterLab
PATIENCE_SECONDS = 8.0   # of a server that ends its kernels; less than until a signal is raised again (cli.AGAIN_SECONDS). Kernels end by themselves when their server is gone


def explore(port: int, browser: bool) -> int:
    """Serve explore.ipynb until the server ends, or until Ctrl-C or a signal, which end it; the server's exit code. Raises ConfigError where there is no notebook."""
    notebook = paths.NOTEBOOKS / "explore.ipynb"
    if not notebook.exists():
        raise ConfigError(f"there is no {notebook}: run predmoe from a clone of the repository")
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port {port} must lie in 1..65535")
    print("When the page is open, and each time that it is loaded again: menu Run, Run All Cells; the explorer is there after a minute or so. Ctrl-C here ends it.", flush=True)
    command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={paths.ROOT}", f"--port={port}", "--LabApp.default_url=/doc/tree/notebooks/explore.ipynb",
               "--ServerApp.jpserver_extensions=predmoe.lab=True"]  # fmt: skip
    if os.name == "posix" and os.geteuid() == 0:   # a container's only user
        command.append("--allow-root")
    with execute.own_kernel():
        # in a session of its own Ctrl-C does not reach the server, which would ask whether it was meant
        server = subprocess.Popen(command + ["--no-browser"] * (not browser), start_new_session=True)
        try:
            return server.wait()
        finally:
            _end(server)


def _end(server: subprocess.Popen) -> None:
    """Ask a server to end, which ends its kernels, and wait for it; one that does not, or a second Ctrl-C, is killed."""
    try:
        if server.poll() is None:
            server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(PATIENCE_SECONDS)
    finally:
        server.kill()
        server.wait()


# --- in the server ---------------------------------------------------------------------------------------------------------

def _jupyter_server_extension_points() -> list[dict]:
    return [{"module": "predmoe.lab"}]


def _load_jupyter_server_extension(server) -> None:
    contents = server.contents_manager
    contents.register_pre_save_hook(lambda model, path, **_: without_outputs(model, Path(contents.root_dir) / path))
    settings = server.web_app.settings
    before = settings.get("page_config_hook") or (lambda handler, page: page)
    settings["page_config_hook"] = lambda handler, page: without_news(before(handler, page))


def without_news(page: dict) -> dict:
    """What a page of JupyterLab is configured with, without the plugin that asks about news."""
    return page | {"disabledExtensions": sorted({*page.get("disabledExtensions", ()), NEWS})}


def without_outputs(model: dict, path: Path) -> None:
    """Take out of what is to be saved at `path` what running a notebook put in, if it is one of the sources; any other file is saved as it is."""
    notebook = model.get("content")
    if path.resolve().parent != paths.NOTEBOOKS.resolve() or model.get("type") != "notebook" or not isinstance(notebook, Mapping):
        return
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            cell["metadata"].pop("execution", None)
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"]["language_info"] = {"name": "python"}   # of whose Python it ran on, as little
