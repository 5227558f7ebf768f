"""Small tables: pictograms at the head of rows, letters at the head of columns, numbers in the cells."""

import random

from PIL import Image, ImageDraw

from ..glyphs import TRAIN_TYPEFACES, UNSEEN_TYPEFACES
from ..pictograms import NAMES, pictogram
from .base import Picture, Question, listed, yes_no
from .text import ink, write

GRID = (90, 90, 90)


def draw_table(rng: random.Random, picture: Picture, unseen: str | None = None) -> None:
    """2 to 3 rows and 1 to 2 columns of numbers; rows and columns are at least two tokens wide."""
    width, height = picture.image.size
    rows, columns = rng.randint(2, 3), rng.randint(1, 2)
    nouns = rng.sample(NAMES, rows)
    numbers = [[rng.randint(0, 99 if columns == 1 else 9) for _ in range(columns)] for _ in nouns]
    style = ink(rng, UNSEEN_TYPEFACES if unseen == "typefaces" else TRAIN_TYPEFACES, "black")
    down, across = height / (rows + 1), width / (columns + 1)
    canvas = ImageDraw.Draw(picture.image)
    for row in range(1, rows + 1):
        canvas.line((2, row * down, width - 2, row * down), fill=GRID)
    for column in range(1, columns + 1):
        canvas.line((column * across, 2, column * across, height - 2), fill=GRID)
    size = min(down, 40.0)
    heads = "AB"[:columns]
    for column, head in enumerate(heads):
        write(picture, head, style, size, (column + 1.3) * across, (down - size) / 2)
    for row, noun in enumerate(nouns):
        side = round(min(down, across) * 0.85)
        x, y = round((across - side) / 2), round((row + 1.5) * down - side / 2)
        sprite = pictogram(noun).resize((side, side), Image.Resampling.BILINEAR)
        picture.image.paste(sprite, (x, y), sprite)
        picture.mark((x, y, x + side, y + side), noun)
        for column, number in enumerate(numbers[row]):
            write(picture, str(number), style, size, (column + 1.3) * across, (row + 1.5) * down - size / 2)
    picture.questions = _questions(rng, nouns, heads, numbers)


def _questions(rng: random.Random, nouns: list[str], heads: str, numbers: list[list[int]]) -> list[Question]:
    questions = [
        Question("table", "How many rows are there?", str(len(nouns))),
        Question("table", "How many columns are there?", str(len(heads))),
        Question("name", "What is in the first row?", nouns[0]),
        Question("name", "What is in the last row?", nouns[-1]),
    ]
    for row in rng.sample(range(len(nouns)), 2):
        column = rng.randrange(len(heads))
        where = f" in column {heads[column]}" if len(heads) > 1 else ""
        text = f"What is the number for the {nouns[row]}{where}?"
        questions.append(Question("table", text, str(numbers[row][column])))
    column = rng.randrange(len(heads))
    values = [row[column] for row in numbers]
    where = f" in column {heads[column]}" if len(heads) > 1 else ""
    if values.count(max(values)) == 1:
        questions.append(
            Question("table", f"Which row has the largest number{where}?", nouns[values.index(max(values))])
        )
    there = rng.random() < 0.5
    noun = rng.choice(nouns) if there else rng.choice([name for name in NAMES if name not in nouns])
    questions.append(Question("presence", f"Is there a row for the {noun}?", yes_no(there)))
    said = listed([f"{noun} {' and '.join(map(str, row))}" for noun, row in zip(nouns, numbers, strict=True)])
    questions.append(Question("describe", "Describe the picture.", f"A table: {said}."))
    rng.shuffle(questions)
    return questions
