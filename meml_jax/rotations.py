"""Rotations as classes of their own (characters: Vinyals et al., 2016, Matching Networks).

Turned by 90, 180 or 270 degrees, the images of a class, or of a cluster, are those of another one.
With N images, the one at position i turned t times by 90 degrees is at t N + i.
"""

from __future__ import annotations

import numpy as np

from meml_jax.config import TasksConfig
from meml_jax.types import Clusters, Split, TaskTable

TURNS = 4


def count(config: TasksConfig) -> int:
    """Clusters that are trained on for each one there is."""
    return TURNS if config.rotations else 1


def of_images(images: np.ndarray) -> np.ndarray:
    """Put square images [N, H, H, C] in all four rotations: [4 N, H, H, C], the given first."""
    return np.concatenate([np.rot90(images, turn, axes=(1, 2)) for turn in range(TURNS)])


def of_split(split: Split) -> Split:
    """Make C classes of square images 4 C, the given first.

    It has no `embeddings`, which are of the images as they were. Images without a label keep none.
    """
    labels, turns = split.labels, range(TURNS)
    added = [np.where(labels < 0, labels, labels + turn * split.num_classes) for turn in turns]
    return Split(
        images=of_images(split.images),
        labels=np.concatenate(added),
        ids=np.array([f"{name}@{90 * turn}" for turn in turns for name in split.ids]),
        class_names=tuple(f"{name}@{90 * turn}" for turn in turns for name in split.class_names),
    )


def of_clusters(clusters: Clusters) -> Clusters:
    """Make C clusters of N images 4 C, the given first; `info` and `fingerprint` stay."""
    labels, table = clusters.labels, clusters.table
    num_labels, rows, turns = labels.max() + 1, len(table.index), range(TURNS)
    return clusters._replace(
        labels=_shifted(labels, num_labels),
        table=TaskTable(
            _shifted(table.index, len(labels)),
            _shifted(table.start, rows),
            np.concatenate([table.size for _ in turns]),
        ),
        kept=_shifted(clusters.kept, num_labels),
    )


def _shifted(values: np.ndarray, by: int) -> np.ndarray:
    """Repeat values for each turn, each time higher by so much: int32 [4 V]."""
    return np.concatenate([values + turn * by for turn in range(TURNS)]).astype(np.int32)
