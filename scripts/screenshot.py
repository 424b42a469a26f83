"""Render the README's picture of the explorer from the committed report's page, in headless Chromium.

    python scripts/screenshot.py [--profile cpu]     writes outputs/PROFILE/explore/screenshot.png
"""

import argparse
import shutil
import sys

from playwright.sync_api import sync_playwright

from predmoe import paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu", help="the profile whose report is shown (default: cpu)")
    folder = paths.outputs(parser.parse_args().profile)
    page_file, chromium = folder / "html" / "explore.html", shutil.which("chromium") or shutil.which("google-chrome")
    if not page_file.exists() or not chromium:
        print(f"screenshot: {'Chromium is not installed (apt install chromium)' if not chromium else f'there is no {page_file}: run predmoe report first'}", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 1200}, device_scale_factor=1.5, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector(".explorer[data-settings]")
        page.locator(".explorer").screenshot(path=folder / "explore" / "screenshot.png")
        browser.close()
    print(folder / "explore" / "screenshot.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
