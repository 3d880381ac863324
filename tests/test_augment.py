import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meml_jax.data.augment import (
    DrawingConfig,
    PhotoConfig,
    RefillConfig,
    drawing_views,
    get_views,
    photo_views,
    refill_views,
)
from meml_jax.types import UserError

# Compiled whole: one by one, the many small operations take seconds to compile.
drawings = jax.jit(drawing_views, static_argnums=2)
photos = jax.jit(photo_views, static_argnums=2)
refills = jax.jit(refill_views, static_argnums=2)
COMPILED = {"drawing": drawings, "photo": photos, "refill": refills}
STILL = {
    "drawing": DrawingConfig(*[0.0] * 5, elastic_grid=4, gamma=0.0),
    "photo": PhotoConfig(1.0, 1.0, *[0.0] * 7),
    "refill": RefillConfig(chance=0.0),
}
KINDS = [
    ("drawing", 1), ("photo", 3), ("photo", 1), ("drawing", 3), ("refill", 1), ("refill", 3)
]  # fmt: skip


def images(channels, batch=6, height=28, width=28, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(size=(batch, height, width, channels)), jnp.float32)


@pytest.mark.parametrize("kind, channels", KINDS)
def test_views_keep_shape_and_range_and_follow_the_key(kind, channels):
    x = images(channels, height=30)
    view = COMPILED[kind]
    a, again, b = view(jax.random.key(0), x), view(jax.random.key(0), x), view(jax.random.key(1), x)
    assert a.shape == x.shape and a.dtype == jnp.float32
    assert float(a.min()) >= 0 and float(a.max()) <= 1
    np.testing.assert_array_equal(a, again)
    differ = np.abs(np.asarray(a - b)).max(axis=(1, 2, 3))
    assert (differ > 0.01).all()


@pytest.mark.parametrize("kind, channels", KINDS)
def test_nothing_changes_at_zero_strength(kind, channels):
    x = images(channels, height=29)
    np.testing.assert_allclose(COMPILED[kind](jax.random.key(0), x, STILL[kind]), x, atol=2e-6)


@pytest.mark.parametrize("kind, channels", KINDS[:2])
def test_a_view_does_not_depend_on_the_images_beside_it(kind, channels):
    x, key = images(channels), jax.random.key(3)
    alone = COMPILED[kind](key, x[:2])
    beside = COMPILED[kind](key, x.at[2:].set(0.5))
    np.testing.assert_allclose(alone, beside[:2], atol=1e-6)


def test_the_rows_of_a_batch_get_different_views():
    x = jnp.repeat(images(1, batch=1), 4, axis=0)
    views = np.asarray(drawings(jax.random.key(0), x))
    assert all(np.abs(views[i] - views[0]).max() > 0.01 for i in range(1, 4))


def test_a_shift_is_a_shift_and_what_comes_in_is_background():
    drawing = np.full((28, 28), 0.25, np.float32)
    drawing[10:14, 12:15] = 1.0
    x = jnp.asarray(np.repeat(drawing[None, :, :, None], 64, axis=0))
    config = dataclasses.replace(STILL["drawing"], shift=0.25)
    views = np.asarray(drawings(jax.random.key(0), x, config))[..., 0]
    np.testing.assert_allclose(views.min(axis=(1, 2)), 0.25, atol=1e-6)
    ink = views - 0.25
    total = ink.sum(axis=(1, 2))
    np.testing.assert_allclose(total, (drawing - 0.25).sum(), rtol=1e-4)  # none is lost
    rows = (ink * np.arange(28)[None, :, None]).sum(axis=(1, 2)) / total
    assert np.abs(rows - 11.5).max() <= 7 + 1e-3 and np.std(rows) > 2


def test_a_rotation_turns_about_the_centre():
    row, column = np.mgrid[:29, :29] - 14
    disc = np.clip(10.5 - np.hypot(row, column), 0, 1).astype(np.float32)
    bar = (np.abs(row) < 2) * disc
    x = jnp.asarray(np.stack([disc, bar])[..., None])
    config = dataclasses.replace(STILL["drawing"], rotation=90.0)
    views = np.asarray(drawings(jax.random.key(1), x, config))[..., 0]
    assert np.abs(views[0] - disc).max() < 0.35  # a disc stays, but for its soft edge
    assert np.abs(views[1] - bar).max() > 0.5
    np.testing.assert_allclose(views[1].sum(), bar.sum(), rtol=0.05)


def test_gamma_bends_the_ink():
    x = jnp.full((50, 28, 28, 1), 0.5)
    config = dataclasses.replace(STILL["drawing"], gamma=np.log(2.0))
    values = np.asarray(drawings(jax.random.key(0), x, config))[:, 5, 5, 0]
    assert 0.25 - 1e-6 <= values.min() < 0.35 and 0.6 < values.max() <= 0.5**0.5 + 1e-6


