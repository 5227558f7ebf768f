"""Benchmarks that are published as rows with pictures, read from the Hub or from parquet files of the same schema."""

import hashlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from ..images import load_image
from .base import Benchmark, Case, Split

Row = dict[str, Any]
Picture = Callable[[], Image.Image]


@dataclass(frozen=True)
class Published:
    """Where a benchmark is published, and how a row becomes a question.

    Attributes:
        hub: its id on the Hub. What is under lmms-lab-encoder was under lmms-lab until July 2026.
        columns: what `case` reads, beside `image`. Rows without a picture are left out.
        case: (row, id, picture) -> the question, or None to leave it out. Without a group it gets the picture's. `id`
            is of picture and columns, for data without ids: row numbers change with the order of rows.
        test: name of the split to test on.
        calibration: name of the split to calibrate on. None: there is none with answers. The same as `test`: a random
            half of its pictures, which stay in the test split too; evaluation leaves out what calibration has seen.
        configs: of the data set on the Hub, read one after the other.
        image: the column with the picture.
    """

    name: str
    hub: str
    columns: Sequence[str]
    case: Callable[[Row, str, Picture], Case | None]
    test: str = "test"
    calibration: str | None = None
    configs: Sequence[str | None] = (None,)
    image: str = "image"

    def scored_by(self, right: Callable[[Case, str], bool]) -> Benchmark:
        return Benchmark(self.name, self.load, right)

    def load(self, split: Split, source: str | None = None) -> list[Case]:
        """The questions of a split, as `Benchmark.load` wants them.

        Args:
            source: a folder with parquet files named by split, laid out like the Hub's or flat; one parquet file; or
                the Hub id of a copy.

        Raises:
            ValueError: the package datasets, the data or a column is missing, or there is nothing to calibrate on.
        """
        part = self.test if split == "test" else self.calibration
        if part is None:
            raise ValueError(
                f"{self.name} has no questions with answers beside its test; calibrate on another benchmark."
            )
        with explained(self.name, source or self.hub):
            cases = list(self._cases(part, source))
            if not cases:
                raise ValueError("it has no question with a picture")
        if split == "calibration":
            order = random.Random(0)
            if part == self.test:
                pictures = sorted({case.group for case in cases})
                half = set(order.sample(pictures, len(pictures) // 2))
                cases = [case for case in cases if case.group in half]
            order.shuffle(cases)
        return cases

    def _cases(self, part: str, source: str | None) -> Iterator[Case]:
        rows = self._rows(part, source)
        missing = [column for column in (*self.columns, self.image) if column not in rows.column_names]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        times = Counter[str]()
        for number, row in enumerate(rows):
            if row[self.image] is None:
                continue
            group = f"{self.name}/{digest(row[self.image]['bytes'])}"
            text = json.dumps([row[column] for column in self.columns], default=str)
            case = self.case(row, f"{group}/{digest(text.encode())}", partial(_picture, rows, number, self.image))
            if case is not None:
                times[case.id] += 1
                again = f"/{times[case.id]}" if times[case.id] > 1 else ""  # the same question twice in the data
                yield replace(case, id=case.id + again, group=case.group or group)

    def _rows(self, part: str, source: str | None) -> Any:
        """A `datasets.Dataset` whose pictures stay encoded."""
        from datasets import Image as Encoded  # noqa: PLC0415 (slow, and few need it)
        from datasets import concatenate_datasets, load_dataset  # noqa: PLC0415

        if source and Path(source).exists():
            rows = load_dataset("parquet", data_files={part: _files(Path(source), self.configs, part)}, split=part)
        else:
            rows = concatenate_datasets(
                [load_dataset(source or self.hub, config, split=part) for config in self.configs]
            )
        for column, feature in rows.features.items():
            if isinstance(feature, Encoded):
                rows = rows.cast_column(column, Encoded(decode=False))
        return rows


def digest(content: bytes) -> str:
    """Identifies a picture or a text."""
    return hashlib.sha256(content).hexdigest()[:16]


def _files(source: Path, configs: Sequence[str | None], part: str) -> list[str]:
    """The parquet files of a split: in the folders of the configs, if it has them as on the Hub, or anywhere."""
    if source.is_file():
        return [str(source)]
    folders = [source / config for config in configs if config and (source / config).is_dir()] or [source]
    found = [str(file) for folder in folders for file in sorted(folder.rglob(f"{part}[-.]*parquet"))]
    if not found:
        raise FileNotFoundError(f"it has no {part}*.parquet")
    return found


def _picture(rows: Any, number: int, column: str) -> Image.Image:
    with Image.open(io.BytesIO(rows[number][column]["bytes"])) as image:
        return load_image(image)


@contextmanager
def explained(name: str, where: str) -> Iterator[None]:
    """Say in one sentence, a ValueError, why the data of a benchmark can't be read and what to do."""
    try:
        yield
    except ImportError:
        raise ValueError(f"The benchmark {name} needs a package: pip install datasets") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"Can't read {name} from '{where}' ({reason}). A folder works too: {name}=FOLDER.") from error
