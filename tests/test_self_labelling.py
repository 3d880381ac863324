"""DeepCluster and SeLa: their network, how they sample and label, training and encoding."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import tiny

from meml_jax import checkpoints, chunks, clustering
from meml_jax.config import EmbeddingConfig
from meml_jax.data import augment
from meml_jax.data import glyphs as glyphs_data
from meml_jax.embeddings import EMBEDDINGS, alexnet, self_labelling
from meml_jax.embeddings.alexnet import AlexNet, max_pool, sobel
from meml_jax.types import TaskTable, UserError

FIVE_LAYERS = alexnet.LAYERS
SMALL = {
    "channels": 4, "dim": 8, "num_pseudo_labels": 7, "round_steps": 20, "steps": 60,
    "batch_size": 16, "learning_rate": 0.003, "views": "none",
}  # fmt: skip


def settings(name="deepcluster", **changes):
    return EmbeddingConfig(name=name, **(SMALL | changes))


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Most of the time here goes into compiling the same training again and again."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def five_layers(monkeypatch):
    """The network as it is."""
    monkeypatch.setattr(alexnet, "LAYERS", FIVE_LAYERS)


@pytest.fixture(scope="module", autouse=True)
def two_layers():
    """Two convolutions and no views compile in a fifth of the time; nothing here knows of five."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alexnet, "LAYERS", FIVE_LAYERS[:2])
        patch.setitem(augment.VIEWS, "none", lambda key, images: images)
        yield


@pytest.fixture(scope="module")
def images():
    return glyphs_data.generate(num_classes=6, per_class=10)[0]


def fit(images, config, folder=None, seed=0, report=lambda line: None):
    fit_ = EMBEDDINGS[config.name].fit
    return fit_(images, jax.random.key(seed), config, checkpoint_dir=folder, report=report)


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """A finished training for each rule, made when first asked for."""

    @functools.cache
    def get(name):
        folder = tmp_path_factory.mktemp(name)
        return folder, fit(images, settings(name), folder)

    return get


def saved(folder, config, num_images=60):
    init = functools.partial(
        self_labelling.init_state,
        image_shape=(28, 28, 1),
        num_images=num_images,
        config=config,
    )
    template = jax.eval_shape(init, jax.random.key(0))
    with checkpoints.open_checkpoints(folder / "checkpoints", read_only=True) as manager:
        return checkpoints.restore(manager, template)[0]


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def test_sobel_by_hand():
    image = np.random.default_rng(0).uniform(size=(4, 5, 3)).astype(np.float32)
    grey = np.pad(image.mean(axis=2), 1, mode="edge")
    across = np.outer([1, 2, 1], [-1, 0, 1])
    expected = np.zeros((4, 5, 2))
    for y in range(4):
        for x in range(5):
            window = grey[y : y + 3, x : x + 3]
            expected[y, x] = (window * across).sum(), (window * across.T).sum()
    np.testing.assert_allclose(sobel(jnp.asarray(image[None]))[0], expected, atol=1e-5)


def test_sobel_of_a_ramp_and_of_a_flat_image():
    ramp = np.tile(np.arange(6.0, dtype=np.float32), (6, 1))[None, :, :, None]
    across, down = np.moveaxis(np.asarray(sobel(jnp.asarray(ramp)))[0], -1, 0)
    np.testing.assert_allclose(across[:, 1:-1], 8)  # 4 rows' weight times 2 columns' distance
    np.testing.assert_allclose(across[:, [0, -1]], 4)
    np.testing.assert_allclose(down, 0)
    np.testing.assert_allclose(sobel(jnp.full((1, 4, 4, 3), 0.7)), 0, atol=1e-6)


def test_max_pool_of_even_and_odd_maps():
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    y = np.asarray(max_pool(jnp.asarray(x)))
    assert y.shape == (2, 3, 2, 3)
    for i in range(3):
        for j in range(2):
            block = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            np.testing.assert_array_equal(y[:, i, j], block.max(axis=(1, 2)))


def test_gradient_of_max_pool_goes_to_one_entry_of_each_window():
    x = np.array([[0, 0, 3, 1], [0, 0, 2, 3]], np.float32)[None, :, :, None]
    given = jnp.array([5.0, 7.0])
    gradient = jax.grad(lambda x: jnp.sum(max_pool(x)[0, 0, :, 0] * given))(jnp.asarray(x))
    expected = np.array([[5, 0, 7, 0], [0, 0, 0, 0]], np.float32)[None, :, :, None]
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("shape", [(28, 28, 1), (64, 64, 3), (84, 84, 3), (16, 16, 1)])
@pytest.mark.usefixtures("five_layers")
def test_network_fits_the_sizes_of_the_data_sets(shape):
    init = functools.partial(AlexNet(8).init_with_output, train=False)
    x = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    features, _ = jax.eval_shape(init, jax.random.key(0), x)
    assert features.shape == (2, 32)


