"""Pictures with questions and true answers, drawn from a seed: what the mini model is trained and tested on.

Three kinds of picture (objects in a 3x3 layout, text cards, bar charts). Every picture also knows which thing and which
colour lies under each visual token; vision pre-training learns from that.
"""

import colorsys
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from PIL import Image, ImageDraw, ImageFont

from .pictograms import NAMES, pictogram

TOKEN = 16  # pixels a side of one visual token: 8-pixel patches merged 2x2
SIZES = ((128, 128), (144, 112), (112, 144), (160, 128), (128, 160), (144, 144), (160, 160))  # (width, height)
COLORS = {
    "red": (214, 40, 40),
    "orange": (247, 127, 0),
    "yellow": (250, 210, 30),
    "green": (46, 160, 67),
    "blue": (40, 90, 220),
    "purple": (130, 60, 180),
    "pink": (255, 130, 180),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "diamond", "ring")
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
WORDS = """stop go exit open door push pull sale fire water milk tea bread fish north south east west left right yes no
home work school park road bank hotel taxi bus train stone wood gold iron moon sun star rain snow wind cloud
tree leaf book pen desk lamp chair table cup plate king queen boy girl man dog cat bird cow red blue green black
white pink hot cold big small new old fast slow run walk jump play stay wait look read sing love hope time year
month week day night one two three four five six seven eight nine ten zoo map key box hat shoe coat ring bell
drum song game ball club city town farm lake river hill beach sand salt sugar rice corn soup cake apple pear
plum""".split()

THINGS = ("nothing", *NAMES, *SHAPES, *LETTERS, "bar")  # what can lie under a visual token
TINTS = ("none", *COLORS)


@dataclass(frozen=True)
class Question:
    """One question about a picture. `kind` groups questions in reports."""

    kind: str
    text: str
    answer: str


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

    def mark(self, box: tuple[float, float, float, float], thing: str, tint: str = "none") -> None:
        """Say that `thing` covers `box` (left, top, right, bottom, in pixels)."""
        columns = self.image.width // TOKEN
        left, top, right, bottom = box
        for index in range(len(self.things)):
            x, y = (index % columns + 0.5) * TOKEN, (index // columns + 0.5) * TOKEN
            if left - 2 <= x < right + 2 and top - 2 <= y < bottom + 2:
                self.things[index], self.tints[index] = THINGS.index(thing), TINTS.index(tint)


def draw(seed: int, size: tuple[int, int] | None = None, kind: str | None = None) -> Picture:
    """The picture of `seed`, always the same one.

    Args:
        seed: any integer.
        size: (width, height) in pixels, multiples of 16; by default one of `SIZES`, by the seed.
        kind: "objects", "text" or "chart"; by default by the seed, objects more often.
    """
    rng = random.Random(seed)
    size = size or rng.choice(SIZES)
    kind = kind or rng.choices(list(KINDS), (6, 2, 2))[0]
    tokens = (size[0] // TOKEN) * (size[1] // TOKEN)
    picture = Picture(_background(rng, size), [], [0] * tokens, [0] * tokens)
    KINDS[kind](rng, picture)
    return picture


def _background(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """A pale plain colour or a pale gradient, so that every colour of `COLORS` stands out."""

    def pale() -> tuple[int, ...]:
        red, green, blue = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.12), rng.uniform(0.88, 1))
        return round(red * 255), round(green * 255), round(blue * 255)

    image = Image.new("RGB", size, pale())
    if rng.random() < 0.4:
        mask = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
        image.paste(Image.new("RGB", size, pale()), mask=mask)
    return image


# --- objects --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thing:
    noun: str
    place: int  # index into PLACES
    color: str | None = None

    @property
    def name(self) -> str:
        return f"{self.color} {self.noun}" if self.color else self.noun


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: str, color: tuple[int, int, int], box: list[float]) -> None:
    left, top, right, bottom = box
    side, x, y = right - left, (left + right) / 2, (top + bottom) / 2
    if shape == "circle":
        canvas.ellipse(box, fill=color)
    elif shape == "ring":
        canvas.ellipse(box, outline=color, width=max(4, round(side / 5)))
    elif shape == "square":
        canvas.rectangle(box, fill=color)
    elif shape == "triangle":
        canvas.polygon([(x, top), (right, bottom), (left, bottom)], fill=color)
    elif shape == "diamond":
        canvas.polygon([(x, top), (right, y), (x, bottom), (left, y)], fill=color)
    elif shape == "star":
        canvas.regular_polygon((x, y, side / 2), 3, rotation=0, fill=color)
        canvas.regular_polygon((x, y, side / 2), 3, rotation=180, fill=color)
    elif shape == "cross":
        canvas.rectangle((x - side / 6, top, x + side / 6, bottom), fill=color)
        canvas.rectangle((left, y - side / 6, right, y + side / 6), fill=color)
    elif shape == "heart":
        canvas.ellipse((left, top, x + side * 0.04, top + side * 0.54), fill=color)
        canvas.ellipse((x - side * 0.04, top, right, top + side * 0.54), fill=color)
        lobe = top + side * 0.36
        canvas.polygon(
            [(left + side * 0.03, lobe), (x, lobe - side * 0.1), (right - side * 0.03, lobe), (x, bottom)], color
        )


