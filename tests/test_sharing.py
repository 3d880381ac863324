"""Products that runs of a table have in common are made once."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import programs
import pytest
from own_tables import program
from test_embedding_report import program as embeddings_program

from meml_jax import (
    embeddings,
    files,
    pseudo_labels,
    sharing,
)
from meml_jax.config import Config
from meml_jax.data import datasets
from meml_jax.fingerprints import fingerprint
from meml_jax.learners import LEARNERS
from meml_jax.results import product_versions
from meml_jax.settings import override
from meml_jax.types import Dataset, Split, UserError
from meml_jax.workdir import check_same_training, open_workdir, record_config


def test_what_is_shared():
    base = override(Config(), {"learner": "oml"})

    def same(stage, **fields):
        other = override(base, {name.replace("__", "."): v for name, v in fields.items()})
        return sharing.key(stage, other) == sharing.key(stage, base)

    assert same("embed", learner="meml", clustering__num_clusters=5, tasks__balance="truncate")
    assert not same("embed", seed=1) and not same("embed", embedding__dim=3)
    # Images are compared by their digest, wherever they lie; so is a size that is left open.
    for stage in ("embed", "cluster", "train"):
        assert same(stage, data__dir="elsewhere", data__cache_dir="x", data__download_timeout=1.0)
        assert same(stage, data__image_size=0, data__channels=0)
        assert same(stage, embedding__checkpoint_every=7)
        assert not same(stage, data__max_per_class=3)
    assert same("cluster", learner="meml", tasks__balance="loss", network__channels=3)
    assert not same("cluster", clustering__num_clusters=5)
    assert not same("cluster", tasks__balance="truncate")
    assert same("train", test__runs=3, test_data__name="cub", test__num_classes=(2,))
    assert not same("train", learner="meml") and not same("train", train__steps=3)
    oracle = override(base, {"tasks.labels": "true"})
    assert sharing.key("embed", oracle) is None and sharing.key("train", oracle)
    # True classes are what they are, whatever an embedding and its clusters would be.
    other = {"embedding.name": "acai", "embedding.dim": 3, "clustering.num_clusters": 5}
    unused = override(oracle, other)
    assert sharing.key("train", unused) == sharing.key("train", oracle)
    start = {"train.init": "embedding"}
    assert sharing.key("train", override(unused, start)) != sharing.key(
        "train", override(oracle, start)
    )
    assert sharing.key("test", base) is None
    rounds = override(base, {"clustering.rounds": 2})
    assert sharing.key("embed", rounds) and not sharing.key("train", rounds)


def retell(path, digest):
    """Let an npz say that it was made from something else; None: let it say nothing."""
    arrays = {name: array for name, array in np.load(path).items() if name != "fingerprint"}
    np.savez(path, **arrays, **({} if digest is None else {"fingerprint": digest}))


@pytest.fixture
def sibling(tmp_path):
    """A finished run in a results folder."""
    target = tmp_path / "results" / "one" / "row" / "seed0"
    return shutil.copytree(programs.finished("smoke"), target)


@pytest.mark.slow
def test_a_finished_sibling_gives_all_that_is_the_same(tmp_path, sibling, capsys):
    config = programs.stored_config(sibling)
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    # What a stopped run, or a copy that was cut short, may have left.
    with open_workdir(workdir, config):
        (workdir / ".checkpoints.copying").mkdir()
    before = programs.snapshot(sibling)
    program().do(config, workdir, tmp_path / "results")
    lines = capsys.readouterr().out.splitlines()
    for stage in ("embed", "cluster", "train"):
        assert f"{stage}: copies from {sibling}" in lines, lines
        assert any(line.startswith(f"{stage}: reuses ") for line in lines)
    assert any(line.startswith("test: reuses 8 finished points") for line in lines)
    assert programs.results(workdir) == programs.results(sibling)
    assert programs.snapshot(sibling) == before
    assert not list(workdir.rglob("*.copying"))
    # With more steps only embedding and clusters are the same.
    longer = override(config, {"train.steps": 60})
    images = programs.results(sibling)["content_hash"]
    find = functools.partial(sharing.find, workdir=workdir, results=tmp_path / "results")
    assert find("train", images, longer) is None
    assert find("cluster", images, longer) == find("train", images, config) == sibling
    # A training on other images, or other clusters, would be refused; a second sibling may fit.
    assert find("train", "other", config) is None
    second = shutil.copytree(sibling, sibling.with_name("seed1"))
    np.savez(sibling / "tasks.npz", fingerprint="foreign")
    assert find("train", images, config) == second
    (workdir / "tasks.npz").unlink()
    assert find("train", images, config) is None


def test_an_embedding_of_other_images_is_not_copied(tmp_path, sibling):
    config = programs.stored_config(sibling)
    images = programs.results(sibling)["content_hash"]
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    find = functools.partial(sharing.find, "embed", workdir=workdir, results=tmp_path / "results")
    assert find(images, config) == sibling
    assert find("other images", config) is None
    assert find(images, override(config, {"embedding.checkpoint_every": 7})) == sibling
    retell(sibling / "embeddings.npz", None)  # it does not say what it was made from
    assert find(images, config) is None
    (wanted, _) = pseudo_labels.made_from(config, images)
    retell(sibling / "embeddings.npz", wanted)
    # In its own workdir it is reused.
    said = []
    data = datasets.load(config.data, report=lambda line: None)
    pseudo_labels.embed(config, data, sibling, said.append)
    assert said == [f"embed: reuses {sibling / 'embeddings.npz'}"]


def test_settings_that_are_left_open_are_shared(tmp_path, sibling, capsys):
    """Image size, channels and number of clusters are chosen, in the sibling and here."""
    config, results_ = programs.stored_config(sibling), tmp_path / "results"
    images = programs.results(sibling)["content_hash"]
    left_open = {"data.image_size": 0, "data.channels": 0, "clustering.num_clusters": 0}
    elsewhere = {"data.dir": "elsewhere", "data.cache_dir": str(tmp_path)}
    bare = override(config, left_open | elsewhere)
    workdir = results_ / "two" / "row" / "seed0"

    def enter(stage, chosen, images=images):
        with (
            open_workdir(workdir, bare),
            sharing.around(
                stage, images, config=bare, workdir=workdir, results=results_, say=print
            ),
        ):
            held = sharing._lock_path(results_, stage, sharing.key(stage, chosen), images)
            with files.lock(held) as ours:
                assert not ours
        return f"{stage}: copies from {sibling}" in capsys.readouterr().out

    assert not enter("embed", bare, "other images") and enter("embed", bare)
    assert not (workdir / "tasks.npz").exists()
    with files.lock(sharing._lock_path(results_, "embed", sharing.key("embed", bare), images)):
        other = results_ / "three" / "row" / "seed0"
        assert sharing.busy(override(bare, {"data.dir": "there"}), other, results_)
    # The number of clusters is known once the images are, and is then that of the workdir.
    for number, same in ((5, False), (config.clustering.num_clusters, True)):
        chosen = override(bare, {"clustering.num_clusters": number})
        record_config(workdir, chosen)
        assert enter("cluster", chosen) == same
    assert enter("train", chosen)


def test_clusters_of_other_images_are_not_copied(tmp_path, sibling):
    config = programs.stored_config(sibling)
    images = programs.results(sibling)["content_hash"]
    second = shutil.copytree(sibling, sibling.with_name("seed1"))
    retell(sibling / "embeddings.npz", pseudo_labels.made_from(config, "other")[0])
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    for digest, source in ((images, second), ("other", sibling), ("third", None)):
        assert sharing.find("cluster", digest, config, workdir, tmp_path / "results") == source


def test_a_stopped_training_holds_the_lock_when_it_goes_on(tmp_path, sibling):
    results_ = tmp_path / "results"
    config = programs.stored_config(sibling)
    digest = programs.results(sibling)["content_hash"]
    path = sharing._lock_path(results_, "train", sharing.key("train", config), digest)
    longer = override(config, {"train.steps": 60})
    assert {p.name for p in (sibling / "checkpoints").iterdir() if p.name.isdigit()} >= {"40"}
    for settings_, held in ((config, False), (longer, True)):
        with sharing.around(
            "train", digest, config=settings_, workdir=sibling, results=results_, say=print
        ):
            key = sharing.key("train", settings_)
            lock_path = sharing._lock_path(results_, "train", key, digest)
            with files.lock(lock_path) as ours:
                assert ours != held
    with files.lock(path):
        assert not sharing.busy(config, sibling, results_)
        (sibling / "checkpoints" / "40").rename(sibling / "checkpoints" / "39")
        assert sharing.busy(config, sibling, results_)


def test_a_workdir_of_true_classes_is_tied_to_no_embedding(tmp_path):
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    oracle = override(Config(), {"tasks.labels": "true"})
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(oracle)))
    other = {"embedding.name": "acai", "clustering.num_clusters": 5}
    check_same_training(tmp_path, override(oracle, other))
    for more in ({"tasks.labels": "clusters"}, {"train.init": "embedding"}, {"seed": 1}):
        with pytest.raises(UserError, match=f"{next(iter(more))} is "):
            check_same_training(tmp_path, override(oracle, other | more))


def test_what_does_not_fit_is_made_anew(tmp_path, sibling, capsys):
    """The settings agree, but not what is in the file: the stage's own fingerprint decides."""
    config = programs.stored_config(sibling)
    retell(sibling / "tasks.npz", "foreign")
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    around = functools.partial(
        sharing.around, config=config, workdir=workdir, results=tmp_path / "results", say=print
    )
    programs.program().run(config, workdir, "cluster", around)
    lines = capsys.readouterr().out.splitlines()
    assert f"cluster: copies from {sibling}" in lines
    assert any(line.startswith("cluster: 12 requested") for line in lines)
    with np.load(workdir / "tasks.npz") as made, np.load(sibling / "tasks.npz") as old:
        np.testing.assert_array_equal(made["labels"], old["labels"])
        assert str(made["fingerprint"]) != "foreign"


