"""The Compare tab: its rows against values known from outside, and the tab in a real browser."""

import html
import json

import pytest
from browser import PATIENCE, assert_accessible, watched
from markdown_it import MarkdownIt
from playwright.sync_api import expect
from visitor import png

from decomoe.answer import ask
from decomoe.colors import dot
from decomoe.methods import METHODS, VTW, DecoMoE, Dense, FastV, MoDES
from decomoe.mini.draw import draw
from decomoe.ui.compare import Row, agreement, compare, plain, table, tradeoff

PICTURE = draw(4, kind="objects").image
QUESTION = "Describe the picture."


def row_of(site, method, dense=None) -> Row:
    return Row.of(method.name, ask(site.loaded, PICTURE, QUESTION, method, max_new_tokens=3).trace, dense)


def test_rows_count_what_is_left(site):
    """The mini model has 16 layers and 32 experts, top-4."""
    dense = row_of(site, Dense())
    visual = dense.of_visual_tokens
    assert visual and visual > 60
    assert (dense.visual_tokens, dense.experts, dense.routes) == (visual, 32, 4)
    assert (dense.executed, dense.sparse, dense.exit_after, dense.as_dense) == (1, 1, None, None)
    early = row_of(site, VTW(exit_after=3))
    assert early.exit_after == 3
    assert early.visual_tokens == pytest.approx(visual * 4 / 16)
    half = row_of(site, FastV(layer=4, prune=0.5))
    assert half.exit_after is None
    assert half.visual_tokens == pytest.approx(visual * (4 + 12 / 2) / 16, abs=0.5)
    narrow = row_of(site, DecoMoE(exit_after=7, prefix=8))
    assert narrow.experts == pytest.approx((8 * 32 + 8 * 8) / 16)
    assert narrow.routes == 4
    assert row_of(site, MoDES(tau_text=1, tau_visual=1)).routes == 0
    assert 0.9 < row_of(site, MoDES(tau_text=0, tau_visual=1)).routes / (4 * share_of_text(site)) < 1.1


def share_of_text(site) -> float:
    """The share of tokens that are no visual ones, over the prefill and two steps."""
    tokens = ask(site.loaded, PICTURE, QUESTION, Dense(), max_new_tokens=3).trace.tokens
    return (tokens.text + tokens.generated - 1) / (tokens.text + tokens.visual + tokens.generated - 1)


def test_agreement_is_the_share_of_common_words():
    assert agreement("a b c", "a b c") == 1
    assert agreement("", "") == 1
    assert agreement("a b", "c d") == 0
    assert agreement("a b c", "a c d e f") == pytest.approx(2 * 2 / 8)
    assert agreement("a b", "b a") == pytest.approx(2 * 1 / 4)


def test_rows_grow_one_by_one_and_what_is_not_calibrated_says_what_to_do(site, monkeypatch):
    monkeypatch.setattr(site.loaded, "calibration", None)
    methods = {name: method() for name, method in METHODS.items()}
    seen = list(compare(site.loaded, PICTURE, QUESTION, methods, 2))
    lengths = [len(rows) for rows, _ in seen]
    assert lengths == sorted(lengths)
    assert set(lengths) == set(range(len(METHODS) + 1))
    problems = {row.method: row.problem for row in seen[-1][0] if row.problem}
    assert set(problems) == {"decomoe", "dyvte", "modes"}
    assert all("decomoe calibrate" in problem for problem in problems.values())
    for row in seen[-1][0]:
        assert (row.answer is None) == (row.method in problems)


HOSTILE = "| a |\n\n# b <img src=x onerror=alert(1)> [c](http://d) `e` **f** $$g$$ &lt; ~~h~~ https://i.j \\| <!-- k"


