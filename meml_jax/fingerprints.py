"""Digests that tell what a file was made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np


def fingerprint(*parts: Any) -> str:
    """Digest of JSON-able values, settings and arrays.

    Only settings that differ from their default count, so a later version's new field, off by
    default, does not make what exists look foreign. The default of an old field must therefore
    never change: what was made with the old value would pass for made with the new one.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            values = {f.name: getattr(value, f.name) for f in fields}
            return {f.name: values[f.name] for f in fields if values[f.name] != f.default}
        return value

    text = json.dumps([plain(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