def test_a_flip_mirrors_and_a_crop_enlarges():
    x = images(3)
    mirrored = photos(jax.random.key(0), x, dataclasses.replace(STILL["photo"], flip=1.0))
    np.testing.assert_allclose(mirrored, x[:, :, ::-1], atol=2e-6)
    ramp = jnp.broadcast_to(jnp.linspace(0, 1, 28)[None, None, :, None], (40, 28, 28, 3))
    crop = photos(
        jax.random.key(0), ramp, dataclasses.replace(STILL["photo"], area=0.25, aspect=1.0)
    )
    slope = np.asarray(crop[:, 0, -1, 0] - crop[:, 0, 0, 0])  # the side that is cut out
    assert 0.5 - 1e-4 <= slope.min() < 0.7 and 0.85 < slope.max() <= 1 + 1e-4


def test_grey_and_colour():
    x = images(3, seed=2)
    grey = np.asarray(photos(jax.random.key(0), x, dataclasses.replace(STILL["photo"], grey=1.0)))
    want = np.asarray(x) @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(grey, np.repeat(want[..., None], 3, axis=-1), atol=1e-5)
    pure = jnp.broadcast_to(jnp.array([0.6, 0.3, 0.3]), (30, 28, 28, 3))
    turned = photos(
        jax.random.key(0), pure, dataclasses.replace(STILL["photo"], jitter=1.0, hue=0.5)
    )
    assert set(np.asarray(jnp.argmax(turned[:, 0, 0], axis=-1))) == {0, 1, 2}
    plain = jnp.full((30, 28, 28, 3), 0.4)
    still = photos(
        jax.random.key(0), plain, dataclasses.replace(STILL["photo"], jitter=1.0, hue=0.5)
    )
    np.testing.assert_allclose(still, plain, atol=1e-5)  # grey has no hue to turn


def test_an_unknown_kind_of_image():
    assert get_views("photo") is photo_views
    with pytest.raises(UserError, match="embedding.views='pictures'.*drawing.*photo"):
        get_views("pictures")


# All parts on, none of any strength but the flips.
FLIPS = RefillConfig(1.0, 0.0, 0.0, 0.0, 0.0, (1.0,), 0.0, 0.0, 0.0, 0.0)
SOME_FLIPS = dataclasses.replace(FLIPS, chance=0.5)


def test_refilling_views_flip_both_ways():
    x = images(3, height=30)
    views = refills(jax.random.key(0), x, FLIPS)
    np.testing.assert_allclose(views, x[:, ::-1, ::-1], atol=2e-6)
    some = np.asarray(refills(jax.random.key(0), jnp.repeat(x[:1], 64, axis=0), SOME_FLIPS))
    forms = [x[0], x[0, ::-1], x[0, :, ::-1], x[0, ::-1, ::-1]]
    distance = np.stack([np.abs(some - np.asarray(form)).max(axis=(1, 2, 3)) for form in forms])
    assert distance.min(axis=0).max() < 1e-5
    assert set(distance.argmin(axis=0)) == {0, 1, 2, 3}


def test_refilling_views_cut_out_the_shares_of_the_paper():
    ramp = jnp.broadcast_to(jnp.linspace(0, 1, 28)[None, None, :, None], (64, 28, 28, 1))
    config = dataclasses.replace(FLIPS, crops=RefillConfig().crops)
    views = np.asarray(refills(jax.random.key(0), ramp, config))[:, 0, :, 0]
    share = np.round(np.abs(views[:, -1] - views[:, 0]), 4)
    assert set(share.tolist()) == {np.float32(s) for s in (0.75, 0.8, 0.85, 0.9)}
    assert views.min() >= 0 and views.max() <= 1 and np.std(views.min(axis=1)) > 0.02


def test_refilling_views_change_colours_within_the_ranges_of_the_paper():
    settings = RefillConfig()
    plain = jnp.full((200, 8, 8, 3), 0.5)
    config = dataclasses.replace(FLIPS, brightness=settings.brightness)
    factor = np.asarray(refills(jax.random.key(0), plain, config))[:, 0, 0, 0] / 0.5
    assert 0.8 - 1e-5 <= factor.min() < 0.82 and 1.18 < factor.max() <= 1.2 + 1e-5
    steps = jnp.where(jnp.arange(8) < 4, 0.4, 0.6)
    steps = jnp.broadcast_to(steps[None, None, :, None], (200, 8, 8, 3))
    config = dataclasses.replace(FLIPS, contrast=settings.contrast)
    views = np.asarray(refills(jax.random.key(1), steps, config))[:, 0, :, 0]
    factor = np.abs(views[:, 7] - views[:, 0]) / 0.2
    assert 0.8 - 1e-5 <= factor.min() < 0.82 and 1.18 < factor.max() <= 1.2 + 1e-5


def test_what_an_affine_map_brings_in_is_background():
    x = jnp.full((32, 28, 28, 1), 0.25).at[:, 12:16, 10:13].set(1.0)
    config = dataclasses.replace(FLIPS, rotation=15.0, shift=0.1, scale=0.1, shear=0.1)
    views = np.asarray(refills(jax.random.key(0), x, config))
    np.testing.assert_allclose(views.min(axis=(1, 2, 3)), 0.25, atol=1e-6)
    assert np.std(views.sum(axis=(1, 2, 3))) > 0.1  # drawn larger and smaller
