"""The breakdown of time: everything is charged, to the right part, and nothing changes by looking."""

import time

import pytest
import torch
from conftest import LAYERS, PROMPTS, inputs_for
from test_engine import count_hooks, engine, make_calibration

from decomoe.families import parts_of
from decomoe.latency import PARTS, profile
from decomoe.methods import DecoMoE, Dense

METHOD = DecoMoE(exit_after=2, p=0.6, order="native")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_all_parts_of_all_layers_are_charged(model, implementation):
    parts_of(model).text_model.set_experts_implementation(implementation)
    began = time.perf_counter()
    found = profile(model, METHOD, inputs_for(model, *PROMPTS), max_new_tokens=3)
    whole = time.perf_counter() - began
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
    assert found.prefill.total + found.steps * found.decode.total < whole


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ("attention", "self_attn.k_proj"),
        ("router", "mlp.gate"),
        ("dispatch", "mlp.experts.act_fn"),  # Python of the experts that is no matrix product
        ("other", "post_attention_layernorm"),
    ],
)
def test_a_delay_is_charged_where_it_happens(model, monkeypatch, part, path):
    slow, pause = model.model.language_model.layers[4].get_submodule(path), 0.2
    real = slow.forward

    def forward(*args, **kwargs):
        time.sleep(pause)
        return real(*args, **kwargs)

    monkeypatch.setattr(slow, "forward", forward)
    found = profile(model, METHOD, inputs_for(model, PROMPTS[0]), max_new_tokens=2)
    for phase in (found.prefill, found.decode):
        assert pause <= phase.layers[4][part] < 2 * pause
        assert sum(seconds >= pause for layer in phase.layers for seconds in layer.values()) == 1


def test_the_gate_is_charged_to_the_method(model, monkeypatch):
    calibration = make_calibration(model)
    real = calibration.gate.forward

    def forward(layer, features):
        time.sleep(0.2)
        return real(layer, features)

    monkeypatch.setattr(calibration.gate, "forward", forward)
    found = profile(model, DecoMoE(theta=1.0), inputs_for(model, PROMPTS[0]), calibration, max_new_tokens=1)
    assert found.decode is None
    slow = [layer for layer in range(LAYERS) if found.prefill.layers[layer]["method"] >= 0.2]
    assert slow == [3, 4, 5]  # after layers 2, 3 and, at the final norm, 5


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
