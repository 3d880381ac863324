"""The random keys of a run: a stream of its own for each purpose."""

from __future__ import annotations

from typing import NamedTuple

import jax

from meml_jax.types import Array

PURPOSES = ("embed", "cluster", "train", "test", "validate", "init")
"""In the order of their numbers; a new one goes to the end, or all runs change."""


def key_for(purpose: str, seed: int) -> Array:
    """Return the key of one purpose: what one draws does not depend on what another has drawn."""
    return jax.random.fold_in(jax.random.key(seed), PURPOSES.index(purpose))


class RunKeys(NamedTuple):
    """Random keys of one run of the meta-test.

    Attributes:
      outputs: of the initial output layer.
      order: of the stream where it is shuffled.
      reservoir: of rehearsal.
    """

    outputs: Array
    order: Array
    reservoir: Array


def keys_of_run(key: Array) -> RunKeys:
    """Split the key of a run of the meta-test."""
    return RunKeys(*jax.random.split(key, 3))
