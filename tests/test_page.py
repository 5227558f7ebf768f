"""The page in a real browser, on the shipped mini model."""

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from decomoe.ask import load
from decomoe.mini.draw import draw
from decomoe.ui.page import build, launch_options

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PATIENCE = 60_000  # ms; a shared machine may be slow


@pytest.fixture(scope="module")
def address():
    loaded = load()
    page = build(loaded)
    _, url, _ = page.launch(**launch_options(loaded), prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield url
    page.close()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and "CI" not in os.environ:
        pytest.skip("the browser tests need Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: page.problems.append(request.url) if is_outside(request.url) else None)
    page.goto(address)
    expect(answer(page, "dense")).to_be_visible(timeout=PATIENCE)
    yield page
    page.close()


def is_outside(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1", "http://localhost", "data:", "blob:", "ws://127.0.0.1"))


def answer(page: Page, method: str):
    return page.locator(f"#{method}-answer textarea")


def upload(page: Page, path: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(path)
    expect(page.locator(".image-container img, .image-frame img").first).to_be_visible(timeout=PATIENCE)


def ask(page: Page, question: str) -> None:
    box = page.get_by_label("Question", exact=True)
    box.fill(question)
    box.press("Enter")


@pytest.fixture
def picture(tmp_path) -> Path:
    draw(3, kind="objects").image.save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


WATCH = """
window.seen = {dense: [], decomoe: []};
setInterval(() => {
  for (const method in window.seen) {
    const text = document.querySelector(`#${method}-answer textarea`).value, seen = window.seen[method];
    if (text && text !== seen.at(-1)) seen.push(text);
  }
}, 4);
"""


def test_ask_and_watch_both_answers_stream(page, picture):
    upload(page, picture)
    page.evaluate(WATCH)
    ask(page, "Describe the picture.")
    expect(page.locator(".chart-note").first).to_contain_text("layer", timeout=PATIENCE)
    seen = page.evaluate("window.seen")
    for method in ("dense", "decomoe"):
        assert len(seen[method]) >= 3, f"the {method} answer did not stream: {seen}"
        assert all(later.startswith(earlier) for earlier, later in pairwise(seen[method]))
    assert answer(page, "dense").input_value()
    expect(page.locator("#numbers")).to_contain_text("TTFT")
    assert page.locator("#numbers td").all_text_contents()[-1] not in ("", "–")
    bars = page.locator(".chart-box .bars .point")
    expect(bars.first).to_be_attached(timeout=PATIENCE)
    assert bars.count() >= 17  # 16 layers and at least one candidate
    assert page.problems == []


def test_toggles_and_p_reach_the_engine(page, picture):
    upload(page, picture)
    page.get_by_label("SAVB").uncheck()
    page.get_by_label("RCEP").uncheck()
    ask(page, "Where is the camel?")
    expect(page.locator(".chart-note").nth(0)).to_have_text("The visual tokens stay in all layers.", timeout=PATIENCE)
    expect(page.locator(".chart-note").nth(1)).to_have_text("All 32 experts in every layer.")
    page.get_by_label("RCEP").check()
    page.get_by_label("number input for p").fill("0.05")
    page.get_by_label("number input for p").press("Tab")
    ask(page, "Where is the camel?")
    expect(page.locator(".chart-note").nth(0)).to_contain_text("after layer 9 of 16 (fixed)", timeout=PATIENCE)
    expect(page.locator(".chart-note").nth(1)).to_contain_text("In 6 of 16 layers the prefill keeps 4 to")


def test_a_second_question_draws_into_the_same_charts(page, picture):
    upload(page, picture)
    ask(page, "Where is the camel?")
    expect(page.locator(".chart-note").first).to_contain_text("layer", timeout=PATIENCE)
    page.evaluate("document.querySelectorAll('.chart-box').forEach(box => { box.mark = 'same'; })")
    page.get_by_label("SAVB").uncheck()
    ask(page, "How many objects are there?")
    expect(page.locator(".chart-note").first).to_contain_text("fixed", timeout=PATIENCE)
    marks = page.evaluate("[...document.querySelectorAll('.chart-box')].map(box => box.mark)")
    assert marks == ["same", "same"]


def test_examples_fill_picture_and_question(page):
    page.locator("tr.tr-body").first.click()
    expect(page.get_by_label("Question", exact=True)).not_to_have_value("", timeout=PATIENCE)
    expect(page.locator(".image-container img, .image-frame img").first).to_be_visible(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("make", "question", "message"),
    [
        (None, "What is this?", "Add a picture first"),
        ("picture", " ", "The question is empty"),
        ("strip", "What is this?", "times the other"),
        ("text", "What is this?", "not a picture"),
    ],
)
def test_errors_are_sentences(page, picture, tmp_path, make, question, message):
    path = {"picture": picture, "strip": tmp_path / "strip.png", "text": tmp_path / "text.png"}.get(make)
    if make == "strip":
        Image.new("RGB", (4000, 10)).save(path)
    if make == "text":
        path.write_text("hello")
    if path:
        page.locator("input[type=file]").first.set_input_files(path)
        page.wait_for_timeout(1000)
    ask(page, question)
    toast = page.get_by_text(message)
    expect(toast.first).to_be_visible(timeout=PATIENCE)
    assert "Traceback" not in page.content()
    upload_again = page.get_by_label("Question", exact=True)  # the page still lives
    expect(upload_again).to_be_editable()


def test_model_and_question_text_is_never_run(page, picture):
    upload(page, picture)
    ask(page, "${1+1} <img src=x onerror=\"document.title='run'\"> {{7*7}}")
    expect(page.locator(".chart-note").first).to_contain_text("layer", timeout=PATIENCE)
    assert page.title() != "run"
    assert page.problems == []
