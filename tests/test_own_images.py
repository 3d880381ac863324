"""A user's own images: every form and size becomes what files of the same images become."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from meml_jax.data import readers
from meml_jax.data.own_images import fit_images
from meml_jax.types import UserError

SIZE = 28


def fit(images, channels=1, light_ink=False):
    return fit_images(images, image_size=SIZE, channels=channels, light_ink=light_ink)


def picture(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "shape", [(28, 28), (50, 37), (9, 20), (40, 40, 1), (30, 61, 3), (28, 28, 3), (33, 33, 4)]
)
def test_an_array_is_treated_as_a_file_of_the_same_image(shape, channels, tmp_path):
    image = picture(*shape)
    path = tmp_path / "image.png"
    Image.fromarray(image.squeeze()).save(path)
    expected = readers.decode(path.read_bytes(), image_size=SIZE, channels=channels)[None]
    assert expected.shape == (1, SIZE, SIZE, channels)
    for form in (image, [image], path, str(path), [path], image[None] if len(shape) > 2 else image):
        np.testing.assert_array_equal(fit(form, channels), expected)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "CMYK"])
def test_a_pil_image_is_treated_as_its_file(mode, tmp_path):
    image = Image.fromarray(picture(40, 31, 3)).convert(mode)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    image.save(path)
    for form in (image, [image]):
        np.testing.assert_array_equal(fit(form), fit(path))


def test_grey_and_alpha_are_not_taken_for_many_images():
    with pytest.raises(UserError, match=r"uint8 \[28, 28, 2\], expected"):
        fit(picture(28, 28, 2))
    with pytest.raises(UserError, match="PIL image of mode F: floating-point"):
        fit(Image.fromarray(picture(28, 28)).convert("F"))


def test_several_images_are_fitted_one_by_one():
    images = [picture(40, 31, seed=1), picture(28, 28, 3, seed=2), picture(90, 90, 1, seed=3)]
    together = fit(images)
    assert together.shape == (3, SIZE, SIZE, 1)
    np.testing.assert_array_equal(together, np.concatenate([fit(image) for image in images]))
    stack = picture(5, 40, 40)
    np.testing.assert_array_equal(fit(stack), fit(list(stack)))
    np.testing.assert_array_equal(fit(stack[..., None]), fit(list(stack)))
    np.testing.assert_array_equal(fit(np.stack([stack] * 3, -1), 3), fit(list(stack), 3))


def test_drawings_get_light_ink_whichever_way_they_come():
    drawing = np.zeros((60, 60), np.uint8)
    drawing[10:50, 28:33] = 255
    inked = fit(drawing, light_ink=True)
    assert inked.mean() < 127 and inked.max() == 255
    np.testing.assert_array_equal(fit(drawing), inked)
    # Each by itself: what comes with an image does not matter.
    np.testing.assert_array_equal(
        fit([255 - drawing, drawing], light_ink=True), np.concatenate([inked, inked])
    )
    np.testing.assert_array_equal(fit(255 - drawing), 255 - inked)  # photographs stay as they are


@pytest.mark.parametrize(
    "images, expected",
    [
        ([], "no images"),
        (np.zeros((0, 28, 28), np.uint8), "no images"),
        (np.zeros((28, 28)), r"float64 \[28, 28\], expected uint8"),
        ([picture(28, 28), np.zeros((28, 28, 3), np.float32)], r"float32 \[28, 28, 3\]"),
        ([[1, 2], [3, 4]], r"int64 \[2\]"),
        (picture(28, 28, 5, 2), r"uint8 \[28, 28, 5, 2\]"),
        ([picture(7, 28, 28)], r"uint8 \[7, 28, 28\].* for each image of a list"),
        (picture(9), r"uint8 \[9\]"),
        (np.zeros((0, 28), np.uint8), r"uint8 \[0, 28\]"),
        (None, "object"),
        ("nowhere.png", "nowhere.png: cannot be read as an image .No such file"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(images, expected):
    with pytest.raises(UserError, match=expected) as error:
        fit(images)
    assert "\n" not in str(error.value)


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "text.png"
    path.write_text("not a picture")
    with pytest.raises(UserError, match="text.png: cannot be read as an image .*another kind"):
        fit(path)
