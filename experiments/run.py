"""One run: unlabelled images to a continual-learning accuracy curve.

    python experiments/run.py --config=configs/X.py[:preset] --workdir=DIR [--stage=STAGE]
        [--config.a.b=value]

A stage is done with all before it; what is finished is reused. The same command continues a stopped
run. With --config.seeds=N there are N runs, in the workdirs DIR/seed<k>, and their results together
in DIR.
"""

from __future__ import annotations

if __name__ == "__main__":
    import starting  # noqa: F401, before what takes seconds to import

import contextlib
import functools
import glob
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

# Should a library bring TensorFlow along: it must not take all of the accelerator's memory.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import numpy as np
from console import exit_code, leave, say, user_errors

from meml_jax import checks, choices, devices, pseudo_labels, rounds, seeds, stages
from meml_jax.compilation_cache import keep_compiled
from meml_jax.config import Config
from meml_jax.data import cache, datasets
from meml_jax.embeddings import given
from meml_jax.environment import device_name
from meml_jax.files import expand_home
from meml_jax.metrics import Progress
from meml_jax.model import Model, make_model
from meml_jax.settings import check_field, from_dict
from meml_jax.types import Clusters, Dataset, UserError
from meml_jax.workdir import needs_embedding, open_workdir, record_config

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file("config", None, "Settings: configs/X.py or configs/X.py:preset.")
flags.DEFINE_string("workdir", None, "Folder of this run; made if missing, continued if stopped.")
flags.DEFINE_enum("stage", "all", ["all", *stages.STAGES], "Last stage to do.")


def parse(argv: list[str]) -> tuple[Config, Path, str]:
    """Read the command line: (config, workdir, last stage)."""
    for arg in argv[1:]:
        if arg.startswith("--config."):
            check_field(arg.removeprefix("--config.").split("=")[0])
        path = arg.removeprefix("--config=").split(":")[0]
        if arg.startswith("--config=") and not os.path.isfile(path):
            raise UserError(f"--config={path}: there is no such file")
    with user_errors():
        rest = FLAGS(argv)
        if rest[1:]:
            raise UserError(
                f"got the argument {rest[1]!r}, expected only flags such as --stage=all"
            )
        if FLAGS.config is None and any(arg.startswith("--config=") for arg in argv):
            raise UserError("get_config of the file --config returned None, expected settings")
        if FLAGS.config is None or not FLAGS.workdir:
            raise UserError("--config=configs/X.py and --workdir=DIR are both needed")
        try:
            tree = FLAGS.config.to_dict()
        except AttributeError:
            kind = type(FLAGS.config).__name__
            raise UserError(
                f"get_config of the file --config returned a {kind}, expected a ConfigDict, such "
                "as that of settings.preset_config"
            ) from None
        config = from_dict(tree)
    return config, expand_home(FLAGS.workdir), FLAGS.stage


def start_jax(config: Config) -> None:
    """Set the precision, keep what is compiled, name the device, warn where a GPU lies idle."""
    jax.config.update("jax_default_matmul_precision", config.precision)
    keep_compiled(cache.folder(None), report=say)
    say(f"device: {device_name()}, jax {jax.__version__}, precision {config.precision}")
    if jax.default_backend() == "cpu" and glob.glob("/dev/nvidia[0-9]*"):
        say("WARNING: an NVIDIA GPU is here but JAX uses the CPU; pip install 'meml_jax[cuda]'")


@devices.first_alone
def load(config: Config) -> Dataset:
    """Load the images; what process 0 has fetched and decoded is in the cache for the others."""
    progress = Progress(None, "images", unit="images")
    dataset = datasets.load(config.data, test=config.test_data, report=say, progress=progress)
    progress.close()
    return given.attach(dataset, config.embedding) if needs_embedding(config) else dataset


# What a seed is finished with, by the last stage that is asked for.
PRODUCTS = {"test": ("results.json",)} | dict.fromkeys(
    ("report", "all"), ("results.json", "report.md")
)
Around = Callable[[str, str], contextlib.AbstractContextManager[None]]


def run(
    config: Config,
    workdir: Path,
    last: str,
    around: Around = lambda stage, images: contextlib.nullcontext(),
) -> None:
    """Do the stages up to `last`, each within `around(stage, digest of the data set)`."""
    checks.before_loading(config)
    devices.connect()
    start_jax(config)
    seeds.check(config, workdir)
    with open_workdir(workdir, config):
        dataset = load(config)
        if needs_embedding(config) and (line := given.unused(dataset, config.embedding)):
            say(line)
        config = choices.complete(config, dataset, say)
        checks.before_training(config, dataset)
        if config.seeds == 1:
            do_stages(config, dataset, workdir, last, around)
            return
        record_config(workdir, config)
        files = PRODUCTS.get(last, ())
        for one, folder in seeds.runs(config, workdir):
            if files and seeds.finished(one, dataset, folder, files=files):
                say(f"seed {one.seed}: reuses {folder}")
                continue
            say(f"seed {one.seed}: in {folder}")
            with open_workdir(folder, one):
                do_stages(one, dataset, folder, last, around)
        if files:
            sum_up(config, dataset, workdir, report=files[-1] == "report.md")


@devices.first_only
def sum_up(config: Config, dataset: Dataset, workdir: Path, *, report: bool) -> None:
    """Put the results of several seeds together, and report on them."""
    found = seeds.write_results(config, dataset, workdir)
    if report:
        path = seeds.write_report(config, dataset, workdir, found)
        say(f"report on {config.seeds} seeds: {path}")
    else:
        say(f"results of {config.seeds} seeds: {workdir / 'results.json'}")


def do_stages(config: Config, dataset: Dataset, workdir: Path, last: str, around: Around) -> None:
    """Do the stages up to `last` in a workdir of this run's own."""
    count = len(stages.STAGES) if last == "all" else stages.STAGES.index(last) + 1
    images = dataset.content_hash
    first = functools.partial(around, "embed", images)
    z = rounds.embed(config, dataset, workdir, say, first=first)
    record_config(workdir, config)  # not before a trained embedding of other settings is refused
    if count == 1:
        return
    with around("cluster", images):
        clusters = pseudo_labels.cluster(config, dataset, z, workdir, say)
    if count == 2:
        return
    model = make_model(config, dataset, clusters)
    fen = rounds.initial_fen(config, dataset, workdir)
    with around("train", images):
        summary = stages.train(config, dataset, model, workdir, say, fen=fen)
    if count == 3:
        return
    judge(config, dataset, clusters, model, workdir, around, summary, z, report=count > 4)


@devices.first_only
def judge(
    config: Config,
    dataset: Dataset,
    clusters: Clusters,
    model: Model,
    workdir: Path,
    around: Around,
    summary: dict[str, Any],
    z: np.ndarray | None,
    *,
    report: bool,
) -> None:
    """Test what was trained, and report on it, on the devices of the first process."""
    with around("test", dataset.content_hash):
        results = stages.test(
            config, dataset, clusters, model, workdir, say, meta_train_summary=summary
        )
    if not report:
        return
    with around("report", dataset.content_hash):
        path = stages.write_report(config, dataset, clusters, model, workdir, results, z=z)
    say(f"report: {path}")


def main(argv: list[str]) -> int:
    """Run; the exit code is 2 where the user can put something right."""
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__, FLAGS.main_module_help(), sep="\n")
        return 0

    def work() -> int:
        run(*parse(argv))
        return 0

    return exit_code(work)


if __name__ == "__main__":
    leave(main(sys.argv))
