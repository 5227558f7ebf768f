"""The example pictures of the page with recorded answers, from held-out seeds: `python -m decomoe.mini.examples`."""

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from ..answer import Loaded, ask, load
from ..methods import DecoMoE, Dense
from ..trace import Trace
from .draw import Picture, draw

FOLDER = Path(__file__).parents[2] / "assets" / "examples"
PICKED = (  # (name, seed, size, kind of picture, kind of question)
    ("chart", 90_008, (192, 192), "chart", "chart"),
    ("shape", 90_001, (128, 128), "shape", "presence"),
    ("objects", 90_001, (192, 160), "objects", "describe"),
    ("nine-things", 90_004, (192, 160), "objects", "name"),
    ("table", 90_001, (192, 192), "table", "table"),
    ("text", 90_000, (192, 192), "text", "text color"),
    ("pie", 90_009, (192, 192), "chart", "chart"),
    ("five-things", 90_000, (192, 160), "objects", "color"),
)


@dataclass(frozen=True)
class Example:
    """A picture with a question, its true answer, and what dense and DecoMoE did when they were recorded."""

    image: Path
    question: str
    answer: str
    machine: str
    date: str
    traces: tuple[Trace, Trace]


def examples() -> list[Example]:
    """The recorded examples; no model is needed. Empty without the repository's assets."""
    if not (FOLDER / "examples.json").is_file():
        return []
    found = []
    for row in json.loads((FOLDER / "examples.json").read_text()):
        said = json.loads((FOLDER / row["recording"]).read_text())
        dense, ours = (Trace.from_json(json.dumps(values)) for values in said["traces"])
        image = FOLDER / row["image"]
        found.append(Example(image, row["question"], row["answer"], said["machine"], said["date"], (dense, ours)))
    return found


def main() -> None:
    """Draw the pictures; write their questions and true answers beside them, and what both methods answer now."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    loaded = load()
    for name, seed, size, kind, asked in PICKED:
        picture = draw(seed, size, kind)
        picture.image.save(FOLDER / f"{name}.png", optimize=True)
        question = next(q for q in picture.questions if q.kind == asked)
        (FOLDER / f"{name}.json").write_text(json.dumps(_record(loaded, picture, question.text)) + "\n")
        files = {"image": f"{name}.png", "recording": f"{name}.json"}
        rows.append({**files, "seed": seed, "question": question.text, "answer": question.answer})
    (FOLDER / "examples.json").write_text(json.dumps(rows, indent=1) + "\n")


def _record(loaded: Loaded, picture: Picture, question: str) -> dict[str, object]:
    """Ask both methods, after a warm-up that is thrown away."""
    traces = []
    for method in (Dense(), DecoMoE()):
        ask(loaded, picture.image, question, method, max_new_tokens=2)
        trace = ask(loaded, picture.image, question, method, read_gate=method == Dense()).trace
        trace.model = "the mini model"
        for layers in trace.mass.values():
            layers[:] = [None if mass is None else [round(value, 2) for value in mass] for mass in layers]
        traces.append(json.loads(trace.to_json()))
    return {"machine": _machine(), "date": datetime.date.today().isoformat(), "traces": traces}


def _machine() -> str:
    """What answered, in general words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


if __name__ == "__main__":
    main()
