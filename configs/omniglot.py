"""Omniglot, unlabelled: the paper's main experiment (Table 1).

    python experiments/run.py --config=configs/omniglot.py --config.data.dir=DIR
    --workdir=runs/omniglot

DIR holds `images_background.zip` and `images_evaluation.zip`, or the folders in them. Presets,
behind a colon (`configs/omniglot.py:released`), separated by commas: `paper` (default; clusters of
a contrastive embedding in place of the paper's ACAI), `acai` (the paper's embedding, hours of
training), `released` (what the paper's code does, docs/deviations.md), `best` (beyond the paper:
full-width embedding, half whitened, k-means from Ward's clusters, no ReLU in the CLN), `smoke` (the
whole pipeline in a few minutes, small network). The paper's rows are presets too: `oml`,
`oml_single`, `meml_mean`; `oracle`; `balanced500`, `balanced1100`, `balancing`, `augmentation`
(Table 1 has these with `oml`, as in `:oml,balanced500`); `coreset200`, `coreset500`, `coreset1000`
(rehearsal at meta-train). Time and expected accuracy: docs/results.md.
"""

from typing import Any

from meml_jax.presets import ALL_HEADS, OMNIGLOT, SMOKE
from meml_jax.settings import preset_config

VALUES = OMNIGLOT | ALL_HEADS

BEST = {
    "preset": "best",
    "embedding.channels": 256,
    "embedding.whiten": 0.5,
    "clustering.init": "ward",
    "network.cln_relu": False,
    "outer.lr": 3e-4,
}

ACAI = {
    # Sized for 2 CPU cores; its authors: 64 channels, 262,144 steps at a constant 1e-4.
    "embedding.name": "acai",
    "embedding.dim": 256,
    "embedding.width": 16,
    "embedding.batch_size": 64,
    "embedding.steps": 20_000,
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
}

SMALL = SMOKE | {
    "embedding.name": "pca",
    "clustering.num_clusters": 200,
    "clustering.max_iter": 10,
    "test.num_classes": (10, 50),
    "test.runs": 3,
    "test.trajectories": 1,
}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `released,smoke`."""
    return preset_config(presets, {"acai": ACAI, "best": BEST, "smoke": SMALL} | ROWS, VALUES)
