"""The Explore and Results tabs: what they say by hand, and in a real browser on the shipped mini model."""

import json

import gradio as gr
import numpy as np
import pytest
from browser import PATIENCE, assert_accessible
from PIL import Image
from playwright.sync_api import expect

from analysis.data import Data
from analysis.figures import fig1a, fig3b
from decomoe.collect import Swept
from decomoe.latency import PARTS, Breakdown, Phase
from decomoe.ui import explore, results
from decomoe.ui.drawn import shown
from decomoe.ui.explore import Routes
from decomoe.ui.guard import ADD
from decomoe.ui.plots import latency_figure

# --- by hand ---------------------------------------------------------------------------------------------------------

SWEPT = [
    Swept(None, ["Two.", "cat"], [0.1, 0.1]),
    Swept(5, ["two", "dog"], [0.2, 1.0]),
    Swept(4, ["ten", "cat"], [3, 2]),
]


def test_where_answers_break():
    first, second = explore.told(["How many?", "What?"], SWEPT, [4, None]).split("\n\n")
    assert "holds down to an exit after layer 5 and breaks after layer 4" in first
    assert "The gate lets it go after layer 4." in first
    assert "after layer 5, the last possible, changes the answer" in second
    assert "The gate never lets it go." in second
    assert "holds down to an exit after layer 5" in explore.told(["How many?"], SWEPT[:2], [])
    table = explore.answers(["How many?", "What?"], SWEPT)
    assert table.to_numpy().tolist() == [["none", "Two.", "cat"], ["5", "two", "✗ dog"], ["4", "✗ ten", "cat"]]


def routes(grid=(2, 2)) -> Routes:
    """A text token, four patches, a text token; two layers of four experts, top-2."""
    experts = np.array([[0, 1], [0, 1], [1, 2], [2, 3], [2, 3], [0, 3]])
    weights = np.array([[0.75, 0.25]] * 6, dtype=np.float32)
    labels = ["“a”", "patch 1, 1", "patch 1, 2", "patch 2, 1", "patch 2, 2", "“b”"]
    visual = [False, True, True, True, True, False]
    by_layer = {0: experts, 1: experts[::-1].copy()}
    return Routes(
        Image.new("RGB", (100, 50), "white"), grid, visual, labels, by_layer, dict.fromkeys((0, 1), weights), 4
    )


def test_patches_that_go_to_the_same_experts():
    seen = routes()
    assert seen.alike(0, 0).tolist() == [1, 1, 0.75, 0, 0, 0.75]
    image, table = explore.token_view(seen, 0, 0)
    assert image.size == (300, 150)
    bright = [image.getpixel((x, y))[0] for y in (37, 112) for x in (75, 225)]
    assert bright == [255, pytest.approx(0.8 * 255, abs=2), pytest.approx(0.2 * 255, abs=1), pytest.approx(51, abs=1)]
    assert table.to_numpy().tolist() == [[0, "75%"], [1, "25%"]]
    assert explore.token_view(seen, 3, 0)[0].getpixel((0, 75)) == explore.FRAME  # its own patch is framed
    assert explore.token_view(routes(grid=None), 0, 0)[0] is None
    assert explore.token_view(None, 0, 0) == explore.token_view(seen, 0, 7) == (None, None)


@pytest.mark.parametrize(("at", "token"), [([10, 10], 1), ([290, 10], 2), ([10, 140], 3), ([299, 149], 4)])
def test_a_click_chooses_the_patch(at, token):
    assert explore.clicked(routes(), gr.SelectData(None, {"index": at, "value": None})) == token


def test_choices_begin_with_text():
    assert [token for _, token in explore.choices(routes())] == [0, 5, 1, 2, 3, 4]
    assert explore.first_asked(routes()) == 5


def test_the_map_is_figure_6():
    drawn = explore.shown_map(routes(), 0)
    assert [trace["name"] for trace in drawn["data"]] == ["visual", "text"]
    assert "4 visual tokens" in drawn["summary"]
    assert explore.shown_map(None, 0) is None


