"""Benchmarks x methods -> one JSON line a question, and tables made from those lines."""

from .match import at_strength, cost_of, matched, missed
from .run import evaluate
from .specs import METHOD_SETS, parse_benchmarks, parse_method, parse_methods
from .tables import by_kind, common, overall, rows, tables, write_tables

__all__ = [
    "METHOD_SETS",
    "at_strength",
    "by_kind",
    "common",
    "cost_of",
    "evaluate",
    "matched",
    "missed",
    "overall",
    "parse_benchmarks",
    "parse_method",
    "parse_methods",
    "rows",
    "tables",
    "write_tables",
]
