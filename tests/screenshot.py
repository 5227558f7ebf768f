"""Draw the README's pictures of the page, one a tab: `python tests/screenshot.py [FOLDER] [WIDTH] [light|dark]`."""

import sys
from pathlib import Path

from browser import CHROMIUM, FLAGS, PATIENCE
from playwright.sync_api import Page, expect, sync_playwright

from decomoe.ui.hosting import Host
from decomoe.ui.page import build, launch_options

ROOT = Path(__file__).parents[1]
EXAMPLE = 1  # its picture leaves early
PAGE_HEIGHT, HEIGHT = "document.documentElement.scrollHeight", 2600  # pixels; the rest of a longer page is left out


def ask(page: Page) -> None:
    """Ask an example anew."""
    page.locator(".example").nth(EXAMPLE).click()
    expect(page.locator("[data-state=done]")).to_be_attached()
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".pane-label")).to_be_empty()
    expect(page.locator("[data-state=done]")).to_be_attached()


def compare(page: Page) -> None:
    """All methods on an example."""
    panel = opened(page, "Compare")
    panel.locator("input[type=file]").first.set_input_files(ROOT / "assets" / "examples" / "shape.png")
    expect(panel.locator("img").first).to_be_visible()
    panel.get_by_label("Question", exact=True).fill("is there a blue shape in the image?")
    panel.get_by_role("button", name="Compare", exact=True).click()
    expect(panel.locator("#compare-table tbody tr")).to_have_count(8, timeout=10 * PATIENCE)
    expect(panel.locator("#compare-status")).to_have_text("")


def explore(page: Page) -> None:
    """The first of the cases."""
    panel = opened(page, "Explore")
    panel.locator(".example").first.click()
    expect(panel.locator("img").first).to_be_visible()
    panel.get_by_role("button", name="Explore", exact=True).click()
    expect(panel.locator("#patches img")).to_be_visible(timeout=10 * PATIENCE)


def results(page: Page) -> None:
    """As they are."""
    opened(page, "Results")


def opened(page: Page, tab: str):
    page.get_by_role("tab", name=tab).click()
    return page.locator("[role=tabpanel]:visible")


def main(folder: str = str(ROOT / "assets"), width: str = "1280", scheme: str = "light") -> None:
    """Photograph every tab from the top."""
    host = Host()
    demo = build(host)
    _, url, _ = demo.launch(**launch_options(host), prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    host.load()
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": int(width), "height": 900}, color_scheme=scheme)
        page.set_default_timeout(PATIENCE)
        page.goto(url)
        for tab in (ask, compare, explore, results):
            tab(page)
            page.mouse.move(0, 0)
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            page.wait_for_timeout(1500)
            clip = {"x": 0, "y": 0, "width": int(width), "height": min(HEIGHT, page.evaluate(PAGE_HEIGHT))}
            page.screenshot(path=Path(folder) / f"page-{tab.__name__}.png", full_page=True, clip=clip)
        browser.close()
    demo.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
