"""`decomoe` with one more benchmark, "tiny": a run of it calibrates in seconds. Started by the tests of `calibrate`."""

import sys
from functools import partial

from PIL import Image

from decomoe import cli
from decomoe.benchmarks import BENCHMARKS, Benchmark, Case


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (64, 64), (number * 7 % 256, number * 31 % 256, 90))


CASES = [
    Case(
        f"tiny/{number}", partial(picture, number), "What is in the picture?"[: 12 + number % 12], "yes" * (number % 3)
    )
    for number in range(28)
]
TINY = Benchmark("tiny", lambda split, source: CASES, lambda case, answer: (len(answer) + int(case.id[5:])) % 3 > 0)

if __name__ == "__main__":
    BENCHMARKS["tiny"] = TINY
    sys.exit(cli.main())
