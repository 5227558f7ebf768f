"""The breakdown of time: everything is charged, to the right part, and nothing changes by looking."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import LAYERS, PROMPTS, inputs_for
from PIL import Image
from test_engine import count_hooks, engine, make_calibration
from torch.utils._python_dispatch import TorchDispatchMode

from decomoe import answer, latency
from decomoe.answer import Loaded
from decomoe.benchmarks import Benchmark, Case
from decomoe.collect.latency import time_all
from decomoe.evaluate.run import Batch
from decomoe.families import parts_of
from decomoe.latency import PARTS, profile
from decomoe.methods import DecoMoE, Dense
from decomoe.runtime import Session

METHOD = DecoMoE(exit_after=2, p=0.6, order="native")


@pytest.fixture
def clock(monkeypatch):
    """The clock of `latency`: it stands still unless moved, and then goes on by `tick` at every look."""
    hands = SimpleNamespace(now=0.0, tick=0.0)

    def look() -> float:
        hands.now += hands.tick
        return hands.now

    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=look))
    return hands


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_all_parts_of_all_layers_are_charged(model, clock, implementation):
    parts_of(model).text_model.set_experts_implementation(implementation)
    clock.tick = 1.0
    found = profile(model, METHOD, inputs_for(model, *PROMPTS), max_new_tokens=3)
    assert found.steps == 2
    for phase in (found.prefill, found.decode):
        assert len(phase.layers) == LAYERS
        for layer in phase.layers:
            assert list(layer) == list(PARTS)
            assert min(layer.values()) > 0
        assert phase.rest > 0
        assert phase.total == pytest.approx(sum(phase.parts.values()))
    assert found.prefill.vision > 0
    assert found.decode.vision == 0
    assert clock.now - 1 == pytest.approx(found.prefill.total + found.steps * found.decode.total)  # 1: the start


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ("attention", "self_attn.k_proj"),
        ("router", "mlp.gate"),
        ("dispatch", "mlp.experts.act_fn"),  # Python of the experts that is no matrix product
        ("other", "post_attention_layernorm"),
    ],
)
def test_a_delay_is_charged_where_it_happens(model, monkeypatch, clock, part, path):
    slow = model.model.language_model.layers[4].get_submodule(path)
    real = slow.forward

    def forward(*args, **kwargs):
        clock.now += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(slow, "forward", forward)
    found = profile(model, METHOD, inputs_for(model, PROMPTS[0]), max_new_tokens=2)
    for phase in (found.prefill, found.decode):
        assert phase.layers[4][part] == phase.total == 1


def test_the_gate_is_charged_to_the_method(model, monkeypatch, clock):
    calibration = make_calibration(model)
    real = calibration.gate.forward

    def forward(layer, features):
        clock.now += 1
        return real(layer, features)

    monkeypatch.setattr(calibration.gate, "forward", forward)
    found = profile(model, DecoMoE(theta=1.0), inputs_for(model, PROMPTS[0]), calibration, max_new_tokens=1)
    assert found.decode is None
    charged = [found.prefill.layers[layer]["method"] for layer in range(LAYERS)]
    assert charged == [0, 0, 0, 1, 1, 1]  # after layers 2, 3 and, at the final norm, 5
    assert found.prefill.total == 3


def test_looking_changes_nothing_and_leaves_nothing(model):
    inputs = inputs_for(model, PROMPTS[0])
    _, logits, _ = engine(model, METHOD, inputs)
    before = count_hooks(model)
    profile(model, METHOD, inputs, max_new_tokens=2)
    assert count_hooks(model) == before
    assert torch.equal(engine(model, METHOD, inputs)[1], logits)

    def fail(*_):
        raise RuntimeError("on purpose")

    for experts in (parts_of(model).experts[3], parts_of(model).layers[5].self_attn):
        handle = experts.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            profile(model, Dense(), inputs, max_new_tokens=1)
        handle.remove()
        assert count_hooks(model) == before
        assert torch.equal(engine(model, METHOD, inputs)[1], logits)


# --- against an independent count ------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Every operation of torch takes a second, and is counted where the model is by this class's own reckoning.

    Attributes:
        spent: seconds by (forward, part, layer); all that experts do is one part, "experts".
        routed: (forward, layer, experts of the routes), as the experts were told.
    """

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.clock, self.stack, self.forward = clock, [("rest", None)], 0
        self.spent: Counter = Counter()
        self.routed: list[tuple[int, int, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.clock.now += 1
        self.spent[(self.forward, *self.stack[-1])] += 1
        return func(*args, **(kwargs or {}))

    def within(self, call: Callable, part: str, layer: int | None = None) -> Callable:
        """`call`, whose operations are those of a part."""

        @wraps(call)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self.stack.append((part, layer))
            if part == "experts":
                self.routed.append((self.forward, layer, args[1]))
            try:
                return call(*args, **kwargs)
            finally:
                self.stack.pop()

        return inside

    def watch(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        """Wrap the model's parts and the three doors of a method; counting starts with every answer."""

        def wrap(module: Any, *place: Any) -> None:
            monkeypatch.setattr(module, "forward", self.within(module.forward, *place))

        qwen, forward, generate = model.config.model_type == "qwen3_vl_moe", model.forward, Session.generate
        for name in ["visual"] if qwen else ["vision_tower", "multi_modal_projector"]:
            wrap(model.model.get_submodule(name), "vision")
        for number, layer in enumerate(model.model.language_model.layers):
            wrap(layer, "other", number)
            wrap(layer.self_attn, "attention", number)
            wrap(layer.mlp.gate, "router", number)
            wrap(layer.mlp.experts, "experts", number)
        for name, door in {name: getattr(Session, name) for name in ("enter", "route", "end")}.items():

            def method(session: Session, *args: Any, name=name, door=door) -> Any:
                return self.within(door, "method", LAYERS - 1 if name == "end" else args[0])(session, *args)

            monkeypatch.setattr(Session, name, method)

        @wraps(forward)
        def one_more(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self.forward += 1
            return result

        def anew(session: Session, *args: Any, **kwargs: Any) -> Any:
            self.forward = 0
            self.spent.clear()
            self.routed.clear()
            return generate(session, *args, **kwargs)

        monkeypatch.setattr(model, "forward", one_more)
        monkeypatch.setattr(Session, "generate", anew)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_operation_is_charged_to_its_part(model, monkeypatch, clock, implementation):
    parts_of(model).text_model.set_experts_implementation(implementation)
    calibration = make_calibration(model)
    counted = Operations(clock)
    counted.watch(monkeypatch, model)
    with counted:  # the gate fires at once, after layer 2
        found = profile(model, DecoMoE(theta=1e-9, p=0.6), inputs_for(model, PROMPTS[0]), calibration, 3)
    assert (found.steps, counted.forward) == (2, 3)
    spent, products = counted.spent, Counter()
    for forward, layer, experts in counted.routed:  # two products and the activation; "eager" goes expert by expert
        products[forward, layer] += 3 * (len(experts.unique()) if implementation == "eager" else 1)
    for phase, forwards in ((found.prefill, [0]), (found.decode, [1, 2])):

        def mean(*place: Any, of=spent, forwards=forwards) -> float:
            return sum(of[(forward, *place)] for forward in forwards) / len(forwards)

        for number, layer in enumerate(phase.layers):
            assert layer["expert MLP"] == mean(number, of=products)
            assert layer["expert MLP"] + layer["dispatch"] == mean("experts", number)
            for part in ("attention", "router", "method", "other"):
                assert layer[part] == mean(part, number)
        assert (phase.vision, phase.rest) == (mean("vision", None), mean("rest", None))
        whole = sum(seconds for (forward, *_), seconds in spent.items() if forward in forwards)
        assert phase.total == whole / len(forwards)
    assert found.prefill.vision > 0
    assert found.prefill.layers[3]["method"] > found.prefill.layers[2]["method"]  # where the gate is asked, and cuts
    assert found.decode.layers[3]["method"] > found.decode.layers[2]["method"]  # a prefix is taken


# --- lines of the collector ------------------------------------------------------------------------------------------

TIMED = {"dense": Dense(), "decomoe:exit_after=4": DecoMoE(exit_after=4, rcep=False), "decomoe": METHOD}
SIGHT = {"dense": LAYERS, "decomoe:exit_after=4": 5, "decomoe": 3}  # layers that see the picture
QUESTIONS = (2, 1)


@pytest.fixture
def asked(model, monkeypatch, clock) -> Callable[[], list[dict]]:
    """Ask two questions of the tiny model and time them. A token takes each layer's attention a second."""
    monkeypatch.setattr(answer, "time", latency.time)
    for module in ("decomoe.answer", "decomoe.collect.latency"):
        monkeypatch.setattr(f"{module}.encode", lambda _, asked: inputs_for(model, PROMPTS[int(asked[0][1])]))
    for layer in model.model.language_model.layers:
        real = layer.self_attn.k_proj.forward

        def forward(hidden, real=real):
            clock.now += hidden.shape[1]
            return real(hidden)

        monkeypatch.setattr(layer.self_attn.k_proj, "forward", forward)
    loaded = Loaded(model, SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: str(ids.tolist()))))
    picture = Image.new("RGB", (8, 8))
    cases = [Case(str(number), lambda: picture, str(number), "") for number in QUESTIONS]
    return lambda: time_all(loaded, TIMED, Batch(Benchmark("tiny", lambda *_: cases), "", 0, cases))


def test_a_line_against_a_count_of_tokens(asked):
    lines = asked()
    assert len(lines) == len(QUESTIONS)
    for line, number in zip(lines, QUESTIONS, strict=True):
        text = len(PROMPTS[number].before) + len(PROMPTS[number].after)
        tokens = {spec: [text + 4 * (layer < sight) for layer in range(LAYERS)] for spec, sight in SIGHT.items()}
        assert line["ttft_s"] == {spec: sum(tokens[spec]) for spec in TIMED}
        assert line["tpot_s"] == dict.fromkeys(TIMED, LAYERS)
        assert list(line["parts"]) == ["dense", "decomoe"]
        for spec, phases in line["parts"].items():
            for phase, seconds in (("prefill", tokens[spec]), ("decode", [1] * LAYERS)):
                expected = {part: [0] * LAYERS for part in PARTS}
                assert phases[phase] == {**expected, "attention": [1000 * value for value in seconds]}


def test_an_answer_of_one_token_has_no_time_per_further_token(model, asked):
    prompts = [inputs_for(model, PROMPTS[number]) for number in QUESTIONS]
    first = [model(**inputs).logits[0, -1].argmax().item() for inputs in prompts]
    model.generation_config.eos_token_id = first  # dense answers end with it
    for line in asked():
        assert line["tpot_s"]["dense"] is None
        assert line["ttft_s"]["dense"] > 0
        assert set(line["parts"]["dense"]) == {"prefill", "decode"}  # of as many steps as ever
