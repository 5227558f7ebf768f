"""Write the mini model's card from evaluation results: `python -m decomoe.mini.report --results FOLDER`."""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from ..answer import MINI
from ..benchmarks import BENCHMARKS
from ..calibration import Calibration
from ..collect.cases import found_in, markdown, picture_of, told_of
from ..evaluate import METHOD_SETS, by_kind, rows, tables
from ..evaluate.tables import to_markdown

MAIN = ("dense", *METHOD_SETS["table2"], "decomoe:earlier_kv=purge")

CARD = """# The mini model

A Qwen3-VL-MoE of nine million parameters (16 layers of width 128, 32 experts of width 32, top-4; a vision tower of 5
layers; 64 to 256 visual tokens a picture) that answers questions about drawn pictures and small photos. It exists so
that every part of DecoMoE runs on any laptop. **It is very small**: it knows 224 pictograms, 9 shapes in 11 colours,
words and numbers in 20 typefaces, bar, line and pie charts, small tables, and photos of ten classes. Its answers about
anything else mean nothing.

Weights are bf16, licence Apache-2.0. The pictograms are drawn from Noto Color Emoji (SIL Open Font Licence 1.1), the
letters from the typefaces listed in `decomoe/mini/glyphs.py`; the photos are CIFAR-10's.

## Training
Plain training on pictures that the code draws (`decomoe/mini/draw/`), seeds from 1 000 000 up, and on CIFAR-10's train
set but for its last 2000: no random exits, nothing that suits the method. First the vision tower alone, with the thing
and the colour under every visual token as labels, then the whole model on questions, up to six a picture in one
sequence. Two CPU cores, shared with other work; the loss was still falling when it was stopped.

{training}

The weights were started from an earlier mini model that knew 64 pictograms (0.41 hours of the first stage, 1.43 of the
second). `python -m decomoe.mini.train --compile` trains one anew. This run was changed on the way: until step 1460 of
the second stage kinds of picture came as in the held-out sets, since then by `train.MIX`; since step 2440 answers that
judge (yes, no, A to D) weigh three times as much; and from step 2920 to 3280 no question of easy-VQA's wording was
negated. Until then the model had answered those at chance, since what a plain question teaches, its negation takes
back; 800 steps later it answered nine of ten. Multiple choice was at chance until step 4150, with a third of the open
questions asked that way since 3720; then some of these named their answer, so that the way from a word to its letter
could be learned without the picture, and 250 steps later seven of ten were right. Questions about relations are opened
(`train.OPEN`) since step 4550. From step 5250 on the vision tower also saw sheets of photos (`train.SHEETS`), which the
language model did not; and detours went on. Whether a circle is there was answered worse than a guess would be, though
the shape was named without a mistake: with six of seven such questions about the shape, and none negated, all were
right 140 steps later, and stayed so when negated ones came back. In steps 5400 to 5640 and 6040 to 6380 objects were
mostly to be located and hardly ever absent, which did not help: where something is stays the hardest question.

Aimed at and reached: 95 % of easy-VQA, and an F1 of 0.90 on presence. Aimed at and not reached: 85 % of drawn questions
with no kind under 60 % (0.79; locate and relation are under), 65 % of photos (0.58), and over all sets 97.9 % retention
at 0.62 of dense's FLOPs (98.7 % at 0.82; on easy-VQA alone 99.7 % at 0.46). Accuracy rose to the end, in the last fifth
of the steps most, so more of the same training would help first; each photo has been seen about seven times, where
small vision models need tens of epochs.
The FLOPs can't be reached by the paper's labels: a gate that followed them without a mistake, every question leaving at
the earliest exit that keeps a right answer, would cost {hindsight:.2f} (`calibrate` tells so). A fifth of the questions
is answered wrongly, and these labels keep the picture for all of those; `--label same` lets them go too.

## Calibration
`decomoe calibrate --data {data}{options}`: {parts}. theta {theta}, p {p}.
{guarantee}

## Measured
`decomoe evaluate` on held-out questions that neither training nor calibration has seen; two CPU cores, fp32. Exact
match after lower-casing and dropping a final full stop. Retention is accuracy over dense's on the same questions,
with a 95 % bootstrap interval. FLOPs are of the decoder, against dense at the same answer length: executed counts all
experts of a prefix for every token (the paper's convention), sparse the top-k routes. "never" is the share of
questions whose visual tokens stay; "prefix" is the mean number of experts over all layers, "after exit" over those
after the exit.

{main}
F1 of dense on questions whether something is in the picture ("presence"): {f1}.

By kind of question:

{kinds}

Orders and shares of the experts (the paper's Tables 5 and 6) and all methods at matched FLOPs (its Table 1) are in
`analysis/results`.
{boundaries}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/mini"), help="what `decomoe evaluate` wrote")
    parser.add_argument("--limit", type=int, help="questions of each benchmark")
    parser.add_argument("--cases", type=Path, help="the forced exits of drawn-pictures that `decomoe collect` wrote")
    parser.add_argument("--log", type=Path, default=Path("work/mini/log.jsonl"), help="of the training")
    arguments = parser.parse_args()
    calibration = Calibration.load(MINI / "calibration")
    found = [row for row in rows(arguments.results, arguments.limit) if row["method"] in MAIN]
    kinds = [row for row in by_kind(arguments.results, arguments.limit) if row["method"] in ("dense", "decomoe")]
    overview, kind_table = tables(found, kinds)
    card = CARD.format(
        training=to_markdown(training_table(arguments.log)),
        **calibration_text(calibration.provenance),
        theta=calibration.theta,
        p=calibration.p,
        main=to_markdown(overview),
        f1=", ".join(f"{r['benchmark']} {r['f1']:.3f}" for r in found if r["method"] == "dense" and r["f1"]),
        kinds=to_markdown(kind_table),
        boundaries=boundaries(arguments.cases) if arguments.cases else "",
    )
    (MINI / "README.md").write_text(card)


def training_table(log: Path) -> pd.DataFrame:
    """Steps and hours of each stage, from the last line that it logged."""
    last: dict[str, dict[str, Any]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        last[row["stage"]] = row
    return pd.DataFrame([{"stage": s, "steps": r["step"], "hours": f"{r['hours']:.2f}"} for s, r in last.items()])


def calibration_text(provenance: dict[str, Any]) -> dict[str, Any]:
    """The card's words on how the calibration was made."""
    settings, guarantee = provenance["settings"], provenance["guarantee"]
    options, text = "", "The paper's procedure: theta is the cheapest that keeps accuracy; p is the paper's."
    if guarantee:
        options = f" --retain {settings['retain']} --confidence {settings['confidence']}"
        text = (
            f"With confidence {guarantee['confidence']}, more than {guarantee['retain']:.1%} of answers stay the dense "
            f"model's, tested on {guarantee['questions']} questions; assumed: {guarantee['assumption']}."
        )
    parts = ", ".join(f"{len(ids)} questions to {name}" for name, ids in provenance["ids"].items())
    hindsight = list(provenance["measured"].values())[-1]["hindsight"]
    data = " ".join(provenance["data"])
    return {"data": data, "options": options, "parts": parts, "guarantee": text, "hindsight": hindsight}


def boundaries(results: Path) -> str:
    """One picture whose questions need to look to three depths, as `decomoe cases` finds it; its picture is saved."""
    pictures = BENCHMARKS["drawn-pictures"]
    found = [case for case in found_in(results, [pictures]) if len(case.questions) == 3]
    if not found:
        return ""
    picture_of(found[0], [(pictures, None)]).save(MINI / "boundaries.png", optimize=True)
    return "\n" + markdown(told_of(found[0], "boundaries.png"))


if __name__ == "__main__":
    main()