def test_images_by_label():
    labels = np.array([3, 0, 3, 1, 0, 3], np.int32)
    table = self_labelling.tabulate(jnp.asarray(labels), 5)
    np.testing.assert_array_equal(table.size, [2, 1, 0, 3, 0])
    for c in range(5):
        start, size = int(table.start[c]), int(table.size[c])
        np.testing.assert_array_equal(table.index[start : start + size], np.where(labels == c)[0])


def test_pseudo_labels_are_drawn_uniformly_whatever_their_sizes():
    labels = np.repeat([0, 1, 3], [1, 50, 9]).astype(np.int32)
    table = self_labelling.tabulate(jnp.asarray(labels), 5)  # 2 and 4 are empty
    draw = jax.jit(lambda key: self_labelling.sample(key, table, 6000))
    chosen, drawn = map(np.asarray, draw(jax.random.key(0)))
    np.testing.assert_array_equal(labels[chosen], drawn)
    counts = np.bincount(drawn, minlength=5)
    assert counts[2] == counts[4] == 0
    assert ((counts[[0, 1, 3]] - 2000) ** 2 / 2000).sum() < 13.8  # chi-square, p = 0.001
    of_images = np.bincount(chosen, minlength=60)
    for label, size in ((1, 50), (3, 9)):
        each = of_images[labels == label]
        expected = counts[label] / size
        assert ((each - expected) ** 2 / expected).sum() < size + 5 * np.sqrt(2 * size)


@pytest.mark.slow
@pytest.mark.parametrize("name", self_labelling.RULES)
def test_training_teaches_the_pseudo_labels(trained, name):
    folder, (_, info) = trained(name)
    rounds = [r["train/loss"] for r in records(folder)]
    assert 0 < info["loss"] == rounds[-1] < rounds[0]
    assert info["seconds"] > 0 and 1 < info["clusters"] <= 7


@pytest.mark.slow
def test_each_rule_labels_by_its_own_law(trained):
    tables = {n: saved(trained(n)[0], settings(n)).params["clusters"] for n in self_labelling.RULES}
    for table in tables.values():
        np.testing.assert_array_equal(np.sort(table.index), np.arange(60))
        assert table.size.sum() == 60
    assert set(np.asarray(tables["sela"].size)) == {8, 9}  # 60 images, 7 labels
    assert trained("sela")[1][1]["largest"] == 9
    assert 0 < trained("sela")[1][1]["marginal_error"] <= 0.01
    assert np.ptp(tables["deepcluster"].size) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", self_labelling.RULES)
def test_a_round_begins_with_labels_and_deepclusters_with_a_new_head(images, trained, name):
    rule, config = self_labelling.RULES[name], settings(name)
    before = saved(trained(name)[0], config)
    begin = jax.jit(lambda s: self_labelling.relabel(s, images, jax.random.key(1), rule, config))
    after = begin(before)
    tiny.assert_same(after.params["network"], before.params["network"])
    tiny.assert_same(after.params["batch_stats"], before.params["batch_stats"])
    momentum = jax.tree.leaves(after.opt_state["head"])
    if rule.resets_head:
        kernel = np.asarray(after.params["head"]["kernel"])
        assert 0.005 < kernel.std() < 0.02 and (kernel != before.params["head"]["kernel"]).all()
        assert all((np.asarray(leaf) == 0).all() for leaf in momentum)
    else:
        tiny.assert_same(after.params["head"], before.params["head"])
        tiny.assert_same(after.opt_state, before.opt_state)
    assert after.params["clusters"].size.sum() == 60


@pytest.mark.slow
@pytest.mark.parametrize("name", self_labelling.RULES)
def test_encode_treats_each_image_by_itself(images, trained, name):
    encode, _ = trained(name)[1]
    whole = encode(images)
    assert whole.dtype == np.float32 and whole.shape == (60, 8)
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    order = np.random.default_rng(0).permutation(60)
    np.testing.assert_array_equal(encode(images[order]), whole[order])
    pieces = np.concatenate([encode(images[:1]), encode(images[1:40]), encode(images[40:])])
    np.testing.assert_array_equal(pieces, whole)
    companions = np.full_like(images, 255)
    companions[:3] = images[:3]
    np.testing.assert_array_equal(encode(companions)[:3], whole[:3])


