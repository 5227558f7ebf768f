"""Where the time goes: spans against clocks and counts of their own."""

import time

import pytest
import torch
from conftest import BUILDERS

from decomoe.ask import Loaded, load
from decomoe.families import parts_of
from decomoe.latency import PARTS, measure
from decomoe.methods import DecoMoE, Dense
from decomoe.mini.draw import draw


@pytest.fixture(scope="module")
def mini() -> Loaded:
    return load()


@pytest.fixture(scope="module")
def picture():
    return draw(3, kind="objects").image


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("method", [Dense(), DecoMoE(theta=0.02)], ids=["dense", "decomoe"])
def test_parts_add_up_to_the_time_of_the_forwards(mini, picture, method):
    before, began = hooks(mini.model), time.perf_counter()
    profile = measure(mini, picture, "Describe the picture.", method, steps=2)
    whole = time.perf_counter() - began
    assert hooks(mini.model) == before
    assert profile.steps == 3
    top = [span for span in profile.spans if span.layer is None]  # nothing of these lies inside another
    for step in range(3):
        seconds = profile.seconds(step)
        outermost = sum(span.seconds for span in top if span.step == step)
        assert sum(seconds.values()) == pytest.approx(outermost)
        assert all(seconds[part] > 0 for part in PARTS if part not in ("vision encoder", "gate"))
        assert (seconds["vision encoder"] > 0) == (step == 0)
        assert (seconds["gate"] > 0) == (step == 0 and method != Dense())
    assert sum(sum(profile.seconds(step).values()) for step in range(3)) < whole
    for part in ("attention", "router", "dispatch", "expert MLP"):
        layers = sum(profile.seconds(1, layer)[part] for layer in range(16))
        assert layers == pytest.approx(profile.seconds(1)[part])
    assert sum(profile.decode().values()) == pytest.approx(
        (sum(profile.seconds(1).values()) + sum(profile.seconds(2).values())) / 2
    )


def test_a_slow_part_shows_where_it_is(mini, picture):
    """Work put into one layer's attention is found there, and nowhere else."""
    attention = mini.model.model.language_model.layers[5].self_attn
    handle = attention.q_proj.register_forward_hook(lambda *_: time.sleep(0.3))
    profile = measure(mini, picture, "Where is the camel?", Dense(), steps=1)
    handle.remove()
    slow = [layer for layer in range(16) if profile.seconds(0, layer)["attention"] >= 0.3]
    assert 5 in slow
    assert profile.seconds(0, 5)["attention"] > max(
        profile.seconds(0, layer)["attention"] for layer in range(16) if layer != 5
    )


def test_chrome_trace_nests(mini, picture):
    events = measure(mini, picture, "Where is the camel?", DecoMoE(), steps=1).chrome_trace("DecoMoE")
    forward = next(event for event in events if event["name"] == "forward")
    layers = [event for event in events if event["name"].startswith("layer") and event["cat"] == "prefill"]
    assert len(layers) == 16
    for event in layers:
        assert forward["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= forward["ts"] + forward["dur"] + 1


def test_an_error_inside_leaves_nothing_behind(mini, picture):
    experts = mini.model.model.language_model.layers[3].mlp.experts
    before = hooks(mini.model)

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    handle = experts.act_fn.register_forward_hook(fail)
    with pytest.raises(ValueError, match="out of memory"):
        measure(mini, picture, "Where is the camel?", Dense())
    handle.remove()
    assert hooks(mini.model) == before and not mini.lock.locked()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_both_families_say_where_the_picture_is_encoded(family):
    assert sum(p.numel() for p in parts_of(BUILDERS[family]()).vision.parameters()) > 0
