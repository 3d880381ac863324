"""A user's folder through the whole program, then the same training tested on another folder."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
SETTINGS = (
    "--config=configs/folder.py:smoke",
    "--config.network.channels=4",
    "--config.network.hidden=8",
    "--config.embedding.dim=4",
    "--config.tasks.num_buckets=1",
    "--config.tasks.max_size=4",
    "--config.tasks.num_random_query=2",
    "--config.train.steps=4",
    "--config.test.shots=2",
    "--config.test.queries=1",
    "--config.test.runs=2",
    "--config.test.heads=('prototype',)",
)


def draw(root, *, classes, colour, side):
    rng = np.random.default_rng(side)
    for c in range(classes):
        for i in range(4):
            pixels = rng.integers(0, 255, (side, side, 3) if colour else (side, side), np.uint8)
            (root / f"c{c}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / f"c{c}" / f"{i}.png")


def run(tmp_path, *more):
    done = subprocess.run(
        [sys.executable, "experiments/run.py", *SETTINGS, f"--workdir={tmp_path / 'run'}",
         f"--config.data.dir={tmp_path / 'own'}", f"--config.data.cache_dir={tmp_path / 'cache'}",
         *more],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_one_training_is_tested_on_its_own_and_on_another_set(tmp_path):
    draw(tmp_path / "own", classes=8, colour=False, side=40)
    draw(tmp_path / "other", classes=6, colour=True, side=33)
    code, text = run(tmp_path)
    assert code == 0, text
    for line in (
        "folder: chose data.image_size=28, data.channels=1",
        "chose clustering.num_clusters=2 for 16 training images",
        "chose test.num_classes=(2,) for 2 test classes",
    ):
        assert line in text
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    own = json.loads((tmp_path / "run" / "results.json").read_text())
    assert own["config"] == stored and own["dataset"] == "folder" and own["test_hash"] is None
    assert (stored["data"]["image_size"], stored["data"]["channels"]) == (28, 1)
    assert stored["clustering"]["num_clusters"] == 2
    assert own["parts"]["train"] == {"classes": 4, "images": 16}

    code, text = run(
        tmp_path,
        "--config.test_data.name=folder",
        f"--config.test_data.dir={tmp_path / 'other'}",
        "--config.test.num_classes=(2,)",
    )
    assert code == 0, text
    assert "test on folder: all 6 classes, 24 images, brought to 28x28, grey by luma" in text
    assert "train: reuses 4 steps" in text and "train: compiles" not in text
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["dataset"] == "folder_folder" and results["parts"]["test"]["classes"] == 6
    assert results["content_hash"] == own["content_hash"] and len(results["test_hash"]) == 64
    assert results["meta_train"] == own["meta_train"]
    assert "folder_folder" in (tmp_path / "run" / "report.md").read_text()
