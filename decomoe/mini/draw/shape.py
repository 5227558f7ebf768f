"""One shape on a pale ground, with the questions of easy-VQA (Victor Zhou; its pictures and wording, drawn anew)."""

import random

from PIL import Image, ImageDraw

from .base import Picture, Question, shade, yes_no

EASY_SHAPES = ("circle", "rectangle", "triangle")
EASY_COLORS = ("red", "green", "blue", "black", "gray", "teal", "brown", "yellow")


def draw_shape(rng: random.Random, picture: Picture, unseen: str | None = None) -> None:
    """Draw one shape as easy-VQA does, at 64x64, enlarged; nothing about it can be unseen."""
    width, height = picture.image.size
    small = Image.new("RGB", (64, 64), tuple(rng.randint(230, 255) for _ in range(3)))
    canvas = ImageDraw.Draw(small)
    noun, color = rng.choice(EASY_SHAPES), rng.choice(EASY_COLORS)
    across = rng.randint(8, 32)
    down = across if noun != "rectangle" else rng.randint(8, 32)
    x, y = rng.randint(0, 64 - across), rng.randint(0, 64 - down)
    fill = shade(rng, color)
    if noun == "circle":
        canvas.ellipse((x, y, x + across, y + down), fill)
    elif noun == "rectangle":
        canvas.rectangle((x, y, x + across, y + down), fill)
    else:
        canvas.polygon([(x, y + down), (x + across / 2, y), (x + across, y + down)], fill)
    picture.image.paste(small.resize((width, height), Image.Resampling.BICUBIC))
    grow = (width / 64, height / 64)
    box = (x * grow[0], y * grow[1], (x + across) * grow[0], (y + down) * grow[1])
    picture.mark(box, noun, color)
    questions = [
        Question("color", rng.choice(_COLOR).format(noun), color),
        Question("name", rng.choice(_SHAPE).format(color), noun),
        *(_presence(rng, noun, color) for _ in range(4)),
        _count(rng, color),
    ]
    rng.shuffle(questions)
    picture.questions = questions


_COLOR = (
    "what color is the shape?",
    "what color is the {}?",
    "what is the color of the {}?",
    "what is the color of the shape?",
)
_SHAPE = (
    "what shape is in the image?",
    "what shape does the image contain?",
    "what shape is present?",
    "what is the {} shape?",
)
_THERE = (
    "is a {} present?",
    "is there a {}?",
    "does the image contain a {}?",
    "is there a {} in the image?",
)
_NOT_THERE = (
    "does the image not contain a {}?",
    "is there not a {}?",
    "is there not a {} in the image?",
    "is no {} present?",
)


def _count(rng: random.Random, color: str) -> Question:
    """None or one; no question of easy-VQA's."""
    asked = rng.choice((color, rng.choice(EASY_COLORS)))
    return Question("count", f"How many {asked} shapes are there?", str(int(asked == color)))


def _presence(rng: random.Random, noun: str, color: str) -> Question:
    """Balanced, plain or negated, about a shape or a colour."""
    there = rng.random() < 0.5
    if rng.random() < 0.35:
        name = noun if there else rng.choice([other for other in EASY_SHAPES if other != noun])
    else:
        name = f"{color if there else rng.choice([other for other in EASY_COLORS if other != color])} shape"
    negated = rng.random() < 0.35  # of half, what plain ones teach would cancel out
    text = rng.choice(_NOT_THERE if negated else _THERE).format(name)
    return Question("absence" if negated else "presence", text, yes_no(there != negated))
