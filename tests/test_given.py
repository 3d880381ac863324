"""Embeddings that are given: by image ids, from a file."""

import numpy as np
import programs
import pytest

from meml_jax import checks, pseudo_labels, rounds
from meml_jax.config import Config, EmbeddingConfig
from meml_jax.embeddings import given
from meml_jax.settings import override
from meml_jax.types import Dataset, Split, UserError


def split(count, name, **fields):
    ids = np.array([f"{name}/{i}" for i in range(count)])
    labels = np.arange(count) % 3
    return Split(np.zeros((count, 6, 6, 1), np.uint8), labels, ids, ("a", "b", "c"), **fields)


def dataset(**fields):
    return Dataset("mine", split(9, "train", **fields), split(4, "val"), split(3, "test"), "hash")


def write(path, ids, z):
    np.savez(path, ids=np.array(ids), embeddings=z)
    return str(path)


def test_rows_are_found_by_id_in_any_order(tmp_path):
    data, rng = dataset(), np.random.default_rng(0)
    ids = [*data.train.ids, *data.validation.ids, "more/0"]
    values = {image: rng.normal(size=5) for image in ids}
    order = rng.permutation(ids)
    file = write(tmp_path / "z.npz", order, np.stack([values[image] for image in order]))
    found = given.attach(data, EmbeddingConfig("npz", file))
    z, others = found.train.embeddings, found.validation.embeddings
    assert found.content_hash != data.content_hash and found.test is data.test
    assert z.dtype == others.dtype == np.float32
    np.testing.assert_array_equal(z, np.float32([values[i] for i in data.train.ids]))
    np.testing.assert_array_equal(others, np.float32([values[i] for i in data.validation.ids]))
    # A file without one of the validation images has none of them.
    order = [image for image in order if image != data.validation.ids[1]]
    file = write(tmp_path / "z.npz", order, np.stack([values[image] for image in order]))
    found = given.attach(data, EmbeddingConfig("npz", file))
    np.testing.assert_array_equal(found.train.embeddings, z)
    assert found.validation.embeddings is None
    assert given.attach(data, EmbeddingConfig("npz")) is data


def test_those_of_the_data_set(tmp_path):
    z = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    config = override(Config(), {"embedding.name": "npz"})
    found = rounds.embed(config, dataset(embeddings=z), tmp_path / "run", lambda line: None)
    np.testing.assert_array_equal(found, z)
    with pytest.raises(UserError, match="has no embeddings; use one that is an npz"):
        rounds.embed(config, dataset(), tmp_path / "none", lambda line: None)


def test_those_of_the_data_set_are_not_passed_over_in_silence():
    z = np.zeros((9, 5), np.float32)
    assert given.unused(dataset(embeddings=z), EmbeddingConfig("pca")) == (
        "mine: embeddings (Z) are there but not used (embedding.name=pca); "
        "--config.embedding.name=npz uses them"
    )
    assert given.unused(dataset(), EmbeddingConfig("pca")) == ""
    assert given.unused(dataset(embeddings=z), EmbeddingConfig("npz")) == ""


@pytest.mark.parametrize(
    ("ids", "z", "message"),
    [
        ([f"train/{i}" for i in range(7)], np.ones((7, 2)), "of 2 of 9 .* the first is 'train/7'"),
        (["a", "a"], np.ones((2, 2)), "got 2 ids of 1 images, such as 'a' twice"),
        (["a", "b"], np.ones((3, 2)), r"got ids <U1 \[2\], embeddings float64 \[3, 2\]"),
        (["a", "b"], np.ones((2, 2), int), "embeddings int64"),
        ([1, 2], np.ones((2, 2)), "got ids int64"),
        (["a"], np.ones((1, 0)), r"\[1, 0\]"),
    ],
)
def test_files_that_do_not_fit(tmp_path, ids, z, message):
    file = write(tmp_path / "z.npz", ids, z)
    with pytest.raises(UserError, match=message):
        given.attach(dataset(), EmbeddingConfig("npz", file))


def test_what_is_no_file_of_embeddings(tmp_path):
    path = tmp_path / "z.npz"
    np.savez(path, Z=np.ones(3))
    with pytest.raises(UserError, match="got no embeddings and no ids, expected both"):
        given.attach(dataset(), EmbeddingConfig("npz", str(path)))
    path.write_text("no npz")
    with pytest.raises(UserError, match="cannot be read as an npz without Python objects"):
        given.attach(dataset(), EmbeddingConfig("npz", str(path)))
    write(path, np.array(["a", "b"], object), np.ones((2, 2)))
    with pytest.raises(UserError, match="without Python objects"):
        given.attach(dataset(), EmbeddingConfig("npz", str(path)))
    for name, file, message in (
        ("npz", "missing.npz", "embedding.file=missing.npz: there is no such file"),
        ("pca", str(path), "embedding.file=.* has no effect with embedding.name='pca'"),
    ):
        config = override(Config(), {"embedding.name": name, "embedding.file": file})
        with pytest.raises(UserError, match=message):
            checks.before_loading(config)


def test_a_changed_file_is_clustered_anew(tmp_path):
    data, said = dataset(), []
    rng = np.random.default_rng(0)
    path, run = tmp_path / "z.npz", tmp_path / "run"
    values = {"embedding.name": "npz", "embedding.file": str(path)}
    values |= {"clustering.num_clusters": 3, "embedding.normalize": True}
    config = override(Config(), values)

    def embed():
        return rounds.embed(config, given.attach(data, config.embedding), run, said.append)

    z = rng.normal(size=(9, 5))
    write(path, data.train.ids, z)
    found = embed()
    np.testing.assert_allclose(found, z / np.linalg.norm(z, axis=1, keepdims=True), rtol=1e-5)
    clusters = pseudo_labels.cluster(config, data, found, run, said.append)
    np.testing.assert_array_equal(embed(), found)
    assert said[-1].startswith("embed: reuses")
    again = pseudo_labels.cluster(config, data, found, run, said.append)
    np.testing.assert_array_equal(again.labels, clusters.labels)
    assert said[-2].startswith("cluster: reuses") and said[-1].startswith("cluster: 3 requested")
    write(path, data.train.ids, -z)
    np.testing.assert_allclose(embed(), -found, rtol=1e-5)
    assert "made with other settings or from other images" in said[-2]


def test_a_runs_own_embeddings_can_be_given_to_another(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    programs.succeed(first, "--stage=cluster", call=programs.run_here)
    file = {"embedding__name": "npz", "embedding__file": first / "embeddings.npz"}
    programs.succeed(second, "--stage=cluster", call=programs.run_here, **file)
    one, two = (dict(np.load(folder / "embeddings.npz")) for folder in (first, second))
    np.testing.assert_array_equal(one["ids"], two["ids"])
    np.testing.assert_allclose(one["embeddings"], two["embeddings"], atol=1e-6)  # of length 1 twice
    assert len(two["validation"]) == 0  # whose ids are not in the file
    one, two = (dict(np.load(folder / "tasks.npz")) for folder in (first, second))
    np.testing.assert_array_equal(one["labels"], two["labels"])
