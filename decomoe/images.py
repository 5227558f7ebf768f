"""Reading a picture from a file that anybody may have made."""

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 89_000_000  # above, a small file can hold a picture that takes all memory; where Pillow begins to warn
TOO_LARGE = f"{{name}} has too many pixels; at most {MAX_PIXELS // 1_000_000} million are read. Make it smaller."
MAX_ASPECT = 100  # Qwen's processor refuses 200; above 100 nothing is left to see


def load_image(source: str | Path | Image.Image) -> Image.Image:
    """The picture as a person sees it: turned upright, first frame, on white, RGB with 8 bits.

    Args:
        source: a file, or an opened picture.

    Raises:
        ValueError: in one sentence, what is wrong with the file.
    """
    if isinstance(source, Image.Image):
        _check_size(source.size, "This picture")
        return _upright_rgb(source)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"There is no file '{path}'.")
    if path.stat().st_size == 0:
        raise ValueError(f"'{path.name}' is empty.")
    try:
        with Image.open(path, formats=FORMATS) as opened:
            _check_size(opened.size, f"'{path.name}'")
            return _upright_rgb(opened)
    except Image.DecompressionBombError:
        raise ValueError(TOO_LARGE.format(name=f"'{path.name}'")) from None
    except UnidentifiedImageError:
        raise ValueError(f"'{path.name}' is not a picture that can be read; use {', '.join(FORMATS)}.") from None
    except (OSError, SyntaxError, EOFError, RuntimeError) as error:
        raise ValueError(f"'{path.name}' can't be read; the file may be damaged ({error}).") from None


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
