"""A table of the paper as data: which runs it has, and what the lines of the table are called."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from meml_jax.config import Config
from meml_jax.curves import NAMES
from meml_jax.files import expand_home
from meml_jax.settings import (
    OWN_IMAGES,
    UnfitPreset,
    check_field,
    config_dict,
    did_you_mean,
    from_dict,
    override,
)
from meml_jax.types import UserError

SMOKE: dict[str, Any] = {
    "embedding.name": "pca",
    "embedding.dim": 32,
    "train.init": "random",  # there is no FEN in it
    "outer.fen_lr": None,
    "clustering.max_iter": 10,
    "network.channels": 8,
    "network.hidden": 32,
    "tasks.num_buckets": 2,
    "outer.lr": 1e-3,
    "train.steps": 100,
    "train.log_every": 50,
    "train.checkpoint_every": 100,
    "train.validate_every": 100,
    "test.runs": 5,
    "test.trajectories": 1,
    "test.learning_rates": (0.01, 0.001),
    "test.episodes": 20,
}
BUDGETS: dict[str, dict[str, Any]] = {"smoke": SMOKE, "short": {"train.steps": 10_000}, "paper": {}}
"""What a budget sets in every row: `smoke` shows that all of it works, in minutes; `paper` trains
as long as the table's config file says, which is as long as the paper did where it says so."""

_REPORT = ("figures", "report.md", "report.csv", "report.html")  # beside the rows' folders


@dataclasses.dataclass(frozen=True)
class Row:
    """One training, which gives a line of the table for each head that is tested.

    Attributes:
      lines: head to the name of its line, in `paper.PAPER` where the paper has the line; a head
        that is not here is named after the first one.
      presets: of the table's config file, separated by commas.
      values: further settings.
      part: heading under which the line stands, where a table has several parts.
      config: file in configs/ that the row starts from; the table's if empty.
      beside: name of the row that this one is compared with, run by run; none if empty.
      published: head to the name of the paper's line, where `lines` has another one.
    """

    lines: Mapping[str, str]
    presets: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    part: str = ""
    config: str = ""
    beside: str = ""
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that stand beside each other.

    Attributes:
      title: of the report.
      config: file in configs/ that rows start from.
      rows: by name, which is also the name of the row's folder.
      smoke: what the budget `smoke` sets here, beside `SMOKE`.
    """

    title: str
    config: str
    rows: Mapping[str, Row]
    smoke: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the user chose for all rows of a table.

    Attributes:
      budget: name in `BUDGETS`.
      presets: of the config file, before those of the row.
      data_root: folder whose folders are named after the data sets; None: not used.
      overrides: `--config.a.b=value`, as on the command line; they win.
    """

    budget: str = "paper"
    presets: str = ""
    data_root: Path | None = None
    overrides: tuple[str, ...] = ()


