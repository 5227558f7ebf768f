"""Reading a picture from a file that anybody may have made."""

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 100_000_000  # above, a small file can hold a picture that takes all memory
MAX_ASPECT = 100  # Qwen's processor refuses 200; above 100 nothing is left to see


def load_image(source: str | Path | Image.Image) -> Image.Image:
    """The picture as a person sees it: turned upright, first frame, on white, RGB with 8 bits.

    Args:
        source: a file, or an opened picture.

    Raises:
        ValueError: in one sentence, what is wrong with the file.
    """
    if isinstance(source, Image.Image):
        return _upright_rgb(source, "This picture")
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"There is no file '{path}'.")
    if path.stat().st_size == 0:
        raise ValueError(f"'{path.name}' is empty.")
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # our own limit is checked below, before decoding
    try:
        with Image.open(path) as opened:
            return _upright_rgb(opened, f"'{path.name}'")
    except UnidentifiedImageError:
        raise ValueError(f"'{path.name}' is not a picture that can be read; use PNG, JPEG, WebP, GIF or BMP.") from None
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError(f"'{path.name}' can't be read; the file may be damaged ({error}).") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _upright_rgb(opened: Image.Image, name: str) -> Image.Image:
    width, height = opened.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{name} has {width} x {height} pixels; at most {MAX_PIXELS // 1_000_000} million are read.")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(f"{name} is {width} x {height} pixels: one side is over {MAX_ASPECT} times the other.")
    opened.seek(0)
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16 bits a pixel; a plain conversion would clip everything to white
        image = image.point(lambda value: value / 257).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
