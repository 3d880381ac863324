"""Which image files there are: in folders and in zip archives, in a stable order."""

from __future__ import annotations

import contextlib
import os
import unicodedata
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from meml_jax.types import Report, UserError

SUFFIXES = (".png .jpg .jpeg .bmp .gif .tif .tiff .webp .pbm .pgm .ppm").split()


class ImageFile(NamedTuple):
    """One image that can be read: a file on disk, or a member of a zip archive.

    Attributes:
      id: path below the data folder with `/`; a zip counts as unpacked where it lies.
      path: the file, or the archive.
      member: name inside the archive, None for a file on disk.
      stamp: what caches take for the content: path, size and time of last change of a file on disk;
        checksum (CRC-32) and size of a member, wherever its archive lies.
    """

    id: str
    path: Path
    member: str | None
    stamp: str


def list_images(
    root: Path, *, only: Collection[str] | None = None, report: Report = print
) -> list[ImageFile]:
    """List the images below a folder (with the zips that lie directly in it) or in one zip.

    Hidden files, `__MACOSX` and files that are not images by their suffix are passed over; a zip
    is passed over where a folder of its name lies beside it; empty folders are reported. If the
    members of `NAME.zip` are not all below `NAME/`, their ids get `NAME/` in front.

    Args:
      root: folder or zip.
      only: names of the folders (or zips, without suffix) directly in `root` to look at.
      report: called with one line on empty folders.

    Returns:
      The images, sorted by the parts of their id: the order of the file system plays no role.

    Raises:
      UserError: `root` does not exist, or a zip is not a zip.
    """
    if root.is_file():
        entries = [*_list_zip(root)]
    elif root.is_dir():
        entries = [*_list_folder(root, only)]
        for path in sorted(root.iterdir()):
            wanted = path.suffix.lower() == ".zip" and _visible(path.name)
            if wanted and (only is None or path.stem in only) and not (root / path.stem).is_dir():
                entries += _list_zip(path)
    else:
        raise UserError(f"data.dir: got {root}, expected a folder or zip that exists")
    files = [entry for entry in entries if isinstance(entry, ImageFile)]
    occupied = {parent for file in files for parent in _parents(file.id)}
    folders = {entry for entry in entries if isinstance(entry, str)} - occupied
    empty = sorted(folders - {parent for folder in folders for parent in _parents(folder)})
    if empty:
        report(f"{root}: skipped {len(empty)} folders without images: {first_few(empty)}")
    return sorted(files, key=lambda file: file.id.split("/"))


@contextlib.contextmanager
def open_files(files: Sequence[ImageFile]) -> Iterator[Callable[[ImageFile], bytes]]:
    """Give the function that reads the content of one of `files`; it opens each archive once."""
    with contextlib.ExitStack() as stack:
        zips = {file.path for file in files if file.member}
        archives = {path: stack.enter_context(open_zip(path)) for path in zips}

        def content(file: ImageFile) -> bytes:
            return archives[file.path].read(file.member) if file.member else file.path.read_bytes()

        yield content


def stamp(path: Path) -> str:
    """Path, size and time of last change of a file; its content is not read."""
    status = path.stat()
    return f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open an archive, or say what the file is instead."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError):
            got = str(error.strerror)
        else:
            with path.open("rb") as file:
                got = looks_like(file.read(512))
        raise UserError(
            f"{path}: got {got}, expected a complete zip archive; fetch the file again"
        ) from None


def looks_like(data: bytes) -> str:
    """Say what a file is that is not what it should be."""
    if not data:
        return "zero bytes"
    if data.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page (a failed download?)"
    return f"content that is cut off or of another kind, it begins with {data[:12]!r}"


def first_few(names: Sequence[str], count: int = 5) -> str:
    """Join the first names, for a message."""
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def _list_folder(root: Path, only: Collection[str] | None) -> Iterator[ImageFile | str]:
    """Yield image files, and the ids of folders, below `root`."""

    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}; make the folder readable")

    for base, folders, names in os.walk(root, followlinks=True, onerror=fail):
        if only is not None and Path(base) == root:
            folders[:], names = [name for name in folders if name in only], []
        folders[:] = [n for n in folders if _visible(n) and not _is_loop(os.path.join(base, n))]
        below = Path(base).relative_to(root)
        yield from (_id((below / name).as_posix()) for name in folders)
        for name in filter(_is_image, names):
            path = Path(base, name)
            if path.is_file():  # not a link to nothing
                yield ImageFile(_id((below / name).as_posix()), path, None, stamp(path))


def _list_zip(path: Path) -> Iterator[ImageFile | str]:
    """Yield image files, and the ids of folders, in a zip."""
    with open_zip(path) as archive:
        members = [
            (info, info.filename.replace("\\", "/").rstrip("/"))
            for info in archive.infolist()
            if info.is_dir() or _is_image(info.filename)
        ]
    members = [(info, name) for info, name in members if all(map(_visible, name.split("/")))]
    inside = all(name.split("/")[0] == path.stem for _, name in members)
    for info, name in members:
        id_ = _id(name if inside else f"{path.stem}/{name}")
        checksum = f"{info.CRC:08x} {info.file_size}"
        yield id_ if info.is_dir() else ImageFile(id_, path, info.filename, checksum)


def _visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _is_image(name: str) -> bool:
    return _visible(name) and name.lower().endswith(tuple(SUFFIXES))


def _is_loop(folder: str) -> bool:
    """Tell whether a folder is a link to a folder that contains the link: a walk without end."""
    target = os.path.realpath(folder)
    here = os.path.realpath(os.path.dirname(folder))
    return os.path.islink(folder) and os.path.commonpath([here, target]) == target


def _id(path: str) -> str:
    """Compose accents, which some file systems store apart from their letters."""
    return unicodedata.normalize("NFC", path)


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
