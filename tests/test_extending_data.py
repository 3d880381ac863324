"""The code of docs/extending_data.md does what the page says."""

import importlib.util
import re

import numpy as np
import programs

from meml_jax import embeddings, pseudo_labels
from meml_jax.data import datasets
from meml_jax.settings import from_dict

PAGE = (programs.ROOT / "docs" / "extending_data.md").read_text()
(FILE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_data_set_and_the_embedding_of_the_page(tmp_path, monkeypatch):
    assert len(FILE.strip().splitlines()) < 50
    monkeypatch.setattr(datasets, "REGISTRY", dict(datasets.REGISTRY))
    monkeypatch.setattr(embeddings, "EMBEDDINGS", dict(embeddings.EMBEDDINGS))
    path = tmp_path / "squares.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("squares", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    config, lines = from_dict(module.get_config().to_dict()), []
    dataset = datasets.load(config.data, report=lines.append)
    assert "squares: train 15 classes 360 images, validation 2/48, test 8/192, 28x28x1" in lines[0]
    z = pseudo_labels.embed(config, dataset, tmp_path, lines.append)
    assert z.shape == (360, 49)
    np.testing.assert_allclose(z[0, 0], dataset.train.images[0, :4, :4].mean() / 255, rtol=1e-5)
    clusters = pseudo_labels.cluster(config, dataset, z, tmp_path, lines.append)
    assert clusters.info["actual"] == 20 and clusters.info["purity"] > 0.95
