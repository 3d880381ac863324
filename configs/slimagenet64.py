"""SlimageNet64, unlabelled: the supplement's table, 5 to 50 classes.

    python experiments/run.py --config=configs/slimagenet64.py --config.data.dir=DIR
    --workdir=runs/slimagenet64

DIR holds 1000 class folders of 200 images of 64x64 (or a zip of them), or `train/`, `test/` and
perhaps `val/` with class folders. Without such folders 200 classes, drawn by `data.split_seed`, are
for the meta-test, and 80 of the other 800 are held out to choose the learning rate. Presets, behind
a colon, separated by commas: `paper` (default), `clusters800`, `clusters1600` (default), `released`
(docs/deviations.md), `smoke` (the whole pipeline, small network, 20 clusters of PCA). Time:
DeepCluster and 200,000 steps of the full network need an accelerator; `smoke` takes minutes on 2
CPU cores. The paper's accuracies: meml_jax/paper.py. We have not had the images: no run of ours has
been measured, a generated tree of this shape passes through `smoke` in docs/smoke.md.
"""

from typing import Any

from meml_jax.presets import ALL_HEADS, SMOKE_PCA
from meml_jax.settings import preset_config

VALUES = {
    "data.name": "slimagenet64",
    "data.image_size": 64,
    "data.channels": 3,
    "embedding.name": "deepcluster",
    "embedding.dim": 256,
    "embedding.views": "photo",
    "embedding.num_pseudo_labels": 1600,
    "embedding.steps": 56_000,
    "embedding.round_steps": 560,
    "embedding.checkpoint_every": 1_000,
    "clustering.num_clusters": 1600,
    "tasks.min_used": 10,
    "tasks.max_size": 30,
    "train.steps": 200_000,
    "train.validate_every": 5_000,
    "test.num_classes": (5, 10, 20, 30, 40, 50),
} | ALL_HEADS

SMALL = SMOKE_PCA | {
    "clustering.num_clusters": 20,
    "test.num_classes": (2, 5),
}

PRESETS: dict[str, dict[str, Any]] = {
    **{f"clusters{n}": {"clustering.num_clusters": n} for n in (800, 1600)},
    "smoke": SMALL,
}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `clusters800,smoke`."""
    return preset_config(presets, PRESETS, VALUES)
