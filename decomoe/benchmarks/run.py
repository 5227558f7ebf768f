"""Asking the cases of a benchmark, in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from ..answer import Loaded, encode
from ..methods import Method
from ..runtime import attach
from ..trace import Trace
from .base import Case


@dataclass(frozen=True)
class Outcome:
    """An answer and its trace."""

    answer: str
    trace: Trace


def run(
    loaded: Loaded, cases: Sequence[Case], method: Method, batch: int = 32, max_new_tokens: int = 16, label: str = ""
) -> Iterator[Outcome]:
    """Ask all `cases` with `method`, in batches, with a progress bar. Between batches the model is free."""
    with tqdm(total=len(cases), desc=label or method.name, disable=None) as bar:
        for start in range(0, len(cases), batch):
            part = cases[start : start + batch]
            yield from run_batch(loaded, part, method, max_new_tokens)
            bar.update(len(part))


def run_batch(loaded: Loaded, cases: Sequence[Case], method: Method, max_new_tokens: int) -> list[Outcome]:
    """Ask `cases` in one batch."""
    inputs = encode(loaded, [(case.picture(), case.question) for case in cases])
    with loaded.lock, torch.inference_mode(), attach(loaded.model, method, loaded.calibration) as session:
        ids = session.generate(inputs, max_new_tokens=max_new_tokens, do_sample=False)
        traces = session.traces()
    ids = ids[:, inputs["input_ids"].shape[1] :].cpu()
    outcomes = []
    for row, (case, trace) in enumerate(zip(cases, traces, strict=True)):
        tokens = ids[row, : trace.tokens.generated]
        answer = loaded.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        trace.question, trace.answer = case.question, answer
        outcomes.append(Outcome(answer, trace))
    return outcomes
