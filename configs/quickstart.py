"""The whole method on generated handwriting: no download, 2 to 3 minutes on 2 CPU cores.

    python experiments/run.py --config=configs/quickstart.py --workdir=runs/quickstart

A small network (32 channels) on 400 generated characters: contrastive embedding (purity 0.32 of the
clusters), then meta-training from the embedding's FEN. Expected accuracy in % at 5, 10, 20 and 50
new classes:

    prototype head         91  83  74  59
    sgd head               67  44  31  17
    raw pixels (baseline)  86  74  64  53

So short a training leaves the sgd head below the baseline.
"""

from meml_jax.settings import preset_config

VALUES = {
    "data.name": "glyphs",
    "data.num_classes": 400,
    "embedding.name": "contrastive",
    "embedding.normalize": True,
    "embedding.channels": 32,
    "embedding.steps": 300,
    "embedding.batch_size": 128,
    "embedding.learning_rate": 3e-3,
    "clustering.num_clusters": 270,
    "network.channels": 32,
    "network.hidden": 256,
    "network.cln_relu": False,
    "tasks.num_buckets": 2,  # each is compiled
    "outer.lr": 1e-3,
    "outer.fen_lr": 3e-4,  # it is trained already
    "train.init": "embedding",
    "train.steps": 1500,
    "train.steps_per_call": 100,
    "train.checkpoint_every": 500,
    "train.validate_every": 500,
    "test.num_classes": (5, 10, 20, 50),
    "test.runs": 20,
    "test.learning_rates": (0.003, 0.001, 0.0003),
    "test.trajectories": 3,
}

SMOKE = {
    "embedding.name": "pca",
    "train.init": "random",
    "outer.fen_lr": None,
    "data.num_classes": 60,
    "clustering.num_clusters": 40,
    "tasks.num_buckets": 2,
    "network.channels": 8,
    "network.hidden": 32,
    "train.steps": 40,
    "train.steps_per_call": 10,
    "train.log_every": 20,
    "train.checkpoint_every": 20,
    "train.validate_every": 20,
    "test.num_classes": (5, 10),
    "test.runs": 3,
    "test.trajectories": 1,
    "test.learning_rates": (0.01, 0.001),
}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `released,smoke`."""
    return preset_config(presets, {"smoke": SMOKE}, VALUES)
