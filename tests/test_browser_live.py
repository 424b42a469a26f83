"""`predmoe explore`, which opens explore.ipynb in JupyterLab, with a live kernel: each control moved by keyboard and by mouse, the numbers those of `simulator.replay`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import browser
from predmoe import explorer_widget, paths, simulator
from predmoe.simulator import Cache, Compute, Disk, Prefetch

pytestmark = pytest.mark.slow
TOKEN = "only-this-test"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`predmoe explore` itself, its page with the notebook run, and its process; the recorded traces are the committed ones."""
    with browser.chromium() as chromium:
        root, outputs = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("outputs")
        (outputs / "cpu").mkdir()
        (outputs / "cpu" / "traces").symlink_to(paths.ROOT / "outputs" / "cpu" / "traces")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = os.environ | {"PREDMOE_OUTPUTS": str(outputs), "PYTHONPATH": str(paths.ROOT), "JUPYTER_CONFIG_DIR": str(root / "config"), "JUPYTER_TOKEN": TOKEN}
        log = root / "server.log"
        with pytest.MonkeyPatch.context() as patch, open(log, "w") as out:
            patch.setenv("PREDMOE_OUTPUTS", str(outputs))
            server = subprocess.Popen([sys.executable, "-m", "predmoe", "explore", "--no-browser", f"--port={port}"], env=environment, stdout=out, stderr=out)
            try:
                _until_it_answers(f"http://127.0.0.1:{port}/api?token={TOKEN}", server, log)
                page = browser.opened(chromium, offline=False)
                page.goto(f"http://127.0.0.1:{port}/doc/tree/notebooks/explore.ipynb?token={TOKEN}")
                page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=120_000)
                page.get_by_text("Python 3 | Idle").wait_for(timeout=120_000)   # before that JupyterLab asks for a kernel
                page.get_by_role("menuitem", name="Run", exact=True).click()
                page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
                page.wait_for_selector(".explorer[data-settings]", timeout=240_000)
                page.locator(".explorer").scroll_into_view_if_needed()
                yield page, server, log
            finally:
                server.send_signal(signal.SIGTERM)
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    server.kill()


@pytest.fixture
def lab(served):
    return served[0]


def _until_it_answers(address, server, log):
    for _ in range(240):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


OFFERED = {}


def replayed(at):
    """What `simulator.replay` gives for the settings of a page, called directly."""
    made = OFFERED.setdefault((at["trace"], at["arm"]), None) or explorer_widget.sources("cpu")[at["trace"]][at["arm"]]()
    OFFERED[at["trace"], at["arm"]] = made
    cache, disk = Cache(slots=at["slots"], policy=at["policy"], streaming=True), Disk(latency_ms=at["latency_ms"], gb_per_s=at["gb_per_s"])
    compute = Compute(attention_ms=0.0, expert_ms=0.0, shared_ms=at["layer_ms"])
    more = dict(horizon=at["horizon"], guard=at["guard"])
    ahead = {"demand": None, "router": Prefetch(source="next_router", budget=at["budget"], **more), "predictor": Prefetch(source=at["predictor"], budget=at["budget"], **more), "oracle": Prefetch(**more)}
    return {row: simulator.replay(made.trace, cache, disk, compute=compute, prefetch=prefetch) for row, prefetch in ahead.items()}


def equals_replay(page):
    shown = browser.numbers(page)
    assert set(shown) == set(browser.ROWS)
    for row, outcome in replayed(browser.settings(page)).items():
        assert (shown[row]["tokS"], shown[row]["hitRate"]) == (outcome.tokens_per_s, outcome.hit_rate), row
        assert shown[row]["stallMs"] == outcome.stall_ms / outcome.tokens and shown[row]["wastedMb"] == outcome.ledger.wasted_bytes / outcome.tokens / 1e6


def test_nothing_covers_a_corner_of_the_page(lab):
    """JupyterLab would ask about its news at the first start, which this one is; by now it would have."""
    assert lab.locator(".Toastify__toast, .jp-Dialog").all_inner_texts() == []


def test_the_first_view_is_the_simulators(lab):
    assert browser.settings(lab)["trace"] == "ours, given text"
    equals_replay(lab)


@pytest.mark.parametrize("name, key, share", [("budget", "ArrowRight", 0.5), ("slots", "PageUp", 0.6), ("gb_per_s", "ArrowLeft", 0.9), ("latency_ms", "ArrowUp", 0.9), ("layer_ms", "ArrowDown", 0.3)])
def test_a_slider_moves_by_keyboard_and_by_mouse(lab, name, key, share):
    for move in (lambda: browser.press(lab, name, key), lambda: browser.click(lab, name, share)):
        drawn = browser.picture(lab)
        move()
        equals_replay(lab)
        assert browser.picture(lab) != drawn


