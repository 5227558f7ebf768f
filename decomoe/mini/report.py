"""Measure the mini model on held-out drawn questions and write its model card: `python -m decomoe.mini.report`."""

import argparse
from collections import defaultdict
from pathlib import Path

from ..ask import MINI, load
from ..calibrate.cases import Case, Outcome, normalize, run
from ..methods import DecoMoE, Dense, Method, from_toggles
from .cases import TEST_SEED, drawn_cases

CARD = """# The mini model

A Qwen3-VL-MoE of nine million parameters (16 layers of width 128, 32 experts of width 32, top-4; a vision tower of 5
layers; 64 to 100 visual tokens a picture) that answers questions about drawn pictures. It exists so that every part of
DecoMoE runs on any laptop. **It is very small**: it knows 64 pictograms, 8 shapes in 8 colours, 134 words and numbers
up to 999 in one typeface, and bar charts. It can't understand photos, and its answers about anything else mean nothing.

Weights are bf16, licence Apache-2.0. The pictograms are drawn from Noto Color Emoji (SIL Open Font Licence 1.1).

## Training
Plain training on pictures that the code draws (`decomoe/mini/draw.py`), seeds from 1 000 000 up: no random exits,
nothing that suits the method.
1. The vision tower alone, with the thing and the colour under every visual token as labels: {vision}.
2. The whole model on questions, up to six a picture in one sequence: {answers}.

On two CPU cores, shared with other work; `python -m decomoe.mini.train --compile` trains it anew.

## Calibration
`decomoe calibrate --cases {cases} --out assets/mini/calibration`: drawn questions from seed 500 000 up,
half for expert orders and gate, half for theta ({theta}). The paper's procedure (forced exits at every candidate,
labels from correctness and a first-token NLL within its 95th percentile, one two-class MLP a
candidate), with more epochs.

## Measured
`python -m decomoe.mini.report --cases {count}`: {count} questions about held-out pictures (seeds from 0 up), exact
match after lower-casing and dropping a final full stop. FLOPs are of the decoder, against dense at the same answer
length: executed counts all experts of a prefix (the paper's convention), sparse the top-k.

{methods}

Retention is the ratio of exact match to dense over the same questions.

"describe" questions (answers of ten to forty tokens) are not in the calibration data, and lose most. Presence and
relation are near chance in the dense model already, and reading letters, words and numbers has not been learned:
training was short.

By kind of question:

{kinds}
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--vision", default="unknown", help="what was trained in stage 1, for the card")
    parser.add_argument("--answers", default="unknown", help="what was trained in stage 2, for the card")
    arguments = parser.parse_args()
    loaded = load()
    assert loaded.calibration is not None
    cases = drawn_cases(TEST_SEED, arguments.cases, per_picture=8, describe=True)
    methods: dict[str, Method] = {
        "dense": Dense(),
        "DecoMoE": DecoMoE(),
        "SAVB only": DecoMoE(rcep=False),
        "RCEP only (fixed exit)": from_toggles(16, savb=False),
        "DecoMoE, earlier KV purged": DecoMoE(earlier_kv="purge"),
    }
    outcomes = {name: list(run(loaded, cases, method, max_new_tokens=64)) for name, method in methods.items()}
    provenance = loaded.calibration.provenance
    card = CARD.format(
        vision=arguments.vision,
        answers=arguments.answers,
        cases=provenance["cases"],
        theta=loaded.calibration.theta,
        count=len(cases),
        methods=method_table(outcomes, cases),
        kinds=kind_table(outcomes, cases),
    )
    Path(MINI / "README.md").write_text(card)
    print(card[card.index("## Measured") :])


def right(outcomes: list[Outcome], cases: list[Case]) -> list[bool]:
    """Which answers are exactly right."""
    return [normalize(o.answer) == normalize(c.answer) for o, c in zip(outcomes, cases, strict=True)]


def method_table(outcomes: dict[str, list[Outcome]], cases: list[Case]) -> str:
    """One row a method."""
    lines = [
        "| method | exact match | retention | as dense | mean exit | never exits | mean prefix | executed | sparse |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense = right(outcomes["dense"], cases)
    for name, results in outcomes.items():
        hits = right(results, cases)
        same = [normalize(a.answer) == normalize(b.answer) for a, b in zip(results, outcomes["dense"], strict=True)]
        exits = [o.trace.exit_after for o in results if o.trace.exit_after is not None]
        executed = sum(o.trace.flops.executed for o in results) / sum(o.trace.flops.executed_dense for o in results)
        sparse = sum(o.trace.flops.sparse for o in results) / sum(o.trace.flops.sparse_dense for o in results)
        prefix = sum(o.trace.mean_prefix for o in results) / len(results)
        lines.append(
            f"| {name} | {sum(hits) / len(hits):.3f} | {sum(hits) / sum(dense):.3f} | {sum(same) / len(same):.3f} | "
            f"{sum(exits) / len(exits) if exits else float('nan'):.1f} | {1 - len(exits) / len(results):.2f} | "
            f"{prefix:.1f} | {executed:.2f} | {sparse:.2f} |".replace("nan", "-")
        )
    return "\n".join(lines)


def kind_table(outcomes: dict[str, list[Outcome]], cases: list[Case]) -> str:
    """Dense and DecoMoE by kind of question."""
    hits: dict[str, list[tuple[bool, bool, int | None]]] = defaultdict(list)
    both = zip(right(outcomes["dense"], cases), right(outcomes["DecoMoE"], cases), strict=True)
    for case, (dense, ours), outcome in zip(cases, both, outcomes["DecoMoE"], strict=True):
        hits[case.id.rsplit("/", 1)[1]].append((dense, ours, outcome.trace.exit_after))
    lines = ["| kind | questions | dense | DecoMoE | mean exit |", "|---|---|---|---|---|"]
    for kind, rows in sorted(hits.items()):
        exits = [exit_after for _, _, exit_after in rows if exit_after is not None]
        mean_exit = f"{sum(exits) / len(exits):.1f}" if exits else "-"
        shares = [sum(column) / len(rows) for column in list(zip(*rows, strict=True))[:2]]
        lines.append(f"| {kind} | {len(rows)} | {shares[0]:.2f} | {shares[1]:.2f} | {mean_exit} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
