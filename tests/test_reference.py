"""`smile`, `psmile` and `mclmc` move as the reference sampler does, call by call."""

import dataclasses
import inspect
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from reference import Chain

import optax_smile
from optax_smile import angle_tuner, mclmc, psmile, published, quantile_tuner, smile

HALF = 32
CALLS = 2 * HALF
# Relative difference of two numbers whose order a rounding may change.
CLOSE = 1e-8
SMALL = {"last": (), "x": (3,), "y": (2, 2)}
MATRICES = {"b": (3,), "stack": (2, 3, 5), "w": (4, 3)}
NETWORK = {"b": (7,), "w": (30, 20)}


class Numbers(NamedTuple):
    """Numbers of the sampler and the loss that vary without another compilation."""

    step: Any
    length: Any
    num_data: Any
    precision: Any
    mean: Any
    temperature: Any
    curvature: Any
    quartic: Any


def quick_psmile(**arguments) -> Any:
    """Make `psmile` with a first window of four gradients."""
    scale: Any = inspect.unwrap(psmile)(**arguments)
    arguments.pop("largest_matrix", None)
    return smile(**arguments, preconditioner=dataclasses.replace(scale, first_window=4))


class Case(NamedTuple):
    """A sampler, and its arguments: for it and for the reference, as a function, and for one."""

    sampler: Any
    both: Any
    sampler_alone: Any = {}
    reference_alone: Any = {}
    shapes: Any = SMALL
    prior: str = "gaussian"
    has_values: bool = True
    dtype: Any = np.float64
    # Number of calls to compare: in long steps of the spectral norm differences grow tenfold per
    # five calls.
    calls: int = CALLS
    bound: float = 1e-10


PLAIN, NOISY = {"decoherence_length": None}, {"decoherence_length": "matched"}
TWO, KEY = {"integrator": "minimal_norm"}, {"key": 0}
WINDOWS = {"scale": "squares", "first_window": 4}
MATRIX, SHAPES = WINDOWS | {"has_matrix": True}, list(MATRICES.values())
ANGLE = {"tuner": "angle"}
ENERGY = {"tuner": quantile_tuner(0.3, 0.05)}
BY_ENERGY = {"tuner": "quantile", "adapt_probability": 0.3, "adapt_rate": 0.05}


def fixed(**others):
    return lambda n: {"step_size": n.step, "decoherence_length": None} | others


def tuned(**others):
    return fixed(reject_quantile=0.9, **TWO, **others)


CASES = {
    "smile": Case(smile, fixed()),
    "smile as published": Case(smile, tuned(), ENERGY, BY_ENERGY),
    "smile in float32": Case(smile, tuned(), ENERGY, BY_ENERGY, dtype=np.float32, bound=1e-4),
    "smile with a schedule": Case(
        smile, lambda n: TWO | PLAIN | {"step_size": lambda step: n.step / (1 + step)}
    ),
    "smile without values": Case(smile, fixed(**TWO), has_values=False),
    "smile with matched noise": Case(smile, lambda n: NOISY, KEY, ANGLE, prior="start"),
    "smile with turning noise": Case(
        smile,
        lambda n: {"decoherence_length": "turning"},
        KEY | {"tuner": angle_tuner(0.2, 40)},
        ANGLE | {"angle": 0.2, "adapt_steps": 40},
    ),
    "mclmc": Case(
        mclmc, lambda n: {"step_size": n.step, "decoherence_length": n.length} | TWO, KEY
    ),
    "mclmc in float32": Case(
        mclmc,
        lambda n: {"step_size": n.step, "decoherence_length": n.length} | TWO,
        KEY,
        dtype=np.float32,
        bound=1e-4,
    ),
    "psmile": Case(quick_psmile, lambda n: NOISY, KEY, ANGLE | MATRIX),
    "psmile with another prior": Case(
        quick_psmile, lambda n: NOISY, KEY, ANGLE | MATRIX, prior="student"
    ),
    "psmile with a diagonal": Case(
        quick_psmile, lambda n: NOISY, KEY | {"largest_matrix": 0}, ANGLE | WINDOWS
    ),
    "psmile by differences": Case(
        quick_psmile, tuned(), ENERGY, BY_ENERGY | MATRIX | {"scale": "differences"}
    ),
    "psmile as published": Case(
        published.psmile,
        lambda n: {"step_size": n.step},
        {},
        {"tuner": "quantile", "reject_quantile": 0.98, "scale": "published"} | TWO,
    ),
    "spectral norm": Case(
        smile,
        lambda n: PLAIN,
        {"norm": "spectral"},
        ANGLE | {"angle": 0.6, "shapes": SHAPES},
        MATRICES,
        calls=24,
        bound=1e-9,
    ),
    "spectral norm with two gradients": Case(
        smile,
        tuned(),
        ENERGY | {"norm": "spectral"},
        BY_ENERGY | {"shapes": SHAPES},
        MATRICES,
    ),
    "a network": Case(quick_psmile, lambda n: NOISY, KEY, ANGLE | WINDOWS, NETWORK),
}


