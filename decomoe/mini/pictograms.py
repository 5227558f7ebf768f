"""The pictograms that the mini model knows, and how their sheet was made.

`assets/pictograms.png` is a grid of 64-pixel cells drawn once from Noto Color Emoji (Google, SIL Open Font Licence
1.1), so that drawing pictures needs no font on the user's machine. Make it again with
`python -m decomoe.mini.pictograms FONT.ttf`.
"""

import sys
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SHEET = Path(__file__).parents[2] / "assets" / "pictograms.png"
CELL, COLUMNS = 64, 16
NAMES = """\
cat dog horse cow pig rabbit bear panda lion tiger monkey frog chicken penguin duck owl fish whale octopus crab snail
butterfly bee ladybug turtle snake elephant camel apple banana grape strawberry pear lemon watermelon carrot corn
mushroom bread cheese pizza burger cake egg car bus bicycle airplane rocket ship train house tree umbrella clock key
book guitar drum balloon gift hat hammer lamp sheep goat fox koala gorilla zebra giraffe kangaroo raccoon hedgehog bat
squirrel llama dragon crocodile shark lobster spider scorpion flamingo peacock parrot swan eagle dinosaur jellyfish
pineapple peach cherry kiwi coconut avocado aubergine onion chili croissant pretzel waffle steak hotdog donut cookie
chocolate lollipop cup teapot beer spoon cactus palm clover tulip rose sunflower leaf globe sun cloud rainbow snowman
snowflake wave flame volcano tractor scooter skateboard helicopter sailboat anchor wheelchair parachute wheel tent
castle church factory fountain bridge window door bed chair sofa toilet broom basket bucket toothbrush candle robot
ghost skull pumpkin clown smiley ear eye mouth brain hand shirt dress shoe boot cap helmet crown backpack lipstick
football basketball racket target kite trophy medal puzzle piano violin trumpet saxophone accordion microphone bell
television camera laptop telephone battery magnet microscope syringe pill saw axe screwdriver wrench ladder gear lock
shield sword bomb pencil palette ruler paperclip envelope mailbox suitcase coin hourglass compass lantern log vase
cart barrel fan""".split()
EMOJI = (
    "🐱🐶🐴🐮🐷🐰🐻🐼🦁🐯🐵🐸🐔🐧🦆🦉🐟🐳🐙🦀🐌🦋🐝🐞🐢🐍🐘🐫🍎🍌🍇🍓"
    "🍐🍋🍉🥕🌽🍄🍞🧀🍕🍔🎂🥚🚗🚌🚲✈🚀🚢🚂🏠🌳☂⏰🔑📕🎸🥁🎈🎁👒🔨💡"
    "🐑🐐🦊🐨🦍🦓🦒🦘🦝🦔🦇🐿🦙🐲🐊🦈🦞🕷🦂🦩🦚🦜🦢🦅🦕🪼🍍🍑🍒🥝🥥🥑"
    "🍆🧅🌶🥐🥨🧇🥩🌭🍩🍪🍫🍭☕🫖🍺🥄🌵🌴🍀🌷🌹🌻🍁🌍🌞☁🌈⛄❄🌊🔥🌋"
    "🚜🛵🛹🚁⛵⚓🦽🪂🛞⛺🏰⛪🏭⛲🌉🪟🚪🛏🪑🛋🚽🧹🧺🪣🪥🕯🤖👻💀🎃🤡😀"
    "👂👁👄🧠✋👕👗👟👢🧢⛑👑🎒💄⚽🏀🎾🎯🪁🏆🥇🧩🎹🎻🎺🎷🪗🎤🔔📺📷💻"
    "☎🔋🧲🔬💉💊🪚🪓🪛🔧🪜⚙🔒🛡🗡💣✏🎨📏📎✉📫🧳🪙⌛🧭🏮🪵🏺🛒🛢🪭"
)


@cache
def pictogram(name: str) -> Image.Image:
    """The 64x64 RGBA pictogram called `name` (one of `NAMES`)."""
    row, column = divmod(NAMES.index(name), COLUMNS)
    return _sheet().crop((column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL))


@cache
def _sheet() -> Image.Image:
    with Image.open(SHEET) as sheet:
        return sheet.convert("RGBA")


def make_sheet(font_path: str) -> None:
    """Draw `NAMES` from the colour-bitmap font at `font_path` into `SHEET`."""
    font = ImageFont.truetype(font_path, 109)  # the only size that the bitmap font holds
    rows = -(-len(NAMES) // COLUMNS)
    sheet = Image.new("RGBA", (COLUMNS * CELL, rows * CELL))
    for index, symbol in enumerate(EMOJI):
        tile = Image.new("RGBA", (136, 128))
        ImageDraw.Draw(tile).text((0, 0), symbol, font=font, embedded_color=True)
        tile = tile.crop(tile.getbbox())
        tile.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
        row, column = divmod(index, COLUMNS)
        place = (column * CELL + (CELL - tile.width) // 2, row * CELL + (CELL - tile.height) // 2)
        sheet.paste(tile, place)
    # 32 levels a channel halve the file unseen; a palette of 256 colours for so many pictures shows as grain
    sheet.point([round(value * 31 / 255) * 255 // 31 for value in range(256)] * 4).save(SHEET, optimize=True)


if __name__ == "__main__":
    make_sheet(sys.argv[1])
