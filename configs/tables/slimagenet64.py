"""Supplement: SlimageNet64.

The paper does not say how many clusters its row OML has; here 800, the true number of classes.
"""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Supplement: SlimageNet64",
    config="configs/slimagenet64.py",
    rows={
        "oracle_oml": Row({"sgd": "Oracle OML"}, values={"learner": "oml", "tasks.labels": "true"}),
        "oracle_meml": Row({"sgd": "Oracle MEML"}, values={"tasks.labels": "true"}),
        "oml": Row({"sgd": "OML"}, "clusters800", {"learner": "oml"}),
        "meml_800": Row({"sgd": "MEML 800"}, "clusters800"),
        "meml_1600": Row({"sgd": "MEML 1600"}, "clusters1600"),
    },
    smoke={"tasks.max_size": 30, "test.num_classes": (5, 10)},
)
