"""The k-means stage: what goes in is refused or clustered, what comes out is canonical."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from meml_jax import clustering
from meml_jax.config import ClusteringConfig
from meml_jax.types import UserError


def blobs(rows=300, dim=8, centres=12, seed=0):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(centres, dim)) * 4
    own = rng.integers(centres, size=rows)
    return (means[own] + rng.normal(size=(rows, dim))).astype(np.float32), own


def cluster(points, k, *, seed=0, **fields):
    return clustering.cluster(points, ClusteringConfig(num_clusters=k, **fields), seed=seed)


def assert_canonical(labels, k):
    """int32, all of 0..k-1, in order of first appearance."""
    assert labels.dtype == np.int32
    names, first = np.unique(labels, return_index=True)
    np.testing.assert_array_equal(names, np.arange(k))
    assert np.all(np.diff(first) > 0)


def test_more_clusters_than_distinct_points_states_both_numbers():
    seven = np.repeat(np.arange(7, dtype=np.float32), 15)[:100, None] * np.ones((1, 3), np.float32)
    with pytest.raises(UserError, match=r"num_clusters=20, .*100 embeddings have 7 distinct"):
        cluster(seven, 20)
    labels, info = cluster(seven, 7)
    assert_canonical(labels, 7)
    assert info.requested == info.actual == 7 and info.inertia < 1e-6
    np.testing.assert_array_equal(labels, seven[:, 0].astype(int))  # duplicates stay together


def test_all_points_equal():
    points = np.ones((100, 4), np.float32)
    with pytest.raises(UserError, match="1 distinct"):
        cluster(points, 2)
    labels, info = cluster(points, 1)
    assert info.actual == 1 and not labels.any()


@pytest.mark.parametrize("k", [0, -3, 31])
def test_numbers_of_clusters_out_of_range(k):
    with pytest.raises(UserError, match=f"num_clusters={k}.*expected 1 to"):
        cluster(blobs(30)[0], k)


@pytest.mark.parametrize("k", [1, 2, 13, 30])
def test_labels_are_contiguous_and_those_of_the_nearest_centre(k):
    points, _ = blobs(30)
    labels, info = cluster(points, k)
    assert_canonical(labels, k)
    assert info.actual == k
    # At k = n every point is alone; elsewhere the last Lloyd iteration has converged, so each
    # point lies nearest to the mean of its own cluster.
    means = np.stack([points[labels == c].mean(axis=0) for c in range(k)])
    distance = np.linalg.norm(points[:, None] - means[None], axis=-1)
    np.testing.assert_array_equal(distance.argmin(axis=1), labels)
    assert info.inertia == pytest.approx((distance.min(axis=1) ** 2).sum(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("minibatch_above", [100_000, 50])
def test_seeds(minibatch_above):
    points, own = blobs()
    settings = {"minibatch_above": minibatch_above}
    labels, info = cluster(points, 40, seed=3, **settings)
    np.testing.assert_array_equal(labels, cluster(points, 40, seed=3, **settings)[0])
    assert np.any(labels != cluster(points, 40, seed=4, **settings)[0])
    assert_canonical(labels, info.actual)
    assert clustering.agreement(own, labels)["purity"] > 0.9


def test_large_sets_use_mini_batches(monkeypatch):
    used = []

    class Spy(clustering.MiniBatchKMeans):
        def partial_fit(self, batch):
            used.append(len(batch))
            return super().partial_fit(batch)

    monkeypatch.setattr(clustering, "MiniBatchKMeans", Spy)
    points, _ = blobs(5000)
    cluster(points, 10, minibatch_above=5000)
    assert not used
    _, info = cluster(points, 10, minibatch_above=4999, max_iter=2)
    assert used == [4096, 904] * info.iterations and info.iterations <= 2


def test_mini_batches_find_what_lloyd_finds():
    points, own = blobs(3000, centres=30)
    exact, batched = (
        cluster(points, 30, minibatch_above=n, num_init=3) for n in (len(points), len(points) - 1)
    )
    # The inertia is that of the labels and the last centres, which lie near their means.
    means = np.stack([points[batched[0] == c].mean(axis=0) for c in range(batched[1].actual)])
    least = np.sum((points - means[batched[0]]) ** 2)
    assert least <= batched[1].inertia < 1.05 * least
    assert batched[1].inertia < 1.5 * exact[1].inertia
    assert clustering.agreement(own, batched[0])["purity"] > 0.85
    assert_canonical(batched[0], batched[1].actual)


def test_progress_of_mini_batches():
    seen = []
    points, _ = blobs(9000)
    settings = ClusteringConfig(num_clusters=10, minibatch_above=100, max_iter=3)
    _, info = clustering.cluster(points, settings, seed=0, progress=lambda *p: seen.append(p))
    first = [(4096, 27000), (8192, 27000), (9000, 27000)]
    assert seen[:3] == first and len(seen) == 3 * info.iterations + 1
    seen.clear()
    settings = dataclasses.replace(settings, num_init=2)
    clustering.cluster(points, settings, seed=2**32 - 1, progress=lambda *p: seen.append(p))
    assert seen == sorted(seen) and seen[-1] == (54000, 54000)  # both starts have one bar


def test_a_large_set_takes_little_memory_beside_itself():
    points = np.random.default_rng(0).normal(size=(200_000, 32)).astype(np.float32)
    settings = ClusteringConfig(num_clusters=20, minibatch_above=100_000, max_iter=1)
    tracemalloc.start()
    try:
        labels, info = clustering.cluster(points, settings, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert info.actual == 20 and len(labels) == len(points)
    # Labels, their order and the batches; a copy of the points alone would be 1 more.
    assert peak < 0.9 * points.nbytes


@pytest.mark.parametrize("field", ["num_init", "max_iter"])
@pytest.mark.parametrize("minibatch_above", [100_000, 50])
def test_no_effort_is_refused(field, minibatch_above):
    with pytest.raises(UserError, match=f"clustering.{field}=0, expected at least 1"):
        cluster(blobs(60)[0], 3, minibatch_above=minibatch_above, **{field: 0})


def test_negative_zero_is_zero():
    points = np.array([[0.0, 1.0], [-0.0, 1.0], [2.0, 0.0]], np.float32)
    with pytest.raises(UserError, match="2 distinct"):
        cluster(points, 3)


@pytest.mark.slow
def test_labels_do_not_depend_on_the_number_of_threads():
    code = (
        "import numpy as np, hashlib; from meml_jax import clustering, config\n"
        "x = np.random.default_rng(0).normal(size=(4000, 32)).astype(np.float32)\n"
        "settings = config.ClusteringConfig(num_clusters=60)\n"
        "print(hashlib.sha256(clustering.cluster(x, settings, seed=0)[0]).hexdigest())"
    )
    digests = set()
    for threads in ("1", "2"):
        env = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    points = np.random.default_rng(0).normal(size=(4000, 32)).astype(np.float32)
    digests.add(hashlib.sha256(cluster(points, 60)[0]).hexdigest())
    assert len(digests) == 1


def test_ward_by_hand():
    """0, 1 | 10, 12 | 30: the cheapest merges are 0 with 1 (adds 1/2) and 10 with 12 (adds 2)."""
    points = np.array([0, 30, 10, 1, 12], np.float32)[:, None]
    means = clustering._ward_means(points, 3)
    np.testing.assert_allclose(np.sort(means[:, 0]), [0.5, 11, 30])
    labels, info = cluster(points, 3, init="ward")
    np.testing.assert_array_equal(labels, [0, 1, 2, 0, 2])
    assert info.inertia == pytest.approx(2.5)
    np.testing.assert_array_equal(cluster(points, 5, init="ward")[0], np.arange(5))
    assert cluster(points[:1], 1, init="ward")[1].actual == 1


def test_ward_ends_where_no_seed_plays_a_role_and_finds_many_small_clusters():
    rng = np.random.default_rng(0)
    own = np.repeat(np.arange(60), 5)
    points = (6 * rng.normal(size=(60, 4))[own] + rng.normal(size=(300, 4))).astype(np.float32)
    (labels, info), (again, _) = (cluster(points, 60, init="ward", seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(labels, again)
    assert_canonical(labels, 60)
    plain = [cluster(points, 60, seed=seed) for seed in range(5)]
    assert info.inertia < min(one.inertia for _, one in plain)
    purity = [clustering.agreement(own, one)["purity"] for one in (labels, *(x for x, _ in plain))]
    assert purity[0] > max(purity[1:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init": "random"}, r"clustering.init='random', expected one of \('k-means\+\+', 'ward'"),
        ({"init": "ward", "num_init": 2}, "num_init=2, expected 1"),
        ({"init": "ward", "minibatch_above": 20}, "any two of 30 embeddings, expected at most 20"),
    ],
)
def test_starts_that_cannot_be(fields, message):
    with pytest.raises(UserError, match=message):
        cluster(blobs(30)[0], 5, **fields)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_named(bad):
    points, _ = blobs(50)
    points[[17, 31], 2] = bad
    with pytest.raises(UserError, match="in 2 rows, the first is row 17;"):
        cluster(points, 3)
    with pytest.raises(UserError, match=r"row 17 \(image-17\);"):
        clustering.check_embeddings(points, ids=np.array([f"image-{i}" for i in range(50)]))


def test_embeddings_that_are_no_table_are_refused():
    with pytest.raises(UserError, match=r"shape \(5,\), expected \[N, D\]"):
        cluster(np.zeros(5, np.float32), 2)


def test_a_constant_column_changes_nothing():
    points, _ = blobs()
    constant = np.concatenate([points, np.full((len(points), 1), 7, np.float32)], axis=1)
    labels, info = cluster(constant, 12)
    assert np.isfinite(info.inertia)
    np.testing.assert_array_equal(labels, cluster(points, 12)[0])


def test_zero_rows_are_one_point():
    with pytest.raises(UserError, match="1 distinct"):
        cluster(np.zeros((20, 3), np.float32), 5)
    points, _ = blobs(50)
    points[:10] = 0
    labels, _ = cluster(points, 8)
    assert len(set(labels[:10].tolist())) == 1


def test_purity_and_nmi_by_hand():
    true = np.array([0, 0, 0, 1, 1, 1])
    clusters = np.array([0, 0, 1, 1, 2, 2])
    found = clustering.agreement(true, clusters)
    assert found["purity"] == pytest.approx(5 / 6)  # 2 of 2, 1 of 2, 2 of 2
    # H(true) = ln 2, H(clusters) = ln 3; I = ln 2 - H(true | clusters), and only the middle
    # cluster, a third of all, leaves ln 2 open. NMI divides by the mean of the entropies.
    information = np.log(2) - np.log(2) / 3
    assert found["nmi"] == pytest.approx(information / ((np.log(2) + np.log(3)) / 2))
    # Pairs together in both: 2; in true: 6; in clusters: 3; of 15. Chance: 6 * 3 / 15.
    expected = (2 - 6 * 3 / 15) / ((6 + 3) / 2 - 6 * 3 / 15)
    assert found["adjusted_rand"] == pytest.approx(expected)
    same = {"purity": 1.0, "nmi": pytest.approx(1.0), "adjusted_rand": 1.0}
    assert clustering.agreement(true, true) == same
    assert clustering.agreement(true, np.zeros(6, int))["purity"] == 0.5


def test_agreement_needs_all_labels():
    assert clustering.agreement(np.array([0, -1, 1]), np.array([0, 0, 1])) is None
    assert clustering.agreement(np.array([], int), np.array([], int)) is None
