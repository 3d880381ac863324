"""FEN, FiLM, attention and CLN behind one container of pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from meml_jax.config import NetworkConfig
from meml_jax.layers import CLN, CONTEXT_SIZE, FEN, STRIDES, AttentionScore, FiLM
from meml_jax.learners import Learner
from meml_jax.types import Array, Params, UserError

COMPUTE_DTYPES = ("float32", "bfloat16")
MIN_IMAGE_SIZE = 27  # the smallest image from which five 3x3 convolutions leave one position


class Network(NamedTuple):
    """Pure functions of the parameters; every function sees the whole tree and uses its role.

    Attributes:
      init: key -> params {'fen', 'cln', and as the learner needs them 'attention', 'film',
        'context', its extra roles}. UserError where the learner adapts a role that is not there.
      stem: (params, images [N, H, W, C]) -> what lies before the first fast parameter: P where the
        encoder is not fast, the images where it is, the fifth convolution where FiLM is.
      tail: (params, stem [N, ...]) -> last pre-activation P [N, D].
      activate: P [N, D] -> R [N, D], what is pooled and classified.
      score: (params, P [N, D]) -> attention scores f_rho(relu(P)) [N].
      classify: (params, R [N, D]) -> logits [N, num_classes].
      classify_inputs: likewise, -> (logits, what each dense layer of the CLN read, by name).
      num_features: D.
      num_classes: outputs of the CLN.
      stream_roles: what learns from a stream of the meta-test: the CLN, and with it those roles of
        FiLM layers that are fast.
    """

    init: Callable[[Array], Params]
    stem: Callable[[Params, Array], Array]
    tail: Callable[[Params, Array], Array]
    activate: Callable[[Array], Array]
    score: Callable[[Params, Array], Array]
    classify: Callable[[Params, Array], Array]
    classify_inputs: Callable[[Params, Array], tuple[Array, dict[str, Array]]]
    num_features: int
    num_classes: int
    stream_roles: tuple[str, ...]

    def encode(self, params: Params, images: Array) -> Array:
        """Map images [N, H, W, C] to the last pre-activation P [N, D].

        What heads learn from is R: `encoding.encode`, which takes uint8 images of any number.
        """
        return self.tail(params, self.stem(params, images))


def check_image_size(image_shape: tuple[int, ...], least: int = MIN_IMAGE_SIZE) -> None:
    """Raise UserError for images (H, W, C) that convolutions, by default the FEN's, use up."""
    height, width = image_shape[:2]
    if min(height, width) < least:
        raise UserError(
            f"images of {height}x{width} pixels are too small for the network's convolutions: at "
            f"least {least}x{least}; raise data.image_size"
        )


def make_network(
    config: NetworkConfig,
    learner: Learner,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    dtype: Any = jnp.float32,
) -> Network:
    """Build the network of the supplement's Implementation Details.

    Args:
      config: widths, the places in which the released code differs, and `compute_dtype`: with
        bfloat16 the convolutions read and write that, also in their gradients, while parameters,
        features, dense layers and losses stay as they are.
      learner: decides whether there are an attention network and FiLM layers.
      image_shape: (H, W, C), H and W at least 27.
      num_classes: outputs of the CLN.
      dtype: of the parameters; images must have it too.

    Returns:
      A Network.

    Raises:
      UserError: images too small for six convolutions, an unknown `attention_feature` or
        `compute_dtype`. A fast role that the network does not have is found by its `init`.

    Differs from the paper: it says neither widths nor strides, which are the released code's; that
    pools and classifies the pre-activation where there is attention, and has no ReLU in the CLN
    (`attention_feature='preactivation'`, `cln_relu=False`).
    """
    check_image_size(image_shape)
    activations: dict[str, Callable[[Array], Array]] = {
        "relu": nn.relu,
        "preactivation": lambda p: p,
    }
    if config.attention_feature not in activations:
        raise UserError(
            f"network.attention_feature={config.attention_feature!r}, expected one of "
            f"{sorted(activations)}"
        )
    if config.compute_dtype not in COMPUTE_DTYPES:
        raise UserError(
            f"network.compute_dtype={config.compute_dtype!r}, expected one of {COMPUTE_DTYPES}"
        )
    activate = activations[config.attention_feature] if learner.uses_attention else nn.relu
    fen = FEN(config.channels)
    film = FiLM(config.channels)
    attention = AttentionScore()
    cln = CLN(config.hidden, num_classes, config.cln_relu)
    images = jnp.zeros((1, *image_shape), dtype)
    last_map = jax.eval_shape(fen.init_with_output, jax.random.key(0), images)[0]
    num_features = last_map.size
    features = jnp.zeros((1, num_features), dtype)
    context = jnp.zeros((CONTEXT_SIZE,), dtype)

    def apply(module: nn.Module, role: str) -> Callable[[Params, Array], Array]:
        return lambda params, x: module.apply({"params": params[role]}, x)  # type: ignore[return-value]

    def init(key: Array) -> Params:
        fen_key, attention_key, cln_key = jax.random.split(key, 3)
        params = {"fen": fen.init(fen_key, images), "cln": cln.init(cln_key, features)}
        if learner.uses_attention:
            params["attention"] = attention.init(attention_key, features)
        if learner.uses_film:
            params["film"] = film.init(jax.random.fold_in(key, 3), context)
        roles = {role: tree["params"] for role, tree in params.items()}
        if learner.uses_film:
            roles["context"] = {"z": context}
        roles |= learner.extra_roles(roles)
        if unknown := set(learner.fast) - roles.keys():
            raise UserError(
                f"the learner adapts the roles {sorted(unknown)}, but the network has "
                f"{sorted(roles)}; correct `fast` of its row, or add them by `extra_roles`"
            )
        return jax.tree.map(lambda x: x.astype(dtype), roles)

    def classify_inputs(params: Params, x: Array) -> tuple[Array, dict[str, Array]]:
        variables = {"params": params["cln"], "steps": params.get("cln_steps", {})}
        logits, kept = cln.apply(variables, x, mutable=["inputs"])
        return logits, {name: rows["rows"] for name, rows in kept["inputs"].items()}  # type: ignore[return-value]

    score = apply(attention, "attention")
    stem, tail = _split(config, learner)
    return Network(
        init=init,
        stem=stem,
        tail=tail,
        activate=activate,
        score=lambda params, p: score(params, nn.relu(p)),
        classify=lambda params, x: classify_inputs(params, x)[0],
        classify_inputs=classify_inputs,
        num_features=num_features,
        num_classes=num_classes,
        stream_roles=("cln", *(r for r in ("film", "context") if r in learner.fast)),
    )


