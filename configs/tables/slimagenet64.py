"""Supplement: SlimageNet64.

The paper does not say how many clusters its row OML has; here 800, the true number of classes.
"""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Supplement: SlimageNet64",
    config="configs/slimagenet64.py",
    rows={
        "oracle_oml": Row(
            {"sgd": "Oracle OML"}, values={"learner": "oml", "tasks.labels": "true"}, beside="oml"
        ),
        "oracle_meml": Row(
            {"sgd": "Oracle MEML"}, values={"tasks.labels": "true"}, beside="meml_800"
        ),
        "oml": Row({"sgd": "OML"}, "clusters800", {"learner": "oml"}, beside="meml_800"),
        "meml_800": Row({"sgd": "MEML 800"}, "clusters800"),
        "meml_1600": Row({"sgd": "MEML 1600"}, "clusters1600", beside="meml_800"),
    },
    smoke={"tasks.max_size": 30, "test.num_classes": (5, 10)},
)
