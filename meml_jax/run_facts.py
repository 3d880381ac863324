"""What a run was made with, for its report: from the values of `results.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meml_jax.rounding import plain
from meml_jax.settings import PRESETS

_SETTINGS = (
    "tasks.labels", "tasks.balance", "tasks.query_from", "tasks.rotations", "network.channels",
    "network.hidden", "network.compute_dtype", "inner.lr", "outer.lr", "outer.fen_lr",
    "outer.meta_batch", "train.init", "train.steps", "test.shots", "test.queries",
    "test.checkpoint",
)  # fmt: skip

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
    found["parts"] = _parts(results.get("parts") or {})
    found["versions"] = versions or None
    found["embedding"] = _embedding(results.get("embedding") or {}, config.get("embedding") or {})
    for name in _SETTINGS:
        group, field = name.split(".")
        value = config.get(group, {}).get(field)
        found[f"`{name}`"] = None if value is False else value
    found["`precision`"] = results.get("precision")
    return found


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
