"""Equality with the authors' PyTorch code: github alessiabertugli/FUSION-ME at 6d55ccc.

`reference.npz` condenses traces that were recorded from that code (torch 2.13.0, CPU); see
`make_reference.py`. With MEML_REFERENCE naming the folder of the full traces, arrays are also
compared element by element. A trace holds no reset of a classifier row: it starts after it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from make_reference import condense, initial_parameters, shapes

from meml_jax import heads, losses, meta_test, meta_train, updates
from meml_jax.config import InnerConfig, NetworkConfig, OuterConfig
from meml_jax.inner import adapt, pooled_logits
from meml_jax.learners import LEARNERS
from meml_jax.networks import make_network
from meml_jax.pooling import pool
from meml_jax.types import Batch, Task, TrainState

FULL = os.environ.get("MEML_REFERENCE")
META_TRAIN = (
    "meta_small_attention_f64",
    "meta_small_attention_k1_f64",
    "meta_small_attention_clip_f64",
    "meta_small_attention_balance_f64",
    "meta_small_attention_3steps_f64",
    "meta_small_oml_f64",
    "meta_small_oml_balance_f64",
    "meta_small_oml_3steps_f64",
    pytest.param("meta_small_imagenet_attention_f32", marks=pytest.mark.slow),
)
OUTER = meta_train.outer_optimizer(OuterConfig())
SUPPORT = 5  # rows that support sets are padded to, so that traces share one compiled function
RELEASED = NetworkConfig(channels=16, hidden=64, cln_relu=False, attention_feature="preactivation")


class Trace:
    """One trace, its network, and the translation between its parameters and ours."""

    def __init__(self, name):
        self.name = name
        self.stored = _stored()
        self.full = dict(np.load(Path(FULL) / f"{name}.npz")) if FULL else None
        self.names = [str(n) for n in self["param_names"]]
        self.float64 = name.endswith("f64")
        self.dtype = np.float64 if self.float64 else np.float32
        # Float32 sums of another order differ by a few 1e-6; the imagenet trace alone is float32.
        self.tolerance, self.floor = (1e-9, 1e-14) if self.float64 else (1e-4, 1e-6)
        imagenet = "imagenet" in name
        self.image_shape = (84, 84, 3) if imagenet else (28, 28, 1)
        self.learner = LEARNERS["meml_released" if "attention" in name else "oml"]
        config = dataclasses.replace(RELEASED, channels=8, hidden=32) if imagenet else RELEASED
        self.network = _network(config, self.learner, self.image_shape, 16 if imagenet else 20)
        features, channels = self.network.num_features, config.channels
        side = round((features / channels) ** 0.5)
        self.shapes = shapes(
            self.names,
            channels=channels,
            inputs=self.image_shape[2],
            last=3 if imagenet else 1,
            features=features,
            hidden=config.hidden,
            outputs=self.network.num_classes,
        )
        # Theirs flatten the last map as (C, H, W), ours as (H, W, C).
        self.order = np.arange(features).reshape(channels, side, side).transpose(1, 2, 0).ravel()

    def __getitem__(self, key):
        return self.stored[f"{self.name}/{key}"]

    def images(self, key):
        """Images NHWC in [0, 1]; float32 values also in float64, as in the trace."""
        images = self.stored[str(self[key])].astype(np.float32) / np.float32(255)
        images = images.reshape(-1, *images.shape[-3:]).transpose(0, 2, 3, 1)
        return jnp.asarray(images.astype(self.dtype))

    def task(self, prefix, weight):
        """The trace's support, padded, and query as a meta-batch of one."""
        support, query = self[prefix + "y_spt"].ravel(), self[prefix + "y_qry"].ravel()

        def batch(images, label, rows):
            images, label, mask = (
                jnp.zeros((rows, *x.shape[1:]), x.dtype).at[: len(x)].set(x)[None]
                for x in (images, jnp.asarray(label, jnp.int32), jnp.ones(len(label), bool))
            )
            return Batch(images, label, mask)

        return Task(
            batch(self.images(prefix + "x_spt"), support, SUPPORT),
            batch(self.images(prefix + "x_qry"), query, len(query)),
            jnp.full((1,), weight, self.dtype),
        )

    def initial(self):
        """The parameters that the trace starts from, in our tree."""
        values = initial_parameters(self.name, self.names, self.shapes)
        tree = {}
        for name, value in values.items():
            role, module, leaf = _place(name)
            value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
            if name.endswith(("att1_w", "cln1_w")):
                value = value[self.order]
            value = jnp.asarray(value.astype(self.dtype))
            tree.setdefault(role, {}).setdefault(module, {})[leaf] = value
        return tree

    def theirs(self, tree):
        """A tree like our parameters as arrays by their names; roles that it lacks are left out."""
        values = {}
        for name in self.names:
            role, module, leaf = _place(name)
            if role not in tree:
                continue
            value = np.asarray(tree[role][module][leaf])
            if name.endswith(("att1_w", "cln1_w")):
                value = value[np.argsort(self.order)]
            values[name] = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        return values

    def check(self, key, tree, leave_out=()):
        """Compare a tree like our parameters with the arrays of `key`."""
        values, expected = self.theirs(tree), self[key]
        assert len(values) == len(expected)
        for (name, value), numbers in zip(values.items(), expected, strict=True):
            if name in leave_out:
                continue
            tolerance = self.tolerance * numbers[0] + self.floor
            error = np.abs(condense(name, value) - numbers).max()
            # A projection on a normal vector is a few norms large.
            assert error <= 4 * tolerance, (
                f"{key}/{name}: off by {error:.1e}, norm {numbers[0]:.1e}"
            )
            if self.full is not None:
                elements = self.full[f"{key}/{name}"]
                error = np.abs(value - elements).max()
                assert error <= self.tolerance * np.abs(elements).max() + self.floor, (key, name)

    def close(self, key, value):
        """Compare a small array with the one of `key`."""
        expected = self[key]
        np.testing.assert_allclose(
            np.asarray(value).reshape(expected.shape),
            expected,
            rtol=self.tolerance,
            atol=self.tolerance * np.abs(expected).max(),
            err_msg=key,
        )


