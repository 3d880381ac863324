"""The offline k-means stage: embeddings -> pseudo-labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.cluster import AgglomerativeClustering, KMeans, MiniBatchKMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from threadpoolctl import threadpool_limits

from meml_jax.config import ClusteringConfig
from meml_jax.types import OnProgress, UserError

ROWS = 50_000  # looked at together, which bounds the memory that a large set takes
SAMPLE = 20_000  # rows on which mini-batch k-means is judged
MIN_GAIN = 1e-3  # relative gain on them under which another pass is not worth its time

INITS = ("k-means++", "ward")
WARD_ROWS = 30_000  # their distances take 7 GB

AGREEMENT = ("purity", "nmi", "adjusted_rand")


class ClusteringInfo(NamedTuple):
    """What k-means did.

    Attributes:
      requested: clusters asked for.
      actual: clusters that have members.
      iterations: passes over the embeddings of the best start.
      inertia: sum of squared distances to the nearest centre.
    """

    requested: int
    actual: int
    iterations: int
    inertia: float


def check_embeddings(embeddings: np.ndarray, *, ids: np.ndarray | None = None) -> None:
    """Refuse embeddings that k-means cannot use.

    Args:
      embeddings: float [N, D].
      ids: str [N], names of the rows for the message.

    Raises:
      UserError: wrong rank, or a NaN or infinite value, with its row.
    """
    if embeddings.ndim != 2:
        raise UserError(f"embeddings have shape {embeddings.shape}, expected [N, D]")
    parts = [np.isfinite(part).all(axis=1) for part in _parts(embeddings)]
    finite = np.concatenate(parts) if parts else np.zeros(0, bool)
    if not finite.all():
        row = int(np.argmin(finite))
        name = "" if ids is None else f" ({ids[row]})"
        raise UserError(
            f"embeddings hold NaN or infinite values in {int((~finite).sum())} rows, the first is "
            f"row {row}{name}; expected finite values: make the embeddings anew or drop the images"
        )


def check_count(num_clusters: int, images: int) -> None:
    """Raise UserError unless so many images can make so many clusters to train on."""
    if not 2 <= num_clusters <= images:
        raise UserError(
            f"clustering.num_clusters={num_clusters}, expected 2 to the number of training images, "
            f"{images}"
        )


def check(config: ClusteringConfig, rows: int | None = None) -> None:
    """Refuse what no embeddings, or so many `rows` of them, could be clustered with.

    Raises:
      UserError: names the field.
    """
    for field, least in {"num_init": 1, "max_iter": 1, "minibatch_above": 0}.items():
        if getattr(config, field) < least:
            value = getattr(config, field)
            raise UserError(f"clustering.{field}={value}, expected at least {least}")
    if config.init not in INITS:
        raise UserError(f"clustering.init={config.init!r}, expected one of {INITS}")
    if config.init != "ward":
        return
    if config.num_init > 1:
        raise UserError(
            f"clustering.num_init={config.num_init}, expected 1: Ward's clusters, from which "
            "clustering.init='ward' starts, are the same each time"
        )
    most = min(WARD_ROWS, config.minibatch_above)
    if rows is not None and rows > most:
        raise UserError(
            f"clustering.init='ward' keeps the distance of any two of {rows} embeddings, expected "
            f"at most {most}; use 'k-means++'"
        )


def cluster(
    embeddings: np.ndarray,
    config: ClusteringConfig,
    *,
    seed: int,
    progress: OnProgress = lambda done, total: None,
) -> tuple[np.ndarray, ClusteringInfo]:
    """Assign every embedding to one of k clusters (Sec. 2): its pseudo-label.

    Runs on one thread: sums of several threads add up in any order, and the same seed shall give
    the same labels everywhere. Beyond the embeddings themselves it takes memory for one more copy
    of them up to `minibatch_above` rows, and for a few batches above; with `init='ward'` for
    N^2 distances of 8 bytes, those of all pairs and a copy that it merges in.

    `init='ward'` starts from the means of the k clusters that Ward's method (1963) ends with: of
    all pairs it merges, again and again, the one that adds least to the inertia. With many clusters
    of few rows each, k-means++ puts several centres into one and leaves others without.

    Args:
      embeddings: float [N, D], finite; no copy is made of float32.
      config: number of clusters and effort.
      seed: of the initial centres and of the batches.
      progress: called now and then above `minibatch_above` rows.

    Returns:
      (int32 [N] pseudo-labels, contiguous from 0 in order of first appearance, ClusteringInfo).

    Raises:
      UserError: unusable embeddings, or more clusters than distinct points.
    """
    check_embeddings(embeddings)
    embeddings = np.ascontiguousarray(embeddings, np.float32)
    requested = config.num_clusters
    distinct = _count_distinct(embeddings, enough=requested if requested > 0 else len(embeddings))
    if not 1 <= requested <= distinct:
        raise UserError(
            f"clustering.num_clusters={requested}, but the {len(embeddings)} embeddings have "
            f"{distinct} distinct values; expected 1 to {distinct}"
        )
    check(config, len(embeddings))
    with threadpool_limits(1):
        if len(embeddings) > config.minibatch_above:
            labels, iterations, inertia = _mini_batch_k_means(embeddings, config, seed, progress)
        else:
            model = KMeans(
                requested,
                init=_ward_means(embeddings, requested) if config.init == "ward" else "k-means++",
                n_init=config.num_init,
                max_iter=config.max_iter,
                random_state=seed,
            )
            labels = model.fit_predict(embeddings)
            iterations, inertia = int(model.n_iter_), float(model.inertia_)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    info = ClusteringInfo(requested, len(first), iterations, inertia)
    return rank[inverse].astype(np.int32), info


def _ward_means(embeddings: np.ndarray, k: int) -> np.ndarray:
    """Mean embedding of each of the k clusters of Ward's method, float [k, D]."""
    if len(embeddings) == k:  # each its own; scikit-learn wants two rows at least
        return embeddings
    labels = AgglomerativeClustering(k, linkage="ward").fit_predict(embeddings)
    return np.stack([embeddings[labels == i].mean(axis=0) for i in range(k)])


