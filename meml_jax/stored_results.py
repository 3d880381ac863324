"""What the runs of a table have stored: `results.json` by row and seed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meml_jax.choices import CHOSEN
from meml_jax.config import Config
from meml_jax.curves import NAMES
from meml_jax.files import read_json, write_json
from meml_jax.results import is_current, points_version
from meml_jax.settings import PLACES, WITHOUT_INFLUENCE, flatten, from_dict, override
from meml_jax.types import UserError

IMAGES = ("content_hash", "test_hash", "note")
"""Fields of `results.json` that tell what was trained on and tested."""

EMBEDDED: dict[str, Any] = {
    "embedding_seconds": int | float,
    "embedding_commit": str,
    "embedding_device": str,
}
"""What `read` adds to results of how their embedding was made, and its types."""

Stored = Mapping[str, Mapping[int, dict[str, Any]]]
"""`results.json` by row and seed."""


_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a file that holds anything may raise."""


_OF_A_CACHE = ("data.cache_dir", "data.download_timeout")
"""Fields on which not even the images depend."""


class EarlierVersion(UserError):
    """Results that an earlier version made, which results of this one may replace."""


def read(folder: Path, *, say: Callable[[str], None]) -> dict[str, dict[int, dict[str, Any]]]:
    """Read what the runs of a table have stored below its folder: results by row and seed.

    What cannot be read, or has settings that this version does not know, is left out and said.
    Results get what `embedding.json` beside them tells of their embedding, under the names of
    `EMBEDDED`.
    """
    return _read(folder, lambda path, error: say(f"left out: {path} ({_why(error)})"))


def of_rows(stored: Stored, rows: Collection[str], *, say: Callable[[str], None]) -> Stored:
    """Keep the results of a table's rows; a line is said of each other one."""
    for name in sorted(set(stored) - set(rows)):
        say(f"left out: the results of {name!r}, which is no row of this table")
    return {name: runs for name, runs in stored.items() if name in rows}


def _read(
    folder: Path, leave_out: Callable[[Path, Exception], None]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Read results by row and seed; `leave_out` gets the path and error of those of no use."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/seed*/results.json")):
        row, number = path.parent.parent.name, path.parent.name.removeprefix("seed")
        try:
            seed = int(number)
            results, config = _useful(path)
            if config.seed != seed:
                raise ValueError(f"results of seed {config.seed}")
        except _DAMAGE as error:
            leave_out(path, error)
            continue
        first = "round1/" if config.clustering.rounds > 1 else ""
        found.setdefault(row, {})[seed] = results | _embedded(
            path.parent / f"{first}embedding.json"
        )
    return found


def _useful(path: Path) -> tuple[dict[str, Any], Config]:
    """Read results, with all settings of this version, or raise one of `_DAMAGE`."""
    results = json.loads(path.read_text())
    config = from_dict(results["config"])
    if results.get("points_version") != points_version(config):
        raise EarlierVersion("judged as an earlier version did; the same command judges anew")
    if not is_current(results, config):
        raise EarlierVersion(
            "of an embedding or learner of another version; train it in another folder"
        )
    _look_through(results)
    return results | {"config": dataclasses.asdict(config)}, config


def _why(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error).partition("; fields are")[0]
    return f"damaged, or no results.json: {type(error).__name__} {error}"


def _embedded(path: Path) -> dict[str, Any]:
    """Read how an embedding was made, by the names of `EMBEDDED`, as far as the file tells."""
    made = read_json(path)  # most oracles have none
    if not isinstance(made, dict):
        return {}
    every = {name: made.get(name.removeprefix("embedding_")) for name in EMBEDDED}
    return {name: value for name, value in every.items() if isinstance(value, EMBEDDED[name])}


