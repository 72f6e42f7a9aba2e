"""Typed code of a user: `.ci/package` checks it against the installed wheel, and runs it."""
# Optax has no types to find; what JAX leaves unknown is no matter of ours.
# pyright: strict, reportUnknownMemberType=false

from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]

import optax_smile
from optax_smile import Prediction, Predictor, Snapshots, StoredSnapshots, metrics

Params = dict[str, jax.Array]
INPUTS = jax.random.normal(jax.random.key(0), (100, 3))
TARGETS = INPUTS @ jnp.array([1.0, 0.0, -1.0])


def mean_loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    inputs, targets = batch
    return jnp.mean((inputs @ params["w"] - targets) ** 2) / 2


def outputs(params: Any, inputs: jax.Array) -> tuple[jax.Array, float]:
    return inputs @ params["w"], 0.0


class Known(NamedTuple):
    scale: Params

    def inverse_scale(self) -> Params:
        return {name: 1 / x for name, x in self.scale.items()}


class KnownScale(optax_smile.Preconditioner[Known]):
    def init(self, params: optax.Params) -> Known:
        return Known({"w": 10 * jnp.ones(3)})

    def observe(self, state: Known, *_: object, **__: object) -> Known:
        return state


def own_loop(sampler: optax.GradientTransformationExtraArgs) -> list[Any]:
    params: Any = {"w": jnp.zeros(3)}
    state, draws = sampler.init(params), list[Any]()
    for _ in range(3):
        loss, grads = jax.value_and_grad(mean_loss)(params, (INPUTS, TARGETS))
        updates, state = sampler.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        draws.append(optax_smile.last_accepted(state, params))
    assert_type(optax_smile.stats(state).step_size, jax.Array)
    return draws


def whole_run() -> tuple[Snapshots | StoredSnapshots, Prediction]:
    members = optax_smile.warmstart(
        mean_loss,
        lambda key: {"w": jax.random.normal(key, (3,))},
        [(INPUTS, TARGETS)],
        optax.adam(0.1),
        num_members=2,
        num_epochs=5,
        key=0,
    )
    draws = optax_smile.sample(
        mean_loss,
        members,
        [(INPUTS, TARGETS)],
        optax_smile.psmile(num_data=100, key=1),
        num_warmup=5,
        num_draws=4,
        key=2,
    )
    prediction = optax_smile.predict(
        outputs, draws, INPUTS, likelihood="gaussian", targets=TARGETS, per="draw"
    )
    return draws, prediction


def main() -> None:
    sampler = optax_smile.psmile(num_data=100, key=0)
    assert_type(sampler, optax.GradientTransformationExtraArgs)
    scaled = optax_smile.smile(num_data=100, preconditioner=KnownScale(), key=0)
    kept = own_loop(sampler) + own_loop(scaled)
    draws, prediction = whole_run()
    assert_type(len(draws), int)
    assert_type(draws[2:4], list[Any])
    assert_type(prediction, Prediction)
    assert_type(metrics.lppd(prediction.log_density), float)
    assert_type(draws.num_chains, int)
    predictor = Predictor(outputs, INPUTS, likelihood="gaussian")
    for params in [*kept, *draws]:
        predictor.update(params)
    assert_type(predictor.finalize(), Prediction)
    assert np.shape(prediction.mean) == (100,) and len(draws) == 8
    print(draws)
    print(prediction)


if __name__ == "__main__":
    main()