def _objects(rng: random.Random, picture: Picture) -> None:
    width, height = picture.image.size
    canvas = ImageDraw.Draw(picture.image)
    places = sorted(rng.sample(range(9), rng.choices((1, 2, 3, 4, 5), (2, 3, 3, 2, 1))[0]))
    things: list[Thing] = []
    for place in places:
        if things and rng.random() < 0.15:  # repeat one, so that there is something to count
            thing = Thing(things[-1].noun, place, rng.choice(list(COLORS)) if things[-1].color else None)
        elif rng.random() < 0.5:
            thing = Thing(rng.choice(NAMES), place)
        else:
            thing = Thing(rng.choice(SHAPES), place, rng.choice(list(COLORS)))
        things.append(thing)
        side = rng.uniform(0.62, 0.95) * min(width, height) / 3
        x = (place % 3 + 0.5) * width / 3 + rng.uniform(-1, 1) * (width / 3 - side) / 2
        y = (place // 3 + 0.5) * height / 3 + rng.uniform(-1, 1) * (height / 3 - side) / 2
        box = [x - side / 2, y - side / 2, x + side / 2, y + side / 2]
        if thing.color:
            _draw_shape(canvas, thing.noun, COLORS[thing.color], box)
        else:
            sprite = pictogram(thing.noun).resize((round(side), round(side)), Image.Resampling.BILINEAR)
            sprite = sprite.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR)
            picture.image.paste(sprite, (round(box[0]), round(box[1])), sprite)
        picture.mark((box[0], box[1], box[2], box[3]), thing.noun, thing.color or "none")
    picture.questions = _object_questions(rng, things)


def _object_questions(rng: random.Random, things: list[Thing]) -> list[Question]:
    nouns = [thing.noun for thing in things]
    unique = [thing for thing in things if nouns.count(thing.noun) == 1]
    questions = []
    if rng.random() < 0.6:  # long answers teach much but take most of a sequence
        questions.append(Question("describe", "Describe the picture.", _description(things)))
    if len(things) == 1:
        text = rng.choice(("What is in the picture?", "What is this?", "What do you see?"))
        questions.append(Question("name", text, things[0].name))
    thing = rng.choice(things)
    questions.append(Question("name", f"What is at the {PLACES[thing.place]}?", thing.name))
    if unique:
        thing = rng.choice(unique)
        questions.append(Question("locate", f"Where is the {thing.noun}?", PLACES[thing.place]))
    colored = [thing for thing in unique if thing.color]
    if colored:
        thing = rng.choice(colored)
        questions.append(Question("color", f"What color is the {thing.noun}?", str(thing.color)))
    if rng.random() < 0.6:
        questions.append(Question("count", "How many objects are there?", str(len(things))))
    noun = rng.choice(nouns)
    questions.append(Question("count", f"How many {noun}s are there?", str(nouns.count(noun))))
    there = rng.random() < 0.5
    absent = [noun for noun in (*NAMES, *SHAPES) if noun not in nouns]
    noun = rng.choice(nouns) if there else rng.choice(absent)
    text = rng.choice((f"Is there {_a(noun)}?", f"Is there {_a(noun)} in the picture?"))
    questions.append(Question("presence", text, "yes" if there else "no"))
    if len(unique) > 1:
        first, second = rng.sample(unique, 2)
        questions.append(_relation(rng, first, second))
    rng.shuffle(questions)
    return questions


def _relation(rng: random.Random, first: Thing, second: Thing) -> Question:
    """A yes/no question about two things that differ in row or column."""
    columns = first.place % 3 - second.place % 3
    rows = first.place // 3 - second.place // 3
    sideways = columns != 0 if rows == 0 or (columns != 0 and rng.random() < 0.5) else False
    words, difference = (("to the left of", "to the right of"), columns) if sideways else (("above", "below"), rows)
    word = rng.choice(words)
    truth = (difference < 0) == (word == words[0])
    return Question("relation", f"Is the {first.noun} {word} the {second.noun}?", "yes" if truth else "no")


