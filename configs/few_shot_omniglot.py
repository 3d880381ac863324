"""Few-shot classification on Omniglot in N-way K-shot episodes (Table 3 of the paper).

    python experiments/run.py --config=configs/few_shot_omniglot.py:meml
    --config.data.dir=DIR --workdir=runs/few_shot_meml

DIR as for configs/omniglot.py. Presets, behind a colon, separated by commas; one method: `maml`
(default: MAML, 5 inner steps), `fomaml`, `anil`, `meml` (one update on one meta-example a class);
true classes, or `cactus_balanced` and `cactus_unbalanced` (clusters of ACAI, or with `contrastive`
of a contrastive embedding); 20 ways and 1 shot, or `shots5`, `shots15`; `smoke` (the
whole pipeline in a few minutes, small network). The paper's rows are `maml`, `meml`, each with and
without `shots5`, and `maml,cactus_balanced,shots5` and so on. Evaluated on 5,1 5,5 20,1 and 20,5
(ways, shots), 600 episodes of 15 queries a class each.

The paper states neither network nor rates nor the number of steps of these experiments. Here:
64 channels, MAML's published inner rate for 20 ways. Time and accuracy: docs/results.md.
"""

from typing import Any

from meml_jax.presets import CONTRASTIVE, OMNIGLOT
from meml_jax.settings import preset_config

VALUES = OMNIGLOT | {
    "learner": "maml",
    "tasks.labels": "true",
    "episodes.ways": 20,
    "episodes.shots": 1,
    "episodes.queries": 5,
    "network.channels": 64,
    "network.hidden": 256,
    "network.cln_relu": False,
    "inner.lr": 0.1,
    "inner.steps": 5,
    "outer.lr": 1e-3,
    "outer.meta_batch": 4,
    "train.steps": 20_000,
    "test.queries": 15,
    "test.shots": 5,
}

METHODS: dict[str, dict[str, Any]] = {  # each sets the same fields, so that a later one wins whole
    "maml": {"learner": "maml", "inner.steps": 5},
    "fomaml": {"learner": "fomaml", "inner.steps": 5},
    "anil": {"learner": "anil", "inner.steps": 5},
    "meml": {"learner": "meml_few_shot", "inner.steps": 1},
}

CLUSTERS = {"tasks.labels": "clusters"}

PRESETS: dict[str, dict[str, Any]] = METHODS | {
    "shots5": {"episodes.shots": 5},
    "shots15": {"episodes.shots": 15},
    # 15 + 5 images of each cluster: those of a class in a supervised task.
    "cactus_balanced": CLUSTERS | {"tasks.balance": "truncate", "tasks.balance_size": 20},
    "cactus_unbalanced": CLUSTERS | {"episodes.balanced": False},
    "contrastive": CONTRASTIVE,
    "smoke": {
        "embedding.name": "pca",
        "embedding.dim": 64,
        "embedding.whiten": 0.0,
        "embedding.normalize": True,
        "network.channels": 16,
        "network.hidden": 64,
        "clustering.num_clusters": 200,
        "clustering.max_iter": 10,
        "outer.meta_batch": 1,
        "train.steps": 100,
        "train.log_every": 50,
        "train.checkpoint_every": 100,
        "train.validate_every": 100,
        "test.episodes": 20,
    },
}


def get_config(presets: str = "maml"):
    """Return the locked settings for presets such as `meml,shots5`."""
    return preset_config(presets, PRESETS, VALUES)
