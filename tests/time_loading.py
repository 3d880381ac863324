"""Time the loading of Mini-ImageNet's training images against Pillow alone, on the same cores.

    python tests/time_loading.py DIR

DIR holds train.zip, val.zip and test.zip. Medians of five interleaved repetitions, then of three
loads of the whole set from the cache.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from meml_jax.config import DataConfig
from meml_jax.data import datasets, listing, readers


def pillow_alone(root: Path) -> int:
    """Decode every member of train.zip on all cores and keep nothing."""
    with zipfile.ZipFile(root / "train.zip") as archive, ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [name for name in archive.namelist() if name.endswith(".jpg")]

        def decode(name: str) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB"))

        return sum(1 for _ in pool.map(decode, names, chunksize=64))


def ours(root: Path) -> int:
    files = listing.list_images(root, only=["train"])
    return len(readers.read_images(files, image_size=84, channels=3)[0])


def timed(function, *args) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    wall, cpu = time.monotonic(), time.process_time()
    function(*args)
    return time.monotonic() - wall, time.process_time() - cpu


def median(rows) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def main() -> None:
    root = Path(sys.argv[1])
    rows = [(*timed(pillow_alone, root), *timed(ours, root)) for _ in range(5)]
    wall, cpu, our_wall, our_cpu = median(rows)
    print(f"Pillow alone {wall:.2f} s ({cpu:.2f} s of processor)")
    print(f"ours {our_wall:.2f} s ({our_cpu:.2f} s): {our_wall / wall:.2f} ({our_cpu / cpu:.2f})")
    with tempfile.TemporaryDirectory() as folder:
        config = DataConfig(
            name="mini_imagenet", dir=str(root), image_size=84, channels=3, cache_dir=folder
        )
        datasets.load(config)
        wall, cpu = median([timed(datasets.load, config) for _ in range(3)])
    print(f"whole set from the cache {wall:.2f} s ({cpu:.2f} s of processor)")


if __name__ == "__main__":
    main()
