"""Your own images: class folders, a zip of them, or unlabelled images with a labelled `test/`.

    python experiments/run.py --config=configs/folder.py --config.data.dir=DIR --workdir=runs/mine

DIR/CLASS/*.png (also jpeg, bmp, webp; any size, grey or colour), or DIR/train, DIR/validation and
DIR/test with class folders in each; DIR/train may hold unlabelled images. Each test class needs
test.shots + test.queries images. Settings to look at: data.image_size (28, 64, 84), data.channels
(1, 3), clustering.num_clusters (about the number of classes you expect, or more) and
test.num_classes. Presets: `paper` (default), `released`, `smoke` (a few minutes, small network).
Time on 2 CPU cores at 28x28: about an hour for 40,000 steps; accuracy depends on the images.
"""

from meml_jax.config import preset_config

VALUES = {
    "data.name": "folder",
    "clustering.num_clusters": 100,
    "test.num_classes": (5, 10),
    "test.heads": ("sgd", "sgd_reservoir", "prototype"),
}

SMOKE = {
    "embedding.dim": 16,
    "clustering.num_clusters": 20,
    "network.channels": 32,
    "network.hidden": 128,
    "outer.lr": 1e-3,
    "train.steps": 200,
    "train.log_every": 100,
    "train.checkpoint_every": 100,
    "train.validate_every": 100,
    "test.num_classes": (2, 4),
    "test.runs": 3,
    "test.trajectories": 1,
    "test.learning_rates": (0.01, 0.001),
    "test.heads": ("sgd", "prototype"),
}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `released,smoke`."""
    return preset_config(presets, {"smoke": SMOKE}, VALUES)
