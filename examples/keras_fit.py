"""Sample the weights of a Keras model in `model.fit`, with a sampler as a `keras.Optimizer`.

AdamW trains a network of 16 units on 64 points of sin(3 x); `psmile` then samples it. The state of
the chain is in variables of Keras. What to avoid is in docs/recipes/keras.md.

    KERAS_BACKEND=jax python examples/keras_fit.py        # a minute; f(0.5) is 1.0 within 0.1
"""

import operator
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from types import SimpleNamespace
from typing import Any, cast

import jax
import keras
import numpy as np
import optax

import optax_smile

# What a saved model may name. Loading it calls nothing else.
SAMPLERS = ["psmile", "smile", "sgld", "sghmc", "scale_adapted_sghmc", "cyclical_sgld"]
SAMPLERS += [f"published.{x}" for x in ("psmile", "smile", "psmile_naive", "smile_naive")]
# Attributes that Keras sets on an optimizer to change its steps, or around one that it wraps.
FIXED = {
    "learning_rate": "The sampler sets its own step size: leave out callbacks such as"
    " LearningRateScheduler and ReduceLROnPlateau, and pass `step_size` to `Sampler`.",
    "loss_scale_factor": "With mixed_float16, small gradients are lost and Keras skips steps:"
    " use mixed_bfloat16 or float32.",
}


@keras.saving.register_keras_serializable(package="optax_smile")
class Sampler(keras.Optimizer):
    """A sampler by name; `angle` is that of `angle_tuner`. For a saved model, pass numbers only."""

    def __init__(self, sampler, num_warmup=0, thin=1, angle=None, name="sampler", **arguments):
        if sampler not in SAMPLERS:
            raise ValueError(f"`sampler` must be one of {SAMPLERS}, got {sampler!r}.")
        super().__init__(learning_rate=1.0, name=name)
        tuner = {} if angle is None else {"tuner": optax_smile.angle_tuner(angle)}
        tx = operator.attrgetter(sampler)(optax_smile)(**arguments, **tuner)
        tx = optax_smile.recorded(tx, num_warmup=num_warmup, thin=thin)
        given = {"sampler": sampler, "num_warmup": num_warmup, "thin": thin, "angle": angle}
        # In an object, since Keras would rebuild tuples and dicts that are attributes.
        self.own = SimpleNamespace(tx=tx, config={"name": name, **given, **arguments})

    def __setattr__(self, name, value):
        """Refuse what has no effect on a sampler, or a wrong one."""
        if name in FIXED and hasattr(self, "own"):
            raise ValueError(f"`Sampler` has no `{name}`. {FIXED[name]}")
        super().__setattr__(name, value)

    def build(self, variables):
        """Start a chain at the current weights."""
        if wrong := [x.path for x in variables if x.regularizer or x.constraint]:
            raise ValueError(
                f"The weights {wrong} have a regularizer, which would be a second prior times"
                " `num_data`, or a constraint. Remove it, and pass `prior_precision` to `Sampler`."
            )
        super().build(variables)
        leaves, structure = jax.tree.flatten(self.own.tx.init([x.value for x in variables]))
        of_state = [self.add_variable(x.shape, "zeros", str(x.dtype)) for x in leaves]
        for variable, leaf in zip(of_state, leaves, strict=True):
            variable.assign(leaf)
        vars(self.own).update(weights=variables, of_state=of_state, structure=structure)

    def apply(self, grads, trainable_variables=None):
        """Take one step of the chain; the learning rate has no effect."""
        params = [x.value for x in self.own.weights]
        updates, state = self.own.tx.update(list(grads), self.state, params)
        after = jax.tree.leaves((optax.apply_updates(params, updates), state))
        for variable, value in zip([*self.own.weights, *self.own.of_state], after, strict=True):
            variable.assign(value)
        cast(Any, self.iterations).assign_add(1)

    @property
    def state(self):
        """State of the sampler, for `optax_smile.stats` and `optax_smile.last_accepted`."""
        return jax.tree.unflatten(self.own.structure, [x.value for x in self.own.of_state])

    def draws(self):
        """Return the draws of `fit`, lists of arrays as in `model.trainable_variables`."""
        return self.own.tx.draws()

    def get_config(self):
        """Describe the sampler for a saved model."""
        return self.own.config


def mean_loss(y, prediction):
    """Minus the log likelihood of each example, with noise of standard deviation 0.1."""
    return cast(Any, keras.ops).sum((y - prediction) ** 2, axis=-1) / (2 * 0.1**2)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    y = np.sin(3 * x) + 0.1 * np.random.default_rng(0).normal(size=x.shape)
    keras.utils.set_random_seed(2)
    model: Any = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(0.01), mean_loss)
    model.fit(x, y, batch_size=16, epochs=200, verbose=0)
    model.compile(Sampler("psmile", num_warmup=2_000, thin=10, num_data=64, key=0), mean_loss)
    model.fit(x, y, batch_size=16, epochs=1_000, verbose=0)
    draws, at = model.optimizer.draws(), np.array([[0.5]])
    found = np.array([model.stateless_call(weights, [], at)[0][0, 0] for weights in draws])
    print(f"f(0.5) = {found.mean():.2f} ± {found.std():.2f} from {len(found)} draws")
