"""Asking: streaming, stopping, errors from the worker thread, several people at once."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import BUILDERS, slowed
from transformers import AutoTokenizer, GotOcr2ImageProcessorPil

from decomoe.answer import MINI, Answer, Loaded, Token, ask, encode, stream
from decomoe.decode import CompiledDecode
from decomoe.families import InternVLImageProcessor
from decomoe.methods import DecoMoE, Dense
from decomoe.mini.draw import draw
from decomoe.ui.plots import _rows


def plain_answer(loaded: Loaded, image, question: str) -> str:
    """What transformers alone answers, with the processor used by hand."""
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text = loaded.processor.apply_chat_template(message, add_generation_prompt=True)
    inputs = loaded.processor(images=[image], text=[text], return_tensors="pt")
    with torch.no_grad():
        ids = loaded.model.generate(**inputs, max_new_tokens=64, do_sample=False)
    return loaded.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_dense_is_what_transformers_answers(mini, image):
    for question in ("Describe the picture.", "Where is the camel?"):
        assert ask(mini, image, question, Dense()).text == plain_answer(mini, image, question)


@pytest.fixture
def slow(mini):
    with slowed(mini.model, 0.02):
        yield


def test_stream_grows_to_the_answer(mini, image, slow):
    *tokens, answer = stream(mini, image, "Describe the picture.", DecoMoE(), pace_s=0.001)
    tokens = [token for token in tokens if token is not None]
    assert isinstance(answer, Answer)
    texts = [token.text for token in tokens]
    assert len(texts) >= 5
    for earlier, later in itertools.pairwise(texts):
        assert later.startswith(earlier)
    assert answer.text.startswith(texts[-1])
    assert answer.trace.tokens.generated == len(answer.trace.token_times_s)
    assert answer.trace.ttft_s == answer.trace.token_times_s[0]
    assert sorted(answer.trace.token_times_s) == answer.trace.token_times_s


def test_watching_takes_little_of_the_time(mini, image, slow, monkeypatch):
    """Who is slow with what he sees is shown less, not the run slowed down."""
    monkeypatch.setattr(mini.model.generation_config, "eos_token_id", None)
    monkeypatch.setattr("decomoe.answer.WATCHING", 0.05)
    looks = []
    for event in stream(mini, image, "Describe the picture.", max_new_tokens=24, pace_s=0.001):
        looks.append((time.monotonic(), event))
        time.sleep(0.005)
    (first, _), (second, _), *_ = looks
    assert second - first >= 20 * 0.005
    *tokens, answer = (event for _, event in looks)
    assert [len(answer.trace.token_times_s), len(tokens) < 24] == [24, True]


def test_compiled_decode_gives_the_same_tokens(mini, image, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    seen = []
    for decode in (None, CompiledDecode(mini.model)):
        tokens: list = []
        see = lambda token: tokens.append((token.text, token.prefix()))  # noqa: B023, E731 (called in this round)
        method = DecoMoE(exit_after=9, p=0.5)
        answer = ask(mini, image, "Describe the picture.", method, on_token=see, decode=decode)
        seen.append((tokens, answer.text, answer.trace.prefix))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) >= 5


def test_closing_a_stream_stops_it_and_frees_the_model(mini, image):
    running = stream(mini, image, "Describe the picture.", Dense(), max_new_tokens=4000)
    next(running)
    running.close()
    assert not mini.lock.locked()
    assert ask(mini, image, "Where is the camel?").text


def test_stop_ends_the_answer_within_a_token(mini, image):
    stop, texts = threading.Event(), []

    def on_token(token: Token) -> None:
        texts.append(token.text)
        if len(texts) == 2:
            stop.set()

    answer = ask(mini, image, "Describe the picture.", Dense(), on_token=on_token, stop=stop)
    assert answer.trace.tokens.generated == 2


def test_a_stream_can_be_stopped_from_outside(mini, image, slow, monkeypatch):
    monkeypatch.setattr(mini.model.generation_config, "eos_token_id", None)
    stop = threading.Event()
    for event in stream(mini, image, "Describe the picture.", max_new_tokens=400, pace_s=0.001, stop=stop):
        if isinstance(event, Token):
            stop.set()
    assert isinstance(event, Answer)
    assert event.trace.tokens.generated < 400


def test_stop_in_the_prefill_ends_it_between_layers(mini, image):
    """The layers after the one at which it was stopped never run, and the model is free again."""
    stop, entered = threading.Event(), []
    layers = mini.model.model.language_model.layers

    def note(layer: int) -> None:
        entered.append(layer)
        if layer == 4:
            stop.set()

    handles = [layer.register_forward_hook(lambda *_, index=index: note(index)) for index, layer in enumerate(layers)]
    with pytest.raises(ValueError, match="before the first token"):
        ask(mini, image, "Describe the picture.", Dense(), stop=stop)
    for handle in handles:
        handle.remove()
    assert entered == [0, 1, 2, 3, 4]
    assert ask(mini, image, "Where is the camel?").text


def test_a_waiting_stream_beats_and_can_be_closed(mini, image):
    with mini.lock:  # somebody else's question runs
        waiting = stream(mini, image, "Where is the camel?", pace_s=0.01)
        assert next(waiting) is None
        waiting.close()
    assert not mini.lock.locked()


def test_tokens_tell_what_happened_so_far(mini, image):
    """Read while the answer is being made, they say what the whole trace says afterwards."""
    tokens, prefixes = [], []

    def on_token(token: Token) -> None:
        tokens.append(token.start())
        prefixes.append(token.prefix())

    trace = ask(mini, image, "Describe the picture.", DecoMoE(exit_after=6), on_token=on_token).trace
    assert prefixes == [trace.prefix.prefill, *trace.prefix.decode]
    for start in tokens:
        assert (start.exit_after, start.prefix.prefill, start.live) == (6, trace.prefix.prefill, trace.live)
        assert start.mass["visual"] == trace.mass["visual"]
        assert start.prefix.decode == []


def test_gate_readings_of_a_dense_run_are_those_that_decide(mini, image):
    """They equal the readings of runs that exit, up to their exit; nothing else of the dense run changes."""
    dense = ask(mini, image, "Describe the picture.", Dense(), read_gate=True)
    assert dense.text == plain_answer(mini, image, "Describe the picture.")
    assert dense.trace.exit_after is None
    assert dense.trace.flops.sparse == dense.trace.flops.sparse_dense
    readings = {reading.layer: reading.p_exit for reading in dense.trace.gate}
    for theta in (0.05, 0.5, 1.0):
        trace = ask(mini, image, "Describe the picture.", DecoMoE(theta=theta), max_new_tokens=1).trace
        for reading in trace.gate:
            if reading.p_exit is not None:
                assert reading.p_exit == pytest.approx(readings[reading.layer], abs=1e-6)
        assert trace.exit_after == next((layer for layer, p in readings.items() if p >= theta), None)


def test_errors_of_the_worker_thread_are_raised(mini, image):
    with pytest.raises(ValueError, match="question is empty"):
        list(stream(mini, image, "  "))
    with pytest.raises(ValueError, match="after layers"):
        list(stream(mini, image, "What is this?", DecoMoE(exit_after=40)))
    assert ask(mini, image, "Where is the camel?").text  # and the model lives on


def test_an_exception_in_the_listener_leaves_the_model_free(mini, image):
    def on_token(token: Token) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(mini, image, "Describe the picture.", on_token=on_token)
    assert not mini.lock.locked()
    assert ask(mini, image, "Where is the camel?", Dense()).text == plain_answer(mini, image, "Where is the camel?")


def test_people_at_once_get_their_own_answers(mini):
    questions = [(draw(seed, kind="objects").image, "Describe the picture.") for seed in range(6)]
    methods = [Dense(), DecoMoE()] * 3
    alone = [ask(mini, *q, method).text for q, method in zip(questions, methods, strict=True)]
    with ThreadPoolExecutor(6) as pool:
        together = [pool.submit(ask, mini, *q, method) for q, method in zip(questions, methods, strict=True)]
        assert [answer.result().text for answer in together] == alone


def internvl_processor(folder):
    """A small InternVL processor, made of the mini model's tokenizer with InternVL's image tokens."""
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = AutoTokenizer.from_pretrained(MINI, extra_special_tokens={**names, "video_token": "<video>"})
    images = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    template = (MINI / "chat_template.jinja").read_text()
    template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
    InternVLImageProcessor(images, tokenizer, 4, chat_template=template).save_pretrained(folder)
    return InternVLImageProcessor.from_pretrained(folder)


def test_internvl_tiles_and_special_tokens_in_questions(tmp_path, image):
    """Every tile has its tokens, in a batch too, and what a question spells is never one of them."""
    processor = internvl_processor(tmp_path)
    loaded = Loaded(BUILDERS["internvl"](), processor)
    wide = image.resize((64, 16))
    questions = ["Where is it?", "Where <IMG_CONTEXT> is <video> it <img></img>?"]
    inputs = encode(loaded, [(wide, questions[0]), (image.resize((16, 16)), questions[1])])
    per_row = (inputs["input_ids"] == processor.image_token_id).sum(1).tolist()
    assert sum(per_row) == 4 * len(inputs["pixel_values"])
    assert per_row[0] > per_row[1] > 0
    alone = encode(loaded, [(wide, questions[0])])
    assert torch.equal(inputs["pixel_values"][: len(alone["pixel_values"])], alone["pixel_values"])
    assert questions[1] in processor.tokenizer.decode(inputs["input_ids"][1])


def test_one_may_look_while_the_answer_goes_on(mini, image, slow, monkeypatch):
    """What is seen of finished forwards from another thread is what the whole trace says in the end."""
    monkeypatch.setattr(mini.model.generation_config, "eos_token_id", None)
    looks = []
    for event in stream(mini, image, "Describe the picture.", DecoMoE(exit_after=9), max_new_tokens=60, pace_s=0.001):
        if isinstance(event, Answer):
            whole = event.trace
        elif event is not None:
            looks.append((event.number, event.start(), event.prefix()))
    assert len(looks) >= 3
    for number, start, prefix in looks:
        assert start.prefix.prefill == whole.prefix.prefill
        assert start.mass["text"] == whole.mass["text"]
        assert prefix == [whole.prefix.prefill, *whole.prefix.decode][number - 1]


def test_a_token_tells_which_experts_it_ran_through(mini, picture):
    """Together they are those that generated tokens gave mass to; inside a prefix they are of the prefix."""
    order = mini.calibration.orders.tolist()
    ran: list = []
    on_token = lambda token: ran.append(token.experts())  # noqa: E731
    trace = ask(mini, picture, "Describe the picture.", Dense(), max_new_tokens=6, on_token=on_token).trace
    for layer, mass in enumerate(trace.mass["generated"]):
        used = {order[layer][place] for token in ran[1:] for place in token[layer]}
        assert used == {expert for expert, value in enumerate(mass) if value}
    ran.clear()
    trace = ask(mini, picture, "Describe the picture.", DecoMoE(exit_after=6, prefix=5), on_token=on_token).trace
    assert len(ran) == trace.tokens.generated
    assert all(set(token[layer]) < set(range(5)) for token in ran for layer in range(7, 16))
    assert any(max(token[3]) >= 5 for token in ran)


@pytest.mark.parametrize(("tokens", "compared"), [(4, False), (5, True)])
def test_times_per_token_of_few_tokens_are_not_compared(mini, image, tokens, compared):
    dense, ours = (
        ask(mini, image, "Describe the picture.", method, max_new_tokens=tokens).trace
        for method in (Dense(), DecoMoE(exit_after=9))
    )
    ratios = {row[0]: row[4] for row in _rows(dense, ours)}
    assert ratios["TTFT"] == pytest.approx(ours.ttft_s / dense.ttft_s)
    assert ratios["TPOT"] == (pytest.approx(ours.tpot_s / dense.tpot_s) if compared else None)
