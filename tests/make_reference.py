"""Condense traces of the authors' code into `reference.npz`: `python make_reference.py FOLDER`.

FOLDER holds traces (`meta_small_*.npz`, `test_small_*.npz`) recorded from the official PyTorch
code, github alessiabertugli/FUSION-ME at 6d55ccc, with torch 2.13.0 on a CPU. Its methods were
wrapped from outside, its mathematics was not touched. `f64` traces ran in float64 throughout.

What is small (logits, losses, attention coefficients) is kept as it is. Images, exact multiples of
1/255, are kept as uint8 under a name made from their content, once for all traces that share them.
A large array (gradients, parameters) becomes four numbers: its l2 norm and its products with three
fixed pseudo-random vectors. A wrong entry changes all four.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np

# Seed of the initial parameters of each trace, and what the last two arrays are multiplied by.
INITIAL = {
    "meta_small_attention_f64": (7, 1.0),
    "meta_small_oml_f64": (7, 1.0),
    "meta_small_imagenet_attention_f32": (9, 1.0),
    "meta_small_attention_clip_f64": (12, 40.0),
    "meta_small_attention_balance_f64": (13, 1.0),
    "meta_small_oml_balance_f64": (13, 1.0),
    "meta_small_attention_3steps_f64": (14, 1.0),
    "meta_small_oml_3steps_f64": (14, 1.0),
    "meta_small_attention_k1_f64": (16, 1.0),
    "test_small_oml_f64": (11, 1.0),  # the one of the mean model has the same numbers
}
IMAGES = ("x_spt", "x_qry", "x_train", "x_test")
LEFT_OUT = ("adaptation", "call_order", "clip_changed", "grad_absmax")  # follow from the others


def shapes(names, channels, inputs, last, features, hidden, outputs):
    """List the shapes of the official parameters, in order: OIHW kernels, (out, in) matrices."""
    known = {f"conv{i}": (channels, channels, 3, 3) for i in range(2, 6)} | {
        "conv1": (channels, inputs, 3, 3),
        "conv6": (channels, channels, last, last),
        "att1": (features, features),
        "att2": (1, features),
        "cln1": (hidden, features),
        "cln2": (outputs, hidden),
    }
    layers = [name[3:].rsplit("_", 1) for name in names]  # e.g. 00_conv1_w
    return [known[layer] if kind == "w" else known[layer][:1] for layer, kind in layers]


def initial_parameters(trace: str, names, shapes_) -> dict[str, np.ndarray]:
    """Draw the parameters that a trace starts from: float64 by a fixed seed, rounded to float32."""
    seed, last = INITIAL[trace]
    rng = np.random.default_rng(seed)
    values = {}
    for i, (name, shape) in enumerate(zip(names, shapes_, strict=True)):
        scale = np.sqrt(2 / np.prod(shape[1:])) if name.endswith("_w") else 0.01
        value = rng.standard_normal(shape) * scale * (last if i >= len(names) - 2 else 1.0)
        values[name] = value.astype(np.float32)
    return values


def condense(name: str, value: np.ndarray) -> np.ndarray:
    """Return the l2 norm and three projections of a parameter-shaped array, float64 [4]."""
    value = np.asarray(value, np.float64).ravel()
    vectors = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((3, value.size))
    return np.concatenate([[np.linalg.norm(value)], vectors @ value])


def condense_trace(trace: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Condense one trace; the entries of a group become one array [parameters of the group, 4]."""
    result: dict[str, np.ndarray] = {}
    groups: dict[str, list[np.ndarray]] = {}
    for key, value in trace.items():
        group, _, name = key.rpartition("/")
        if name in trace["param_names"]:
            groups.setdefault(group, []).append(condense(name, value))
        elif name in IMAGES:
            images = np.round(value * 255).astype(np.uint8)
            assert np.array_equal(images.astype(np.float32) / np.float32(255), value)
            result[key] = np.asarray(f"images/{zlib.crc32(images.tobytes()):08x}")
            result[str(result[key])] = images
        elif name not in LEFT_OUT:
            result[key] = value
    return result | {group: np.stack(values) for group, values in groups.items()}


def main(folder: str) -> None:
    """Write `reference.npz` beside this file."""
    result = {}
    for trace in INITIAL:
        with np.load(Path(folder) / f"{trace}.npz") as stored:
            condensed = condense_trace(dict(stored))
        for key, value in condensed.items():
            result[key if key.startswith("images/") else f"{trace}/{key}"] = value
    np.savez_compressed(Path(__file__).with_name("reference.npz"), **result)


if __name__ == "__main__":
    main(sys.argv[1])
