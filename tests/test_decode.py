"""Compiled decode: the tokens and traces of the plain path, from one graph whatever left and whenever."""

import threading

import pytest
import torch
from conftest import EXPERTS, LAYERS, PROMPTS, TOP_K, Prompt, inputs_for, internvl, qwen
from reference import covering, reference
from test_engine import SEED_OF_DIFFERENT_EXITS, engine, make_calibration, plain, run
from transformers import StoppingCriteria, TextStreamer

from decomoe.decode import CompiledDecode
from decomoe.experts import offload_suffix
from decomoe.families import parts_of
from decomoe.methods import VTW, DecoMoE, Dense, FastMMoE, FastV, MoDES, SparseVLM
from decomoe.runtime import Stopped, attach

TOKENS = 6
METHODS = {
    "dense": Dense(),
    "off": DecoMoE(exit_after="never", rcep=False, order="native"),
    "exit": DecoMoE(exit_after=0, rcep=False),
    "share": DecoMoE(exit_after=3, p=0.6),
    "all of it": DecoMoE(exit_after=2, p=1.0),
    "number": DecoMoE(exit_after=1, prefix=3, order="native"),
    "ratio": DecoMoE(exit_after=4, keep_ratio=0.5, order="random"),
    "drop": DecoMoE(exit_after=2, p=0.5, outside="drop"),
    "drop all": DecoMoE(exit_after=LAYERS - 1, prefix=TOP_K, outside="drop", decode_rcep="all_layers"),
    "alone": DecoMoE(exit_after=2, picture="stays", p=0.6),
    "purge": DecoMoE(exit_after=3, p=0.7, earlier_kv="purge"),
    "fastv": FastV(),
    "sparsevlm": SparseVLM(),
    "fastmmoe": FastMMoE(),
    "vtw": VTW(exit_after=2),
}


@pytest.fixture
def uncompiled(monkeypatch):
    """What is compiled runs as it is written, which is quick; the graphs have tests of their own."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)


def stepwise(model, method, inputs, calibration=None, tokens=TOKENS, decode=None):
    """As `engine`, decoded in compiled steps."""
    with attach(model, method, calibration, decode or CompiledDecode(model)) as session:
        ids, logits = run(session, inputs, tokens)
        return ids, logits, session.traces()


def assert_same(found, expected):
    """Tokens, logits and everything in the traces."""
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
    for one, other in zip(found[2], expected[2], strict=True):
        for name in ("tokens", "exit_after", "prefix", "routes", "live", "cached", "flops", "kv_bytes", "gate"):
            assert getattr(one, name) == getattr(other, name), name
        for ours, theirs in zip(one.coverage.decode, other.coverage.decode, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        for ours, theirs in zip(one.mass["generated"], other.mass["generated"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_tokens_and_traces_are_those_of_the_plain_path(model, uncompiled, name, rows, attention):
    model.set_attn_implementation(attention)
    inputs, calibration = inputs_for(model, *PROMPTS[:rows]), make_calibration(model)
    expected = engine(model, METHODS[name], inputs, calibration, tokens=TOKENS)
    assert_same(stepwise(model, METHODS[name], inputs, calibration), expected)


@pytest.mark.parametrize("earlier_kv", ["purge", "keep"])
@pytest.mark.parametrize("outside", ["reroute", "drop"])
def test_rows_that_exit_apart(model, uncompiled, earlier_kv, outside):
    calibration = make_calibration(model, seed=SEED_OF_DIFFERENT_EXITS[model.config.model_type])
    method = DecoMoE(p=0.6, earlier_kv=earlier_kv, outside=outside)
    inputs = inputs_for(model, *PROMPTS)
    expected = engine(model, method, inputs, calibration, tokens=TOKENS)
    assert len({trace.exit_after for trace in expected[2]}) == 3
    assert_same(stepwise(model, method, inputs, calibration), expected)


@pytest.mark.parametrize("outside", ["reroute", "drop"])
def test_logits_are_those_of_the_slow_reference(model, uncompiled, outside):
    inputs, calibration = inputs_for(model, PROMPTS[2]), make_calibration(model)
    ids, logits, (trace,) = stepwise(model, DecoMoE(exit_after=2, p=0.6, outside=outside), inputs, calibration)
    orders = calibration.orders.tolist()
    expected, prefixes = reference(
        model, inputs, ids[0].tolist(), 2, prefix_of=covering(0.6, TOP_K), orders=orders, how=outside
    )
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    for layer in range(3, LAYERS):
        assert [step[layer] or EXPERTS for step in trace.prefix.decode] == prefixes[layer][1:]


def test_a_picture_at_the_very_end(model, uncompiled):
    """With nothing behind the picture, `generate` goes on from its last token, in each of M-RoPE's directions."""
    inputs = inputs_for(model, Prompt([5, 6], [], 1, size=2))
    assert_same(stepwise(model, Dense(), inputs), engine(model, Dense(), inputs, tokens=TOKENS))