def loss_and_gradient(n, x, batch):
    """In NumPy or JAX, by vectors."""
    roll = jnp.roll if isinstance(x, jax.Array) else np.roll
    r, quartic = x - batch, n.quartic * x**2
    value = ((n.curvature * r / 2 + 0.3 * roll(r, 1)) * r + quartic * x**2 / 4).sum()
    return value, n.curvature * r + 0.3 * (roll(r, 1) + roll(r, -1)) + quartic * x


def student(params):
    return -sum(jnp.sum(jnp.log1p(x**2)) for x in jax.tree.leaves(params))


def posterior_of(case, n):
    """Arguments of the posterior, for the sampler."""
    known = {"num_data": n.num_data, "temperature": n.temperature}
    if case.prior == "student":
        return known | {"prior_precision": 0.0, "log_prior": student}
    precision, mean = n.precision, n.mean
    if case.shapes is SMALL:
        precision = {"last": 0.0, "x": n.precision, "y": 3 * n.precision}
        mean = {"last": 2.0, "x": n.mean, "y": n.mean + np.array([[0.0, 1], [2, 3]])}
    mean = "start" if case.prior == "start" else mean
    return known | {"prior_precision": precision, "prior_mean": mean}


def flat_posterior(case, n, start):
    """The same by vectors, for the reference."""
    given = posterior_of(case, n)
    if given.pop("log_prior", None) is None and case.shapes is SMALL:
        sizes = {name: np.ones(shape) for name, shape in SMALL.items()}
        both = {x: given[x] for x in ("prior_precision", "prior_mean")}
        both["prior_mean"] = n.mean if case.prior == "start" else both["prior_mean"]
        for name, tree in both.items():
            prefix = tree if isinstance(tree, dict) else dict.fromkeys(SMALL, tree)
            given[name] = np.concatenate([np.ravel(sizes[x] * prefix[x]) for x in SMALL])
        given["prior_mean"] = start if case.prior == "start" else given["prior_mean"]
    return given


@cache
def programs(name):
    """Compiled `init` and half of a run."""
    case = CASES[name]
    like = {k: jnp.zeros(shape, case.dtype) for k, shape in case.shapes.items()}
    unravel_like = ravel_pytree(like)[1]

    def unravel(x):
        return unravel_like(x.astype(case.dtype))

    def sampler(n):
        return case.sampler(**posterior_of(case, n), **case.both(n), **case.sampler_alone)

    def begin(n, start):
        return unravel(start), sampler(n).init(unravel(start))

    def run(n, carry, inputs):
        def call(carry, given):
            (params, state), (batch, factor, offset, extra) = carry, given
            x = ravel_pytree(params)[0]
            value, gradient = loss_and_gradient(n, x, batch)
            gradient = factor * gradient + offset * (jnp.arange(x.size) == 1)
            loss = {"value": value + extra} if case.has_values else {}
            updates, after = sampler(n).update(unravel(gradient), state, params, **loss)
            seen = x, optax_smile.stats(after), optax.tree.get(state, "key")
            return (optax.apply_updates(params, updates), after), seen

        return jax.lax.scan(call, carry, inputs)

    return jax.jit(begin), jax.jit(run)


@cache
def noises(shapes, dtype):
    """The noise of calls whose states have these keys, `[call, entry]`."""
    tree = {name: jnp.zeros(shape, dtype) for name, shape in shapes}
    chain = mclmc(1.0, num_data=1, decoherence_length=1.0, prior_precision=0.0, key=0)

    def signs(key):
        """The displacement of a chain at rest."""
        state = optax.tree.set(chain.init(tree), key=key)
        return jnp.sign(ravel_pytree(chain.update(tree, state, tree)[0])[0])

    def normal(key):
        leaves, structure = jax.tree.flatten(tree)
        keys = jax.random.split(jax.random.split(jax.random.wrap_key_data(key))[1], len(leaves))
        drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        return ravel_pytree(jax.tree.unflatten(structure, drawn))[0]

    return jax.jit(jax.vmap(signs if shapes == tuple(NETWORK.items()) else normal))


# A factor and an offset of the gradient, and an offset of the loss.
ODDITIES = {
    "outlying": (1e6, 0.0, 0.0),
    "gone": (0.0, 0.0, 0.0),
    "nan": (1.0, np.nan, 0.0),
    "infinite": (1.0, -np.inf, 0.0),
    "higher": (1.0, 0.0, 1e5),
    "lower": (1.0, 0.0, -1e5),
    "loss nan": (1.0, 0.0, np.nan),
    "loss infinite": (1.0, 0.0, np.inf),
}


