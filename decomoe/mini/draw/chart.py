"""Bar, line and pie charts."""

import math
import random

from PIL import ImageDraw

from .base import COLORS, Picture, Question, choice, listed, shade, yes_no
from .text import ink, write

AXIS = (60, 60, 60)


def draw_chart(rng: random.Random, picture: Picture, unseen: str | None = None) -> None:
    """A bar chart, half of the time, or a line or pie chart; nothing about it can be unseen."""
    rng.choice((_bars, _bars, _lines, _pie))(rng, picture)
    rng.shuffle(picture.questions)


def _bars(rng: random.Random, picture: Picture) -> None:
    """Bars that stand or lie, sometimes with their values, 1 to 9, at their ends."""
    width, height = picture.image.size
    canvas = ImageDraw.Draw(picture.image)
    lying, valued = rng.random() < 0.3, rng.random() < 0.4
    count = rng.randint(2, 5)
    colors = rng.sample(list(COLORS), count)
    values = rng.sample(range(1, 10), count)
    along, across = (width, height) if lying else (height, width)
    step, reach = (across - 16) / count, along - 12 - (26 if valued else 0)
    label = ink(rng, color="black")
    for index, (color, value) in enumerate(zip(colors, values, strict=True)):
        start, length = 8 + (index + 0.15) * step, reach * value / 9
        end = start + step * 0.7
        box = (8, start, 8 + length, end) if lying else (start, height - 8 - length, end, height - 8)
        canvas.rectangle(box, fill=shade(rng, color))
        picture.mark(box, "bar", color)
        if valued:
            middle = (start + end) / 2
            x, y = (10 + length, middle - 13) if lying else (middle - 7, height - 8 - length - 26)
            write(picture, str(value), label, 26, x, y)
    canvas.line((8, 4, 8, height - 8, width - 4, height - 8), fill=AXIS, width=2)
    long, short = ("longest", "shortest") if lying else ("tallest", "shortest")
    ranked = [color for _, color in sorted(zip(values, colors, strict=True))]
    first, second = rng.sample(range(count), 2)
    more = "longer" if lying else "taller"
    truth = values[first] > values[second]
    ends = ("at the top", "at the bottom") if lying else ("on the left", "on the right")
    largest = Question("chart", rng.choice((f"Which bar is the {long}?", f"What color is the {long} bar?")), ranked[-1])
    picture.questions = [
        choice(rng, largest, list(COLORS)) if rng.random() < 0.4 else largest,
        Question("chart", f"Which bar is the {short}?", ranked[0]),
        Question("chart", "How many bars are there?", str(count)),
        Question("chart", f"What color is the bar {ends[0]}?", colors[0]),
        Question("chart", f"What color is the bar {ends[1]}?", colors[-1]),
        Question("compare", f"Is the {colors[first]} bar {more} than the {colors[second]} bar?", yes_no(truth)),
        Question(
            "describe",
            "Describe the picture.",
            f"A bar chart with {count} bars. The {ranked[-1]} bar is the {long} and the {ranked[0]} bar is the "
            f"{short}.",
        ),
    ]
    if valued:
        picture.questions += [
            Question("read number", f"What is the value of the {colors[first]} bar?", str(values[first])),
            Question("read number", f"What is the value of the {colors[second]} bar?", str(values[second])),
        ]


