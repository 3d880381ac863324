"""Glyphs: handwriting-like characters drawn as pen strokes, generated, so nothing is downloaded.

A stand-in for Omniglot: alphabets with a style, characters of 1-4 strokes, one drawing of each by
every drawer. Size, pen width, ink and the accuracy of a nearest class mean are near Omniglot's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from scipy.interpolate import make_interp_spline

_ANGULAR = (
    [(0, 0), (0, 10)],  # stem
    [(0, 0), (10, 0)],  # bar
    [(0, 10), (10, 0)],  # slash
    [(0, 0), (0, 10), (10, 10)],  # L
    [(0, 0), (10, 0), (4, 10)],  # 7
    [(0, 0), (5, 10), (10, 0)],  # V
    [(0, 0), (10, 0), (0, 10), (10, 10)],  # Z
    [(0, 0), (0, 5), (10, 5), (10, 10)],  # step
    [(0, 0), (0, 10), (10, 10), (10, 0)],  # trough
    [(0, 0), (3, 10), (5, 2), (7, 10), (10, 0)],  # W
    [(0, 0), (0, 10), (10, 10), (10, 0), (0, 0)],  # box
    [(5, 0), (0, 10), (10, 10), (5, 0)],  # triangle
)
_ROUND = (
    [(10, 1), (4, 0), (0, 5), (4, 10), (10, 9)],  # C
    [(0, 0), (7, 1), (10, 5), (7, 9), (0, 10)],  # bowl
    [(10, 0), (10, 7), (6, 10), (0, 8)],  # hook
    [(1, 3), (4, 0), (8, 2), (9, 10)],  # cane
    [(0, 10), (0, 3), (5, 0), (10, 3), (10, 10)],  # arch
    [(0, 0), (0, 9), (1, 6), (5, 4), (9, 6), (9, 10)],  # h
    [(0, 10), (0, 1), (4, 1), (5, 8), (6, 1), (9, 1), (10, 10)],  # m
    [(5, 0), (1, 2), (1, 8), (5, 10), (9, 8), (9, 2), (5, 0)],  # loop
    [(10, 1), (5, 0), (1, 2), (5, 5), (9, 8), (5, 10), (0, 9)],  # S
    [(0, 1), (7, 0), (9, 2), (4, 5), (10, 7), (6, 10), (0, 9)],  # 3
    [(0, 2), (5, 0), (9, 3), (4, 7), (0, 10), (10, 10)],  # 2
    [(10, 0), (2, 3), (0, 7), (5, 10), (10, 7), (6, 5), (1, 7)],  # 6
    [(9, 2), (4, 0), (0, 3), (4, 6), (9, 2), (9, 10)],  # 9
    [(10, 0), (5, 7), (2, 10), (0, 5), (2, 0), (5, 3), (10, 10)],  # alpha
    [(0, 5), (9, 4), (6, 0), (0, 3), (2, 9), (9, 9)],  # e
    [(0, 6), (2, 2), (5, 5), (7, 8), (10, 4)],  # wave
)
"""Control points, in tenths of a unit square, of the movements that pen strokes are made of."""


@dataclasses.dataclass(frozen=True)
class GlyphInfo:
    """What is known about the generated characters beside their labels.

    Attributes:
      alphabet: int32 [num_classes], the alphabet of each class, counted from 0.
      strokes: int32 [num_classes], the pen strokes of each class.
      drawer: int32 [num_classes * per_class], who drew each image; one person has one number in
        all classes.
    """

    alphabet: np.ndarray
    strokes: np.ndarray
    drawer: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Stroke:
    """Control points [n, 2] (x, y) of a pen stroke; roundness from 0 (polyline) to 1 (spline)."""

    points: np.ndarray
    roundness: float


@dataclasses.dataclass(frozen=True)
class _Style:
    """What the characters of one alphabet share."""

    motifs: list[_Stroke]
    motif_weight: np.ndarray
    stroke_weight: np.ndarray
    extent: np.ndarray
    attach: float
    mirror: float
    dot: float
    headline: bool


def generate(
    *,
    num_classes: int = 1623,
    per_class: int = 20,
    image_size: int = 28,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray, GlyphInfo]:
    """Draw `num_classes` characters, each once by each of `per_class` drawers.

    The result depends on the arguments alone; a smaller `num_classes` gives a prefix of a larger.

    Args:
      num_classes: characters, at least 1.
      per_class: drawers, at least 1; row `c * per_class + d` is class c by drawer d.
      image_size: side S of the square images, at least 8.
      seed: at least 0; another seed gives other alphabets and other drawers.
      progress: called as `progress(done, total)` in classes.

    Returns:
      images uint8 [num_classes * per_class, S, S, 1] with ink 255 on 0, in class-major order;
      labels int32 [num_classes * per_class] in 0..num_classes-1; `GlyphInfo`.

    Raises:
      ValueError: an argument is out of range.
    """
    least = {"num_classes": 1, "per_class": 1, "image_size": 8, "seed": 0}
    for value, name in zip((num_classes, per_class, image_size, seed), least, strict=True):
        if not isinstance(value, int | np.integer) or value < least[name]:
            raise ValueError(f"{name}: got {value!r}, expected an integer >= {least[name]}")
    characters, alphabet = _characters(num_classes, seed)
    traits = np.stack([_rng(seed, 1, d).standard_normal(6) for d in range(per_class)])
    images = np.empty((num_classes, per_class, image_size, image_size, 1), np.uint8)
    for c, strokes in enumerate(characters):
        points, radius = _draw(_rng(seed, 2, c), strokes, traits, image_size)
        images[c, ..., 0] = _rasterise(points, radius, image_size)
        if progress is not None:
            progress(c + 1, num_classes)
    info = GlyphInfo(
        alphabet=alphabet,
        strokes=np.array([len(strokes) for strokes in characters], np.int32),
        drawer=np.tile(np.arange(per_class, dtype=np.int32), num_classes),
    )
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), per_class)
    return images.reshape(-1, image_size, image_size, 1), labels, info


def _rng(seed: int, *path: int) -> np.random.Generator:
    """Return the generator of one part of the data set, whatever else is generated."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=path))


