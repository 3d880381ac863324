"""Image files as uint8 arrays.

Every image is treated alike, in this order: first frame of an animation, EXIF orientation,
transparency composited on white, grey (ITU-R 601 luma) or RGB, 16-bit grey divided by 257, the
centre square cut out (what is outside of it is lost), resized with Pillow's antialiased `FILTER`.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from meml_jax.data.listing import ImageFile, first_few, looks_like, open_files
from meml_jax.types import OnProgress, Report, UserError

VERSION = 1  # of what an image becomes; a change re-makes all caches
# On Omniglot at 28x28 the nearest class mean of raw pixels (10/50/100/200 test characters, 15 + 5
# images, 50 draws) is right in 73.0/53.6/45.4/37.7 % with LANCZOS and 72.7/53.1/44.9/37.3 % with
# BOX; photographs that are enlarged need LANCZOS.
FILTER = Image.Resampling.LANCZOS
_CHUNK = 64  # images a thread takes at once: enough to hide the cost of handing them out


def read_images(
    files: Sequence[ImageFile],
    *,
    image_size: int,
    channels: int,
    skip_bad: bool = False,
    report: Report = print,
    progress: OnProgress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode images with all processor cores; Pillow works outside of Python's global lock.

    Args:
      files: what `listing.list_images` gave, N of them.
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
    with open_files(files) as content:

        def read(i: int) -> None:
            try:
                data = content(files[i])
                images[i] = decode(data, image_size=image_size, channels=channels)
            except MemoryError:
                raise
            except Exception as error:  # decoders raise about anything on a broken file
                bad[i] = f"{files[i].id} ({_reason(error)})"

        for_each(read, len(files), progress=progress)
    if not bad:
        return images, np.arange(len(files))
    found = f"{len(bad)} of {len(files)} images cannot be read: " + first_few(
        [bad[i] for i in sorted(bad)]
    )
    if not skip_bad or len(bad) == len(files):
        raise UserError(f"{found}. Repair or remove them, or set --config.data.skip_bad=true")
    report(f"left out (data.skip_bad): {found}")
    kept = np.setdiff1d(np.arange(len(files)), list(bad))
    return images[kept], kept


def for_each(do: Callable[[int], None], count: int, *, progress: OnProgress | None = None) -> None:
    """Call `do(i)` for i in 0..count-1 with all processor cores.

    An exception, that of Ctrl-C too, is raised as soon as the calls that have begun are
    through; no other is begun.

    Args:
      do: may run in several threads at once.
      count: number of calls.
      progress: called as `progress(done, count)` after each chunk, in order.
    """

    def do_chunk(chunk: range) -> int:
        for i in chunk:
            if stopped.is_set():
                break
            do(i)
        return chunk.stop

    stopped = threading.Event()
    chunks = [range(i, min(i + _CHUNK, count)) for i in range(0, count, _CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for done in pool.map(do_chunk, chunks):
                if progress is not None:
                    progress(done, count)
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
        raise ValueError(f"not an image: {looks_like(data)}") from None


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


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
