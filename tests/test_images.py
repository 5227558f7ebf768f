"""Pictures as anybody may hand them in: read as a person sees them, or refused in one sentence."""

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from decomoe.images import FORMATS, load_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)


def halves(left=RED, right=BLUE, size=(40, 20)):
    image = Image.new("RGB", size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def near(pixel, color, tolerance=12):
    return all(abs(a - b) <= tolerance for a, b in zip(pixel, color, strict=True))


def test_exif_rotation_is_obeyed(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise
    halves().save(tmp_path / "a.jpg", exif=exif, quality=95)
    image = load_image(tmp_path / "a.jpg")
    assert image.size == (20, 40)
    assert near(image.getpixel((10, 5)), RED)
    assert near(image.getpixel((10, 35)), BLUE)


def test_transparency_lies_on_white(tmp_path):
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").getpixel((4, 4)) == WHITE
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((4, 4), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    loaded = load_image(tmp_path / "p.png")
    assert loaded.getpixel((0, 0)) == WHITE
    assert loaded.getpixel((4, 4)) == BLUE


def test_sixteen_bits_keep_their_brightness(tmp_path):
    values = np.full((8, 8), 0x8000, np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert near(load_image(tmp_path / "a.png").getpixel((4, 4)), (128,) * 3, 1)


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in (GREEN, RED)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    image = load_image(tmp_path / "a.gif")
    assert image.mode == "RGB"
    assert near(image.getpixel((4, 4)), GREEN)


def test_cmyk_and_grey(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    assert near(load_image(tmp_path / "a.jpg").getpixel((4, 4)), RED, 40)
    Image.new("1", (8, 8), 1).save(tmp_path / "b.png")
    assert load_image(tmp_path / "b.png").getpixel((4, 4)) == WHITE


def bomb(path, width, height):
    """A tiny PNG file that says it has width x height pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("missing.png", lambda path: None, "no file"),
        ("folder.png", lambda path: path.mkdir(), "is a folder"),
        ("empty.png", lambda path: path.touch(), "is empty"),
        ("text.png", lambda path: path.write_text("hello"), "not a picture"),
        ("bomb.png", lambda path: bomb(path, 20000, 20000), "million"),
        ("large.png", lambda path: bomb(path, 9500, 9500), "million"),
        ("picture.ppm", lambda path: path.write_bytes(b"P6 x"), "not a picture"),
        ("strip.png", lambda path: Image.new("RGB", (4000, 10)).save(path), "times the other"),
        ("cut.png", lambda path: bomb(path, 40, 40), "damaged"),
    ],
)
def test_what_can_not_be_read_is_said_in_one_sentence(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=message) as caught:
        load_image(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_addresses_are_not_fetched():
    with pytest.raises(ValueError, match="is an address"):
        load_image("https://example.org/a.png")


def test_reading_at_once_leaves_pillow_as_it_was(tmp_path):
    halves().save(tmp_path / "a.png")
    before = Image.MAX_IMAGE_PIXELS
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: load_image(tmp_path / "a.png"), range(200)))
    assert before == Image.MAX_IMAGE_PIXELS


def test_heic_says_what_to_do(tmp_path):
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 64)
    with pytest.raises(ValueError, match=r"HEIC or AVIF picture, .* save it as JPEG"):
        load_image(tmp_path / "a.heic")


def test_what_is_in_a_file_is_read_as_the_file_is(tmp_path):
    halves().save(tmp_path / "a.png")
    assert load_image((tmp_path / "a.png").read_bytes()).tobytes() == load_image(tmp_path / "a.png").tobytes()
    for data, message in ((b"", "is empty"), (b"hello", "not a picture")):
        with pytest.raises(ValueError, match=message):
            load_image(data)


def encoded(form: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 8
    buffer = BytesIO()
    options = {"exif": exif} if form in ("PNG", "JPEG", "WEBP") else {}
    halves(size=(64, 48)).save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=12),
    kept=st.floats(0, 1),
)
def test_damaged_files_are_read_or_refused(form, changes, kept):
    """Whatever the damage: a picture, or one sentence; never another exception."""
    data = bytearray(encoded(form))
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        image = load_image(bytes(data[: round(kept * len(data)) if changes else len(data)]))
    except ValueError as error:
        assert str(error)
    else:
        assert image.mode == "RGB"
