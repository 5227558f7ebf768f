"""The engine against the slow reference, on both families: the rules that keep it sound."""

from functools import partial

import pytest
import torch
from conftest import BUILDERS, EXPERTS, LAYERS, PROMPTS, TOP_K, WIDTH, inputs_for
from reference import covering, reference
from torch import nn
from transformers import StaticCache

from decomoe.calibration import Calibration, fingerprint
from decomoe.experts import permute_experts
from decomoe.families import parts_of
from decomoe.gate import Gate
from decomoe.methods import DecoMoE, Dense
from decomoe.runtime import attach

TOKENS = 4
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "decomoe")


def generate(call, inputs, tokens=TOKENS):
    """Token ids (B, G) and the logits (B, G, vocabulary) that chose them."""
    out = call(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def plain(model, inputs):
    return generate(partial(model.generate, **inputs), inputs)


def run(session, inputs, tokens=TOKENS):
    return generate(lambda **options: session.generate(inputs, **options), inputs, tokens)


def engine(model, method, inputs, calibration=None, tokens=TOKENS):
    """What `generate` returns with the method attached, and a trace per row."""
    with attach(model, method, calibration) as session:
        ids, logits = run(session, inputs, tokens)
        return ids, logits, session.traces()


def make_calibration(model, seed=0, theta=0.5, candidates=(2, 3, 5)):
    """Random orders and a random gate."""
    torch.manual_seed(seed)
    gate = Gate(list(candidates), WIDTH, 16)
    for parameter in gate.parameters():
        nn.init.normal_(parameter, std=0.1)
    orders = torch.stack([torch.randperm(EXPERTS) for _ in range(LAYERS)])
    return Calibration(fingerprint(parts_of(model)), orders, gate.requires_grad_(False), theta)


def count_hooks(model) -> int:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in hooks)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 3])
def test_off_is_identity_bit_for_bit(model, attention, implementation, rows):
    model.set_attn_implementation(attention)
    parts_of(model).text_model.set_experts_implementation(implementation)
    inputs = inputs_for(model, *PROMPTS[:rows])
    ids, logits = plain(model, inputs)
    for method in (Dense(), DecoMoE(exit_after="never", order="native"), DecoMoE(exit_after="never", rcep=False)):
        off_ids, off_logits, traces = engine(model, method, inputs)
        assert torch.equal(ids, off_ids)
        assert torch.equal(logits, off_logits)
        assert all(trace.exit_after is None for trace in traces)
        assert all(trace.flops.executed == trace.flops.executed_dense for trace in traces)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("earlier_kv", ["purge", "keep"])