@functools.cache  # a new one would be compiled anew
def after_stem(network: Network) -> Network:
    """Make the network whose features are what `stem` gives, and whose CLN is all that follows.

    It is for `encoding.encode` and `heads.learn_stream`. Of its functions `init`, `stem`, `tail`,
    `activate` and `classify` fit together; `score`, `classify_inputs` and `num_features` are still
    those of `network` and expect its P and R.
    """

    def classify(params: Params, x: Array) -> Array:
        return network.classify(params, network.activate(network.tail(params, x)))

    return network._replace(tail=lambda params, x: x, activate=lambda x: x, classify=classify)


def split_encoder(
    learner: Learner, encode: Callable[[Params, Array], Array]
) -> tuple[Callable[[Params, Array], Array], Callable[[Params, Array], Array]]:
    """Split a whole encoder into (stem, tail): all of it is one or the other."""

    def identity(params: Params, x: Array) -> Array:
        return x

    return (identity, encode) if learner.encoder_is_fast else (encode, identity)


def _split(config: NetworkConfig, learner: Learner):
    """Split the FEN, with FiLM where the learner has it, before its first fast parameter."""
    channels, rounded = config.channels, config.compute_dtype == "bfloat16"

    def run(params: Params, x: Array, start: int, stop: int) -> Array:
        fen, inputs = params["fen"], x
        if rounded:
            fen, inputs = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (fen, x))
        out = FEN(channels, start, stop).apply({"params": fen}, inputs)
        return out.astype(x.dtype)  # type: ignore[union-attr]

    def flatten(x: Array) -> Array:
        return x.reshape(x.shape[0], -1)

    last = len(STRIDES) - 1
    if not learner.uses_film:
        return split_encoder(learner, lambda params, x: flatten(run(params, x, 0, last + 1)))

    def stem(params: Params, images: Array) -> Array:
        return run(params, images, 0, last)

    def tail(params: Params, x: Array) -> Array:
        film = FiLM(channels)
        generated = film.apply({"params": params["film"]}, params["context"]["z"])
        scale, shift = jnp.expand_dims(jnp.asarray(generated), (2, 3, 4))  # of [N, H, W, C]
        x = run(params, scale[0] * x + shift[0], last, last + 1)
        return flatten(scale[1] * x + shift[1])

    if learner.encoder_is_fast:
        return split_encoder(learner, lambda params, x: tail(params, stem(params, x)))
    return stem, tail


def blank_outputs(params: Params, num_classes: int) -> Params:
    """Give the CLN `num_classes` outputs, all 0: `reset_class_rows` is to draw them."""
    output = jax.tree.map(
        lambda x: jnp.zeros((*x.shape[:-1], num_classes), x.dtype), params["cln"]["output"]
    )
    return params | {"cln": params["cln"] | {"output": output}}


def reset_class_rows(key: Array, params: Params, classes: Array, *, reset_bias: bool) -> Params:
    """Draw the CLN's output rows W_i of the given classes anew, N(0, 2/hidden) (Alg. 1, line 6).

    Args:
      key: random key.
      params: parameters by role.
      classes: int32 [B]; a class that stands twice gets one draw.
      reset_bias: also set the classes' biases to their initial value, 0.

    Returns:
      Parameters with the rows replaced; they stay replaced, the outer update starts from them.

    Differs from the paper: it does not say whether the bias belongs to W_i; the released code never
    resets it (`reset_bias=False`).
    """
    output = params["cln"]["output"]
    hidden = output["kernel"].shape[0]

    def draw(label: Array) -> Array:
        row = jax.random.normal(jax.random.fold_in(key, label), (hidden,), output["kernel"].dtype)
        return row * jnp.sqrt(jnp.asarray(2.0 / hidden, row.dtype))

    rows = jax.vmap(draw)(classes)
    output = output | {"kernel": output["kernel"].at[:, classes].set(rows.T)}
    if reset_bias:
        output = output | {"bias": output["bias"].at[classes].set(0.0)}
    return params | {"cln": params["cln"] | {"output": output}}
