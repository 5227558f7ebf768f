"""Forced exits after every layer: the answer, and how likely the dense answer is, all from shared prefills."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..answer import Loaded, encode
from ..evaluate.run import Batch
from ..families import parts_of
from ..methods import DecoMoE, Dense
from ..runtime import Prefill, attach

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Swept:
    """A batch under an exit after `layer`; None is the dense model.

    Attributes:
        answers: text of each row's answer.
        nll: mean negative log-likelihood of each row's dense answer, its end token included; exp is the perplexity.
    """

    layer: int | None
    answers: list[str]
    nll: list[float]


def exit_layers(loaded: Loaded) -> range:
    """The layers after which an exit can be forced: the picture has been seen, and a layer is left to save."""
    parts = parts_of(loaded.model)
    return range(parts.first_exit, len(parts.layers) - 1)


@torch.inference_mode()
def sweep(loaded: Loaded, inputs: Inputs, max_new_tokens: int) -> Iterator[Swept]:
    """Answer with every exit, the dense model first and then from the last exit to the first. All experts stay.

    Only two dense prefills see the picture, one with and one without the dense answer at its end. Between two
    results the model is free.
    """
    layers = exit_layers(loaded)
    with loaded.lock:
        prefill, dense = _dense(loaded, inputs, layers, max_new_tokens)
        whole = append(inputs, dense)
        taught, states = _taught(loaded, whole, layers)
    yield Swept(None, _texts(loaded, dense), _nll(loaded, states, dense))
    for layer in reversed(layers):
        with loaded.lock, attach(loaded.model, DecoMoE(exit_after=layer, rcep=False)) as session:
            ids, _ = session.resume(prefill, layer, max_new_tokens)
            answers = _cut(ids, [trace.tokens.generated for trace in session.traces()])
            states = _last_states(session, taught, layer)
        yield Swept(layer, _texts(loaded, answers), _nll(loaded, states, dense))


@torch.inference_mode()
def gate_exits(loaded: Loaded, inputs: Inputs) -> list[tuple[int | None, dict[int, float]]]:
    """Per row, the layer after which the gate lets the picture go, and its readings by layer up to there."""
    with loaded.lock, attach(loaded.model, DecoMoE(rcep=False), loaded.calibration) as session:
        session.generate(inputs, max_new_tokens=1, do_sample=False)
        traces = session.traces()
    return [
        (
            trace.exit_after,
            {reading.layer: round(reading.p_exit, 5) for reading in trace.gate if reading.p_exit is not None},
        )
        for trace in traces
    ]


def sweep_all(loaded: Loaded, max_new_tokens: int, part: Batch) -> list[dict[str, Any]]:
    """What a line keeps of each question of a batch.

    "layers" are those of the exits, and "answers", "right" and "nll" go along with them; "dense" is the same without
    an exit. "predicted" is the gate's exit, null if it never fires; a model without a gate has none.
    """
    inputs = encode(loaded, [(case.picture(), case.question) for case in part.cases])
    dense, *exits = sweep(loaded, inputs, max_new_tokens)
    exits.reverse()
    visual = torch.isin(inputs["input_ids"].cpu(), torch.tensor(parts_of(loaded.model).visual_token_ids))
    text = inputs["attention_mask"].cpu().bool() & ~visual
    gated = loaded.calibration is not None and loaded.calibration.gate is not None
    predicted = gate_exits(loaded, inputs) if gated else []
    return [
        {
            "visual": int(visual[row].sum()),
            "text": int(text[row].sum()),
            "layers": [swept.layer for swept in exits],
            "answers": [swept.answers[row] for swept in exits],
            "right": [part.benchmark.right(case, swept.answers[row]) for swept in exits],
            "nll": [round(swept.nll[row], 5) for swept in exits],
            "dense": {
                "answer": dense.answers[row],
                "right": part.benchmark.right(case, dense.answers[row]),
                "nll": round(dense.nll[row], 5),
            },
            **({"predicted": predicted[row][0], "p_exit": predicted[row][1]} if gated else {}),
        }
        for row, case in enumerate(part.cases)
    ]


# --- their parts -----------------------------------------------------------------------------------------------------


def append(inputs: Inputs, answers: Sequence[Tensor]) -> Inputs:
    """The inputs with a row's answer (G,) behind its prompt, left padded again."""
    shape, told = inputs["input_ids"].shape, inputs["attention_mask"].bool()
    length = max(int(mask.sum()) + len(answer) for mask, answer in zip(told, answers, strict=True))
    longer = dict(inputs)
    for name, values in inputs.items():
        if values.shape != shape:
            continue  # of pictures, not of tokens
        rows = []
        for row, mask, answer in zip(values, told, answers, strict=True):
            tail = {"input_ids": answer, "attention_mask": torch.ones_like(answer)}.get(name, torch.zeros_like(answer))
            tokens = torch.cat([row[mask], tail.to(row)])
            rows.append(nn.functional.pad(tokens, (length - len(tokens), 0)))
        longer[name] = torch.stack(rows)
    return longer


def _dense(loaded: Loaded, inputs: Inputs, layers: Sequence[int], tokens: int) -> tuple[Prefill, list[Tensor]]:
    """The prefill to go on from after `layers`, and the dense answers."""
    with attach(loaded.model, Dense()) as session:
        session.keep = layers
        never = session.parts.visual_token_ids  # behind the prompt they would be taken for a picture
        ids = session.generate(inputs, max_new_tokens=tokens, do_sample=False, suppress_tokens=never)
        lengths = [trace.tokens.generated for trace in session.traces()]
        return session.prefill(inputs), _cut(ids[:, inputs["input_ids"].shape[1] :], lengths)


def _taught(loaded: Loaded, whole: Inputs, layers: Sequence[int]) -> tuple[Prefill, Tensor]:
    """The prefill of prompts with answers, and the last layer's output (B, N, d)."""
    last = len(parts_of(loaded.model).layers) - 1
    with attach(loaded.model, Dense()) as session:
        session.keep = {*layers, last}
        session.generate(whole, max_new_tokens=1, do_sample=False)
        return session.prefill(whole), session.states[last]


def _last_states(session: Any, prefill: Prefill, layer: int) -> Tensor:
    """The last layer's output (B, N, d) if the session goes on from `layer`."""
    last = len(session.parts.layers) - 1
    session.keep = {last}
    session.resume(prefill, layer, 1)
    return session.states[last]


def _cut(ids: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Each row's tokens up to its end."""
    return [row[:length].cpu() for row, length in zip(ids, lengths, strict=True)]


def _texts(loaded: Loaded, answers: Sequence[Tensor]) -> list[str]:
    tokenizer = loaded.processor.tokenizer
    return [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]


def _nll(loaded: Loaded, states: Tensor, answers: Sequence[Tensor]) -> list[float]:
    """Mean NLL of the answers that end the rows of `states` (B, N, d), the last layer's output."""
    parts, found = parts_of(loaded.model), []
    for row, answer in zip(states, answers, strict=True):
        logits = parts.model.get_output_embeddings()(parts.text_model.norm(row[-len(answer) - 1 : -1])).float()
        found.append(nn.functional.cross_entropy(logits, answer.to(logits.device)).item())
    return found
