"""Time and memory (supplement): OML's update for each image against MEML's one update.

The sheet "Cost" of the report puts seconds and the peak memory of the compiled steps beside the
paper's. PCA stands for the embedding, and accuracies are beside the point; what a step costs
depends on it by the sizes of its clusters alone, which the two rows of a data set have in common.
The largest decides on the memory, and OML's time is in proportion to the images of a cluster.
Memory with and without encoding once: experiments/benchmark.py.
"""

from meml_jax.tables import Row, Table

VALUES = {
    "embedding.name": "pca",
    "embedding.dim": 64,
    "train.init": "random",
    "test.heads": ("prototype",),
}


def _rows(dataset: str, title: str) -> dict[str, Row]:
    config = f"configs/{dataset}.py"
    return {
        f"{dataset}_{learner}": Row(
            {"prototype": f"{learner.upper()}, prototype head"},
            values=VALUES | {"learner": learner},
            part=title,
            config=config,
        )
        for learner in ("oml", "meml")
    }


TABLE = Table(
    title="Cost of the meta-training",
    config="configs/omniglot.py",
    rows=_rows("omniglot", "Omniglot") | _rows("mini_imagenet", "Mini-ImageNet"),
)
