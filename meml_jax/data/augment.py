"""Random views of images, for contrastive learning and to refill clusters: one resampling each.

A view is a pure function of (key, image): row i of a batch uses `fold_in(key, i)`, so it does not
depend on the images beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from meml_jax.types import Array, UserError

GREY_WEIGHTS = (0.299, 0.587, 0.114)  # luma of Rec. 601
GREY_AXIS = 3**-0.5  # each coordinate of the unit vector along which red = green = blue


@dataclasses.dataclass(frozen=True)
class DrawingConfig:
    """How far the views of a drawing go; all 0: the drawing itself."""

    rotation: float = 20.0  # degrees, uniform in +-
    scale: float = 0.25  # log of the factor, uniform in +-, drawn for each axis
    shear: float = 0.3  # uniform in +-
    shift: float = 0.08  # of the side, uniform in +-, for each axis
    elastic: float = 0.03  # of the side, standard deviation of the displacement
    elastic_grid: int = 4  # knots a side of the displacement field
    gamma: float = 0.5  # log of the exponent of the ink, uniform in +-: fainter or bolder strokes


@dataclasses.dataclass(frozen=True)
class PhotoConfig:
    """How far the views of a photograph go; colours: Chen et al. 2020, appendix A, strength 0.5.

    Differs from them: the smallest cut is 0.2 of the image, theirs 0.08; the changes of colour have
    one order, theirs a random one; no blur, which images this small do not need.
    """

    area: float = 0.2  # smallest share of the image that is cut out; 1: all of it
    aspect: float = 4 / 3  # largest ratio of the sides, as a factor; 1: as the image
    flip: float = 0.5  # probability
    jitter: float = 0.8  # probability of any change of colour below
    brightness: float = 0.4  # factor, uniform in 1 +-
    contrast: float = 0.4  # factor about the image's mean, uniform in 1 +-
    saturation: float = 0.4  # factor about grey, uniform in 1 +-
    hue: float = 0.1  # turns of the colour circle, uniform in +-
    grey: float = 0.2  # probability


@dataclasses.dataclass(frozen=True)
class RefillConfig:
    """How far the views that refill a cluster go; supplement, Data Augmentation.

    Differs from the paper: it gives the ranges of crop and colours; those of the affine map, and
    that each part is applied with probability 1/2, are ours.
    """

    chance: float = 0.5  # of each part: the two flips, affine map, crop, colours
    rotation: float = 15.0  # degrees, uniform in +-
    scale: float = 0.1  # log of the factor, uniform in +-, drawn for each axis
    shear: float = 0.1  # uniform in +-
    shift: float = 0.1  # of the side, uniform in +-, for each axis
    crops: tuple[float, ...] = (0.75, 0.8, 0.85, 0.9)  # share of the sides that is cut out
    brightness: float = 0.2  # factor, uniform in 1 +-
    contrast: float = 0.2  # factor about the image's mean, uniform in 1 +-
    saturation: float = 0.2  # factor about grey, uniform in 1 +-
    hue: float = 0.02  # turns of the colour circle, uniform in +-


def drawing_views(key: Array, images: Array, config: DrawingConfig = DrawingConfig()) -> Array:
    """Make one random view of each drawing.

    The view at x is image(c + A (x - c) + shift + d(x)) ** gamma: A is a random rotation, scale of
    each axis and shear about the centre c, d a smooth random displacement. What lies outside is
    background, the median of the four corners.

    Args:
      key: random key.
      images: float32 [B, H, W, C] in [0, 1].
      config: strengths.

    Returns:
      float32 [B, H, W, C] in [0, 1].
    """
    height, width = images.shape[1:3]
    side = jnp.array([height, width], jnp.float32)

    def draw(key: Array) -> tuple[Array, Array]:
        uniform_key, elastic_key = jax.random.split(key)
        u = jax.random.uniform(uniform_key, (7,), minval=-1.0, maxval=1.0)
        matrix = _linear_map(u, config)
        knots = (2, config.elastic_grid, config.elastic_grid)
        field = config.elastic * side[:, None, None] * jax.random.normal(elastic_key, knots)
        field = jax.image.resize(field, (2, height, width), "cubic")
        shift = config.shift * side * u[4:6]
        moved = jnp.tensordot(matrix, _centred_grid(height, width), 1) + field
        return moved + ((side - 1) / 2 + shift)[:, None, None], jnp.exp(config.gamma * u[6])

    coordinates, gamma = jax.vmap(draw)(_keys(key, images))
    views = _resample(images, coordinates, _background(images))
    return views ** gamma[:, None, None, None]


def photo_views(key: Array, images: Array, config: PhotoConfig = PhotoConfig()) -> Array:
    """Make one random view of each photograph: crop and resize, flip, colour jitter, grey.

    Colours: with the chroma r = x - grey(x), a view is grey(x) + saturation * R r, where R turns r
    by the hue about the grey axis; saturation is 0 for a grey view.

    Args:
      key: random key.
      images: float32 [B, H, W, C] in [0, 1]; C is 3, or 1, where hue and saturation do nothing.
      config: strengths.

    Returns:
      float32 [B, H, W, C] in [0, 1].
    """
    height, width = images.shape[1:3]
    side = jnp.array([height, width], jnp.float32)

    def crop(key: Array) -> Array:
        u = jax.random.uniform(key, (5,))
        area = config.area + (1 - config.area) * u[0]
        stretch = config.aspect ** (u[1] - 0.5)
        size = jnp.minimum(jnp.sqrt(area) * jnp.array([stretch, 1 / stretch]), 1.0)
        centre = (side - 1) / 2 + (side - 1) * (1 - size) * (u[2:4] - 0.5)
        size = size * jnp.array([1.0, jnp.where(u[4] < config.flip, -1.0, 1.0)])
        return centre[:, None, None] + size[:, None, None] * _centred_grid(height, width)

    def colour(key: Array, image: Array) -> Array:
        change_key, chance_key = jax.random.split(key)
        strength = jnp.array([config.brightness, config.contrast, config.saturation, config.hue])
        chance = jnp.array([config.jitter, config.grey])
        jitter, grey = jax.random.uniform(chance_key, (2,)) < chance
        change = jax.random.uniform(change_key, (4,), minval=-1.0, maxval=1.0) * strength * jitter
        return _recolour(image, change, grey)

    crop_keys, colour_keys = jnp.moveaxis(jax.vmap(jax.random.split)(_keys(key, images)), 1, 0)
    edge = jnp.zeros((len(images), images.shape[-1]))  # never seen: a crop lies inside
    views = _resample(images, jax.vmap(crop)(crop_keys), edge)
    return jax.vmap(colour)(colour_keys, views)


def refill_views(key: Array, images: Array, config: RefillConfig = RefillConfig()) -> Array:
    """Make one random view of each image, to fill up its cluster (supplement, Data Augmentation).

    A random combination of horizontal and vertical flip, affine map about the centre, crop that is
    brought back to the full size, and change of colours. What lies outside is background, the
    median of the four corners.

    Args:
      key: random key.
      images: float32 [B, H, W, C] in [0, 1]; C is 3, or 1, where hue and saturation do nothing.
      config: strengths.

    Returns:
      float32 [B, H, W, C] in [0, 1].
    """
    height, width = images.shape[1:3]
    side = jnp.array([height, width], jnp.float32)
    centre = ((side - 1) / 2)[:, None, None]

    def draw(key: Array) -> tuple[Array, Array]:
        part_key, uniform_key, crop_key = jax.random.split(key, 3)
        parts = jax.random.bernoulli(part_key, config.chance, (5,))
        flips, affine, crop, colours = parts[:2], parts[2], parts[3], parts[4]
        u = jax.random.uniform(uniform_key, (12,), minval=-1.0, maxval=1.0)
        share = jnp.where(crop, jax.random.choice(crop_key, jnp.array(config.crops)), 1.0)
        corner = (1 - share) * (side - 1) / 2 * u[6:8]  # of the crop, from the middle one
        mirror = jnp.where(flips, -1.0, 1.0)[:, None, None]
        inside = corner[:, None, None] + share * mirror * _centred_grid(height, width)
        matrix = jnp.where(affine, _linear_map(u, config), jnp.eye(2))
        shift = jnp.where(affine, config.shift, 0.0) * side * u[4:6]
        moved = centre + jnp.tensordot(matrix, inside, 1) + shift[:, None, None]
        strength = jnp.array([config.brightness, config.contrast, config.saturation, config.hue])
        return moved, jnp.where(colours, strength * u[8:], 0.0)

    coordinates, change = jax.vmap(draw)(_keys(key, images))
    views = _resample(images, coordinates, _background(images))
    return jax.vmap(_recolour, (0, 0, None))(views, change, False)


VIEWS: dict[str, Callable[[Array, Array], Array]] = {
    "drawing": drawing_views,
    "photo": photo_views,
}
"""Values of `embedding.views`."""


def get_views(name: str) -> Callable[[Array, Array], Array]:
    """Look the views of a kind of image up; raises UserError for an unknown kind."""
    if name not in VIEWS:
        raise UserError(f"embedding.views={name!r}, expected one of {sorted(VIEWS)}")
    return VIEWS[name]


def _keys(key: Array, images: Array) -> Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(images)))


def _centred_grid(height: int, width: int) -> Array:
    """Rows and columns of all pixels, counted from the centre, float32 [2, H, W]."""
    rows, columns = jnp.arange(height) - (height - 1) / 2, jnp.arange(width) - (width - 1) / 2
    return jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"))


def _background(images: Array) -> Array:
    """Median of the four corners of images [B, H, W, C]: [B, C]."""
    height, width = images.shape[1:3]
    corners = images[:, :: height - 1, :: width - 1].reshape(len(images), 4, -1)
    return jnp.median(corners, axis=1)


def _linear_map(u: Array, config: DrawingConfig | RefillConfig) -> Array:
    """Rotation, shear and scale of each axis from u [>= 4] in [-1, 1]: [2, 2]."""
    angle = jnp.deg2rad(config.rotation) * u[0]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    shear = jnp.eye(2).at[1, 0].set(config.shear * u[1])
    matrix = jnp.array([[cos, -sin], [sin, cos]]) @ shear
    return matrix * jnp.exp(config.scale * u[2:4])[:, None]


def _recolour(image: Array, change: Array, grey: Array | bool) -> Array:
    """Change brightness, contrast, saturation and hue of an image [H, W, C] by change [4]."""
    image = jnp.clip(image * (1 + change[0]), 0.0, 1.0)
    weights = jnp.array(GREY_WEIGHTS if image.shape[-1] == 3 else (1.0,))
    mean = jnp.mean(image, axis=(0, 1)) @ weights
    image = jnp.clip(mean + (image - mean) * (1 + change[1]), 0.0, 1.0)
    if image.shape[-1] != 3:
        return image
    to_grey = jnp.tile(weights[None], (3, 1))
    chroma = _turn(2 * jnp.pi * change[3]) * jnp.where(grey, 0.0, 1 + change[2])
    mix = to_grey + chroma @ (jnp.eye(3) - to_grey)
    # A sum over channels: as a product of matrices it takes eight times as long on CPU.
    turned = sum(image[..., c, None] * mix[None, None, :, c] for c in range(3))
    return jnp.clip(turned, 0.0, 1.0)


def _resample(images: Array, coordinates: Array, outside: Array) -> Array:
    """Read images [B, H, W, C] at rows and columns [B, 2, H, W], bilinearly; `outside` [B, C]."""
    batch, height, width, channels = images.shape
    outside = outside[:, None, None]
    # The pixel (i, j) lies at (i + 1, j + 1); the frame holds all neighbours of what is clipped to.
    frame = jnp.pad(images - outside, ((0, 0), (1, 2), (1, 2), (0, 0)))
    limit = jnp.array([height + 1, width + 1], jnp.float32)[None, :, None, None]
    position = jnp.clip(coordinates + 1, 0, limit)
    corner = jnp.floor(position)
    r, c = jnp.moveaxis(position - corner, 1, 0)[..., None]
    row, column = jnp.moveaxis(corner.astype(jnp.int32), 1, 0)
    index = (row * (width + 3) + column).reshape(batch, -1, 1)
    pixels = frame.reshape(batch, -1, channels)

    def neighbour(offset: int) -> Array:
        values = jnp.take_along_axis(pixels, index + offset, axis=1, mode="promise_in_bounds")
        return values.reshape(images.shape)

    # Four gathers fuse with the sum: 20 times faster on CPU than one gather of four values.
    top = (1 - c) * neighbour(0) + c * neighbour(1)
    bottom = (1 - c) * neighbour(width + 3) + c * neighbour(width + 4)
    return (1 - r) * top + r * bottom + outside


def _turn(angle: Array) -> Array:
    """Rotation of colours [3, 3] about the grey axis (Rodrigues' formula)."""
    cross = GREY_AXIS * jnp.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    along = jnp.full((3, 3), GREY_AXIS**2)
    return jnp.cos(angle) * jnp.eye(3) + jnp.sin(angle) * cross + (1 - jnp.cos(angle)) * along
