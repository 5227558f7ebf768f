"""Reading a picture from a file that anybody may have made."""

from io import BytesIO
from pathlib import Path
from typing import IO

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 89_000_000  # above, a small file can hold a picture that takes all memory; where Pillow begins to warn
TOO_LARGE = f"{{name}} has too many pixels; at most {MAX_PIXELS // 1_000_000} million are read. Make it smaller."
MAX_ASPECT = 100  # Qwen's processor refuses 200; above 100 nothing is left to see


def load_image(source: str | Path | bytes | Image.Image) -> Image.Image:
    """The picture as a person sees it: turned upright, first frame, on white, RGB with 8 bits.

    Args:
        source: a file, what is in one, or an opened picture.

    Raises:
        ValueError: in one sentence, what is wrong with the file.
    """
    if isinstance(source, Image.Image):
        _check_size(source.size, "This picture")
        return _upright_rgb(source)
    if isinstance(source, bytes):
        return _decode(BytesIO(source), "This picture")
    path = Path(source)
    if "://" in str(source):
        raise ValueError(f"'{source}' is an address; save the picture, and give the file.")
    if path.is_dir():
        raise ValueError(f"'{path}' is a folder, not a picture.")
    if not path.is_file():
        raise ValueError(f"There is no file '{path}'.")
    with path.open("rb") as file:
        return _decode(file, f"'{path.name}'")


def _decode(file: IO[bytes], name: str) -> Image.Image:
    start = file.read(16)
    file.seek(0)
    if not start:
        raise ValueError(f"{name} is empty.")
    if start[4:8] == b"ftyp":  # the box that HEIC and AVIF begin with
        raise ValueError(f"{name} is a HEIC or AVIF picture, which is not read; save it as JPEG or PNG, and take that.")
    try:
        with Image.open(file, formats=FORMATS) as opened:
            _check_size(opened.size, name)
            return _upright_rgb(opened)
    except Image.DecompressionBombError:
        raise ValueError(TOO_LARGE.format(name=name)) from None
    except UnidentifiedImageError:
        raise ValueError(f"{name} is not a picture that can be read; use {', '.join(FORMATS)}.") from None
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # decoders raise anything on damaged files
        raise ValueError(f"{name} can't be read; the file may be damaged ({error}).") from None


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise ValueError(TOO_LARGE.format(name=name))
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(f"{name} is {width} x {height} pixels: one side is over {MAX_ASPECT} times the other.")


def _upright_rgb(opened: Image.Image) -> Image.Image:
    opened.seek(0)
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16 bits a pixel; a plain conversion would clip everything to white
        image = image.point(lambda value: value / 257).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
