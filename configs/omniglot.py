"""Omniglot, unlabelled: the paper's main experiment (Table 1).

    python experiments/run.py --config=configs/omniglot.py --config.data.dir=DIR
    --workdir=runs/omniglot

DIR holds `images_background.zip` and `images_evaluation.zip`, or the folders in them. Presets,
behind a colon (`configs/omniglot.py:released`), separated by commas: `paper` (default; its ACAI
embedding takes an hour and a half on 2 CPU cores), `contrastive` (clusters of a contrastive
embedding in its place: half of that, and better ones), `released` (what the paper's code does,
docs/deviations.md), `best` (beyond the paper: contrastive embedding, three times as long, half
whitened, k-means from Ward's clusters, a network of 64 channels without ReLU in the CLN,
meta-trained from the embedding's FEN; `oml,best`: OML with these settings), `smoke` (the whole
pipeline in a few minutes, small network, PCA). The paper's rows are presets too: `oml`,
`oml_single`, `meml_mean`; `oracle`; `balanced500`, `balanced1100`, `balancing`, `augmentation`
(Table 1 has these with `oml`, as in `:oml,balanced500`); `coreset200`, `coreset500`, `coreset1000`
(rehearsal at meta-train). `rotations` is beyond the paper too: each cluster turned by 90, 180 and
270 degrees is three more. Time and expected accuracy: docs/results.md.
"""

from typing import Any

from meml_jax.presets import ALL_HEADS, CONTRASTIVE, OMNIGLOT, SMOKE
from meml_jax.settings import preset_config

VALUES = OMNIGLOT | ALL_HEADS

BEST = CONTRASTIVE | {
    "preset": "best",
    "embedding.steps": 6_000,
    "embedding.whiten": 0.5,
    "clustering.init": "ward",
    "network.channels": 64,  # those of the embedding, whose FEN is trained on
    "network.hidden": 256,
    "network.cln_relu": False,
    "inner.lr": 0.1,
    "outer.lr": 1e-3,
    "outer.fen_lr": 1e-4,
    "train.init": "embedding",
    "train.steps": 10_000,
}

ROWS: dict[str, dict[str, Any]] = {
    "oml": {"learner": "oml"},
    "oml_single": {"learner": "oml_single"},
    "meml_mean": {"learner": "meml_mean"},
    "oracle": {"tasks.labels": "true"},
    "balanced500": {"tasks.balance": "truncate", "clustering.num_clusters": 500},
    "balanced1100": {"tasks.balance": "truncate"},
    "balancing": {"tasks.balance": "loss"},
    "augmentation": {"tasks.balance": "augment"},
    # Supplement, Rehearsal at Meta-Train Time: "RS both train/test"; the head `sgd_reservoir` is
    # the rehearsal at meta-test.
    **{
        f"coreset{size}": {"tasks.query_from": "coreset", "tasks.coreset_size": size}
        for size in (200, 500, 1000)
    },
    "rotations": {"tasks.rotations": True},  # beyond the paper
}

SMALL = SMOKE | {
    "embedding.name": "pca",
    "train.init": "random",
    "outer.fen_lr": None,
    "embedding.dim": 64,
    "embedding.whiten": 0.0,
    "embedding.normalize": True,
    "clustering.num_clusters": 200,
    "clustering.max_iter": 10,
    "test.num_classes": (10, 50),
    "test.runs": 3,
    "test.trajectories": 1,
}


PRESETS = {"contrastive": CONTRASTIVE, "best": BEST, "smoke": SMALL}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `released,smoke`."""
    return preset_config(presets, PRESETS | ROWS, VALUES)
