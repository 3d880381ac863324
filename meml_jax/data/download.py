"""Fetch Omniglot's two archives, with the checksums that TensorFlow Datasets (TFDS) keeps.

Of TFDS only the download manager is used, which does not import TensorFlow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from meml_jax.types import UserError

OMNIGLOT_URL = "https://github.com/brendenlake/omniglot/raw/master/python/"


def omniglot(
    folder: Path, names: Sequence[str], *, timeout: float, report: Callable[[str], None] = print
) -> None:
    """Download archives of Omniglot, check their sha256 and put them into `folder`.

    Args:
      folder: where `NAME.zip` is put; made where it is missing.
      names: of `images_background` and `images_evaluation`, those that are wanted.
      timeout: seconds after which a server that does not answer counts as out of reach.
      report: called with one line before the download.

    Raises:
      UserError: TFDS is not installed, the server cannot be reached, or a checksum differs; the
        message says how to put the files there by hand.
    """
    files = [f"{name}.zip" for name in names]
    by_hand = f"or put {' and '.join(files)} into {folder} (data.dir) by hand, from {OMNIGLOT_URL}"
    try:
        import requests
        from tensorflow_datasets.core.download import download_manager
    except ImportError as error:
        raise UserError(
            f"omniglot: {' and '.join(files)} not found in {folder}, and the download needs TFDS "
            f"({error}): pip install 'meml_jax[tfds]', {by_hand}"
        ) from None
    report(f"omniglot: downloading {' and '.join(files)} from {OMNIGLOT_URL} to {folder}")
    try:
        # TFDS waits without limit and tries ten times (over three minutes), so ask first.
        for file in files:
            with requests.get(OMNIGLOT_URL + file, stream=True, timeout=timeout) as answer:
                answer.raise_for_status()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download") as temporary:
            manager = download_manager.DownloadManager(
                download_dir=temporary, force_checksums_validation=True
            )
            for file in files:
                os.replace(manager.download(OMNIGLOT_URL + file), folder / file)
    except Exception as error:  # TFDS passes on whatever requests, promise and the disk raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"omniglot: download of {' and '.join(files)} to {folder} failed: {reason}. "
            f"Try again with a network connection, {by_hand}"
        ) from error