def test_results_are_drawn_by_the_same_functions(tmp_path, monkeypatch):
    meta = {"model": "mini", "data": "1 of one", "command": "decomoe collect", "date": "2026-01-02", "top": 0.2}
    rows = [{"layer": 0, "modality": kind, "share": 0.5} for kind in ("text", "visual")]
    data = Data(rows, meta)
    (tmp_path / "fig3b.json").write_text(data.to_json())
    (tmp_path / "table2.md").write_text("# Table 2: the halves\n\n| a |\n| --- |\n| 1 |\n")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    with gr.Blocks() as blocks:
        results.tab(None)
    found = [block for block in blocks.blocks.values() if isinstance(block, gr.HTML)]
    assert [json.loads(json.dumps(block.value)) for block in found] == [
        json.loads(json.dumps(shown(fig3b(data), "fig3b")))
    ]
    assert found[0].label == "Figure 3b: How concentrated is routing?"
    texts = [str(getattr(block, "value", "")) for block in blocks.blocks.values()]
    assert any("`decomoe collect`" in text for text in texts)
    assert "mini: 1 of one; 2026-01-02" in texts
    assert any(getattr(block, "label", "") == "Table 2: the halves" for block in blocks.blocks.values())


def test_time_by_layer_is_figure_1a():
    phase = Phase([dict.fromkeys(PARTS, 0.001), dict.fromkeys(PARTS, 0.002)], vision=0.003)
    names = ("Dense", "DecoMoE")
    drawn = latency_figure({name: Breakdown(phase, phase, steps=1) for name in names})
    rows = [
        {"method": name, "phase": view, "layer": layer, "part": part, "ms": 1.0 + layer}
        for view in ("prefill", "decode step")
        for name in names
        for layer in range(2)
        for part in PARTS
    ]
    assert drawn["views"]["by layer"] == shown(fig1a(Data(rows, {})), "latency")


# --- in a browser ----------------------------------------------------------------------------------------------------


def test_explore_in_a_browser(page, picture):
    page.get_by_role("tab", name="Explore").click()
    tab = page.locator("[role=tabpanel]:visible")
    tab.locator("input[type=file]").first.set_input_files(picture)
    expect(tab.locator(".image-container img, .image-frame img").first).to_be_visible(timeout=PATIENCE)
    tab.get_by_role("textbox", name="Second question").fill("Is there a dog? ${1+1}")
    tab.get_by_role("textbox", name="First question").fill("How many objects are there?")
    tab.get_by_role("textbox", name="First question").press("Enter")
    expect(tab.locator("#breaks")).to_contain_text("Question 2", timeout=PATIENCE)
    expect(tab.locator(".chart-note").nth(1)).to_contain_text("visual tokens use", timeout=4 * PATIENCE)
    expect(tab.locator("#sweep")).to_contain_text("answer 2")
    expect(tab.locator("#patches img")).to_be_visible(timeout=PATIENCE)
    token = tab.locator("#token input")
    before = token.input_value()
    tab.locator("#patches img").click(position={"x": 5, "y": 5})
    expect(token).not_to_have_value(before, timeout=PATIENCE)
    expect(token).to_have_value("patch 1, 1", timeout=PATIENCE)
    assert_accessible(page)


def test_explore_tells_what_is_wrong(page, picture):
    page.get_by_role("tab", name="Explore").click()
    tab = page.locator("[role=tabpanel]:visible")
    explore_button = tab.get_by_role("button", name="Explore", exact=True)
    explore_button.click()
    expect(page.get_by_text(ADD).first).to_be_visible()
    tab.locator("input[type=file]").first.set_input_files(picture)
    expect(tab.locator(".image-container img, .image-frame img").first).to_be_visible(timeout=PATIENCE)
    tab.get_by_role("textbox", name="Second question").fill("why? " * 1000)
    explore_button.click()
    expect(page.get_by_text("at most 4000").first).to_be_visible()
    page.problems[:] = [p for p in page.problems if ADD not in p and "at most 4000" not in p]


def test_explore_examples_fill_the_form(page):
    page.get_by_role("tab", name="Explore").click()
    tab = page.locator("[role=tabpanel]:visible")
    case = json.loads(explore.CASES.read_text())[0]
    tab.get_by_role("button", name=case["title"]).click()
    expect(tab.get_by_role("textbox", name="First question")).to_have_value(case["questions"][0])
    expect(tab.locator(".image-container img, .image-frame img").first).to_be_visible()


def test_results_are_accessible(page):
    page.get_by_role("tab", name="Results").click()
    page.locator("[role=tabpanel]:visible").get_by_role("button", name="Table 1").click()
    expect(page.locator(".chart-box:visible .main-svg").last).to_be_visible()
    assert_accessible(page)
