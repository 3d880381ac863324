"""Table 3: few-shot Omniglot. CACTUs-MAML balanced or not; MEML beside MAML on true classes."""

from meml_jax.tables import Row, Table

CLUSTERS, CLASSES = "CACTUs-MAML, from clusters", "MAML and MEML, from true classes"


def _cactus(balance: str, shots: int) -> Row:
    title = f"CACTUs-MAML {balance} 20,{shots}"
    presets = f"maml,cactus_{balance},shots{shots}"
    beside = "" if balance == "balanced" else f"cactus_balanced_20_{shots}"
    return Row({"adapted": title}, presets, part=CLUSTERS, beside=beside)


TABLE = Table(
    title="Table 3: few-shot Omniglot",
    config="configs/few_shot_omniglot.py",
    rows={
        "cactus_balanced_20_5": _cactus("balanced", 5),
        "cactus_unbalanced_20_5": _cactus("unbalanced", 5),
        "cactus_balanced_20_15": _cactus("balanced", 15),
        "cactus_unbalanced_20_15": _cactus("unbalanced", 15),
        "maml_20_1": Row({"adapted": "MAML 20,1"}, "maml", part=CLASSES),
        "meml_20_1": Row({"adapted": "MEML 20,1"}, "meml", part=CLASSES, beside="maml_20_1"),
        "maml_20_5": Row({"adapted": "MAML 20,5"}, "maml,shots5", part=CLASSES),
        "meml_20_5": Row({"adapted": "MEML 20,5"}, "meml,shots5", part=CLASSES, beside="maml_20_5"),
    },
    smoke={"outer.meta_batch": 1, "train.steps": 50, "train.log_every": 50},
)
