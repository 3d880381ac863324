"""SIGINT and SIGTERM: collected while something goes on that saves its state before it stops."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; a training has saved its state.

    No Exception, as KeyboardInterrupt is none: what turns the many errors of a library into a
    message of its own must not take a stop for a damaged file.

    Attributes:
      signum: the signal.
    """

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum


@contextlib.contextmanager
def collect() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying; a second one kills as usual."""
    received: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    previous = {kind: signal.getsignal(kind) for kind in kinds}

    def handle(signum: int, frame: Any) -> None:
        received.append(signum)
        for kind in kinds:
            signal.signal(kind, previous[kind])

    try:
        for kind in kinds:
            signal.signal(kind, handle)
    except ValueError:  # not the main thread: the caller handles signals
        yield received
        return
    try:
        yield received
    finally:
        for kind in kinds:
            signal.signal(kind, previous[kind])
