"""What forced exits do to a batch of questions, all replayed from one dense prefill."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..answer import Loaded, encode
from ..benchmarks import normalize
from ..calibration import Calibration
from ..families import Parts, parts_of
from ..gate import text_features
from ..methods import DecoMoE, Dense, Method
from ..methods.base import Boundary, Cut, Decider, Prefix, Routing
from ..runtime import Prefill, Session, attach
from .data import Question


@dataclass(frozen=True)
class Plan:
    """What to try on every question.

    Attributes:
        candidates: the layers after which to force the exit.
        shares: values of RCEP's p; 1 cuts nothing.
        orders: expert orders for the other shares. Without, routed mass is collected to make them from.
        after_image: whether features are of the text behind the picture only.
    """

    candidates: tuple[int, ...]
    max_new_tokens: int
    shares: tuple[float, ...] = (1.0,)
    orders: Calibration | None = None
    after_image: bool = False


@dataclass
class Observed:
    """What was seen, for C questions, G candidates and P shares; behind the last candidate stands the dense model.

    Attributes:
        features: (C, G, 2d), what the gate sees.
        right: (C, G + 1, P) bool, whether the answer is right. same: (C, G + 1, P) bool, whether it is the dense one.
        nll: (C, G + 1, P), of the dense answer's first token.
        cost: (C, G + 1, P), executed FLOPs against dense, at the length of the answer given.
        mass: (C, L, E) float64, mean routed mass of the prompt's text tokens; (C, 0, 0) where it was not collected.
    """

    features: Tensor
    right: Tensor
    same: Tensor
    nll: Tensor
    cost: Tensor
    mass: Tensor


@dataclass(frozen=True)
class _Shares(Method):
    """DecoMoE with a forced exit; the rows of a batch lie in equal blocks, one for each of `shares`."""

    exit_after: int
    shares: tuple[float, ...]

    def bind(self, parts: Parts, calibration: Calibration | None) -> Decider:
        methods = [DecoMoE(exit_after=self.exit_after, p=share, rcep=share < 1) for share in self.shares]
        return _SharesDecider([method.bind(parts, calibration) for method in methods])


class _SharesDecider(Decider):
    def __init__(self, blocks: Sequence[Decider]) -> None:
        self.blocks = blocks

    def cut(self, state: Boundary) -> Cut | None:
        return self.blocks[0].cut(state)

    def prefix(self, state: Routing) -> Prefix | None:
        parts = state.split(len(self.blocks))
        prefixes = [block.prefix(part) for block, part in zip(self.blocks, parts, strict=True)]
        some = next((prefix for prefix in prefixes if prefix is not None), None)
        if some is None:
            return None
        everything = torch.full_like(some.length, state.logits.shape[2])
        lengths = [everything if prefix is None else prefix.length for prefix in prefixes]
        return Prefix(torch.cat(lengths), some.rank, some.reroute)


class _Judge:
    """Compares the answers to a batch with the truth and with the first answers that it sees, the dense ones."""

    def __init__(self, loaded: Loaded, batch: Sequence[Question]) -> None:
        self.tokenizer, self.batch = loaded.processor.tokenizer, batch
        self.dense: list[str] = []

    def __call__(self, session: Session, ids: Tensor, first_logits: Tensor, copies: int = 1) -> Tensor:
        """(C, copies, 4): right, same, NLL and cost of the session's answers `ids` (copies * C, G)."""
        traces, first_logits = session.traces(), first_logits.float().cpu()
        answers = [
            self.tokenizer.decode(row[: trace.tokens.generated], skip_special_tokens=True).strip()
            for row, trace in zip(ids, traces, strict=True)
        ]
        if not self.dense:
            self.dense, self.first = [normalize(answer) for answer in answers], first_logits.argmax(-1)
        nll = nn.functional.cross_entropy(first_logits, self.first.repeat(copies), reduction="none")
        rows = zip([*self.batch] * copies, answers, self.dense * copies, nll.tolist(), traces, strict=True)
        seen = [
            (
                question.right(answer),
                normalize(answer) == dense,
                loss,
                trace.flops.executed / trace.flops.executed_dense,
            )
            for question, answer, dense, loss, trace in rows
        ]
        return torch.tensor(seen).view(copies, len(self.batch), 4).transpose(0, 1)


