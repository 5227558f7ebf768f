"""The page in a real browser, on the shipped mini model."""

import base64
import csv
import json
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from browser import PATIENCE, answer, ask, assert_accessible, finished, note, opened, set_number, upload, watched
from conftest import slowed
from PIL import Image
from playwright.sync_api import Page, expect

import decomoe.ui.ask as tab
from decomoe.answer import Token, stream
from decomoe.answer import ask as alone
from decomoe.benchmarks.drawn import CALIBRATION_SEED, FRESH_SEEDS
from decomoe.methods import DecoMoE, Dense
from decomoe.mini.draw import draw
from decomoe.mini.examples import FOLDER, examples
from decomoe.mini.train import TRAIN_SEEDS
from decomoe.ui import hosting
from decomoe.ui.page import build, launch_options

EXIT, PREFIX, ROUTING, COSTS, LATENCY = range(5)  # the charts in order


@pytest.fixture
def endless(loaded, monkeypatch):
    """Answers that only end when they are stopped, or at the most tokens."""
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", None)


@pytest.fixture
def slow(loaded):
    with slowed(loaded.model, 0.05):
        yield


WATCH = """
window.seen = {dense: [], decomoe: []};
window.states = [];
window.said = [];
const root = document.querySelector('#answers [data-state]'), status = document.querySelector('#answers [role=status]');
const look = () => {
  const note = (list, value) => { if (value && value !== list.at(-1)) list.push(value); };
  note(window.states, root.dataset.state);
  note(window.said, status.textContent);
  if (root.dataset.state !== 'running') return;
  for (const method in window.seen)
    note(window.seen[method], document.querySelector(`#${method}-answer .pane-text`).textContent);
};
new MutationObserver(look).observe(root, {subtree: true, childList: true, characterData: true, attributes: true});
"""


def test_both_answers_stream_and_are_replayed_side_by_side(page, picture, slow):
    upload(page, picture)
    page.evaluate(WATCH)
    ask(page, "Describe the picture.")
    finished(page)
    seen, states, said = page.evaluate("[window.seen, window.states, window.said]")
    for method in ("dense", "decomoe"):
        assert len(seen[method]) >= 3, f"the {method} answer did not stream: {seen}"
        assert all(later.startswith(earlier) for earlier, later in pairwise(seen[method]))
    assert states == ["running", "replaying", "done"]
    assert said[0] == "Dense is answering." and said[-1].startswith("Finished")
    assert any("visual tokens" in sentence for sentence in said)
    texts = [answer(page, method).text_content() for method in ("dense", "decomoe")]
    page.evaluate("window.states = []")
    page.get_by_role("button", name="Replay").click()
    page.wait_for_function("window.states.includes('replaying') && window.states.at(-1) === 'done'")
    assert [answer(page, method).text_content() for method in ("dense", "decomoe")] == texts
    assert page.locator("#numbers td").all_text_contents()[-1] not in ("", "–")
    bars = page.locator(".chart-box .bars .point")
    expect(bars.first).to_be_attached()
    assert bars.count() >= 17  # 16 layers and at least one candidate


def test_switches_reach_the_engine_and_charts_stay(page, picture):
    """A second question about the same picture, with other switches, is drawn into the same nodes."""
    upload(page, picture)
    page.get_by_label("SAVB").uncheck()
    page.get_by_label("RCEP").uncheck()
    ask(page, "Where is the camel?")
    finished(page)
    expect(note(page, EXIT)).to_have_text("The visual tokens stay in all layers.")
    expect(note(page, PREFIX)).to_have_text("All 32 experts in every layer.")
    page.evaluate("document.querySelectorAll('.chart-box').forEach(box => { box.mark = 'same'; })")
    page.get_by_label("RCEP").check()
    set_number(page, "number input for p", "0.05")
    expect(note(page, EXIT)).to_contain_text("Predicted from the dense run: The visual tokens leave after layer 9")
    ask(page, "How many objects are there?")
    expect(note(page, EXIT)).to_have_text("The visual tokens leave after layer 9 of 16 (fixed).")
    expect(note(page, PREFIX)).to_contain_text("In 6 of 16 layers the prefill keeps 4 to")
    marks = page.evaluate("[...document.querySelectorAll('.chart-box')].map(box => box.mark)")
    assert len(marks) == 5 and set(marks) == {"same"}


