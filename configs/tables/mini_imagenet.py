"""Table 2: Mini-ImageNet, by the number of clusters.

The paper does not say how many clusters its row OML has; here 64, the true number of classes.
"""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Table 2: Mini-ImageNet",
    config="configs/mini_imagenet.py",
    rows={
        "oracle_oml": Row(
            {"sgd": "Oracle OML"}, values={"learner": "oml", "tasks.labels": "true"}, beside="oml"
        ),
        "oracle_meml": Row(
            {"sgd": "Oracle MEML"}, values={"tasks.labels": "true"}, beside="meml_64"
        ),
        "oml": Row({"sgd": "OML"}, "clusters64", {"learner": "oml"}, beside="meml_64"),
        "meml_64": Row({"sgd": "MEML 64", "sgd_reservoir": "MEML 64 RS"}, "clusters64"),
        "meml_128": Row({"sgd": "MEML 128"}, "clusters128", beside="meml_64"),
        "meml_256": Row({"sgd": "MEML 256"}, "clusters256", beside="meml_64"),
        "meml_512": Row({"sgd": "MEML 512"}, "clusters512", beside="meml_64"),
    },
    smoke={"test.num_classes": (2, 10)},
)