@torch.inference_mode()
def observe(loaded: Loaded, batch: Sequence[Question], plan: Plan) -> Observed:
    """Ask `batch` dense, and with every exit and share; only the dense run sees pictures and runs the lower layers."""
    judge, copies = _Judge(loaded, batch), len(plan.shares)
    last = len(parts_of(loaded.model).layers) - 1
    with loaded.lock:
        prefill, dense = _dense(loaded, batch, plan, judge)
        table = []
        for layer in plan.candidates:
            if layer == last:  # nothing is left to cut
                table.append(dense.expand(-1, copies, -1))
                continue
            with attach(loaded.model, _Shares(layer, plan.shares), plan.orders) as session:
                answers = session.resume(prefill, layer, plan.max_new_tokens, copies)
                table.append(judge(session, *answers, copies))
        mass = _text_mass(loaded, prefill) if plan.orders is None else torch.zeros(len(batch), 0, 0)
    right, same, nll, cost = torch.stack([*table, dense.expand(-1, copies, -1)], 1).unbind(-1)
    text = prefill.cache.text_after_image if plan.after_image else prefill.cache.text
    features = [text_features(prefill.states[layer], text).cpu() for layer in plan.candidates]
    return Observed(torch.stack(features, 1), right.bool(), same.bool(), nll, cost, mass)


def _middle(loaded: Loaded) -> int:
    """After this layer the visual tokens leave when expert orders are made (paper, Sec. 2.2: 24 of 48)."""
    return len(parts_of(loaded.model).layers) // 2


def _dense(loaded: Loaded, batch: Sequence[Question], plan: Plan, judge: _Judge) -> tuple[Prefill, Tensor]:
    """The prefill to go on from, and the judgement of the dense answers, (C, 1, 4)."""
    inputs = encode(loaded, [(question.case.picture(), question.case.question) for question in batch])
    with attach(loaded.model, Dense()) as session:
        session.keep = {*plan.candidates, _middle(loaded)}
        out = session.generate(
            inputs,
            max_new_tokens=plan.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return session.prefill(inputs), judge(session, out.sequences[:, inputs["input_ids"].shape[1] :], out.logits[0])


def _text_mass(loaded: Loaded, prefill: Prefill) -> Tensor:
    """(C, L, E): mean routed mass of a question's text tokens, with all experts on (paper, Sec. 2.2)."""
    middle = _middle(loaded)
    with attach(loaded.model, DecoMoE(exit_after=middle, rcep=False)) as session:
        session.resume(prefill, middle, 1)
        traces = session.traces()
    none = [0.0] * traces[0].experts  # a layer without experts
    mass = [[layer or none for layer in trace.mass["text"]] for trace in traces]
    text = [trace.tokens.text for trace in traces]
    return torch.tensor(mass, dtype=torch.float64) / torch.tensor(text).view(-1, 1, 1)


def prefills(
    loaded: Loaded, questions: Sequence[Question], batch: int, keep: Collection[int]
) -> Iterator[tuple[Prefill, Tensor]]:
    """Dense prefills to resume after the layers `keep`, each with the logits (B, vocabulary) of its first token."""
    for start in tqdm(range(0, len(questions), batch), unit="batch", disable=None):
        asked = [(question.case.picture(), question.case.question) for question in questions[start : start + batch]]
        inputs = encode(loaded, asked)
        with attach(loaded.model, Dense()) as session:
            session.keep = keep
            out = session.generate(
                inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
            prefill = session.prefill(inputs)
        yield prefill, out.logits[0]


def divergence(one: Tensor, other: Tensor) -> float:
    """KL(one || other) of two distributions, logits (B, vocabulary) each, summed over rows."""
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum().item()
