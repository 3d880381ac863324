"""Draw class folders of coloured characters, to try loaders where the real images are not at hand.

    python tests/make_pictures.py DIR --classes=50 --images=24 --side=64
    python tests/make_pictures.py DIR --classes=40 --images=24 --mixed

The first has the shape of SlimageNet64; the second mixes sizes and formats, in nested folders.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from meml_jax.data import glyphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--images", type=int, default=24, help="of each class")
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--mixed", action="store_true", help="other sizes and formats")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    ink, labels, _ = glyphs.generate(
        num_classes=options.classes, per_class=options.images, image_size=options.side, seed=0
    )
    colours = rng.integers(0, 256, (options.classes, 2, 3))  # paper and ink of each class
    formats = ("png", "jpg", "bmp", "webp") if options.mixed else ("png",)
    for i, (image, label) in enumerate(zip(ink, labels, strict=True)):
        share = image.astype(np.float64) / 255
        shade = np.clip(colours[label] + rng.normal(0, 40, (2, 3)), 0, 255)
        picture = Image.fromarray((shade[0] + share * (shade[1] - shade[0])).astype(np.uint8))
        folder = options.folder / f"class{label:04d}"
        if options.mixed:
            folder = options.folder / f"group {label % 3}" / f"Klasse ä{label:04d}"
            picture = picture.resize(tuple(rng.integers(options.side, 4 * options.side, 2)))
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{i:06d}.{formats[i % len(formats)]}")


if __name__ == "__main__":
    main()
