"""Images from the host, call by call, give the training that all images on the device give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_same, learner_of, network

from meml_jax import checkpoints, feed, meta_train, metrics, task_spec, tasks, training
from meml_jax.config import InnerConfig, OuterConfig, TasksConfig, TrainConfig
from meml_jax.samplers import cluster_sampler
from meml_jax.types import UserError

SETTINGS = TrainConfig(
    steps=23, steps_per_call=5, log_every=7, checkpoint_every=11, validate_every=100
)


def train(place, workdir):
    """Train a dense network on 60 images in 5 clusters: its state, and how the data were asked."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 3, 3, 1), np.uint8)
    labels = np.repeat(np.arange(5), (4, 7, 12, 17, 20))[rng.permutation(60)]
    table, kept = tasks.table_from_labels(labels, min_size=2)
    spec = task_spec.make_spec(TasksConfig(max_size=9, num_random_query=4), table, kept)
    bounds = tasks.bucket_bounds(table, spec, num_buckets=1)
    outer = OuterConfig(lr=1e-2, meta_batch=2)
    sampler = cluster_sampler(spec, bounds, meta_batch=2)
    net = network("meml")
    call = meta_train.make_train_call(
        network=net, learner=learner_of("meml"), inner=InnerConfig(), outer=outer,
        sampler=sampler, steps_per_call=SETTINGS.steps_per_call,
    )  # fmt: skip
    data = (images, table, jnp.ones(5), jax.random.key(3))
    tx = meta_train.outer_optimizer(outer)
    with feed.open_feed(place, data, sampler=sampler, train=SETTINGS) as fed:
        training.train(
            call, lambda: meta_train.init_state(jax.random.key(0), net, tx), fed, SETTINGS,
            workdir=workdir, fingerprint="f", validate=None, report=lambda line: None,
        )  # fmt: skip
        if callable(fed):  # few images go to the device, and no others
            chunk, remapped, *_ = fed(0)
            assert chunk.shape == (5 * 2 * (9 + 4), 3, 3, 1)
            assert not np.array_equal(remapped.index, table.index)
    fresh = jax.eval_shape(lambda: meta_train.init_state(jax.random.key(0), net, tx))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, _ = checkpoints.restore(manager, fresh)
    return state


@pytest.mark.slow
def test_images_from_the_host_give_the_same_training_bit_for_bit(tmp_path):
    on_device = train("device", tmp_path / "device")
    from_host = train("host", tmp_path / "host")
    assert int(from_host.step) == SETTINGS.steps
    assert_same(on_device, from_host)
    device, host = (
        [{k: v for k, v in record.items() if k != "time"} for record in metrics.read(path)]
        for path in (tmp_path / "device/metrics.jsonl", tmp_path / "host/metrics.jsonl")
    )
    assert device == host


def test_where_the_images_lie(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 1000}

    assert feed.place("auto", 10**12) == "device"  # a CPU has no memory of its own
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert feed.place("auto", 500) == "device" and feed.place("auto", 501) == "host"
    assert feed.place("device", 501) == "device" and feed.place("host", 1) == "host"
    with pytest.raises(UserError, match="train.images_on='gpu', expected 'auto', 'device' or"):
        feed.place("gpu", 1)
