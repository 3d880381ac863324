"""The contrastive embedding, and what trained embeddings share."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from meml_jax import checkpoints, chunks, interrupts, training
from meml_jax.config import EmbeddingConfig
from meml_jax.data.glyphs import generate
from meml_jax.embeddings import contrastive, fitting, get_embedding
from meml_jax.types import UserError

SMALL = {"channels": 16, "steps": 60, "batch_size": 32, "learning_rate": 3e-3}


def settings(**changes):
    return EmbeddingConfig(name="contrastive", **(SMALL | changes))


@pytest.fixture(scope="module")
def glyphs():
    return generate(num_classes=12, per_class=8)[:2]


def fit(images, config, folder=None, seed=0, report=lambda line: None):
    key = jax.random.key(seed)
    return contrastive.fit(images, key, config, checkpoint_dir=folder, report=report)


def saved(folder, config, shape=(28, 28, 1)):
    template = jax.eval_shape(
        lambda: contrastive.init_state(jax.random.key(0), image_shape=shape, config=config)
    )
    with checkpoints.open_checkpoints(folder / "checkpoints", read_only=True) as manager:
        return checkpoints.restore(manager, template)[0]


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("pairs", [2, 3])
def test_nt_xent_by_hand(pairs, temperature):
    rng = np.random.default_rng(pairs)
    a, b = rng.normal(size=(2, pairs, 5)).astype(np.float32)
    z = np.concatenate([a, b]).astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    losses, hits = [], []
    for i in range(2 * pairs):
        j = (i + pairs) % (2 * pairs)
        others = {k: np.exp(z[i] @ z[k] / temperature) for k in range(2 * pairs) if k != i}
        losses.append(-np.log(others[j] / sum(others.values())))
        hits.append(max(others, key=others.get) == j)
    loss, metrics = contrastive.nt_xent(jnp.asarray(a), jnp.asarray(b), temperature=temperature)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(hits), rtol=1e-6)
    scaled, _ = contrastive.nt_xent(jnp.asarray(3 * a), jnp.asarray(b), temperature=temperature)
    np.testing.assert_allclose(scaled, loss, rtol=1e-5)  # length does not matter


def test_nt_xent_of_equal_and_of_orthogonal_projections():
    same = jnp.ones((4, 3))
    np.testing.assert_allclose(
        contrastive.nt_xent(same, same, temperature=0.1)[0], np.log(7), rtol=1e-5
    )
    apart = jnp.eye(4)
    loss, metrics = contrastive.nt_xent(apart, apart, temperature=0.5)
    np.testing.assert_allclose(loss, np.log(np.exp(2) + 6) - 2, rtol=1e-5)
    assert metrics["accuracy"] == 1
    gradient = jax.grad(lambda z: contrastive.nt_xent(z, apart, temperature=0.5)[0])
    assert np.isfinite(gradient(jnp.zeros((4, 4)))).all()  # a dead projection has no length


@pytest.mark.slow
def test_training_finds_the_classes_of_unlabelled_drawings(glyphs, trained):
    images, labels = glyphs
    config = settings()

    def agreement(z):
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
        similarity = z @ z.T
        np.fill_diagonal(similarity, -np.inf)
        return np.mean(labels[similarity.argmax(axis=1)] == labels)

    init_key = jax.random.split(jax.random.key(0))[0]
    state = contrastive.init_state(init_key, (28, 28, 1), config)
    random = fitting.chunked_encoder(
        lambda p, x: contrastive.features(p, x / 255.0, config), state.params
    )
    encode, info = fit(images, config, trained[0])
    z = encode(images)
    assert z.dtype == np.float32 and z.shape == (len(images), 16) and (z >= 0).all()
    assert agreement(z) > agreement(random(images)) + 0.1
    assert 0 < info["loss"] < np.log(63) - 0.5 and info["accuracy"] > 0.08 and info["seconds"] > 0


@pytest.mark.slow
def test_encode_is_invariant_to_order_and_chunks(glyphs, monkeypatch):
    images, _ = glyphs
    config = settings()
    params = contrastive.init_state(jax.random.key(1), (28, 28, 1), config).params

    def encoder():
        encode = lambda p, x: contrastive.features(p, x / 255.0, config)  # noqa: E731
        return fitting.chunked_encoder(encode, params)

    encode = encoder()
    whole = encode(images)
    order = np.random.default_rng(0).permutation(len(images))
    np.testing.assert_array_equal(encode(images[order]), whole[order])
    pieces = np.concatenate([encode(images[:1]), encode(images[1:40]), encode(images[40:])])
    np.testing.assert_array_equal(pieces, whole)
    monkeypatch.setattr(chunks, "size", lambda: 7)
    np.testing.assert_allclose(encoder()(images), whole, atol=1e-5)


@pytest.mark.slow
def test_resumed_is_uninterrupted_bit_for_bit(glyphs, tmp_path, monkeypatch):
    images, _ = glyphs
    config = settings(checkpoint_every=20)
    fit(images, config, tmp_path / "whole")
    lines = []

    save = checkpoints.save

    def save_or_die(manager, state, *rest):
        if int(state.step) == 60:
            raise RuntimeError("killed")
        save(manager, state, *rest)

    with monkeypatch.context() as patch:  # step 40 is saved, 41 to 60 are lost
        patch.setattr(checkpoints, "save", save_or_die)
        with pytest.raises(RuntimeError, match="killed"):
            fit(images, config, tmp_path / "killed")
    encode, info = fit(images, config, tmp_path / "killed", report=lines.append)
    assert any("embed: goes on from step 40" in line for line in lines)
    tiny.assert_same(saved(tmp_path / "killed", config), saved(tmp_path / "whole", config))
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    lines.clear()
    again, same_info = fit(images, config, tmp_path / "killed", report=lines.append)
    assert any("embed: reuses 60 steps" in line for line in lines)
    np.testing.assert_array_equal(again(images), encode(images))
    assert same_info == info


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_and_saves(glyphs, tmp_path, kind):
    images, _ = glyphs
    config = settings()
    check = training._check_finite

    def kill_and_check(*args):
        os.kill(os.getpid(), kind)
        check(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_check_finite", kill_and_check)  # runs after the first call
        with pytest.raises(interrupts.Interrupted, match="step 10 of 60") as stopped:
            fit(images, config, tmp_path)
    assert stopped.value.signum == kind
    assert int(saved(tmp_path, config).step) == 10


@pytest.mark.parametrize(
    "change", [{"temperature": 0.2}, {"steps": 40}, {"channels": 4}, {"views": "photo"}]
)
def test_a_checkpoint_of_other_settings_is_refused(trained, change):
    folder, images = trained
    with pytest.raises(UserError, match="another --workdir"):
        fit(images, settings(**change), folder)


def test_a_checkpoint_of_other_images_or_of_another_seed_is_refused(trained):
    folder, images = trained
    with pytest.raises(UserError, match="other settings or other images"):
        fit(images[:-1], settings(), folder)
    with pytest.raises(UserError, match="other settings or other images"):
        fit(images, settings(), folder, seed=1)


def test_settings_that_training_does_not_depend_on_may_change(trained):
    folder, images = trained
    lines = []
    fit(images, settings(normalize=True, checkpoint_every=7), folder, report=lines.append)
    assert any("reuses 60 steps" in line for line in lines)


@pytest.fixture(scope="module")
def trained(glyphs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    fit(glyphs[0], settings(), folder)
    return folder, glyphs[0]


def test_the_fitted_fen_is_in_the_checkpoint(trained):
    folder, images = trained
    params = saved(folder, settings()).params
    assert set(params) == {"fen", "projection"}
    encode, _ = fit(images, settings(), folder)
    expected = contrastive.features(params, jnp.asarray(images[:5]) / 255.0, settings())
    np.testing.assert_allclose(encode(images)[:5], expected, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch_size": 1}, "embedding.batch_size=1, expected 2 to"),
        ({"batch_size": 97}, "images, 96"),
        ({"steps": 0}, "embedding.steps=0"),
        ({"temperature": 0.0}, "embedding.temperature=0.0"),
        ({"learning_rate": -1.0}, "embedding.learning_rate=-1.0"),
        ({"views": "sketch"}, "embedding.views='sketch'"),
    ],
)
def test_settings_that_cannot_be(glyphs, change, message):
    with pytest.raises(UserError, match=message):
        fit(glyphs[0], settings(**change))


def test_images_that_are_too_small(glyphs):
    with pytest.raises(UserError, match="20x28 pixels are too small.*27x27.*data.image_size"):
        fit(glyphs[0][:, :20], settings())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops(glyphs, tmp_path):
    with pytest.raises(UserError, match="NT-Xent loss is nan at step.*embedding.learning_rate"):
        fit(glyphs[0], settings(learning_rate=1e30), tmp_path)


@pytest.mark.slow
def test_photographs(glyphs):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(20, 30, 30, 3)).astype(np.uint8)
    encode, info = fit(images, settings(views="photo", steps=10, batch_size=8, channels=4))
    assert encode(images).shape == (20, 4) and np.isfinite(info["loss"])


@pytest.mark.slow
def test_every_fit_takes_the_same_arguments(glyphs, tmp_path):
    for name in ("pca", "pixels", "contrastive"):
        config = dataclasses.replace(settings(), name=name, dim=4)
        encode, info = get_embedding(name).fit(
            glyphs[0], jax.random.key(0), config, checkpoint_dir=tmp_path / name, report=print
        )
        assert len(encode(glyphs[0][:3])) == 3 and all(
            np.isfinite(v) for v in info.values() if not isinstance(v, str)
        )
