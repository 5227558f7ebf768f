"""What every kind of picture shares: questions, labels, colours, places, backgrounds."""

import colorsys
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from ..photos import CLASSES
from ..pictograms import NAMES

TOKEN = 16  # pixels a side of one visual token: 8-pixel patches merged 2x2
COLORS = {  # two shades each, which `shade` varies a little
    "red": ((214, 40, 40), (255, 0, 0)),
    "orange": ((247, 127, 0), (255, 150, 30)),
    "yellow": ((250, 210, 30), (255, 255, 0)),
    "green": ((46, 160, 67), (0, 255, 0)),
    "teal": ((0, 128, 128), (20, 150, 145)),
    "blue": ((40, 90, 220), (0, 0, 255)),
    "purple": ((130, 60, 180), (110, 30, 160)),
    "pink": ((255, 130, 180), (255, 105, 200)),
    "brown": ((165, 42, 42), (120, 72, 40)),
    "gray": ((128, 128, 128), (140, 140, 145)),
    "black": ((25, 25, 25), (0, 0, 0)),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "diamond", "ring", "rectangle")
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

THINGS = (  # what can lie under a visual token
    "nothing",
    *NAMES,
    *SHAPES,
    *CHARACTERS,
    "bar",
    "line",
    "slice",
    *(f"photo of {name}" for name in CLASSES),
)
TINTS = ("none", *COLORS)
_INDEX = {thing: index for index, thing in enumerate(THINGS)}

_PLURALS = {"leaf": "leaves", "fish": "fish", "sheep": "sheep", "jellyfish": "jellyfish", "cactus": "cacti"}

UNSEEN_PAIRS = {("heart", "gray"), ("square", "teal")}  # shapes and colours that training never shows together
SIMILAR = ({"rectangle", "square"}, {"tree", "palm"}, {"hat", "cap", "helmet", "crown"})  # one may pass for the other


@dataclass(frozen=True)
class Question:
    """One question about a picture. `kind` groups questions in reports."""

    kind: str
    text: str
    answer: str


Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass
class Picture:
    """A drawn picture.

    Attributes:
        image: RGB, sides multiples of `TOKEN`.
        questions: questions with their true answers.
        things, tints: index into `THINGS` / `TINTS` per visual token, row by row.
    """

    image: Image.Image
    questions: list[Question] = field(default_factory=list)
    things: list[int] = field(default_factory=list)
    tints: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = (self.image.width // TOKEN) * (self.image.height // TOKEN)
        self.things, self.tints = [0] * tokens, [0] * tokens

    def mark(self, box: Box, thing: str, tint: str = "none") -> None:
        """Say that `thing` covers the tokens whose middle lies in `box`, give or take two pixels."""
        columns, rows = self.image.width // TOKEN, self.image.height // TOKEN
        left, top, right, bottom = box
        labels = _INDEX[thing], TINTS.index(tint)
        first, last = round((left - 2) / TOKEN), round((right + 2) / TOKEN)
        for row in range(max(0, round((top - 2) / TOKEN)), min(rows, round((bottom + 2) / TOKEN))):
            for column in range(max(0, first), min(columns, last)):
                place = row * columns + column
                self.things[place], self.tints[place] = labels


def shade(rng: random.Random, color: str) -> tuple[int, int, int]:
    """A shade of `color`."""
    red, green, blue = (min(255, max(0, value + rng.randint(-8, 8))) for value in rng.choice(COLORS[color]))
    return red, green, blue


def background(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """A pale colour, plain or as gradient, stripes, checks or grain, on which every colour of `COLORS` stands out."""

    def pale() -> tuple[int, int, int]:
        red, green, blue = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.12), rng.uniform(0.88, 1))
        return round(red * 255), round(green * 255), round(blue * 255)

    image = Image.new("RGB", size, pale())
    style = rng.random()
    if style < 0.3:
        mask = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
    elif style < 0.45:
        step = rng.choice((4, 8, 12))
        tile = Image.new("L", (2 * step, 2 * step))
        tile.paste(255, (0, 0, step, step if rng.random() < 0.5 else 2 * step))
        mask = Image.new("L", size)
        for x in range(0, size[0], 2 * step):
            for y in range(0, size[1], 2 * step):
                mask.paste(tile, (x, y))
    elif style < 0.55:
        grain = Image.frombytes("L", (32, 32), rng.randbytes(1024))
        mask = grain.resize(size, Image.Resampling.BILINEAR)
    else:
        return image
    image.paste(pale(), (0, 0), mask)
    return image


def a(name: str) -> str:
    """`name` with its article."""
    return f"an {name}" if name[0] in "aeiou" or name.startswith("hour") else f"a {name}"


def plural(noun: str) -> str:
    """The plural of a noun."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def listed(parts: Sequence[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def yes_no(truth: bool) -> str:
    """The answer to a yes/no question."""
    return "yes" if truth else "no"


def choice(rng: random.Random, question: Question, pool: Sequence[str]) -> Question:
    """`question` as multiple choice: its answer and three others of `pool` as options A to D."""
    options = [question.answer, *rng.sample([other for other in pool if other != question.answer], 3)]
    rng.shuffle(options)
    lines = [question.text, *(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))]
    return Question("choice", "\n".join(lines), "ABCD"[options.index(question.answer)])
