"""A stop while a program still imports what it needs ends it at once, with a line, as later.

Imported first, with nothing but the standard library, and replaced by `console.stops_are_told`.
Until then a KeyboardInterrupt would be a traceback, or be dropped by a callback of JAX's.
"""

import os
import signal
from typing import Any


def _stop(signum: int, frame: Any) -> None:
    print("stopped; the same command goes on", flush=True)
    os._exit(128 + signum)


for _signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_signum, _stop)
