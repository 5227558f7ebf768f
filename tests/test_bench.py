"""`bench`: what it counts against counts by hand, what it times against a clock that we wind; and the command."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import EXPERTS, LAYERS, PROMPTS, TOP_K, WIDTH, inputs_for

from decomoe import bench, cli
from decomoe.bench import Variant, check, executor, measure
from decomoe.decode import CompiledDecode
from decomoe.families import parts_of
from decomoe.methods import DecoMoE, DyVTE
from decomoe.runtime import attach
from decomoe.shapes import SHAPES, build, prompt, stand_in

ROOT = Path(__file__).parents[1]
VARIANTS = {
    "dense": Variant(None, "grouped_mm"),
    "half": Variant(DecoMoE(exit_after=3, rcep=False), "decomoe"),
    "prefix": Variant(DecoMoE(exit_after=3, prefix=TOP_K, order="native"), "decomoe_loop"),
}


def test_times_are_ratios_of_one_round(model, monkeypatch):
    """Between two looks at our clock pass 1 s under dense, and 3 s under a method."""
    looks = []

    def clock():
        slow = getattr(model, "_decomoe_session", None) is not None
        looks.append(slow)
        return sum(3 if other else 1 for other in looks)

    rows = measure(model, VARIANTS, [inputs_for(model, PROMPTS[0])], tokens=3, rounds=2, clock=clock)
    assert [row["method"] for row in rows] == list(VARIANTS)
    assert [(row["ttft_s"], row["tpot_s"]) for row in rows] == [(1, 1), (3, 3), (3, 3)]
    for row, ratio in zip(rows, (1, 3, 3), strict=True):
        for name in ("ttft_ratio", "ttft_ratio_low", "tpot_ratio_high"):
            assert row[name] == ratio
    rounds = looks[: 3 * 4 * 3]  # 3 rounds with 4 looks a method; the first round does not count
    assert rounds == ([False] * 4 + [True] * 8) * 3


def test_spread_is_taken_inside_rounds():
    """A disturbance that hits a whole round leaves its ratio alone."""
    row = bench._spread("ttft", [1.0, 10.0, 2.0], [2.0, 20.0, 4.0])
    assert row == {"ttft_s": 2.0, "ttft_ratio": 0.5, "ttft_ratio_low": 0.5, "ttft_ratio_high": 0.5}


def test_bytes_and_flops_by_hand(model):
    inputs, tokens = inputs_for(model, PROMPTS[0]), 3
    rows = {row["method"]: row for row in measure(model, VARIANTS, [inputs], tokens=tokens, rounds=1)}
    used = []  # experts in use per forward and layer, seen by hooks of our own
    for module in parts_of(model).experts:
        module.register_forward_pre_hook(lambda _, args: used.append(len(set(args[1].flatten().tolist()))))
    with attach(model, VARIANTS["prefix"].method) as session:
        session.generate(inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    assert max(used[LAYERS - 2 : LAYERS]) <= TOP_K
    text, visual = len(PROMPTS[0].before) + len(PROMPTS[0].after), 4
    head, expert, projections = WIDTH * 64, 3 * WIDTH * 16, 2 * WIDTH * 64 + 2 * WIDTH * 32
    fixed, entry = head + LAYERS * (projections + WIDTH * EXPERTS), 2 * 32
    held = 4 * (text + visual) + 2 * text
    prefill = fixed + sum(used[:LAYERS]) * expert + entry * held
    assert rows["prefix"]["prefill_bytes"] == 4 * prefill
    decode = [
        fixed + sum(used[LAYERS * step :][:LAYERS]) * expert + entry * (held + step * LAYERS)
        for step in range(1, tokens)
    ]
    assert rows["prefix"]["decode_bytes"] == 4 * sum(decode) / 2
    per_token = 2 * (projections + WIDTH * EXPERTS + TOP_K * expert)
    attention = [2 * 64 * n * (n + 1) for n in [text + visual] * 4 + [text] * 2]
    assert rows["half"]["prefill_flops"] == per_token * held + sum(attention) + 2 * head
    assert rows["half"]["prefill_flops_ratio"] == rows["half"]["prefill_flops"] / rows["dense"]["prefill_flops"]
    assert rows["dense"]["kv_bytes"] == 4 * entry * LAYERS * (text + visual + tokens - 1)


def test_all_experts_count_as_the_paper_counts(model):
    """By hand: without a limit every token goes through all experts, and all of them are read; else the prefix."""
    method = DecoMoE(exit_after=3, prefix=5, order="native")
    variants = {"dense": Variant(None, "grouped_mm")} | {
        name: Variant(method, name) for name in ("decomoe", "decomoe_all")
    }
    rows = {row["method"]: row for row in measure(model, variants, [inputs_for(model, PROMPTS[0])], tokens=2, rounds=1)}
    text, expert = len(PROMPTS[0].before) + len(PROMPTS[0].after), 6 * WIDTH * 16
    more = 4 * (text + 4) * (EXPERTS - TOP_K) + 2 * text * (5 - TOP_K)
    assert rows["decomoe_all"]["prefill_flops"] - rows["decomoe"]["prefill_flops"] == more * expert
    decoded = (4 * (EXPERTS - TOP_K) + 2 * (5 - TOP_K)) * expert
    assert rows["decomoe_all"]["decode_flops"] - rows["decomoe"]["decode_flops"] == decoded
    used = rows["decomoe"]["decode_bytes"] - 4 * TOP_K * LAYERS * expert // 2
    assert rows["decomoe_all"]["decode_bytes"] == used + 4 * (4 * EXPERTS + 2 * 5) * expert // 2


def test_vision_is_counted_by_hand_and_is_part_of_the_floor(model):
    """Products of all linear layers and convolutions, by hooks of our own, and attention's two."""
    inputs, flops = inputs_for(model, PROMPTS[0]), []
    config = model.config.vision_config
    for tower in parts_of(model).vision:
        for module in tower.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d):
                module.register_forward_hook(
                    lambda module, _, out: flops.append(2 * module.weight[0].numel() * out.numel())
                )
    patches = []
    blocks = [module for tower in parts_of(model).vision for module in tower.modules() if hasattr(module, "qkv")]
    blocks += [module for tower in parts_of(model).vision for module in tower.modules() if hasattr(module, "q_proj")]
    for module in blocks:
        projection = getattr(module, "qkv", None) or module.q_proj
        projection.register_forward_hook(lambda _, __, out: patches.append(out.numel() // out.shape[-1]))
    dense = {"dense": Variant(None, "grouped_mm")}
    row = measure(model, dense, [inputs], tokens=2, rounds=1)[0]
    answers = 2 + 1 + 1  # rounds, and two runs that count
    attention = sum(4 * count**2 * config.hidden_size for count in patches) / answers
    assert row["vision_flops"] == sum(flops) / answers + attention
    assert row["vision_bytes"] == sum(w.nbytes for tower in parts_of(model).vision for w in tower.parameters())


def test_floor_and_share_of_it():
    """By hand, at 10 FLOP/s and 5 byte/s; two prompts in turns, the second first as the first round is left out."""
    machine = bench.Machine(10, 5)
    work = {"vision_flops": 10, "vision_bytes": 5, "decode_flops": 1, "decode_bytes": 5}
    works = [work | {"prefill_flops": 30, "prefill_bytes": 5}, work | {"prefill_flops": 10, "prefill_bytes": 35}]
    runs = [bench._Run([16.0, 18.0], torch.empty(0)), bench._Run([8.0, 12.0], torch.empty(0))]
    row = bench._roofline(machine, works, runs)
    assert row == {"prefill_floor_s": 6, "prefill_achieved": 0.5, "decode_floor_s": 1, "decode_achieved": 0.375}


def test_stand_in_gates_fire_where_the_paper_fixes_the_exit():
    """28 of 48: of 8 layers and candidates 3, 5 and 7 that is 5. Nothing but costs may depend on it."""
    model = build("tiny")
    inputs, calibration = prompt(model, visual=12, text=6), stand_in(model)
    for method in (DecoMoE(rcep=False), DyVTE()):
        with attach(model, method, calibration) as session:
            session.generate(inputs, max_new_tokens=1)
        assert session.traces()[0].exit_after == 5


def test_prompts_take_turns_and_are_averaged(model):
    prompts = [inputs_for(model, prompt) for prompt in PROMPTS]
    rows = measure(model, VARIANTS, prompts, tokens=2, rounds=1)
    each = [measure(model, VARIANTS, [inputs], tokens=2, rounds=1) for inputs in prompts]
    for number, row in enumerate(rows):
        for name in ("prefill_flops", "decode_bytes", "text"):
            assert row[name] == pytest.approx(sum(alone[number][name] for alone in each) / 3)
    assert [row["exit_after"] for row in rows] == [[None] * 3, [3] * 3, [3] * 3]


def test_compiled_decode_is_a_row_beside_the_plain_one(model, monkeypatch):
    """Steps that are counted, and the same work and cache as without."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    steps, step = [], CompiledDecode.step
    monkeypatch.setattr(CompiledDecode, "step", lambda *given: steps.append(0) or step(*given))
    compiled = {f"{name} compiled": replace(VARIANTS[name], compiled=True) for name in ("half", "prefix")}
    rows = measure(model, VARIANTS | compiled, [inputs_for(model, PROMPTS[0])], tokens=3, rounds=1)
    assert len(steps) == 2 * 2 * (1 + 2)  # two methods, two steps each time: to compile, and in rounds
    assert [row.get("answers_as_plain") for row in rows] == [None] * 3 + [1, 1]
    assert [row["compiled"] for row in rows] == [False, False, False, True, True]
    for plain, graphs in zip(rows[1:3], rows[3:], strict=True):
        for name in ("prefill_flops", "decode_bytes", "kv_bytes", "mean_prefix", "exit_after"):
            assert graphs[name] == plain[name]
    errors = check(model, VARIANTS | compiled, inputs_for(model, PROMPTS[0]))
    assert max(errors.values()) < 1e-5


def test_a_compiled_answer_that_differs_is_told(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    step = CompiledDecode.step

    def wrong(*given):
        logits, routed = step(*given)
        return -logits, routed

    monkeypatch.setattr(CompiledDecode, "step", wrong)
    variants = {"dense": VARIANTS["dense"], "half compiled": replace(VARIANTS["half"], compiled=True)}
    rows = measure(model, variants, [inputs_for(model, PROMPTS[0])], tokens=3, rounds=1)
    assert rows[1]["answers_as_plain"] == 0


def test_check_sees_a_decode_step_that_is_wrong(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr("decomoe.decode.covering", lambda mass, share: mass.new_ones(len(mass)))
    share = Variant(DecoMoE(exit_after=3, p=0.99, order="native"), "decomoe")
    errors = check(model, {"plain": share, "wrong": replace(share, compiled=True)}, inputs_for(model, PROMPTS[0]))
    assert errors["plain"] < 1e-5
    assert errors["wrong"] > 0.01


def test_the_executor_is_put_back(model):
    config = parts_of(model).config
    before = config._experts_implementation
    with pytest.raises(RuntimeError, match="on purpose"), executor(model, "decomoe_loop"):
        assert config._experts_implementation == "decomoe_loop"
        raise RuntimeError("on purpose")
    assert config._experts_implementation == before


@pytest.mark.parametrize("size", [80_000_000, 200_000_000])  # beyond what an allocator keeps for reuse
def test_peak_memory_sees_what_was_held(size):
    with bench.peak_memory(torch.device("cpu")) as before:
        pass
    with bench.peak_memory(torch.device("cpu")) as peak:
        torch.ones(size, dtype=torch.uint8)
    if "bytes" not in peak:
        pytest.skip("this system does not tell")
    assert 0.8 * size < peak["bytes"] - before["bytes"] < 3 * size


def test_shapes_have_the_real_widths():
    """The sizes of Qwen3-VL-30B-A3B-Instruct's published config."""
    text = SHAPES["qwen3-vl-30b-a3b"]
    sizes = ("hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers")
    assert [text[name] for name in sizes] == [2048, 128, 8, 768, 48]
    assert (text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]) == (32, 4, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_built_shape_answers_and_is_the_same_again(dtype):
    model = build("tiny", 5, dtype)
    inputs = prompt(model, visual=12, text=6, rows=2)
    assert (inputs["input_ids"] == model.config.image_token_id).sum(1).tolist() == [12, 12]
    with torch.inference_mode():
        logits = model(**inputs).logits
        assert logits.dtype == dtype
        assert logits.isfinite().all()
        assert torch.equal(logits, build("tiny", 5, dtype)(**inputs).logits)
        other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
        assert not torch.equal(logits, model(**other).logits)  # the picture counts


def test_a_shape_that_does_not_fit_is_refused_before_it_is_built(monkeypatch):
    """By hand: 8 layers of 16 experts, three matrices of 64 by 32 each, in fp32."""
    needed = 8 * 16 * 3 * 64 * 32 * 4
    monkeypatch.setattr("decomoe.families._free_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match="8 layers of tiny take"):
        build("tiny")
    monkeypatch.setattr("decomoe.families._free_bytes", lambda device: needed)
    build("tiny")


def test_skew_makes_the_first_experts_popular():
    shares = []
    for skew in (0.0, 1.0, 2.0):
        model = build("tiny", skew=skew)
        with attach(model, DecoMoE(exit_after="never", rcep=False, order="native")) as session:
            session.generate(prompt(model, 64, 32), max_new_tokens=1)
            mass = torch.tensor(session.traces()[0].mass["text"])
        shares.append((mass[:, :4].sum() / mass.sum()).item())
    assert 0.15 < shares[0] < 0.35  # of 16 experts, 4 carry about a quarter
    assert shares[0] + 0.1 < shares[1] < shares[2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("huge"), "no shape 'huge'"),
        (lambda: build("tiny", 3), "at least 4 layers"),
        (lambda: prompt(build("tiny"), 0, 5), "at least 1 visual"),
    ],
)
def test_shapes_refuse_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_check_sees_an_executor_that_is_wrong(model, monkeypatch):
    inputs = inputs_for(model, PROMPTS[0])
    assert max(check(model, VARIANTS, inputs).values()) < 1e-5
    monkeypatch.setattr("decomoe.experts._run", lambda experts, expert, hidden: hidden)
    errors = check(model, VARIANTS, inputs)
    assert errors["dense"] < 1e-5
    assert errors["prefix"] > 0.01


def run(capsys, *arguments):
    code = cli.main(["bench", *arguments])
    return code, capsys.readouterr()


def test_the_command_prints_tables_and_one_json_line(capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    code, shown = run(
        capsys,
        *"--shape tiny --rounds 2 --new-tokens 2 --visual 16 --text 8 --breakdown".split(),
        *"--methods dense,off,decomoe:exit_after=3,prefix=5 vtw:exit_after=4@eager".split(),
        *"--compile dense,decomoe:exit_after=3,prefix=5".split(),
    )
    assert code == 0
    rows = json.loads(shown.out.splitlines()[-1])
    assert [(row["method"], row["experts"]) for row in rows] == [
        ("dense", "grouped_mm"),
        ("off", "grouped_mm"),
        ("decomoe:exit_after=3,prefix=5", "decomoe"),
        ("vtw:exit_after=4@eager", "eager"),
        ("dense compiled", "grouped_mm"),
        ("decomoe:exit_after=3,prefix=5 compiled", "decomoe"),
    ]
    assert [row["exit_after"] for row in rows] == [[None], [None], [3], [4], [None], [3]]
    assert (rows[0]["ttft_ratio"], rows[0]["tpot_ratio"]) == (1, 1)
    assert all(row["breakdown"]["decode"]["attention"]["of_dense"] > 0 for row in rows[:4])
    for phase in ("prefill", "decode"):
        assert sum(part["of_dense"] for part in rows[0]["breakdown"][phase].values()) == pytest.approx(1, abs=0.2)
    assert "breakdown" not in rows[4]
    assert all(row["prefill_achieved"] > 0 and row["decode_floor_s"] > 0 for row in rows)
    for spec in ("dense", "off", "vtw:exit_after=4@eager", "dense compiled"):
        assert f"\n| {spec} |" in shown.out
    assert [row["answers_as_plain"] for row in rows if row["compiled"]] == [1, 1]


def test_offloaded_experts_are_fetched_by_dense_too(capsys):
    methods = "decomoe:exit_after=3,prefix=5", "decomoe:exit_after=2,prefix=4,outside=drop"
    sizes = "--shape tiny --layers 6 --rounds 1 --new-tokens 2 --visual 16 --text 8 --offload-suffix".split()
    code, shown = run(capsys, *sizes, "--methods", "off", *methods)
    assert code == 0
    rows = json.loads(shown.out.splitlines()[-1])
    assert [(row["method"], row["experts"]) for row in rows] == [
        (name, "decomoe") for name in ("dense", "off", *methods)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "tiny", "--offload-suffix", "--methods", "decomoe@eager"], "no way 'eager'"),
        (["--shape", "tiny", "--offload-suffix", "--methods", "vtw:exit_after=2"], "is for decomoe"),
        (["--shape", "tiny", "--offload-suffix", "--check"], "leave --offload-suffix out"),
        (["--shape", "huge"], "no shape"),
        (["--shape", "tiny", "--device", "auto"], "no device 'auto'"),
        (["--methods", "decomo"], "no method 'decomo'"),
        (["--methods", "decomoe@fast"], "no way 'fast'"),
        (["--compile", "decomo"], "no method 'decomo'"),
        (["--shape", "tiny", "--compile", "modes:tau_text=0.1,tau_visual=0.1"], "token by token"),
        (["--new-tokens", "1"], "at least 2"),
        (["--rounds", "0"], "at least 1"),
        (["--image", "nowhere.png"], "nowhere.png"),
        (["--show", "nowhere.md"], "nowhere.md"),
        (["--show", __file__], "no line of JSON"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, arguments, message):
    code, shown = run(capsys, *arguments)
    assert code == 2
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_the_gpu_script_runs_in_small(tmp_path):
    small = {
        "SHAPE": "tiny",
        "LAYERS": "8",
        "VISUAL": "16",
        "ROUNDS": "1",
        "TOKENS": "2",
        "PYTHON": str(tmp_path / "python"),
    }
    uncompiled = "import sys, torch; torch.compile = lambda call, **_: call; from decomoe.cli import main"
    Path(small["PYTHON"]).write_text(f"#!{sys.executable}\n{uncompiled}; sys.exit(main(sys.argv[3:]))\n")
    Path(small["PYTHON"]).chmod(0o755)
    environment = {**os.environ, **small, "OUT": str(tmp_path / "out.md"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([ROOT / "benchmarks/gpu.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = (tmp_path / "out.md").read_text()
    assert shown.count("\nok: ") == 16
    assert "WRONG" not in shown
    all_methods, graphs, whole = (json.loads(line) for line in shown.splitlines() if line.startswith("[{"))
    assert len(all_methods) == 13
    assert [row["compiled"] for row in graphs] == [False] * 3 + [True] * 3
    assert [(row["layers"], row["compiled"]) for row in whole] == [(8, False), (8, True), (8, True)]
    _, table = shown.split("## In one table\n")
    assert [line.split(" | ")[0] for line in table.strip().splitlines()[2:]] == [
        f"| {row['method']}" for row in (*all_methods, *graphs, *whole)
    ]
