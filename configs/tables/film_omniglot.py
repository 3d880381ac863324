"""Supplement: FiLM layers on the supervised OML, Omniglot."""

from meml_jax.tables import Row, Table

TABLE = Table(
    title="Supplement: FiLM layers, Omniglot",
    config="configs/omniglot.py",
    rows={
        "oracle_oml": Row({"sgd": "Oracle OML"}, "oml,oracle"),
        "oracle_oml_film": Row(
            {"sgd": "Oracle OML FiLM"}, "oracle", {"learner": "oml_film"}, beside="oracle_oml"
        ),
    },
    smoke={"test.num_classes": (10, 50)},
)
