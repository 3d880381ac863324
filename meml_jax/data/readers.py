"""Images from class folders and zip archives of them, as uint8 arrays in a stable order.

Every image is treated alike, in this order: first frame of an animation, EXIF orientation,
transparency composited on white, grey (ITU-R 601 luma) or RGB, 16-bit grey divided by 257, the
centre square cut out (what is outside of it is lost), resized with Pillow's antialiased `FILTER`.
"""

from __future__ import annotations

import contextlib
import io
import os
import unicodedata
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from meml_jax.types import UserError

VERSION = 1  # of what an image becomes; a change re-makes all caches
# On Omniglot at 28x28 the nearest class mean of raw pixels (10/50/100/200 test characters, 15 + 5
# images, 50 draws) is right in 73.0/53.6/45.4/37.7 % with LANCZOS and 72.7/53.1/44.9/37.3 % with
# BOX; photographs that are enlarged need LANCZOS.
FILTER = Image.Resampling.LANCZOS
SUFFIXES = (".png .jpg .jpeg .bmp .gif .tif .tiff .webp .pbm .pgm .ppm").split()
Progress = Callable[[int, int], None]
Report = Callable[[str], None]
_CHUNK = 64  # images a thread takes at once: enough to hide the cost of handing them out


class ImageFile(NamedTuple):
    """One image that can be read: a file on disk, or a member of a zip archive.

    Attributes:
      id: path below the data folder with `/`; a zip counts as unpacked where it lies.
      path: the file, or the archive.
      member: name inside the archive, None for a file on disk.
      stamp: text that changes when the content does.
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
        report(f"{root}: skipped {len(empty)} folders without images: {_first(empty)}")
    return sorted(files, key=lambda file: file.id.split("/"))


def read_images(
    files: Sequence[ImageFile],
    *,
    image_size: int,
    channels: int,
    skip_bad: bool = False,
    report: Report = print,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode images with all processor cores; Pillow works outside of Python's global lock.

    Args:
      files: what `list_images` gave, N of them.
      image_size: side S of the result, pixels.
      channels: C, 1 or 3.
      skip_bad: leave out what cannot be read instead of raising.
      report: called with one line on what was left out.
      progress: called as `progress(done, N)`.

    Returns:
      images uint8 [M, S, S, C] and the positions int64 [M] in `files` that they come from.

    Raises:
      UserError: images that cannot be read; the first five and the reasons are named.
    """
    images = np.empty((len(files), image_size, image_size, channels), np.uint8)
    bad: dict[int, str] = {}
    with open_files(files) as content, ThreadPoolExecutor(os.cpu_count()) as pool:

        def read_chunk(start: int) -> int:
            stop = min(start + _CHUNK, len(files))
            for i in range(start, stop):
                try:
                    data = content(files[i])
                    images[i] = decode(data, image_size=image_size, channels=channels)
                except MemoryError:
                    raise
                except Exception as error:  # decoders raise about anything on a broken file
                    bad[i] = f"{files[i].id} ({_reason(error)})"
            return stop

        for done in pool.map(read_chunk, range(0, len(files), _CHUNK)):
            if progress is not None:
                progress(done, len(files))
    if not bad:
        return images, np.arange(len(files))
    found = f"{len(bad)} of {len(files)} images cannot be read: " + _first(
        [bad[i] for i in sorted(bad)]
    )
    if not skip_bad or len(bad) == len(files):
        raise UserError(f"{found}. Repair or remove them, or set data.skip_bad=True")
    report(f"left out (data.skip_bad): {found}")
    kept = np.setdiff1d(np.arange(len(files)), list(bad))
    return images[kept], kept


@contextlib.contextmanager
def open_files(files: Sequence[ImageFile]) -> Iterator[Callable[[ImageFile], bytes]]:
    """Give the function that reads the content of one of `files`; it opens each archive once."""
    with contextlib.ExitStack() as stack:
        zips = {file.path for file in files if file.member}
        archives = {path: stack.enter_context(open_zip(path)) for path in zips}

        def content(file: ImageFile) -> bytes:
            return archives[file.path].read(file.member) if file.member else file.path.read_bytes()

        yield content


def decode(data: bytes, *, image_size: int, channels: int) -> np.ndarray:
    """Decode one image file as the head of this module says.

    Args:
      data: content of the file.
      image_size: side S, pixels.
      channels: C, 1 or 3.

    Returns:
      uint8 [S, S, C].

    Raises:
      Exception: whatever the decoder meets; a ValueError where the reason is known.
    """
    if not data:
        raise ValueError("zero bytes")
    try:
        with Image.open(io.BytesIO(data)) as image:
            # JPEGs far larger than needed are decoded at 1/2, 1/4 or 1/8: many times faster.
            image.draft(None, (2 * image_size, 2 * image_size))
            ImageOps.exif_transpose(image, in_place=True)
            return fit(image, image_size=image_size, channels=channels)
    except UnidentifiedImageError:
        raise ValueError(f"not an image: {_looks_like(data)}") from None


def fit(image: Image.Image, *, image_size: int, channels: int) -> np.ndarray:
    """Bring an image to uint8 [S, S, C]: white behind it, grey or RGB, centre square, resized."""
    if image.mode == "F":
        raise ValueError("floating-point pixels; save it with 8 or 16 bit")
    if image.mode.startswith("I"):  # Pillow would clip at 255 instead of scaling
        wide = np.asarray(image).astype(np.int64)
        if wide.min(initial=0) < 0 or wide.max(initial=0) > 65535:
            raise ValueError("32-bit pixels outside of 0..65535; save it with 8 or 16 bit")
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    side, (width, height) = min(image.size), image.size
    left, top = (width - side) // 2, (height - side) // 2
    if (width, height) != (image_size, image_size):
        box = (left, top, left + side, top + side)
        image = image.crop(box).resize((image_size, image_size), FILTER)
    return np.asarray(image).reshape(image_size, image_size, channels)


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
                status = path.stat()
                stamp = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"
                yield ImageFile(_id((below / name).as_posix()), path, None, stamp)


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
        stamp = f"{info.CRC:08x} {info.file_size}"
        yield id_ if info.is_dir() else ImageFile(id_, path, info.filename, stamp)


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open an archive, or say what the file is instead."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError):
            got = str(error.strerror)
        else:
            with path.open("rb") as file:
                got = _looks_like(file.read(512))
        raise UserError(
            f"{path}: got {got}, expected a complete zip archive; fetch the file again"
        ) from None


def _looks_like(data: bytes) -> str:
    """Say what a file is that is not what it should be."""
    if not data:
        return "zero bytes"
    if data.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page (a failed download?)"
    return f"content that is cut off or of another kind, it begins with {data[:12]!r}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


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


def _first(names: Sequence[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
