"""Cards with words, numbers and letters in many typefaces."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..glyphs import TRAIN_TYPEFACES, UNSEEN_TYPEFACES, line
from ..pictograms import NAMES
from .base import CHARACTERS, COLORS, Picture, Question, choice, shade, yes_no

_COMMON = """\
stop go exit open door push pull sale fire water milk tea bread fish north south east west left right yes no home work
school park road bank hotel taxi bus train stone wood gold iron moon sun star rain snow wind cloud tree leaf book pen
desk lamp chair table cup plate king queen boy girl man dog cat bird cow red blue green black white pink hot cold big
small new old fast slow run walk jump play stay wait look read sing love hope time year month week day night zoo map
key box hat shoe coat ring bell drum song game ball club city town farm lake river hill beach sand salt sugar rice
corn soup cake apple pear plum""".split()
WORDS = tuple(dict.fromkeys((*_COMMON, *(name for name in NAMES if len(name) <= 7))))


@dataclass(frozen=True)
class Ink:
    """How text looks; `color` is the name of `fill`."""

    typeface: str
    color: str
    fill: tuple[int, int, int]


def ink(rng: random.Random, typefaces: Sequence[str] = TRAIN_TYPEFACES, color: str | None = None) -> Ink:
    """A typeface and a colour that stands out on a pale ground."""
    color = color or rng.choice([name for name in COLORS if name != "yellow"])
    return Ink(rng.choice(typefaces), color, shade(rng, color))


def write(picture: Picture, text: str, ink: Ink, height: float, x: float, y: float) -> float:
    """Write one line of `height` pixels with its top left corner at (x, y); label its characters; its width."""
    mask, spans = line(text, ink.typeface, height)
    picture.image.paste(ink.fill, (round(x), round(y)), mask)
    for character, (left, right) in zip(text.upper(), spans, strict=True):
        if character in CHARACTERS:
            picture.mark((x + left, y + height * 0.25, x + right, y + height * 0.75), character, ink.color)
    return mask.width


def draw_text(rng: random.Random, picture: Picture, unseen: str | None = None) -> None:
    """A card with a word, a number, both, two words, or one letter."""
    word, other = rng.sample(WORDS, 2)
    number = str(rng.randint(0, 10 ** rng.randint(1, 4) - 1))
    letter = rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ")
    layouts = (["word"], ["number"], ["word", "number"], ["number", "word"], ["word", "word"], ["letter"])
    layout = rng.choices(layouts, (5, 4, 2, 2, 2, 3))[0]
    words = iter((word, other))
    lines = [next(words) if part == "word" else number if part == "number" else letter for part in layout]
    case = rng.choice((str.upper, str.upper, str.upper, str.lower, str.title))
    style = ink(rng, UNSEEN_TYPEFACES if unseen == "typefaces" else TRAIN_TYPEFACES)
    _lines(
        rng, picture, [case(line) if part == "word" else line for part, line in zip(layout, lines, strict=True)], style
    )
    picture.questions = _questions(rng, layout, lines, style.color)


def _lines(rng: random.Random, picture: Picture, lines: list[str], style: Ink) -> None:
    """Write `lines` one below another, each as large as its band allows or up to 40 % smaller."""
    width, height = picture.image.size
    band = height / len(lines)
    for row, content in enumerate(lines):
        natural = line(content, style.typeface, 40)[0].width / 40  # width at height 1
        size = min((width - 6) / natural, band, 72) * rng.uniform(0.6, 1)
        x = rng.uniform(3, max(3, width - 3 - natural * size))
        write(picture, content, style, size, x, row * band + rng.uniform(0, max(0, band - size)))


def _questions(rng: random.Random, layout: list[str], lines: list[str], color: str) -> list[Question]:
    """Words and letters are answered in capitals, which the tokenizer spells letter by letter."""
    questions = [Question("text color", "What color is the text?", color)]
    if rng.random() < 0.4:
        questions[0] = choice(rng, questions[0], list(COLORS))
    words = [line for part, line in zip(layout, lines, strict=True) if part == "word"]
    if layout == ["letter"]:
        asked = rng.choice(("What is the letter?", "Which letter is this?", "What does it say?"))
        questions.append(Question("letter", asked, lines[0]))
    if len(words) == 1:
        asked = rng.choice(("What is the word?", "Read the word.", "What word is written here?"))
        questions.append(Question("read word", asked, words[0].upper()))
        questions.append(Question("letter", "What is the first letter of the word?", words[0][0].upper()))
        questions.append(Question("letter", "What is the last letter of the word?", words[0][-1].upper()))
    if len(words) == 2:
        for place, word in rng.sample([*zip(("top", "bottom"), words, strict=True)], 2):
            questions.append(Question("read word", f"What is the {place} word?", word.upper()))
    if "number" in layout:
        asked = rng.choice(("What is the number?", "Read the number.", "What number is written here?"))
        questions.append(Question("read number", asked, lines[layout.index("number")]))
    if len(lines) == 1 and layout != ["letter"]:
        questions.append(Question(f"read {layout[0]}", "What does it say?", lines[0].upper()))
    asked = rng.choice(("word", "number"))
    questions.append(Question("presence", f"Is there a {asked}?", yes_no(asked in layout)))
    said = " ".join(line.upper() for line in lines)
    questions.append(Question("describe", "Describe the picture.", f'The text says "{said}" in {color}.'))
    rng.shuffle(questions)
    return questions