def test_a_row_ends_at_its_end_token(model, uncompiled):
    inputs, method = inputs_for(model, *PROMPTS), DecoMoE(exit_after=3, p=0.6, order="native")
    end = engine(model, method, inputs, tokens=TOKENS)[0][0, 1].item()
    found = []
    for decode in (None, CompiledDecode(model)):
        with attach(model, method, decode=decode) as session:
            ids = session.generate(inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=end)
            found.append((ids, [(trace.tokens.generated, trace.prefix) for trace in session.traces()]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert len({generated for generated, _ in found[0][1]}) > 1


def test_sampling_draws_the_same_tokens(model, uncompiled):
    inputs, found = inputs_for(model, *PROMPTS), []
    for decode in (None, CompiledDecode(model)):
        torch.manual_seed(5)
        with attach(model, Dense(), decode=decode) as session:
            found.append(session.generate(inputs, max_new_tokens=TOKENS, do_sample=True, temperature=2.0))
    assert torch.equal(*found)


def test_one_question_leaves_nothing_for_the_next(model, uncompiled):
    """Also not one that broke off, or that was longer, or with other limits."""
    decode, calibration = CompiledDecode(model), make_calibration(model)
    short, long = inputs_for(model, PROMPTS[1]), inputs_for(model, Prompt([5] * 9, [7] * 20, 4, size=8))
    expected = engine(model, METHODS["share"], short, calibration, tokens=TOKENS)

    class Break(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > long["input_ids"].shape[1] + 2:
                raise RuntimeError("on purpose")
            return torch.zeros(1, dtype=torch.bool)

    with attach(model, METHODS["number"], calibration, decode) as session, pytest.raises(RuntimeError, match="purpose"):
        session.generate(long, max_new_tokens=20, stopping_criteria=[Break()])
    for keys in decode._in_use.keys:
        keys.fill_(torch.nan)  # an overflow of that question
    assert_same(stepwise(model, METHODS["share"], short, calibration, decode=decode), expected)
    assert torch.equal(plain(model, short)[1], engine(model, Dense(), short)[1])


def test_a_stopped_run_ends_before_the_next_step(model, uncompiled):
    stop = threading.Event()

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            stop.set()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with attach(model, Dense(), decode=CompiledDecode(model)) as session:
        session.stop = stop
        with pytest.raises(Stopped):
            session.generate(inputs_for(model, PROMPTS[0]), max_new_tokens=9, stopping_criteria=[Stop()])
        assert len(session.record.chosen) == 1


@pytest.mark.parametrize("tokens", [1, 2])
def test_few_tokens(model, uncompiled, tokens):
    inputs = inputs_for(model, PROMPTS[0])
    assert_same(stepwise(model, Dense(), inputs, tokens=tokens), engine(model, Dense(), inputs, tokens=tokens))


def test_layers_without_experts(uncompiled):
    model = internvl(mlp_only_layers=[1, 4])
    inputs, method = inputs_for(model, *PROMPTS), DecoMoE(exit_after=3, prefix=TOP_K, order="native")
    assert_same(stepwise(model, method, inputs), engine(model, method, inputs, tokens=TOKENS))


def test_unnormalised_top_k(uncompiled):
    model = internvl(norm_topk_prob=False)
    inputs, method = inputs_for(model, PROMPTS[0]), DecoMoE(exit_after=2, p=0.6, order="native")
    assert_same(stepwise(model, method, inputs), engine(model, method, inputs, tokens=TOKENS))


def test_one_graph_serves_every_exit_and_prefix(model):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    decode, inputs = CompiledDecode(model, backend), inputs_for(model, PROMPTS[0])
    calibration = make_calibration(model)
    for method in (
        DecoMoE(exit_after=1, p=0.5),
        DecoMoE(exit_after=4, p=0.9, earlier_kv="purge"),
        DecoMoE(exit_after=2, prefix=3, order="native", decode_rcep="all_layers"),
        DecoMoE(),
    ):
        expected = engine(model, method, inputs, calibration, tokens=TOKENS)
        assert_same(stepwise(model, method, inputs, calibration, decode=decode), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize(("builder", "layers"), [(internvl, 2), (qwen, 4)])
def test_inductor(builder, layers):
    """The real thing, on models small enough to compile in a test; positions are of one and of three dimensions."""
    model = builder(num_hidden_layers=layers)
    inputs, method = inputs_for(model, *PROMPTS[:2]), DecoMoE(exit_after=0, p=0.6, order="native")
    expected, decode = engine(model, method, inputs, tokens=TOKENS), CompiledDecode(model)
    with torch.inference_mode():  # buffers made here serve outside too
        assert_same(stepwise(model, method, inputs, decode=decode), expected)
    assert_same(stepwise(model, method, inputs, decode=decode), expected)


def test_what_does_not_fit_is_refused(model, uncompiled):
    decode, inputs = CompiledDecode(model), inputs_for(model, PROMPTS[0])
    with pytest.raises(ValueError, match="token by token"), attach(model, MoDES(0.1, 0.1), decode=decode):
        pass
    with pytest.raises(ValueError, match="another model"), attach(internvl(), Dense(), decode=decode):
        pass
    with attach(model, Dense(), decode=decode) as session:
        with pytest.raises(ValueError, match="streamer"):
            session.generate(inputs, max_new_tokens=2, streamer=TextStreamer(None))
        session.generate(inputs, max_new_tokens=2)
        with pytest.raises(ValueError, match="without it"):
            session.prefill(inputs)
    offload_suffix(parts_of(model), [4] * LAYERS)
    with pytest.raises(ValueError, match="one device"), attach(model, Dense(), decode=decode):
        pass
    spread = internvl()
    spread.model.language_model.layers[2].to("meta")
    with pytest.raises(ValueError, match="one device"):
        CompiledDecode(spread)


def test_flash_attention_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.config.get_text_config(), "_attn_implementation", "flash_attention_2")
    with pytest.raises(ValueError, match="sdpa or eager"):
        CompiledDecode(model)