def test_no_text_escapes_its_cell():
    row = Row("dense", answer=HOSTILE, as_dense=1.0)
    rendered = MarkdownIt("commonmark").enable("table").render(table([row, Row("vtw", problem=HOSTILE)]))
    assert rendered.count("<tr>") == 3
    assert "<img" not in rendered
    assert "<a " not in rendered
    cells = [html.unescape(part.split("</td>")[0]) for part in rendered.split("<td>")[1:5]]
    assert cells[1] == " ".join(HOSTILE.split())
    assert plain("There is a camel.") == "There is a camel\\."


def test_the_trade_off_shows_each_method_that_answered():
    rows = [
        Row("dense", answer="a", as_dense=1, executed=1, ttft_ms=200),
        Row("vtw", answer="a", as_dense=1, executed=0.5, ttft_ms=100),
        Row("fastv", answer="b", as_dense=0, executed=0.7, ttft_ms=150),
        Row("dyvte", problem="not calibrated"),
    ]
    same, other = tradeoff(rows)["data"]
    assert (same["text"], same["x"], same["y"]) == (["dense", "vtw"], [1, 0.5], [1, 0.5])
    assert (other["text"], other["x"], other["y"]) == (["fastv"], [0.7], [0.75])
    assert same["marker"]["color"] == [dot(name)["color"] for name in ("dense", "vtw")]
    assert other["marker"]["symbol"] == [dot("fastv", filled=False)["symbol"]]
    assert tradeoff(rows)["summary"].startswith("2 of 3 methods")
    json.dumps(tradeoff(rows), allow_nan=False)
    assert tradeoff([])["data"][0]["x"] == []


@pytest.fixture
def tab(browser, site):
    page = watched(browser.new_page())
    page.set_default_timeout(PATIENCE)
    page.goto(site.url)
    page.get_by_role("tab", name="Compare").click()
    yield page
    page.close()


def panel_of(tab):
    return tab.get_by_role("tabpanel").filter(has=tab.locator("#compare-table"))


def fill(tab, question: str, picture: bytes) -> None:
    panel = panel_of(tab)
    panel.locator("input[type=file]").first.set_input_files(
        {"name": "picture.png", "mimeType": "image/png", "buffer": picture}
    )
    expect(panel.locator("img").first).to_be_visible(timeout=PATIENCE)
    box = panel.get_by_label("Question", exact=True)
    box.fill(question)
    box.press("Enter")


GROWTH = """
window.seen = [];
setInterval(() => {
  const rows = document.querySelectorAll('#compare-table tbody tr').length;
  if (rows !== window.seen.at(-1)) window.seen.push(rows);
}, 20);
"""


def test_the_table_grows_and_the_plot_is_drawn(tab):
    tab.evaluate(GROWTH)
    fill(tab, QUESTION, png(PICTURE))
    rows = tab.locator("#compare-table tbody tr")
    expect(rows).to_have_count(len(METHODS), timeout=PATIENCE * 5)
    expect(tab.locator("#compare-status")).to_have_text("", timeout=PATIENCE)
    seen = tab.evaluate("window.seen")
    assert seen == sorted(seen)
    assert len(seen) >= 5, seen
    assert rows.nth(0).locator("td").nth(2).inner_text() == "1.00"
    points = tab.locator(".chart-box .scatterlayer .point:visible")
    expect(points.first).to_be_attached(timeout=PATIENCE)
    assert points.count() >= 5
    assert_accessible(tab)
    assert tab.problems == []


def test_stop_ends_a_comparison(tab, site):
    fill(tab, QUESTION, png(PICTURE))
    expect(tab.locator("#compare-table tbody tr")).not_to_have_count(0, timeout=PATIENCE)
    panel_of(tab).get_by_role("button", name="Stop").click()
    for _ in range(600):
        if not site.loaded.lock.locked():
            break
        tab.wait_for_timeout(100)
    tab.wait_for_timeout(1000)
    assert not site.loaded.lock.locked()
    assert tab.locator("#compare-table tbody tr").count() < len(METHODS)
