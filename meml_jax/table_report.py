"""The report of a table: Markdown, CSV, one HTML page, and the text of a block in a document."""

from __future__ import annotations

import base64
import csv
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meml_jax import markdown, table_figures
from meml_jax.cells import verdict
from meml_jax.comparison import Line, columns, label
from meml_jax.curves import NAMES
from meml_jax.files import write_atomic
from meml_jax.learners import LEARNERS
from meml_jax.table_sheets import Sheet, all_of, make_sheets, mean_of, parts_of
from meml_jax.tables import Table

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; }
body { padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 1.5rem; }
th, td { border: 1px solid #8886; padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: #8882; }
figure { margin: 1.5rem 0; }
img { background: #fff; border-radius: 4px; max-width: 100%; padding: 6px; }
pre { background: #8882; overflow-x: auto; padding: .6rem; }
"""


def draw(folder: Path, table: Table, lines: Sequence[Line]) -> dict[str, str]:
    """Draw the curves of a table into `figures/` of its folder.

    Args:
      folder: of the table.
      table: what is reported.
      lines: of `comparison.make_lines`.

    Returns:
      Captions by paths in the folder, of figures that trainings there have drawn too.
    """
    figures = {}
    for name, title, heading, here in _parts(table, lines):
        if any(line.cells or line.paper for line in here):
            table_figures.draw(here, folder / f"{name}.png", title=heading)
            figures[f"{name}.png"] = title
    return figures | of_a_training(folder, lines)


def draw_costs(folder: Path, table: Table, lines: Sequence[Line]) -> dict[str, str]:
    """Draw accuracy against seconds of training likewise: captions by paths in the folder.

    Not for documents: the seconds are those of devices that others may have shared.
    """
    return {
        f"{name}_cost.png": f"{title}: cost and accuracy"
        for name, title, heading, here in _parts(table, lines)
        if table_figures.draw_cost(here, folder / f"{name}_cost.png", title=heading)
    }


def _parts(table: Table, lines: Sequence[Line]) -> Iterator[tuple[str, str, str, list[Line]]]:
    """List the parts that have been measured: name of the figure, caption, title, lines."""
    for i, part in enumerate(dict.fromkeys(line.part for line in lines)):
        if part in parts_of(lines):
            # Below each other, as a part begins with a capital; a caption has one line.
            title, heading = (sep.join(filter(None, (table.title, part))) for sep in (", ", "\n"))
            name = f"figures/part{i + 1}" if part else "figures/accuracy"
            yield name, title, heading, [line for line in lines if line.part == part]


def write(
    folder: Path,
    table: Table,
    lines: Sequence[Line],
    commands: Sequence[str],
    figures: Mapping[str, str],
) -> None:
    """Write `report.md`, `report.csv` and `report.html` into the table's folder.

    Args:
      folder: of the table.
      table: what is reported.
      lines: of `comparison.make_lines`.
      commands: that made what there is.
      figures: of `draw`.
    """
    sheets = make_sheets(lines)
    body = [_markdown(sheet, level=2) for sheet in sheets]
    shown = ["## Figures", *_images(figures)] if figures else []
    text = [f"# {table.title}", *body, *shown, "## Commands", _code(commands)]
    write_atomic(folder / "report.md", "\n\n".join(text) + "\n")
    write_atomic(folder / "report.csv", csv_text(lines))
    write_atomic(folder / "report.html", _page(table, sheets, figures, commands, folder))


def document_text(
    heading: str, lines: Sequence[Line], commands: Sequence[str], figures: Mapping[str, str]
) -> str:
    """Write the block of a table in a document: heading, commands, sheets, figures.

    Args:
      heading: of the block.
      lines: of `comparison.make_lines`.
      commands: that made what there is.
      figures: captions by paths, as seen from the document.
    """
    sheets = [_markdown(sheet, level=3) for sheet in make_sheets(lines)]
    return "\n\n".join([f"## {heading}", _code(commands), *sheets, *_images(figures)])


def of_a_training(folder: Path, lines: Sequence[Line]) -> dict[str, str]:
    """Name the figures of one training, if it has drawn them: attention, and feature maps.

    It is the longest unsupervised one that pools by attention, else the longest that does.
    """
    trained = [line for line in lines if line.results and line.kind != "baseline"]
    known = {name for name, learner in LEARNERS.items() if learner.uses_attention}
    pooled = [line for line in trained if line.config.learner in known]
    for line in sorted(pooled, key=lambda line: (line.kind == "oracle", -(line.steps or 0))):
        inside = f"{line.row}/seed{line.seeds[0]}/figures"
        # Weights and maps are the training's, whatever head was tested.
        title = f"{line.title.removesuffix(f', {NAMES[line.head]}')}, seed {line.seeds[0]}"
        groups = "true classes" if line.kind == "oracle" else "clusters"
        shown = {
            f"{inside}/clusters.png": f"{title}: attention in some {groups}",
            f"{inside}/feature_maps.png": f"{title}: images of some {groups}, and what the "
            "convolutions make of them",
        }
        if all((folder / name).exists() for name in shown):
            return shown
    return {}


def csv_text(lines: Sequence[Line]) -> str:
    """Write one row for each cell, ours or the paper's; accuracies in %."""
    header = (
        "part", "line", "row", "head", "kind", "at", "paper", "paper_half", "ours", "ci95", "runs",
        "seeds", "by_seed", "steps", "train_seconds", "verdict", "chance", "commit", "device",
    )  # fmt: skip
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        for at in columns([line]):
            cell, published = line.cells.get(at), line.paper.get(at)
            row: dict[str, Any] = {
                "part": line.part,
                "line": line.title,
                "row": line.row,
                "head": line.head,
                "kind": line.kind,
                "at": label(at),
                "paper": published,
                "paper_half": "" if published is None else published.half,
            }
            if cell is not None:
                row |= {
                    "ours": f"{100 * cell.accuracy:.2f}",
                    "ci95": f"{100 * cell.ci95:.2f}",
                    "runs": cell.runs,
                    "seeds": " ".join(map(str, line.seeds)),
                    "by_seed": " ".join(f"{100 * mean:.2f}" for mean in cell.by_seed),
                    "steps": line.steps,
                    "train_seconds": ""
                    if line.kind == "baseline"
                    else mean_of(line, lambda r: r["meta_train"]["seconds"]),
                    "verdict": "" if published is None else verdict(cell, published),
                    "chance": f"{100 * cell.chance:.2f}",
                    "commit": all_of(line, "commit"),
                    "device": all_of(line, "device"),
                }
            writer.writerow(row)
    return buffer.getvalue()


def _images(figures: Mapping[str, str]) -> list[str]:
    """Show figures, each above its caption."""
    shown = [
        (f"![{Path(path).stem.replace('_', ' ')}]({quote(path)})", caption)
        for path, caption in figures.items()
    ]
    return [block for both in shown for block in both]


def _code(commands: Sequence[str]) -> str:
    return "\n".join(f"    {command}" for command in commands) or "    (nothing has been run)"


def _markdown(sheet: Sheet, *, level: int) -> str:
    parts = [f"{'#' * level} {sheet.heading}", sheet.text]
    if sheet.header:
        parts.append(markdown.table(sheet.header, sheet.rows))
    return "\n\n".join(parts)


def _page(
    table: Table,
    sheets: Sequence[Sheet],
    figures: Mapping[str, str],
    commands: Sequence[str],
    folder: Path,
) -> str:
    """Write one page that needs no other file."""
    title = html.escape(table.title)
    parts = [f"<h1>{title}</h1>"]
    for sheet in sheets:
        parts += [f"<h2>{_inline(sheet.heading)}</h2>", f"<p>{_inline(sheet.text)}</p>"]
        if sheet.header:
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in sheet.header)
            rows = [
                f"<tr>{''.join(f'<td>{_inline(c)}</td>' for c in row)}</tr>" for row in sheet.rows
            ]
            parts.append(
                f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(rows) + "</table></div>"
            )
    for name, caption in figures.items():
        data = base64.b64encode((folder / name).read_bytes()).decode()
        alt = html.escape(caption, quote=True)
        image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{_inline(caption)}</figcaption></figure>")
    parts += ["<h2>Commands</h2>", f"<pre>{html.escape(chr(10).join(commands))}</pre>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _inline(text: str) -> str:
    """Turn the Markdown of a cell, bold and code, into HTML."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text, quote=False))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