def test_the_horizon_moves_by_keyboard(lab):
    browser.press(lab, "horizon", "ArrowRight")
    assert browser.settings(lab)["horizon"] == 2
    equals_replay(lab)


@pytest.mark.parametrize("name, index", [("arm", 1), ("predictor", 0), ("policy", 2), ("guard", 1), ("guard", 0)])
@pytest.mark.filterwarnings("ignore:prefetch is on:predmoe.simulator.SimulationWarning")
def test_a_menu_moves(lab, name, index):
    browser.pick(lab, name, index)
    equals_replay(lab)


def test_extremes_are_answers_or_sentences(lab):
    for name, key in (("slots", "Home"), ("latency_ms", "Home"), ("layer_ms", "Home"), ("horizon", "End")):
        browser.press(lab, name, key)
    rows = lab.locator(".explorer tr[data-row]").all_inner_texts()
    assert browser.settings(lab)["slots"] == 1 and sum("eyond the last layer" in row or "holds no predictor" in row for row in rows) == 3
    assert "Traceback" not in lab.locator(".explorer").inner_text()
    browser.press(lab, "horizon", "Home")


def test_a_file_that_is_no_trace_is_a_sentence_and_a_sound_one_is_replayed(lab, tmp_path):
    (tmp_path / "broken.csv").write_text("# route_trace v1\nnothing\n")
    lab.locator(".explorer input[type=file]").set_input_files(tmp_path / "broken.csv")
    lab.wait_for_selector(".ex-answer.ex-problem", timeout=60_000)
    assert "broken.csv" in lab.locator(".ex-answer").inner_text() and not lab.locator(".ex-results").is_visible()
    lab.locator(".explorer input[type=file]").set_input_files(paths.ROOT / "outputs" / "cpu" / "traces" / "joint.trace.safetensors")
    lab.wait_for_function("JSON.parse(document.querySelector('.explorer').dataset.settings).trace.startsWith('imported')", timeout=60_000)
    assert lab.locator(".ex-results").is_visible() and "960 tokens" in lab.locator(".ex-about").inner_text()


def test_axe_finds_nothing_serious_and_every_control_speaks(lab):
    assert browser.faults(lab, ".explorer") == []
    spoken = {name: value for _, name, value in browser.spoken(lab) if name in browser.LABELS.values()}
    assert set(browser.LABELS.values()) - set(spoken) <= {"Model"} and all(spoken.values())   # what was imported has one arm
    assert not [line for line in lab.noted if ("xplorer" in line or "anywidget" in line) and "to activate" not in line]   # a busy machine's plugins take long


def test_saving_leaves_the_source_without_outputs(lab):
    notebook = paths.NOTEBOOKS / "explore.ipynb"
    before, saved = notebook.read_text(), notebook.stat().st_mtime_ns
    from playwright.sync_api import TimeoutError as TooLate

    entry = lab.get_by_role("menuitem", name="Save Notebook", exact=True)
    for _ in range(5):   # a menu that is opened while the page is still busy closes again
        lab.get_by_role("menuitem", name="File", exact=True).click()
        with contextlib.suppress(TooLate):
            entry.click(timeout=15_000)
            break
        lab.keyboard.press("Escape")
    for _ in range(120):
        if notebook.stat().st_mtime_ns != saved:
            break
        lab.wait_for_timeout(500)
    assert notebook.stat().st_mtime_ns != saved and notebook.read_text() == before


def test_a_kernel_that_is_gone_is_a_sentence_and_its_numbers_go_with_it_and_the_server_ends(served):
    page, server, log = served
    children = lambda pid: [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]  # noqa: E731
    (lab,) = children(server.pid)
    kernels = children(lab)
    assert len(kernels) == 1
    os.kill(kernels[0], signal.SIGKILL)
    page.wait_for_function("document.querySelector('.ex-answer').textContent.startsWith('Nothing answers')", timeout=60_000)
    assert not page.locator(".ex-results").is_visible() and page.locator(".ex-about").inner_text() == ""
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 143 and "stopped by SIGTERM; the server and its kernels have ended" in log.read_text()
    for _ in range(120):   # a kernel ends when it sees that its server has
        if not any(Path(f"/proc/{pid}").exists() for pid in (lab, *kernels)):
            break
        time.sleep(0.5)
    assert not Path(f"/proc/{lab}").exists()
