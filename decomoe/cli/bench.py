"""`decomoe bench`: time, memory, bytes and FLOPs against the dense model."""

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_offload, check_counts, load_model, offload

if TYPE_CHECKING:
    from ..bench import Row, Variant
    from ..calibration import Calibration

BASELINE = "grouped_mm"  # the executor that transformers chooses
FETCHING = ("decomoe", "decomoe_loop")  # those that fetch experts from host memory
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}  # random routers are near ties, which bf16 breaks anew
LIST = "examples.json"
EXAMPLES = Path(__file__).parents[2] / "assets" / "examples"


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    bench = commands.add_parser("bench", help="measure methods against dense: time, memory, bytes, FLOPs")
    bench.set_defaults(run=run)
    bench.add_argument(
        "--methods",
        nargs="+",
        default=["dense,off,decomoe"],
        metavar="NAME[:KEY=VALUE,...][@EXPERTS]",
        help="dense is plain generate and always first, off is decomoe attached but idle; EXPERTS is how experts run: "
        "decomoe, decomoe_loop, decomoe_all, or transformers' grouped_mm (which dense and off use), batched_mm, eager",
    )
    bench.add_argument(
        "--compile",
        nargs="+",
        default=[],
        metavar="NAME[:KEY=VALUE,...]",
        help="methods that decode in compiled steps (CUDA graphs on a GPU), each as one more row; slow to compile",
    )
    bench.add_argument("--shape", help="random weights at the widths of qwen3-vl-30b-a3b, or tiny, instead of a model")
    bench.add_argument("--layers", type=int, help="of the shape (all)")
    bench.add_argument("--dtype", choices=TOLERANCES, help="of the shape (float32 on a CPU, bfloat16 on a GPU)")
    bench.add_argument("--skew", type=float, default=0.0, help="of the shape's routers; 0 is the worst case for RCEP")
    bench.add_argument("--visual", type=int, default=256, help="visual tokens; of a model's picture about so many")
    bench.add_argument("--text", type=int, default=64, help="text tokens of the shape's prompt")
    bench.add_argument("--image", type=Path, help="the picture for a model; the examples in turns by default")
    bench.add_argument("--question", default="What is in the picture?", help="the question about --image")
    bench.add_argument("--batch", type=int, default=1, help="questions at once")
    bench.add_argument("--new-tokens", type=int, default=16, help="tokens to decode")
    bench.add_argument("--rounds", type=int, default=10, help="how often each method runs, one after the other")
    bench.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds instead of the clock's, where others use the CPU too"
    )
    add_offload(bench)
    bench.add_argument("--breakdown", action="store_true", help="where the time goes, part by part")
    bench.add_argument("--check", action="store_true", help="compare logits with fp32 and eager experts; no timing")
    bench.add_argument("--show", type=Path, help="one table of what earlier runs wrote into a file; measures nothing")
    return bench


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    if options.show:
        print(tables(_shown(options.show))[0])
        return 0
    check_counts(options, "layers", "visual", "text", "batch", "rounds")
    if options.new_tokens < 2:
        raise ValueError(f"--new-tokens must be at least 2, TPOT needs a second one; not {options.new_tokens}.")
    if options.check and options.offload_suffix:
        raise ValueError("--check compares with eager experts, which can't be offloaded; leave --offload-suffix out.")
    _variants(options, layers=48)  # a slip is told before the model loads
    model, calibration, prompts = _shape(options) if options.shape else _model(options)
    from ..bench import check, measure  # noqa: PLC0415

    variants = _variants(options, model.config.get_text_config().num_hidden_layers)
    if options.offload_suffix:
        offload(model, calibration, [variant.method for variant in variants.values()], options.device)
        prompts = [{name: values.to(model.device) for name, values in inputs.items()} for inputs in prompts]
    if options.check:
        limit = TOLERANCES[str(model.dtype).removeprefix("torch.")]
        errors = check(model, variants, prompts[0], calibration)
        for name, error in errors.items():
            print(f"{'ok' if error <= limit else 'WRONG'}: {name} is {error:.1e} away (at most {limit:.0e})")
        return int(any(not error <= limit for error in errors.values()))
    clock = time.process_time if options.cpu_time else time.perf_counter
    rows = measure(model, variants, prompts, calibration, options.new_tokens, options.rounds, options.breakdown, clock)
    if options.shape and not options.skew:
        print("Random routers choose almost uniformly, the worst case for an expert prefix; see --skew.\n")
    print(*tables(rows), sep="\n")
    print(json.dumps(rows, allow_nan=False))
    return 0


def _shape(options: argparse.Namespace) -> tuple[Any, "Calibration | None", list[dict[str, Any]]]:
    import torch  # noqa: PLC0415

    from ..families import default_device, default_dtype  # noqa: PLC0415
    from ..shapes import build, prompt, stand_in  # noqa: PLC0415

    device = options.device or default_device()
    dtype = getattr(torch, options.dtype) if options.dtype else default_dtype(device)
    model = build(options.shape, options.layers, dtype, "cpu" if options.offload_suffix else device, options.skew)
    return model, stand_in(model), [prompt(model, options.visual, options.text, options.batch)]


