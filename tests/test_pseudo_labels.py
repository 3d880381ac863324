"""The stages embed and cluster: what they say, and what an earlier version has left."""

import functools
import json

import numpy as np

from meml_jax import clustering, embeddings, pseudo_labels
from meml_jax.config import Config
from meml_jax.settings import override
from meml_jax.types import Dataset, Split


def dataset(labels):
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 6, 6, 1)).astype(np.uint8)
    ids = np.array([f"i{i}" for i in range(len(labels))])
    part = Split(images, np.asarray(labels, np.int32), ids, ("a", "b", "c"))
    return Dataset("mine", part, part, part, "hash")


def test_what_a_trained_embedding_says_outside_git(tmp_path, monkeypatch):
    def fit(images, key, config, *, checkpoint_dir, report):
        made = {"loss": 0.123456, "seconds": 2, "commit": None, "device": "cpu"}
        return (lambda x: x.reshape(len(x), -1).astype(np.float32)), made

    monkeypatch.setitem(embeddings.EMBEDDINGS, "pca", embeddings.Embedding(fit))
    data, lines = dataset(np.arange(12) % 3), []
    pseudo_labels.embed(Config(), data, tmp_path, lines.append)
    assert lines == ["embed: pca, 12 x 36, loss 0.1235, seconds 2"]
    stored = json.loads((tmp_path / "embedding.json").read_text())
    assert stored["commit"] is None and stored["content_hash"] == "hash"


def test_truncated_clusters_of_an_earlier_version_are_judged_by_what_is_kept(tmp_path):
    sizes = [6, 6, 2, 1]
    data = dataset(np.repeat([0, 1, 2, 0], sizes))
    z = np.repeat([0.0, 9.0, 9.0, 0.0], sizes)[:, None].astype(np.float32)
    truncate = {"tasks.balance": "truncate", "tasks.balance_size": 3}
    config = override(Config(), {"clustering.num_clusters": 2} | truncate)
    cluster = functools.partial(pseudo_labels.cluster, config, data, z, tmp_path, print)
    made, true = cluster(), data.train.labels
    kept = made.table.index
    assert made.info["purity"] == clustering.agreement(true[kept], made.labels[kept])["purity"]
    with np.load(tmp_path / "tasks.npz") as stored:
        arrays = dict(stored)
    before = json.loads(str(arrays["info"])) | clustering.agreement(true, made.labels)
    np.savez(tmp_path / "tasks.npz", **arrays | {"info": json.dumps(before)})
    again = cluster()
    assert again.info == made.info != before
    assert again.fingerprint == made.fingerprint  # a training on them goes on
