"""ACAI: its losses by hand, whose gradients go where, and its training."""

import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from meml_jax import checkpoints, chunks, convolution, interrupts, training
from meml_jax.config import EmbeddingConfig
from meml_jax.data.glyphs import generate
from meml_jax.embeddings import acai, autoencoder, fitting
from meml_jax.types import UserError

SHAPE = (7, 7, 1)  # every fourth pixel: 8x8 after padding, a code of 4x4x2
SMALL = {"dim": 32, "width": 4, "depth": 1, "steps": 120, "batch_size": 8, "learning_rate": 1e-2}


def settings(**changes):
    return EmbeddingConfig(name="acai", **(SMALL | changes))


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Most of the time here goes into compiling the same training again and again."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def glyphs():
    return generate(num_classes=6, per_class=8)[0][:, 2::4, 2::4]


def fit(images, config, folder=None, seed=0, report=lambda line: None):
    key = jax.random.key(seed)
    return acai.fit(images, key, config, checkpoint_dir=folder, report=report)


# Losses, on images of 2x2 pixels with networks that can be computed by hand.


def linear_model():
    """Code: pixels times 2; decoder: times 'decoder'; critic: 'critic' times the sum of pixels."""
    return autoencoder.Model(
        init=lambda key: {},
        encode=lambda params, x: params["encoder"] * x,
        decode=lambda params, z: params["decoder"] * z,
        criticise=lambda params, x: params["critic"] * x.sum(axis=(1, 2, 3)),
    )


IMAGES = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.5], [0.5, 1.0]]])[..., None]


def test_autoencoder_loss_by_hand():
    # Squared errors of the first image: 0.25, 0, 0, 0; of the second: 0, 0, 0, 1; 8 pixels.
    reconstruction = np.array([[[0.5, 0.0], [0.0, 1.0]], [[0.0, 0.5], [0.5, 0.0]]])[..., None]
    guess = np.array([0.4, 0.2])  # mean square 0.1
    loss, metrics = acai.autoencoder_loss(IMAGES, reconstruction, guess, weight=0.5)
    assert metrics["reconstruction"] == pytest.approx(1.25 / 8)
    assert metrics["fooling"] == pytest.approx(0.1)
    assert loss == pytest.approx(1.25 / 8 + 0.5 * 0.1)


def test_critic_loss_by_hand():
    guess, alpha, real = np.array([0.4, 0.2]), np.array([0.1, 0.4]), np.array([0.3, -0.1])
    expected = (0.3**2 + 0.2**2) / 2 + (0.3**2 + 0.1**2) / 2
    assert acai.critic_loss(guess, alpha, real) == pytest.approx(expected)
    assert acai.critic_loss(alpha, alpha, 0 * real) == 0


@pytest.mark.parametrize("mix", [0.0, 0.2, 1.0])
def test_losses_by_hand(mix):
    params = {"encoder": 2.0, "decoder": 0.25, "critic": 0.1}  # reconstructions are half as bright
    alpha = np.array([0.1, 0.4])
    loss, metrics = acai.losses(
        params, jnp.asarray(IMAGES), jnp.asarray(alpha), model=linear_model(), mix=mix, weight=0.5
    )
    # Every image has 2 of ink: so do all mixtures of codes, and half of it after the decoder.
    guess, real = 0.1 * 1.0, 0.1 * (mix * 2 + (1 - mix) * 1)
    reconstruction = np.mean((IMAGES / 2) ** 2)
    critic = np.mean((guess - alpha) ** 2) + real**2
    assert metrics["reconstruction"] == pytest.approx(reconstruction, rel=1e-6)
    assert metrics["fooling"] == pytest.approx(guess**2, rel=1e-6)
    assert metrics["loss"] == pytest.approx(reconstruction + 0.5 * guess**2, rel=1e-6)
    assert metrics["critic"] == pytest.approx(critic, rel=1e-6)
    assert loss == pytest.approx(reconstruction + 0.5 * guess**2 + critic, rel=1e-6)


