"""Going on from a dense prefill: the same as a run of its own, without running the shared part again."""

from collections import Counter

import pytest
import torch
from conftest import LAYERS, PROMPTS, inputs_for
from test_engine import TOKENS, engine, generate, make_calibration

from decomoe.families import parts_of
from decomoe.methods import DecoMoE, Dense, Method
from decomoe.runtime import Prefill, attach

KEPT = (0, 2, 3, 5)


def prefilled(model, *prompts) -> Prefill:
    """A dense prefill of `prompts`, its answer decoded as well."""
    inputs = inputs_for(model, *prompts)
    with attach(model, Dense()) as session:
        session.keep = KEPT
        generate(lambda **options: session.generate(inputs, **options), inputs)
        return session.prefill(inputs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("layer", "method"),
    [
        *((layer, DecoMoE(exit_after=layer, rcep=False)) for layer in KEPT),
        *((layer, DecoMoE(exit_after=layer, p=p)) for layer in KEPT for p in (0.5, 0.8)),
        (2, DecoMoE(exit_after=3, p=0.6, earlier_kv="purge")),
        (2, DecoMoE(exit_after=4, p=0.6, outside="drop", decode_rcep="all_layers")),
        (2, DecoMoE(p=0.6)),  # the gate, whose first candidate is layer 2
        (3, Dense()),
    ],
)
@torch.inference_mode()
def test_resuming_equals_a_run_of_its_own(model, attention, rows, layer, method):
    model.set_attn_implementation(attention)
    calibration = make_calibration(model)
    ids, logits, traces = engine(model, method, inputs_for(model, *PROMPTS[:rows]), calibration)
    prefill = prefilled(model, *PROMPTS[:rows])
    inputs_for_another = inputs_for(model, PROMPTS[1])
    engine(model, Dense(), inputs_for_another)  # M-RoPE's state on the model is another question's now
    with attach(model, method, calibration) as session:
        for _ in range(2):  # the prefill is not used up
            resumed_ids, first = session.resume(prefill, layer, TOKENS)
            assert torch.equal(ids, resumed_ids)
            torch.testing.assert_close(first, logits[:, 0], atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(session.traces(), traces, strict=True):
            assert ours.exit_after == theirs.exit_after
            assert (ours.prefix, ours.routes, ours.flops) == (theirs.prefix, theirs.routes, theirs.flops)
            assert (ours.live, ours.cached, ours.kv_bytes) == (theirs.live, theirs.cached, theirs.kv_bytes)
            for kind in ("text", "visual", "generated"):
                for mass, expected in zip(ours.mass[kind], theirs.mass[kind], strict=True):
                    assert mass == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_copies_are_answered_alike(model):
    prefill = prefilled(model, *PROMPTS)
    with attach(model, DecoMoE(exit_after=3, p=0.6, order="native")) as session:
        ids, first = session.resume(prefill, 3, TOKENS)
        traces = session.traces()
        again, many = session.resume(prefill, 3, TOKENS, copies=3)
        assert torch.equal(again, ids.repeat(3, 1))
        torch.testing.assert_close(many, first.repeat(3, 1), atol=1e-4, rtol=1e-4)
        assert [trace.prefix for trace in session.traces()] == [trace.prefix for trace in traces] * 3
        assert session.traces()[4].mass["text"][0] == pytest.approx(traces[1].mass["text"][0], abs=1e-5)


@torch.inference_mode()
def test_the_shared_part_runs_once(model):
    prefill = prefilled(model, *PROMPTS)
    visited: Counter = Counter()
    parts = parts_of(model)
    vision = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    handles = [vision.register_forward_hook(lambda *_: visited.update(["vision"]))]
    for index, layer in enumerate(parts.layers):
        handles.append(layer.register_forward_hook(lambda *_, index=index: visited.update([index])))
    with attach(model, DecoMoE(exit_after=3, rcep=False)) as session:
        session.resume(prefill, 3, 1)
    for handle in handles:
        handle.remove()
    assert visited == {layer: 1 for layer in range(4, LAYERS)}


@torch.inference_mode()
def test_only_a_dense_prefill_can_be_resumed(model):
    inputs = inputs_for(model, PROMPTS[0])
    method: Method = DecoMoE(exit_after=3, rcep=False)
    with attach(model, method) as session:
        session.keep = KEPT
        session.generate(inputs, max_new_tokens=1)
        with pytest.raises(ValueError, match="resume from"):
            session.prefill(inputs)
