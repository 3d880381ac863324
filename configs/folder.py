"""Your own images: class folders, a zip of them, or unlabelled images with a labelled `test/`.

    python experiments/run.py --config=configs/folder.py --config.data.dir=DIR --workdir=runs/mine

DIR/CLASS/*.png (also jpeg, bmp, gif, tiff, webp, pnm; folders may be nested), or DIR/train,
DIR/validation and DIR/test with class folders in each; DIR/train may hold unlabelled images, or
they lie directly in DIR beside DIR/test. Each test class needs test.shots + test.queries images (15
+ 5). Without DIR/validation its classes are taken from DIR/train, or from DIR/test where those of
DIR/train are not known; that part then needs at least 4.

Any size, grey or colour. What suits the images is chosen, printed, and stored in config.json and
results.json: 28x28 grey for small grey drawings, else 84x84 (data.image_size, data.channels), and
with it the paper's layers for that size; one cluster for 20 training images
(clustering.num_clusters: more than the classes you expect does no harm); 2, 5, 10, ... test classes
as far as there are (test.num_classes). Set a field to decide yourself.
`--config.data.skip_bad=true` goes on without images that cannot be read. To test on classes of
another folder: `--config.test_data.name=folder --config.test_data.dir=DIR2`.

Presets: `paper` (default), `released`, `smoke` (small network, minutes on 2 CPU cores, with too
little training to learn: the sgd head stays at chance, which says nothing of the method). Time:
40,000 steps at 28x28 take one to two hours on 2 CPU cores; at 84x84 they need an accelerator.
Accuracy depends on the images; the report has chance and two baselines that learn nothing beside
it.
"""

from meml_jax.presets import ALL_HEADS, SMOKE_PHOTOGRAPHS
from meml_jax.settings import preset_config

VALUES = {
    "data.name": "folder",
    "data.image_size": 0,
    "data.channels": 0,
    "clustering.num_clusters": 0,
    "test.num_classes": (),
} | ALL_HEADS

SMALL = SMOKE_PHOTOGRAPHS | {"embedding.dim": 16}


def get_config(presets: str = "paper"):
    """Return the locked settings for presets such as `released,smoke`."""
    return preset_config(presets, {"smoke": SMALL}, VALUES)