def between(low, high):
    return st.floats(np.log(low), np.log(high)).map(np.exp)


NUMBERS = st.builds(
    Numbers,
    step=between(0.01, 0.5),
    length=between(0.1, 10),
    num_data=between(1, 1e4),
    precision=between(0.01, 10),
    mean=st.floats(-1, 1),
    temperature=between(0.1, 3),
    curvature=between(0.7, 3),
    quartic=between(1e-3, 0.3),
)
# The first call, the kind and the number of some.
ODD = st.lists(
    st.tuples(st.integers(0, CALLS - 1), st.sampled_from([*ODDITIES]), st.integers(1, 7)),
    max_size=3,
)


def compare(name, n, seed, noise, odd):
    """Run both, and yield for each call the chain of the reference, `stats`, and both places."""
    case, rng = CASES[name], np.random.default_rng(seed)
    size = sum(int(np.prod(shape)) for shape in case.shapes.values())
    start = rng.standard_normal(size).astype(case.dtype).astype(float)
    batches, changes = noise * rng.standard_normal((CALLS, size)), np.tile([1.0, 0, 0], (CALLS, 1))
    for first, kind, number in odd:
        changes[first : first + number] = ODDITIES[kind]
    inputs, drawn = (batches, *changes.T), [None] * CALLS
    with jax.enable_x64(True):
        begin, run = programs(name)
        carry, halves = begin(Numbers(*map(np.float64, n)), start), []
        for part in (slice(HALF), slice(HALF, CALLS)):
            # Through the host, as a checkpoint.
            carry = jax.tree.map(np.asarray, carry)
            carry, seen = run(Numbers(*map(np.float64, n)), carry, tuple(x[part] for x in inputs))
            halves.append(seen)
        positions, stats, keys = jax.tree.map(lambda *x: np.concatenate(x), *halves)
        if keys is not None:
            assert len(np.unique(keys, axis=0)) == CALLS
            drawn = np.asarray(noises(tuple(case.shapes.items()), case.dtype)(keys), float)

    arguments = flat_posterior(case, n, start) | case.both(n) | case.reference_alone
    x, chain = start, Chain(start, eps=np.finfo(case.dtype).eps, **arguments)
    compared = [given[: case.calls] for given in inputs]
    for call, (batch, factor, offset, extra) in enumerate(zip(*compared, strict=True)):
        value, gradient = loss_and_gradient(n, x, batch)
        gradient = factor * gradient + offset * (np.arange(size) == 1)
        if case.prior == "student":
            value += np.sum(np.log1p(x**2)) / n.num_data
            gradient += 2 * x / (1 + x**2) / n.num_data
        moved = chain.call(gradient, value + extra if case.has_values else None, x, drawn[call])
        yield chain, jax.tree.map(lambda leaf, at=call: leaf[at], stats), positions[call], x
        x = x + moved


def assert_alike(name, *run) -> bool:
    """The same places, decisions and averages after every call; whether all of them are compared.

    A comparison whose sides agree to a rounding may come out either way. What follows is left out.
    """
    case, largest = CASES[name], 0.0
    for chain, got, place, x in compare(name, *run):
        largest = max(largest, np.abs(x).max())
        np.testing.assert_allclose(place, x, rtol=0, atol=case.bound * largest)
        if chain.closest < CLOSE:
            return False
        counted = got.accepted, got.step_end, got.num_rejected, got.num_nonfinite, got.num_outlying
        expected = chain.accepted, chain.ends, chain.rejected, chain.nonfinite, chain.outlying
        assert tuple(map(int, counted)) == tuple(map(int, expected))
        measured = {
            "step_size": chain.length,
            "energy_change": chain.gained if chain.known else np.nan,
            "energy_mean": chain.energy_mean,
            "energy_std": chain.energy_std,
            "change_share": chain.share(),
            "descent": chain.descent,
            "width": chain.scale.last_width if chain.scale.has_matrix else np.nan,
        }
        rounding = 100 * case.bound
        for field, number in measured.items() if case.dtype == np.float64 else ():
            atol = rounding * max(1, chain.energy_mean)
            np.testing.assert_allclose(getattr(got, field), number, rounding, atol, err_msg=field)
    return True


@pytest.mark.filterwarnings("ignore:overflow|invalid|divide:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_call_is_that_of_the_reference(name, request):
    """A run in two pieces, with gradients and losses of all kinds."""
    whole, number = [], 200 if request.config.getoption("--full") else 12

    @settings(
        deadline=None,
        max_examples=number,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
    )
    @given(n=NUMBERS, seed=st.integers(0, 2**32), noise=between(0.01, 3), odd=ODD)
    def check(n, seed, noise, odd):
        whole.append(assert_alike(name, n, seed, noise, odd))

    check()
    assert np.mean(whole) >= 0.99
