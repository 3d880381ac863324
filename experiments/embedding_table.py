"""The table of `experiments/embeddings.py`: rows that are finished, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import embedding_rows

from meml_jax import markdown
from meml_jax.files import read_json
from meml_jax.types import Dataset, UserError

COLUMNS = (
    "seed", "NMI", "purity", "adjusted Rand", "validation NMI", "validation purity", "clusters",
    "dim", "steps", "embed s", "cluster s", "device", "commit",
)  # fmt: skip
FINISHED = "row.json"

Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of rows, and what has been measured."""


def table(rows: Rows) -> str:
    """Write rows as a Markdown table."""

    def cell(column: str, value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.0f}" if column.endswith(" s") else f"{value:.3f}"
        return str(value)

    found = [[name, *(cell(column, row.get(column)) for column in COLUMNS)] for name, row in rows]
    return markdown.table(["embedding", *COLUMNS], found) + "\n"


def stored(workdir: Path, dataset: Dataset) -> Rows:
    """Read the finished rows on these images, in the order of `row_names`, clusters and seeds."""
    names = embedding_rows.row_names()
    found = [(path.parent.name, read_row(path)) for path in workdir.glob("*/seed*")]
    here = [(name, row) for name, row in found if row["images"] == dataset.content_hash]

    def order(pair: tuple[str, Mapping[str, Any]]) -> tuple[int, int, int]:
        name, row = pair
        return names.index(embedding_rows.split(name)[0]), row["clusters"], row["seed"]

    return sorted((pair for pair in here if embedding_rows.split(pair[0])[0] in names), key=order)


def read_row(folder: Path) -> dict[str, Any]:
    """Read what a row has left; one that is not there, or broken, belongs to no images."""
    row = read_json(folder / FINISHED)
    names = {*COLUMNS, "settings", "images", "flags"}
    whole = isinstance(row, dict) and names <= row.keys()
    numbers = whole and isinstance(row["clusters"], int) and isinstance(row["seed"], int)
    return row if numbers and isinstance(row["flags"], str) else dict.fromkeys(names)


def check_keeping(rows: Rows, kept: Path, dataset: Dataset) -> None:
    """Raise UserError where a document's rows, in `kept`, would be lost to others.

    Args:
      rows: to be kept; of those only settings and seed are read.
      kept: folder of the document's rows.
      dataset: of which all are to be.
    """
    advice = "name another document, or delete that folder"
    for path in kept.glob(f"*/seed*/{FINISHED}"):
        row = read_row(path.parent)
        if row["images"] is None:
            raise UserError(f"{path} is damaged; mend it or delete its folder")
        if row["images"] != dataset.content_hash:
            raise UserError(f"{path.parent} keeps a row on other images; {advice}")
    for name, wanted in rows:
        folder = kept / name / f"seed{wanted['seed']}"
        if read_row(folder)["settings"] not in (None, wanted["settings"]):
            raise UserError(f"{folder} keeps a row of other settings; {advice}")


def block(rows: Rows, dataset: Dataset) -> str:
    """Write the table for a document, with the commands that made it."""
    commands: dict[str, list[str]] = {}
    for name, row in rows:
        commands.setdefault(row["flags"], []).append(name)
    lines = [
        f"    python experiments/embeddings.py {flags_} --workdir=WORKDIR --rows={','.join(names)}"
        for flags_, names in commands.items()
    ]
    title = f"## Embeddings of {dataset.name}"
    part = f" ({dataset.note})" if dataset.note else ""
    note = (
        f"{len(dataset.train.images)} training images{part}; agreement of clusters and true "
        "classes: on them, and on the validation images in as many clusters as classes."
    )
    return "\n\n".join([title, note, "\n".join(lines), table(rows)])
