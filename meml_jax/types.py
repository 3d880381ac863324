"""The values that pass between modules, all frozen, with their shapes and dtypes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Params = dict[str, Any]
"""Parameters by role: `fen`, `cln`, `attention`, `film`, `context`; some are fast."""

_T = typing.TypeVar("_T")

Array = jax.Array
Metrics = dict[str, Array]

Encode = Callable[[np.ndarray], np.ndarray]
"""Pure: uint8 images [N, H, W, C] -> float32 embeddings [N, D]."""

Report = Callable[[str], None]
"""Prints a line."""

OnProgress = Callable[[int, int], None]
"""Told (done, total) while something long goes on."""

Info = dict[str, Any]
"""Numbers by name, that say what an embedding is."""


class UserError(ValueError):
    """Something that a user can put right; programs print it as one line and exit with code 2.

    The message says what was got, what was expected, and which field or file to change.
    """


@typing.dataclass_transform(frozen_default=True)
def _pytree(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen dataclass and a JAX pytree whose children are its fields."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@_pytree
class Batch:
    """Rows with labels; rows whose mask is False are padding and never change a result.

    Attributes:
      inputs: images [N, H, W, C], features [N, D] or dataset positions [N] int32.
      label: int32 [N].
      mask: bool [N].
      altered: bool [N], rows that stand for a random view of their image (`tasks.balance=augment`);
        None where no row does.
    """

    inputs: Any
    label: Array
    mask: Array
    altered: Array | None = None


@_pytree
class Task:
    """One task T = (S_cluster, S_query), Sec. 3.

    Attributes:
      support: S_cluster, all rows with one pseudo-label; of an episode, those of N classes.
      query: S_query, rows of the same cluster followed by rows of other clusters; of an episode,
        of the same N classes; with a coreset, rows of it.
      weight: float32 [], Gamma of the task (eqs 5-7), 1 where tasks are not balanced.
    """

    support: Batch
    query: Batch
    weight: Array


@_pytree
class TaskTable:
    """Clusters in compressed-row form: cluster c owns `index[start[c] : start[c] + size[c]]`.

    Attributes:
      index: int32 [sum of sizes], dataset positions, cluster by cluster.
      start: int32 [C].
      size: int32 [C].
    """

    index: Any
    start: Any
    size: Any


@_pytree
class TrainState:
    """All that a resumed training needs; random keys follow from (seed, step).

    Attributes:
      step: int32 [], number of finished meta-steps.
      params: parameters by role.
      opt_state: optax state of the outer optimizer.
      reservoir: coreset of rehearsal at meta-train (`rehearsal.Reservoir`), None without.
    """

    step: Array
    params: Params
    opt_state: Any
    reservoir: Any = None


@dataclasses.dataclass(frozen=True)
class Split:
    """Images of one part of a dataset, on the host.

    Attributes:
      images: uint8 [N, H, W, C].
      labels: int32 [N], contiguous from 0; -1 where the images are unlabelled.
      ids: str [N], stable names (for files: the path below the data folder with `/`).
      class_names: one name per label.
      embeddings: float32 [N, D] that came with the data (npz key Z), else None.
    """

    images: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    class_names: tuple[str, ...]
    embeddings: np.ndarray | None = None

    @property
    def num_classes(self) -> int:
        """Number of labelled classes."""
        return len(self.class_names)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Meta-train, meta-validation and meta-test parts with disjoint classes.

    Attributes:
      name: registry name; with another set for the test, the names of both (`omniglot_cub`).
      train: unlabelled for the method; its labels serve oracles and reports only.
      validation: classes on which the meta-test learning rate is chosen.
      test: classes that are reported.
      content_hash: hexadecimal digest of all images, labels, ids and embeddings of the set trained
        on; it does not change with the set for the test, so one training can be tested on several.
      test_hash: digest of the test part where that is another set, else None.
      note: says how much of a published set there is; empty where it is whole.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    content_hash: str
    test_hash: str | None = None
    note: str = ""


class Clusters(typing.NamedTuple):
    """Pseudo-labels of the training images: the product of the cluster stage.

    Attributes:
      labels: int32 [N], pseudo-label of each training image (true label for oracles).
      table: kept clusters, on the host.
      kept: int32 [C], label that each kept cluster had.
      info: `clustering` of results.json.
      fingerprint: of the stage.
    """

    labels: np.ndarray
    table: TaskTable
    kept: np.ndarray
    info: dict[str, Any]
    fingerprint: str