def test_what_moving_theta_predicts_comes_true(page, picture):
    upload(page, picture)
    ask(page, "Where is the camel?")
    finished(page)
    before = note(page, EXIT).text_content()
    set_number(page, "number input for θ", "0.02")
    expect(note(page, EXIT)).to_contain_text("Predicted from the dense run: ")
    predicted = note(page, EXIT).text_content().removeprefix("Predicted from the dense run: ")
    assert predicted != before
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(note(page, EXIT)).to_have_text(predicted)


def test_knobs_under_more(page, picture, loaded, monkeypatch):
    """They become the method that runs."""
    asked = []

    def spy(*args, **options):
        asked.append((args[3], options["max_new_tokens"]))
        return stream(*args, **options)

    monkeypatch.setattr(tab, "stream", spy)
    upload(page, picture)
    page.get_by_role("button", name="More").click()
    set_number(page, "Forced exit", "5")
    set_number(page, "Keep ratio", "0.25")
    set_number(page, "Length", "2")
    page.get_by_label("native").check()
    page.get_by_label("drop", exact=True).check()
    ask(page, "Where is the camel?")
    finished(page)
    (first, _), (ours, length) = asked
    assert (first, length) == (Dense(), 2)
    wanted = {"exit_after": 5, "keep_ratio": 0.25, "p": None, "order": "native", "outside": "drop"}
    assert isinstance(ours, DecoMoE) and ours.settings().items() >= wanted.items()
    expect(note(page, PREFIX)).to_contain_text("In 10 of 16 layers the prefill keeps 8 to 8 of 32 experts")


def test_stop_keeps_what_has_come(page, picture, endless):
    upload(page, picture)
    ask(page, "Describe the picture.")
    expect(answer(page, "dense")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("[data-state=stopped]")).to_be_attached()
    expect(answer(page, "dense")).not_to_be_empty()
    expect(page.locator("#answers [role=status]")).to_have_text("Stopped.")
    expect(page.locator("#decomoe-answer .pane-note")).to_be_empty()  # it has not come to its end


def test_stop_reaches_the_run_itself(site, picture, endless):
    """It does not wait for the next thing to be shown; and who does not know the run's name can't stop it."""
    handler = next(f for f in site.page.fns.values() if getattr(f.fn, "func", None) is tab._run)
    image = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    knobs = [block.value for block in handler.inputs[5:]]
    run = handler.fn(image, "Describe the picture.", {}, "dense", 256, *knobs)
    shown = next(run)[0]
    assert tab._stopped({**shown, "run": "1"})["state"] == "stopped"
    assert next(run)[0]["state"] == "running"
    assert tab._stopped(shown)["status"] == "Stopped."
    assert list(run) == []
    assert not site.loaded.lock.locked()
    assert tab._running == {}