def load(name: str, root: Path) -> Table:
    """Load a table by its name in configs/tables, or by the path of a file of one's own.

    Raises:
      UserError: there is no such table, or it is no table, or has the name of another one.
    """
    folder = root / "configs" / "tables"
    path = expand_home(name) if name.endswith(".py") else folder / f"{name}.py"
    if not path.is_file():
        names = sorted(file.stem for file in folder.glob("*.py"))
        raise UserError(
            f"--table={name!r}, expected one of {names} or a file{did_you_mean(name, names)}"
        )
    namesake = folder / path.name
    if namesake.exists() and not path.samefile(namesake):  # they would share folder and block
        raise UserError(f"{path} has the name of the table {path.stem!r}; rename the file")
    table = getattr(_module(path), "TABLE", None)
    if not isinstance(table, Table):
        raise UserError(f"{path}: got TABLE = {table!r}, expected a tables.Table")
    try:
        _check_types(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for own, row in table.rows.items():
        others = [n for n, one in table.rows.items() if one.part == row.part and n != own]
        if row.beside and row.beside not in others:
            raise UserError(
                f"{path}: row {own!r} has beside={row.beside!r}, expected another row of its part: "
                f"{', '.join(others) or 'there is none'}"
            )
    return table


def _check_types(table: Table) -> None:
    """Raise UserError where a table is not made of what `Table` and `Row` say, before any work."""
    if not all(map(_is_plain, (table.title, table.config))):
        raise UserError(
            f"got title={table.title!r}, config={table.config!r}, expected text of one line, "
            "without <!-- and -->"
        )
    if not isinstance(table.rows, Mapping) or not table.rows:
        raise UserError(f"got rows={table.rows!r}, expected rows by name, one or more")
    if not isinstance(table.smoke, Mapping):
        raise UserError(f"got smoke={table.smoke!r}, expected settings by field")
    _check_fields("smoke", table.smoke)
    for name, row in table.rows.items():
        odd = not _is_plain(name) or "," in name or name in _REPORT
        if odd or not name or Path(name).name != name or name[0] == ".":
            raise UserError(
                f"got a row {name!r}, expected the name of a folder, without a comma or <!-- and "
                f"other than {', '.join(_REPORT)}"
            )
        if not isinstance(row, Row) or not (isinstance(row.lines, Mapping) and row.lines):
            raise UserError(f"got row {name!r} = {row!r}, expected a tables.Row with lines by head")
        texts = (*row.lines, *row.lines.values(), row.presets, row.part, row.config, row.beside)
        texts_only = all(map(_is_plain, texts))
        named = isinstance(row.published, Mapping) and all(
            isinstance(text, str) for text in (*row.published, *row.published.values())
        )
        if not (isinstance(row.values, Mapping) and texts_only and named):
            raise UserError(
                f"got row {name!r} = {row!r}, expected text of one line without <!--, values by "
                "field"
            )
        if unknown := sorted(set(row.lines) - set(NAMES)):
            raise UserError(
                f"got row {name!r} with the head {unknown[0]!r}, expected some of "
                f"{', '.join(NAMES)}"
            )
        _check_fields(f"row {name!r}", row.values)


def _is_plain(text: Any) -> bool:
    """Tell a text of one line that cannot be taken for a mark of a document's block."""
    marks = ("<!--", "-->")
    return isinstance(text, str) and text.isprintable() and not any(m in text for m in marks)


def _check_fields(where: str, values: Mapping[Any, Any]) -> None:
    """Raise UserError where settings of a table are not by dotted names of fields."""
    if {"seed", "seeds"} & set(values):
        raise UserError(f"{where} sets its seed; leave it to --seeds=0,1")
    for field in values:
        if not isinstance(field, str):
            raise UserError(f"got the field {field!r}, expected a name such as 'train.steps'")
        check_field(field)


def settings(table: Table, name: str, root: Path, choice: Choice, *, seed: int) -> Config:
    """Resolve a row: the config file with presets, the row, the budget, the user's overrides.

    Args:
      table: the table.
      name: of one of its rows.
      root: folder that the config files' paths start from.
      choice: the user's.
      seed: of the run.

    Raises:
      UserError: an unknown row, preset, field or value.
    """
    if name not in table.rows:
        raise UserError(
            f"--rows has {name!r}, expected one or more of {', '.join(table.rows)}"
            f"{did_you_mean(name, table.rows)}"
        )
    row = table.rows[name]
    presets = ",".join(filter(None, (choice.presets, row.presets))) or "paper"
    file = row.config or table.config
    if not (root / file).is_file() or Path(file).suffix != ".py":
        raise UserError(
            f"row {name!r}: config={file!r}, expected a Python file such as those in configs/"
        )
    module = _module(root / file)
    if not callable(getattr(module, "get_config", None)):
        raise UserError(f"{root / file}: expected a function get_config in it, as in configs/")
    try:
        config, chosen, bare = (
            from_dict(module.get_config(names).to_dict())
            for names in (presets, choice.presets or "paper", "paper")
        )
    except UnfitPreset as error:
        raise UnfitPreset(f"row {name!r} ({file}): {error}") from None
    own = config.embedding == chosen.embedding and "embedding.name" not in row.values
    if chosen.embedding != bare.embedding and not own:
        set_ = row.values.get("embedding.name", config.embedding.name)
        raise UnfitPreset(
            f"--presets={choice.presets} has another embedding than row {name!r}, which is one of "
            f"{set_!r}; leave --presets out, or choose other --rows"
        )
    budget = {**BUDGETS[choice.budget], **(table.smoke if choice.budget == "smoke" else {})}
    # The row comes last: what tells it from the other rows holds in every budget.
    if config.seeds > 1:
        raise UserError(
            f"{root / file} has seeds={config.seeds}; leave it out, and use --seeds=0,1"
        )
    try:
        config = override(config, {**budget, **row.values, "seed": seed})
    except UserError as error:
        raise UserError(f"row {name!r}: {error}") from None
    config = override(config, _folders(config, choice.data_root))
    return _overridden(config, choice.overrides) if choice.overrides else config


def _folders(config: Config, root: Path | None) -> dict[str, Any]:
    """Folders of the data sets below `root`, those that are there."""
    if root is None:
        return {}
    if not root.is_dir():
        raise UserError(f"--data_root={root}: there is no such folder")
    names = {"data.dir": config.data.name, "test_data.dir": config.test_data.name}
    folders = {field: root / name for field, name in names.items() if name}
    return {field: str(folder) for field, folder in folders.items() if folder.is_dir()}


def data_without_folder(configs: Iterable[Config]) -> list[str]:
    """Name the published data sets that have no folder."""
    every = (part for config in configs for part in (config.data, config.test_data))
    own = {"glyphs", *OWN_IMAGES}
    return sorted({part.name for part in every if part.name and not part.dir} - own)


def _overridden(config: Config, overrides: Sequence[str]) -> Config:
    """Apply overrides as `experiments/run.py` does, by the types of the fields."""
    from ml_collections import config_flags  # only programs with a command line need it

    argv, values = ["tables", *overrides], flags.FlagValues()
    holder = config_flags.DEFINE_config_dict(
        "config", config_dict(config), flag_values=values, sys_argv=argv
    )
    values(argv)
    return from_dict(holder.value.to_dict())


@functools.cache
def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
