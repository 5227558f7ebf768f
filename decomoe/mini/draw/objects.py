"""Pictograms and shapes in a 3x3 layout: name, locate, count, compare, relate, check presence."""

import random
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageOps

from ..pictograms import NAMES, pictogram
from .base import (
    COLORS,
    PLACES,
    SHAPES,
    SIMILAR,
    UNSEEN_PAIRS,
    Picture,
    Question,
    a,
    choice,
    listed,
    plural,
    shade,
    yes_no,
)

STYLES = ("color", "gray", "duotone", "poster")  # of pictograms; training knows these
UNSEEN_STYLE = "negative"
NOUNS = (*NAMES, *SHAPES)


@dataclass(frozen=True)
class Thing:
    """One object; `place` is an index into `PLACES`, `side` its size in pixels."""

    noun: str
    place: int
    side: float
    color: str | None = None

    @property
    def name(self) -> str:
        return f"{self.color} {self.noun}" if self.color else self.noun

    @property
    def area(self) -> float:
        """Of its box, square pixels."""
        return self.side**2 / (2 if self.noun == "rectangle" else 1)


@cache
def styled(noun: str, style: str) -> Image.Image:
    """The pictogram of `noun` in a style."""
    picture = pictogram(noun)
    gray, alpha = picture.convert("L"), picture.getchannel("A")
    if style == "gray":
        drawn = gray.convert("RGB")
    elif style == "duotone":
        drawn = ImageOps.colorize(gray, (20, 20, 90), (255, 245, 215))
    elif style == "poster":
        drawn = ImageOps.posterize(picture.convert("RGB"), 2)
    elif style == "negative":
        drawn = ImageOps.invert(picture.convert("RGB"))
    else:
        return picture
    drawn.putalpha(alpha)
    return drawn


def fill_shape(canvas: ImageDraw.ImageDraw, shape: str, color: tuple[int, int, int], box: list[float]) -> None:
    """Draw `shape` into `box`."""
    left, top, right, bottom = box
    side, x, y = right - left, (left + right) / 2, (top + bottom) / 2
    if shape == "circle":
        canvas.ellipse(box, fill=color)
    elif shape == "ring":
        canvas.ellipse(box, outline=color, width=max(3, round(side / 5)))
    elif shape == "square":
        canvas.rectangle(box, fill=color)
    elif shape == "rectangle":
        canvas.rectangle((left, y - side / 4, right, y + side / 4), fill=color)
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


@cache
def _pairs(unseen: bool, shape: str | None = None) -> list[tuple[str, str]]:
    """Shapes, or one shape, and their colours; `unseen` takes those that training never shows together."""
    return [(s, c) for s in SHAPES for c in COLORS if ((s, c) in UNSEEN_PAIRS) == unseen and shape in (None, s)]


def draw_objects(rng: random.Random, picture: Picture, unseen: str | None = None) -> None:
    """Draw 1 to 9 objects and ask about them."""
    width, height = picture.image.size
    count = rng.choices(range(1, 10), (20, 20, 18, 13, 10, 6, 5, 4, 4))[0]
    repeat = rng.choice((0.15, 0.5))  # so that there is something to count
    pictograms = 0.3 if unseen == "combinations" else 1.0 if unseen == "style" else 0.55
    style = UNSEEN_STYLE if unseen == "style" else rng.choices(STYLES, (7, 1, 1, 1))[0]
    limit = min(width, height) / 3
    things: list[Thing] = []
    for place in sorted(rng.sample(range(9), count)):
        side = limit * rng.uniform(0.6, 1.6 if count == 1 else 1.25 if count < 4 else 1.0)
        if things and rng.random() < repeat:
            other = rng.choice(things)
            noun = other.noun
            color = rng.choice(_pairs(unseen == "combinations", noun))[1] if other.color else None
        elif rng.random() < pictograms:
            noun, color = rng.choice(NAMES), None
        else:
            noun, color = rng.choice(_pairs(unseen == "combinations"))
        things.append(Thing(noun, place, side, color))
    for thing in rng.sample(things, count):  # any of two that overlap may lie on top
        _place(rng, picture, thing, style)
    picture.questions = _questions(rng, things)


def _place(rng: random.Random, picture: Picture, thing: Thing, style: str) -> None:
    """Draw `thing` with its middle well inside its cell."""
    width, height = picture.image.size
    column, row = thing.place % 3, thing.place // 3
    half = thing.side / 2
    x = (column + 0.5 + rng.uniform(-0.2, 0.2)) * width / 3
    y = (row + 0.5 + rng.uniform(-0.2, 0.2)) * height / 3
    x, y = min(max(x, half), width - half), min(max(y, half), height - half)
    box = [x - half, y - half, x + half, y + half]
    if thing.color:
        fill_shape(ImageDraw.Draw(picture.image), thing.noun, shade(rng, thing.color), box)
    else:
        sprite = styled(thing.noun, style).resize((round(thing.side),) * 2, Image.Resampling.BILINEAR)
        sprite = sprite.rotate(rng.uniform(-1, 1) * rng.choice((12, 12, 12, 45)), Image.Resampling.BILINEAR)
        picture.image.paste(sprite, (round(box[0]), round(box[1])), sprite)
    top, bottom = (y - half / 2, y + half / 2) if thing.noun == "rectangle" else (box[1], box[3])
    picture.mark((box[0], top, box[2], bottom), thing.noun, thing.color or "none")


