"""Mini-ImageNet, unlabelled: Table 2 of the paper, 2 to 10 classes.

    python experiments/run.py --config=configs/mini_imagenet.py --config.data.dir=DIR
    --workdir=runs/mini_imagenet

DIR holds `train`, `val` and `test` as folders or zips of class folders, or `images/` with
`train.csv`, `val.csv`, `test.csv`, or `mini-imagenet-cache-{train,val,test}.pkl`; 64/16/20 classes
of 600 images, 84x84 in colour. There is no download: the images are ImageNet's. From each cluster
10 to 30 images are used in a task, in proportion to its size. Presets, behind a colon, separated by
commas: `paper` (default), `clusters64`, `clusters128`, `clusters256` (default), `clusters512`,
`sela` (its embedding in place of DeepCluster's), `released` (docs/deviations.md), `smoke` (the
whole pipeline, small network, clusters of PCA). Time: DeepCluster and 200,000 steps of the full
network at 84x84 need an accelerator; `smoke` takes minutes on 2 CPU cores. Expected accuracy of
`smoke`: docs/results.md; of the paper: meml_jax/paper.py. A full run of ours has not been measured
yet.
"""

from typing import Any

from meml_jax.settings import preset_config

VALUES = {
    "data.name": "mini_imagenet",
    "data.image_size": 84,
    "data.channels": 3,
    "embedding.name": "deepcluster",
    "embedding.dim": 256,
    "embedding.views": "photo",
    "embedding.num_pseudo_labels": 512,
    "embedding.steps": 30_000,
    "embedding.round_steps": 300,
    "embedding.checkpoint_every": 1_000,
    "clustering.num_clusters": 256,
    "tasks.min_used": 10,
    "tasks.max_size": 30,
    "train.steps": 200_000,
    "train.validate_every": 5_000,
    "test.num_classes": (2, 4, 6, 8, 10),
    "test.heads": ("sgd", "sgd_reservoir", "prototype"),
}

SMOKE = {
    "network.channels": 32,
    "network.hidden": 128,
    "embedding.name": "pca",
    "embedding.dim": 32,
    "clustering.num_clusters": 64,
    "clustering.max_iter": 10,
    "tasks.num_buckets": 2,
    "outer.lr": 3e-4,
    "train.steps": 200,
    "train.log_every": 100,
    "train.checkpoint_every": 100,
    "train.validate_every": 100,
    "test.num_classes": (2, 10),
    "test.runs": 10,
    "test.trajectories": 2,
    "test.learning_rates": (0.01, 0.001, 0.0001),
    "test.heads": ("sgd", "prototype"),
}

SELA = {  # table "SeLa" of the supplement, with clusters64 and clusters256
    "embedding.name": "sela",
    "embedding.num_pseudo_labels": 256,
}

PRESETS: dict[str, dict[str, Any]] = {
    **{f"clusters{n}": {"clustering.num_clusters": n} for n in (64, 128, 256, 512)},
    "sela": SELA,
    "smoke": SMOKE,
}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `clusters512,smoke`."""
    return preset_config(presets, PRESETS, VALUES)
