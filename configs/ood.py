"""Out-of-distribution tasks: train on one data set, meta-test on another (supplement).

    python experiments/run.py --config=configs/ood.py:mini_imagenet_cifar100
    --config.data.dir=MINI_IMAGENET --config.test_data.dir=CIFAR100 --workdir=runs/ood_cifar100

    python experiments/run.py --config=configs/ood.py:omniglot_cub
    --config.data.dir=OMNIGLOT --config.test_data.dir=CUB --workdir=runs/ood_cub

All classes of the second set are tested, in the size and the channels of the first: CIFAR-100
(32x32) is enlarged to 84x84 in colour, CUB (photographs of any size) becomes 28x28 in grey (ITU-R
601 luma), bright parts 255, while Omniglot has ink 255 on 0; the centre square is cut out and
resized with Pillow's Lanczos filter. The learning rate is chosen on the first set's validation
classes. Of CIFAR-100 the first 100 images of each class are read, which are its test images.
CIFAR100 and CUB may hold the official archives, class folders or zips; without `test_data.dir` they
are fetched. A workdir trained on the first set can be tested on several: training does not depend
on `test_data`. Presets, behind a colon, separated by commas: one of the two pairs
(mini_imagenet_cifar100 is the default), then `released` (docs/deviations.md) or `smoke` (the whole
pipeline, small network, clusters of PCA). Time: as configs/mini_imagenet.py and
configs/omniglot.py; `smoke` takes minutes on 2 CPU cores. Expected accuracy of `smoke`:
docs/results.md; of the paper: meml_jax/paper.py.
"""

from typing import Any

from meml_jax.settings import preset_config

SMOKE = {
    "network.channels": 32,
    "network.hidden": 128,
    "embedding.name": "pca",
    "embedding.dim": 32,
    "embedding.normalize": False,
    "clustering.num_clusters": 64,
    "clustering.max_iter": 10,
    "tasks.max_size": 30,
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

COMMON = {"test.heads": ("sgd", "sgd_reservoir", "prototype")}

MINI_IMAGENET_CIFAR100: dict[str, Any] = {  # trained as in configs/mini_imagenet.py
    "data.name": "mini_imagenet",
    "data.image_size": 84,
    "data.channels": 3,
    "test_data.name": "cifar100",
    "test_data.max_per_class": 100,
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

OMNIGLOT_CUB: dict[str, Any] = {  # trained as in configs/omniglot.py
    "data.name": "omniglot",
    "data.image_size": 28,
    "data.channels": 1,
    "test_data.name": "cub",
    "test_data.max_per_class": None,
    "embedding.name": "contrastive",  # the paper: ACAI
    "embedding.channels": 64,
    "embedding.normalize": True,
    "clustering.num_clusters": 1100,
    "tasks.min_used": None,
    "tasks.max_size": None,
    "train.steps": 40_000,
    "train.validate_every": 2_000,
    "test.num_classes": (2, 10, 20, 30, 40),
}

PAIRS = {"mini_imagenet_cifar100": MINI_IMAGENET_CIFAR100, "omniglot_cub": OMNIGLOT_CUB}


def get_config(presets: str = "mini_imagenet_cifar100"):
    """Return the locked settings for presets such as `omniglot_cub,smoke`."""
    named = PAIRS.keys() & {name.strip() for name in presets.split(",")}
    pair = {} if named else MINI_IMAGENET_CIFAR100
    return preset_config(presets, PAIRS | {"smoke": SMOKE}, COMMON | pair)
