"""What an embedding and its clusters look like, as figures; true labels serve these only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from meml_jax import embedding_figures as figures
from meml_jax.config import Config
from meml_jax.embeddings import acai
from meml_jax.types import Clusters, Dataset

QUERIES = 10  # rows of the page of neighbours
NEIGHBOURS = 10
GROUPS = 20  # classes or clusters on the map, of at most
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
    labelled = len(split.labels) > 0 and split.labels.min() >= 0
    rng = np.random.default_rng(config.seed)
    names = ["embedding_neighbours", "embedding_map"]
    again = config.clustering.rounds > 1
    name = f"{dataset.name}, " + (
        "meta-trained FEN" if again else f"embedding {config.embedding.name}"
    )

    queries = np.sort(rng.choice(len(z), min(QUERIES, len(z)), replace=False))
    found = nearest(z, queries, min(NEIGHBOURS, len(z) - 1))
    shown = np.concatenate([queries[:, None], found], axis=1)
    figures.neighbours(
        split.images[shown],
        split.labels[found] == split.labels[queries][:, None] if labelled else None,
        folder / f"{names[0]}.png",
        title=f"{name}: nearest images",
    )
    group = split.labels if labelled else clusters.labels
    rows, own = map_rows(group, rng)
    figures.embedding_map(
        project(z[rows], seed=config.seed),
        own,
        split.images[rows],
        folder / f"{names[1]}.png",
        title=f"{name}: t-SNE of {own.max() + 1} " + ("true classes" if labelled else "clusters"),
    )
    if config.embedding.name == "acai" and not again:
        names += _autoencoder(config, split.images, rng, workdir, name)
    return names


def _autoencoder(
    config: Config, images: np.ndarray, rng: np.random.Generator, workdir: Path, name: str
) -> list[str]:
    """Draw reconstructions and interpolations."""
    names, folder = ["embedding_reconstructions", "embedding_interpolations"], workdir / "figures"
    params = acai.load(workdir / "embedding", images.shape[1:], config.embedding)
    chosen = images[rng.permutation(len(images))[:PICTURES]]
    decoded = acai.decode_between(params, chosen, chosen, [0.0], config.embedding)[:, 0]
    figures.reconstructions(
        chosen, decoded, folder / f"{names[0]}.png", title=f"{name}: training images"
    )
    half = min(PAIRS, len(chosen) // 2)
    first, second = chosen[:half], chosen[half : 2 * half]
    frames = acai.decode_between(params, first, second, SHARES, config.embedding)
    figures.interpolations(
        first, frames, second, SHARES, folder / f"{names[1]}.png",
        title=f"{name}: from image to image, by the second one's share of the code",
    )  # fmt: skip
    return names


def nearest(z: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Find the nearest other embeddings, by Euclidean distance as k-means: int [len(rows), count].

    Args:
      z: float [N, D].
      rows: int [Q], whose neighbours.
      count: how many, at most N - 1.

    Returns:
      Rows of z, nearest first; of equal distances the lower row first.
    """
    distance = cdist(z[rows], z)
    distance[np.arange(len(rows)), rows] = np.inf
    return np.argsort(distance, axis=1, kind="stable")[:, :count]


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
    less, as t-SNE needs it to be below N.
    """
    if len(z) < 4:
        return np.pad(np.arange(len(z), dtype=np.float32)[:, None], ((0, 0), (0, 1)))
    perplexity = min(PERPLEXITY, (len(z) - 1) / 3)
    init = "pca" if min(z.shape) >= 2 else "random"
    with threadpool_limits(1):  # the same sums in the same order on every machine
        return TSNE(perplexity=perplexity, init=init, random_state=seed).fit_transform(z)
