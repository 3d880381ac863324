"""Supplement: FiLM layers on the supervised OML, trained on Omniglot, tested on CIFAR-100.

`--data_root=DIR` finds the folders of both sets. CIFAR-100 becomes 28x28 in grey. The trainings are
those of the table film_omniglot, and are taken from there where they are.
"""

from meml_jax.tables import Row, Table

CIFAR100 = {
    "test_data.name": "cifar100",
    "test_data.max_per_class": 100,
    "test.num_classes": (2, 4, 6, 8, 10),
}

TABLE = Table(
    title="Supplement: FiLM layers, Omniglot to CIFAR-100",
    config="configs/omniglot.py",
    rows={
        "oracle_oml": Row({"sgd": "Oracle OML Omniglot"}, "oml,oracle", CIFAR100),
        "oracle_oml_film": Row(
            {"sgd": "Oracle OML FiLM Omniglot"},
            "oracle",
            CIFAR100 | {"learner": "oml_film"},
            beside="oracle_oml",
        ),
    },
)
