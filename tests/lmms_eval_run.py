"""Run the real lmms-eval on the mini model with a tiny task of our own, and compare its answers with ours.

    python -m venv lmms && lmms/bin/pip install -e . lmms-eval==0.7.3 "filelock<4"
    lmms/bin/python tests/lmms_eval_run.py [FOLDER]

In an environment of its own: lmms-eval asks for torchvision and much else. Nothing of it that runs here needs
torchvision; where a CPU build of torch doesn't fit the torchvision that pip brings, uninstall the latter.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from decomoe.answer import load
from decomoe.benchmarks import Case, run
from decomoe.benchmarks.drawn import drawn_cases
from decomoe.evaluate import parse_methods

TASK = """
task: drawn_tiny
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function pictures.of
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 16, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}
"""
PICTURES = """
import io

from PIL import Image


def of(document):
    return [Image.open(io.BytesIO(document["picture"]))]
"""
SPECS = ("dense", "decomoe", "fastv:prune=0.75")


def main(folder: Path) -> None:
    """Write the task, run it with each method, let lmms-eval print its tables, and compare."""
    cases = drawn_cases(first_seed=0, count=24)
    write_task(folder, cases)
    loaded = load()
    for spec, method in parse_methods(SPECS, layers=16).items():
        theirs = answers_in_lmms_eval(folder, spec)
        ours = [outcome.answer for outcome in run(loaded, cases, method, batch=1, max_new_tokens=16)]
        print(
            f"{spec}: {sum(map(str.__eq__, theirs, ours))} of {len(cases)} answers are those of decomoe alone",
            flush=True,
        )
        if theirs != ours:
            sys.exit("The answers differ.")


def write_task(folder: Path, cases: list[Case]) -> None:
    """A task of lmms-eval: its settings, where pictures are, and questions as parquet."""
    rows = []
    for case in cases:
        file = io.BytesIO()
        case.picture().save(file, "PNG")
        rows.append({"question": case.question, "answer": case.answer, "picture": file.getvalue()})
    pd.DataFrame(rows).to_parquet(folder / "test.parquet")
    (folder / "drawn_tiny.yaml").write_text(TASK.format(data=folder / "test.parquet"))
    (folder / "pictures.py").write_text(PICTURES)


def answers_in_lmms_eval(folder: Path, spec: str) -> list[str]:
    """The answers that it scored, by its own command line."""
    name, _, parameters = spec.partition(":")
    out = folder / name
    command = [sys.executable, "-m", "lmms_eval", "--model", "decomoe", "--tasks", "drawn_tiny"]
    command += ["--model_args", ",".join(filter(None, [f"method={name}", parameters]))]
    command += ["--include_path", str(folder), "--batch_size", "1", "--log_samples", "--output_path", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")})
    (samples,) = out.rglob("*_samples_drawn_tiny.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    return [line["filtered_resps"] for line in lines]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
