"""Supplement: out-of-distribution tasks. `--data_root=DIR` finds the folders of the four sets.

The oracles that are trained on CIFAR-100 or CUB are tested on classes of theirs that were held out
(30 %), the other rows on all classes. The oracle on CUB sees the images as the rows beside it do,
28x28 in grey; the paper does not say.
"""

from meml_jax.tables import Row, Table

CIFAR100, CUB = "CIFAR-100", "CUB"
ORACLE = {"tasks.labels": "true"}


def _own(name: str) -> dict[str, object]:
    """Train an oracle on the set whose held-out classes are tested."""
    return ORACLE | {"learner": "oml", "data.name": name, "test_data.name": None}


TABLE = Table(
    title="Supplement: out-of-distribution tasks",
    config="configs/ood.py",
    rows={
        "oracle_oml_cifar100": Row(
            {"sgd": "Oracle OML"}, "mini_imagenet_cifar100", _own("cifar100"), part=CIFAR100
        ),
        "oracle_meml_mini_imagenet": Row(
            {"sgd": "Oracle MEML"}, "mini_imagenet_cifar100", ORACLE, part=CIFAR100
        ),
        "meml_mini_imagenet": Row({"sgd": "MEML"}, "mini_imagenet_cifar100", part=CIFAR100),
        "oracle_oml_cub": Row({"sgd": "Oracle OML"}, "omniglot_cub", _own("cub"), part=CUB),
        "oracle_meml_omniglot": Row({"sgd": "Oracle MEML"}, "omniglot_cub", ORACLE, part=CUB),
        "meml_omniglot": Row({"sgd": "MEML"}, "omniglot_cub", part=CUB),
    },
    smoke={"test.num_classes": (2, 10)},
)
