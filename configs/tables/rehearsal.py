"""Supplement: rehearsal at meta-test only, or at meta-train too.

The paper reports a coreset of 500 images and names 200 and 1000; `--rows` leaves them out.
"""

from meml_jax.tables import Row, Table


def _both(title: str, presets: str, size: int) -> Row:
    name = f"{title} RS both" + f" {size}" * (size != 500)
    lines = {"sgd": f"{title} RS at meta-train {size}", "sgd_reservoir": name}
    return Row(lines, presets + f"coreset{size}", beside=title.lower())


TABLE = Table(
    title="Supplement: rehearsal at meta-train",
    config="configs/omniglot.py",
    rows={
        "oml": Row({"sgd": "OML", "sgd_reservoir": "OML RS"}, "oml"),
        **{f"oml_coreset{n}": _both("OML", "oml,", n) for n in (200, 500, 1000)},
        "meml": Row({"sgd": "MEML", "sgd_reservoir": "MEML RS"}),
        **{f"meml_coreset{n}": _both("MEML", "", n) for n in (200, 500, 1000)},
    },
    smoke={"test.num_classes": (10, 50)},
)
