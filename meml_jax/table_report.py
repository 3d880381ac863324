"""The report of a table: Markdown, CSV, one HTML page, and a block in a document."""

from __future__ import annotations

import base64
import csv
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meml_jax import paper, table_figures
from meml_jax.comparison import Line, columns, is_best, verdict
from meml_jax.config import Config
from meml_jax.environment import each_once
from meml_jax.files import write_atomic
from meml_jax.report import percent, plain
from meml_jax.settings import from_dict
from meml_jax.table_figures import label
from meml_jax.tables import Table
from meml_jax.types import UserError

KEY = (
    "Accuracy in %, ± half of the 95 % interval, over runs or over several seeds, then where the "
    "interval lies against the paper's number: above, within (it holds the number) or below. Bold: "
    "the best of ours in this table, oracles aside if there is anything else. `-`: not measured."
)
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; }
body { padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 1.5rem; }
th, td { border: 1px solid #8886; padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: #8882; }
img { background: #fff; border-radius: 4px; max-width: 100%; padding: 6px; }
pre { background: #8882; overflow-x: auto; padding: .6rem; }
"""


class Sheet(NamedTuple):
    """A heading, what is said about it, and rows of cells in Markdown; no header: no rows."""

    heading: str
    text: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def write(
    folder: Path, table: Table, lines: Sequence[Line], commands: Sequence[str], said: str
) -> str:
    """Write `report.md`, `report.csv`, `report.html` and `figures/` into the table's folder.

    Args:
      folder: of the table.
      table: what is reported.
      lines: of `comparison.make_lines`.
      commands: that made what there is.
      said: a sentence on where the numbers come from, for the document.

    Returns:
      Markdown of all sheets, without figures and with headings of level 3, for a document.
    """
    figures = {}
    for i, part in enumerate(_parts(lines)):
        here = [line for line in lines if line.part == part]
        name = f"figures/part{i + 1}.png" if part else "figures/accuracy.png"
        if any(line.cells or line.paper for line in here):
            title = f"{table.title}{f', {part}' if part else ''}"
            table_figures.draw(here, folder / name, title=title)
            figures[name] = title
            cost = name.replace(".png", "_cost.png")
            if table_figures.draw_cost(here, folder / cost, title=title):
                figures[cost] = f"{title}: cost and accuracy"
    sheets = make_sheets(table, lines)
    body = [_markdown(sheet, level=2) for sheet in sheets]
    images = [f"![{title}]({name})" for name, title in figures.items()]
    shown = ["## Figures", *images] if images else []
    text = [f"# {table.title}", *body, *shown, "## Commands", _code(commands)]
    write_atomic(folder / "report.md", "\n\n".join(text) + "\n")
    write_atomic(folder / "report.csv", csv_text(lines))
    write_atomic(folder / "report.html", _page(table, sheets, figures, commands, folder))
    document = [_markdown(sheet, level=3) for sheet in sheets]
    return "\n\n".join([said, _code(commands), *document])


def make_sheets(table: Table, lines: Sequence[Line]) -> list[Sheet]:
    """Lay out a table: what the paper has, our other heads, the runs, their cost."""
    sheets = []
    for part in _parts(lines):
        here = [line for line in lines if line.part == part]
        heading = part or "Accuracy"
        sheets.append(_accuracies(heading, KEY, [line for line in here if line.named], here))
        others = [line for line in here if not line.named]
        if others:
            title, text = f"{heading}: other heads", "The same trainings, tested in other ways."
            sheets.append(_accuracies(title, text, others, here))
    return [*sheets, *_runs(lines), *_costs(lines)]


def csv_text(lines: Sequence[Line]) -> str:
    """Write one row for each cell, ours or the paper's; accuracies in %."""
    header = (
        "part", "line", "row", "head", "kind", "at", "paper", "ours", "ci95", "runs", "seeds",
        "by_seed", "steps", "verdict", "chance", "commit", "device",
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
            }
            if cell is not None:
                row |= {
                    "ours": f"{100 * cell.accuracy:.2f}",
                    "ci95": f"{100 * cell.ci95:.2f}",
                    "runs": cell.runs,
                    "seeds": " ".join(map(str, line.seeds)),
                    "by_seed": " ".join(f"{100 * mean:.2f}" for mean in cell.by_seed),
                    "steps": line.steps,
                    "verdict": "" if published is None else verdict(cell, published),
                    "chance": f"{100 * cell.chance:.2f}",
                    "commit": _all(line, "commit"),
                    "device": _all(line, "device"),
                }
            writer.writerow(row)
    return buffer.getvalue()


def insert(document: str, name: str, text: str) -> str:
    """Put a block into a document, in the place of the block of that name, else at its end.

    Raises:
      UserError: the block's beginning or end is missing, or there twice.
    """
    begin, end = f"<!-- begin {name} (generated) -->", f"<!-- end {name} -->"
    block = f"{begin}\n\n{text.strip()}\n\n{end}"
    found = (document.count(begin), document.count(end))
    if found == (0, 0):
        return f"{document.rstrip()}\n\n{block}\n" if document.strip() else f"{block}\n"
    if found != (1, 1) or document.index(begin) > document.index(end):
        raise UserError(f"expected one `{begin}` and after it one `{end}` in the document")
    before, rest = document.split(begin)
    return before + block + rest.split(end)[1]


def _parts(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.part for line in lines))


def _accuracies(heading: str, text: str, lines: Sequence[Line], part: Sequence[Line]) -> Sheet:
    at = columns(part)
    rows = [
        [line.title, plain(line.steps), _list(line.seeds), _counts(line)]
        + [_cell(line, place, bold=is_best(line, lines, place)) for place in at]
        for line in lines
    ]
    chance = {place: cell.chance for line in part for place, cell in line.cells.items()}
    if chance:
        rows.append(["chance", "-", "-", "-", *(percent(chance.get(place)) for place in at)])
    head = "ways,shots" if at and not isinstance(at[0], int) else "classes"
    steps = {line.steps for line in lines} - {None}
    notes = dict.fromkeys(str(r["note"]) for line in lines for r in line.results if r.get("note"))
    facts = [text, *(f"Data: {note}." for note in notes)]
    if len(steps) > 1:
        facts.append("Rows differ in meta-steps.")
    return Sheet(heading, " ".join(facts), [head, "steps", "seeds", "runs", *map(label, at)], rows)


def _cell(line: Line, at: Any, *, bold: bool) -> str:
    cell, published = line.cells.get(at), line.paper.get(at)
    if cell is None:
        return "-" if published is None else f"- (paper {_published(published)})"
    text = f"{percent(cell.accuracy)} ± {percent(cell.ci95)}"
    if bold:
        text = f"**{text}**"
    if published is not None:
        text += f", {verdict(cell, published)} {_published(published)}"
    return text


def _published(value: float) -> str:
    """Write a number in % with the decimals that the paper gives: one, or two."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def _runs(lines: Sequence[Line]) -> list[Sheet]:
    """Say how each training was made: settings, seconds, device, commit."""
    header = [
        "row", "seeds", "embedding", "clusters", "purity", "embed s", "cluster s", "train s",
        "test s", "device", "commit",
    ]  # fmt: skip
    rows = []
    for line in trainings(lines):
        first = line.results[0]
        clusters = first["clustering"]
        true = clusters["labels"] == "true"
        rows.append([
            line.row,
            _list(line.seeds),
            "true classes" if true else first["embedding"]["name"],
            str(clusters["kept"]),
            "-" if true else _mean(line, lambda r: r["clustering"]["purity"], ".3f"),
            _mean(line, lambda r: r.get("embedding_seconds")),
            _mean(line, lambda r: r["clustering"].get("seconds")),
            _mean(line, lambda r: r["meta_train"]["seconds"]),
            _mean(line, _test_seconds),
            _all(line, "device"),
            _all(line, "commit"),
        ])  # fmt: skip
    text = (
        "Seconds and purity are means over the seeds; an embedding and clusters that rows share "
        "were made once, and their seconds stand in each row."
    )
    return [Sheet("Runs", text, header, rows)] if rows else []


def _costs(lines: Sequence[Line]) -> list[Sheet]:
    """Put time and memory of the trainings beside the paper's, where it has any of them."""
    rows = []
    for line in trainings(lines):
        config, first = config_of(line), line.results[0]
        trained, known = first["meta_train"], paper.COST.get(first["dataset"], {})
        plain_tasks = config.tasks.balance == "none" and config.tasks.query_from != "coreset"
        theirs = known.get(config.learner) if plain_tasks and line.kind != "oracle" else None
        minutes, gigabytes = theirs or (None, None)
        rows.append([
            line.row,
            str(trained["steps"]),
            _mean(line, lambda r: r["meta_train"]["seconds"]),
            _mean(line, lambda r: r["meta_train"]["steps_per_second"], ".1f"),
            _mean(line, lambda r: _mebibytes(r["meta_train"].get("peak_bytes"))),
            "-" if minutes is None else f"{minutes // 60} h {minutes % 60} min",
            "-" if gigabytes is None else f"{gigabytes:.3f} GB",
        ])  # fmt: skip
    header = ["row", "steps", "seconds", "steps/s", "peak MiB", "paper: time", "paper: memory"]
    text = (
        "Of the meta-training, mean over the seeds. Peak memory is that of the compiled steps. The "
        "paper's GPU is not known; other processes may have shared our device."
    )
    compared = any(row[-1] != "-" for row in rows)
    return [Sheet("Cost", text, header, rows)] if compared else []


def trainings(lines: Sequence[Line]) -> list[Line]:
    """Keep one line of each training that there is."""
    found = {(x.row, x.seeds): x for x in reversed(lines) if x.results and x.kind != "baseline"}
    return [line for line in lines if any(line is one for one in found.values())]


def config_of(line: Line) -> Config:
    """Settings of a line's first seed."""
    return from_dict(line.results[0]["config"])


def _test_seconds(results: Mapping[str, Any]) -> float:
    curves = (results["meta_test"], *results["comparisons"])
    return sum(point["seconds"] for curve in curves for point in curve["points"])


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def _mean(line: Line, get: Callable[[Any], float | None], form: str = ".0f") -> str:
    values = [value for value in map(get, line.results) if value is not None]
    return format(sum(values) / len(values), form) if values else "-"


def _all(line: Line, field: str) -> str:
    """List the values of a field over the seeds, of trainings and tests, each once."""
    values = ((one["meta_train"].get(field), one.get(field)) for one in line.results)
    return each_once(value for both in values for value in both if value) or "-"


def _counts(line: Line) -> str:
    counts = sorted({cell.runs for cell in line.cells.values()})
    return _list(counts) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "-"


def _code(commands: Sequence[str]) -> str:
    return "\n".join(f"    {command}" for command in commands) or "    (nothing has been run)"


def _markdown(sheet: Sheet, *, level: int) -> str:
    parts = [f"{'#' * level} {sheet.heading}", sheet.text]
    if sheet.header:
        marks = ["---", *["---:"] * (len(sheet.header) - 1)]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in sheet.rows]
        grid = [sheet.header, marks, *rows]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in grid))
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
        parts.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
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