@functools.cache
def _stored():
    return dict(np.load(Path(__file__).with_name("reference.npz")))


@functools.cache
def _network(config, learner, image_shape, num_classes):
    dtype = jnp.zeros(0, float).dtype  # float64 inside `enable_x64`
    return make_network(
        config, learner, image_shape=image_shape, num_classes=num_classes, dtype=dtype
    )


def _place(name):
    """Where one of their parameters, e.g. `16_cln1_w`, stands in our tree."""
    layer, kind = name[3:].rsplit("_", 1)
    leaf = {"w": "kernel", "b": "bias"}[kind]
    if layer.startswith("conv"):
        return "fen", f"Conv_{int(layer[4:]) - 1}", leaf
    role = {"att": "attention", "cln": "cln"}[layer[:3]]
    return role, {"1": "hidden", "2": "output"}[layer[3:]], leaf


@pytest.fixture
def trace(request):
    """The trace named by the parameter, in its own precision."""
    with jax.enable_x64(request.param.endswith("f64")):
        yield Trace(request.param)


@functools.partial(jax.jit, static_argnames=("network", "learner"))
def _step(state, tasks, *, network, learner):
    """Everything that a trace records of a meta-step."""
    settings = {"network": network, "learner": learner, "inner": InnerConfig(), "ways": 1}
    settings["outer"] = OuterConfig(weight_on="inner")
    grads, metrics = meta_train.meta_grad(state.params, tasks, **settings)

    encoded = jax.tree.map(lambda x: x[0], meta_train.encode_tasks(state.params, tasks, network))
    support, query = encoded.support, encoded.query

    def adapted(support, learner):
        return adapt(
            state.params,
            support,
            network=network,
            learner=learner,
            tx=optax.sgd(InnerConfig.lr),
            weight=tasks.weight[0],
            ways=1,
        )

    # The parameters after each inner update: fewer phases, or fewer support images.
    if len(learner.phases) > 1:
        cut = [dataclasses.replace(learner, phases=learner.phases[:i]) for i in (1, 2)]
        fast = [adapted(support, learner)[0] for learner in cut]
    else:
        count = len(support.mask)
        masks = jnp.tri(count, dtype=bool) & support.mask[None]
        stacked = jax.vmap(lambda m: adapted(dataclasses.replace(support, mask=m), learner)[0])
        fast = [jax.tree.map(lambda x, i=i: x[i], stacked(masks)) for i in range(count)]
    query_logits = [
        pooled_logits(params, query.inputs, query, network=network, pooling="none", ways=1)[0]
        for params in (state.params, *fast)
    ]
    alpha = None
    if learner.uses_attention:
        scores = network.score(fast[0], support.inputs)
        features = network.activate(support.inputs)
        _, alpha = pool(scores, features, jnp.zeros_like(support.label), support.mask, 1)
    return {
        "metrics": metrics,
        "inner_loss": adapted(support, learner)[1].loss,
        "fast": fast,
        "query_logits": query_logits,
        "alpha": alpha,
        "grads": grads,
        "clipped": optax.clip(OuterConfig.clip).update(grads, optax.EmptyState())[0],
        "state": updates.apply_gradients(state, grads, OUTER),
    }


