"""Tall data: losses whose mini-batch gradients have little noise near a centre.

With a centre c near the mode, and the mean loss L and its gradient G of all data at c, the loss

    loss'(w, B) = loss(w, B) - [loss(c, B) - L] - <grad loss(c, B) - G, w - c>

of a batch B has the mean and the mean gradient of `loss`; the noise of its gradient decreases with
w - c. Use it like any other loss, in `sample`, `Run` and loops of your own. With the argument
`control_variate` of `sample`, each chain has a centre of its own, which moves along with it.

Source: control variates, Baker et al., Control variates for stochastic gradient MCMC, 2019.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from optax_smile import _check, _check_trees, _on_host, _settings, potential
from optax_smile._types import T
from optax_smile._warn import warn
from optax_smile.chains._centers import Center, residual
from optax_smile.mistakes.batches import USABLE, require_all
from optax_smile.potential import Potential

__all__ = ["Center", "center_at", "control_variate", "find_mode", "stored"]

Loss: TypeAlias = Callable[..., jax.Array]
# Largest number of parameters for which the Hessian is computed.
LARGEST_HESSIAN = 1_024
# A centre counts as a mode within `NEAR` posterior standard deviations, root mean square over the
# parameters. If it is further away than `FAR`, gradients have much more noise.
NEAR, FAR = 0.1, 2.0
# Largest remaining share of the noise at which two gradients per call still pay.
MOST_NOISE = 0.5
# Largest rise of the energy at draws of the normal approximation, relative to a normal posterior.
LARGEST_RISE = 2.0
# Number of batches and draws that measure the share.
NUM_BATCHES, NUM_DRAWS = 32, 4
# Lower bound of curvatures in a Newton step, relative to the largest.
FLATTEST = 1e-9
# Sufficient decrease of a line search, and maximum numbers of halvings of a step and of passes.
DECREASE, HALVINGS, MOST_PASSES = 1e-4, 30, 200
# Number of examples whose gradients `stored` computes together.
BLOCK = 1_024
ONE = "a scalar mean loss `loss_fn(params, batch)`, without `aux` and random numbers"
FAR_OFF = "Far from a mode, gradients have more noise: see `find_mode`."
LOSS = _check.Function("(params, batch)")
CENTER = _check.kind(Center, "the result of `find_mode` or `center_at`")
AT_CENTER = {"loss_fn": LOSS, "center": CENTER}
START = _check.Tree("a tree of finite arrays", traced=False, finite=True, floating=True)
OF_DATA = {"loss_fn": LOSS, "params": START, "batches": _check.REPEATABLE}
OF_DATA |= {"sampler": _check.TRANSFORMATION}


@_check.arguments(**AT_CENTER)
def control_variate(loss_fn: Loss, center: Center) -> Loss:
    """Return a loss of the same posterior whose gradients have little noise near a centre.

    Use it in a loop of your own if the posterior is so narrow that all its draws are near its mode.
    Otherwise the centre must move, as `sample` does with `control_variate=`.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, as for `sample`, without `aux` and without
            random numbers. The terms of the mean must not depend on other examples of the batch.
        center: the result of `find_mode` or `center_at`. It may be traced: under `vmap`, each chain
            can have its own.

    Returns:
        A loss `(params, batch)` for `sample`, `Run` or a loop of your own. Start the chains at
        `center.params`.

    Cost: two gradients per call.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> x = jnp.sin(jnp.arange(2_000.0)).reshape(1_000, 2)
        >>> loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2) / 2
        >>> batches = [x[i : i + 100] for i in range(0, 1_000, 100)]
        >>> sampler = optax_smile.psmile(num_data=1_000, key=0)
        >>> center = optax_smile.tall.find_mode(loss_fn, jnp.ones(2), batches, sampler)
        >>> loss = optax_smile.tall.control_variate(loss_fn, center)
        >>> bool(abs(loss(center.params, batches[0]) - center.loss) < 1e-6)
        True

    Source: see the module. For the step size of `psmile` if gradients have little noise see
    `angle_tuner`.
    """
    value_and_grad = _of_batch(loss_fn)

    def reduced(params: optax.Params, batch: object) -> jax.Array:
        at = jax.lax.stop_gradient(center)
        loss, gradient = value_and_grad(at.params, batch)
        return loss_fn(params, batch) - residual(loss, gradient, at, params)

    return reduced


@_check.arguments(
    **AT_CENTER, data=_check.Tree("arrays with the examples as first axis, as in a batch")
)
def stored(
    loss_fn: Loss, center: Center, data: T
) -> tuple[Loss, tuple[T, np.ndarray, optax.Updates]]:
    """Return the loss of `control_variate` with one gradient per call, and data for it.

    The losses and gradients of all examples at the centre become additional columns of the data.

    Args:
        loss_fn, center: as for `control_variate`. The loss must be a mean over its examples.
        data: all data in the form of a batch, arrays `[example, ...]`.

    Returns:
        A loss, and a tree `(data, losses, gradients)` of arrays `[example, ...]`. Batches of the
        loss are rows of this tree, in any order.

    Raises:
        ArgumentError (a ValueError): the mean loss of the examples is not that of the centre.

    Cost: memory for one more number per example than the model has parameters.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> x = jnp.arange(12.0).reshape(6, 2)
        >>> loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2) / 2
        >>> sampler = optax_smile.psmile(num_data=6, key=0)
        >>> center = optax_smile.tall.find_mode(loss_fn, jnp.ones(2), [x], sampler)
        >>> loss, columns = optax_smile.tall.stored(loss_fn, center, x)
        >>> columns[2].shape
        (6, 2)
    """
    value_and_grad, data = _of_batch(loss_fn), _on_host.as_numeric("data", data)
    if not _on_host.num_rows(data, False):
        _check.fail("data", "arrays with the examples as first axis", _check.show(data))

    def of_one(example: object) -> tuple[jax.Array, optax.Updates]:
        return value_and_grad(center.params, jax.tree.map(lambda x: x[None], example))

    compute = jax.jit(functools.partial(jax.lax.map, of_one, batch_size=BLOCK))
    losses, gradients = jax.tree.map(np.asarray, compute(jax.tree.map(jnp.asarray, data)))
    mean = float(np.mean(losses, dtype=np.float64))
    if not np.isclose(mean, float(center.loss), rtol=1e-4, atol=1e-6):
        rule = f"the data of the centre, with the mean loss {float(center.loss):.6g}"
        _check.fail("data", rule, f"{mean:.6g}, the mean over single examples")

    def reduced(params: optax.Params, batch: tuple[object, ...]) -> jax.Array:
        examples, *columns = batch
        loss, gradient = jax.tree.map(lambda x: jnp.mean(x, axis=0), columns)
        return loss_fn(params, examples) - residual(loss, gradient, center, params)

    return reduced, (data, losses, gradients)


@_check.arguments(**OF_DATA)
def center_at(
    loss_fn: Loss,
    params: optax.Params,
    batches: Iterable[object],
    sampler: optax.GradientTransformation,
) -> Center:
    """Compute the mean loss and gradient of all data at given parameters.

    It warns if the mode is more than two posterior standard deviations away, root mean square over
    the parameters. It also warns if at draws of the posterior more than half of the variance of the
    gradients would remain with the control variate: two gradients per call then cost more than they
    gain. It estimates both from the Hessian, for at most 1,024 parameters.

    Args:
        loss_fn: see `control_variate`.
        params: parameters of one chain.
        batches: an iterable of batches. One pass over it has each example once; batches are
            weighted by their numbers of rows.
        sampler: a sampler of this library, for `num_data` and the prior.

    Raises:
        ArgumentError (a ValueError): a pass does not have `num_data` rows; the loss is not a
            scalar, or not finite.

    Cost: a gradient of all data, summed in float64 on the host, and a Hessian, which takes as long
    as a gradient for each parameter.
    """
    full = _AllData(loss_fn, params, batches, sampler)
    point, why = full.at(full.start), ""
    if len(point.entries) <= LARGEST_HESSIAN:
        why, _ = full.assess(point, *full.curvatures(point))
    if why:
        warn(f"`center_at`: {why}")
    return point.center


@_check.arguments(**OF_DATA)
def find_mode(
    loss_fn: Loss,
    params: optax.Params,
    batches: Iterable[object],
    sampler: optax.GradientTransformation,
) -> Center:
    """Find the mode of the posterior, for the centre of a control variate.

    It uses Newton's method with all data, until a step is less than 0.1 posterior standard
    deviations long, root mean square over the parameters. Along directions of negative curvature,
    it steps downhill with the absolute value. It takes at most 1,024 parameters: for more, use an
    optimizer, then call `center_at`.

    Args:
        loss_fn, batches, sampler: see `center_at`.
        params: where the search starts; for a model with several modes, near the one you want.

    Returns:
        The centre. Warns as `center_at` does, also if the search ends too early.

    Raises:
        ArgumentError (a ValueError): see `center_at`.

    Cost: about ten gradients and Hessians of all data, see `center_at`; at most 200 passes over the
    batches. Batches larger than those of the sampler are faster.
    """
    center, why, _ = search(loss_fn, params, batches, sampler)
    if why:
        warn(f"`find_mode`: {why}")
    return center


def search(
    loss_fn: Loss,
    params: optax.Params,
    batches: Iterable[object],
    sampler: optax.GradientTransformation,
) -> tuple[Center, str, bool]:
    """Find a mode, and return it with the reason why it is a bad centre, or "".

    The last result is whether it is a mode.
    """
    full = _AllData(loss_fn, params, batches, sampler)
    if len(full.start) > LARGEST_HESSIAN:
        rule = f"at most {LARGEST_HESSIAN:,} parameters, for Newton's method"
        _check.fail("params", rule, len(full.start), "Optimize them, then use `center_at`.")
    point = full.at(full.start)
    while True:
        curvatures, axes = full.curvatures(point)
        # Use absolute values of curvatures, so that the step goes downhill.
        positive = np.maximum(np.abs(curvatures), FLATTEST * np.abs(curvatures).max())
        direction = axes @ (axes.T @ point.slope / positive)
        decrease = direction @ point.slope
        last, is_lower = point, False
        if decrease >= NEAR**2 * len(direction) and full.num_passes < MOST_PASSES:
            for length in 0.5 ** np.arange(HALVINGS):
                point = full.at(last.entries - jnp.asarray(length * direction, full.start.dtype))
                is_lower = point.energy <= last.energy - DECREASE * length * decrease
                if is_lower:
                    break
        if not is_lower:
            # Near enough, too many passes, or a decrease within rounding.
            return last.center, *full.assess(last, curvatures, axes)


def _of_batch(loss_fn: Loss) -> Callable[[object, object], tuple[jax.Array, optax.Updates]]:
    """Return value and gradient of a loss, which must be a scalar."""

    # The loss is called later, so store the name of the user's function.
    @_check.called(_check.function_name())
    def checked(params: object, batch: object) -> jax.Array:
        with _check.calling("loss_fn", ONE):
            loss = loss_fn(params, batch)
        if getattr(loss, "shape", None) != ():
            _check.fail("loss_fn", ONE, f"one that returns {_check.show(loss)}")
        return loss

    return jax.value_and_grad(checked)


class _Point(NamedTuple):
    """Flat parameters `[entry]`, the centre there, the energy, and its gradient `[entry]`."""

    entries: jax.Array
    center: Center
    energy: float
    slope: np.ndarray


class _AllData:
    """The energy of a posterior with all data, as a function of flat parameters.

    Attributes:
        start: the first parameters, `[entry]`.
        num_passes: passes over the batches so far.
        few: the first batches of a pass.
    """

    def __init__(
        self,
        loss_fn: Loss,
        params: optax.Params,
        batches: Iterable[object],
        sampler: optax.GradientTransformation,
    ):
        self.batches, self.num_passes = batches, 0
        _check_trees.check_params(params, smallest=2)
        params = jax.tree.map(jnp.asarray, params)
        given = _settings.given(sampler, params)
        if "num_data" not in given:
            _check.fail("sampler", "a sampler of this library", _check.show(sampler))
        posterior = Potential(**{x: given[x] for x in Potential._fields if x in given})
        if isinstance(posterior.prior_mean, str):
            posterior = posterior._replace(prior_mean=params)
        self.posterior = posterior
        self.start, self.unravel = ravel_pytree(params)
        self.few: list[object] = []
        of_batch = _of_batch(loss_fn)

        def flat(params: jax.Array, batch: object) -> tuple[jax.Array, jax.Array]:
            loss, gradient = of_batch(self.unravel(params), batch)
            return loss, ravel_pytree(gradient)[0]

        def prior(params: jax.Array) -> jax.Array:
            return potential.prior_energy(posterior, self.unravel(params))

        self.gradient, self.curvature = jax.jit(flat), jax.jit(jax.jacfwd(lambda *x: flat(*x)[1]))
        self.prior = jax.jit(jax.value_and_grad(prior))
        self.prior_curvature = jax.jit(jax.hessian(prior))

    def at(self, place: jax.Array) -> _Point:
        """Evaluate flat parameters in one pass."""
        loss, gradient, rows = 0.0, np.zeros(len(place)), 0
        number = float(self.posterior.num_data)
        for batch, size in self.sized():
            if not self.num_passes and len(self.few) < NUM_BATCHES:
                self.few.append(batch)
            value, slope = self.gradient(place, batch)
            # Sum in float64: G is a small difference of large numbers.
            loss += size * np.float64(value)
            gradient += size * np.asarray(slope, np.float64)
            rows += size
            if rows > number:
                break
        require_all("batches", rows, number)
        self.num_passes += 1
        loss, gradient = loss / rows, gradient / rows
        prior, prior_slope = (np.asarray(x, np.float64) for x in self.prior(place))
        values = np.concatenate([[loss, prior], gradient, prior_slope])
        if self.num_passes == 1 and not np.all(np.isfinite(values)):
            rule = "parameters at which the loss, the prior and their gradients are finite"
            _check.fail("params", rule, f"a loss of {loss:g}")
        center = Center(
            params=self.unravel(place),
            loss=jnp.asarray(loss, place.dtype),
            gradient=self.unravel(jnp.asarray(gradient, place.dtype)),
        )
        energy = potential.energy_change(self.posterior, loss, float(prior))
        slope = potential.energy_change(self.posterior, gradient, prior_slope)
        return _Point(place, center, energy, slope)

    def sized(self) -> Iterator[tuple[object, int]]:
        """Yield the batches of a pass, and their numbers of rows."""
        for batch in self.batches:
            batch = _on_host.as_numeric("batches", batch)
            if not (size := _on_host.num_rows(batch, False)):
                _check.fail("batches", USABLE, _check.show(batch))
            yield batch, size

    def curvatures(self, point: _Point) -> tuple[np.ndarray, np.ndarray]:
        """Return eigenvalues and eigenvectors of the Hessian; values of -1 if it is not finite."""
        total, rows = np.zeros((len(point.entries),) * 2), 0
        for batch, size in self.sized():
            total += size * np.asarray(self.curvature(point.entries, batch), np.float64)
            rows += size
        prior = np.asarray(self.prior_curvature(point.entries), np.float64)
        hessian = potential.energy_change(self.posterior, total / rows, prior)
        if not np.all(np.isfinite(hessian)):
            hessian = -np.eye(len(hessian))
        return np.linalg.eigh((hessian + hessian.T) / 2)

    def assess(self, point: _Point, curvatures: np.ndarray, axes: np.ndarray) -> tuple[str, bool]:
        """Return the reason why a point is a bad centre, or "", and whether it is a mode."""
        if curvatures.min() <= 0:
            return f"`params` is no mode: the curvature there is not positive. {FAR_OFF}", False
        # Coordinates in which the posterior is about standard normal.
        scale = axes / np.sqrt(curvatures)
        distance = np.linalg.norm(point.slope @ scale) / len(scale) ** 0.5
        if distance > FAR:
            how = f"about {distance:.3g} posterior standard deviations away from `params`"
            return f"the mode is {how}. {FAR_OFF}", False
        left, rise = self.at_draws(point, scale)
        why = ""
        if not rise <= LARGEST_RISE:
            why = (
                "the posterior is far from normal: at draws of its normal approximation, the energy"
                f" is {rise:.3g} times as far above that of the mode as expected. Far from the"
                " centre, a control variate adds noise. Try another parametrization."
            )
        elif left > MOST_NOISE:
            why = (
                f"with this centre, draws of the posterior would still have {left:.0%} of the"
                " variance of their gradients. Two gradients per call cost more than that gains:"
                " use the loss itself, or larger batches."
            )
        return why, True

    def at_draws(self, point: _Point, scale: np.ndarray) -> tuple[float, float]:
        """Test a control variate at draws of the normal approximation.

        Returns the remaining share of the variance of the gradients, and the rise of the energy
        relative to a normal posterior.
        """
        random = np.random.default_rng(0)

        def gradients(at: jax.Array) -> np.ndarray:
            return np.array([self.gradient(at, batch)[1] for batch in self.few], float) @ scale

        before, whole, left, rise = gradients(point.entries), 0.0, 0.0, 0.0
        for z in random.normal(size=(NUM_DRAWS, len(scale))):
            draw = point.entries + jnp.asarray(scale @ z, point.entries.dtype)
            here = gradients(draw)
            whole, left = whole + here.var(axis=0).sum(), left + (here - before).var(axis=0).sum()
            rise += (self.at(draw).energy - point.energy) / (z @ z / 2) / NUM_DRAWS
        return left / whole if whole > 0 else 0.0, rise
