"""What the command line of `experiments/tables.py` asks for."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from console import say, split_overrides, user_errors

from meml_jax import (
    checks,
    comparison,
    documents,
    stored_results,
    table_checks,
    table_flags,
    tables,
)
from meml_jax.config import Config
from meml_jax.files import expand_home
from meml_jax.types import UserError

ROOT = Path(__file__).parents[1]

Runs = dict[tuple[str, int], Config]
"""Settings by row and seed."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
      name: of the table, or the path of its file, as given.
      table: the table.
      runs: settings of the runs asked for; with `--report_only` there are none.
      results: folder of all tables' runs.
      presets: of the config file, for all rows.
      document: Markdown file that gets the table's block; None: there is none.
      label: tells several versions of a table in one file apart.
      figures: whether the document gets figures.
      report_only: whether nothing is done but the report.
    """

    name: str
    table: tables.Table
    runs: Runs
    results: Path
    presets: str
    document: Path | None
    label: str
    figures: bool
    report_only: bool

    @property
    def folder(self) -> Path:
        """Folder of the table."""
        return self.results / Path(self.name).stem

    @property
    def block(self) -> str:
        """Name of the table's block in a document."""
        return ", ".join(filter(None, (self.folder.name, self.label)))

    def workdir(self, row: str, seed: int) -> Path:
        """Workdir of a run."""
        return self.folder / row / f"seed{seed}"

    def kept(self, document: Path) -> Path:
        """Folder beside the document that keeps what its block is made of."""
        return documents.beside(document) / self.label / self.folder.name

    def only(self, stored: stored_results.Stored) -> stored_results.Stored:
        """Results that come to the block: of the runs asked for, with `--report_only` all."""
        return stored if self.report_only else stored_results.of_runs(stored, self.runs)

    def lines(self, stored: stored_results.Stored) -> list[comparison.Line]:
        """Make the table's lines of what is stored."""
        table = self.table

        def bare(name: str) -> Config:
            choice = tables.Choice(presets=table_flags.presets_of(table, name, ROOT, self.presets))
            return tables.settings(table, name, ROOT, choice, seed=0)

        return comparison.make_lines(table, {name: bare(name) for name in table.rows}, stored)

    def commands(self, lines: Sequence[comparison.Line]) -> list[str]:
        """Write the commands that make what the lines hold."""
        return table_flags.commands(self.table, self.name, lines, ROOT, presets=self.presets)


def define_flags() -> flags.FlagValues:
    """Define what the command line may have, beside overrides of settings."""
    values = flags.FlagValues()
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    text("table", None, "Name of a file in configs/tables, or a path.")
    text("results", "runs/tables", "Folder of all tables' runs.")
    text("data_root", None, "Folder with a folder of each data set's name.")
    text("presets", "", "Presets of the config file for all rows.")
    text("write_docs", None, "Markdown file that gets the table; results are kept beside it.")
    text("label", "", "Tells several versions of a table in one file apart.")
    flags.DEFINE_list("rows", None, "Rows, by name; all.", flag_values=values)
    flags.DEFINE_list("seeds", ["0"], "Seeds, each a run of its own.", flag_values=values)
    flags.DEFINE_enum(
        "budget", "paper", list(tables.BUDGETS), "How much to do.", flag_values=values
    )
    flags.DEFINE_bool("figures", True, "Figures in the document too.", flag_values=values)
    flags.DEFINE_bool(
        "report_only", False, "Write the report of what is there.", flag_values=values
    )
    return values


def check_results(folder: Path) -> None:
    """Raise UserError where no runs can be put into a folder, before the first one."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is no folder" if not there.is_dir() else "cannot be written to"
        raise UserError(f"--results={folder}: {there} {what}; name another folder")


def parse(argv: list[str]) -> Asked:
    """Read the command line."""
    overrides, rest = split_overrides(argv)
    given = define_flags()
    with user_errors():
        unknown = given(rest)[1:]
        if unknown:
            raise UserError(f"got the argument {unknown[0]!r}, expected only flags")
        if given.table is None:
            raise UserError("--table=NAME is needed, e.g. --table=omniglot")
        table = tables.load(given.table, ROOT)
        root = given.data_root and expand_home(given.data_root)
        choice = tables.Choice(given.budget, given.presets, root)
        settings = functools.partial(tables.settings, table, root=ROOT)
        for name in ("results", "data_root", "write_docs"):
            if given[name].value == "":
                raise UserError(f"--{name} is empty, expected a path; name one or leave it out")
        if given.rows == []:
            raise UserError(f"--rows is empty, expected one or more of {', '.join(table.rows)}")
        names = given.rows or list(table.rows)
        if not all(seed.isdecimal() for seed in given.seeds) or not given.seeds:
            raise UserError(f"--seeds={','.join(given.seeds)}, expected numbers such as 0,1")
        seeds = [int(seed) for seed in given.seeds]
        bare = {name: settings(name, choice=choice, seed=seeds[0]) for name in names}
        table_checks.check_overrides(bare, overrides)
        choice = tables.Choice(given.budget, given.presets, root, overrides)
        runs = {
            (name, seed): settings(name, choice=choice, seed=seed)
            for name in names
            for seed in seeds
        }
        chosen = {name: config for (name, _), config in runs.items()}
        table_checks.check_rows(table, chosen, ROOT, given.budget)
        asked = Asked(
            given.table,
            table,
            {} if given.report_only else runs,
            expand_home(given.results),
            given.presets,
            given.write_docs and expand_home(given.write_docs),
            given.label,
            given.figures,
            given.report_only,
        )
        asked.lines({})  # whose settings the report needs, of all rows
    for config in asked.runs.values():
        checks.before_loading(config)
    if not asked.report_only:
        check_results(asked.results)
    if root and not asked.report_only:
        for name in tables.data_without_folder(chosen.values()):
            say(f"data: {root} has no folder {name}; it is fetched, if that can be")
    return asked
