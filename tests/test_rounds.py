"""Clustering anew what the meta-trained FEN sees, and meta-training from the embedding's FEN."""

import contextlib
import dataclasses
import importlib
import shutil

import jax
import numpy as np
import programs
import pytest
import tiny

from meml_jax import pseudo_labels, results, rounds, stages
from meml_jax.config import Config
from meml_jax.data import datasets
from meml_jax.embeddings import contrastive, l2_normalize
from meml_jax.fingerprints import fingerprint
from meml_jax.layers import FEN
from meml_jax.model import fresh_state, make_model, restore_params
from meml_jax.settings import override
from meml_jax.types import Dataset, Split, UserError


def quiet(line):
    pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clustering.rounds": 0}, "clustering.rounds=0, expected at least 1"),
        ({"clustering.rounds": 2, "tasks.labels": "true"}, "rounds=2, but tasks.labels='true'"),
        ({"train.init": "pretrained"}, "train.init='pretrained', expected 'random' or 'embedding'"),
        ({"train.init": "embedding"}, "contrastive .* but embedding.name='pca'"),
        (
            {
                "train.init": "embedding",
                "embedding.name": "contrastive",
                "embedding.channels": 64,
            },
            "embedding.channels=64 and network.channels=256",
        ),
    ],
)
def test_settings_that_cannot_be(values, message):
    with pytest.raises(UserError, match=message):
        rounds.check(override(Config(), values))
    rounds.check(Config())


def test_what_is_shared_of_rounds_is_the_first_embedding_alone(tmp_path, monkeypatch):
    done = []

    def does(name):
        return lambda *args, **options: done.append(name)

    @contextlib.contextmanager
    def around(stage, images):
        done.append(f"{stage} of {images}: begun")
        yield
        done.append("ended")

    monkeypatch.setattr(pseudo_labels, "embed", does("embed"))
    monkeypatch.setattr(pseudo_labels, "cluster", does("cluster"))
    monkeypatch.setattr(stages, "train", does("train"))
    for name in ("make_model", "initial_fen", "_embed_again"):
        monkeypatch.setattr(rounds, name, does(name))
    config = override(Config(), {"clustering.rounds": 2})
    part = Split(np.zeros((2, 6, 6, 1), np.uint8), np.zeros(2, np.int32), np.arange(2), ("a",))
    data = Dataset("mine", part, part, part, "hash")
    programs.program().do_stages(config, data, tmp_path, "embed", around)
    later = ["cluster", "make_model", "initial_fen", "train", "_embed_again"]
    assert done == ["embed of hash: begun", "embed", "ended", *later]


def test_a_row_of_rounds_counts_what_the_fen_starts_from(monkeypatch):
    programs.program()  # the modules beside it can be imported
    embedding_rows = importlib.import_module("embedding_rows")
    part = Split(np.zeros((2, 6, 6, 1), np.uint8), np.zeros(2, np.int32), np.arange(2), ("a",))
    data = Dataset("mine", part, part, part, "hash")
    plain = override(Config(), {"embedding.name": "contrastive"})
    later = override(plain, {"clustering.rounds": 2})
    started = override(later, {"train.init": "embedding"})
    each = (plain, later, started)
    before = [embedding_rows.fingerprint_of(config, data) for config in each]
    monkeypatch.setattr(results, "INIT_VERSION", -1)
    after = [embedding_rows.fingerprint_of(config, data) for config in each]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False]
    # What is kept of rows that do not start from an embedding stays theirs.
    parts = (plain.embedding, plain.clustering, plain.tasks, plain.seed, plain.precision, "hash")
    assert before[0] == fingerprint(*parts)


FIELDS = {"clustering.rounds": 2, "train.steps": 20, "tasks.num_buckets": 1}