@pytest.mark.parametrize("exit_after", range(LAYERS))
def test_forced_exit_equals_masked_forward(model, attention, earlier_kv, exit_after):
    model.set_attn_implementation(attention)
    inputs = inputs_for(model, PROMPTS[0])
    method = DecoMoE(exit_after=exit_after, rcep=False, earlier_kv=earlier_kv)
    ids, logits, (trace,) = engine(model, method, inputs)
    expected, _ = reference(model, inputs, ids[0].tolist(), exit_after, purge=earlier_kv == "purge")
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    dense = reference(model, inputs, ids[0].tolist())[0]
    assert exit_after == LAYERS - 1 or (dense - expected).abs().max() > 1e-3  # the exit matters, so the test can fail
    text, visual = len(PROMPTS[0].before) + len(PROMPTS[0].after), 4
    assert trace.exit_after == exit_after
    assert trace.live == [text + visual] * (exit_after + 1) + [text] * (LAYERS - exit_after - 1)
    kept = text + visual if earlier_kv == "keep" else text
    assert trace.cached == [kept] * (exit_after + 1) + [text] * (LAYERS - exit_after - 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("outside", ["reroute", "drop"])
@pytest.mark.parametrize("prefix", range(TOP_K, EXPERTS + 1))
def test_fixed_prefix_equals_masked_router(model, implementation, outside, prefix):
    parts_of(model).text_model.set_experts_implementation(implementation)
    inputs = inputs_for(model, PROMPTS[0])
    calibration = make_calibration(model)
    method = DecoMoE(exit_after=3, prefix=prefix, outside=outside)
    ids, logits, (trace,) = engine(model, method, inputs, calibration)
    expected, _ = reference(
        model,
        inputs,
        ids[0].tolist(),
        3,
        prefix_of=lambda mass: prefix,
        orders=calibration.orders.tolist(),
        how=outside,
    )
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    kept = None if prefix == EXPERTS else prefix
    assert trace.prefix.prefill == [None] * 4 + [kept] * 2
    assert trace.prefix.decode == [[None] * 4 + [kept] * 2] * (TOKENS - 1)


@pytest.mark.parametrize("outside", ["reroute", "drop"])
def test_the_prefix_alone_leaves_the_picture(model, outside):
    inputs = inputs_for(model, PROMPTS[0])
    calibration = make_calibration(model)
    method = DecoMoE(exit_after=2, picture="stays", p=0.6, outside=outside)
    ids, logits, (trace,) = engine(model, method, inputs, calibration)
    rules = dict(prefix_of=covering(0.6, TOP_K), orders=calibration.orders.tolist(), how=outside)
    expected, prefixes = reference(model, inputs, ids[0].tolist(), 2, stays=True, **rules)
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    gone, _ = reference(model, inputs, ids[0].tolist(), 2, **rules)
    assert (gone - expected).abs().max() > 1e-3
    assert trace.exit_after is None
    assert trace.cached == [len(inputs["input_ids"][0])] * LAYERS
    assert [kept or EXPERTS for kept in trace.prefix.prefill[3:]] == [record[0] for record in prefixes[3:]]
    assert trace.prefix.prefill[:3] == [None] * 3


@pytest.mark.parametrize("order", ["rcep", "native", "random"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.7, 0.9, 1.0])
def test_covering_prefix_equals_counting(model, p, order):
    inputs = inputs_for(model, PROMPTS[2])
    calibration = make_calibration(model, seed=3)
    method = DecoMoE(exit_after=2, p=p, order=order, seed=7)
    ids, logits, (trace,) = engine(model, method, inputs, calibration)
    generator = torch.Generator().manual_seed(7)
    orders = {
        "rcep": calibration.orders.tolist(),
        "native": [list(range(EXPERTS))] * LAYERS,
        "random": [torch.randperm(EXPERTS, generator=generator).tolist() for _ in range(LAYERS)],
    }[order]
    expected, prefixes = reference(model, inputs, ids[0].tolist(), 2, prefix_of=covering(p, TOP_K), orders=orders)
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    for layer in range(3, LAYERS):
        ours = [trace.prefix.prefill[layer], *(step[layer] for step in trace.prefix.decode)]
        assert [EXPERTS if m is None else m for m in ours] == prefixes[layer]
    if p == 1:
        assert trace.prefix.prefill == [None] * LAYERS


def test_p_one_is_the_exit_alone(model):
    inputs = inputs_for(model, PROMPTS[0])
    whole = engine(model, DecoMoE(exit_after=3, p=1.0, order="native"), inputs)[1]
    torch.testing.assert_close(whole, engine(model, DecoMoE(exit_after=3, rcep=False), inputs)[1])


def test_decode_rcep_in_all_layers_limits_the_early_ones_too(model):
    inputs = inputs_for(model, PROMPTS[0])
    method = DecoMoE(exit_after=3, prefix=TOP_K, order="native", decode_rcep="all_layers")
    _, _, (trace,) = engine(model, method, inputs)
    assert trace.prefix.prefill == [None] * 4 + [TOP_K] * 2
    assert trace.prefix.decode == [[TOP_K] * LAYERS] * (TOKENS - 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("earlier_kv", ["purge", "keep"])
@pytest.mark.parametrize("outside", ["reroute", "drop"])
def test_padded_batch_equals_alone_with_rows_exiting_apart(model, attention, earlier_kv, outside):
    model.set_attn_implementation(attention)
    calibration = make_calibration(model, seed=SEED_OF_DIFFERENT_EXITS[model.config.model_type])
    method = DecoMoE(p=0.6, earlier_kv=earlier_kv, outside=outside)
    ids, logits, traces = engine(model, method, inputs_for(model, *PROMPTS), calibration)
    exits = [trace.exit_after for trace in traces]
    assert len(set(exits)) == 3, exits
    for row, prompt in enumerate(PROMPTS):
        alone_ids, alone_logits, (alone,) = engine(model, method, inputs_for(model, prompt), calibration)
        assert torch.equal(alone_ids[0], ids[row])
        torch.testing.assert_close(alone_logits[0], logits[row], atol=1e-4, rtol=1e-4)
        assert alone.exit_after == exits[row]
        assert alone.prefix == traces[row].prefix
        assert alone.routes == traces[row].routes
        assert alone.kv_bytes == traces[row].kv_bytes
        assert alone.flops == traces[row].flops
        for kind in ("text", "visual", "generated"):
            for ours, theirs in zip(alone.mass[kind], traces[row].mass[kind], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)


SEED_OF_DIFFERENT_EXITS = {"qwen3_vl_moe": 1, "internvl": 3}  # of the random gate; the test checks that they differ


def test_gate_reads_what_a_plain_forward_shows(model):
    """p_exit against hidden states captured by transformers itself, features by hand."""
    calibration = make_calibration(model)
    inputs = inputs_for(model, PROMPTS[0])
    _, _, (trace,) = engine(model, DecoMoE(theta=1.0), inputs, calibration)  # theta 1: nobody exits
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
    text = [i for i, token in enumerate(inputs["input_ids"][0].tolist()) if token != 60]
    assert [reading.layer for reading in trace.gate] == [2, 3, 5]
    for reading in trace.gate[:2]:  # the last layer's hidden state is normed in transformers' output
        hidden = states[reading.layer + 1][0]
        features = torch.cat([hidden[text[:-1]].mean(0), hidden[text[-1]]])
        first, _, second = calibration.gate.heads[str(reading.layer)]
        scores = second(nn.functional.gelu(first(features)))
        assert reading.p_exit == pytest.approx(scores.softmax(0)[1].item(), abs=1e-5)


def test_the_whole_picture_is_seen_before_the_first_exit():
    """What DeepStack adds last reaches the answer if the picture leaves then, but not if it leaves a layer before."""
    first = parts_of(BUILDERS["qwen3_vl_moe"]()).first_exit
    for exit_after, reaches in ((first, True), (first - 1, False)):
        logits = []
        for scale in (1, 5):
            model = BUILDERS["qwen3_vl_moe"]()
            with torch.no_grad():
                model.model.visual.deepstack_merger_list[-1].linear_fc2.weight.mul_(scale)
            method = DecoMoE(exit_after=exit_after, rcep=False)
            logits.append(engine(model, method, inputs_for(model, PROMPTS[0]), tokens=1)[1])
        assert torch.equal(*logits) != reaches


def test_gate_exits_at_the_first_candidate_over_theta(model):
    calibration = make_calibration(model)
    inputs = inputs_for(model, PROMPTS[1])
    _, _, (free,) = engine(model, DecoMoE(theta=1.0), inputs, calibration)
    theta = free.gate[0].p_exit
    _, _, (trace,) = engine(model, DecoMoE(theta=theta), inputs, calibration)
    assert trace.exit_after == 2
    assert [reading.p_exit for reading in trace.gate] == [theta, None, None]


def test_permutation_changes_nothing(family):
    model, permuted = BUILDERS[family](), BUILDERS[family]()
    inputs = inputs_for(model, *PROMPTS)
    orders = make_calibration(model).orders
    permute_experts(parts_of(permuted), orders)
    assert not torch.equal(model.state_dict()[GATE], permuted.state_dict()[GATE])
    for method in (Dense(), DecoMoE(exit_after=3, p=0.6), DecoMoE(exit_after=2, prefix=3, order="native")):
        ids, logits, traces = engine(model, method, inputs, make_calibration(model))
        other_ids, other_logits, other_traces = engine(permuted, method, inputs, make_calibration(model))
        assert torch.equal(ids, other_ids)
        torch.testing.assert_close(logits, other_logits, atol=1e-4, rtol=1e-4)
        for one, other in zip(traces, other_traces, strict=True):
            assert one.prefix == other.prefix
            for ours, theirs in zip(one.mass["text"], other.mass["text"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)  # masses are told by native expert
    with pytest.raises(ValueError, match="permuted already"):
        permute_experts(parts_of(permuted), orders)


GATE = "model.language_model.layers.0.mlp.gate.weight"


def test_permutation_refuses_offloaded_weights(model):
    model.get_submodule("model.language_model.layers.1.mlp").to("meta")
    before = model.state_dict()[GATE].clone()
    with pytest.raises(ValueError, match="offloaded"):
        permute_experts(parts_of(model), torch.arange(EXPERTS).flip(0).repeat(LAYERS, 1))
    assert torch.equal(model.state_dict()[GATE], before)


def test_masses_are_complete(model):
    """Every token puts a mass of one on every layer; the visual ones only where they live."""
    inputs = inputs_for(model, PROMPTS[0])
    _, _, (trace,) = engine(model, DecoMoE(exit_after=3, rcep=False), inputs)
    text = len(PROMPTS[0].before) + len(PROMPTS[0].after)
    assert [sum(layer) for layer in trace.mass["text"]] == pytest.approx([text] * LAYERS)
    assert [sum(layer) for layer in trace.mass["visual"]] == pytest.approx([4] * 4 + [0] * 2)
    assert [sum(layer) for layer in trace.mass["generated"]] == pytest.approx([TOKENS - 1] * LAYERS)


@pytest.mark.parametrize("earlier_kv", ["purge", "keep"])
def test_kv_bytes_are_what_the_cache_holds(model, earlier_kv):
    inputs = inputs_for(model, PROMPTS[0])
    with attach(model, DecoMoE(exit_after=3, rcep=False, earlier_kv=earlier_kv)) as session:
        session.generate(inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        held = sum(x.nbytes for layer in session.cache.layers for x in (layer.keys, layer.values))
        assert session.traces()[0].kv_bytes == held


def test_dense_layers_without_router(family):
    model = BUILDERS[family](mlp_only_layers=[1, 4])
    inputs = inputs_for(model, *PROMPTS)
    _ids, logits = plain(model, inputs)
    assert torch.equal(logits, engine(model, Dense(), inputs)[1])
    _, _, traces = engine(model, DecoMoE(exit_after=3, prefix=TOP_K, order="native"), inputs)
    assert traces[0].prefix.prefill == [None] * 5 + [TOP_K]
    assert traces[0].mass["text"][4] is None
    assert traces[0].routes.prefill[4] == 0
    whole, limited = 3 * TOKENS, TOKENS  # layers 0, 2, 3 keep all experts, layer 5 keeps top-k, 1 and 4 have none
    assert traces[0].mean_prefix == (whole * EXPERTS + limited * TOP_K) / (whole + limited)
    traces[0].routes.prefill = [0] * LAYERS  # as where a method skips every route
    assert traces[0].mean_prefix == (whole * EXPERTS + limited * TOP_K) / (whole + limited)


def test_unnormalised_top_k():
    """Qwen3-MoE without norm_topk_prob keeps its raw scores, also inside a prefix."""
    model = BUILDERS["internvl"](norm_topk_prob=False)
    inputs = inputs_for(model, PROMPTS[0])
    ids, logits, _ = engine(model, DecoMoE(exit_after=2, p=0.6, order="native"), inputs)
    expected, _ = reference(model, inputs, ids[0].tolist(), 2, prefix_of=covering(0.6, TOP_K))
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_bf16_runs_and_stays_near_fp32(family):
    model = BUILDERS[family]()
    inputs = inputs_for(model, PROMPTS[0])
    method = DecoMoE(exit_after=3, rcep=False)
    _, logits, _ = engine(model, method, inputs, tokens=1)
    half = BUILDERS[family]().to(torch.bfloat16)
    _, half_logits, (trace,) = engine(half, method, inputs_for(half, PROMPTS[0]), tokens=1)
    assert half_logits.isfinite().all()
    assert torch.corrcoef(torch.stack([logits.flatten(), half_logits.float().flatten()]))[0, 1] > 0.95
    assert trace.exit_after == 3


def test_a_row_ends_at_its_end_token(model):
    """Rows of a batch stop apart; each trace counts its own tokens, as if alone."""
    inputs = inputs_for(model, *PROMPTS)
    method = DecoMoE(exit_after=3, p=0.6, order="native")
    ids, _, _ = engine(model, method, inputs, tokens=6)
    end = ids[0, 1].item()
    lengths = [row.index(end) + 1 if end in row else 6 for row in ids.tolist()]
    assert len(set(lengths)) > 1
    with attach(model, method) as session:
        session.generate(inputs, max_new_tokens=6, do_sample=False, eos_token_id=end)
        traces = session.traces()
    assert [trace.tokens.generated for trace in traces] == lengths
    for prompt, length, trace in zip(PROMPTS, lengths, traces, strict=True):
        _, _, (alone,) = engine(model, method, inputs_for(model, prompt), tokens=length)
        assert alone.prefix == trace.prefix
        assert alone.flops == trace.flops
        for kind in ("text", "visual", "generated"):
            for ours, theirs in zip(alone.mass[kind], trace.mass[kind], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)


def test_hooks_leave(model):
    inputs = inputs_for(model, PROMPTS[0])
    plain(model, inputs)  # transformers leaves some of its own at the first call
    before = count_hooks(model)
    engine(model, DecoMoE(exit_after=3, order="native", outside="drop"), inputs)
    assert count_hooks(model) == before
    with pytest.raises(RuntimeError, match="on purpose"), attach(model, Dense()) as session:
        assert count_hooks(model) > before

        def fail(*_):
            raise RuntimeError("on purpose")

        handle = model.model.language_model.layers[3].register_forward_hook(fail)
        try:
            session.generate(inputs, max_new_tokens=1)
        finally:
            handle.remove()
    assert count_hooks(model) == before
    assert not any(module._is_expert_parallel for module in parts_of(model).experts)
    _ids, logits = plain(model, inputs)
    assert torch.equal(logits, engine(model, Dense(), inputs)[1])


def test_only_one_method_at_a_time(model):
    with attach(model, Dense()), pytest.raises(ValueError, match="attached"), attach(model, Dense()):
        pass


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (DecoMoE(exit_after=LAYERS, order="native"), "after layers"),
        (DecoMoE(exit_after=-1, order="native"), "after layers"),
        (DecoMoE(exit_after=3, order="native", p=0.0), "p must be"),
        (DecoMoE(exit_after="never", order="native", picture="stays"), "fix the layer"),
        (DecoMoE(exit_after=3, rcep=False, picture="stays"), "fix the layer"),
        (DecoMoE(exit_after=3, order="native", p=1.5), "p must be"),
        (DecoMoE(exit_after=3, order="native", prefix=1), "top-k"),
        (DecoMoE(exit_after=3, order="native", prefix=EXPERTS + 1), "top-k"),
        (DecoMoE(exit_after=3, order="native", p=0.5, prefix=4), "one of"),
        (DecoMoE(exit_after="Gate", order="native"), "exit_after is one of"),
        (DecoMoE(exit_after=3, order="nativ"), "order is one of"),
        (DecoMoE(exit_after=3, order="native", outside="dropp"), "outside is one of"),
        (DecoMoE(exit_after=3, order="native", earlier_kv="purged"), "earlier_kv is one of"),
        (DecoMoE(), "calibration"),
        (DecoMoE(exit_after=3), "calibration"),
    ],
)
def test_what_does_not_fit_is_refused(model, method, message):
    with pytest.raises(ValueError, match=message), attach(model, method):
        pass


def test_calibration_of_another_model_is_refused(family):
    other = BUILDERS[family](num_experts=EXPERTS * 2)
    calibration = make_calibration(other)
    with pytest.raises(ValueError, match="another model"), attach(BUILDERS[family](), DecoMoE(), calibration):
        pass


def test_no_traces_before_the_first_question(model):
    with attach(model, Dense()) as session, pytest.raises(ValueError, match="generate first"):
        session.traces()


def test_foreign_caches_and_beams_are_refused(model):
    inputs = inputs_for(model, PROMPTS[0])
    with attach(model, Dense()) as session:
        with pytest.raises(ValueError, match="session"):
            model.generate(**inputs, max_new_tokens=1)
        with pytest.raises(ValueError, match="session"):
            model.generate(**inputs, max_new_tokens=1, cache_implementation="static")
        with pytest.raises(ValueError, match="several sequences"):
            session.generate(inputs, max_new_tokens=1, do_sample=True, num_return_sequences=2)
        two = inputs_for(model, *PROMPTS[:2])
        del two["attention_mask"]
        with pytest.raises(ValueError, match="on the left"):
            session.new_cache(inputs["input_ids"], torch.tensor([[1] * (inputs["input_ids"].shape[1] - 1) + [0]]))
        with pytest.raises(ValueError, match="attention_mask"):
            session.generate(two, max_new_tokens=1)
        with pytest.raises(ValueError, match="beam"):
            session.generate(inputs, max_new_tokens=1, num_beams=2)
        with pytest.raises(ValueError, match="cache"):
            session.generate(inputs, max_new_tokens=1, cache=StaticCache(model.config, max_cache_len=32))


def test_a_session_serves_one_question_after_another(model):
    inputs = [inputs_for(model, prompt) for prompt in PROMPTS]
    method = DecoMoE(exit_after=3, p=0.6, order="native")
    alone = [engine(model, method, one)[1] for one in inputs]
    with attach(model, method) as session:
        for one, expected in zip(inputs, alone, strict=True):
            assert torch.equal(run(session, one)[1], expected)
