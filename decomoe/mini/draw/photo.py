"""Real photos of ten classes, alone or several in one picture."""

import random

from PIL import Image, ImageOps

from ..photos import CLASSES, Photos
from .base import PLACES, Picture, Question, a, choice, listed, plural, yes_no

QUESTIONS = ("What is in the photo?", "What does the photo show?", "What is this?")


def draw_photo(rng: random.Random, picture: Picture, photos: Photos) -> None:
    """One photo that fills the picture, or four of them."""
    width, height = picture.image.size
    columns, rows = rng.choice(((1, 1), (2, 2), (2, 2)))
    shown = []
    for row in range(rows):
        for column in range(columns):
            image, name = photos[rng.randrange(len(photos))]
            box = (column * width // columns, row * height // rows)
            end = ((column + 1) * width // columns, (row + 1) * height // rows)
            picture.image.paste(_vary(rng, image, (end[0] - box[0], end[1] - box[1])), box)
            picture.mark((box[0] + 2, box[1] + 2, end[0] - 2, end[1] - 2), f"photo of {name}")
            shown.append((name, PLACES[6 * row + 2 * column]))
    picture.questions = _one(rng, shown[0][0]) if len(shown) == 1 else _several(rng, shown)


def _vary(rng: random.Random, image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A crop of at least 28 of 32 pixels, maybe mirrored, in the shape of `size`."""
    side = rng.uniform(27, 32)
    across, down = (side, side * size[1] / size[0]) if size[0] > size[1] else (side * size[0] / size[1], side)
    x, y = rng.uniform(0, 32 - across), rng.uniform(0, 32 - down)
    cut = image.resize(size, Image.Resampling.BICUBIC, (x, y, x + across, y + down))
    return ImageOps.mirror(cut) if rng.random() < 0.5 else cut


def _one(rng: random.Random, name: str) -> list[Question]:
    asked = Question("photo", rng.choice(QUESTIONS), name)
    there = rng.random() < 0.5
    other = rng.choice([other for other in CLASSES if other != name])
    return [
        asked,
        choice(rng, asked, CLASSES),
        Question("presence", f"Is there {a(name if there else other)} in the photo?", yes_no(there)),
        Question("describe", "Describe the picture.", f"A photo of {a(name)}."),
    ]


def _several(rng: random.Random, shown: list[tuple[str, str]]) -> list[Question]:
    names = [name for name, _ in shown]
    questions = [Question("photo", f"What is in the {place} photo?", name) for name, place in shown]
    unique = [(name, place) for name, place in shown if names.count(name) == 1]
    if unique:
        name, place = rng.choice(unique)
        questions.append(Question("locate", f"Where is the {name}?", place))
    there = rng.random() < 0.5
    name = rng.choice(names) if there else rng.choice([other for other in CLASSES if other not in names])
    questions.append(Question("presence", f"Is there a photo of {a(name)}?", yes_no(there)))
    counted = rng.choice(names)
    questions.append(Question("count", f"How many photos of {plural(counted)} are there?", str(names.count(counted))))
    said = listed([f"{a(name)} at the {place}" for name, place in shown])
    questions.append(Question("describe", "Describe the picture.", f"{len(shown)} photos: {said}."))
    rng.shuffle(questions)
    return questions
