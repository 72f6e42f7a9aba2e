"""Interfaces to other libraries: NumPyro models, scikit-learn estimators, Keras optimizers."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import optax

from optax_smile import _check
from optax_smile.interop.numpyro_model import NumpyroModel, from_numpyro

if TYPE_CHECKING:
    from optax_smile.interop import estimators
    from optax_smile.interop._keras import SamplerOptimizer

__all__ = ["NumpyroModel", "estimators", "from_numpyro", "keras_optimizer"]


@_check.arguments(sampler=_check.TRANSFORMATION)
def keras_optimizer(sampler: optax.GradientTransformation) -> SamplerOptimizer:
    """Convert a sampler to a Keras optimizer, for `model.compile` and `model.fit`.

    Pass `recorded(sampler, ...)` to get the draws: its `draws()` returns them after `fit`. A draw
    is a list of arrays in the order of `model.trainable_variables`:

        tx = optax_smile.recorded(optax_smile.psmile(num_data=n, key=0), num_warmup=1_000, thin=50)
        model.compile(optax_smile.interop.keras_optimizer(tx), loss)
        model.fit(x, y, epochs=100)
        draws = tx.draws()

    The loss must be a mean over examples (`"sum_over_batch_size"`, the default of Keras). The batch
    size must divide the number of examples: `fit` ends an epoch with a smaller batch otherwise, and
    the examples of that batch get a larger weight. The prior of the sampler takes the place of
    regularizers of layers; a loss that a layer adds is a warning.

    Args:
        sampler: sampler, alone or last in an `optax.chain`, or `recorded`.

    Returns:
        A `keras.Optimizer` with the property `state`, which `stats` reads, and the method
        `last_accepted()`. A saved model contains it, and continues after loading, if all arguments
        of the sampler are plain numbers and it writes no files.

    Raises:
        ImportError: Keras is missing.
        ValueError: Keras does not run on JAX. Later: the policy "mixed_float16", or a callback that
            sets the learning rate.
    """
    with _check.needed("`optax_smile.interop.keras_optimizer` needs Keras", "keras"):
        module = importlib.import_module("optax_smile.interop._keras")
    if (backend := module.keras.backend.backend()) != "jax":
        rule, remedy = "used with the JAX backend", "Set KERAS_BACKEND=jax before importing Keras."
        _check.fail("keras_optimizer", "sampler", rule, backend, remedy)
    return module.SamplerOptimizer(sampler)


def __getattr__(name: str) -> ModuleType:
    """Import `estimators` on first access, since it needs scikit-learn."""
    if name != "estimators":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _check.needed("`optax_smile.interop.estimators` needs scikit-learn", "sklearn"):
        return importlib.import_module("optax_smile.interop.estimators")
