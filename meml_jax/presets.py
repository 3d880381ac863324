"""Settings that several files in configs/ have in common, by dotted field."""

from typing import Any

ALL_HEADS: dict[str, Any] = {"test.heads": ("sgd", "sgd_reservoir", "prototype")}

ACAI: dict[str, Any] = {  # the paper's embedding of Omniglot, as long as 2 CPU cores allow
    "embedding.name": "acai",
    "embedding.dim": 256,
    "embedding.batch_size": 64,
    "embedding.steps": 4_000,
    "embedding.whiten": 0.5,  # with the length, what agrees best with validation classes
    "embedding.normalize": True,
}

CONTRASTIVE: dict[str, Any] = {  # beyond the paper; sets all that `ACAI` sets, which it replaces
    "embedding.name": "contrastive",
    "embedding.channels": 64,
    "embedding.dim": 64,
    "embedding.batch_size": 256,
    "embedding.steps": 2_000,
    "embedding.whiten": 0.0,
    "embedding.normalize": True,
}

PLAIN: dict[str, Any] = {"embedding.whiten": 0.0, "embedding.normalize": False}
PSEUDO_LABELS = PLAIN | {  # their codes are whitened and of length 1 already
    "embedding.channels": 64,
    "embedding.dim": 64,  # of 256 features: whitening all of them makes as much of the least
    "embedding.batch_size": 256,
    "embedding.round_steps": 300,  # a new head needs them to learn 1100 labels
    "embedding.steps": 10_000,
}
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "pixels": PLAIN | {"embedding.name": "pixels"},
    "pca": PLAIN | {"embedding.name": "pca", "embedding.dim": 64},
    "pca_whitened": PLAIN | {"embedding.name": "pca", "embedding.dim": 64, "embedding.whiten": 1.0},
    "random": PLAIN | {"embedding.name": "random", "embedding.channels": 64},
    "acai": ACAI | PLAIN,
    "acai_half_whitened": ACAI,
    "acai_whitened": ACAI | {"embedding.whiten": 1.0, "embedding.normalize": False},
    "acai_whitened_normalized": ACAI | {"embedding.whiten": 1.0},
    "acai_ward": ACAI | {"clustering.init": "ward"},
    "deepcluster": PSEUDO_LABELS | {"embedding.name": "deepcluster"},
    "sela": PSEUDO_LABELS | {"embedding.name": "sela"},
    "contrastive": CONTRASTIVE,
    "contrastive_half_whitened": CONTRASTIVE | {"embedding.whiten": 0.5},
    "contrastive_ward": CONTRASTIVE | {"embedding.whiten": 0.5, "clustering.init": "ward"},
}
"""What a row of the table of `experiments/embeddings.py` sets, by its name."""

OMNIGLOT: dict[str, Any] = ACAI | {
    "data.name": "omniglot",
    "clustering.num_clusters": 1100,
}

MINI_IMAGENET: dict[str, Any] = {
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
}

SMOKE: dict[str, Any] = {  # the whole pipeline in a few minutes, small network
    "network.channels": 32,
    "network.hidden": 128,
    "tasks.num_buckets": 2,  # each is compiled
    "train.steps": 200,
    "train.log_every": 100,
    "train.checkpoint_every": 100,
    "train.validate_every": 100,
    "test.learning_rates": (0.01, 0.001),
    "test.heads": ("sgd", "prototype"),
}

SMOKE_PHOTOGRAPHS: dict[str, Any] = SMOKE | {
    "outer.lr": 3e-4,
    "test.runs": 10,
    "test.trajectories": 2,
}

SMOKE_PCA: dict[str, Any] = SMOKE_PHOTOGRAPHS | {  # no embedding to train
    "embedding.name": "pca",
    "embedding.dim": 32,
    "clustering.num_clusters": 64,
    "clustering.max_iter": 10,
    "test.num_classes": (2, 10),
    "test.learning_rates": (0.01, 0.001, 0.0001),
}
