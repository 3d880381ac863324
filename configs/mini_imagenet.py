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
network at 84x84 need an accelerator; `smoke` takes minutes on 2 CPU cores, and
learns as good as nothing. The paper's accuracies: meml_jax/paper.py. A full run of ours has not
been measured yet.
"""

from typing import Any

from meml_jax.presets import ALL_HEADS, MINI_IMAGENET, SMOKE_PCA
from meml_jax.settings import preset_config

VALUES = MINI_IMAGENET | ALL_HEADS

SELA = {  # table "SeLa" of the supplement, with clusters64 and clusters256
    "embedding.name": "sela",
    "embedding.num_pseudo_labels": 256,
}

PRESETS: dict[str, dict[str, Any]] = {
    **{f"clusters{n}": {"clustering.num_clusters": n} for n in (64, 128, 256, 512)},
    "sela": SELA,
    "smoke": SMOKE_PCA,
}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `clusters512,smoke`."""
    return preset_config(presets, PRESETS, VALUES)
