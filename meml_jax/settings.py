"""Settings of `meml_jax/config.py` from dotted names, dicts, presets and the command line."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import typing
from typing import Any

from meml_jax.config import Config
from meml_jax.types import UserError

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"preset": "paper"},
    "released": {
        "preset": "released",
        "learner": "meml_released",
        "tasks.min_size": 10,
        "tasks.usable_fraction": 0.75,
        "tasks.query_from": "all",
        "network.cln_relu": False,
        "network.attention_feature": "preactivation",
        "inner.reset_bias": False,
        "outer.weight_on": "inner",
        "test.protocol": "released",
    },
}
"""What the paper says, which is the default of each field, and what its released code does instead
(docs/deviations.md)."""

OWN_IMAGES = ("folder", "npz")
"""Data sets that `--data_root` has no folder of: `data.dir` is the user's."""

PLACES = ("data.dir", "test_data.dir", "data.cache_dir", "data.download_timeout")
"""Where data lie and come from."""

WITHOUT_INFLUENCE = (
    *PLACES, "embedding.checkpoint_every", "train.checkpoint_every", "train.log_every",
    "train.images_on", "train.steps_per_call",
)  # fmt: skip
"""Fields on which no number depends."""


def override(config: Config, values: dict[str, Any]) -> Config:
    """Replace dotted fields, e.g. `{"train.steps": 100}`.

    Raises:
      UserError: a field that does not exist, with the nearest name, or a value of a wrong type.
    """
    tree = dataclasses.asdict(config)
    for path, value in values.items():
        check_field(path)
        *groups, name = path.split(".")
        functools.reduce(dict.__getitem__, groups, tree)[name] = value
    return from_dict(tree)


def check_field(path: str) -> None:
    """Raise UserError, with the nearest name, where a dotted name is no field."""
    if path not in flatten(Config()):
        raise UserError(f"unknown config field {path!r}{_hint(path)}")


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a Config from nested dicts, e.g. of an ml_collections.ConfigDict or of config.json.

    A field that is not there takes its default, so settings stored by an older version can be read.

    Raises:
      UserError: an unknown field, with the nearest name, or a value of a wrong type.
    """
    return _build(Config, tree, "")


def flatten(config: Config) -> dict[str, Any]:
    """List all fields by dotted name."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix[:-1]: node}
        parts = [walk(value, f"{prefix}{name}.") for name, value in node.items()]
        return {name: value for part in parts for name, value in part.items()}

    return walk(dataclasses.asdict(config), "")


def config_dict(config: Config) -> Any:
    """Make the locked ml_collections.ConfigDict that `--config.a.b=value` overrides."""
    from ml_collections import config_dict as lib  # only programs with a command line need it

    def convert(node: Any) -> Any:
        result = lib.ConfigDict()
        for name, hint in typing.get_type_hints(type(node)).items():
            value = getattr(node, name)
            if dataclasses.is_dataclass(value):
                value = convert(value)
            elif type(None) in typing.get_args(hint):
                # A placeholder lets None be overridden, by a value of the right type only.
                reference = lib.placeholder(next(t for t in typing.get_args(hint) if t))
                reference.set(value)
                value = reference
            result[name] = value
        return result

    return convert(config).lock()


class UnfitPreset(UserError):
    """Presets that a config file does not have, or that do not go with what it is used for."""


def preset_config(arg: str, presets: dict[str, dict[str, Any]], values: dict[str, Any]) -> Any:
    """Make the ConfigDict of a file in configs/: defaults, `values`, then the presets asked for.

    Args:
      arg: what stands behind the colon of `--config=FILE:arg`: names separated by commas, e.g.
        `released,smoke`; later ones win. At most one of them may be a method, which a run is named
        after (it sets `preset`): `paper`, `released`, or one of the file's.
      presets: the file's own presets; `paper` and `released` always exist.
      values: the file's overrides of the defaults.

    Raises:
      UnfitPreset: an unknown preset, or two methods.
    """
    known = PRESETS | presets
    names = [name.strip() for name in arg.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UnfitPreset(
                f"unknown preset {name!r}, expected one or more of {sorted(known)}"
                f"{did_you_mean(name, known)}"
            )
    methods = [name for name in names if "preset" in known[name]]
    if len(methods) > 1:
        raise UnfitPreset(f"presets {arg!r}: got {' and '.join(methods)}, expected one of them")
    config = override(Config(), values)
    for name in names:
        config = override(config, known[name])
    return config_dict(config)


def departures(config: Config) -> dict[str, Any]:
    """Fields, and their values, in which a run is not what its `preset` stands for.

    Of `paper` and `released`, and of the points in which these two differ; the learner, which a
    result names, is not among them.
    """
    if config.preset not in PRESETS:
        return {}
    expected = flatten(Config()) | PRESETS[config.preset]
    values = flatten(config)
    points = sorted(PRESETS["released"].keys() - {"preset", "learner"})
    return {name: values[name] for name in points if values[name] != expected[name]}


def did_you_mean(name: str, known: typing.Iterable[str]) -> str:
    """End a message on an unknown name with the nearest known one; empty where none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _hint(path: str) -> str:
    """Name the field that is nearest to a wrong one, by its whole path or by its last part."""
    fields = list(flatten(Config()))
    nearest = difflib.get_close_matches(path, fields, n=1, cutoff=0.7)
    leaf = path.rsplit(".", 1)[-1]
    nearest += [
        f for f in fields if difflib.SequenceMatcher(None, f.split(".")[-1], leaf).ratio() > 0.75
    ]
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; fields are {', '.join(fields)}"


def _build(cls: type, tree: Any, prefix: str) -> Any:
    hints = _type_hints(cls)
    if not isinstance(tree, dict):
        raise UserError(f"config.{prefix[:-1]} is {tree!r}, expected a group of fields")
    for name in tree:
        if name not in hints:
            raise UserError(f"unknown config field {prefix + name!r}{_hint(prefix + name)}")
    values = {}
    for name, hint in hints.items():
        if name not in tree:
            continue
        group = dataclasses.is_dataclass(hint)
        values[name] = (
            _build(hint, tree[name], f"{prefix}{name}.")  # type: ignore[arg-type]
            if group
            else _checked(tree[name], hint, prefix + name)
        )
    return cls(**values)


_type_hints = functools.cache(typing.get_type_hints)  # they evaluate annotations each time


def _words(items: typing.Iterable[Any]) -> list[Any]:
    """Split words at commas: `a,b` and `(a,b)` without quotes come as one from the command line."""
    words: list[Any] = []
    for item in items:
        parts = item.strip("()[] ").split(",") if isinstance(item, str) else [item]
        words += [part.strip(" '\"") if isinstance(part, str) else part for part in parts]
    return [word for word in words if word != ""]


def _checked(value: Any, hint: Any, path: str) -> Any:
    """Return value as the annotated type: whole numbers may stand for floats, lists for tuples."""
    kinds = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
            item = typing.get_args(kind)[0]
            value = _words(value) if item is str else value
            return tuple(_checked(v, item, f"{path}[{i}]") for i, v in enumerate(value))
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise UserError(f"config field {path!r} is {value}, expected a finite number")
            return float(value)
        if kind in (int, str, bool) and type(value) is kind:
            return value
    expected = " or ".join(getattr(k, "__name__", str(k)) for k in kinds if k is not type(None))
    raise UserError(f"config field {path!r} is {value!r}, expected {expected}")