def _characters(num_classes: int, seed: int) -> tuple[list[list[_Stroke]], np.ndarray]:
    """Invent alphabets until they hold `num_classes` characters; also return whose each one is."""
    characters: list[list[_Stroke]] = []
    alphabet: list[int] = []
    while len(characters) < num_classes:
        a = alphabet[-1] + 1 if alphabet else 0
        rng = _rng(seed, 0, a)
        style = _style(rng)
        for _ in range(min(int(rng.integers(15, 51)), num_classes - len(characters))):
            characters.append(_character(rng, style))
            alphabet.append(a)
    return characters, np.array(alphabet, np.int32)


def _style(rng: np.random.Generator) -> _Style:
    """Invent an alphabet: its own forms of some motifs, its size, and how its strokes combine."""
    corner, curve = rng.uniform([0, 0.6], [0.5, 1])
    motifs = []
    for m in rng.choice(len(_ANGULAR + _ROUND), rng.integers(8, 15), replace=False):
        points = np.array((_ANGULAR + _ROUND)[m]) / 10
        points += rng.normal(0, 0.07, points.shape)
        if rng.random() < 0.5:
            points = points * [-1, 1] + [1, 0]
        motifs.append(_Stroke(points, corner if m < len(_ANGULAR) else curve))
    size, aspect = rng.normal(0.52, 0.08), rng.normal(-0.05, 0.12)
    return _Style(
        motifs=motifs,
        motif_weight=rng.dirichlet(np.full(len(motifs), 2.0)),
        stroke_weight=rng.dirichlet([2.0, 3.0, 2.0, 0.8]),
        extent=size * np.exp([aspect, -aspect]),
        attach=rng.uniform(0.6, 1),
        mirror=rng.choice([0.0, 0.1, 0.4]),
        dot=rng.choice([0.0, 0.05, 0.12]),
        headline=rng.random() < 0.12,
    )


def _character(rng: np.random.Generator, style: _Style) -> list[_Stroke]:
    """Compose one character, centred at 0; each stroke is the tidiest of a few that suit the style.

    The more strokes a character has, the simpler they are.
    """
    count = 1 + rng.choice(4, p=style.stroke_weight)
    pieces = np.array([len(motif.points) - 1.0 for motif in style.motifs])
    weight = style.motif_weight * pieces ** (6 / count - 4)
    strokes = [_Stroke(np.array([[0, 0], [1.0, 0]]), 0.0)] if style.headline else []
    while len(strokes) < max(count, 1 + style.headline):
        if len(strokes) > style.headline and rng.random() < style.dot:
            spots = rng.uniform(-0.2, 1.2, (8, 1, 2))
            options = [_Stroke(spot + [[0, 0], [0.04, 0.04]], 0.0) for spot in spots]
        else:
            chosen = rng.choice(len(style.motifs), 12, p=weight / weight.sum())
            options = [_place(rng, style, style.motifs[m], strokes) for m in chosen]
        strokes.append(min(options, key=lambda stroke: _clutter(stroke, strokes)))
    ends = np.concatenate([stroke.points for stroke in strokes])
    low, high = ends.min(0), ends.max(0)
    scale = style.extent * np.exp(rng.normal(0, 0.12)) / max(high - low) ** 0.8
    return [_Stroke((s.points - (low + high) / 2) * scale, s.roundness) for s in strokes]


def _place(
    rng: np.random.Generator, style: _Style, motif: _Stroke, strokes: list[_Stroke]
) -> _Stroke:
    """Return a stroke to add: the last one's mirror image, or the motif at some size and place."""
    if strokes and rng.random() < style.mirror:
        last = strokes[-1].points
        axis = rng.choice([last[:, 0].min(), last[:, 0].max()])
        return _Stroke(last * [-1, 1] + [2 * axis, 0], strokes[-1].roundness)
    size = (rng.uniform(0.35, 1) if strokes else 1) * np.exp(-np.abs(rng.normal(0, 0.25, 2)))
    points = (motif.points if rng.random() < 0.75 else motif.points[:, ::-1]) * size
    if strokes and rng.random() < style.attach:
        other = strokes[rng.integers(len(strokes))].points
        spot = (_curve(len(other), 9) @ other)[rng.choice([0, 4, 8, int(rng.integers(9))])]
        shift = spot - points[rng.choice([0, -1])]
    else:
        shift = rng.uniform(0, 1 - size)
    return _Stroke(points + shift, motif.roundness)