def _lines(rng: random.Random, picture: Picture) -> None:
    """One to three lines, each rising or falling as a whole."""
    width, height = picture.image.size
    canvas = ImageDraw.Draw(picture.image)
    count, points = rng.randint(1, 3), rng.randint(3, 5)
    colors = rng.sample([color for color in COLORS if color != "yellow"], count)
    starts, ends = rng.sample(range(8), count), rng.sample(range(8), count)
    ends = [end if abs(end - start) > 1 else (start + 4) % 8 for start, end in zip(starts, ends, strict=True)]
    xs = [10 + (width - 20) * i / (points - 1) for i in range(points)]
    for color, start, end in zip(colors, starts, ends, strict=True):
        levels = [start + (end - start) * i / (points - 1) + rng.uniform(-0.3, 0.3) for i in range(points)]
        ys = [height - 14 - (height - 28) * min(7, max(0, level)) / 7 for level in levels]
        fill = shade(rng, color)
        canvas.line([*zip(xs, ys, strict=True)], fill=fill, width=4, joint="curve")
        for i in range(points - 1):
            for part in range(8):
                x = xs[i] + (xs[i + 1] - xs[i]) * part / 8
                y = ys[i] + (ys[i + 1] - ys[i]) * part / 8
                picture.mark((x - 5, y - 5, x + 5, y + 5), "line", color)
        for x, y in zip(xs, ys, strict=True):
            canvas.ellipse((x - 4, y - 4, x + 4, y + 4), fill=fill)
    canvas.line((6, 4, 6, height - 6, width - 4, height - 6), fill=AXIS, width=2)
    which = rng.randrange(count)
    direction = "rising" if ends[which] > starts[which] else "falling"
    claimed = rng.choice(("rising", "falling"))
    subject = f"the {colors[which]} line" if count > 1 else "the line"
    ways = listed(
        [f"the {c} line is {'rising' if e > s else 'falling'}" for c, s, e in zip(colors, starts, ends, strict=True)]
    )
    picture.questions = [
        Question("chart", "How many lines are there?", str(count)),
        Question("chart", f"Is {subject} rising or falling?", direction),
        Question("compare", f"Is {subject} {claimed}?", yes_no(claimed == direction)),
        Question("describe", "Describe the picture.", f"A line chart: {ways}."),
    ]
    if count == 1:
        picture.questions.append(Question("chart", "What color is the line?", colors[0]))
    elif len(set(ends)) == count:
        highest = colors[ends.index(max(ends))]
        picture.questions.append(Question("chart", "Which line ends highest?", highest))


def _pie(rng: random.Random, picture: Picture) -> None:
    """A pie of 2 to 4 slices whose largest and smallest stand out."""
    width, height = picture.image.size
    canvas = ImageDraw.Draw(picture.image)
    count = rng.randint(2, 4)
    colors = rng.sample(list(COLORS), count)
    shares = rng.sample((2, 4, 6, 9, 13), count)
    radius = min(width, height) * rng.uniform(0.38, 0.47)
    x, y = width / 2 + rng.uniform(-0.5, 0.5) * (width - 2 * radius), height / 2
    angle, circle = rng.uniform(0, 360), (x - radius, y - radius, x + radius, y + radius)
    fills = []
    for color, share in zip(colors, shares, strict=True):
        end = angle + 360 * share / sum(shares)
        fills.append((angle, end, color))
        canvas.pieslice(circle, angle, end, fill=shade(rng, color), outline=(255, 255, 255))
        angle = end
    for start, end, color in fills:
        for part in range(12):
            direction = math.radians(start + (end - start) * (part + 0.5) / 12)
            for far in (0.35, 0.6, 0.85):
                px, py = x + math.cos(direction) * radius * far, y + math.sin(direction) * radius * far
                picture.mark((px - 6, py - 6, px + 6, py + 6), "slice", color)
    ranked = [color for _, color in sorted(zip(shares, colors, strict=True))]
    first, second = rng.sample(range(count), 2)
    truth = shares[first] > shares[second]
    largest = Question("chart", rng.choice(("Which slice is the largest?", "What is the largest slice?")), ranked[-1])
    picture.questions = [
        choice(rng, largest, list(COLORS)) if rng.random() < 0.4 else largest,
        Question("chart", "Which slice is the smallest?", ranked[0]),
        Question("chart", "How many slices are there?", str(count)),
        Question("compare", f"Is the {colors[first]} slice larger than the {colors[second]} slice?", yes_no(truth)),
        Question(
            "describe",
            "Describe the picture.",
            f"A pie chart with {count} slices. The {ranked[-1]} slice is the largest and the {ranked[0]} slice is the "
            "smallest.",
        ),
    ]
