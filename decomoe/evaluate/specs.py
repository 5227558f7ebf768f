"""What `--benchmarks` and `--methods` say, in words that a table can print."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..benchmarks import BENCHMARKS, Benchmark
from ..methods import METHODS, DecoMoE, Method, from_toggles

METHOD_SETS = {  # the rows of the paper's tables; 0.39 is its fixed prefix of 50 of 128
    "table1": ("fastv", "sparsevlm", "dyvte", "fastmmoe", "decomoe"),
    "table2": ("decomoe:savb=no", "decomoe:keep_ratio=0.39", "decomoe:rcep=no", "decomoe"),
    "table5": tuple(
        f"decomoe:keep_ratio={share},order={order}"
        for order in ("native", "random", "rcep")
        for share in (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
    ),
    "table6": tuple(f"decomoe:p={tenths / 10}" for tenths in range(1, 11)),
}
BOOLS = {"yes": True, "no": False}


def parse_benchmarks(texts: Sequence[str]) -> list[tuple[Benchmark, str | None]]:
    """Benchmarks with their sources, from NAME or NAME=SOURCE, split at commas.

    Raises:
        ValueError: there is no such benchmark.
    """
    found = {}
    for piece in _pieces(texts):
        name, _, source = piece.partition("=")
        if name not in BENCHMARKS:
            raise ValueError(f"There is no benchmark '{name}'; there are {', '.join(BENCHMARKS)}.")
        found[name] = (BENCHMARKS[name], source or None)
    return list(found.values())


def parse_methods(texts: Sequence[str], layers: int, sets: bool = True) -> dict[str, Method]:
    """Methods by the spec that names them: NAME or NAME:KEY=VALUE,KEY=VALUE, or one of `METHOD_SETS`, split at commas.

    Args:
        layers: of the model, for the fixed exit of `savb=no`. sets: whether `METHOD_SETS` may be named.

    Raises:
        ValueError: there is no such method, parameter or value; the message lists those that exist.
    """
    specs: list[str] = []
    known = (*METHODS, *METHOD_SETS) if sets else tuple(METHODS)
    for piece in _pieces(texts):
        if "=" in piece and ":" not in piece and specs:  # a comma inside a spec
            specs[-1] += f",{piece}"
        elif (name := piece.partition(":")[0]) not in known:
            raise ValueError(f"There is no method '{name}'; there are {', '.join(known)}.")
        else:
            specs += METHOD_SETS.get(piece, (piece,))
    return {spec: parse_method(spec, layers) for spec in specs}


def _pieces(texts: Sequence[str]) -> list[str]:
    return [piece.strip() for text in texts for piece in text.split(",") if piece.strip()]


def parse_method(spec: str, layers: int) -> Method:
    """One method, from NAME or NAME:KEY=VALUE,KEY=VALUE; a value of several numbers is given as 2/6/15.

    Raises:
        ValueError: as for `parse_methods`.
    """
    name, _, text = spec.partition(":")
    if name not in METHODS:
        raise ValueError(f"There is no method '{name}'; there are {', '.join(METHODS)}.")
    kind = METHODS[name]
    hints = get_type_hints(kind)
    parameters = {field.name: hints[field.name] for field in fields(kind)}
    if kind is DecoMoE:
        parameters["savb"] = bool
    options: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        key, _, value = pair.partition("=")
        if key not in parameters:
            raise ValueError(f"{name} has no parameter '{key}'; it has {', '.join(parameters) or 'none'}.")
        if key in options:
            raise ValueError(f"{key} is given twice in '{spec}'.")
        choices = _choices(parameters[key])
        pieces = [_value(key, piece, choices) for piece in (value.split("/") if ... in choices else [value])]
        options[key] = tuple(pieces) if ... in choices else pieces[0]
    return from_toggles(layers, **options) if kind is DecoMoE else kind(**options)


def _choices(hint: Any) -> list[Any]:
    """The types and strings that a type hint admits; an ellipsis among them means several values."""
    return [choice for part in get_args(hint) for choice in _choices(part)] or [hint]


def _value(key: str, text: str, choices: Sequence[Any]) -> Any:
    if text in choices:
        return text
    if bool in choices and text in BOOLS:
        return BOOLS[text]
    for number in (int, float):
        with suppress(ValueError):
            if number in choices:
                return number(text)
    names = {bool: "yes or no", int: "a whole number", float: "a number"}
    known = [names.get(choice, choice) for choice in choices if choice not in (NoneType, ...)]
    raise ValueError(f"{key} is {' or '.join(known)}, not '{text}'.")