def _clutter(stroke: _Stroke, strokes: list[_Stroke]) -> float:
    """Return how much a stroke runs along earlier ones and outgrows the unit square with them."""
    if not strokes:
        return 0.0
    new, *old = (_curve(len(s.points), 16) @ s.points for s in (stroke, *strokes))
    ink = np.concatenate(old)
    near = np.linalg.norm(new[:, None] - ink, axis=-1).min(1) < 0.25
    both = np.concatenate([new, ink])
    return near.mean() + 2 * np.maximum(np.ptp(both, 0) - 1, 0).sum()


@functools.cache
def _curve(num_points: int, samples: int, degree: int = 1) -> np.ndarray:
    """Return the matrix [samples, num_points] from control points to the curve through them."""
    knots, at = np.linspace(0, 1, num_points), np.linspace(0, 1, samples)
    return make_interp_spline(knots, np.eye(num_points), k=min(degree, num_points - 1))(at)


def _draw(
    rng: np.random.Generator, strokes: list[_Stroke], traits: np.ndarray, image_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Let every drawer write one character.

    Args:
      rng: the generator of this character.
      strokes: the character, centred at 0.
      traits: standard normal [P, 6], each drawer's haste, roundness, turn, slant, size and pen.
      image_size: in pixels, so that the pen positions lie close enough together.

    Returns:
      Pen positions [P, N, 2] in [0, 1] and pen radii [P], both in units of the image side.
    """

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal((len(traits), *shape))

    haste, rounder, turned, slanted, larger, heavier = traits.T
    haste = np.exp(0.2 * haste)[:, None, None]
    lines = []
    for stroke in strokes:
        base = stroke.points
        points = base * (1 + 0.08 * haste * noise(1, 2))
        loose = 0.043 * np.sqrt(np.ptp(base, 0).max())
        points += haste * (0.018 * noise(1, 2) + loose * noise(*base.shape))
        points[:, 0] += 0.08 * noise(1) * (points[:, 0] - points[:, 1])
        points[:, -1] += 0.08 * noise(1) * (points[:, -1] - points[:, -2])
        mix = np.clip(stroke.roundness + 0.1 * rounder + 0.15 * noise(), 0, 1)[:, None, None]
        length = np.linalg.norm(np.diff(base, axis=0), axis=1).sum()
        samples = 8 + int(4 * image_size * length)
        straight, smooth = (_curve(len(base), samples, degree) for degree in (1, 3))
        curve = (1 - mix) * straight + mix * smooth
        lines.append(np.einsum("psn,pnx->psx", curve, points))
    pen = np.concatenate(lines, 1)
    for cycles in (1, 2):
        phase = 4.5 * cycles * np.einsum("psx,pxy->psy", pen, noise(2, 2)) + 3 * noise(1, 2)
        pen += 0.019 / cycles * haste * np.sin(phase)
    angle = 0.04 * turned + 0.05 * noise()
    slant = 0.08 * slanted + 0.06 * noise()
    turn = np.array([[np.cos(angle), -np.sin(angle) - slant], [np.sin(angle), np.cos(angle)]])
    zoom = np.exp(0.07 * larger[:, None] + 0.07 * noise(1) + 0.06 * noise(2))
    pen = np.einsum("psx,yxp,py->psy", pen, turn, zoom) + 0.045 * noise(1, 2)
    low, high = pen.min(1, keepdims=True), pen.max(1, keepdims=True)
    fit = np.minimum(1, 0.92 / (high - low))
    room = 0.46 - fit * (high - low) / 2
    pen = 0.5 + np.clip((low + high) / 2, -room, room) + fit * (pen - (low + high) / 2)
    return pen, 0.0255 * np.exp(0.06 * heavier)


def _rasterise(points: np.ndarray, radius: np.ndarray, size: int) -> np.ndarray:
    """Stamp an antialiased disc at every pen position [P, N, 2]; return uint8 [P, size, size]."""
    reach = int(radius.max() * size + 1)
    side = size + 2 * reach
    at = points * size
    cell = np.clip(np.floor(at), 0, size - 1).astype(np.int64)
    offset = (cell + 0.5 - at).astype(np.float32)
    edge = (radius * size + 0.5).astype(np.float32)[:, None]
    row = np.arange(len(points))[:, None] * side
    flat = (row + cell[..., 1] + reach) * side + cell[..., 0] + reach
    canvas = np.zeros(len(points) * side * side, np.float32)
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            ink = edge - np.hypot(offset[..., 0] + dx, offset[..., 1] + dy)
            np.maximum.at(canvas, (flat + dy * side + dx).ravel(), ink.ravel())
    canvas = canvas.reshape(len(points), side, side)[:, reach:-reach, reach:-reach]
    return np.rint(255 * np.minimum(canvas, 1)).astype(np.uint8)
