"""What a run was made with, for its report: from the values of `results.json` alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from meml_jax.config import Config, EmbeddingConfig
from meml_jax.rounding import plain
from meml_jax.settings import OWN_IMAGES, PRESETS, WITHOUT_INFLUENCE, flatten, from_dict

_SETTINGS = (
    "tasks.labels", "tasks.balance", "tasks.query_from", "tasks.rotations", "network.channels",
    "network.hidden", "network.compute_dtype", "inner.lr", "outer.lr", "outer.fen_lr",
    "outer.meta_batch", "train.init", "train.steps", "test.shots", "test.queries",
    "test.checkpoint",
)  # fmt: skip
"""The main settings, which are told at their defaults too; not those that are None or False."""

_LABELLER = ("steps", "channels", "dim", "num_pseudo_labels")
_OF_EMBEDDING = {
    "pca": ("dim",),
    "random": ("channels",),
    "acai": ("steps", "dim", "width", "depth"),
    "contrastive": ("steps", "channels"),
    "deepcluster": _LABELLER,
    "sela": _LABELLER,
}
"""The fields of `embedding` that say most about each; those of `_OF_ANY` hold for all."""
_OF_ANY = ("whiten", "normalize")
_TRAINED = ("batch_size", "learning_rate")
_REST_OF_EMBEDDING: dict[str, Sequence[str]] = {
    "pca": (),
    "pixels": (),
    "random": (),
    "npz": ("file",),
    "acai": (*_TRAINED, "critic_mix", "critic_weight"),
    "contrastive": (*_TRAINED, "views", "temperature"),
    "deepcluster": (*_TRAINED, "views", "round_steps"),
    "sela": (*_TRAINED, "views", "round_steps", "sharpness"),
}
"""What else each has of `embedding`; one of a user's own may have any field."""

_TOLD = ("preset", "seed", "seeds", "precision", "learner", "data.name", "test_data.name",
         "data.image_size", "data.channels", "embedding.name")  # fmt: skip
"""Fields that lines of their own tell, `dataset` of both names."""


def facts(results: Mapping[str, Any]) -> dict[str, Any]:
    """List what a run was made with by name; None: not known, or not used.

    Args:
      results: content of `results.json`.
    """
    config = results.get("config", {})
    versions = ", ".join(f"{k} {v}" for k, v in sorted((results.get("versions") or {}).items()))
    found = {name: results.get(name) for name in ("dataset", "learner")}
    found |= _followed(results)
    found |= {name: results.get(name) for name in ("seed", "device", "commit")}
    if seeds := results.get("seeds"):
        found["seed"] = ", ".join(map(str, seeds))
    found["data"] = results.get("note") or None
    found["images"] = _size(config.get("data") or {})
    found["images from"] = _folder(config.get("data") or {})
    found["test images from"] = _folder(config.get("test_data") or {})
    found["parts"] = _parts(results.get("parts") or {})
    found["versions"] = versions or None
    found["embedding"] = _embedding(results.get("embedding") or {}, config.get("embedding") or {})
    for name in _SETTINGS:
        group, field = name.split(".")
        value = config.get(group, {}).get(field)
        found[f"`{name}`"] = None if value is False else value
    found["`precision`"] = results.get("precision")
    found["other settings that are not the defaults"] = _others(results)
    return found


def _others(results: Mapping[str, Any]) -> str | None:
    """List the settings that are not the defaults and that no other line tells.

    What a preset stands for and what departs from it are told together (`_followed`). Left out is
    what no number follows from: places, and of embedding and clustering what the run has no use
    for. The file of given embeddings goes by its name.
    """
    values = flatten(from_dict(results.get("config") or {}))
    if values["embedding.file"]:
        values["embedding.file"] = PurePath(values["embedding.file"]).name
    usual = flatten(Config()) | PRESETS.get(results.get("preset") or "", {})
    told = {*_TOLD, *_SETTINGS, *WITHOUT_INFLUENCE, *(results.get("departures") or {})}
    if made := (results.get("embedding") or {}).get("name"):
        fields = [field.name for field in dataclasses.fields(EmbeddingConfig)]
        rest = _REST_OF_EMBEDDING.get(made, [name for name in fields if name not in _OF_ANY])
        told |= {f"embedding.{name}" for name in fields if name not in rest}
    else:  # true classes, as they are
        told |= {name for name in values if name.startswith(("embedding.", "clustering."))}
    said = [
        f"`{name}`={value}"
        for name, value in values.items()
        if name not in told and value != usual[name]
    ]
    return ", ".join(said) or None


def _folder(data: Mapping[str, Any]) -> str | None:
    """Name the folder, or file, of a user's own images, without where on the machine it lies."""
    own = data.get("name") in OWN_IMAGES and data.get("dir")
    return PurePath(data["dir"]).name or None if own else None


def _followed(results: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a run follows where the paper and its released code differ.

    A preset names no more than that: a run of another length or width is `paper` too.
    """
    preset = results.get("preset")
    if preset not in PRESETS:
        return {"preset": preset}
    text = f"as `{preset}`"
    if departures := results.get("departures"):
        text += f", except {', '.join(f'`{k}`={v}' for k, v in departures.items())}"
    return {"points of docs/deviations.md": text}


def _size(data: Mapping[str, Any]) -> str | None:
    size, channels = data.get("image_size"), data.get("channels")
    if not (size and channels):
        return None
    return f"{size} x {size} pixels, {'grey' if channels == 1 else 'colour'}"


def _parts(parts: Mapping[str, Mapping[str, int]]) -> str | None:
    said = [
        f"{name} {part['images']} images "
        + (f"of {part['classes']} classes" if part["classes"] else "without labels")
        for name, part in parts.items()
    ]
    return "; ".join(said) or None


def _embedding(made: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Name the embedding with its main settings; None where a run needs none."""
    shown = [*_OF_EMBEDDING.get(made.get("name", ""), ()), *_OF_ANY] if made else []
    values = dict(made) | {name: settings[name] for name in shown if name in settings}
    return ", ".join(f"{name} {plain(value)}" for name, value in values.items()) or None
