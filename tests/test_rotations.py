"""Rotations as classes, of splits and of clusters."""

import dataclasses

import numpy as np
import programs
import pytest
from test_meta_test import make_split

from meml_jax import rotations, tasks, trained
from meml_jax.types import Clusters


def test_rotated_classes_are_the_same_images_turned():
    split = make_split([3, 2], image_size=5)
    labels = np.where(np.arange(5) == 1, -1, split.labels).astype(np.int32)
    split = dataclasses.replace(split, labels=labels)
    turned = rotations.of_split(split)
    assert turned.num_classes == 8 == len(set(turned.class_names))
    assert len(set(turned.ids)) == len(turned.images) == 20
    assert turned.labels.dtype == np.int32
    np.testing.assert_array_equal(turned.images[:5], split.images)
    for i in range(4):
        mine = slice(5 * i, 5 * i + 5)
        back = np.rot90(turned.images[mine], -i, axes=(1, 2))
        np.testing.assert_array_equal(back, split.images)
        np.testing.assert_array_equal(turned.labels[mine] < 0, labels < 0)
        known = labels >= 0
        np.testing.assert_array_equal(turned.labels[mine][known], labels[known] + 2 * i)
        assert turned.class_names[2 * i] == f"class0@{90 * i}"


def clusters_of(labels, *, min_size):
    table, kept = tasks.table_from_labels(labels, min_size=min_size)
    return Clusters(labels, table, kept, {"kept": len(kept)}, "made")


@pytest.mark.parametrize("sizes", [(3, 2), (4, 1, 2, 3), (1, 2, 3)])
def test_rotated_clusters_are_the_clusters_of_rotated_classes(sizes):
    """Of true classes: turned as clusters, or clustered once the split is turned."""
    split = make_split(sizes, image_size=5)
    turned = rotations.of_clusters(clusters_of(split.labels, min_size=2))
    wanted = clusters_of(rotations.of_split(split).labels, min_size=2)
    for ours, theirs in (
        (turned.labels, wanted.labels),
        (turned.kept, wanted.kept),
        *((getattr(turned.table, n), getattr(wanted.table, n)) for n in ("index", "start", "size")),
    ):
        assert ours.dtype == theirs.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)
    assert turned.info == {"kept": sum(size > 1 for size in sizes)}


def test_a_run_with_rotations_has_four_outputs_a_cluster(tmp_path):
    fields = {"tasks__rotations": True, "train__steps": 4}
    lines = programs.succeed(tmp_path, call=programs.run_here, **fields)
    kept = programs.results(tmp_path)["clustering"]["kept"]
    assert any(line.startswith(f"train: meml, {4 * kept} clusters, ") for line in lines)
    assert "- `tasks.rotations`: True\n" in (tmp_path / "report.md").read_text()
    config = trained.read_config(tmp_path)
    made = []

    def network(*, num_classes):
        made.append(num_classes)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        trained.restore_params(tmp_path, config, network)
    assert made == [4 * kept]
    error = programs.refuse(tmp_path, **fields | {"tasks__rotations": False})
    assert "tasks.rotations is True there, False now" in error