def test_products_of_another_version_are_not_copied(tmp_path, sibling, monkeypatch):
    config, path = programs.stored_config(sibling), sibling / "results.json"
    found, results_ = json.loads(path.read_text()), tmp_path / "results"
    images, workdir = found["content_hash"], results_ / "two" / "row" / "seed0"
    workdir.mkdir(parents=True)
    shutil.copy(sibling / "tasks.npz", workdir)
    unsaid = {name: value for name, value in found.items() if name != "product_versions"}

    def copied(versions):
        said = {} if versions is None else {"product_versions": versions}
        path.write_text(json.dumps(unsaid | said))
        stages = ("embed", "cluster", "train")
        return [sharing.find(s, images, config, workdir, results_) is not None for s in stages]

    assert found["product_versions"] == {"embedding": 1}
    assert copied({"embedding": 1}) == [True, True, True]
    # The start of the FEN, or a learner, of another version; results that do not say.
    for versions in ({"embedding": 1, "init": 1}, {"embedding": 1, "learner": "other"}, None):
        assert copied(versions) == [True, True, False]
    row = dataclasses.replace(embeddings.EMBEDDINGS["pca"], version=2)
    monkeypatch.setitem(embeddings.EMBEDDINGS, "pca", row)
    assert copied({"embedding": 1}) == [False, False, False]


