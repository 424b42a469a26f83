"""Headless Chromium for the tests, and an explorer as a person uses it: by keyboard and mouse, by the names that a screen reader says."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

AXE = Path(__file__).parent / "assets" / "axe.min.js"
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
REQUIRED = os.environ.get("PREDMOE_BROWSER") == "required"   # .ci/run sets it: there a skip is a failure
ROWS = ("demand", "router", "predictor", "oracle")
SIZES = {"phone": {"width": 390, "height": 844}, "desktop": {"width": 1280, "height": 900}}
LABELS = {"trace": "Trace", "arm": "Model", "predictor": "Predictor", "policy": "Cache policy", "guard": "Prefetch guard", "horizon": "Horizon", "budget": "Over-fetch", "slots": "Cache size",
          "gb_per_s": "Disk bandwidth", "latency_ms": "Disk latency", "layer_ms": "Compute per layer"}  # fmt: skip


@contextlib.contextmanager
def chromium():
    """A browser; without Chromium the test is skipped with its reason, or fails where a browser is required."""
    if CHROMIUM is None:
        reason = "Chromium is not installed (Debian: apt install chromium): the report is not tried in a browser"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, size="desktop", *, offline=True, **options):
    """A page whose console, errors and requests are noted in page.noted; offline, whatever is no file is refused."""
    context = browser.new_context(viewport=SIZES[size], **options)
    page = context.new_page()
    page.noted = []
    page.on("console", lambda message: page.noted.append(f"{message.type}: {message.text}") if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.noted.append(f"error: {error}"))
    if offline:
        page.on("request", lambda request: None if request.is_navigation_request() or request.url.startswith(("data:", "blob:")) else page.noted.append(f"request: {request.url}"))
        context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
    return page


def faults(page, within="html"):
    """What axe-core finds of serious or critical impact: rule and the first element."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("within => axe.run(within, {resultTypes: ['violations']})", within)
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]} {v['nodes'][0].get('failureSummary', '')[:200]}" for v in found["violations"] if v["impact"] in ("serious", "critical")]


def numbers(page):
    """Row -> column -> number, as the explorer's table carries them."""
    return page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('.explorer tr[data-row]')].map(tr => [tr.dataset.row,
        Object.fromEntries([...tr.querySelectorAll('td')].flatMap(td => Object.entries(td.dataset)).map(([k, v]) => [k, Number(v)]))]))""")


def settings(page):
    """What the numbers shown belong to."""
    return json.loads(page.locator(".explorer").get_attribute("data-settings"))


def picture(page):
    """The drawn figures, to see whether they change."""
    return page.locator(".ex-map").inner_html() + page.locator(".ex-timeline").inner_html()


def control(page, name):
    return page.locator(f".explorer [name={name}]")


def settled(page, name, before):
    """Wait until the view belongs to another value of a control."""
    page.wait_for_function("([name, before]) => { const e = document.querySelector('.explorer'); return e.dataset.settings && !e.hasAttribute('aria-busy') && JSON.parse(e.dataset.settings)[name] !== before; }",
                           arg=[name, before], timeout=60_000)  # fmt: skip


def press(page, name, key):
    """Move a slider by keyboard."""
    before = settings(page)[name]
    control(page, name).focus()
    page.keyboard.press(key)
    settled(page, name, before)


def click(page, name, share):
    """Move a slider by mouse, to a share of its length."""
    before, box = settings(page)[name], control(page, name).bounding_box()
    page.mouse.click(box["x"] + 8 + share * (box["width"] - 16), box["y"] + box["height"] / 2)
    settled(page, name, before)


def pick(page, name, index):
    before = settings(page)[name]
    control(page, name).select_option(index=index)
    settled(page, name, before)


def spoken(page):
    """(role, name, value) of every slider and menu: role and name from the accessibility tree; the value as it is to be said, which the tree of the
    debugging protocol gives as the slider's position."""
    session = page.context.new_cdp_session(page)
    session.send("Accessibility.enable")
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    said = lambda node, what: (node.get(what) or {}).get("value")  # noqa: E731
    found = [(said(node, "role"), said(node, "name"), said(node, "value")) for node in nodes if said(node, "role") in ("slider", "combobox")]
    return [(role, name, page.get_by_role(role, name=name, exact=True).get_attribute("aria-valuetext") or value) for role, name, value in found]
