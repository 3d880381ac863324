"""The sheets of a table's report: accuracies beside the paper's, runs, costs, as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meml_jax import paper, row_settings
from meml_jax.cells import COMPARED, Cell, verdict
from meml_jax.comparison import Line, columns, in_order, is_best, label
from meml_jax.config import Config
from meml_jax.differences import make_differences
from meml_jax.environment import each_once
from meml_jax.intervals import SEEDS_FOR_INTERVAL
from meml_jax.report import FEWEST_STEPS
from meml_jax.rounding import percent, plain
from meml_jax.settings import flatten

KEY = (
    "Accuracy in %, ± half of the 95 % confidence interval of the mean: over seeds where there are "
    "three or more, else over the test's runs, which says nothing of another training. Then "
    "whether ours lies above or below the paper's number, or its interval holds that (within). "
    "Bold: the best of ours on the same test, baselines included, oracles only where all rows are. "
    "`-`: not measured."
)
NO_VERDICT = {
    "at chance": "At chance: the interval holds the accuracy of guessing.",
    "no spread": "No spread: all runs are equal.",
}
ONE_DRAW = (
    "**Protocol `released`: all runs are on one draw of classes and images.** ± is of the initial "
    "output layers alone, 0 where a head has none; how far another draw would lie it does not say."
)
OTHER_HEADS = (
    "The same trainings, tested in other ways. Bold: the best of this table and of the baselines "
    "above, likewise."
)


class Sheet(NamedTuple):
    """A heading, what is said about it, and rows of cells in Markdown; no header: no rows."""

    heading: str
    text: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def make_sheets(lines: Sequence[Line]) -> list[Sheet]:
    """Lay out a table: what the paper has, our other heads, the runs, their cost."""
    sheets = []
    for part in parts_of(lines):
        here = [line for line in lines if line.part == part]
        heading = part or "Accuracy"
        sheets.append(_accuracies(heading, KEY, [line for line in here if line.named], here))
        others = [line for line in here if not line.named]
        if others:
            sheets.append(_accuracies(f"{heading}: other heads", OTHER_HEADS, others, here))
        sheets += _differences(here)
    return [*sheets, *_runs(lines), *_costs(lines)]


def parts_of(lines: Sequence[Line]) -> list[str]:
    """List the parts that a table has, in order; where some have been measured, those only."""
    measured = [line for line in lines if line.cells]
    return list(dict.fromkeys(line.part for line in measured or lines))


def trainings(lines: Sequence[Line]) -> list[Line]:
    """Keep one line of each training that there is."""
    found = {(x.row, x.seeds): x for x in reversed(lines) if x.results and x.kind != "baseline"}
    return [line for line in lines if any(line is one for one in found.values())]


def all_of(line: Line, field: str) -> str:
    """List the values of a field over the seeds, of embeddings, trainings and tests, each once."""
    values = (
        (one.get(f"embedding_{field}"), one["meta_train"].get(field), one.get(field))
        for one in line.results
    )
    return each_once(value for every in values for value in every if value) or "-"


def _accuracies(heading: str, text: str, lines: Sequence[Line], part: Sequence[Line]) -> Sheet:
    measured = [line for line in part if line.cells]
    not_run = [line.title for line in lines if measured and not line.cells]
    lines = [line for line in lines if line.cells or not measured]
    at, shown = columns(measured or part), {id(line) for line in lines}
    rivals = [line for line in part if line.kind == "baseline" or id(line) in shown]
    rows = [
        [line.title, plain(line.steps), _list(line.seeds), _counts(line)]
        + [_cell(line, place, bold=is_best(line, rivals, place)) for place in at]
        for line in lines
    ]
    chance = {place: cell.chance for line in part for place, cell in line.cells.items()}
    if chance:
        rows.append(["chance", "-", "-", "-", *(percent(chance.get(place)) for place in at)])
    head = "ways,shots" if at and not isinstance(at[0], int) else "classes"
    steps = {line.steps for line in lines if line.steps is not None}
    notes = (str(r["note"]).split("; ") for line in lines for r in line.results if r.get("note"))
    facts = [text, *(f"Data: {one}." for one in dict.fromkeys(x for note in notes for x in note))]
    said = {
        verdict(line.cells[place], line.paper[place])
        for line in lines
        for place in line.cells.keys() & line.paper.keys()
    }
    facts += [told for name, told in NO_VERDICT.items() if name in said]
    if not_run:
        facts.append(f"Not run: {'; '.join(not_run)}.")
    facts += [ONE_DRAW] * any(map(_of_one_draw, lines))
    if len(steps) > 1:
        facts.append("Rows differ in meta-steps.")
    if 1 < max(steps, default=0) < FEWEST_STEPS:
        facts.append("**So few steps show that the program runs, and nothing of the method.**")
    facts += row_settings.unlike(lines)
    datasets = {line.config.data.name for line in lines if line.results}
    longer = max((paper.STEPS.get(dataset, 0) for dataset in datasets), default=0)
    if head == "classes" and max(steps, default=longer) < longer:
        facts.append(f"The paper trains {longer:,} steps.")
    if any(number.half is not None for line in lines for number in line.paper.values()):
        facts.append("The paper's ± is taken as an interval: within is where ours meets it.")
    seeds = {len(line.seeds) for line in lines}
    if any(1 < n < SEEDS_FOR_INTERVAL for n in seeds):
        facts.append("± of two seeds is that of their mean, over the runs of each.")
    return Sheet(heading, " ".join(facts), [head, "steps", "seeds", "runs", *map(label, at)], rows)


def _of_one_draw(line: Line) -> bool:
    return bool(line.results) and line.config.test.protocol == "released"


def _cell(line: Line, at: Any, *, bold: bool) -> str:
    cell, published = line.cells.get(at), line.paper.get(at)
    if cell is None:
        return "-" if published is None else f"- (paper {paper.written(published)})"
    text = f"{percent(cell.accuracy)} ± {percent(cell.ci95)}"
    if bold:
        text = f"**{text}**"
    if published is not None:
        said, number = verdict(cell, published), paper.written(published)
        text += f", {said} {number}" if said in COMPARED else f", {said} (paper {number})"
    return text


def _differences(lines: Sequence[Line]) -> list[Sheet]:
    """Put the rows of a part against each other, where the table says which."""
    found = make_differences(lines)
    at = in_order({place for one in found for place in one.cells})
    rows = []
    for one in found:
        cells = [one.cells.get(place) for place in at]
        rows.append([one.title, _list(one.seeds), *("-" if c is None else _gap(c) for c in cells)])
    heading = f"{lines[0].part}: differences" if lines[0].part else "Differences"
    text = (
        "Paired differences in percentage points, the first row minus the second on the same runs "
        "(classes, images, order); ± as above, each seed's in brackets."
    )
    facts = [text, *row_settings.unlike([line for one in found for line in one.lines])]
    facts += [ONE_DRAW] * any(_of_one_draw(line) for one in found for line in one.lines)
    header = ["rows", "seeds", *map(label, at)]
    return [Sheet(heading, " ".join(facts), header, rows)] if rows else []


def _gap(cell: Cell) -> str:
    each = ", ".join(map(_signed, cell.by_seed))
    seeds = f" ({each})" if len(cell.by_seed) > 1 else ""
    return f"{_signed(cell.accuracy)} ± {percent(cell.ci95)}{seeds}"


def _signed(share: float) -> str:
    text = percent(share)
    return "0.0" if float(text) == 0 else text if share < 0 else f"+{text}"


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
            mean_of(line, lambda r: r["clustering"]["kept"]),
            "-" if true else mean_of(line, lambda r: r["clustering"]["purity"], ".3f"),
            mean_of(line, lambda r: r.get("embedding_seconds")),
            mean_of(line, lambda r: r["clustering"].get("seconds")),
            mean_of(line, lambda r: r["meta_train"]["seconds"]),
            mean_of(line, _test_seconds),
            all_of(line, "device"),
            all_of(line, "commit"),
        ])  # fmt: skip
    text = (
        "Means over the seeds, - where one has none. An embedding and clusters that rows share "
        "were made once; their seconds stand in each row."
    )
    return [Sheet("Runs", text, header, rows)] if rows else []


def _costs(lines: Sequence[Line]) -> list[Sheet]:
    """Put time and memory of the trainings beside the paper's, as far as it has them."""
    rows = []
    for line in trainings(lines):
        first, theirs = line.results[0], _published_cost(line)
        minutes, gigabytes = theirs or (None, None)
        rows.append([
            line.row,
            str(first["meta_train"]["steps"]),
            mean_of(line, lambda r: r["meta_train"]["seconds"]),
            mean_of(line, lambda r: r["meta_train"]["steps_per_second"], ".1f"),
            mean_of(line, lambda r: _mebibytes(r["meta_train"].get("peak_bytes"))),
            str(paper.STEPS[first["dataset"]]) if theirs else "-",
            "-" if minutes is None else f"{minutes // 60} h {minutes % 60} min",
            "-" if gigabytes is None else f"{gigabytes:.3f} GB",
        ])  # fmt: skip
    header = [
        "row", "steps", "seconds", "steps/s", "peak MiB", "paper: steps", "paper: time",
        "paper: memory",
    ]  # fmt: skip
    text = (
        "Of the meta-training, mean over the seeds; peak memory is that of the compiled steps. "
        "Other processes may have shared the device, so seconds do not compare methods: "
        "`experiments/benchmark.py` does. The paper does not name its GPU."
    )
    return [Sheet("Cost", text, header, rows)] if rows else []


