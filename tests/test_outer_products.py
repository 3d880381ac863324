"""The inner loop of OML without copies of the kernels is the plain inner loop."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from meml_jax import inner, meta_train, outer_products
from meml_jax.config import InnerConfig, OuterConfig
from meml_jax.learners import LEARNERS


def test_where_it_applies():
    assert {name for name in LEARNERS if outer_products.applies(LEARNERS[name])} == {
        "oml",
        "oml_single",
    }
    momentum = dataclasses.replace(LEARNERS["oml"], optimizer=lambda lr, _: optax.sgd(lr, 0.9))
    assert not outer_products.applies(momentum)


def padded(batch):
    """Mask two support rows, one of them in the middle."""
    mask = batch.support.mask.at[:, jnp.array([1, -1])].set(False)
    return dataclasses.replace(batch, support=dataclasses.replace(batch.support, mask=mask))


def both(monkeypatch, function, *args):
    """Results of the loop that is used and of the plain one."""
    fast = jax.jit(function)(*args)
    monkeypatch.setattr(outer_products, "applies", lambda learner: False)
    return fast, jax.jit(lambda *args: function(*args))(*args)


@pytest.mark.parametrize(
    "name, relu, weight_on, options",
    [
        ("oml", True, "inner", {}),
        ("oml", True, "meta", {"first_order": True}),
        pytest.param("oml", False, "meta", {"steps": 2, "remat": True}, marks=pytest.mark.slow),
        pytest.param("oml_single", True, "meta", {"steps": 3}, marks=pytest.mark.slow),
    ],
)
def test_loss_metrics_and_gradient_equal_the_plain_ones(
    name, relu, weight_on, options, monkeypatch, x64
):
    net = tiny.network(name, dtype=jnp.float64, cln_relu=relu)
    params = tiny.parameters(net, dtype=np.float64)
    settings = {
        "network": net,
        "learner": LEARNERS[name],
        "inner": InnerConfig(lr=0.3, **options),
        "outer": OuterConfig(weight_on=weight_on),
        "ways": 1,
    }

    def of(params, tasks):
        loss = jax.value_and_grad(meta_train.meta_loss, has_aux=True)
        return loss(params, tasks, **settings)

    batch = padded(tiny.tasks(batch=2, dtype=np.float64))
    fast, plain = both(monkeypatch, of, params, batch)
    tiny.assert_close(fast, plain, 1e-11)
    # The inner steps are no trifle.
    still = settings | {"inner": InnerConfig(lr=0.0)}
    loss, _ = meta_train.meta_loss(params, batch, **still)
    assert abs(loss - plain[0][0]) > 1e-3


def test_a_row_may_be_of_first_order_by_itself(x64):
    net = tiny.network("oml", dtype=jnp.float64)
    params, tasks = tiny.parameters(net, dtype=np.float64), tiny.tasks(dtype=np.float64)
    row = dataclasses.replace(LEARNERS["oml"], first_order=True)
    assert outer_products.applies(row)

    def grads(learner, **options):
        inner = InnerConfig(lr=0.3, **options)
        settings = {"network": net, "learner": learner, "inner": inner, "outer": OuterConfig()}
        settings["ways"] = 1
        return jax.jit(functools.partial(meta_train.meta_grad, **settings))(params, tasks)[0]

    tiny.assert_same(grads(row), grads(LEARNERS["oml"], first_order=True))


def test_float32_losses_equal_to_a_millionth(monkeypatch):
    net = tiny.network("oml", dense=False)
    params = tiny.parameters(net)

    def of(params, tasks):
        return meta_train.meta_loss(
            params, tasks, network=net, learner=LEARNERS["oml"], inner=InnerConfig(),
            outer=OuterConfig(), ways=1,
        )  # fmt: skip

    fast, plain = both(monkeypatch, of, params, tiny.tasks(image=tiny.CONV_IMAGE))
    tiny.assert_close(fast, plain, 1e-6)


def test_the_steps_are_what_the_kernels_have_moved_by():
    net = tiny.network("oml")
    params = tiny.parameters(net)
    support = tiny.first(padded(tiny.tasks())).support
    support = dataclasses.replace(support, inputs=net.stem(params, support.inputs))
    learner, options = LEARNERS["oml"], InnerConfig(lr=0.3)
    fast, info = outer_products.adapt(
        params, support, network=net, learner=learner, options=options
    )
    plain, plain_info = inner.adapt(
        params, support, network=net, learner=learner, options=options, tx=optax.sgd(0.3), ways=1
    )
    tiny.assert_close(info.loss, plain_info.loss)
    tiny.assert_same(info.stepped, plain_info.stepped)
    for name, layer in plain["cln"].items():
        steps = fast["cln_steps"][name]
        moved = steps["inputs"].T @ steps["added"]
        tiny.assert_close(params["cln"][name]["kernel"] + moved, layer["kernel"], 1e-5)
        np.testing.assert_allclose(fast["cln"][name]["bias"], layer["bias"], rtol=1e-5, atol=1e-7)
        tiny.assert_same(fast["cln"][name]["kernel"], params["cln"][name]["kernel"])
        assert np.all(np.asarray(steps["added"])[[1, -1]] == 0)  # padding adds nothing
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, net.num_features)), jnp.float32)
    tiny.assert_close(net.classify(fast, x), net.classify(plain, x), 1e-5)
