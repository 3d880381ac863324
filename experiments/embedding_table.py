"""The table of `experiments/embeddings.py`: its rows, and those that are finished as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meml_jax.embeddings import EMBEDDINGS
from meml_jax.files import read_json
from meml_jax.presets import EMBEDDINGS as ROWS
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

    lines = ["| embedding | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, row in rows:
        cells = [cell(column, row.get(column)) for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def row_names() -> list[str]:
    """List the rows that there may be: those that set something, then the other embeddings."""
    return list(dict.fromkeys([*ROWS, *EMBEDDINGS, "npz"]))


def values_of(row: str) -> Mapping[str, Any]:
    """What a row sets: the name of an embedding, e.g. one of your own, that; a number, clusters.

    Raises:
      UserError: there is no such row.
    """
    name, count = _split(row)
    if name not in row_names():
        names = ", ".join(row_names())
        raise UserError(f"--rows has {row!r}, expected some of {names}, or one of them as pca_64")
    values = ROWS.get(name, {"embedding.name": name})
    return values if count is None else {**values, "clustering.num_clusters": count}


def _split(row: str) -> tuple[str, int | None]:
    """Split off the number of clusters with which a row's name ends, if it does."""
    found = None if row in row_names() else re.fullmatch("(.+)_([1-9][0-9]*)", row)
    return (found[1], int(found[2])) if found else (row, None)


def stored(workdir: Path, dataset: Dataset) -> Rows:
    """Read the finished rows on these images, in the order of `row_names`, clusters and seeds."""
    names = row_names()
    found = [(path.parent.name, read_row(path)) for path in workdir.glob("*/seed*")]
    here = [(name, row) for name, row in found if row["images"] == dataset.content_hash]

    def order(pair: tuple[str, Mapping[str, Any]]) -> tuple[int, int, int]:
        name, row = pair
        return names.index(_split(name)[0]), row["clusters"], row["seed"]

    return sorted((pair for pair in here if _split(pair[0])[0] in names), key=order)


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
