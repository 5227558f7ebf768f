"""FLOPs against the closed forms and the paper's numbers."""

import pytest

from decomoe.flops import Dimensions, count
from decomoe.trace import GateReading, PerLayer, Tokens, Trace

QWEN_30B = Dimensions(2048, 4096, 512, 128, 8, 768, (None,) * 48)


def make_trace(prompt, text, exit_after=None, prefix=None, generated=1, layers=48, experts=128, top_k=8, cached=None):
    """A trace of a question that exits after `exit_after` and keeps `prefix` experts from then on."""
    after = [exit_after is not None and layer > exit_after for layer in range(layers)]
    live = [text if gone else prompt for gone in after]
    kept = [prefix if gone else None for gone in after]
    return Trace(
        method="test",
        settings={},
        model="",
        question="",
        layers=layers,
        experts=experts,
        top_k=top_k,
        tokens=Tokens(prompt - text, text, generated),
        exit_after=exit_after,
        prefix=PerLayer(kept, [kept] * (generated - 1)),
        routes=PerLayer([top_k * n for n in live], [[top_k] * layers] * (generated - 1)),
        live=live,
        cached=cached or live,
        mass={"text": [[text / experts] * experts] * layers},
    )


def test_dense_baseline_of_the_paper():
    """Table 1: 27.06 TFLOPs, which is S = 451 under the executed convention."""
    flops = count(make_trace(451, 80), QWEN_30B)
    assert flops.executed == pytest.approx(27.06e12, rel=1e-3)
    assert flops.executed == flops.executed_dense


def test_internvl_baseline_of_the_paper_is_sparse():
    """Table 1's 9.86 TFLOPs is S = 1617 under the sparse convention."""
    assert count(make_trace(1617, 80), QWEN_30B).sparse == pytest.approx(9.86e12, rel=1e-3)


def test_rcep_only_row_of_the_paper():
    """Table 2, "RCEP only": fixed exit 28, mean prefix 34.86, 16.69 of 27.04 TFLOPs, at the 50 text tokens that fit."""
    low, high = (count(make_trace(451, 50, 28, kept), QWEN_30B) for kept in (34, 35))
    mixed = low.executed + 0.86 * (high.executed - low.executed)
    assert mixed / low.executed_dense == pytest.approx(16.69 / 27.04, rel=1e-3)


def test_one_layer_by_hand():
    """d 2, two heads of 3, one KV head, 4 experts of width 5, top-2; 3 tokens, then 2 decode steps."""
    size = Dimensions(2, 6, 3, 4, 2, 5, (None,))
    trace = make_trace(3, 1, generated=3, layers=1, experts=4, top_k=2)
    projections = 2 * (2 * 6 + 6 * 2 + 2 * 3 + 2 * 3)  # q, o, k, v
    router, expert = 2 * 2 * 4, 3 * 2 * 2 * 5
    attention = sum(2 * 2 * 6 * seen for seen in (1, 2, 3))  # QK and AV, causal
    decode_attention = sum(2 * 2 * 6 * seen for seen in (4, 5))
    tokens = 5
    common = tokens * (projections + router) + attention + decode_attention
    flops = count(trace, size)
    assert flops.executed == common + tokens * 4 * expert
    assert flops.sparse == common + tokens * 2 * expert


def test_gate_readings_are_charged():
    """4.2 MFLOPs each at the paper's size; candidates that were not read cost nothing."""
    trace = make_trace(100, 20)
    trace.gate = [GateReading(3, 0.1), GateReading(7, 0.2), GateReading(11, None)]
    extra = count(trace, QWEN_30B, 512).executed - count(make_trace(100, 20), QWEN_30B).executed
    assert extra == pytest.approx(2 * 4.2e6, rel=5e-3)


def test_dense_mlp_layer():
    size = Dimensions(2, 6, 3, 4, 2, 5, (7,))
    flops = count(make_trace(3, 1, layers=1, experts=4, top_k=2), size)
    attention = 2 * 6 * 3 * 4
    assert flops.executed == 3 * (2 * (2 * 2 * 6 + 2 * 2 * 3) + 6 * 2 * 7) + attention == flops.sparse


def test_drop_saves_sparse_flops_only():
    trace = make_trace(451, 80, 28, 35)
    before = count(trace, QWEN_30B)
    trace.routes.prefill[40] //= 2
    after = count(trace, QWEN_30B)
    assert after.executed == before.executed
    assert before.sparse - after.sparse == 80 * 8 // 2 * 6 * 2048 * 768