def test_the_interpolation_leans_on_the_image_before():
    seen = []
    model = linear_model()._replace(
        decode=lambda params, z: seen.append(z) or params["decoder"] * z,
    )
    params = {"encoder": 2.0, "decoder": 0.25, "critic": 0.1}
    alpha = jnp.array([0.1, 0.4])
    acai.losses(params, jnp.asarray(IMAGES), alpha, model=model, mix=0.2, weight=0.5)
    z = 2 * IMAGES
    expected = np.stack([0.1 * z[0] + 0.9 * z[1], 0.4 * z[1] + 0.6 * z[0]])
    np.testing.assert_allclose(seen[0], np.concatenate([z, expected]), rtol=1e-6)


def test_each_loss_trains_its_own_networks():
    model, images = linear_model(), jnp.asarray(IMAGES)
    alpha = jnp.array([0.1, 0.4])
    params = {"encoder": 2.0, "decoder": 0.3, "critic": 0.1}

    def total(params, **weights):
        return acai.losses(params, images, alpha, model=model, **weights)[0]

    def own(autoencoder):  # L_fg alone, the critic being a constant
        p = params | autoencoder
        z = model.encode(p, images)
        share = alpha[:, None, None, None]
        guess = model.criticise(params, model.decode(p, share * z + (1 - share) * z[::-1]))
        return acai.autoencoder_loss(images, model.decode(p, z), guess, weight=0.5)[0]

    def critic(value):  # L_d alone, all images being constants
        p = params | {"critic": value}
        z = model.encode(params, images)
        share = alpha[:, None, None, None]
        blend = model.decode(params, share * z + (1 - share) * z[::-1])
        real = 0.2 * images + 0.8 * model.decode(params, z)
        return acai.critic_loss(model.criticise(p, blend), alpha, model.criticise(p, real))

    grads = jax.grad(total)(params, mix=0.2, weight=0.5)
    expected = jax.grad(own)({"encoder": 2.0, "decoder": 0.3})
    expected["critic"] = jax.grad(critic)(0.1)
    tiny.assert_close(grads, expected)
    without = jax.grad(total)(params, mix=0.2, weight=0.0)
    assert without["critic"] == pytest.approx(grads["critic"])
    assert abs(without["decoder"] - grads["decoder"]) > 1e-3


# Networks.


@pytest.mark.parametrize(
    ("shape", "depth", "dim", "code"),
    [((28, 28, 1), 3, 256, (4, 4, 16)), ((32, 32, 1), 3, 256, (4, 4, 16)),
     ((20, 27, 3), 2, 70, (5, 7, 2))],
)  # fmt: skip
def test_shapes(shape, depth, dim, code):
    config = settings(depth=depth, dim=dim)
    model = autoencoder.make_model(config, shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, *shape), jnp.uint8)
    x = jax.eval_shape(functools.partial(autoencoder.prepare, depth=depth), images)
    z = jax.eval_shape(model.encode, params, x)
    assert z.shape == (2, *code)
    assert jax.eval_shape(model.decode, params, z).shape == x.shape
    assert x.shape[1] % 2**depth == 0 and x.shape[1] - shape[0] < 2**depth
    assert jax.eval_shape(model.criticise, params, x).shape == (2,)


def test_the_border_is_repeated():
    image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    grown = np.asarray(autoencoder.prepare(jnp.asarray(image), 2) + 1)[0, :, :, 0] * 255 / 2
    np.testing.assert_allclose(grown[:3, :3], image[0, :, :, 0], atol=1e-5)
    np.testing.assert_allclose(grown[3], [6, 7, 8, 8], atol=1e-5)


