"""Observations in chunks, a file each, so that work is shared between processes and nothing finished is lost."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from ..answer import Loaded
from ..calibration import fingerprint, weights_digest
from ..families import parts_of
from ..methods import DecoMoE
from .data import Question
from .observe import Observed, Plan, observe

SCHEMA = 1  # of a chunk; raise it when observing changes in a way that no value in its name shows


def observe_all(
    loaded: Loaded, questions: Sequence[Question], plan: Plan, batch: int, folder: Path, label: str
) -> Observed:
    """Observe `questions`, `batch` in a chunk; chunks that `folder` holds already are not run again.

    Under `accelerate launch` every process does its share of the chunks and waits for the others. On several machines
    `folder` must be one that all of them see.

    Raises:
        ValueError: the chunks of other processes are not there.
    """
    team = PartialState()
    chunks = [questions[start : start + batch] for start in range(0, len(questions), batch)]
    model = [fingerprint(parts_of(loaded.model)), weights_digest(loaded.model)]
    made = [SCHEMA, DecoMoE().settings(), model, _plan(plan)]
    paths = [folder / f"{_digest([made, _cases(chunk)])}.safetensors" for chunk in chunks]
    folder.mkdir(parents=True, exist_ok=True)
    mine = list(zip(paths, chunks, strict=True))[team.process_index :: team.num_processes]
    hidden = None if team.is_main_process else True  # None: hidden where nobody watches
    with tqdm(total=sum(len(chunk) for _, chunk in mine), desc=label, unit="question", disable=hidden) as bar:
        for path, chunk in mine:
            if not _whole(path):
                _write(path, observe(loaded, chunk, plan))
            bar.update(len(chunk))
    team.wait_for_everyone()
    if not all(map(_whole, paths)):
        raise ValueError(f"Observations of other processes are missing; all machines must share the folder {folder}.")
    seen = [load_file(path) for path in paths]
    return Observed(**{field.name: torch.cat([chunk[field.name] for chunk in seen]) for field in fields(Observed)})


def _whole(path: Path) -> bool:
    """Whether a chunk is there, and not cut short by a full disk or a power cut."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _write(path: Path, seen: Observed) -> None:
    """Whole or not at all."""
    half = path.with_suffix(".tmp")
    save_file({name: value.contiguous() for name, value in vars(seen).items()}, half)
    os.replace(half, path)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _cases(chunk: Sequence[Question]) -> list[Any]:
    return [[q.benchmark.name, q.benchmark.rule, q.case.id, q.case.question, q.case.answer, q.picture] for q in chunk]


def _plan(plan: Plan) -> list[Any]:
    orders = None if plan.orders is None else plan.orders.orders.tolist()
    return [plan.candidates, plan.max_new_tokens, plan.shares, orders] + ["after image"] * plan.after_image
