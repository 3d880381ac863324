"""Time and memory of the cluster stage at full size; not a test: `python tests/time_clustering.py`.

    python tests/time_clustering.py [--rows=1000000] [--dim=256] [--clusters=1100] [--passes=100]

Embeddings of `clusters` Gaussian classes, half of each one's variance its own; prints progress,
seconds, agreement with the classes, and the most memory that the process ever had, which for
1,000,000 x 256 must stay under 8 GB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from meml_jax import pseudo_labels
from meml_jax.config import Config
from meml_jax.settings import override
from meml_jax.types import Dataset, Split


def embeddings(rows: int, dim: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw embeddings in place, float32 [rows, dim], and their classes."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes, size=rows).astype(np.int32)
    z = rng.standard_normal((rows, dim), dtype=np.float32)
    means = rng.standard_normal((classes, dim), dtype=np.float32)
    for start in range(0, rows, 10_000):
        z[start : start + 10_000] += means[labels[start : start + 10_000]]
    return z, labels


def main() -> int:
    """Measure; exit code 1 where the memory exceeds 8 GB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--clusters", type=int, default=1100)
    parser.add_argument("--passes", type=int, default=100)
    args = parser.parse_args()
    z, labels = embeddings(args.rows, args.dim, args.clusters)
    ids = np.arange(args.rows).astype(str)
    images = np.zeros((args.rows, 1, 1, 1), np.uint8)
    split = Split(images, labels, ids, tuple(map(str, range(args.clusters))))
    dataset = Dataset("drawn", split, split, split, "hash")
    values = {"clustering.num_clusters": args.clusters, "clustering.max_iter": args.passes}
    config = override(Config(), values)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        pseudo_labels.cluster(
            config, dataset, z, Path(folder), lambda line: print(line, flush=True)
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    print(
        f"{args.rows} x {args.dim} ({z.nbytes / 1e9:.2f} GB), {args.clusters} clusters: "
        f"{time.monotonic() - start:.0f} s, peak {peak / 1e9:.2f} GB"
    )
    return int(peak > 8e9)


if __name__ == "__main__":
    sys.exit(main())
