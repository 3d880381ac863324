"""What a user may set for all rows of a table: nothing that makes a row into another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meml_jax.choices import CHOSEN
from meml_jax.config import Config
from meml_jax.settings import check_field, flatten, from_dict
from meml_jax.stored_results import Stored, of_rows
from meml_jax.tables import BUDGETS, Choice, Table, settings
from meml_jax.types import UserError

FREE = ("train.steps", "test.heads")
"""How long a row trains and which of its heads are tested: whatever they are, it is that row,
unless the steps are what the row is about."""


def overridden_fields(overrides: Iterable[str]) -> list[str]:
    """Name the fields of overrides such as `--config.train.steps=100`."""
    return [arg.removeprefix("--config.").split("=")[0] for arg in overrides]


def check_overrides(configs: Mapping[str, Config], overrides: Sequence[str]) -> None:
    """Refuse to override, for all rows chosen, what tells them apart, in whatever direction.

    Args:
      configs: of the rows chosen, without the overrides.
      overrides: as on the command line.

    Raises:
      UserError: names the field and two rows in which it differs.
    """
    for field in overridden_fields(overrides):
        check_field(field)
        if field in ("seed", "seeds"):
            raise UserError(f"--config.{field} holds for all rows; use --seeds=0,1 instead")
        (first, one), *others = ((name, flatten(c)[field]) for name, c in configs.items())
        for name, other in others:
            if other != one:
                raise UserError(
                    f"--config.{field} would make rows alike that differ in it: {one!r} in "
                    f"{first}, {other!r} in {name}; choose rows that agree with --rows"
                )


def check_rows(table: Table, configs: Mapping[str, Config], root: Path, budget: str) -> None:
    """Refuse presets and overrides that make a row into another one, even if it is chosen alone.

    A row keeps its values of the fields, `FREE` aside, in which the rows of its part differ that
    start from the same config file.

    Args:
      table: the table.
      configs: of the rows chosen, with the user's presets and overrides.
      root: folder that the config files' paths start from.
      budget: the user's.

    Raises:
      UserError: names the row, the field and both values.
    """
    defined = _defined(table, root, budget)
    for name, config in configs.items():
        _check_row(table, name, config, defined)


def as_defined(stored: Stored, table: Table, root: Path, *, say: Callable[[str], None]) -> Stored:
    """Keep the results of a table's rows, as `check_rows` has them in one of the budgets.

    A line is said of each other one: a table may have changed since, or another one of the same
    name have used the folder.

    Args:
      stored: results by row and seed.
      table: the table.
      root: folder that the config files' paths start from.
      say: prints a line.
    """
    defined = [_defined(table, root, budget) for budget in BUDGETS]

    def why_not(name: str, results: Mapping[str, Any]) -> str:
        config, errors = from_dict(results["config"]), []
        for each in defined:
            try:
                _check_row(table, name, config, each)
            except UserError as error:
                errors.append(str(error).partition(";")[0])
        return errors[-1] if len(errors) == len(defined) else ""

    kept: dict[str, dict[int, dict[str, Any]]] = {}
    for name, runs in of_rows(stored, table.rows, say=say).items():
        for seed, results in runs.items():
            if why := why_not(name, results):
                say(f"left out: the results of {name!r}, seed {seed} ({why})")
            else:
                kept.setdefault(name, {})[seed] = results
    return kept


def _defined(table: Table, root: Path, budget: str) -> dict[str, dict[str, Any]]:
    """Settings of each row, flat, without the user's presets and overrides."""
    return {
        name: flatten(settings(table, name, root, Choice(budget), seed=0)) for name in table.rows
    }


def _check_row(
    table: Table, name: str, config: Config, defined: Mapping[str, Mapping[str, Any]]
) -> None:
    row, own = table.rows[name], defined[name]
    alike = [
        defined[other]
        for other, one in table.rows.items()
        if (one.part, one.config) == (row.part, row.config)
    ]
    for field, value in flatten(config).items():
        chosen = field in CHOSEN and not own[field]  # from the images
        free = field in FREE and (field == "test.heads" or field not in row.values)
        kept = chosen or free or value == own[field]
        if not kept and any(other[field] != own[field] for other in alike):
            raise UserError(
                f"row {name!r} is one of {field}={own[field]!r}, got {value!r}; name the row "
                "that has it with --rows, or leave out the preset or override that sets it"
            )
