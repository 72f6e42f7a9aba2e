"""SMILE and pSMILE: stochastic microcanonical Langevin samplers as Optax transformations."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _call, _check, _energy, _settings, _tree, _turning, potential
from optax_smile._state import LastCall, no_call
from optax_smile.stages import guardrail, momentum, preconditioner
from optax_smile.stages import tuner as tuning

# Weight of the old value in the averages of the energy error; 1 - beta in the paper.
ENERGY_DECAY = 0.99
# Energies enter the averages winsorized at this quantile; where there is none for outliers.
WINSOR_QUANTILE = 0.98
DEFAULT_TUNER = tuning.angle_tuner()
# Sommer et al. 2026, section 3 and appendix: `psmile(1e-3, num_data=n, **PUBLISHED["psmile"])`.
_NAIVE: dict[str, Any] = {"integrator": "minimal_norm", "decoherence_length": None}
_TUNED: dict[str, Any] = {
    "tuner": tuning.quantile_tuner(),
    "reset_quantile": 0.98,
    "reset_momentum": "zero",
}
_SCALED: dict[str, Any] = {"noise_clip": (1e-2, 1e4)}
PUBLISHED: dict[str, dict[str, Any]] = {
    "smile": _NAIVE | _TUNED,
    "psmile": _NAIVE | _TUNED | _SCALED,
    "smile_naive": _NAIVE,
    "psmile_naive": _NAIVE | _SCALED,
}


class SmileState(NamedTuple):
    """State of `smile`, `psmile` and their naive forms: the four stages and what joins them.

    Attributes:
        preconditioner: averages over the gradients of the kept calls; None without one.
        momentum: direction and place inside the open step.
        tuner: state of the tuner, with the field `step_size_factor`.
        guardrail: counters of undone steps.
        energies: averages of |energy change| over all judged steps.
        turns: average of what the gradients of the kept calls turn the momentum by.
        open_step: what its energy is computed from.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for explicit noise and fresh momenta; None if neither is used.
        last_call: what the last call found out.
    """

    preconditioner: preconditioner.PreconditionerState | None
    momentum: momentum.MomentumState
    tuner: Any
    guardrail: guardrail.GuardrailState
    energies: _energy.EnergyAverages
    turns: _turning.TurnAverage
    open_step: _energy.OpenStep
    num_steps: jax.Array
    key: jax.Array | None
    last_call: LastCall

    @property
    def calls_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return 1 if self.momentum.anchor is None else 2

    def stats(self) -> dict[str, jax.Array]:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        return self.last_call._asdict() | {
            "step_size": self.momentum.step_length,
            "energy_mean": self.energies.energy_mean,
            "energy_std": self.energies.energy_std,
            "num_resets": self.guardrail.num_resets,
            "num_nonfinite": self.guardrail.num_nonfinite,
        }

    def last_accepted(self, params: optax.Params) -> optax.Params:
        """Start of the open step, see `optax_smile.last_accepted`."""
        return momentum.step_start(self.momentum, params, preconditioner.scale(self.preconditioner))


class _Sums(NamedTuple):
    """Inner products over all parameters. None needs another: they are one pass over the trees.

    `gradient` is the whitened one, `scale` its scale, both up to the normalization of the scale.
    """

    direction_square: jax.Array
    direction_dot_gradient: jax.Array
    gradient_square: jax.Array
    scale_square: jax.Array
    params_square: jax.Array


def _measure(direction, gradient, scale, params) -> _Sums:
    return _Sums(
        direction_square=_tree.inner(direction, direction),
        direction_dot_gradient=_tree.inner(direction, gradient),
        gradient_square=_tree.inner(gradient, gradient),
        scale_square=jnp.ones(()) if scale is None else _tree.inner(scale, scale),
        params_square=_tree.inner(params, params),
    )


def _energy_error(
    posterior: potential.Potential,
    step: _energy.OpenStep,
    step_end: jax.Array,
    closing_kick: jax.Array,
    sums: _Sums,
    value: jax.Array | None,
) -> _energy.EnergyError:
    """Energy which the step that ends here gained, where both of its ends had a value."""
    if value is None:
        return _energy.error(None, step_end, (*sums, closing_kick))
    loss_change = value - step.opening_value
    change = potential.energy_change(posterior, loss_change, step.prior_change)
    change += step.kinetic_change + closing_kick
    return _energy.error(change, step_end & step.opening_known, (*sums, closing_kick, value))


def microcanonical(
    name: str,
    step_size: float | jax.Array | optax.Schedule | None,
    posterior: potential.Potential,
    *,
    integrator: str,
    decoherence_length: float | jax.Array | str | None,
    key: jax.Array | None,
    tuner: tuning.Tuner | None = None,
    reset_quantile: float | None = None,
    reset_momentum: str = "zero",
    noise_decay: float | None = None,
    centered: bool = True,
    noise_clip: tuple[float, float] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Build any sampler of the family; `noise_decay=None` leaves the preconditioner out."""
    tuner = tuning.check(name, tuner, step_size)
    potential.check(name, posterior)
    scheme = momentum.check(name, integrator, decoherence_length, key)
    _check.key(name, key)
    guardrail.check(name, reset_quantile, reset_momentum, key)
    preconditioner.check_clip(name, noise_clip)
    uses_energy = tuner.uses_energy or reset_quantile is not None
    uses_key = decoherence_length is not None or reset_momentum == "refresh"
    cap = WINSOR_QUANTILE if reset_quantile is None else reset_quantile

    def step_size_at(count: jax.Array) -> Any:
        if step_size is None:
            return 1.0
        return step_size(count) if callable(step_size) else step_size

    def init(params: Any) -> Any:
        _tree.check_params(name, params, smallest=2)
        potential.check_prior(name, posterior, params)
        dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
        start = tuner.init(dtype)
        return SmileState(
            preconditioner=preconditioner.init(params, noise_decay, centered, noise_clip),
            momentum=momentum.init(params, scheme, step_size_at(count) * start.step_size_factor),
            tuner=start,
            guardrail=guardrail.init(dtype),
            energies=_energy.init(dtype),
            turns=_turning.init(dtype),
            open_step=_energy.no_step(dtype),
            num_steps=count,
            key=jax.random.clone(key) if uses_key and key is not None else None,
            last_call=no_call(dtype),
        )

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del extra_args
        dtype = state.momentum.step_length.dtype
        value = _call.check(name, updates, params, value, state.momentum.direction, dtype)
        if value is None and uses_energy:
            _warn_without_value(name)
        key, noise_key, reset_key = _split(state.key, reset_momentum == "refresh")
        before = state.momentum

        # 1 preconditioner: the gradient in coordinates in which its noise is isotropic.
        gradient = potential.gradient(posterior, updates, params)
        noise = preconditioner.observe(state.preconditioner, gradient, noise_decay)
        scale = preconditioner.relative_scale(noise)
        gradient = preconditioner.whiten(gradient, scale)
        sums = _measure(before.direction, gradient, scale, params)
        noise = preconditioner.normalize(noise, sums.scale_square)

        # 2 momentum: the kick that closes the last step, and the energy which that step gained.
        heading = momentum.heading(before, *sums[:3], preconditioner.norm(noise))
        heading, closing_kick = momentum.close(before, scheme, heading)
        step_end = momentum.is_step_end(before, scheme)
        error = _energy_error(posterior, state.open_step, step_end, closing_kick, sums, value)

        # 3 tuner and 4 guardrail: how long the next step is, and whether this one is undone.
        guard, undo = guardrail.judge(state.guardrail, state.energies, error, reset_quantile)
        base, calls = step_size_at(state.num_steps), state.last_call.num_calls
        resolution = _call.resolution(sums.params_square)
        turn_rate = heading.gradient_norm / (_tree.size(params) - 1)
        turns = _turning.observe(state.turns, turn_rate, ~undo)
        evidence = tuning.Evidence(
            error, state.energies, turn_rate, turns, calls, jnp.asarray(base, dtype), resolution
        )
        tuned = tuner.update(state.tuner, evidence)
        step_length = base * tuned.step_size_factor * guard.step_backoff

        # 2 momentum: kick and drift on from here, or stand again where the undone step began.
        before, heading = momentum.diffuse(
            before,
            scheme,
            heading,
            gradient,
            decoherence_length,
            turns.mean_turn_rate,
            noise_key,
        )
        after, opening_kick = momentum.advance(
            before, scheme, heading, step_length, gradient, params
        )
        back = momentum.undone(state.momentum, step_length, reset_momentum == "refresh")
        after, noise = _tree.where(undo, (back, state.preconditioner), (after, noise))
        scale = preconditioner.scale(noise)
        move = momentum.move(undo, state.momentum, after, scheme, params, scale)
        fresh = guardrail.fresh_momentum(undo, after.direction, reset_momentum, reset_key)

        opens = momentum.opens_step(before, scheme)
        prior_change = potential.prior_change(posterior, params, move)
        open_step = _energy.proceed(
            state.open_step, opens, value, closing_kick, opening_kick, prior_change
        )
        return move, SmileState(
            preconditioner=noise,
            momentum=after._replace(direction=fresh),
            tuner=tuned,
            guardrail=guard,
            energies=_energy.observe(state.energies, error, ENERGY_DECAY, cap),
            turns=turns,
            open_step=_tree.where(undo, state.open_step, open_step),
            num_steps=state.num_steps + (opens & ~undo),
            key=key,
            last_call=LastCall(
                energy_change=error.change,
                energy_level=jnp.full_like(calls, value is not None),
                accepted=~undo,
                step_end=step_end,
                is_sample=jnp.ones_like(undo),
                below_resolution=after.step_length < resolution,
                num_calls=calls + 1,
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _split(key: jax.Array | None, refreshes: bool):
    """Keys for the state, the explicit noise and a fresh momentum; None for none."""
    if key is None:
        return None, None, None
    return jax.random.split(key, 3) if refreshes else (*jax.random.split(key), None)


def _warn_without_value(where: str):
    warnings.warn(
        f"`{where}` got no `value`: without energies `quantile_tuner` keeps the step size and"
        " `reset_quantile` undoes non-finite steps alone. Pass `value=loss` to `update`, or leave"
        " both out.",
        stacklevel=3,
    )


@_settings.recorded
def smile(
    step_size: float | jax.Array | optax.Schedule | None = None,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    temperature: float | jax.Array = 1.0,
    integrator: str = "leapfrog",
    tuner: tuning.Tuner | None = DEFAULT_TUNER,
    reset_quantile: float | None = None,
    reset_momentum: str = "zero",
    decoherence_length: float | jax.Array | str | None = momentum.MATCHED,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sample with stochastic microcanonical Langevin dynamics, which find their own step size.

    The chain moves with constant speed through the parameters; the mini-batch gradient of the
    energy U turns its direction u, and so do the noise of that gradient and as much isotropic
    noise. One leapfrog step with step size eps and d parameters is

        kick   u <- (u + (sinh D + p (cosh D - 1)) e) / (cosh D + p sinh D) for eps / 2
        drift  theta <- theta + eps u
        kick   again for eps / 2, with the gradient and batch of the new theta

        e = -grad U / |grad U|, p = e . u, D = (eps / 2) |grad U| / (d - 1)
        U = (num_data * mean_loss + prior_precision / 2 |theta|^2) / temperature

    and every call of `update` closes one step and opens the next: one gradient per step. As
    published, with the tuner, the outlier test and the noise of the paper, it is
    `smile(1e-3, num_data=..., **optax_smile.PUBLISHED["smile"])`.

    Args:
        step_size: Euclidean length of one step of the whole parameter vector, > 0: a number or an
            Optax schedule of the number of steps. About sqrt(d) times what one weight moves.
            Needed with tuners that start from it: `quantile_tuner`, None. `angle_tuner` has its
            own; a number makes no difference to it and a schedule is an error.
        num_data: number of terms that the mean loss averages, >= 1: examples, or tokens. A summed
            loss cannot be detected and makes the posterior too narrow by that factor.
        prior_precision: of the Gaussian prior around 0, >= 0; a number or a prefix of the
            parameter tree. Leave weight decay and penalties out of the loss.
        temperature: of the posterior, > 0; 1 is Bayes.
        integrator: `"leapfrog"`, or `"minimal_norm"` as published, with two calls per step.
        tuner: rule for the step size: `angle_tuner()`, `quantile_tuner()` as published, or None,
            which keeps `step_size`.
        reset_quantile: a step is undone if |energy change| exceeds this quantile of a Gamma fit to
            those before it, in (0, 1); None undoes non-finite steps alone.
        reset_momentum: after an undone step `"zero"` (as published: the chain starts again down
            the gradient) or `"refresh"` (in a random direction).
        decoherence_length: adds isotropic noise after each step, by which u forgets itself over
            this distance, > 0; a chain at rest then starts in a random direction. `"matched"`: as
            much as the gradients turn u, which halves what anisotropic gradient noise does to the
            posterior. None adds none, as published.
        key: JAX key, needed for `decoherence_length` and `"refresh"`. Chains under `vmap` get keys
            of their own by `optax_smile.ensemble.init(sampler, params, key=key)`.

    Returns:
        An Optax transformation, the last of a chain. `update(grads, state, params, value=loss)`
        takes the mean loss that belongs to `grads`, for the energy errors in `stats`. Only
        `quantile_tuner` and `reset_quantile` need it, and a warning says so when a call without it
        is traced.

    Raises:
        ValueError: an argument out of range; in `init` a tree that is not float32 or float64 or
            has fewer than two parameters; in `update` missing params, a tree that changed, a
            `value` that is not a scalar. Numerical trouble never raises: it is undone and counted.

    Cost: one gradient per call; one parameter-sized array of state, two with `"minimal_norm"`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> loss_fn = lambda params: jnp.sum(params["w"] ** 2) / 2
        >>> tx = optax_smile.smile(num_data=100, key=jax.random.key(0))
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> for _ in range(20):
        ...     loss, grads = jax.value_and_grad(loss_fn)(params)
        ...     updates, state = tx.update(grads, state, params, value=loss)
        ...     params = optax.apply_updates(params, updates)
        >>> int(optax_smile.stats(state)["num_calls"])
        20

    Source: Sommer et al., Stochastic microcanonical Langevin ensembles, ICML 2026, algorithm 1.
    Differs: leapfrog with a fresh batch per gradient instead of two gradients on one batch; the
    sign of e; a rejected point leaves neither its gradient nor its value behind. Step size and
    explicit noise: ours, benchmarks/README.md has the evidence.
    """
    return microcanonical(
        "smile",
        step_size,
        potential.Potential(num_data, prior_precision, temperature),
        integrator=integrator,
        tuner=tuner,
        reset_quantile=reset_quantile,
        reset_momentum=reset_momentum,
        decoherence_length=decoherence_length,
        key=key,
    )


@_settings.recorded
def psmile(
    step_size: float | jax.Array | optax.Schedule | None = None,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    temperature: float | jax.Array = 1.0,
    integrator: str = "leapfrog",
    tuner: tuning.Tuner | None = DEFAULT_TUNER,
    reset_quantile: float | None = None,
    reset_momentum: str = "zero",
    decoherence_length: float | jax.Array | str | None = momentum.MATCHED,
    noise_decay: float = preconditioner.NOISE_DECAY,
    centered: bool = True,
    noise_clip: tuple[float, float] | None = None,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sample like `smile`, in coordinates in which the mini-batch noise is isotropic.

    Anisotropic noise biases the dynamics of `smile`. Moving averages over the gradients give the
    standard deviation sigma of the noise in every coordinate; gradients are divided by
    s = sigma sqrt(d) / |sigma|, and displacements are divided by s on their way back:
    theta <- theta + eps u / s. The first steps have s = 1, and so has isotropic noise. Where there
    is no noise to measure s follows the gradient itself and biases the chain (by a tenth in the
    variances with full batches and a noise_decay of .99): take `smile` there.

    Args:
        step_size: length of one step in the scaled coordinates, see `smile`.
        num_data: see `smile`; likewise the arguments not named here.
        prior_precision: see `smile`.
        temperature: see `smile`.
        integrator: see `smile`.
        tuner: see `smile`.
        reset_quantile: see `smile`.
        reset_momentum: see `smile`.
        decoherence_length: see `smile`.
        noise_decay: weight of the old value in the averages, in (0, 1]; with 1 they never move
            and the sampler is `smile`.
        centered: measure the noise about the moving mean of the gradient, as published; otherwise
            its second moment, which saves one parameter-sized array.
        noise_clip: smallest and largest sigma, in nats per unit length, 0 < smallest < largest, as
            published (1e-2, 1e4), which depends on `num_data`; None: 1e-2 and 1e2 times the root
            mean square of sigma.
        key: see `smile`.

    Returns:
        An Optax transformation, see `smile`.

    Raises:
        ValueError: see `smile`.

    Cost: one gradient per call; three parameter-sized arrays of state, one fewer with
    `centered=False`, one more with `"minimal_norm"`.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.psmile(num_data=50_000, key=jax.random.key(0))
        >>> state = tx.init({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})

    Source: Sommer et al., ICML 2026, section 3.2 and algorithm 1. Differs: as `smile` and
    `scale_by_gradient_noise`.
    """
    return microcanonical(
        "psmile",
        step_size,
        potential.Potential(num_data, prior_precision, temperature),
        integrator=integrator,
        tuner=tuner,
        reset_quantile=reset_quantile,
        reset_momentum=reset_momentum,
        decoherence_length=decoherence_length,
        noise_decay=preconditioner.check("psmile", noise_decay),
        centered=centered,
        noise_clip=noise_clip,
        key=key,
    )


@_settings.recorded
def smile_naive(
    step_size: float | jax.Array | optax.Schedule,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    temperature: float | jax.Array = 1.0,
    integrator: str = "leapfrog",
    decoherence_length: float | jax.Array | str | None = None,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sample like `smile` with the step size as given and no test of the energy error.

    What to take for small networks with a step size known to work, and where a loop cannot pass
    `value`. A step that ends in a non-finite number is undone here, too.

    Args:
        step_size: see `smile`; likewise all others.
        num_data: see `smile`.
        prior_precision: see `smile`.
        temperature: see `smile`.
        integrator: see `smile`.
        decoherence_length: see `smile`.
        key: see `smile`.

    Returns:
        An Optax transformation, see `smile`.

    Raises:
        ValueError: see `smile`.

    Cost: as `smile`.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> state = optax_smile.smile_naive(1e-3, num_data=500).init(jnp.zeros(7))

    Source: Sommer et al., ICML 2026, section 3.1.
    """
    return microcanonical(
        "smile_naive",
        step_size,
        potential.Potential(num_data, prior_precision, temperature),
        integrator=integrator,
        decoherence_length=decoherence_length,
        key=key,
    )


@_settings.recorded
def psmile_naive(
    step_size: float | jax.Array | optax.Schedule,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    temperature: float | jax.Array = 1.0,
    integrator: str = "leapfrog",
    decoherence_length: float | jax.Array | str | None = None,
    noise_decay: float = preconditioner.NOISE_DECAY,
    centered: bool = True,
    noise_clip: tuple[float, float] | None = None,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sample like `psmile` with the step size as given and no test of the energy error.

    Args:
        step_size: see `psmile`; likewise all others.
        num_data: see `psmile`.
        prior_precision: see `psmile`.
        temperature: see `psmile`.
        integrator: see `psmile`.
        decoherence_length: see `psmile`.
        noise_decay: see `psmile`.
        centered: see `psmile`.
        noise_clip: see `psmile`.
        key: see `psmile`.

    Returns:
        An Optax transformation, see `smile`.

    Raises:
        ValueError: see `smile`.

    Cost: as `psmile`.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> state = optax_smile.psmile_naive(1e-3, num_data=500).init(jnp.zeros(7))

    Source: Sommer et al., ICML 2026, section 3.2.
    """
    return microcanonical(
        "psmile_naive",
        step_size,
        potential.Potential(num_data, prior_precision, temperature),
        integrator=integrator,
        decoherence_length=decoherence_length,
        noise_decay=preconditioner.check("psmile_naive", noise_decay),
        centered=centered,
        noise_clip=noise_clip,
        key=key,
    )
