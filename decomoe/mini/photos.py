"""The photos that the mini model is trained on: CIFAR-10, from the Hub or from a folder of the same layout."""

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

DATASET = "uoft-cs/cifar10"
CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")  # by label
HELD_OUT = 2000  # photos at the end of the train split that training leaves to calibration


class Photos(Sequence[tuple[Image.Image, str]]):
    """32x32 photos with the name of what they show, decoded when asked for."""

    def __init__(self, encoded: Sequence[bytes], labels: Sequence[int]) -> None:
        self.encoded, self.labels = encoded, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        with Image.open(io.BytesIO(self.encoded[index])) as image:
            return image.convert("RGB"), CLASSES[self.labels[index]]


def load_photos(source: str | None = None, split: str = f"train[:-{HELD_OUT}]") -> Photos:
    """Read photos.

    Args:
        source: a folder with parquet files named train* and test*; by default the published dataset.
        split: in the notation of `datasets`.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
    """
    from datasets import Image as Encoded  # noqa: PLC0415 (only training needs it)
    from datasets import load_dataset  # noqa: PLC0415

    rows = load_dataset(source or DATASET, split=split).cast_column("img", Encoded(decode=False))
    return Photos([image["bytes"] for image in rows["img"]], rows["label"])
