"""Supplement: Mini-ImageNet with SeLa's embedding.

The paper does not say how many clusters its row OML has; here 64, the true number of classes.
"""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Supplement: Mini-ImageNet, SeLa",
    config="configs/mini_imagenet.py",
    rows={
        "oml": Row({"sgd": "SeLa: OML"}, "sela,clusters64", {"learner": "oml"}, beside="meml_64"),
        "meml_64": Row({"sgd": "SeLa: MEML 64"}, "sela,clusters64"),
        "meml_256": Row({"sgd": "SeLa: MEML 256"}, "sela,clusters256", beside="meml_64"),
    },
    smoke={
        "embedding.name": "sela",
        "embedding.channels": 16,
        "embedding.batch_size": 64,
        "embedding.steps": 20,
        "embedding.round_steps": 10,
        "test.num_classes": (2, 10),
    },
)