@pytest.mark.slow
def test_features_of_training_do_depend_on_companions(images, trained):
    """What the test above would miss, if encoding used the statistics of its batch."""
    params = saved(trained("deepcluster")[0], settings()).params
    variables = {"params": params["network"], "batch_stats": params["batch_stats"]}

    @jax.jit
    def train_features(x):
        rngs = {"dropout": jax.random.key(0)}
        apply = AlexNet(4).apply
        return apply(variables, x / 255.0, train=True, rngs=rngs, mutable=["batch_stats"])[0]

    one, other = train_features(images[:8]), train_features(np.r_[images[:1], images[30:37]])
    assert np.abs(one[0] - other[0]).max() > 1e-3
    drawn = np.asarray(jax.tree.leaves(params["batch_stats"])[0])
    assert (drawn != 0).any()  # running averages have left their start


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 60])
def test_features_of_all_images_are_those_of_each(images, trained, monkeypatch, count):
    params = saved(trained("deepcluster")[0], settings()).params
    monkeypatch.setattr(chunks, "size", lambda: 25)  # 60 are three chunks, the last one overlaps
    x = jnp.asarray(images[:count])
    one_by_one, together = (
        jax.jit(functools.partial(f, channels=settings().channels))(params, x)
        for f in (alexnet.features, alexnet.all_features)
    )
    np.testing.assert_allclose(together, one_by_one, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every", "last"), [("deepcluster", 20, 40), ("deepcluster", 30, 30), ("sela", 30, 30)]
)
def test_resumed_is_uninterrupted_bit_for_bit(images, trained, tmp_path, name, every, last):
    """Every 20: killed with new labels of which the checkpoint knows nothing; 30: amid a round."""
    config = settings(name, checkpoint_every=every)
    save = checkpoints.save

    def save_or_die(manager, state, *rest):
        if int(state.step) == 60:
            raise RuntimeError("killed")
        save(manager, state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", save_or_die)
        with pytest.raises(RuntimeError, match="killed"):
            fit(images, config, tmp_path)
    lines = []
    encode, info = fit(images, config, tmp_path, report=lines.append)
    assert any(f"embed: goes on from step {last}" in line for line in lines)
    folder, (whole, whole_info) = trained(name)
    tiny.assert_same(saved(tmp_path, config), saved(folder, config))
    assert records(tmp_path) == records(folder)
    np.testing.assert_array_equal(encode(images), whole(images))
    assert programs.without_circumstances(info) == programs.without_circumstances(whole_info)


@pytest.mark.slow
def test_a_finished_training_is_reused_and_belongs_to_its_settings(images, trained):
    folder, (encode, info) = trained("deepcluster")
    lines = []
    again, same_info = fit(images, settings(checkpoint_every=7), folder, report=lines.append)
    assert any("embed: reuses 60 steps" in line for line in lines) and same_info == info
    np.testing.assert_array_equal(again(images), encode(images))
    for change in ({"round_steps": 30}, {"dim": 7}, {"views": "photo"}, {"learning_rate": 0.1}):
        with pytest.raises(UserError, match="another --workdir"):
            fit(images, settings(**change), folder)
    with pytest.raises(UserError, match="other settings or other images"):
        fit(images[::-1].copy(), settings(), folder)
    with pytest.raises(UserError, match="other settings or other images"):
        fit(images, settings(), folder, seed=1)


def test_a_loss_that_is_not_finite_stops(images, tmp_path, monkeypatch):
    init_state = self_labelling.init_state

    def broken(*args, **kwargs):
        state = init_state(*args, **kwargs)
        network = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params["network"])
        return dataclasses.replace(state, params=state.params | {"network": network})

    monkeypatch.setattr(self_labelling, "init_state", broken)
    with pytest.raises(UserError, match="loss on pseudo-labels is nan at step 1.*learning_rate"):
        fit(images, settings(), tmp_path)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pseudo_labels": 1}, "embedding.num_pseudo_labels=1, expected 2 to"),
        ({"num_pseudo_labels": 61}, "images, 60"),
        ({"round_steps": 15}, "embedding.round_steps=15, expected a multiple of 10"),
        ({"round_steps": 0}, "embedding.round_steps=0"),
        ({"dim": 17}, "embedding.dim=17, expected 1 to 16"),
        ({"sharpness": 0.0}, "embedding.sharpness=0.0"),
        ({"batch_size": 61}, "embedding.batch_size=61"),
        ({"views": "sketch"}, "embedding.views='sketch'"),
    ],
)
def test_settings_that_cannot_be(images, change, message):
    with pytest.raises(UserError, match=message):
        fit(images, settings(**change))


def test_images_that_are_too_small(images):
    with pytest.raises(UserError, match="15x28 pixels are too small.*16x16.*data.image_size"):
        fit(images[:, :15], settings())


def test_an_empty_label_is_never_trained_on():
    table = TaskTable(jnp.arange(4), jnp.array([0, 0, 4]), jnp.array([0, 4, 0]))
    assert (np.asarray(self_labelling.sample(jax.random.key(0), table, 50)[1]) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", self_labelling.RULES)
def test_a_run_beats_chance(tmp_path, name):
    programs.succeed(
        tmp_path / "run",
        "--stage=cluster",
        embedding__name=name,
        embedding__channels=16,
        embedding__dim=32,
        embedding__num_pseudo_labels=20,
        embedding__round_steps=20,
        embedding__steps=100,
        embedding__batch_size=64,
        clustering__num_clusters=20,
    )
    with np.load(tmp_path / "run" / "tasks.npz") as stored:
        labels, info, ids = stored["labels"], json.loads(str(stored["info"])), stored["ids"]
    true = np.unique([i.rsplit("/", 1)[0] for i in ids], return_inverse=True)[1]
    assert clustering.agreement(true, labels)["purity"] == pytest.approx(info["purity"])
    rng = np.random.default_rng(0)
    chance = [clustering.agreement(true, rng.permutation(labels))["purity"] for _ in range(20)]
    assert info["purity"] > max(chance) + 0.05
