"""What the benchmark has measured, as Markdown tables and on a page of the documents."""

from __future__ import annotations

from typing import Any

from benchmark_parts import Row

from meml_jax.types import UserError


def table(rows: list[Row]) -> str:
    """Align rows as a Markdown table."""
    columns = sorted({column for row in rows for column in row}, key=lambda c: (c != "name", c))
    cells = [columns, *([_cell(column, row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = [isinstance(next((r[c] for r in rows if r.get(c)), ""), str) for c in columns]
    lines = [
        "| "
        + " | ".join(
            text.ljust(width) if word else text.rjust(width)
            for text, width, word in zip(line, widths, words, strict=True)
        )
        + " |"
        for line in cells
    ]
    rule = [
        "-" * (w + 2) if word else "-" * (w + 1) + ":"
        for w, word in zip(widths, words, strict=True)
    ]
    lines.insert(1, "|" + "|".join(rule) + "|")
    return "\n".join(lines) + "\n"


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    if column.endswith("share"):
        return f"{100 * value:.0f} %"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def fill(page: str, found: dict[str, Any]) -> str:
    """Put the tables of a file into a page, between `<!-- benchmark: PART -->` and `<!-- end -->`.

    `machine` as PART says what the figures were measured on.

    Raises:
      UserError: a part that was not measured, a mark without its end, or no mark at all.
    """
    head, *blocks = page.split("<!-- benchmark: ")
    if not blocks:
        raise UserError("the page has no <!-- benchmark: PART --> to fill")
    filled = head
    for block in blocks:
        part, _, rest = block.partition(" -->")
        if part != "machine" and part not in found["parts"]:
            raise UserError(f"the page wants {part!r}, which --json does not have; measure it too")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise UserError(f"the page has no <!-- end --> after <!-- benchmark: {part} -->")
        text = machine(found) if part == "machine" else table(found["parts"][part])
        filled += f"<!-- benchmark: {part} -->\n{text}{end}{after}"
    return filled


def machine(found: dict[str, Any]) -> str:
    """Say in one line what figures were measured on."""
    names = ", ".join(f"{name} {found['versions'][name]}" for name in ("jax", "jaxlib"))
    return (
        f"{found['device']}; {names}; commit {found['commit']}; {found['seconds']:.0f} s in all.\n"
    )
