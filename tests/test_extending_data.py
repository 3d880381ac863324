"""The code of docs/extending_data.md does what the page says."""

import dataclasses
import importlib.util
import re

import numpy as np
import programs
import pytest

from meml_jax import embeddings, pseudo_labels
from meml_jax.data import datasets
from meml_jax.results import product_versions
from meml_jax.settings import from_dict

PAGE = (programs.ROOT / "docs" / "extending_data.md").read_text()
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def registries(monkeypatch):
    """Leave what is registered as it is."""
    monkeypatch.setattr(datasets, "REGISTRY", dict(datasets.REGISTRY))
    monkeypatch.setattr(embeddings, "EMBEDDINGS", dict(embeddings.EMBEDDINGS))


def imported(path, text):
    """Write a config file and import it."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_data_set_and_the_embedding_of_the_page(tmp_path, registries):
    assert len(FILE.strip().splitlines()) < 50
    module = imported(tmp_path / "squares.py", FILE)
    config, lines = from_dict(module.get_config().to_dict()), []
    dataset = datasets.load(config.data, report=lines.append)
    assert "squares: train 15 classes 360 images, validation 2/48, test 8/192, 28x28x1" in lines[0]
    z = pseudo_labels.embed(config, dataset, tmp_path, lines.append)
    assert z.shape == (360, 49)
    np.testing.assert_allclose(z[0, 0], dataset.train.images[0, :4, :4].mean() / 255, rtol=1e-5)
    clusters = pseudo_labels.cluster(config, dataset, z, tmp_path, lines.append)
    assert clusters.info["actual"] == 20 and clusters.info["purity"] > 0.95


def test_vectors_belong_to_the_fit_that_made_them(tmp_path, registries):
    """An edited `fit` of one's own is run again; the vectors of the same one are reused."""
    edited = FILE.replace("/ 255).astype", "/ 127.5).astype")
    assert edited != FILE
    module = imported(tmp_path / "squares.py", FILE)
    config = from_dict(module.get_config().to_dict())
    dataset = datasets.load(config.data, report=lambda line: None)
    found, said = [], []
    for text in (FILE, FILE, edited):
        datasets.REGISTRY.pop("squares")
        imported(tmp_path / "squares.py", text)
        found.append(pseudo_labels.embed(config, dataset, tmp_path / "run", said.append))
    kinds = ["cells" in line or "anew" in line for line in said]
    assert kinds == [True, False, True, True], said
    assert said[1] == f"embed: reuses {tmp_path / 'run' / 'embeddings.npz'}"
    np.testing.assert_allclose(found[2], found[0] * 2, rtol=1e-5)
    made = product_versions(config)
    datasets.REGISTRY.pop("squares")
    imported(tmp_path / "squares.py", FILE)
    assert product_versions(config) != made  # so results of the other one are not finished
    row = embeddings.EMBEDDINGS["cells"]
    before = embeddings.version(config.embedding)
    embeddings.EMBEDDINGS["cells"] = dataclasses.replace(row, version=2)
    assert embeddings.version(config.embedding) != before
