"""Result files that survive a kill: OUT/meta.json says of what; OUT/BENCHMARK/METHOD.jsonl has a line a question."""

import datetime
import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SCHEMA, META = 1, "meta.json"
Record = dict[str, Any]


def write(path: Path, text: str) -> None:
    """Write a whole file or leave the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_meta(out: Path) -> dict[str, Any]:
    """What the results in `out` are of: groups of names with values. Empty if there are none.

    Raises:
        ValueError: it was written by another version or is damaged.
    """
    try:
        meta = json.loads((out / META).read_text())
    except FileNotFoundError:
        return {"schema": SCHEMA}
    except ValueError:
        meta = None
    if (
        not isinstance(meta, dict)
        or meta.pop("schema", None) != SCHEMA
        or not all(isinstance(group, dict) for group in meta.values())
    ):
        raise ValueError(f"The results in {out} are damaged, or of another version of decomoe; take another folder.")
    return {"schema": SCHEMA, **meta}


def extended_meta(out: Path, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The meta data of `out` with more names in its groups.

    Raises:
        ValueError: a name is there already with another value, so results could not be compared.
    """
    meta = read_meta(out)
    for group, new in json.loads(json.dumps(groups)).items():
        old = meta.setdefault(group, {})
        for name, value in new.items():
            if old.setdefault(name, value) != value:
                raise ValueError(
                    f"The results in {out} were made with {name} {old[name]}, not {value}; take another folder."
                )
    return meta


def note_command(out: Path, *made: str) -> None:
    """Note in `out` that this command line too added lines of the kinds `made`, and when; figures say so."""
    meta, now = read_meta(out), shlex.join(["decomoe", *sys.argv[1:]])
    commands = meta.setdefault("commands", {})
    for kind in made:
        earlier = commands[kind]["line"].split(" && ") if kind in commands else []
        lines = dict.fromkeys([*earlier, now])  # one that was run again counts once
        commands[kind] = {"line": " && ".join(lines), "date": datetime.date.today().isoformat()}
    write(out / META, json.dumps(meta, indent=1) + "\n")


def file_of(out: Path, benchmark: str, method: str) -> Path:
    """Where the lines of a method are; ":" and "/" are not for file names."""
    return out / benchmark / f"{method.replace(':', '+').replace('/', '_')}.jsonl"


def append(path: Path, records: Iterable[Record], worker: int = 0) -> None:
    """Add lines, safe on disk when this returns. Workers other than 0 write beside `path`, until `tidy`."""
    path = _part(path, worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """All whole lines, every question once, in the order of their numbers."""
    records = {record["number"]: record for part in _parts(path) for record in _whole_lines(part)}
    return [records[number] for number in sorted(records)]


def tidy(path: Path) -> None:
    """Put the workers' lines into `path`, in order and without what a kill tore."""
    parts = _parts(path)
    if parts:
        write(path, "".join(json.dumps(record) + "\n" for record in read(path)))
    for part in parts:
        if part != path:
            part.unlink()


def _part(path: Path, worker: int) -> Path:
    return path.with_name(f"{path.name}.{worker}") if worker else path


def _parts(path: Path) -> Sequence[Path]:
    return [*([path] if path.exists() else []), *sorted(path.parent.glob(f"{path.name}.[0-9]*"))]


def _whole_lines(path: Path) -> Iterable[Record]:
    """Others were torn by a kill or a power cut; their questions are asked again."""
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "number" in record:
                yield record
