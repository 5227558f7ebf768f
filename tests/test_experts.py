"""Executors against transformers' eager loop, what they read, and where weights and keys lie: bytes are counted."""

import weakref
from dataclasses import replace

import pytest
import torch
from conftest import EXPERTS, LAYERS, PROMPTS, TOP_K, WIDTH, inputs_for
from test_engine import engine, make_calibration
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from decomoe.experts import WHOLE_PREFIX, offload_suffix, permute_experts
from decomoe.families import parts_of
from decomoe.methods import DecoMoE, Dense
from decomoe.methods.decomoe import usual_prefixes
from decomoe.runtime import attach

OURS = ("decomoe", "decomoe_loop", "decomoe_all")


def routes(tokens: int, experts: int, dropped: bool = False):
    """Random states (N, d), indices and scores (N, k) among the first `experts`; some are sentinels with weight 0."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    scores, indices = torch.rand(tokens, experts, generator=generator).topk(TOP_K)
    if dropped:
        gone = torch.rand(scores.shape, generator=generator) < 0.5
        gone[0] = True  # a token without any
        scores, indices = scores.masked_fill(gone, 0), indices.masked_fill(gone, EXPERTS)
    return hidden, indices, scores


def eager(experts, *arguments):
    experts.config._experts_implementation = "eager"
    return experts(*arguments)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_executors_compute_what_the_eager_loop_does(model, name, tokens, dropped):
    experts = parts_of(model).experts[2]
    experts._is_expert_parallel = True
    arguments = routes(tokens, EXPERTS, dropped)
    ours = ALL_EXPERTS_FUNCTIONS[name](experts, *arguments)
    torch.testing.assert_close(ours, eager(experts, *arguments), atol=1e-5, rtol=1e-5)
    assert dropped or ours.abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("name", OURS)
def test_executors_give_the_gradients_of_the_eager_loop(model, name, tokens):
    """With dropped routes too; of states, scores and weights."""
    experts = parts_of(model).experts[2]
    experts._is_expert_parallel = True
    hidden, indices, scores = routes(tokens, EXPERTS, dropped=tokens > 1)
    hidden.requires_grad_(), scores.requires_grad_()
    wanted = [hidden, scores, experts.gate_up_proj, experts.down_proj]
    for weight in wanted[2:]:
        weight.requires_grad_()
    direction = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    run = lambda function: torch.autograd.grad((function(hidden, indices, scores) * direction).sum(), wanted)  # noqa: E731
    expected = run(lambda *arguments: eager(experts, *arguments))
    ours = run(lambda *arguments: ALL_EXPERTS_FUNCTIONS[name](experts, *arguments))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_executors_take_scores_in_fp32_beside_states_in_bf16(model, name, tokens):
    experts = parts_of(model).experts[2]
    hidden, indices, scores = routes(tokens, EXPERTS)
    expected = eager(experts, hidden, indices, scores)
    ours = ALL_EXPERTS_FUNCTIONS[name](experts.bfloat16(), hidden.bfloat16(), indices, scores)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), expected, atol=0.02 * expected.abs().max().item(), rtol=0.05)


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("name", [*OURS, "grouped_mm"])
@torch.no_grad()
def test_only_experts_in_use_are_read(model, name, tokens):
    """The others are poisoned: whatever is read shows up as NaN."""
    experts, (hidden, indices, scores) = parts_of(model).experts[2], routes(tokens, experts=4)
    expected = eager(experts, hidden, indices, scores)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight[4:] = torch.nan
    setattr(indices, WHOLE_PREFIX, True)
    ours = ALL_EXPERTS_FUNCTIONS[name](experts, hidden, indices, scores)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_papers_executor_reads_all_experts_without_a_prefix(model):
    experts, arguments = parts_of(model).experts[2], routes(50, experts=4)
    experts.down_proj[-1] = torch.nan
    assert ALL_EXPERTS_FUNCTIONS["decomoe_all"](experts, *arguments).isnan().all()


def bytes_of(model) -> int:
    """Bytes of all storages behind the model's parameters, each counted once."""
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("method", [DecoMoE(exit_after=2, p=0.6), DecoMoE(exit_after=2, prefix=3), Dense()])
def test_a_suffix_in_host_memory_changes_no_answer_and_frees_its_bytes(model, method):
    calibration = make_calibration(model)
    permute_experts(parts_of(model), calibration.orders)
    inputs = inputs_for(model, *PROMPTS)
    ids, logits, traces = engine(model, method, inputs, calibration)
    before, kept = bytes_of(model), [None] * 3 + [4, 3, 1]
    offload_suffix(parts_of(model), kept)
    expert = 3 * WIDTH * model.config.get_text_config().moe_intermediate_size * 4
    assert before - bytes_of(model) == expert * (4 + 5 + 7)
    offloaded_ids, offloaded, offloaded_traces = engine(model, method, inputs, calibration)
    assert torch.equal(ids, offloaded_ids)
    torch.testing.assert_close(logits, offloaded, atol=1e-4, rtol=1e-4)
    assert [trace.prefix for trace in traces] == [trace.prefix for trace in offloaded_traces]
    with pytest.raises(ValueError, match="offloaded already"):
        offload_suffix(parts_of(model), kept)