def _model(options: argparse.Namespace) -> tuple[Any, "Calibration | None", list[dict[str, Any]]]:
    from ..answer import encode  # noqa: PLC0415
    from ..images import load_image  # noqa: PLC0415

    if options.image is None:
        asked = [(EXAMPLES / row["image"], row["question"]) for row in json.loads((EXAMPLES / LIST).read_text())]
    else:
        asked = [(options.image, options.question)]
    pictures = [(load_image(image), question) for image, question in asked]
    loaded = load_model(options)
    patch = loaded.model.config.vision_config.patch_size
    side = (patch if isinstance(patch, int) else patch[0]) * 2 * max(1, round(options.visual**0.5))
    pictures = [(picture.resize((side, side)), question) for picture, question in pictures]
    return loaded.model, loaded.calibration, [encode(loaded, [each] * options.batch) for each in pictures]


def _variants(options: argparse.Namespace, layers: int) -> "dict[str, Variant]":
    """By spec, dense first."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415

    from ..bench import Variant  # noqa: PLC0415
    from ..evaluate import parse_method  # noqa: PLC0415
    from ..methods import DecoMoE, Dense  # noqa: PLC0415

    known = FETCHING if options.offload_suffix else ("eager", *ALL_EXPERTS_FUNCTIONS)
    baseline = "decomoe" if options.offload_suffix else BASELINE
    idle = {"dense": Dense(), "off": DecoMoE(exit_after="never", rcep=False, order="native")}
    specs = [(spec, False) for spec in ["dense", *_split(options.methods)]]
    specs += [(spec, True) for spec in _split(options.compile)]
    variants = {}
    for spec, compiled in specs:
        text, _, experts = spec.partition("@")
        if experts and experts not in known:
            raise ValueError(f"There is no way '{experts}' to run experts; there are {', '.join(known)}.")
        method = idle.get(text) or parse_method(text, layers)
        variants[f"{spec} compiled" if compiled else spec] = Variant(
            None if text == "dense" and not compiled else method,
            experts or (baseline if text in idle else "decomoe"),
            compiled,
        )
    return variants


def _split(given: Sequence[str]) -> list[str]:
    """The specs in a list of specs with commas between them."""
    return [spec for text in given for spec in re.split(r",(?=[a-z0-9]+(?:[:,@]|$))", text)]


def _shown(path: Path) -> "list[Row]":
    """The rows in the output of earlier runs.

    Raises:
        ValueError: there are none.
    """
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        if line.startswith("[{"):
            rows += json.loads(line)
    if not rows:
        raise ValueError(f"There is no line of JSON from 'decomoe bench' in '{path}'.")
    return rows


# --- for people -------------------------------------------------------------------------------------------------------


def tables(rows: "list[Row]") -> list[str]:
    """Markdown: times; what they are held against; and by part, where that was measured."""
    import pandas as pd  # noqa: PLC0415

    from ..evaluate.tables import to_markdown  # noqa: PLC0415

    parts = [line for row in rows for line in _parts(row)]
    found = [_times(row) for row in rows], [_work(row) for row in rows], parts
    return [to_markdown(pd.DataFrame(lines)) for lines in found if lines]


def _ratio(row: "Row", name: str) -> str:
    low, high = row[f"{name}_ratio_low"], row[f"{name}_ratio_high"]
    spread = f" ({low:.2f} to {high:.2f})" if low < high else ""  # of one round there is none
    return f"{row[f'{name}_ratio']:.2f}{spread}"


def _times(row: "Row") -> dict[str, str]:
    exits = sorted(set(row["exit_after"]), key=str)
    return {
        "method": row["method"],
        "experts": row["experts"],
        "layers": str(row["layers"]),
        "visual": f"{row['visual']:.0f}",
        "TTFT ms": f"{1e3 * row['ttft_s']:.1f}",
        "of dense": _ratio(row, "ttft"),
        "TPOT ms": f"{1e3 * row['tpot_s']:.2f}",
        "of dense ": _ratio(row, "tpot"),
        "exit": "/".join("-" if layer is None else str(layer) for layer in exits),
        "prefix": f"{row['mean_prefix']:.1f}",
        "as uncompiled": f"{row['answers_as_plain']:.0%}" if row["compiled"] else "-",
    }


def _work(row: "Row") -> dict[str, str]:
    def of_dense(name: str) -> str:
        return f"{row[f'{name}_ratio']:.2f}" if f"{name}_ratio" in row else "-"

    return {
        "method": row["method"],
        "vision GFLOP": f"{row['vision_flops'] / 1e9:.2f}",
        "prefill GFLOP": f"{row['prefill_flops'] / 1e9:.2f}",
        "of dense": of_dense("prefill_flops"),
        "GB": f"{row['prefill_bytes'] / 1e9:.3f}",
        "of dense ": of_dense("prefill_bytes"),
        "floor ms": f"{1e3 * row['prefill_floor_s']:.1f}",
        "achieved": f"{row['prefill_achieved']:.0%}",
        "decode GB": f"{row['decode_bytes'] / 1e9:.4f}",
        "of dense  ": of_dense("decode_bytes"),
        "floor ms ": f"{1e3 * row['decode_floor_s']:.2f}",
        "achieved ": f"{row['decode_achieved']:.0%}",
        "KV of dense": of_dense("kv_bytes"),
        "peak MB": "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
        "of dense   ": of_dense("peak_bytes"),
    }


def _parts(row: "Row") -> Iterator[dict[str, str]]:
    for phase, parts in row.get("breakdown", {}).items():
        cells = {
            part: f"{1e3 * spent['seconds']:.2f} ({spent['of_dense']:.0%})" if spent["seconds"] else "-"
            for part, spent in parts.items()
        }
        yield {"run": row["method"], "ms (of all that dense takes)": phase, **cells}
