"""Draw `assets/page.png`, the README's picture of the page: `python tests/screenshot.py [OUT] [WIDTH] [light|dark]`."""

import sys
from pathlib import Path

from browser import CHROMIUM, FLAGS, PATIENCE
from playwright.sync_api import expect, sync_playwright

from decomoe.ask import load
from decomoe.ui.page import build, launch_options

ROOT = Path(__file__).parents[1]
EXAMPLE = 1  # its picture leaves early


def main(out: str = str(ROOT / "assets" / "page.png"), width: str = "1280", scheme: str = "light") -> None:
    """Ask an example and photograph the whole page."""
    loaded = load()
    demo = build(loaded)
    _, url, _ = demo.launch(**launch_options(loaded), prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": int(width), "height": 900}, color_scheme=scheme)
        page.goto(url)
        page.locator(".example").nth(EXAMPLE).click(timeout=PATIENCE)
        expect(page.locator("[data-state=done]")).to_be_attached(timeout=PATIENCE)
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".pane-label")).to_be_empty(timeout=PATIENCE)
        expect(page.locator("[data-state=done]")).to_be_attached(timeout=PATIENCE)
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(1500)
        page.screenshot(path=out, full_page=True)
        browser.close()
    demo.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
