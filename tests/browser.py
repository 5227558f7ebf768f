"""What tests of the page in a real browser share; the fixtures are in conftest.py."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PATIENCE = 60_000  # ms; a shared machine may be slow
expect.set_options(timeout=PATIENCE)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; without one the test is skipped, except in CI."""
    if CHROMIUM is None and "CI" not in os.environ:
        pytest.skip("the browser tests need Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def watched(page: Page) -> Page:
    """Its console errors, and what it fetches from elsewhere, go to `page.problems`."""
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.problems.append(request.url) if is_outside(request.url) else None)
    return page


def opened(page: Page, address: str) -> Page:
    page.goto(address)
    expect(page.locator("#decomoe-answer h2")).to_have_text("DecoMoE")
    expect(page.locator(".chart-note").first).to_have_text("Nothing to show yet.")
    return page


def is_outside(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1", "http://localhost", "data:", "blob:", "ws://127.0.0.1"))


def answer(page: Page, method: str):
    return page.locator(f"#{method}-answer .pane-text")


def note(page: Page, chart: int):
    return page.locator(".chart-note").nth(chart)


def upload(page: Page, path: Path) -> None:
    page.locator("#picture input[type=file]").first.set_input_files(path)
    expect(page.locator("#picture img").first).to_be_visible()


def ask(page: Page, question: str) -> None:
    box = page.get_by_label("Question", exact=True)
    box.fill(question)
    box.press("Enter")


def finished(page: Page) -> None:
    expect(page.locator("[data-state=done]")).to_be_attached()


def set_number(page: Page, label: str, value: str) -> None:
    box = page.get_by_label(label, exact=True)
    box.fill(value)
    box.press("Tab")


def assert_accessible(page: Page) -> None:
    """No serious fault that axe finds, and no scrolling sideways, light and dark, on a desk and on a phone."""
    found = {}
    for scheme in ("light", "dark"):
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)  # charts follow
            faults = [
                (fault["id"], [node["target"] for node in fault["nodes"]])
                for fault in Axe().run(page).response["violations"]
                if fault["impact"] in ("serious", "critical")
            ]
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found[scheme, width] = (faults, max(0, overflow))
    page.evaluate("document.body.classList.remove('dark')")
    assert found == dict.fromkeys(found, ([], 0)), found
