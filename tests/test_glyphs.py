"""Tests of the generated characters."""

import numpy as np
import pytest

from meml_jax.data import glyphs


@pytest.fixture(scope="module")
def small():
    return glyphs.generate(num_classes=100)


def _by_class(images: np.ndarray, per_class: int = 20) -> np.ndarray:
    return images.reshape(len(images) // per_class, per_class, -1).astype(np.float32) / 255


def test_shapes_dtypes_and_order(small):
    images, labels, info = small
    assert images.shape == (2000, 28, 28, 1) and images.dtype == np.uint8
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, np.repeat(np.arange(100), 20))
    np.testing.assert_array_equal(info.drawer, np.tile(np.arange(20), 100))
    assert info.alphabet.shape == info.strokes.shape == (100,)
    assert info.strokes.min() >= 1 and info.strokes.max() <= 4
    sizes = np.bincount(info.alphabet)
    assert (np.diff(info.alphabet) >= 0).all()
    assert sizes[:-1].min() >= 15 and sizes.max() <= 50


def test_same_arguments_give_the_same_images():
    first, again, other = (glyphs.generate(num_classes=4, seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("num_classes", [1, 60])
def test_fewer_classes_are_a_prefix(small, num_classes):
    images, _, info = glyphs.generate(num_classes=num_classes)
    np.testing.assert_array_equal(images, small[0][: num_classes * 20])
    np.testing.assert_array_equal(info.alphabet, small[2].alphabet[:num_classes])
    np.testing.assert_array_equal(info.strokes, small[2].strokes[:num_classes])


def test_every_image_is_ink_on_an_empty_ground(small):
    images = small[0].astype(np.float32) / 255
    ink = images.mean(axis=(1, 2, 3))
    assert images.max(axis=(1, 2, 3)).min() > 0.9
    assert ink.min() > 0.005 and ink.max() < 0.4
    assert 0.06 < ink.mean() < 0.11 and 0.02 < ink.std() < 0.045  # Omniglot: 0.081 and 0.028
    edges = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], 1)
    assert edges.mean() < 0.02


def test_drawings_differ_but_less_within_a_class_than_between(small):
    x = _by_class(small[0])
    flat = x.reshape(2000, -1)
    assert len(np.unique(flat, axis=0)) == 2000
    within = np.linalg.norm(x - x.mean(1, keepdims=True), axis=-1).mean()
    between = np.linalg.norm(flat - flat.mean(0), axis=-1).mean()
    assert within < 0.92 * between


def test_nearest_class_mean_is_about_as_good_as_on_omniglot(small):
    x = _by_class(small[0])
    rng = np.random.default_rng(0)
    correct = []
    for _ in range(20):
        order = rng.permutation(20)
        chosen = x[rng.choice(100, 50, replace=False)]
        mean, test = chosen[:, order[:15]].mean(1), chosen[:, order[15:]]
        distance = np.square(mean).sum(-1) - 2 * np.einsum("cnd,kd->cnk", test, mean)
        correct.append(distance.argmin(-1) == np.arange(50)[:, None])
    assert 0.42 < np.mean(correct) < 0.66  # Omniglot: 0.53


@pytest.mark.parametrize("image_size", [16, 84])
def test_image_size_changes_the_resolution_only(small, image_size):
    images, _, _ = glyphs.generate(num_classes=5, image_size=image_size)
    assert images.shape == (100, image_size, image_size, 1)
    expected, got = small[0][:100].mean(axis=(1, 2, 3)), images.mean(axis=(1, 2, 3))
    np.testing.assert_allclose(got, expected, rtol=0.2)


def test_few_drawers_and_progress():
    calls = []
    images, labels, _ = glyphs.generate(
        num_classes=3, per_class=2, progress=lambda done, total: calls.append((done, total))
    )
    assert images.shape == (6, 28, 28, 1) and labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert calls == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_classes", 0), ("per_class", -1), ("image_size", 7), ("seed", -1), ("per_class", 2.5)],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=rf"{name}: got {value}, expected an integer >= \d"):
        glyphs.generate(**{name: value})
