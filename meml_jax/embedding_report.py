"""What an embedding and its clusters look like, as figures; true labels serve these only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits

from meml_jax import embedding_figures as figures
from meml_jax.config import Config
from meml_jax.embeddings import acai
from meml_jax.types import Clusters, Dataset

QUERIES = 10  # rows of the page of neighbours
NEIGHBOURS = 10
MULTIPLICATIONS = 5e10  # at most, to find neighbours: all of 22 000 embeddings of 100 numbers
CLUSTERS = 8  # rows of the page of clusters
MEMBERS = 12  # images of each
GROUPS = 10  # classes or clusters on the map, of at most
PER_GROUP = 25  # images each
PERPLEXITY = 30.0
PICTURES = 24  # reconstructions
PAIRS = 8  # rows of interpolations, at most half as many
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def write(
    config: Config, dataset: Dataset, z: np.ndarray, clusters: Clusters, workdir: Path
) -> list[str]:
    """Draw the figures of an embedding into `figures/`.

    Args:
      config: settings; the images that are shown follow from its seed.
      dataset: of which the training images were embedded.
      z: float32 [N, D], their embeddings.
      clusters: made of them.
      workdir: where figures go; holds the trained autoencoder of ACAI.

    Returns:
      Names of the figures, without folder and ending.
    """
    split, folder = dataset.train, workdir / "figures"
    labels = split.labels if len(split.labels) > 0 and split.labels.min() >= 0 else None
    rng = np.random.default_rng(config.seed)
    names = ["embedding_neighbours", "embedding_map", "embedding_clusters"]
    name = embedding_name(config, dataset)
    _neighbours(split.images, labels, z, rng, folder / f"{names[0]}.png", name)

    group, kind = (clusters.labels, "clusters") if labels is None else (labels, "true classes")
    rows, own = map_rows(group, rng)
    figures.embedding_map(
        project(z[rows], seed=config.seed),
        own,
        split.images[rows],
        folder / f"{names[1]}.png",
        title=f"{name}\n{own.max() + 1} of {len(np.unique(group))} {kind}, up to {PER_GROUP} "
        "images of each, by t-SNE\ndistances between far groups mean nothing",
    )
    _clusters(
        split.images, labels, z, clusters.labels, folder / f"{names[2]}.png",
        clusters_name(config, dataset),
    )  # fmt: skip
    if config.embedding.name == "acai" and config.clustering.rounds == 1:
        names += _autoencoder(config, split.images, rng, workdir, name)
    return names


def embedding_name(config: Config, dataset: Dataset) -> str:
    """Name the data and the embeddings that are clustered, as they were made, for titles."""
    settings = config.embedding
    last = "meta-trained FEN" if config.clustering.rounds > 1 else f"embedding {settings.name}"
    parts = [dataset.name, last]
    parts += [f"whiten={settings.whiten:g}"] * (settings.whiten > 0)
    return ", ".join(parts + ["length 1"] * settings.normalize)


def clusters_name(config: Config, dataset: Dataset) -> str:
    """Name the data and the clusters that tasks are made of, for titles."""
    if config.tasks.labels == "true":
        return f"{dataset.name}, true classes"
    return f"{embedding_name(config, dataset)}, k-means from {config.clustering.init}"


def _neighbours(
    images: np.ndarray,
    labels: np.ndarray | None,
    z: np.ndarray,
    rng: np.random.Generator,
    path: Path,
    name: str,
) -> None:
    """Draw the page of neighbours; `labels` are the true ones, where there are any."""
    count = min(NEIGHBOURS, len(z) - 1)
    drawn = rng.permutation(len(z))  # the first ones are shown, as many as time allows are counted
    queries = drawn[: min(QUERIES, len(z))]
    title, same = f"{name}\nimages at random and their nearest ones", None
    if labels is None:
        found = nearest(z, queries, count)
    else:
        rows = drawn[: max(int(MULTIPLICATIONS / z.size), len(queries))]
        found = nearest(z, rows, count)
        share, most = same_class(labels, rows, found)
        counted = f"all {len(z)}" if len(rows) == len(z) else f"{len(rows)} of the {len(z)}"
        title = (
            f"{name}\nof the {count} nearest images {count * share:.2f} are of an image's own class"
            + f", at most {count * most:.2f} can be" * (most < 1)
            + f" (mean over {counted} images)"
        )
        found = found[: len(queries)]
        same = labels[found] == labels[queries][:, None]
    shown = np.concatenate([queries[:, None], found], axis=1)
    figures.neighbours(images[shown], same, path, title=title)


def _clusters(
    images: np.ndarray,
    labels: np.ndarray | None,
    z: np.ndarray,
    clusters: np.ndarray,
    path: Path,
    name: str,
) -> None:
    """Draw the page of clusters; `labels` are the true ones, where there are any."""
    chosen = by_size(clusters, CLUSTERS)
    members = [np.flatnonzero(clusters == cluster) for cluster in chosen]
    shown = [rows[from_mean(z[rows], MEMBERS)] for rows in members]
    said, same = [f"{len(rows)} image" + "s" * (len(rows) > 1) for rows in members], None
    if labels is not None:
        frequent = [np.bincount(labels[rows]).argmax() for rows in members]
        same = [labels[rows] == label for rows, label in zip(shown, frequent, strict=True)]
        said = [
            f"{text}\npurity {np.mean(labels[rows] == label):.2f}"
            for text, rows, label in zip(said, members, frequent, strict=True)
        ]
    title = (
        f"{name}\n{len(chosen)} of {len(np.unique(clusters))} clusters, at even steps from the "
        f"largest to the smallest\nup to {MEMBERS} images of each, from the nearest to its mean to "
        "the farthest"
    )
    figures.clusters([images[rows] for rows in shown], same, said, path, title=title)


def _autoencoder(
    config: Config, images: np.ndarray, rng: np.random.Generator, workdir: Path, name: str
) -> list[str]:
    """Draw reconstructions and interpolations."""
    names, folder = ["embedding_reconstructions", "embedding_interpolations"], workdir / "figures"
    params = acai.load(workdir / "embedding", images.shape[1:], config.embedding)
    chosen = images[rng.permutation(len(images))[:PICTURES]]
    decoded = acai.decode_between(params, chosen, chosen, [0.0], config.embedding)[:, 0]
    figures.reconstructions(
        chosen, decoded, folder / f"{names[0]}.png", title=f"{name}\ntraining images"
    )
    half = min(PAIRS, len(chosen) // 2)
    first, second = chosen[:half], chosen[half : 2 * half]
    frames = acai.decode_between(params, first, second, SHARES, config.embedding)
    figures.interpolations(
        first, frames, second, SHARES, folder / f"{names[1]}.png",
        title=f"{name}\nfrom image to image, by the second one's share of the code",
    )  # fmt: skip
    return names


def nearest(z: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Find the nearest other embeddings, by Euclidean distance as k-means: int [len(rows), count].

    Args:
      z: float [N, D].
      rows: int [Q], whose neighbours.
      count: how many, at most N - 1.

    Returns:
      Rows of z, nearest first.
    """
    search = NearestNeighbors(n_neighbors=count + 1, algorithm="brute").fit(z)
    found = search.kneighbors(z[rows], return_distance=False)
    own = found == rows[:, None]
    own[~own.any(axis=1), -1] = True  # an image with more than `count` copies may not find itself
    return found[~own].reshape(len(rows), count)