_OF_A_STEP = (
    "network.channels", "network.hidden", "tasks.balance", "tasks.query_from", "tasks.rotations",
    "inner.steps", "outer.meta_batch",
)  # fmt: skip
"""What a step's cost depends on, and the paper has one cost for."""


def _published_cost(line: Line) -> tuple[int, float] | None:
    """Look up the paper's minutes and GB, where a training is of the kind that it has them for."""
    config, first = line.config, line.results[0]
    values, usual = flatten(config), flatten(Config())
    as_wide_and_plain = all(values[field] == usual[field] for field in _OF_A_STEP)
    meant = flatten(line.defined or config)  # as many images in a step as the table says
    as_many = all(values[field] == meant[field] for field in ("tasks.max_size", "tasks.min_used"))
    only_embedded = first["meta_train"]["steps"] == 1  # of a row that tests an embedding's FEN
    if line.kind == "oracle" or only_embedded or not (as_wide_and_plain and as_many):
        return None
    return paper.COST.get(first["dataset"], {}).get(config.learner)


def _test_seconds(results: Mapping[str, Any]) -> float:
    curves = (results["meta_test"], *results["comparisons"])
    return sum(point["seconds"] for curve in curves for point in curve["points"])


def _mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def mean_of(line: Line, get: Callable[[Any], float | None], form: str = ".0f") -> str:
    """Write the mean of a figure over the seeds; - where a seed has none."""
    values = list(map(get, line.results))
    known = [value for value in values if value is not None]
    whole = known and len(known) == len(values)
    return format(sum(known) / len(known), form) if whole else "-"


def _counts(line: Line) -> str:
    counts = sorted({cell.runs for cell in line.cells.values()})
    return _list(counts) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "-"
