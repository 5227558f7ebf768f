"""`decomoe cases`: the telling cases among collected forced exits, with their pictures."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_benchmarks

if TYPE_CHECKING:
    from ..collect.cases import Found


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    cases = commands.add_parser("cases", help="find telling cases in what 'collect' wrote; no model is needed")
    cases.set_defaults(run=run)
    cases.add_argument("--results", type=Path, default=Path("results/mini"), help="of 'collect' (results/mini)")
    add_benchmarks(cases)
    cases.add_argument("--out", type=Path, help="folder for the cases as Markdown and JSON, with their pictures")
    return cases


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from ..collect import file_name  # noqa: PLC0415
    from ..collect.cases import search  # noqa: PLC0415
    from ..evaluate import parse_benchmarks, store  # noqa: PLC0415

    benchmarks = parse_benchmarks(options.benchmarks)
    files = [store.file_of(options.results, benchmark.name, file_name("exits")) for benchmark, _ in benchmarks]
    lines = [line for file in files for line in store.read(file)]
    found = search(lines)
    if not found:
        raise ValueError(f"{options.results} has no question that is answered rightly and that an early exit breaks.")
    told = [told_of(one, f"case{number}.png") for number, one in enumerate(found, 1)]
    text = "\n".join(markdown(one) for one in told)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        pictures = {
            case.id: case.picture for benchmark, source in benchmarks for case in benchmark.load("test", source)
        }
        for one, case in zip(told, found, strict=True):
            pictures[case.lines[0]["id"]]().save(options.out / one["picture"], optimize=True)
        store.write(options.out / "cases.json", json.dumps(told, indent=1) + "\n")
        store.write(options.out / "cases.md", text)
    return 0


def told_of(found: "Found", picture: str) -> dict[str, Any]:
    """A case for programs and for the page."""
    return {
        "title": found.title,
        "picture": picture,
        "visual": found.lines[0]["visual"],
        "questions": [line["question"] for line in found.lines],
        "truths": [line["truth"] for line in found.lines],
        "boundaries": list(found.boundaries),
        "gate": [line.get("predicted") for line in found.lines],
        "layers": found.lines[0]["layers"],
        "answers": [[*line["answers"], line["dense"]["answer"]] for line in found.lines],
        "right": [[*line["right"], line["dense"]["right"]] for line in found.lines],
    }


def markdown(told: dict[str, Any]) -> str:
    """A case for people: question, where it breaks, and a row an exit."""
    lines = [
        f"## {told['title']}",
        "",
        f"![the picture]({told['picture']})",
        "",
        f"{told['visual']} visual tokens.",
        "",
    ]
    for question, truth, at, gate in zip(
        *(told[k] for k in ("questions", "truths", "boundaries", "gate")), strict=True
    ):
        fires = "never lets the picture go" if gate is None else f"lets the picture go after layer {gate}"
        lines.append(f"- {question} *{truth}* Right from an exit after layer {at} on; the gate {fires}.")
    heads = ["exit after", *told["questions"]]
    lines += ["", f"| {' | '.join(map(_cell, heads))} |", "| --- " * len(heads) + "|"]
    for place, layer in enumerate([*told["layers"], "none"]):
        cells = [
            answers[place] if right[place] else f"✗ {answers[place]}"
            for answers, right in zip(told["answers"], told["right"], strict=True)
        ]
        lines.append(f"| {' | '.join(map(_cell, [layer, *cells]))} |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