def test_a_convolution_keeps_the_size():
    x = np.random.default_rng(0).normal(size=(1, 4, 5, 2)).astype(np.float32)
    y, variables = autoencoder.same_conv(3, "any").init_with_output(jax.random.key(0), x)
    kernel = np.asarray(variables["params"]["kernel"])
    padded = np.pad(x[0], ((1, 1), (1, 1), (0, 0)))
    expected = np.array(
        [[np.tensordot(padded[i : i + 3, j : j + 3], kernel, 3) for j in range(5)]
         for i in range(4)]
    )  # fmt: skip
    np.testing.assert_allclose(y[0], expected, atol=1e-5)


def test_the_stem_is_two_convolutions():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 4, 3)), jnp.float32)
    stem = autoencoder.Stem(6)
    shapes = jax.eval_shape(stem.init, jax.random.key(0), x)["params"]
    rng = np.random.default_rng(1)  # biases are not 0
    params = {k: jnp.asarray(rng.normal(size=v.shape), v.dtype) for k, v in shapes.items()}
    inside = jnp.einsum("nhwc,cm->nhwm", x, params["point_kernel"][0, 0])
    inside += params["point_bias"][None, None, None]
    padded = jnp.pad(inside, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = convolution.native(padded, params["square_kernel"], 1)
    expected += params["square_bias"][None, None, None]
    np.testing.assert_allclose(stem.apply({"params": params}, x), expected, rtol=1e-4, atol=1e-4)


# Training.


def test_a_step_has_the_settings_and_alpha_up_to_a_half(glyphs, monkeypatch):
    def recorded(params, images, alpha, *, model, mix, weight):
        assert images.shape == (8, 8, 8, 1) and alpha.shape == (8,)
        told = {"loss": alpha.min(), "reconstruction": alpha.max(), "fooling": weight}
        return 0.0 * jax.tree.leaves(params)[0].sum(), told | {"critic": jnp.asarray(mix)}

    monkeypatch.setattr(acai, "losses", recorded)
    config = settings(critic_mix=0.1, critic_weight=0.7)
    state = jax.jit(lambda key: acai.init_state(key, SHAPE, config))(jax.random.key(0))
    call = jax.jit(acai.make_train_call(config, SHAPE))
    _, told = call(state, jnp.int32(10), jnp.asarray(glyphs), jax.random.key(1))
    assert 0 <= told["loss"].min() < 0.02 and 0.48 < told["reconstruction"].max() <= 0.5
    assert len(set(np.asarray(told["loss"]).tolist())) == 10  # other ones in each step
    np.testing.assert_allclose(told["fooling"], 0.7, rtol=1e-6)
    np.testing.assert_allclose(told["critic"], 0.1, rtol=1e-6)


def test_the_encoder_knows_neither_order_nor_number(glyphs, monkeypatch):
    monkeypatch.setattr(chunks, "size", lambda: 5)
    model = autoencoder.make_model(settings(), SHAPE)
    encode = fitting.chunked_encoder(
        lambda p, x: model.encode(p, autoencoder.prepare(x, 1)).reshape(len(x), -1),
        jax.jit(model.init)(jax.random.key(0)),
    )
    whole, order = encode(glyphs), np.random.default_rng(1).permutation(len(glyphs))
    np.testing.assert_array_equal(encode(glyphs[order]), whole[order])
    np.testing.assert_array_equal(np.concatenate([encode(glyphs[:3]), encode(glyphs[3:])]), whole)


@pytest.fixture(scope="module")
def trained(glyphs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    encode, info = fit(glyphs, settings(checkpoint_every=60), folder)
    return folder, encode, info


@pytest.mark.slow
def test_training_reconstructs_and_interpolates(glyphs, trained):
    folder, encode, info = trained
    assert set(info) == {*acai.METRICS, "seconds", "commit", "device"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    errors = [json.loads(line)["train/reconstruction"] for line in lines]
    assert errors[-1] < 0.6 * errors[0]
    z = encode(glyphs)
    assert z.dtype == np.float32 and z.shape == (len(glyphs), 32)
    params = acai.load(folder, SHAPE, settings())
    between = acai.decode_between(params, glyphs[:3], glyphs[3:6], [0, 0.5, 1], settings())
    assert between.shape == (3, 3, *SHAPE) and 0 <= between.min() and between.max() <= 1
    back = acai.decode_between(params, glyphs[3:6], glyphs[:3], [0, 0.5, 1], settings())
    np.testing.assert_allclose(back[:, ::-1], between, atol=1e-5)
    # By the modules themselves: encoder, mean of the codes, decoder, 7x7 of 8x8.
    model = autoencoder.make_model(settings(), SHAPE)
    codes = [
        model.encode(params, autoencoder.prepare(jnp.asarray(glyphs[i : i + 1]), 1)) for i in (0, 3)
    ]
    middle = model.decode(params, (codes[0] + codes[1]) / 2)[:, :7, :7]
    np.testing.assert_allclose(between[0, 1], np.clip((middle + 1) / 2, 0, 1)[0], atol=1e-5)
    np.testing.assert_allclose(z[0], codes[0].ravel(), atol=1e-5)


@pytest.mark.slow
def test_encode_is_invariant_to_order_and_number(glyphs, trained):
    encode = trained[1]
    whole = encode(glyphs)
    np.testing.assert_array_equal(encode(glyphs), whole)
    order = np.random.default_rng(1).permutation(len(glyphs))
    np.testing.assert_array_equal(encode(glyphs[order]), whole[order])
    pieces = np.concatenate([encode(glyphs[:7]), encode(glyphs[7:8]), encode(glyphs[8:])])
    np.testing.assert_array_equal(pieces, whole)


def saved(folder, config):
    template = jax.eval_shape(lambda: acai.init_state(jax.random.key(0), SHAPE, config))
    with checkpoints.open_checkpoints(folder / "checkpoints", read_only=True) as manager:
        return checkpoints.restore(manager, template)[0]


@pytest.mark.slow
def test_stopped_by_a_signal_and_resumed_equals_uninterrupted(glyphs, trained, tmp_path):
    whole, encode, _ = trained
    config = settings(checkpoint_every=60)
    check = training._check_finite

    def kill_and_check(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        check(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_check_finite", kill_and_check)  # runs after the first call
        with pytest.raises(interrupts.Interrupted, match="step 10 of 120"):
            fit(glyphs, config, tmp_path)
    again, _ = fit(glyphs, config, tmp_path)
    tiny.assert_same(saved(tmp_path, config), saved(whole, config))
    np.testing.assert_array_equal(again(glyphs), encode(glyphs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"critic_weight": 0.1}, {"critic_mix": 0.0}, {"width": 3}, {"steps": 30}]
)
def test_a_checkpoint_of_other_settings_is_refused(glyphs, trained, change):
    with pytest.raises(UserError, match="another --workdir"):
        fit(glyphs, settings(**change), trained[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 100}, "dim=100, expected a multiple of 16: images of 7x7 .* 4x4 positions"),
        ({"dim": 0}, "dim=0, expected a multiple of 16"),
        ({"width": 0}, "embedding.width=0, expected at least 1"),
        ({"depth": 0}, "embedding.depth=0, expected at least 1"),
        ({"depth": 4}, "embedding.depth=4, expected at most 3 for images of 7x7 pixels"),
        ({"critic_mix": -0.1}, "embedding.critic_mix=-0.1, expected 0 to 1"),
        ({"critic_weight": -1.0}, "embedding.critic_weight=-1.0, expected at least 0"),
        ({"batch_size": 49}, "images, 48"),
    ],
)
def test_settings_that_cannot_be(glyphs, change, message):
    with pytest.raises(UserError, match=message):
        fit(glyphs, settings(**change))


def test_a_training_that_is_gone(tmp_path):
    with pytest.raises(UserError, match="not in .* any more; delete embeddings.npz"):
        acai.load(tmp_path, SHAPE, settings())
