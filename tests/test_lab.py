"""`predmoe explore` ends its server, and JupyterLab keeps outputs out of the sources; `test_browser_live` starts the real one."""

import copy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from predmoe import cli, lab, paths

RUN = {"type": "notebook", "content": {
    "cells": [{"cell_type": "markdown", "metadata": {}, "source": "# A"}, {"cell_type": "code", "metadata": {"tags": ["parameters"], "execution": {"at": 1}}, "source": "x = 1", "outputs": [1], "execution_count": 3}],
    "metadata": {"kernelspec": {"name": "python3"}, "widgets": {"a": 1}, "language_info": {"name": "python", "version": "3.11"}}}}  # fmt: skip


def test_a_source_is_saved_without_what_running_it_put_in():
    model = copy.deepcopy(RUN)
    lab.without_outputs(model, paths.NOTEBOOKS / "explore.ipynb")
    code = model["content"]["cells"][1]
    assert code == {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "x = 1", "outputs": [], "execution_count": None}
    assert model["content"]["metadata"] == {"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}}


@pytest.mark.parametrize("path", ["outputs/cpu/explore/explore.ipynb", "mine.ipynb", "notebooks/folder/mine.ipynb"])
def test_any_other_notebook_is_saved_as_it_is(path):
    model = copy.deepcopy(RUN)
    lab.without_outputs(model, paths.ROOT / path)
    assert model == RUN


def test_what_is_no_whole_notebook_is_let_through():
    for model in ({"type": "file", "content": "x"}, {"type": "notebook", "content": None}, {"type": "notebook"}):
        lab.without_outputs(dict(model), paths.NOTEBOOKS / "explore.ipynb")


def test_as_an_extension_it_cleans_what_is_saved_and_silences_the_news_beside_what_others_set():
    hooks, before = [], lambda handler, page: page | {"theirs": handler}
    server = types.SimpleNamespace(contents_manager=types.SimpleNamespace(root_dir=str(paths.ROOT), register_pre_save_hook=hooks.append), web_app=types.SimpleNamespace(settings={"page_config_hook": before}))
    lab._load_jupyter_server_extension(server)
    model = copy.deepcopy(RUN)
    hooks[0](model=model, path="notebooks/explore.ipynb", contents_manager=None)
    assert model["content"]["cells"][1]["outputs"] == []
    page = server.web_app.settings["page_config_hook"]("h", {"disabledExtensions": ["a"], "mode": "x"})
    assert page == {"disabledExtensions": [lab.NEWS, "a"], "mode": "x", "theirs": "h"}
    server.web_app.settings.clear()
    lab._load_jupyter_server_extension(server)
    assert server.web_app.settings["page_config_hook"]("h", {}) == {"disabledExtensions": [lab.NEWS]}


def test_the_plugin_that_asks_about_news_still_has_that_name():
    core = Path(sys.prefix) / "share" / "jupyter" / "lab" / "static"
    asking = [text for file in core.glob("*.js") if "notified about official Jupyter news" in (text := file.read_text(errors="replace"))]
    assert asking and all(lab.NEWS in text for text in asking)


def test_make_lab_gives_the_extension_too():
    line = next(line for line in (paths.ROOT / "Makefile").read_text().splitlines() if "jupyter lab" in line)
    assert "--ServerApp.jpserver_extensions=predmoe.lab=True" in line and "--allow-root" in line.partition("$(if $(filter 0,")[2]   # a container is root


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_is_asked_to_end_and_killed_where_it_does_not(monkeypatch, deaf):
    monkeypatch.setattr(lab, "PATIENCE_SECONDS", 0.5 if deaf else 60.0)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN if %r else lambda *_: sys.exit(7))" % deaf
    server = subprocess.Popen([sys.executable, "-c", f"import signal, sys, time; {ignore}; print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    with server.stdout:
        assert server.stdout.readline() == "up\n"
        lab._end(server)
    assert server.returncode == (-signal.SIGKILL if deaf else 7)


@pytest.mark.parametrize("how, code, words", [(KeyboardInterrupt(), 130, "interrupted"), (cli.Stopped(signal.SIGTERM), 143, "stopped by SIGTERM")])
def test_ctrl_c_ends_the_server_and_says_what_has_ended(monkeypatch, capsys, how, code, words):
    """The server stands in as a sleeping process; nobody speaks of checkpoints."""
    started = []

    def popen(command, **options):
        assert options == {"start_new_session": True} and command[-1] == "--no-browser" and "--ServerApp.jpserver_extensions=predmoe.lab=True" in command
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"]))
        started[0].wait = lambda timeout=None, wait=started[0].wait: wait(timeout) if timeout or started[0].poll() is not None else stop()
        return started[0]

    def stop():
        if not stop.done:
            stop.done = True
            raise how
        return type(started[0]).wait(started[0])

    stop.done, real = False, subprocess.Popen
    monkeypatch.setattr(lab.subprocess, "Popen", popen)
    began = time.monotonic()
    assert cli.main(["explore", "--no-browser"]) == code
    assert capsys.readouterr().err == f"predmoe: {words}; the server and its kernels have ended, and what was saved is kept\n"
    assert started[0].returncode == -signal.SIGTERM and time.monotonic() - began < 30


def test_a_port_that_is_none_is_a_sentence(capsys):
    assert cli.main(["explore", "--port", "0"]) == 2 and capsys.readouterr().err == "predmoe: --port 0 must lie in 1..65535\n"