def _questions(rng: random.Random, things: list[Thing]) -> list[Question]:
    nouns = [thing.noun for thing in things]
    unique = [thing for thing in things if nouns.count(thing.noun) == 1]
    questions = [_name(rng, things), _presence(rng, things), _presence(rng, things), _count(rng, things)]
    if len(things) <= 3 and rng.random() < 0.5:
        parts = [f"{a(thing.name)} at the {PLACES[thing.place]}" for thing in things]
        questions.append(Question("describe", "Describe the picture.", f"There is {listed(parts)}."))
    if unique:
        thing = rng.choice(unique)
        located = Question("locate", f"Where is the {thing.noun}?", PLACES[thing.place])
        questions.append(choice(rng, located, PLACES) if rng.random() < 0.2 else located)
    if rng.random() < 0.4:
        questions.append(Question("locate", f"Where is the {_absent(rng, nouns)}?", "nowhere"))
    colored = [thing for thing in unique if thing.color]
    if colored:
        thing = rng.choice(colored)
        color = Question("color", f"What color is the {thing.noun}?", str(thing.color))
        questions.append(choice(rng, color, list(COLORS)) if rng.random() < 0.3 else color)
    if len(unique) > 1:
        first, second = rng.sample(unique, 2)
        questions.append(_relation(rng, first, second))
        if max(first.area, second.area) > 2 * min(first.area, second.area):
            bigger = first if first.area > second.area else second
            text = f"Which is bigger, the {first.noun} or the {second.noun}?"
            questions.append(Question("compare", text, bigger.noun))
    if len(set(nouns)) > 1 and len(unique) < len(things):
        one, other = rng.sample(sorted(set(nouns)), 2)
        if nouns.count(one) != nouns.count(other):
            text = f"Are there more {plural(one)} than {plural(other)}?"
            questions.append(Question("compare", text, yes_no(nouns.count(one) > nouns.count(other))))
    rng.shuffle(questions)
    return questions


def _name(rng: random.Random, things: list[Thing]) -> Question:
    thing = rng.choice(things)
    text = f"What is at the {PLACES[thing.place]}?"
    if len(things) == 1 and rng.random() < 0.7:
        text = rng.choice(("What is in the picture?", "What is this?", "What do you see?"))
    if not thing.color and rng.random() < 0.25:
        return choice(rng, Question("name", text, thing.noun), NAMES)
    return Question("name", text, thing.name)


def _count(rng: random.Random, things: list[Thing]) -> Question:
    nouns = [thing.noun for thing in things]
    colors = [thing.color for thing in things if thing.color]
    way = rng.random()
    if way < 0.4:
        return Question("count", "How many objects are there?", str(len(things)))
    if way < 0.6 and colors:
        color = rng.choice(colors if rng.random() < 0.5 else list(COLORS))
        return Question("count", f"How many {color} shapes are there?", str(colors.count(color)))
    noun = _absent(rng, nouns) if way > 0.87 else rng.choice(nouns)
    return Question("count", f"How many {plural(noun)} are there?", str(nouns.count(noun)))


def _absent(rng: random.Random, nouns: list[str]) -> str:
    """A noun that nothing in the picture may pass for."""
    alike = {noun for group in SIMILAR if group & set(nouns) for noun in group}
    return rng.choice([noun for noun in NOUNS if noun not in alike | set(nouns)])


def _presence(rng: random.Random, things: list[Thing]) -> Question:
    """Balanced; half of the questions about shapes also name a colour, which may be the wrong one."""
    there = rng.random() < 0.5
    nouns, names = [thing.noun for thing in things], [thing.name for thing in things]
    colored = [thing for thing in things if thing.color]
    if colored and rng.random() < 0.4:
        thing = rng.choice(colored)
        name = thing.name
        if not there:
            other = rng.choice(
                [n for n in (f"{c} {s}" for c in COLORS for s in (thing.noun, *SHAPES)) if n not in names]
            )
            recolored = [f"{c} {thing.noun}" for c in COLORS if f"{c} {thing.noun}" not in names]
            name = rng.choice(recolored) if rng.random() < 0.5 else other
    else:
        name = rng.choice(nouns) if there else _absent(rng, nouns)
    text = rng.choice((f"Is there {a(name)}?", f"Is there {a(name)} in the picture?"))
    return Question("presence", text, yes_no(there))


def _relation(rng: random.Random, first: Thing, second: Thing) -> Question:
    """A yes/no question about two things that differ in row or column."""
    columns = first.place % 3 - second.place % 3
    rows = first.place // 3 - second.place // 3
    sideways = columns != 0 if rows == 0 or (columns != 0 and rng.random() < 0.5) else False
    words, difference = (("to the left of", "to the right of"), columns) if sideways else (("above", "below"), rows)
    word = rng.choice(words)
    truth = (difference < 0) == (word == words[0])
    return Question("relation", f"Is the {first.noun} {word} the {second.noun}?", yes_no(truth))
