"""The HTML report in a browser: opened from disk, offline, at phone and desktop width, light and dark; the explorer's static twin moved."""

import shutil

import nbformat
import pytest
from nbformat.v4 import new_output

import browser
from predmoe import execute, explore, explorer_grid, explorer_widget, paths, report, results

pytestmark = pytest.mark.slow
COMMITTED = ["00_report", "01_mechanism", "02_horizons", "05_cache_simulation", "08_latency_sensitivity", "11_engine"]


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory, chromium):
    """The committed profile's report in a folder of its own, with the explorer over a coarse table of our traces; its widget, too."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in (*COMMITTED, "traces"):
        if (source := paths.ROOT / "outputs" / "cpu" / name).exists():
            shutil.copytree(source, folder / "cpu" / name)
    shutil.copy(paths.ROOT / "outputs" / "cpu" / "claims.json", folder / "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREDMOE_OUTPUTS", str(folder))
        run = results.start("explore", "cpu", {})
        grid = explorer_grid.COARSE | {"policy": ("lru", "lfu"), "latency_ms": (0.1, 1.0), "layer_ms": (1.0, 4.0), "gb_per_s": (2.0, 5.0)}
        closing = explorer_grid.close(run, explorer_widget.sources("cpu"), grid=grid, chosen=["ours, given text", "synthetic, our shape"])
        notebook = nbformat.read(paths.NOTEBOOKS / "explore.ipynb", as_version=4)
        data, metadata = closing._repr_mimebundle_()
        code = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
        code.outputs = [new_output("execute_result", data, metadata=metadata, execution_count=2)]
        execute._without_widgets(notebook)
        nbformat.write(notebook, run.folder / "explore.ipynb")
        return report.write("cpu").parent, closing.widget


@pytest.fixture(scope="module")
def pages(made):
    return sorted(made[0].glob("*.html"))


def test_the_report_is_light_enough(pages):
    sizes = {page.name: page.stat().st_size for page in pages}
    assert sizes.pop("index.html") < 5_000_000 and max(sizes.values()) < 3_000_000 and "explore.html" in sizes


@pytest.mark.parametrize("size", browser.SIZES)
def test_every_page_opens_offline_without_a_request_or_an_error(chromium, pages, size):
    for path in pages:
        page = browser.opened(chromium, size)
        page.goto(path.as_uri())
        if path.stem == "explore":
            page.wait_for_selector(".explorer[data-settings]")
        assert page.noted == [], path.name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path.name} scrolls sideways"
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)"), path.name
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chromium, pages, scheme):
    for path in (path for path in pages if path.stem in ("index", "02_horizons", "explore")):
        page = browser.opened(chromium, color_scheme=scheme)
        page.goto(path.as_uri())
        if path.stem == "explore":
            page.wait_for_selector(".explorer[data-settings]")
        assert browser.faults(page) == [], path.name
        page.context.close()


@pytest.mark.parametrize("size", browser.SIZES)
def test_each_control_of_the_static_explorer_moves_text_and_figure(chromium, made, size):
    page = browser.opened(chromium, size)
    page.goto((made[0] / "explore.html").as_uri())
    page.wait_for_selector(".explorer[data-settings]")
    moved = page.evaluate("[...document.querySelectorAll('.explorer input, .explorer select')].map(i => [i.name, i.tagName, Number(i.value)])")
    assert {name for name, *_ in moved} == set(browser.LABELS) - {"guard"}, "the guard alone has one position here"
    for name, tag, value in moved:
        text, drawn = page.locator(".ex-answer").inner_text() + page.locator(".ex-table").inner_text(), browser.picture(page)
        if tag == "SELECT":
            browser.pick(page, name, 1 - min(value, 1))
        else:
            browser.press(page, name, "ArrowRight" if value == 0 else "ArrowLeft")
        assert page.locator(".ex-answer").inner_text() + page.locator(".ex-table").inner_text() != text, name
        assert browser.picture(page) != drawn, name
        at = browser.settings(page)
        view = explore.view(made[1].held(at["trace"], at["arm"]), explore.Settings.read(at))
        shown = browser.numbers(page)
        for row in view["rows"]:
            if "problem" not in row:
                assert shown[row["row"]]["tokS"] == pytest.approx(row["tok_s"], rel=1e-6) and shown[row["row"]]["wastedMb"] == pytest.approx(row["wasted_mb"], rel=1e-6, abs=1e-9)
    assert page.noted == [] and page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("size", browser.SIZES)
def test_no_marker_covers_a_number_of_the_map_and_what_is_held_is_said(chromium, made, size):
    page = browser.opened(chromium, size)
    page.goto((made[0] / "explore.html").as_uri())
    page.wait_for_selector(".explorer[data-settings]")
    for name, key in (("horizon", "ArrowRight"), ("gb_per_s", "ArrowLeft"), ("budget", "ArrowRight")):
        browser.press(page, name, key)
        covered = page.evaluate("""() => [...document.querySelectorAll('.ex-map text[data-gain]')].filter(t => { const a = t.getBBox();
            return [...document.querySelectorAll('.ex-point')].some(m => { const b = m.getBBox(), x = b.x + b.width / 2, y = b.y + b.height / 2;
                return Math.hypot(Math.max(a.x - x, 0, x - a.x - a.width), Math.max(a.y + 3 - y, 0, y - a.y - a.height + 3)) < 4; }); }).map(t => t.textContent)""")
        assert covered == [], name
    held = page.locator(".ex-held").inner_text()
    assert "simulated beforehand" in held and "prefetch guard none" in held
    assert page.evaluate("getComputedStyle(document.querySelector('.ex-table')).backgroundImage").count("linear-gradient") == 4
    assert page.locator(".ex-more").is_visible() == (size == "phone")


def test_every_control_has_a_name_and_a_value_for_a_screen_reader(chromium, made):
    page = browser.opened(chromium)
    page.goto((made[0] / "explore.html").as_uri())
    page.wait_for_selector(".explorer[data-settings]")
    spoken = browser.spoken(page)
    assert {name for _, name, _ in spoken} == {label for key, label in browser.LABELS.items() if key != "guard"} and all(value for *_, value in spoken)
    assert ("slider", "Disk bandwidth", "5 GB/s") in spoken
    browser.press(page, "gb_per_s", "Home")
    assert page.locator(".ex-answer").get_attribute("aria-live") == "polite"
    assert ("slider", "Disk bandwidth", "2 GB/s") in browser.spoken(page)


def test_without_scripts_the_picture_is_there(chromium, made):
    page = browser.opened(chromium, java_script_enabled=False)
    page.goto((made[0] / "explore.html").as_uri())
    image = page.locator(".explorer-here img")
    assert image.is_visible() and image.get_attribute("alt").startswith("The explorer at its first position")


def test_it_prints(chromium, made):
    page = browser.opened(chromium)
    page.goto((made[0] / "02_horizons.html").as_uri())
    page.emulate_media(media="print")
    assert not page.locator("nav.contents").is_visible() and not page.locator("details.code").first.is_visible() and page.locator("main img").first.is_visible()
    assert page.pdf()[:4] == b"%PDF"
