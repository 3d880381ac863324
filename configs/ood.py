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
(mini_imagenet_cifar100 is the default), then `contrastive` (for omniglot_cub, in place of ACAI),
`released` (docs/deviations.md) or `smoke` (the whole pipeline, small network, clusters of PCA).
Time: as configs/mini_imagenet.py and configs/omniglot.py; `smoke` takes minutes on 2 CPU cores,
and learns as good as nothing. The paper's accuracies: meml_jax/paper.py.
"""

from typing import Any

from meml_jax.presets import ALL_HEADS, CONTRASTIVE, MINI_IMAGENET, OMNIGLOT, SMOKE_PCA
from meml_jax.settings import preset_config

SMALL = SMOKE_PCA | {"embedding.whiten": 0.0, "tasks.max_size": 30}

MINI_IMAGENET_CIFAR100: dict[str, Any] = MINI_IMAGENET | {
    "test_data.name": "cifar100",
    "test_data.max_per_class": 100,
}

OMNIGLOT_CUB: dict[str, Any] = OMNIGLOT | {
    "data.image_size": 28,
    "data.channels": 1,
    "test_data.name": "cub",
    "test_data.max_per_class": None,
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
    return preset_config(
        presets, PAIRS | {"contrastive": CONTRASTIVE, "smoke": SMALL}, ALL_HEADS | pair
    )