def test_an_edited_learner_of_ones_own_is_trained_anew(tmp_path, sibling, monkeypatch):
    workdir = tmp_path / "results" / "two" / "row" / "seed0"
    workdir.mkdir(parents=True)
    shutil.copy(sibling / "tasks.npz", workdir)
    monkeypatch.setitem(LEARNERS, "mine", LEARNERS["meml"])
    config = override(programs.stored_config(sibling), {"learner": "mine"})
    (sibling / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    found = programs.results(sibling) | {"config": dataclasses.asdict(config)}
    found["product_versions"] = product_versions(config)
    (sibling / "results.json").write_text(json.dumps(found))
    images, results_ = found["content_hash"], tmp_path / "results"
    assert sharing.find("train", images, config, workdir, results_) == sibling
    edited = dataclasses.replace(LEARNERS["meml"], resets_class_row=False)
    monkeypatch.setitem(LEARNERS, "mine", edited)
    assert sharing.find("train", images, config, workdir, results_) is None


def test_a_training_of_another_version_has_no_twin(tmp_path, monkeypatch):
    name = "contrastive"
    config = override(Config(), {"embedding.name": name, "embedding.checkpoint_every": 7})
    row, folder = tmp_path / name / "seed0", tmp_path / "whitened" / "seed0"
    (row / "embedding").mkdir(parents=True)
    part = Split(np.zeros((2, 6, 6, 1), np.uint8), np.zeros(2, np.int32), np.arange(2), ("a",))
    data = Dataset("mine", part, part, part, "hash")
    changes = {"embedding.whiten": 0.5, "embedding.checkpoint_every": 100}
    twin = functools.partial(embeddings_program().twin, override(config, changes), data, folder)
    (row / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (row / "embedding.json").write_text(json.dumps({"content_hash": "hash"}))
    for digest, source in (
        (pseudo_labels.made_from(config, "hash")[0], row),
        (pseudo_labels.made_from(config, "hash")[1], row),  # of before, with what has no influence
        (pseudo_labels.made_from(config, "other")[0], None),
    ):
        np.savez(row / "embeddings.npz", fingerprint=digest)
        assert twin() == source
    np.savez(row / "embeddings.npz", fingerprint=pseudo_labels.made_from(config, "hash")[0])
    changed = dataclasses.replace(embeddings.EMBEDDINGS[name], version=2)
    monkeypatch.setitem(embeddings.EMBEDDINGS, name, changed)
    assert twin() is None
    (row / "embeddings.npz").write_bytes(b"")  # it does not tell
    assert twin() is None


def test_what_has_no_influence_may_change_in_a_trained_workdir(tmp_path, sibling):
    config = programs.stored_config(sibling)
    other = override(config, {"embedding.checkpoint_every": 7})
    check_same_training(sibling, other)
    data, said = datasets.load(config.data, report=lambda line: None), []
    path = sibling / "embeddings.npz"
    pseudo_labels.embed(other, data, sibling, said.append)
    assert said.pop() == f"embed: reuses {path}"
    # An earlier version had the field in what the vectors say of themselves.
    digest = fingerprint(other.embedding, other.seed, data.content_hash)
    assert digest != fingerprint(config.embedding, config.seed, data.content_hash)
    retell(path, digest)
    pseudo_labels.embed(other, data, sibling, said.append)
    assert said.pop() == f"embed: reuses {path}"
    with pytest.raises(UserError, match="or of the embedding's code"):
        pseudo_labels.embed(config, data, sibling, said.append)
    with np.load(programs.finished("smoke") / "embeddings.npz") as stored:
        expected = fingerprint(config.embedding, config.seed, data.content_hash)
        assert str(stored["fingerprint"]) == expected