def test_what_fails_while_it_is_shown_is_told(page, picture, slow, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(tab, "prefix_figure", broken)
    upload(page, picture)
    ask(page, "Describe the picture.")
    expect(page.get_by_text("Something went wrong inside").first).to_be_visible()
    page.problems[:] = [problem for problem in page.problems if "went wrong inside" not in problem]


def test_who_waits_sees_his_place(context, address, picture, loaded):
    pages = [opened(context.new_page(), address) for _ in range(2)]
    with loaded.lock:  # the first one's answer takes long
        for page, state in zip(pages, ("running", "empty"), strict=True):
            upload(page, picture)
            ask(page, "Where is the camel?")
            expect(page.locator(f"#answers [data-state={state}]")).to_be_attached()
        place = pages[1].locator("#line")
        expect(place).to_contain_text("queue: 1/1")
        button, below = (pages[1].get_by_role("button", name=name).bounding_box() for name in ("Stop", "Draw a fresh"))
        words = place.locator(".progress-text").bounding_box()
        assert button["y"] + button["height"] <= words["y"] and words["y"] + words["height"] <= below["y"]
    for page in pages:
        finished(page)
        expect(page.locator("#line")).not_to_contain_text("queue")
        page.close()


def test_closing_the_tab_frees_the_model(context, address, picture, loaded, endless, monkeypatch):
    """The run ends long before its last token, and the next person is served."""
    closed, tokens = threading.Event(), []

    def spy(*args, **options):
        try:
            for event in stream(*args, **options):
                if isinstance(event, Token):
                    tokens.append(event.number)
                yield event
        finally:
            closed.set()

    monkeypatch.setattr(tab, "stream", spy)
    monkeypatch.setattr(tab, "MAX_TOKENS", 4000)
    page = opened(context.new_page(), address)
    upload(page, picture)
    page.get_by_role("button", name="More").click()
    page.get_by_label("Length").fill("4000")
    ask(page, "Describe the picture.")
    expect(answer(page, "dense")).not_to_be_empty()
    page.close()
    assert closed.wait(PATIENCE / 1000)
    assert max(tokens) < 2000
    assert not loaded.lock.locked()


def test_recorded_examples_answer_without_the_model(page, loaded, monkeypatch):
    example = examples()[2]  # its answer is long enough to see the replay
    with loaded.lock:  # nobody could ask it now
        page.locator(".example").nth(2).click()
        finished(page)
        for method, trace in zip(("dense", "decomoe"), example.traces, strict=True):
            assert answer(page, method).text_content().split() == trace.answer.split()
        expect(page.locator(".pane-label")).to_contain_text(f"Recorded on {example.date}")
        expect(page.locator(".pane-truth")).to_have_text(f"True answer: {example.answer}")
        expect(page.get_by_label("Question", exact=True)).to_have_value(example.question)
        expect(page.locator("#picture img").first).to_be_visible()
        expect(note(page, COSTS)).to_contain_text("DecoMoE against Dense")
        page.get_by_role("button", name="Replay").click()
        expect(page.locator("[data-state=replaying]")).to_be_attached()


def test_while_the_model_loads_examples_answer_and_questions_wait(context, loaded, picture, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))  # when it closes it clears its folder
    monkeypatch.setattr(hosting, "load", lambda *where: loaded)
    host = hosting.Host()
    demo = build(host)
    options = launch_options(host) | {"server_name": "127.0.0.1", "prevent_thread_lock": True, "quiet": True}
    _, url, _ = demo.launch(**options)
    page = opened(watched(context.new_page()), url)
    line = page.locator("#loading")
    expect(line).to_have_text(hosting.LOADING)
    assert httpx.get(f"{url}healthz").json() == {"status": "loading", "model": "mini"}
    page.locator(".example").nth(2).click()
    finished(page)
    assert answer(page, "dense").text_content().split() == examples()[2].traces[0].answer.split()
    upload(page, picture)
    ask(page, "Where is the camel?")
    expect(page.locator("#dense-answer .pane-note")).to_have_text(hosting.LOADING)
    expect(answer(page, "dense")).to_be_empty()
    host.load()
    finished(page)
    told = alone(loaded, picture, "Where is the camel?", Dense()).text
    assert answer(page, "dense").text_content().split() == told.split()
    expect(line).to_be_hidden()
    assert page.problems == []
    page.close()
    demo.close()


def test_recordings_are_of_the_pictures_beside_them():
    rows = json.loads((FOLDER / "examples.json").read_text())
    assert len(rows) == len(examples()) >= 5
    for example in examples():
        assert [trace.method for trace in example.traces] == ["dense", "decomoe"]
        for trace in example.traces:
            assert trace.question == example.question
            assert len(trace.token_ends) == len(trace.token_times_s) == trace.tokens.generated
            assert trace.token_ends[-1] == len(trace.answer)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) < 500_000


def test_a_fresh_picture_has_questions_and_true_answers(page, monkeypatch):
    assert min(FRESH_SEEDS) > CALIBRATION_SEED + 100_000 and max(FRESH_SEEDS) < TRAIN_SEEDS
    monkeypatch.setattr(tab, "FRESH_SEEDS", [700_003])
    truths = {question.text: question.answer for question in draw(700_003).questions}
    page.get_by_role("button", name="Draw a fresh picture").click()
    choices = page.locator("fieldset", has_text="Questions to try").get_by_role("radio")
    expect(choices.nth(1)).to_be_visible()
    choices.nth(1).check()
    chosen = choices.nth(1).get_attribute("value")
    expect(page.get_by_label("Question", exact=True)).to_have_value(chosen)
    page.get_by_role("button", name="Ask", exact=True).click()
    finished(page)
    expect(page.locator(".pane-truth")).to_have_text(f"True answer: {truths[chosen]}")
    ask(page, "Is this a question that nobody prepared?")
    expect(page.locator(".pane-truth")).to_be_empty()


def downloaded(page: Page, chart: int, name: str) -> str:
    with page.expect_download() as download:
        page.locator(".chart-tools").nth(chart).get_by_text(name, exact=True).click()
    return Path(download.value.path()).read_text()


