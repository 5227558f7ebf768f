"""The floor plan: a file imports from its own floor or lower."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {
    "layout": 0,
    "prefix": 0,
    "gate": 0,
    "trace": 0,
    "flops": 0,
    "images": 0,
    "colors": 0,
    "difference": 0,
    "families": 1,
    "cache": 1,
    "experts": 1,
    "calibration": 1,
    "methods": 2,
    "record": 2,
    "decode": 2,
    "runtime": 3,
    "answer": 4,
    "latency": 4,
    "shapes": 5,
    "bench": 5,
    "__init__": 5,
    "benchmarks": 5,
    "calibrate": 5,
    "collect": 5,
    "evaluate": 5,
    "mini": 5,
    "cli": 6,
    "__main__": 6,
    "ui": 6,
}


def part(path: Path) -> str:
    """The entry of FLOORS that a module belongs to."""
    inside = path.relative_to(ROOT / "decomoe").with_suffix("")
    return inside.parts[0]


def imports(path: Path) -> list[str]:
    """The parts of decomoe that a module imports."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found += [base[1]] if len(base) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("decomoe"):
            found.append(([*node.module.split("."), "__init__"])[1])
    return found


def test_imports_go_down():
    modules = sorted((ROOT / "decomoe").rglob("*.py"))
    assert len(modules) > 15
    seen = 0
    for path in modules:
        for imported in imports(path):
            seen += 1
            assert FLOORS[imported] <= FLOORS[part(path)], f"{path.name} imports {imported}"
    assert seen > 40


def test_only_runtime_registers_hooks_that_act():
    users = [path.name for path in (ROOT / "decomoe").rglob("*.py") if "register_forward" in path.read_text()]
    assert sorted(users) == ["bench.py", "latency.py", "runtime.py"]  # only the last do
