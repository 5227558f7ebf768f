"""The published methods against slow references, both families. A new method joins with one line of `CASES`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import rivals
import torch
from conftest import BUILDERS, EXPERTS, LAYERS, PROMPTS, WIDTH, inputs_for
from reference import reference
from test_engine import IMPLEMENTATIONS, TOKENS, count_hooks, engine, plain, run

from decomoe.calibration import Calibration, fingerprint
from decomoe.families import parts_of
from decomoe.gate import Gate
from decomoe.methods import METHODS, VTW, Dense, DyVTE, FastMMoE, FastV, Method, MoDES, SparseVLM
from decomoe.methods.base import Decider
from decomoe.runtime import attach

SIZED = [replace(prompt, size=size) for prompt, size in zip(PROMPTS, (3, 1, 2), strict=True)]  # 12, 4, 8 visual tokens

NO_FASTMMOE = FastMMoE(expert_share=1, layers=(1, 2, 3), keep=1, merge=0)


@dataclass
class Case:
    """A method at work, the same at zero strength, and what the reference decides."""

    method: Method
    off: Method
    after: Callable | None = None
    limit: Callable | None = None
    calibrated: dict[str, torch.Tensor] = field(default_factory=dict)

    def calibration(self, model):
        orders = torch.arange(EXPERTS).expand(LAYERS, -1)
        return Calibration(fingerprint(parts_of(model)), orders, others={self.method.name: self.calibrated})


def random_gate(*layers: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    gate = Gate(list(layers), WIDTH, 16, bias=False)
    return {name: 0.3 * torch.randn(weight.shape) for name, weight in gate.state_dict().items()}


GATE = random_gate(1, 2, 3, 4)
UNIFORM = [[1 / LAYERS] * LAYERS] * 2
IMPORTANCE = torch.stack([torch.linspace(1, 2, LAYERS), torch.linspace(3, 1, LAYERS)])
CASES = (
    Case(FastV(), FastV(prune=0), rivals.fastv(2, 0.5)),
    Case(FastV(layer=1, prune=0.8), FastV(layer=1, prune=0), rivals.fastv(1, 0.8)),
    Case(FastV(layer=4, prune=1), FastV(layer=4, prune=0), rivals.fastv(4, 1)),
    Case(SparseVLM(), SparseVLM(keep=(1, 1, 1)), rivals.sparsevlm((0, 1, 3), (0.521, 0.347, 0.191), 0.3, 10)),
    Case(
        SparseVLM((1, 2, 4), (0.4, 0.2, 0), recycle=0.9, per_cluster=2, seed=5),
        SparseVLM((1, 2, 4), (1, 1, 1)),
        rivals.sparsevlm((1, 2, 4), (0.4, 0.2, 0), 0.9, 2, 5),
    ),
    Case(SparseVLM((2,), (0.5,), recycle=0), SparseVLM((2,), (1,)), rivals.sparsevlm((2,), (0.5,), 0, 10)),
    Case(FastMMoE(), NO_FASTMMOE, rivals.fastmmoe((1, 2, 3), 0.91, 0.025), rivals.fewer(2, 1)),
    Case(
        FastMMoE(0, 0.5, False, (0, 2), keep=0.7, merge=0.3, alpha=0.3),
        NO_FASTMMOE,
        rivals.fastmmoe((0, 2), 0.7, 0.3, alpha=0.3),
        rivals.fewer(0, 1, renormalize=False),
    ),
    Case(
        FastMMoE(expert_share=1, layers=(1, 4), keep=0.8, merge=0.4, window=2, merging="mlerp"),
        NO_FASTMMOE,
        rivals.fastmmoe((1, 4), 0.8, 0.4, 2, mlerp=True),
    ),
    Case(MoDES(0.4 / LAYERS, 0.6 / LAYERS), MoDES(0, 0), limit=rivals.modes(0.4 / LAYERS, 0.6 / LAYERS, UNIFORM)),
    Case(
        MoDES(),
        MoDES(0, 0),
        limit=rivals.modes(0.5, 0.9, IMPORTANCE.tolist()),
        calibrated={"tau": torch.tensor([0.5, 0.9]), "importance": IMPORTANCE},
    ),
    Case(MoDES(1, 0), MoDES(0, 0), limit=rivals.modes(1, 0, UNIFORM)),
    Case(VTW(), VTW(exit_after=LAYERS - 1), rivals.vtw(3)),
    Case(VTW(), VTW(exit_after=LAYERS - 1), rivals.vtw(1), calibrated={"exit_after": torch.tensor(1)}),
    Case(DyVTE(), DyVTE(theta=1), rivals.dyvte(GATE, (1, 2, 3, 4), 0.5), calibrated=GATE),
    Case(DyVTE(theta=0.9), DyVTE(theta=1), rivals.dyvte(GATE, (1, 2, 3, 4), 0.9), calibrated=GATE),
    Case(VTW(exit_after=0), VTW(exit_after=LAYERS - 1), rivals.vtw(0)),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case.method))


def test_every_method_has_a_case():
    assert {case.method.name for case in CASES} | {"dense", "decomoe"} == set(METHODS)  # those two: test_engine


@each_case
def test_zero_strength_is_dense_bit_for_bit(model, case):
    inputs = inputs_for(model, *SIZED)
    ids, logits, dense = engine(model, Dense(), inputs)
    off_ids, off_logits, traces = engine(model, case.off, inputs, case.calibration(model))
    assert torch.equal(ids, off_ids)
    assert torch.equal(logits, off_logits)
    assert [(trace.live, trace.routes) for trace in traces] == [(trace.live, trace.routes) for trace in dense]


@each_case
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_agrees_with_the_slow_reference(model, attention, case):
    model.set_attn_implementation(attention)
    inputs = inputs_for(model, SIZED[0])
    with attach(model, case.method, case.calibration(model)) as session:
        (ids,), (logits,) = run(session, inputs)
        (trace,) = session.traces()
        held = [layer.keys.shape[2] - TOKENS + 1 for layer in session.cache.layers]
    text, left = len(SIZED[0].before) + len(SIZED[0].after), [12]

    def after(seen):
        decision = case.after(seen) if case.after else None
        left.append(left[-1] if decision is None else len(decision[0]))
        return decision

    expected, _ = reference(model, inputs, ids.tolist(), after=after, limit=case.limit)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - reference(model, inputs, ids.tolist())[0]).abs().max() > 1e-3  # it matters: the test can fail
    assert trace.live == trace.cached == held == [text + visual for visual in left[:LAYERS]]
    assert trace.flops.sparse < trace.flops.sparse_dense


@each_case
def test_padded_batch_equals_alone(model, case):
    calibration = case.calibration(model)
    ids, logits, traces = engine(model, case.method, inputs_for(model, *SIZED), calibration)
    for row, prompt in enumerate(SIZED):
        alone_ids, alone_logits, (alone,) = engine(model, case.method, inputs_for(model, prompt), calibration)
        assert torch.equal(alone_ids[0], ids[row])
        torch.testing.assert_close(alone_logits[0], logits[row], atol=1e-4, rtol=1e-4)
        assert (alone.live, alone.cached, alone.routes) == (traces[row].live, traces[row].cached, traces[row].routes)
        assert (alone.flops, alone.kv_bytes) == (traces[row].flops, traces[row].kv_bytes)


@each_case
def test_a_question_without_a_picture_loses_nothing(model, case):
    inputs = {"input_ids": torch.tensor([SIZED[0].after])}
    _, logits, (dense,) = engine(model, Dense(), inputs)
    _, ours, (trace,) = engine(model, case.method, inputs, case.calibration(model))
    assert (trace.live, trace.exit_after) == (dense.live, None)
    assert isinstance(case.method, MoDES) or torch.equal(ours, logits)  # MoDES cuts text as well


@each_case
def test_runs_in_bf16(family, case):
    model = BUILDERS[family]().to(torch.bfloat16)
    inputs = inputs_for(model, *SIZED)
    _, logits, traces = engine(model, case.method, inputs, case.calibration(model), tokens=2)
    assert logits.isfinite().all()
    assert all(trace.flops.sparse < trace.flops.sparse_dense for trace in traces)


def test_what_looks_into_early_layers_does_not_resume_behind_them(model):
    with attach(model, FastV()) as session, pytest.raises(ValueError, match="fastv looks into layers up to 3"):
        session.resume(None, 3, 1)


@pytest.mark.parametrize("case", [case for case in CASES if case.limit], ids=lambda case: repr(case.method))
def test_skipped_routes_are_the_same_in_every_experts_implementation(model, case):
    inputs, seen = inputs_for(model, *SIZED), []
    for implementation in IMPLEMENTATIONS:
        parts_of(model).text_model.set_experts_implementation(implementation)
        seen.append(engine(model, case.method, inputs, case.calibration(model)))
        assert not any(module._is_expert_parallel for module in parts_of(model).experts)
    for _, logits, traces in seen[1:]:
        torch.testing.assert_close(logits, seen[0][1], atol=1e-4, rtol=1e-4)
        assert [trace.routes for trace in traces] == [trace.routes for trace in seen[0][2]]


@each_case
def test_hooks_leave(model, case):
    inputs = inputs_for(model, SIZED[0])
    _, logits = plain(model, inputs)  # transformers leaves some hooks of its own at the first call
    before = count_hooks(model)
    engine(model, case.method, inputs, case.calibration(model), tokens=2)
    assert count_hooks(model) == before
    assert torch.equal(logits, plain(model, inputs)[1])


class Watcher(Method):
    """Looks at attention in every layer and decides nothing."""

    seen: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def bind(self, parts, calibration):
        decider = Decider()
        decider.watches = range(LAYERS)
        decider.cut = self.look
        return decider

    def look(self, state):
        everywhere = torch.arange(state.hidden.shape[1]).expand(len(state.hidden), -1)
        self.seen[state.layer] = state.attention(everywhere), state.attention_of_last()


def test_recomputed_attention_is_that_of_transformers(model):
    inputs = inputs_for(model, *SIZED)
    engine(model, Watcher(), inputs, tokens=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(**inputs, output_attentions=True).attentions
    live = inputs["attention_mask"].bool()
    for layer, expected in enumerate(theirs):
        ours, of_last = Watcher.seen[layer]
        for row in range(len(SIZED)):
            torch.testing.assert_close(ours[row][:, live[row]], expected[row][:, live[row]], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(of_last, expected[:, :, -1].mean(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FastV(layer=0), "after layers 0 to 5, not after layer -1"),
        (FastV(layer=LAYERS + 1), "not after layer 6"),
        (FastV(prune=1.5), "prune must be from 0 to 1"),
        (SparseVLM((1, 2)), "one share for each of the layers 1, 2"),
        (SparseVLM((3, 2, 5)), "from low to high, not as 3, 2, 5"),
        (SparseVLM(keep=(0.5, 0.4, 2)), "keep.2. must be from 0 to 1"),
        (SparseVLM(per_cluster=0), "per_cluster must be at least 1"),
        (FastMMoE(layers=(2, LAYERS)), "not after layer 6"),
        (FastMMoE(expert_share=2), "expert share must be from 0 to 1"),
        (FastMMoE(window=1), "at least 2 tokens"),
        (FastMMoE(layers=(3,), merging="max"), "merging is one of mean, mlerp"),
        (DyVTE(), "no gates for dyvte"),
        (DyVTE(theta=1.5), "theta must be from 0 to 1"),
        (MoDES(), "give tau_text and tau_visual"),
        (MoDES(0.1, 2), "tau visual must be from 0 to 1"),
        (VTW(exit_after=LAYERS), "not after layer 6"),
    ],
)
def test_what_does_not_fit_is_refused(model, method, message):
    with pytest.raises(ValueError, match=message), attach(model, method):
        pass