def run(workdir, *flags, **changes):
    fields = {k.replace(".", "__"): v for k, v in FIELDS.items()} | changes
    code, out, err = programs.run_here(workdir, *flags, **fields)
    return code, out.splitlines(), err


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two rounds, trained."""
    workdir = tmp_path_factory.mktemp("rounds") / "run"
    code, lines, err = run(workdir, "--stage=train")
    assert code == 0, err
    return workdir, lines


def loaded(workdir):
    config = programs.stored_config(workdir)
    return config, datasets.load(config.data, report=quiet)


@pytest.mark.slow
def test_each_round_clusters_what_the_one_before_has_trained(done):
    workdir, lines = done
    config, dataset = loaded(workdir)
    first = workdir / "round1"
    assert [line for line in lines if line.startswith("round ")] == ["round 1 of 2", "round 2 of 2"]
    assert (first / "embedding.json").exists() and not (first / "config.json").exists()
    assert not (workdir / "embedding.json").exists()
    z = pseudo_labels.embed(config, dataset, first, quiet)
    clusters = pseudo_labels.cluster(config, dataset, z, first, quiet)
    model = make_model(config, dataset, clusters)
    params, step = restore_params(config, model, first)
    assert step == 20
    features = model.network.activate(
        model.network.encode(params, dataset.train.images[:5] / np.float32(255))
    )
    with np.load(workdir / "embeddings.npz") as stored:
        again, ids, others = (stored[key] for key in ("embeddings", "ids", "validation"))
    expected = l2_normalize(np.asarray(features))  # as the quickstart asks for
    np.testing.assert_allclose(again[:5], expected, atol=1e-4)
    np.testing.assert_array_equal(ids, dataset.train.ids)
    assert again.shape == (400, 4) and z.shape == (400, 64)
    of_others = model.network.activate(
        model.network.encode(params, dataset.validation.images[:5] / np.float32(255))
    )
    assert len(others) == len(dataset.validation.images)
    np.testing.assert_allclose(others[:5], l2_normalize(np.asarray(of_others)), atol=1e-4)
    with np.load(workdir / "tasks.npz") as last, np.load(first / "tasks.npz") as before:
        assert (last["labels"] != before["labels"]).any()


@pytest.mark.slow
def test_rounds_cannot_be_trained_on(done):
    """What the last round was trained on follows from the last step of the one before."""
    before = programs.snapshot(done[0])
    code, lines, err = run(done[0], "--stage=train", train__steps=30)
    assert code == 2 and "train.steps is 20 there, 30 now" in err, (lines, err)
    assert programs.snapshot(done[0]) == before


@pytest.mark.slow
def test_training_starts_from_the_fen_of_the_embedding(done, tmp_path, monkeypatch):
    config, dataset = loaded(done[0])
    values = {
        "clustering.rounds": 2, "embedding.name": "contrastive", "embedding.channels": 4,
        "embedding.steps": 1, "embedding.batch_size": 4,
    }  # fmt: skip
    config = override(config, values)
    folder = rounds.folder(config, 1, tmp_path) / "embedding"
    images, key = dataset.train.images[:20], jax.random.key(0)
    contrastive.fit(images, key, config.embedding, checkpoint_dir=folder, report=quiet)
    assert rounds.initial_fen(config, dataset, tmp_path) is None
    clusters = pseudo_labels.cluster(
        config, dataset, dataset.train.images[:, ::9, ::9].reshape(400, -1), tmp_path, quiet
    )
    random_model = make_model(config, dataset, clusters)
    config = override(config, {"train.init": "embedding"})
    rounds.check(config)
    trained = contrastive.load(folder, images.shape[1:], config.embedding)["fen"]
    trained["Conv_5"] = jax.tree.map(lambda x: 7 * x, trained["Conv_5"])  # as long training does
    with monkeypatch.context() as patch:
        patch.setattr(contrastive, "load", lambda *arguments: {"fen": trained})
        fen = rounds.initial_fen(config, dataset, tmp_path)
    first, last = ({k: v for k, v in tree.items() if k != "Conv_5"} for tree in (fen, trained))
    tiny.assert_same(first, last)
    sample = dataset.train.images / np.float32(255)
    module = FEN(config.network.channels)
    of_random, of_trained, scaled = (
        np.asarray(module.apply({"params": params}, sample))
        for params in (module.init(jax.random.key(0), sample[:1])["params"], trained, fen)
    )
    factor = 2.0 ** np.round(np.log2(np.mean(of_random**2) / np.mean(of_trained**2)) / 2)
    assert factor <= 1 / 4
    np.testing.assert_allclose(scaled, factor * of_trained, rtol=1e-5, atol=1e-6)
    trained = fen
    model = make_model(config, dataset, clusters)
    assert model.fingerprint != random_model.fingerprint
    random = fresh_state(config, model)
    for _ in range(2):  # a training that took the first one's memory leaves the parameters whole
        state = stages._initial_state(config, model, fen)
        tiny.assert_same(state.params["fen"], trained)
        tiny.assert_same(state.params["cln"], random.params["cln"])
        tiny.assert_same(state.opt_state, random.opt_state)
        jax.tree.map(lambda x: x.delete(), state.params["fen"])
    with pytest.raises(AssertionError):
        tiny.assert_same(random.params["fen"], trained)
    few = dataclasses.replace(
        dataset.train, images=images, labels=np.arange(20) % 4, ids=dataset.train.ids[:20]
    )
    small = dataclasses.replace(dataset, train=few)
    oracle = override(config, {"tasks.labels": "true", "clustering.rounds": 1})
    rounds.check(oracle)
    lines = []
    assert rounds.embed(oracle, small, tmp_path / "oracle", lines.append) is None
    assert lines[-1].startswith("embed: contrastive, 20 x 4")
    own = rounds.initial_fen(oracle, small, tmp_path / "oracle")
    assert jax.tree.structure(own) == jax.tree.structure(fen)
    classes = pseudo_labels.cluster(oracle, small, None, tmp_path / "oracle", quiet)
    assert classes.info["kept"] == 4
    longer = override(oracle, {"embedding.steps": 2})
    one, two = (make_model(each, small, classes).fingerprint for each in (oracle, longer))
    assert one != two  # another FEN to start from
    oracle = override(oracle, {"train.init": "random"})
    assert rounds.embed(oracle, small, tmp_path / "none", lines.append) is None
    assert lines[-1] == "embed: not needed, tasks.labels='true'"
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="any more; delete embeddings.npz"):
        rounds.initial_fen(config, dataset, tmp_path)


@pytest.mark.slow
def test_the_same_command_reuses_every_round(done, tmp_path):
    workdir = shutil.copytree(done[0], tmp_path / "run")
    before = programs.times(workdir)
    code, lines, err = run(workdir, "--stage=train")
    assert code == 0, err
    for start, count in (("embed: reuses ", 2), ("cluster: reuses ", 2), ("train: reuses 20 ", 2)):
        assert sum(line.startswith(start) for line in lines) == count, start
    after = programs.times(workdir)
    changed = {p.name for p in after if after[p] != before[p]}
    assert changed == {"config.json", ".lock"}


@pytest.mark.slow
def test_what_a_later_round_lost_is_made_again(done, tmp_path):
    workdir = shutil.copytree(done[0], tmp_path / "run")
    kept = {name: (workdir / name).read_bytes() for name in ("embeddings.npz", "tasks.npz")}
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "embeddings.npz").unlink()
    code, lines, err = run(workdir, "--stage=train")
    assert code == 0, err
    assert (workdir / "embeddings.npz").read_bytes() == kept["embeddings.npz"]
    assert (workdir / "tasks.npz").read_bytes() == kept["tasks.npz"]
    config, dataset = loaded(workdir)
    z = rounds.embed(config, dataset, workdir, quiet)
    model = make_model(config, dataset, pseudo_labels.cluster(config, dataset, z, workdir, quiet))
    tiny.assert_same(
        restore_params(config, model, workdir)[0], restore_params(config, model, done[0])[0]
    )


@pytest.mark.slow
def test_other_settings_need_another_workdir(done):
    for changes in ({"clustering__rounds": 3}, {"outer__lr": 0.5}):
        name, value = next(iter(changes.items()))
        code, _, err = run(done[0], "--stage=train", **changes)
        assert code == 2 and f"{name.replace('__', '.')} is " in err and f"{value!r} now" in err
