"""Ours beside the paper's: the lines of a table, from stored results alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meml_jax import paper
from meml_jax.cells import NO_WIDTH, Cell, combine
from meml_jax.config import Config
from meml_jax.curves import BASELINES, NAMES, depends_on
from meml_jax.fingerprints import fingerprint
from meml_jax.influence import settings_of
from meml_jax.learners import LEARNERS
from meml_jax.paper import Published
from meml_jax.settings import WITHOUT_INFLUENCE, from_dict
from meml_jax.stored_results import IMAGES, Stored
from meml_jax.tables import Row, Table
from meml_jax.types import UserError

At = int | tuple[int, int]
"""Where a curve is measured: a number of classes, or (ways, shots)."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table.

    Attributes:
      part: heading under which it stands.
      row: training that it comes from.
      title: its name, the paper's where the paper has it.
      head: that was tested.
      kind: oracle, unsupervised or baseline.
      named: whether the table names it, other heads aside.
      paper: the paper's accuracies, as far as it has them.
      published: name of the paper's line; empty if it has none.
      cells: ours, as far as they are measured.
      seeds: of ours.
      steps: of meta-training; None: not run, or not trained.
      results: `results.json` of each seed.
      beside: row that this one is compared with, run by run; none if empty.
      defined: settings of its row as the table has them, whatever seed, budget and overrides.
    """

    part: str
    row: str
    title: str
    head: str
    kind: str
    named: bool
    paper: Mapping[At, Published]
    cells: Mapping[At, Cell]
    seeds: tuple[int, ...] = ()
    steps: int | None = None
    results: tuple[dict[str, Any], ...] = ()
    beside: str = ""
    published: str = ""
    defined: Config | None = None

    @functools.cached_property
    def config(self) -> Config:
        """Settings of the first seed, of a line that is measured."""
        return from_dict(self.results[0]["config"])


def is_best(line: Line, lines: Sequence[Line], at: At) -> bool:
    """Tell whether ours is the best there of those of `lines` that have the same test.

    Oracles only count where all rows are.
    """
    measured = [one for one in lines if at in one.cells and _test(one) == _test(line)]
    unsupervised = any(one.kind == "unsupervised" for one in measured)
    fair = [one for one in measured if one.kind != "oracle" or not unsupervised]
    top = max((one.cells[at].accuracy for one in fair), default=0.0)
    return any(one is line and one.cells[at].accuracy >= top - NO_WIDTH for one in fair)


def _test(line: Line) -> tuple[Any, ...]:
    """List what decides on a test: images, protocol, queries, shots; not how many runs it has."""
    if not line.results:
        return ()
    config = line.config
    shots = None if config.episodes.ways else config.test.shots  # of episodes they are the column's
    return _images(line), config.test.protocol, config.test.queries, shots


def _images(line: Line) -> str | None:
    """Digest of the images that a line is tested on."""
    first = line.results[0]
    found: str | None = first.get("test_hash") or first.get("content_hash")
    return found


def points_of(results: Mapping[str, Any], head: str) -> dict[At, Mapping[str, Any]]:
    """List the points of a head's curve in `results.json` by where they lie."""
    found: dict[At, Mapping[str, Any]] = {}
    for curve in (results["meta_test"], *results["comparisons"]):
        for point in curve["points"] if curve["head"] == head else []:
            n: int = point["num_classes"]
            found[(n, point["shots"]) if "shots" in point else n] = point
    return found


def label(at: At) -> str:
    """Name a column: `10`, or `20,5` for ways and shots."""
    return str(at) if isinstance(at, int) else f"{at[0]},{at[1]}"


def columns(lines: Sequence[Line]) -> list[At]:
    """List where anything is measured, by us or by the paper."""
    return in_order({at for line in lines for at in (*line.cells, *line.paper)})


def in_order(places: Iterable[At]) -> list[At]:
    """Sort numbers of classes, or (ways, shots)."""
    return sorted(places, key=lambda at: (at,) if isinstance(at, int) else at)


def make_lines(table: Table, configs: Mapping[str, Config], stored: Stored) -> list[Line]:
    """Make the lines of a table, its parts one after another; baselines stand last in a part.

    What learns nothing is the same beside all rows that are tested in the same way, and stands
    there once for them. Where a part has several tests, it is named after what is tested.

    Args:
      table: the table.
      configs: settings of its rows, whatever the seed.
      stored: of `stored_results.read`.

    Raises:
      UserError: a row names a line of the paper that there is not.
    """
    for name, row in table.rows.items():
        known = _published(configs[name])
        if unknown := [line for line in row.published.values() if line not in known]:
            raise UserError(
                f"row {name!r} has published={unknown[0]!r}, expected a line of the paper: "
                f"{', '.join(known) or 'it has none for these images'}"
            )
    lines: list[Line] = []
    for part in dict.fromkeys(row.part for row in table.rows.values()):
        rows = [name for name, row in table.rows.items() if row.part == part]
        here = [line for n in rows for line in _of_row(table, n, configs[n], stored.get(n, {}))]
        lines += [line for line in here if line.kind != "baseline"]
        names = {n: next(iter(table.rows[n].lines.values())) for n in rows}
        lines += _each_once([line for line in here if line.kind == "baseline"], names)
    return lines


