"""The example pictures of the page, drawn from held-out seeds: `python -m decomoe.mini.examples`."""

import json
from pathlib import Path

from .draw import draw

FOLDER = Path(__file__).parents[2] / "assets" / "examples"
PICKED = (  # (name, seed, size, kind of picture, kind of question)
    ("chart", 90_005, (192, 192), "chart", "chart"),
    ("objects", 90_012, (192, 160), "objects", "describe"),
    ("nine-things", 90_006, (192, 160), "objects", "name"),
    ("table", 90_001, (192, 192), "table", "table"),
    ("text", 90_000, (192, 192), "text", "text color"),
    ("pie", 90_001, (192, 192), "chart", "compare"),
    ("four-things", 90_011, (192, 160), "objects", "color"),
)


def main() -> None:
    """Draw the pictures and write their questions and true answers beside them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, seed, size, kind, asked in PICKED:
        picture = draw(seed, size, kind)
        picture.image.save(FOLDER / f"{name}.png", optimize=True)
        question = next(q for q in picture.questions if q.kind == asked)
        rows.append({"image": f"{name}.png", "seed": seed, "question": question.text, "answer": question.answer})
    (FOLDER / "examples.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
