"""The breakdown of time: everything is charged, to the right part, and nothing changes by looking."""

from types import SimpleNamespace

import pytest
import torch
from conftest import LAYERS, PROMPTS, inputs_for
from test_engine import count_hooks, engine, make_calibration

from decomoe import latency
from decomoe.families import parts_of
from decomoe.latency import PARTS, profile
from decomoe.methods import DecoMoE, Dense

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
