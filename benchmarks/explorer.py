"""From a key on a slider to redrawn figures, in headless Chromium: live in JupyterLab over a trace of 4,000 tokens, and static in the report's page.

    python benchmarks/explorer.py [--profile cpu] [--moves 100] [--json OUT]

Time runs in the browser from the key's event to the first frame after the view has been redrawn. Also: the index's load from disk and the pages' weights.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat
import numpy as np
from playwright.sync_api import Page, sync_playwright
from steps import arguments, markdown, write

from predmoe import execute, paths

LIMITS = {"live": 150.0, "static": 30.0}   # ms at the 95th percentile
CELL = """
from predmoe import cache_study, explorer_widget
trace = explorer_widget._synthetic("baseline", cache_study.OURS | {"expert_bytes": explorer_widget.EXPERT_BYTES}, 4000, cache_study.OUR_REUSE)
explorer_widget.explorer({"4,000 tokens": {"baseline": trace}})
"""
TIMED = """async ([name, key]) => {
  const root = document.querySelector(".explorer"), input = root.querySelector(`[name=${name}]`), by = key === "ArrowRight" ? 1 : -1;
  const began = performance.now(), before = root.dataset.settings;
  const redrawn = new Promise((done) => { const watch = new MutationObserver(() => { if (root.dataset.settings !== before) { watch.disconnect(); requestAnimationFrame(() => setTimeout(done)); } });
    watch.observe(root, { attributes: true, attributeFilter: ["data-settings"] }); });
  input.value = String(Number(input.value) + by);
  input.dispatchEvent(new Event("input", { bubbles: true }));
  await redrawn;
  return performance.now() - began;
}"""


def moves(page: Page, count: int) -> list[float]:
    """Milliseconds of `count` moves, slider by slider, to and fro."""
    page.wait_for_selector(".explorer[data-settings]", timeout=300_000)
    names = page.evaluate("[...document.querySelectorAll('.explorer input[type=range]')].filter(i => Number(i.max) > 0).map(i => i.name)")
    names = [name for name in names if name != "horizon"]   # not every horizon has guesses
    found = []
    for n in range(count + 5):
        name = names[n // 2 % len(names)]
        at, most = page.evaluate("name => { const i = document.querySelector(`.explorer [name=${name}]`); return [Number(i.value), Number(i.max)]; }", name)
        found.append(page.evaluate(TIMED, [name, "ArrowRight" if at < most else "ArrowLeft"]))
    return found[5:]   # the first ones compile


def live(browser, count: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder, execute.own_kernel():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.strip())], metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
        nbformat.write(notebook, Path(folder) / "timed.ipynb")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}", f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=timed"]
        server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(paths.ROOT), "JUPYTER_CONFIG_DIR": f"{folder}/config"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=timed", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            page = browser.new_page(viewport={"width": 1280, "height": 1400})
            page.goto(f"http://127.0.0.1:{port}/doc/tree/timed.ipynb?token=timed")
            page.locator(".jp-CodeCell").first.wait_for(timeout=120_000)
            page.get_by_text("Python 3 | Idle").wait_for(timeout=120_000)   # before that JupyterLab asks for a kernel
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            return moves(page, count)
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu", help="whose report is opened (default: cpu)")
    parser.add_argument("--moves", type=int, default=100, help="moves of a slider, live and static (default: 100)")
    parser.add_argument("--static-only", action="store_true", help="leave JupyterLab out")
    options = parser.parse_args()
    chromium, html = shutil.which("chromium") or shutil.which("google-chrome"), paths.outputs(options.profile) / "html"
    if not chromium:
        raise SystemExit("Chromium is not installed (apt install chromium)")
    if not (html / "explore.html").exists():
        raise SystemExit(f"{html} has no explore.html: run predmoe report --profile {options.profile} first")
    found: dict[str, list[float]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.goto((html / "index.html").as_uri())
        loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        page.goto((html / "explore.html").as_uri())
        found["static"] = moves(page, options.moves)
        if not options.static_only:
            found["live"] = live(browser, options.moves)
        browser.close()
    rows = [{"explorer": name, "moves": str(len(ms)), "median": f"{np.median(ms):.0f} ms", "95th percentile": f"{np.percentile(ms, 95):.0f} ms", "at most": f"{LIMITS[name]:.0f} ms"} for name, ms in found.items()]
    sizes = {path.name: path.stat().st_size for path in html.glob("*.html")}
    index, largest = sizes.pop("index.html"), max(sizes.values())
    text = markdown(rows) + f"\n\nThe index loads from disk in {loaded:.0f} ms and has {index / 1e6:.2f} MB; the largest page has {largest / 1e6:.2f} MB."
    print(text)
    write(options.json, {"ms": found, "index_load_ms": loaded, "bytes": {"index.html": index, **sizes}}, markdown=text)


if __name__ == "__main__":
    main()