def _mini_batch_k_means(
    embeddings: np.ndarray, config: ClusteringConfig, seed: int, progress: OnProgress
) -> tuple[np.ndarray, int, float]:
    """K-means of a set too large for Lloyd's algorithm: (labels [N], passes, inertia).

    Passes over the shuffled rows in batches until the inertia of a fixed sample falls by less than
    `MIN_GAIN` in a pass, or for `max_iter` passes; of `num_init` starts the best on that sample.
    """
    count, k = len(embeddings), config.num_clusters
    batch = min(count, max(4096, 3 * k))
    rng = np.random.default_rng(seed)
    sample = embeddings[np.sort(rng.choice(count, min(count, SAMPLE), replace=False))]
    starts: list[tuple[float, int, MiniBatchKMeans]] = []
    total = config.num_init * config.max_iter * count
    for start in range(config.num_init):
        model = MiniBatchKMeans(
            k, batch_size=batch, n_init=1, random_state=_seed_of(seed, start), compute_labels=False
        )
        before, passes = np.inf, 0
        while passes < config.max_iter:
            order = rng.permutation(count)
            for done in range(0, count, batch):
                model.partial_fit(embeddings[order[done : done + batch]])
                before_it = (start * config.max_iter + passes) * count
                progress(before_it + min(done + batch, count), total)
            passes += 1
            inertia = -float(model.score(sample))
            if inertia > (1 - MIN_GAIN) * before:
                break
            before = inertia
        starts.append((inertia, passes, model))
    _, passes, model = min(starts, key=lambda start: start[0])
    progress(total, total)  # whatever it stopped before
    labels, inertia = np.empty(count, np.int32), 0.0
    for i, part in enumerate(_parts(embeddings)):
        labels[i * ROWS : (i + 1) * ROWS] = own = model.predict(part)
        inertia += float(np.sum((part - model.cluster_centers_[own]) ** 2, dtype=np.float64))
    return labels, passes, inertia


def _seed_of(seed: int, start: int) -> int:
    """Seed of one of several starts, far from those of other seeds; the first has the seed."""
    return seed if start == 0 else int(np.random.SeedSequence([seed, start]).generate_state(1)[0])


def _parts(embeddings: np.ndarray) -> list[np.ndarray]:
    """Views of at most `ROWS` rows each."""
    return [embeddings[start : start + ROWS] for start in range(0, len(embeddings), ROWS)]


def _count_distinct(embeddings: np.ndarray, *, enough: int) -> int:
    """Count distinct rows, but no further than `enough`."""
    seen = set()
    for row in embeddings:
        seen.add((row + 0.0).tobytes())  # -0.0 + 0.0 is 0.0
        if len(seen) == enough:
            break
    return len(seen)


def agreement(labels: np.ndarray, clusters: np.ndarray) -> dict[str, float] | None:
    """Compare clusters with true labels, for the report only.

    Returns:
      `purity` and `nmi` in [0, 1], `adjusted_rand` (0: as chance, 1: the same); None where any
      image is unlabelled.
    """
    if len(labels) == 0 or labels.min() < 0:
        return None
    table = contingency_matrix(labels, clusters)
    return {
        "purity": float(table.max(axis=0).sum() / table.sum()),
        "nmi": float(normalized_mutual_info_score(labels, clusters)),
        "adjusted_rand": float(adjusted_rand_score(labels, clusters)),
    }
