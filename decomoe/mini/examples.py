"""The example pictures of the page, drawn from held-out seeds: `python -m decomoe.mini.examples`."""

import json
from pathlib import Path

from .draw import draw

FOLDER = Path(__file__).parents[2] / "assets" / "examples"
PICKED = (  # (name, seed, kind of picture, kind of question)
    ("chart", 90_006, "chart", "describe"),
    ("objects", 90_003, "objects", "describe"),
    ("three-things", 90_017, "objects", "name"),
    ("shapes", 90_008, "objects", "count"),
    ("word", 90_002, "text", "text color"),
    ("number", 90_020, "text", "presence"),
    ("bars", 90_009, "chart", "chart"),
)


def main() -> None:
    """Draw the pictures and write their questions and true answers beside them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, seed, kind, asked in PICKED:
        picture = draw(seed, (160, 160), kind)
        picture.image.save(FOLDER / f"{name}.png", optimize=True)
        question = next((q for q in picture.questions if q.kind == asked), picture.questions[0])
        rows.append({"image": f"{name}.png", "seed": seed, "question": question.text, "answer": question.answer})
    (FOLDER / "examples.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
