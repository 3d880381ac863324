"""Whether a set for the test is made of images that were trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from meml_jax.types import Report, Split, UserError

SEEN = 0.01
"""Share of a set for the test that may be training or validation images; published sets have a few
images twice, and some in common."""


def check(name: str, own: Sequence[Split], test_name: str, test: Split, *, report: Report) -> None:
    """Refuse a set for the test that is made of images of the training set, byte for byte.

    So the same files under another name are found, such as a copy of the folder.

    Args:
      name: of the training set.
      own: its training and validation images.
      test_name: of the set for the test.
      test: its images.
      report: called with a warning where only a few are the same.

    Raises:
      UserError: more than a share of `SEEN` are the same.
    """
    known = {_digest(image) for part in own for image in part.images}
    seen = [id_ for x, id_ in zip(test.images, test.ids, strict=True) if _digest(x) in known]
    if not seen:
        return
    found = (
        f"{len(seen)} of {len(test.ids)} images of {test_name}, such as {seen[0]}, are training "
        f"or validation images of {name}"
    )
    if len(seen) > SEEN * len(test.ids):
        raise UserError(
            f"test_data.name, test_data.dir: got {found}; expected another set, or "
            "test_data.name=None for the set's own test classes"
        )
    report(f"WARNING: {found}")


def _digest(image: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()
