"""Letters in 24 typefaces, drawn once into a sheet, so that writing text needs no font on the user's machine.

`assets/glyphs.png` has a row of glyphs a typeface, 44 pixels high on a common baseline; `assets/glyphs.json` says where
each glyph lies and how it is spaced. `FONTS` names the font files and their licences, all of which permit this. Make
both again with `python -m decomoe.mini.glyphs FOLDER...`, where the folders hold the font files.
"""

import json
import string
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SHEET = Path(__file__).parents[2] / "assets" / "glyphs.png"
METRICS = SHEET.with_suffix(".json")
CELL, BASELINE = 44, 33
CHARACTERS = string.ascii_letters + string.digits + "?!.,:;-+'&% "
APACHE, OFL, VERA = "Apache-2.0", "OFL-1.1", "Bitstream-Vera"
FONTS = {  # Liberation from its version 2 on: before, it was GPL
    "DejaVu Sans": ("DejaVuSans.ttf", VERA),
    "DejaVu Serif Bold": ("DejaVuSerif-Bold.ttf", VERA),
    "DejaVu Sans Mono Bold": ("DejaVuSansMono-Bold.ttf", VERA),
    "Liberation Serif": ("LiberationSerif-Regular.ttf", OFL),
    "Liberation Sans Bold Italic": ("LiberationSans-BoldItalic.ttf", OFL),
    "Roboto": ("Roboto-Regular.ttf", APACHE),
    "Roboto Condensed": ("RobotoCondensed-Regular.ttf", APACHE),
    "Roboto Slab": ("RobotoSlab-Regular.otf", APACHE),
    "Open Sans Italic": ("OpenSans-Italic.ttf", APACHE),
    "Lato Black": ("Lato-Black.ttf", OFL),
    "Courier Prime": ("Courier Prime.otf", OFL),
    "Inconsolata": ("Inconsolata.otf", "OFL-1.0"),
    "Comfortaa Bold": ("Comfortaa-Bold.ttf", OFL),
    "Liberation Serif Bold Italic": ("LiberationSerif-BoldItalic.ttf", OFL),
    "Dosis SemiBold": ("Dosis-SemiBold.otf", OFL),
    "Comic Neue Bold": ("ComicNeue-Bold.otf", OFL),
    "Dancing Script Bold": ("DancingScript-Bold.otf", OFL),
    "Play": ("Play-Regular.ttf", OFL),
    "Lobster Two Bold": ("LobsterTwo-Bold.otf", OFL),
    "League Spartan Bold": ("LeagueSpartan-Bold.otf", OFL),
    "Cabin": ("Cabin-Regular.otf", OFL),
    "Caladea": ("Caladea-Regular.ttf", OFL),
    "JetBrains Mono": ("JetBrainsMono-Medium.ttf", OFL),
    "Quicksand Bold": ("Quicksand-Bold.ttf", OFL),
}
TYPEFACES = tuple(FONTS)
TRAIN_TYPEFACES, UNSEEN_TYPEFACES = TYPEFACES[:20], TYPEFACES[20:]


def line(text: str, typeface: str, height: float) -> tuple[Image.Image, list[tuple[float, float]]]:
    """Write `text` on one line.

    Args:
        text: What to write, in `CHARACTERS`.
        typeface: One of `TYPEFACES`.
        height: Height of the line in pixels, from above the capitals to below the descenders.

    Returns:
        The text as a greyscale mask, cropped to it at the left and right only, and the (left, right) of each character
        in the mask. Characters may overlap a little, as italics do.

    Raises:
        ValueError: If the text is empty or has a character that the sheet lacks.
    """
    glyphs = _glyphs(typeface)
    if not text or not glyphs.keys() >= set(text):
        raise ValueError(f"the glyph sheet cannot write {text!r}")
    pen, spans = 0, []
    for character in text:
        glyph, offset, advance = glyphs[character]
        spans.append((pen + offset, pen + offset + glyph.width))
        pen += advance
    left, right = min(start for start, _ in spans), max(end for _, end in spans)
    mask = Image.new("L", (right - left, CELL))
    for character, (start, _) in zip(text, spans, strict=True):
        glyph = glyphs[character][0]
        mask.paste(255, (start - left, 0), glyph)  # through the glyph, so that an overlap keeps both
    width = max(1, round(mask.width * height / CELL))
    scale = width / mask.width
    mask = mask.resize((width, max(1, round(height))), Image.Resampling.BICUBIC)
    return mask, [((start - left) * scale, (end - left) * scale) for start, end in spans]


@cache
def _glyphs(typeface: str) -> dict[str, tuple[Image.Image, int, int]]:
    """Per character its glyph, how far right of the pen it starts, and how far it moves the pen."""
    edges, offsets, advances = json.loads(METRICS.read_text())[typeface]
    top = TYPEFACES.index(typeface) * CELL
    with Image.open(SHEET) as sheet:
        grey = sheet.convert("L")
    crops = [grey.crop((left, top, right, top + CELL)) for left, right in pairwise(edges)]
    return dict(zip(CHARACTERS, zip(crops, offsets, advances, strict=True), strict=True))


def make_sheet(*folders: str) -> None:
    """Draw every typeface of `FONTS`, whose files lie anywhere in `folders`, into `SHEET` and `METRICS`."""
    files = {path.name: path for folder in folders for path in Path(folder).rglob("*.[ot]tf")}
    rows, metrics = [], {}
    for typeface, (file, _) in FONTS.items():
        _, above, _, below = ImageFont.truetype(files[file], 1000).getbbox(CHARACTERS, anchor="ls")
        # The largest size whose ink stays inside the cell, with two pixels to spare for hinting
        font = ImageFont.truetype(files[file], 1000 * min((BASELINE - 2) / -above, (CELL - BASELINE - 2) / below))
        row, edges, offsets, advances = Image.new("L", (CELL * len(CHARACTERS), CELL)), [0], [], []
        for character in CHARACTERS:
            tile, advance = Image.new("L", (3 * CELL, CELL)), round(font.getlength(character))
            ImageDraw.Draw(tile).text((CELL, BASELINE), character, 255, font, anchor="ls")
            left, _, right, _ = tile.getbbox() or (CELL, 0, CELL + advance, CELL)  # a space has no ink
            row.paste(tile.crop((left, 0, right, CELL)), (edges[-1], 0))
            edges.append(edges[-1] + right - left)
            offsets.append(left - CELL)
            advances.append(advance)
        rows.append(row)
        metrics[typeface] = [edges, offsets, advances]
    sheet = Image.new("L", (max(edges[-1] for edges, _, _ in metrics.values()), CELL * len(rows)))
    for index, row in enumerate(rows):
        sheet.paste(row, (0, index * CELL))
    sheet.save(SHEET, optimize=True)
    lines = (f"{json.dumps(typeface)}: {json.dumps(lists)}" for typeface, lists in metrics.items())
    METRICS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    make_sheet(*sys.argv[1:])