def _description(things: list[Thing]) -> str:
    parts = [f"{_a(thing.name)} at the {PLACES[thing.place]}" for thing in things]
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"There is {listed}."


# --- text -----------------------------------------------------------------------------------------


def _text(rng: random.Random, picture: Picture) -> None:
    width, height = picture.image.size
    canvas = ImageDraw.Draw(picture.image)
    word, number = rng.choice(WORDS), str(rng.randint(1, 999))
    lines = rng.choice(([word], [number], [word, number], [number, word]))
    color = rng.choice([name for name in COLORS if name != "yellow"])
    for row, line in enumerate(lines):
        font = ImageFont.load_default(rng.uniform(18, 30))
        text = line.upper()
        left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
        x = rng.uniform(4, max(5, width - (right - left) - 4)) - left
        band = height / len(lines)
        y = rng.uniform(row * band + 4, max(row * band + 5, (row + 1) * band - (bottom - top) - 4)) - top
        canvas.text((x, y), text, font=font, fill=COLORS[color], stroke_width=rng.choice((0, 0, 1)))
        for position, letter in enumerate(text):
            start = x + font.getlength(text[:position])
            picture.mark((start, y + top, start + font.getlength(letter), y + bottom), letter, color)
    has_word, has_number = word in lines, number in lines
    questions = [Question("text color", "What color is the text?", color)]
    if has_word:
        text = rng.choice(("What is the word?", "Read the word.", "What word is written here?"))
        questions.append(Question("read word", text, word))
        questions.append(Question("letter", "What is the first letter of the word?", word[0]))
        questions.append(Question("letter", "What is the last letter of the word?", word[-1]))
    if has_number:
        text = rng.choice(("What is the number?", "Read the number.", "What number is written here?"))
        questions.append(Question("read number", text, number))
    if len(lines) == 1:
        questions.append(Question("read word" if has_word else "read number", "What does it say?", lines[0]))
    asked, there = rng.choice((("word", has_word), ("number", has_number)))
    questions.append(Question("presence", f"Is there a {asked}?", "yes" if there else "no"))
    questions.append(Question("describe", "Describe the picture.", f'The text says "{" ".join(lines)}" in {color}.'))
    rng.shuffle(questions)
    picture.questions = questions


# --- bar charts -----------------------------------------------------------------------------------


def _chart(rng: random.Random, picture: Picture) -> None:
    width, height = picture.image.size
    canvas = ImageDraw.Draw(picture.image)
    count = rng.randint(2, 5)
    colors = rng.sample(list(COLORS), count)
    heights = [0.2 + 0.7 * level / 7 for level in rng.sample(range(8), count)]  # at least a tenth apart
    base, step = height - 8, (width - 16) / count
    for index, (color, share) in enumerate(zip(colors, heights, strict=True)):
        left = 8 + index * step + step * 0.15
        box = (left, base - share * (height - 16), left + step * 0.7, base)
        canvas.rectangle(box, fill=COLORS[color])
        picture.mark(box, "bar", color)
    canvas.line((8, 4, 8, base, width - 4, base), fill=(60, 60, 60), width=2)
    ranked = [color for _, color in sorted(zip(heights, colors, strict=True))]
    first, second = rng.sample(range(count), 2)
    questions = [
        Question("chart", rng.choice(("Which bar is the tallest?", "What color is the tallest bar?")), ranked[-1]),
        Question("chart", rng.choice(("Which bar is the shortest?", "What color is the shortest bar?")), ranked[0]),
        Question("chart", "How many bars are there?", str(count)),
        Question("chart", "What color is the bar on the left?", colors[0]),
        Question("chart", "What color is the bar on the right?", colors[-1]),
        Question(
            "chart compare",
            f"Is the {colors[first]} bar taller than the {colors[second]} bar?",
            "yes" if heights[first] > heights[second] else "no",
        ),
        Question(
            "describe",
            "Describe the picture.",
            f"A bar chart with {count} bars. The {ranked[-1]} bar is the tallest and the {ranked[0]} bar is the "
            "shortest.",
        ),
    ]
    rng.shuffle(questions)
    picture.questions = questions[:6]


KINDS: dict[str, Callable[[random.Random, Picture], None]] = {"objects": _objects, "text": _text, "chart": _chart}
