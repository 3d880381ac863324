"""Fetch official archives, with the checksums that TensorFlow Datasets (TFDS) keeps, and unpack.

Of TFDS only the download manager is used, which does not import TensorFlow.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from meml_jax.types import UserError


def fetch(
    name: str,
    folder: Path,
    urls: Mapping[str, str],
    *,
    timeout: float,
    report: Callable[[str], None] = print,
) -> None:
    """Download archives of a data set, check their sha256 and put them into `folder`.

    Args:
      name: of the data set, for messages.
      folder: where the files are put; made where it is missing.
      urls: file name to address; addresses whose checksum TFDS knows.
      timeout: seconds after which a server that does not answer counts as out of reach.
      report: called with one line before the download.

    Raises:
      UserError: `folder` is a file, TFDS is not installed, the server cannot be reached, or a
        checksum differs; the message says how to put the files there by hand.
    """
    files, sources = " and ".join(urls), " and ".join(urls.values())
    by_hand = f"or put {files} into {folder} (data.dir) by hand, from {sources}"
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{name}: {files} not found, and data.dir: got {folder}, which is a file; expected a "
            f"folder for the download or with them"
        )
    try:
        import requests
        from tensorflow_datasets.core.download import download_manager
    except ImportError as error:
        raise UserError(
            f"{name}: {files} not found in {folder}, and the download needs TFDS "
            f"({error}): pip install 'meml_jax[tfds]', {by_hand}"
        ) from None
    report(f"{name}: downloading {files} from {sources} to {folder}")
    try:
        # TFDS waits without limit and tries ten times (over three minutes), so ask first.
        for url in urls.values():
            with requests.get(url, stream=True, timeout=timeout) as answer:
                answer.raise_for_status()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download") as temporary:
            manager = download_manager.DownloadManager(
                download_dir=temporary, force_checksums_validation=True
            )
            for file, url in urls.items():
                os.replace(manager.download(url), folder / file)
    except Exception as error:  # TFDS passes on whatever requests, promise and the disk raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name}: download of {files} to {folder} failed: {reason}. "
            f"Try again with a network connection, {by_hand}"
        ) from error


def unpack(archive: Path, member: str, *, report: Callable[[str], None] = print) -> Path:
    """Unpack one folder of a tar archive beside it, whole or not at all.

    Args:
      archive: the file.
      member: name of the folder, at the top of the archive.
      report: called with one line before.

    Returns:
      The folder; where another process has made it meanwhile, that one.

    Raises:
      UserError: it is no complete tar archive, has no such folder, or the disk cannot be written.
    """
    target = archive.parent / member
    before = target.exists()
    report(f"unpacking {archive} to {target}")
    try:
        with (
            tarfile.open(archive) as tar,
            tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpack") as temporary,
        ):
            tar.extractall(temporary, filter="data")  # refuses paths that lead out of the folder
            try:
                os.replace(Path(temporary, member), target)
            except OSError:
                if before or not target.is_dir():
                    raise
    except (OSError, EOFError, tarfile.TarError) as error:
        reason = str(error).split("\n")[0].rstrip(":- ")
        raise UserError(
            f"{archive}: got {reason}, expected a complete archive with {member}/, and a folder "
            f"that can be written; fetch it again, or put {member}/ there by hand"
        ) from None
    return target
