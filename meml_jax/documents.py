"""A Markdown document with blocks that programs write, each between marks of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from meml_jax.files import lock_beside, write_atomic, writing
from meml_jax.types import UserError


def beside(path: Path) -> Path:
    """Folder that keeps what a document's blocks are made of: docs/results for docs/results.md."""
    return path.with_suffix("")


def check(path: Path, name: str, kept: Path) -> None:
    """Refuse, before the work, what `write_block` could not do.

    Args:
      path: the document.
      name: of the block.
      kept: folder of what it is made of, JSON files somewhere below it.

    Raises:
      UserError: no Markdown file, one that cannot be read or written, a name that breaks its marks,
        or a block that is there though nothing is kept of it, which would be lost.
    """
    if path.suffix not in (".md", ".markdown"):
        raise UserError(
            f"--write_docs={path}, expected a Markdown file, with a name like {path.stem}.md"
        )
    if not name.isprintable() or "--" in name:
        raise UserError(f"a block cannot be named {name!r}; expected no `--` and no line break")
    _inserted(path, name, "")
    there = path.exists() and _marks(name)[0] in path.read_text(encoding="utf-8")
    if there and not any(kept.rglob("*.json")):
        raise UserError(
            f"{path} has the block {name!r}, but {kept}, of which it would be made anew, holds "
            "no results; delete the block, or name another document or --label"
        )
    with writing(kept):
        kept.mkdir(parents=True, exist_ok=True)
    for place in (path.parent, kept, *([path] if path.exists() else [])):
        if not os.access(place, os.W_OK):
            raise UserError(f"cannot write {place}; make it writable or name another document")
    with locked(path):  # raises where the lock cannot be made
        pass


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from a document and what is beside it, that none loses a block.

    The lock lies beside the document, where all processes and hosts that write it see the same.
    """
    with lock_beside(path, wait=True):
        yield


def write_block(path: Path, name: str, text: str) -> None:
    """Put a block into a document, a file that need not exist, as `insert` does.

    It stays the file that a link leads to, with the permissions it has.
    """
    text, place = _inserted(path, name, text), path.resolve()
    mode = place.stat().st_mode if place.exists() else None
    write_atomic(place, text)
    if mode is not None:
        place.chmod(mode)


def _inserted(path: Path, name: str, text: str) -> str:
    try:
        document = path.read_bytes().decode() if path.exists() else ""  # line ends as they are
        return insert(document, name, text)
    except (OSError, UnicodeDecodeError, UserError) as error:
        raise UserError(f"{path}: {error}; mend it or name another document") from None


def _marks(name: str) -> tuple[str, str]:
    """What stands before and after a block."""
    return f"<!-- begin {name} (generated) -->", f"<!-- end {name} -->"


def insert(document: str, name: str, text: str) -> str:
    """Put a block into a document, in the place of the block of that name, else at its end.

    It gets the line ends that most of the document has; what is outside stays as it is.

    Raises:
      UserError: the block's beginning or end is missing, or there twice.
    """
    begin, end = _marks(name)
    block = f"{begin}\n\n{text.strip()}\n\n{end}"
    line_end = "\r\n" if 2 * document.count("\r\n") > document.count("\n") else "\n"
    block = block.replace("\n", line_end)
    found = (document.count(begin), document.count(end))
    if found == (0, 0):
        before = f"{document.rstrip()}{2 * line_end}" if document.strip() else ""
        return before + block + line_end
    if found != (1, 1) or document.index(begin) > document.index(end):
        raise UserError(f"expected one `{begin}` and after it one `{end}` in the document")
    before, rest = document.split(begin)
    return before + block + rest.split(end)[1]
