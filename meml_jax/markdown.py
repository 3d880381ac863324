"""Markdown that reports are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meml_jax.rounding import plain


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table: names in the first column, numbers in the others."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, marks, *cells])


def bullets(facts: Mapping[str, Any]) -> str:
    """Write a list of facts by name; those that are None are left out."""
    return "\n".join(f"- {name}: {plain(v)}" for name, v in facts.items() if v is not None)