def test_only_what_stays_goes_to_the_device(model):
    """The meta device keeps no bytes; what is not there must be in host memory."""
    parts = parts_of(model)
    before = bytes_of(parts.text_model.layers)
    offload_suffix(parts, [None] * 3 + [4, 3, 1], "meta")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    host = [weights for experts in parts.experts[3:] for weights in experts._decomoe_host.values()]
    assert {weights.device.type for weights in host} == {"cpu"}
    left = sum(weight.nbytes for weight in parts.text_model.layers.parameters())
    assert before - left == sum(weights.nbytes for weights in host) > 0


def test_offloading_to_a_full_device_is_refused_before_anything_moves(model, monkeypatch):
    rest = bytes_of(model) - 3 * WIDTH * model.config.get_text_config().moe_intermediate_size * 4 * 6 * LAYERS
    monkeypatch.setattr("decomoe.families._free_bytes", lambda device: rest - 1)
    with pytest.raises(ValueError, match="What is not offloaded takes"):
        offload_suffix(parts_of(model), [2] * LAYERS, "meta")
    monkeypatch.setattr("decomoe.families._free_bytes", lambda device: rest)
    offload_suffix(parts_of(model), [2] * LAYERS, "meta")


def test_offloading_where_the_model_is_needs_no_more_room(model, monkeypatch):
    monkeypatch.setattr("decomoe.families._free_bytes", lambda device: 0)
    offload_suffix(parts_of(model), [2] * LAYERS, "cpu")


def test_offloading_refuses_what_does_not_fit(model):
    with pytest.raises(ValueError, match="one number for each"):
        offload_suffix(parts_of(model), [4])
    with pytest.raises(ValueError, match="keeps 1 to 8 experts"):
        offload_suffix(parts_of(model), [9] * LAYERS)
    before = bytes_of(model)
    offload_suffix(parts_of(model), [None] * LAYERS)
    assert bytes_of(model) == before
    offload_suffix(parts_of(model), [4] * LAYERS)
    with pytest.raises(ValueError, match="permute first"):
        permute_experts(parts_of(model), make_calibration(model).orders)


def test_usual_prefixes_cover_the_calibrated_mass(model):
    """By hand: experts 7, 6, ... 0 hold 0.4, 0.2, 0.1, 0.1, 0.1, 0.1, 0, 0 of the mass; top-k is 2."""
    mass = torch.tensor([0, 0, 0.1, 0.1, 0.1, 0.1, 0.2, 0.4], dtype=torch.double).expand(LAYERS, -1)
    orders = torch.arange(EXPERTS).flip(0).expand(LAYERS, -1)
    parts = parts_of(model)
    calibration = replace(make_calibration(model), orders=orders.contiguous(), mass=mass.contiguous())
    with pytest.raises(ValueError, match="lie in the rcep order"):
        usual_prefixes(DecoMoE(), parts, calibration)
    permute_experts(parts, calibration.orders)
    assert usual_prefixes(DecoMoE(p=0.75), parts, calibration) == [None] * 3 + [4] * 3  # the gate may exit after 2
    assert usual_prefixes(DecoMoE(exit_after=4, p=0.1), parts, calibration) == [None] * 5 + [2]
    assert usual_prefixes(DecoMoE(exit_after=4, prefix=3), parts, calibration) == [None] * 5 + [3]
    without = replace(calibration, mass=None)
    assert usual_prefixes(DecoMoE(exit_after=4, keep_ratio=0.5), parts, without) == [None] * 5 + [4]
    for method, known, message in (
        (DecoMoE(), without, "calibrate anew"),
        (DecoMoE(rcep=False), calibration, "RCEP and an exit"),
        (DecoMoE(exit_after="never"), calibration, "RCEP and an exit"),
    ):
        with pytest.raises(ValueError, match=message):
            usual_prefixes(method, parts, known)


@pytest.mark.parametrize("earlier_kv", ["purge", "keep"])
def test_what_leaves_is_really_freed(model, earlier_kv):
    """Storages of the cache hold no more than the trace says, and keys from before a purge are gone."""
    inputs, seen = inputs_for(model, PROMPTS[0]), []

    def look(module, args):
        seen.extend(weakref.ref(layer.keys) for layer in session.cache.layers if layer.is_initialized)

    with attach(model, DecoMoE(exit_after=3, rcep=False, earlier_kv=earlier_kv)) as session:
        handle = parts_of(model).text_model.norm.register_forward_pre_hook(look, prepend=True)
        session.generate(inputs, max_new_tokens=1, do_sample=False)
        handle.remove()
        held = [x for layer in session.cache.layers for x in (layer.keys, layer.values)]
        assert sum(x.untyped_storage().nbytes() for x in held) == session.traces()[0].kv_bytes
    assert len(seen) == LAYERS
    freed = [reference() is None for reference in seen]
    assert freed == [earlier_kv == "purge"] * 4 + [False] * 2