def same_class(labels: np.ndarray, rows: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Measure how many neighbours are of an image's class, and how many could be at most.

    Args:
      labels: int [N], true classes, from 0.
      rows: int [Q], whose neighbours.
      found: int [Q, K], the neighbours.

    Returns:
      Mean share of the K that are of the image's class, and the same if all other images of its
      class were among them: below 1 where a class has at most K images.
    """
    count = found.shape[1]
    others = np.bincount(labels)[labels[rows]] - 1
    share = np.mean(labels[found] == labels[rows][:, None])
    return float(share), float(np.mean(np.minimum(others, count)) / count)


def by_size(clusters: np.ndarray, count: int) -> np.ndarray:
    """Choose clusters at even quantiles of size: their labels, int [<= count], the largest first.

    Of the labels `clusters`, int [N]; the largest and the smallest are among them, and of equally
    large ones the lower label comes first.
    """
    names, sizes = np.unique(clusters, return_counts=True)
    return names[np.argsort(-sizes, kind="stable")][_evenly(len(names), count)]


def from_mean(z: np.ndarray, count: int) -> np.ndarray:
    """Order embeddings [n, D] of a cluster by distance to their mean: rows, int [<= count].

    Of more than `count` those at even steps of that order, from the nearest to the farthest.
    """
    order = np.argsort(np.linalg.norm(z - z.mean(axis=0), axis=1), kind="stable")
    return order[_evenly(len(z), count)]


def _evenly(length: int, count: int) -> np.ndarray:
    """Places at even steps from 0 to length - 1, the ends included; all where they are few."""
    count = min(length, count)
    return np.arange(count) * (length - 1) // max(count - 1, 1)


def map_rows(group: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw groups with 2 images or more, and images of each: (rows [M], group of each from 0)."""
    names, sizes = np.unique(group, return_counts=True)
    large = names[sizes > 1] if (sizes > 1).any() else names
    chosen = np.sort(rng.choice(large, min(GROUPS, len(large)), replace=False))
    rows = [rng.permutation(np.flatnonzero(group == name))[:PER_GROUP] for name in chosen]
    return np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(part) for part in rows])


def project(z: np.ndarray, *, seed: int) -> np.ndarray:
    """Lay embeddings [N, D] out in 2 dimensions by t-SNE, float32 [N, 2].

    The perplexity, the number of neighbours that count, is 30, or a third of N - 1 where that is
    less, as t-SNE needs it to be below N. The long side lies across.
    """
    if len(z) < 4:
        return np.pad(np.arange(len(z), dtype=np.float32)[:, None], ((0, 0), (0, 1)))
    perplexity = min(PERPLEXITY, (len(z) - 1) / 3)
    init = "pca" if min(z.shape) >= 2 else "random"
    with threadpool_limits(1):  # the same sums in the same order on every machine
        points = TSNE(perplexity=perplexity, init=init, random_state=seed).fit_transform(z)
        points -= points.mean(axis=0)
        _, _, axes = np.linalg.svd(points, full_matrices=False)
    return points @ axes.T
