"""States of `continual` as files, and the labels in them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax.checkpoints import named_leaves
from meml_jax.files import require_npz, write_npz
from meml_jax.online import State
from meml_jax.types import UserError


def save(path: Path, state: State, owner: Mapping[str, Any]) -> None:
    """Write a state as npz, whole or not at all.

    Args:
      path: file to create or replace.
      state: its labels are strings, numbers, bools, None, or tuples of these.
      owner: JSON values that the restoring classifier must match.

    Raises:
      UserError: a label of another type.
    """
    try:
        text = json.dumps({**owner, "labels": state.labels})
    except TypeError:
        text = "{}"
    if _tuples(json.loads(text).get("labels")) != state.labels:
        raise UserError(
            f"labels {state.labels!r} cannot be saved, expected strings, numbers, bools, None, "
            "or tuples of these"
        )
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    write_npz(path, meta=text, **arrays)


def restore(path: Path, template: State, owner: Mapping[str, Any]) -> State:
    """Read a state, bit for bit as it was saved.

    Args:
      path: the file.
      template: a state with the shapes and dtypes that are expected.
      owner: what the state must have been saved with.

    Raises:
      UserError: no such file, no state, or one of another owner or other shapes.
    """
    stored = require_npz(path, "a state saved by ContinualClassifier")
    meta = _meta(stored)
    wrong = [
        f"{name} {meta.get(name)!r} instead of {value!r}"
        for name, value in owner.items()
        if meta.get(name) != value
    ]
    expected = named_leaves(template)
    wrong += [
        f"no {leaf.dtype} {name} of shape {list(leaf.shape)}"
        for name, leaf in expected.items()
        if name not in stored
        or (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    if not isinstance(meta.get("labels"), list):
        wrong.append("no labels")
    if wrong:
        raise UserError(
            f"{path}: not a state of this classifier, it has {'; '.join(wrong[:3])}; restore it "
            "with the workdir, head, capacity and learning_rate it was saved with"
        )
    leaves = [jnp.asarray(stored[name], leaf.dtype) for name, leaf in expected.items()]
    state = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return dataclasses.replace(state, labels=_tuples(meta["labels"]))


def checked_label(label: Any) -> Hashable:
    """Return a label that can be looked up; numpy scalars as the plain values they equal."""
    label = label.item() if isinstance(label, np.generic) else label
    try:
        hash(label)
    except TypeError:
        raise UserError(
            f"label of type {type(label).__name__}, expected one hashable value for all images "
            "of the call, such as a string or a number"
        ) from None
    if label != label:
        raise UserError(f"label {label!r} does not equal itself, so it would never be found again")
    return label


def _meta(stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what `save` wrote beside the arrays; of another program's file {}."""
    try:
        meta = json.loads(str(stored.get("meta")))
    except ValueError:
        return {}
    return meta if isinstance(meta, dict) else {}


def _tuples(value: Any) -> Any:
    """Turn the lists that JSON makes of tuples back into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