@pytest.mark.parametrize("trace", META_TRAIN, indirect=True)
def test_meta_step(trace):
    params = trace.initial()
    state = TrainState(jnp.zeros((), jnp.int32), params, OUTER.init(params))
    prefixes = ("s0/", "s1/", "s2/") if "3steps" in trace.name else ("",)
    for prefix in prefixes:
        weight = 1.0
        if "balance" in trace.name:
            weight = trace["balance_vector"][trace["y_spt"].flat[0]]
        trace.check(prefix + "init", state.params)
        tasks = trace.task(prefix, weight)
        out = _step(state, tasks, network=trace.network, learner=trace.learner)
        _check_step(trace, prefix, out)
        state = out["state"]


def _check_step(trace, prefix, out):
    attention = trace.learner.uses_attention
    # Where Gamma weights the inner losses, the meta-loss is the plain loss on the query.
    trace.close(prefix + "outer_loss", out["metrics"]["loss"])
    expected = trace[prefix + "meta_losses"]
    logits = out["query_logits"][: len(expected)]
    trace.close(prefix + "meta_losses", [_query_loss(trace, prefix, x) for x in logits])

    # Calls in the order of the official forward: a query pass before and after each update.
    count = len(expected) - 1
    call = 0
    for update in range(1, count + 1):
        inner = f"{prefix}call{call:02d}_inner{update}/"
        trace.close(inner + "ce_loss", out["inner_loss"][update - 1])
        call += 1
        if update == 1:
            trace.close(f"{prefix}call01_qry_init/logits", out["query_logits"][0])
            call += 1
        last = "outer" if attention and update == count else f"qry_after{update}"
        trace.close(f"{prefix}call{call:02d}_{last}/logits", out["query_logits"][update])
        call += 1
        fast = {role: out["fast"][update - 1][role] for role in trace.learner.fast}
        trace.check(f"{prefix}fast{update}", fast)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(
                jax.tree.leaves(out["fast"][update - 1]["fen"]),
                jax.tree.leaves(out["fast"][0]["fen"]),
                strict=True,
            )
        )
    if attention:
        rows = len(trace[prefix + "y_spt"])
        trace.close(f"{prefix}call03_inner2/attention_coeff", out["alpha"][0, :rows])
        assert not np.any(out["alpha"][0, rows:])

    trace.check(prefix + "grad", out["grads"])
    trace.check(prefix + "grad_clipped", out["clipped"])
    # A softmax ignores a shift, so the gradient of the score's bias is rounding noise, which the
    # first step of Adam makes 1e-4 of either sign in float32.
    noise = () if trace.float64 else ("15_att2_b",)
    trace.check(prefix + "after_adam", out["state"].params, leave_out=noise)


def _query_loss(trace, prefix, logits):
    label = jnp.asarray(trace[prefix + "y_qry"].ravel(), jnp.int32)
    return losses.cross_entropy(logits, label, jnp.ones(label.shape, bool))


@pytest.mark.parametrize("trace", ["meta_small_attention_clip_f64"], indirect=True)
def test_clipping_was_active(trace):
    changed = np.any(trace["grad"] != trace["grad_clipped"], axis=1)
    assert changed[:12].all()


@pytest.mark.parametrize("trace", ["test_small_oml_f64"], indirect=True)
def test_meta_test_stream(trace):
    params = trace.initial()
    trace.check("init", params)
    network = trace.network
    label = jnp.asarray(trace["y_train"], jnp.int32)
    test_label = trace["y_test"]

    @jax.jit
    def features(images):
        return network.activate(network.encode(params, images))

    stream, test = features(trace.images("x_train")), features(trace.images("x_test"))
    start = params | {"attention": {"kernel": jnp.ones((3,))}}

    learn = jax.jit(functools.partial(heads.learn_stream, network=network))

    def after(steps):
        nothing = jnp.zeros((steps, 0), jnp.int32), jnp.zeros((steps, 0), bool)
        return learn(start, stream[:steps], label[:steps], nothing, learning_rate=trace["lr"])

    for steps in (0, 1, 16):
        logits = network.classify(after(steps) if steps else start, stream[steps][None])
        loss = losses.cross_entropy(logits, label[steps, None], jnp.ones((1,), bool))
        np.testing.assert_allclose(logits[0], trace["logits_step"][steps], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(loss, trace["losses"][steps], rtol=1e-9)
    learned = after(len(label))
    trace.check("final", {role: learned[role] for role in params})
    for role in ("fen", "attention"):
        jax.tree.map(np.testing.assert_array_equal, learned[role], start[role])

    logits = network.classify(learned, test)
    trace.close("logits_test", logits)
    correct = np.asarray(jnp.argmax(logits, axis=-1) == test_label)[None]
    clean = meta_test.run_accuracies(correct, protocol="clean")
    released = meta_test.run_accuracies(correct, protocol="released")
    np.testing.assert_allclose(clean, [trace["acc_true"]], rtol=1e-12)
    np.testing.assert_allclose(released, [trace["acc_official_batch32_mean"]], rtol=1e-12)
