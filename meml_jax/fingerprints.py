"""Digests that tell what a file was made from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import re
import tokenize
import types
from collections.abc import Callable
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


@functools.cache  # a file may be edited while what was read of it runs
def said(function: Callable[..., Any]) -> str:
    """Write down a function: its source, or its code where that is not found, and its values."""
    if isinstance(function, functools.partial):
        names = sorted(function.keywords)
        parts = [function.func, *function.args, *names, *map(function.keywords.get, names)]
    else:
        parts = [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]
        cells = getattr(function, "__closure__", None) or ()
        parts += [c.cell_contents for c in cells if c.cell_contents is not function]
        try:
            parts.append(inspect.getsource(function))
        except (OSError, TypeError, SyntaxError, tokenize.TokenError):
            code = getattr(function, "__code__", None)
            what = (
                (code.co_code, code.co_consts)
                if code
                else (type(function), getattr(function, "__dict__", None))
            )
            parts.append(what)
    kinds = (types.FunctionType, functools.partial)
    words = (said(part) if isinstance(part, kinds) else repr(part) for part in parts)
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(words))  # of a place in memory