def test_every_plot_gives_its_data(page):
    page.locator(".example").nth(1).click()
    finished(page)
    trace = examples()[1].traces[1]
    rows = list(csv.reader(downloaded(page, EXIT, "CSV").splitlines()))
    readings = [(r.layer, round(r.p_exit, 4)) for r in trace.gate if r.p_exit is not None]
    assert rows[0] == ["series", "after layer", "p(exit)", "value"]
    assert [(int(row[1]), float(row[2])) for row in rows[1:]] == readings
    bars = json.loads(downloaded(page, PREFIX, "JSON"))["data"][0]
    assert bars["y"] == [m or 32 for m in trace.prefix.prefill]
    page.get_by_role("button", name="visual", exact=True).click()
    expect(page.get_by_role("button", name="visual", exact=True)).to_have_attribute("aria-pressed", "true")
    heat = [row for row in csv.reader(downloaded(page, ROUTING, "CSV").splitlines()) if row[0] == "visual"]
    assert len(heat) == 16 * 32
    assert sum(float(row[3]) for row in heat[:32]) == pytest.approx(100, abs=0.5)  # per cent of the first layer
    assert "KV cache" in downloaded(page, COSTS, "CSV")


def test_where_the_time_goes(page):
    page.locator(".example").nth(1).click()
    finished(page)
    page.get_by_role("button", name="Where did the time go?").click()
    expect(note(page, LATENCY)).to_contain_text("One prefill. Dense: ")
    events = json.loads(downloaded(page, LATENCY, "Trace"))["traceEvents"]
    assert {event["pid"] for event in events} == {"Dense", "DecoMoE"}
    assert {event["ph"] for event in events} == {"X"}
    page.get_by_role("button", name="by layer").click()
    expect(note(page, LATENCY)).to_contain_text("Of the decoder layers' time attention takes")
    panels = {row[0].rpartition(", ")[0] for row in csv.reader(downloaded(page, LATENCY, "CSV").splitlines()[1:])}
    assert panels == {f"{name}, {phase}" for name in ("Dense", "DecoMoE") for phase in ("prefill", "decode step")}


def test_keyboard_alone_is_enough(page):
    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent.trim() || document.activeElement.placeholder") == name:
                return
        raise AssertionError(f"Tab does not reach {name}")

    tab_to(examples()[0].question)
    page.keyboard.press("Enter")
    finished(page)
    tab_to("Replay at true speed")
    page.keyboard.press("Enter")
    expect(page.locator("[data-state=replaying]")).to_be_attached()
    page.evaluate("document.activeElement.blur(); document.querySelector('#picture').scrollIntoView()")
    page.get_by_label("Question", exact=True).focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("What is in the picture?")
    page.keyboard.press("Enter")
    expect(page.locator(".pane-label")).to_be_empty()
    finished(page)


def test_ask_is_accessible(page):
    expect(page.locator("h1")).to_have_count(1)
    page.locator(".example").nth(1).click()
    finished(page)
    expect(page.locator(".chart-tools").nth(COSTS).locator("button").first).to_be_visible()
    assert_accessible(page)


DOTS = """
window.dots = {1: new Set(), 2: new Set()};
setInterval(() => {
  for (const chart in window.dots) {
    const last = document.querySelectorAll('.chart-box')[chart].data?.at(-1);
    if (last?.name === 'latest token' && document.querySelector('[data-state=running]'))
      window.dots[chart].add(JSON.stringify([last.x, last.y]));
  }
}, 20);
"""


def test_long_answers_are_no_load(page, picture, endless, slow):
    """Two answers of 96 tokens, with all charts, take not more than 3 MB; prefixes and routes move with the tokens."""
    upload(page, picture)
    page.evaluate(DOTS)
    page.get_by_role("button", name="More").click()
    set_number(page, "Forced exit", "5")
    network, received = page.context.new_cdp_session(page), []
    network.send("Network.enable")
    network.on("Network.dataReceived", lambda event: received.append(event["dataLength"]))
    ask(page, "Describe the picture.")
    expect(page.locator("#decomoe-answer .pane-note")).to_contain_text("96 tokens", timeout=5 * PATIENCE)
    finished(page)
    assert 10_000 < sum(received) < 3_000_000
    kept, ran = page.evaluate("Object.values(window.dots).map(seen => seen.size)")
    assert kept >= 2 and ran >= 4


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
        upload(page, path)
    ask(page, question)
    expect(page.get_by_text(message).first).to_be_visible()
    assert "Traceback" not in page.content()
    expect(page.get_by_label("Question", exact=True)).to_be_editable()  # the page still lives
    page.problems[:] = [problem for problem in page.problems if message not in problem]


def test_model_and_question_text_is_never_run(page, picture):
    upload(page, picture)
    ask(page, "${1+1} <img src=x onerror=\"document.title='run'\"> {{7*7}}")
    finished(page)
    assert page.title() != "run"