def _look_through(results: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError where what a table shows is not in results."""
    clusters, training, test = results["clustering"], results["meta_train"], results["meta_test"]
    _check(int | float, clusters["kept"], training["seconds"], training["steps_per_second"])
    _check(int | float | None, clusters.get("seconds"), training.get("peak_bytes"))
    _check(int, training["steps"], test["checkpoint_step"])
    _check(str, *(results[name] for name in ("dataset", "device", "commit")))
    _check(str | None, training.get("device"), training.get("commit"))
    if clusters["labels"] != "true":
        _check(int | float | None, clusters["purity"])  # None where the images have no labels
        _check(str, results["embedding"]["name"])
    for curve in (test, *results["comparisons"]):
        _ = NAMES[curve["head"]]
        if not curve["points"]:
            raise ValueError("a curve without points")
        for point in curve["points"]:
            named = ("accuracy", "ci95", "chance", "seconds")
            _check(int | float, *(point[name] for name in named), *point["accuracies"])
            if not all(0 <= share <= 1 for share in (point["accuracy"], *point["accuracies"])):
                raise ValueError("an accuracy outside of 0 to 1")
            optional = ("learning_rate", "train_accuracy", "iid_accuracy")
            _check(int | float | None, *(point.get(name) for name in optional))
            _check(int, point["num_classes"], point["runs"])
            _ = point["learning_rate"]
            if len(point["accuracies"]) != point["runs"] or not point["runs"]:
                raise ValueError("another number of runs than it says")


def _check(kind: Any, *values: Any) -> None:
    """Raise TypeError or ValueError unless all values are of a kind, and finite."""
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"got {value!r}, expected {getattr(kind, '__name__', kind)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"got {value}, expected a finite number")


def differing(stored: Config, wanted: Config, *, free: Collection[str]) -> list[str]:
    """List the settings in which stored results are not what is wanted, those in `free` aside.

    What `wanted` leaves open, to be chosen from the images, may be anything.
    """
    values = flatten(stored)
    return [
        name
        for name, value in flatten(wanted).items()
        if name not in free and values[name] != value and (value or name not in CHOSEN)
    ]


def finished(config: Config, workdir: Path) -> bool:
    """Tell whether a workdir holds the results, and the report, of these very settings.

    The images are not looked at: after other ones have come into the same folder, a row's own
    folder must go.
    """
    try:
        _, stored = _useful(workdir / "results.json")
    except _DAMAGE:
        return False
    same = not differing(stored, config, free=_OF_A_CACHE)
    return same and (workdir / "report.md").exists()


def of_runs(stored: Stored, wanted: Mapping[tuple[str, int], Config]) -> Stored:
    """Keep the results that are those of runs asked for: of these rows, seeds and settings.

    Args:
      stored: of `read`.
      wanted: settings by row and seed.
    """

    def fits(row: str, seed: int, results: Mapping[str, Any]) -> bool:
        config = wanted.get((row, seed))
        return config is not None and not differing(
            from_dict(results["config"]), config, free=_OF_A_CACHE
        )

    kept = {
        row: {seed: results for seed, results in runs.items() if fits(row, seed, results)}
        for row, runs in stored.items()
    }
    return {row: runs for row, runs in kept.items() if runs}


def read_kept(
    folder: Path, *, say: Callable[[str], None] = print
) -> dict[str, dict[int, dict[str, Any]]]:
    """Read what `keep` has written; results of an earlier version are left out and said.

    Raises:
      UserError: some of it cannot be read, so that what is made of it would lack a row.
    """

    def leave_out(path: Path, error: Exception) -> None:
        if not isinstance(error, EarlierVersion):
            raise UserError(f"{path} ({_why(error)}); mend that file or delete its folder")
        reason = str(error).partition(";")[0]
        say(f"left out: {path} ({reason}; the row is back in the block once it is done again)")

    return _read(folder, leave_out)


def check_kept(kept: Stored, folder: Path, wanted: Mapping[tuple[str, int], Config]) -> None:
    """Raise UserError where results of a row and seed are kept with other settings.

    Args:
      kept: what `folder` has, of `read_kept`.
      folder: to which `keep` writes.
      wanted: settings by row and seed.
    """
    for (row, seed), config in wanted.items():
        if (results := kept.get(row, {}).get(seed)) is not None:
            stored, now = _nowhere(from_dict(results["config"])), _nowhere(config)
            if names := differing(stored, now, free=WITHOUT_INFLUENCE):
                raise UserError(
                    f"{folder / row / f'seed{seed}'} keeps results of another {names[0]}: "
                    f"{flatten(stored)[names[0]]!r}, now {flatten(now)[names[0]]!r}; give the "
                    "block another --label, or delete that folder"
                )


def check_keeping(stored: Stored, kept: Stored, folder: Path) -> None:
    """Raise UserError where `keep` would; `kept` is what `folder` has, of `read_kept`."""
    wanted = {(row, seed): from_dict(r["config"]) for row, seed, r in _each(stored)}
    check_kept(kept, folder, wanted)
    for row, seed, results in _each(stored):
        other = kept.get(row, {}).get(seed, results)
        if any(other.get(name) != results.get(name) for name in IMAGES):
            raise UserError(
                f"{folder / row / f'seed{seed}'} keeps results on other images; give the block "
                "another --label, or delete that folder"
            )


def keep(stored: Stored, folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Write results to a folder that `read` reads, compact, and without this machine's paths.

    Results of this version take the place of those that an earlier one has left there, whatever
    their settings.

    Returns:
      All that the folder keeps now, as `read_kept` would read it.

    Raises:
      UserError: results of other settings, or on other images, are kept there.
    """
    kept = read_kept(folder, say=lambda line: None)
    check_keeping(stored, kept, folder)
    for row, seed, results in _each(stored):
        config = dataclasses.asdict(_nowhere(from_dict(results["config"])))
        content = {**results, "config": config}
        write_json(folder / row / f"seed{seed}" / "results.json", content, indent=None)
        as_read = json.loads(json.dumps(content)) | {"config": config}
        kept.setdefault(row, {})[seed] = as_read
    return kept


def _nowhere(config: Config) -> Config:
    """Take the places on this machine out of settings; of an embedding's file, all but the name."""
    nowhere = {name: value for name, value in flatten(Config()).items() if name in PLACES}
    file = config.embedding.file and Path(config.embedding.file).name
    return override(config, {**nowhere, "embedding.file": file})


def _each(stored: Stored) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for row, runs in stored.items():
        for seed, results in runs.items():
            yield row, seed, results