def _each_once(baselines: Sequence[Line], names: Mapping[str, str]) -> list[Line]:
    """Keep one of the lines that are the same; those that stand beside most rows come first.

    `names` has what the rows are called.
    """
    kept: list[tuple[int, Line]] = []
    for head in BASELINES:
        same: dict[str, list[Line]] = {}
        for line in baselines:
            if line.head == head:
                same.setdefault(_follows_from(line), []).append(line)
        groups = sorted(same.values(), key=len, reverse=True)
        tested = [_tested(lines[0]) for lines in groups]
        beside = ["; ".join(dict.fromkeys(names[x.row] for x in lines)) for lines in groups]
        for place, (lines, name) in enumerate(zip(groups, tested, strict=True)):
            if tested.count(name) > 1:  # in another way, or with other seeds
                where = "" if len(set(tested)) == 1 else f"{name}, "
                name = f"{where}beside {beside[place]}"
                if beside.count(beside[place]) > 1:
                    name += f", seeds {', '.join(map(str, lines[0].seeds))}"
            title = lines[0].title + f" ({name})" * (len(groups) > 1)
            kept.append((place, dataclasses.replace(lines[0], title=title)))
    return [line for _, line in sorted(kept, key=lambda pair: pair[0])]


def _follows_from(line: Line) -> str:
    """Digest of what a baseline's numbers follow from: images, settings of the test, seeds."""
    config = line.config
    test, network = config.test, None
    if line.head == "untrained":
        # What attention pools are the features of learners that have one.
        learner = LEARNERS.get(config.learner)
        pools = config.network.attention_feature if learner and learner.uses_attention else "relu"
        network = dataclasses.replace(config.network, attention_feature=pools)
    if not config.episodes.ways:
        test = dataclasses.replace(depends_on(line.head, test), num_classes=test.num_classes)
    return fingerprint(_images(line), test, network, line.seeds)


def _tested(line: Line) -> str:
    """Say which classes the runs of a line draw from."""
    config = line.config
    other = config.test_data.name
    return f"all classes of {other}" if other else f"test classes of {config.data.name}"


def _of_row(
    table: Table, name: str, config: Config, runs: Mapping[int, dict[str, Any]]
) -> list[Line]:
    """Make the lines of one training; seeds of other settings give lines of their own."""
    row = table.rows[name]
    first = next(iter(row.lines.values()))
    lines: list[Line] = []
    for head in _heads(runs):
        groups = _same_settings(runs, head)
        for seeds in groups:
            results = tuple(runs[seed] for seed in seeds)
            # What was done, whatever the table would do now.
            used = from_dict(results[0]["config"])
            published = _published(used)
            others = f" (seeds {', '.join(map(str, seeds))})" if len(groups) > 1 else ""
            title = row.lines.get(head, f"{first}, {NAMES[head]}")
            baseline = head in BASELINES
            line = Line(
                part=row.part,
                row=name,
                title=NAMES[head] if baseline else title + others,
                head=head,
                kind="baseline" if baseline else _kind(used),
                named=head in row.lines or baseline,
                paper=published.get(_paper_name(row, head), {}),
                published=_paper_name(row, head),
                cells=_cells(results, head),
                seeds=tuple(seeds),
                steps=None if baseline else int(results[0]["meta_train"]["steps"]),
                results=results,
                beside=row.beside,
                defined=config,
            )
            lines.append(line)
    done, used = {line.head for line in lines}, lines[0].config if lines else config
    kind, published = _kind(used), _published(used)
    lines += [
        Line(
            part=row.part,
            row=name,
            title=title,
            head=head,
            kind=kind,
            named=True,
            paper=published.get(_paper_name(row, head), {}),
            published=_paper_name(row, head),
            cells={},
            defined=config,
        )
        for head, title in row.lines.items()
        if head not in done
    ]
    order = [*row.lines, *(line.head for line in lines)]
    return sorted(lines, key=lambda line: order.index(line.head))


def _paper_name(row: Row, head: str) -> str:
    """Name of the paper's line that a head of a row stands beside; empty if there is none."""
    return row.published.get(head, row.lines.get(head, ""))


def _cells(results: Sequence[Mapping[str, Any]], head: str) -> dict[At, Cell]:
    points: dict[At, list[Mapping[str, Any]]] = {}
    for one in results:
        for at, point in points_of(one, head).items():
            points.setdefault(at, []).append(point)
    return {at: combine(of_seeds) for at, of_seeds in points.items()}


def _heads(runs: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """List the heads that seeds were tested with, in the order of the first seed."""
    every = [(one["meta_test"], *one["comparisons"]) for _, one in sorted(runs.items())]
    return list(dict.fromkeys(curve["head"] for curves in every for curve in curves))


def _same_settings(runs: Mapping[int, Mapping[str, Any]], head: str) -> list[list[int]]:
    """Group the seeds with a head by all else that its numbers depend on."""
    groups: dict[str, list[int]] = {}
    for seed, results in sorted(runs.items()):
        if not (points := points_of(results, head)):
            continue
        config = from_dict(results["config"])
        values = {k: v for k, v in settings_of(config, head).items() if k not in WITHOUT_INFLUENCE}
        values.pop("seed", None)
        steps = None if head in BASELINES else results["meta_train"]["steps"]
        images = [results.get(name) for name in IMAGES]
        runs_of_test = config.test.episodes if config.episodes.ways else config.test.runs
        same = fingerprint(values, steps, runs_of_test, str(list(points)), images)
        groups.setdefault(same, []).append(seed)
    return list(groups.values())


def _kind(config: Config) -> str:
    return "oracle" if config.tasks.labels == "true" else "unsupervised"


def _published(config: Config) -> Mapping[str, Mapping[Any, Published]]:
    """The paper's rows for the data set, or pair of data sets, of a run."""
    other = config.test_data.name
    dataset = f"{config.data.name}_{other}" if other else config.data.name
    return paper.few_shot_rows(dataset) if config.episodes.ways else paper.paper_rows(dataset)
