"""One posterior that is known, through every public way to sample it.

Bayesian linear regression of two weights and a bias on 240 rows with unit noise; the posterior is
Gaussian. A way is a loop, a wrapper or a function of the library that a user may choose. None of
them may change the posterior, so all are compared with the same numbers. Batches have 60 rows
unless the way says otherwise.

    python benchmarks/correctness/ways.py --output benchmarks/results/ways.jsonl
"""

import functools
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

from benchmarks import records
from benchmarks.tabulated.gaussians import ways

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile
from optax_smile import interop

NUM_ROWS, SIZE, NUM_CHAINS, NUM_STEPS, THIN = 240, 60, 32, 4_000, 4
NUM_WARMUP = NUM_STEPS // 8
# Of a single chain, which a loop in Python advances.
LONGER = 10
# A large angle, with which short runs are precise.
TUNER: Any = optax_smile.angle_tuner(0.25)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM_ROWS, 2)).astype(np.float32)
Y = (X @ [1.0, -2.0] + 0.5 + RNG.normal(size=NUM_ROWS)).astype(np.float32)
DESIGN = np.column_stack([X, np.ones(NUM_ROWS)]).astype(float)
COVARIANCE = np.linalg.inv(DESIGN.T @ DESIGN + np.eye(3))
MEAN = COVARIANCE @ DESIGN.T @ Y
Way = Callable[[], Any]
WAYS: dict[str, Way] = {}


def way(name: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function under a name, with these arguments."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        WAYS[name] = functools.partial(function, **options)
        return function

    return enter


def sampler(make: Callable[..., Any] = optax_smile.psmile, **options: Any) -> Any:
    """The sampler of most ways."""
    tuner = {} if "step_size" in options else {"tuner": TUNER}
    return make(**{"num_data": NUM_ROWS, "key": 0, **tuner, **options})


def loss(params: Any, batch: Any) -> jax.Array:
    """Minus the mean log likelihood, up to a constant."""
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2) / 2


def noisy(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A loss with noise of its own."""
    return loss(params, batch) + 1e-3 * jax.random.normal(key)


def counting(params: Any, batch: Any, aux: Any) -> tuple[jax.Array, Any]:
    """A loss with a state."""
    return loss(params, batch), {"seen": aux["seen"] + 1}


def starts() -> Any:
    """Points near the posterior, one for each chain."""
    points = np.random.default_rng(1).multivariate_normal(MEAN, COVARIANCE, NUM_CHAINS)
    return {
        "w": jnp.asarray(points[:, :2], jnp.float32),
        "b": jnp.asarray(points[:, 2], jnp.float32),
    }


def flat(draws: Any) -> np.ndarray:
    """Parameters `[chain, draw, ...]` as `[chain, draw, 3]`, weights first."""
    w, b = np.asarray(draws["w"]), np.asarray(draws["b"])
    return np.concatenate([w.reshape(*w.shape[:2], 2), b.reshape(*b.shape[:2], 1)], axis=2)


def fixed(number: int) -> list[Any]:
    """A list of this number of batches."""
    return list(zip(np.split(X, number), np.split(Y, number), strict=True))


class Passes:
    """Batches of permuted rows, a new order in each pass; Ctrl-C at a batch."""

    def __init__(self, reuse: bool = False, interrupt: int = 0):
        self.size, self.rng, self.reuse = SIZE, np.random.default_rng(2), reuse
        self.left = interrupt

    def __iter__(self) -> Iterator[Any]:
        buffer = np.empty((self.size, 2), np.float32), np.empty(self.size, np.float32)
        for rows in self.rng.permutation(NUM_ROWS).reshape(-1, self.size):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
            if self.reuse:
                buffer[0][:], buffer[1][:] = X[rows], Y[rows]
                yield buffer
            else:
                yield X[rows], Y[rows]


def shuffled(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of permuted passes, `[batch, row, ...]`."""
    rng = np.random.default_rng(3)
    rows = np.concatenate([rng.permutation(NUM_ROWS) for _ in range(number * SIZE // NUM_ROWS)])
    return X[rows].reshape(-1, SIZE, 2), Y[rows].reshape(-1, SIZE)


# Loops of the user's own.


def stepper(tx: Any, value: bool, params: bool) -> Callable[..., Any]:
    """One call of `update` of one chain, and the draw after it."""

    def step(point, state, batch):
        loss_now, grads = jax.value_and_grad(loss)(point, batch)
        given = {"value": loss_now} if value else {}
        updates, state = tx.update(grads, state, point if params else None, **given)
        point = optax.apply_updates(point, updates)
        return point, state, optax_smile.last_accepted(state, point)

    return step


@way("own loop: scan, value", value=True)
@way("own loop: scan, gradients alone")
@way("own loop: scan, track_params", params=False, wrap=optax_smile.tracked)
@way("own loop: clip before", wrap=lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx))
@way("own loop: masked bias, all sampled", wrap=lambda tx: optax.masked(tx, {"w": True, "b": True}))
@way("own loop: apply_if_finite", wrap=lambda tx: optax.apply_if_finite(tx, 5))
@way("own loop: minimal norm, shuffled", calls=2, integrator="minimal_norm")
@way("own loop: smile", make=optax_smile.smile)
@way("own loop: sgld", make=optax_smile.sgld, step_size=2e-4, steps=4 * NUM_STEPS)
@way("own loop: sghmc", make=optax_smile.sghmc, step_size=1e-2, friction=0.2)
def scanned(
    wrap=lambda tx: tx, value=False, params=True, calls=1, steps=NUM_STEPS, **options
) -> np.ndarray:
    """All chains in a scan over a vmap."""
    tx = wrap(sampler(**options))
    step = jax.vmap(stepper(optax.with_extra_args_support(tx), value, params), (0, 0, None))

    def body(carry, batch):
        *carry, draw = step(*carry, batch)
        return tuple(carry), draw

    states = optax_smile.parallel.init(tx, starts(), key=jax.random.key(1))
    batches = jax.tree.map(jnp.asarray, shuffled(calls * steps))
    draws = jax.jit(lambda *x: jax.lax.scan(body, x, batches)[1])(starts(), states)
    return flat(jax.tree.map(lambda x: np.moveaxis(x, 0, 1)[:, steps // 8 :: THIN], draws))


def long_chain(advance: Callable[[Any], Any], draw: Callable[[], Any], steps: int) -> np.ndarray:
    """Advance one long chain in a loop of Python, and cut it, after burn-in, into pseudo-chains.

    `draw()` returns weights and bias.
    """
    draws = []
    for count, batch in enumerate(zip(*shuffled(steps), strict=True)):
        advance(batch)
        if count >= steps // 16 and count % THIN == 0:
            draws.append(np.concatenate([np.ravel(x) for x in draw()]))
    return pieces(np.array(draws))


def pieces(draws: np.ndarray) -> np.ndarray:
    """Cut the draws `[draw, 3]` of one chain."""
    return draws[len(draws) % NUM_CHAINS :].reshape(NUM_CHAINS, -1, 3)


@way("own loop: jit in Python", form=jax.jit)
@way("own loop: inject_hyperparams", form=jax.jit, inject=True)
@way("own loop: eager", form=lambda update: update)
def by_hand(form: Callable[..., Any], inject=False) -> np.ndarray:
    """Plain Optax."""
    tx = sampler()
    if inject:
        tx = optax.inject_hyperparams(optax_smile.psmile, static_args="tuner")(
            num_data=NUM_ROWS, key=0, tuner=TUNER
        )
    point = jax.tree.map(lambda x: x[0], starts())
    state, gradient, update = tx.init(point), jax.jit(jax.grad(loss)), form(tx.update)

    def advance(batch):
        nonlocal point, state
        updates, state = update(gradient(point, batch), state, point)
        point = optax.apply_updates(point, updates)

    def draw():
        last = optax_smile.last_accepted(state, point)
        return last["w"], last["b"]

    return long_chain(advance, draw, LONGER * NUM_STEPS)


@way("own loop: Equinox, filter_jit with the sampler as an argument")
def equinox() -> np.ndarray:
    """The recipe of Equinox."""
    import equinox as eqx

    @eqx.filter_jit
    def step(model, state, batch, tx):
        x, y = batch
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x)[:, 0] - y) ** 2) / 2)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    model, tx = eqx.nn.Linear(2, 1, key=jax.random.key(0)), sampler()
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def advance(batch):
        nonlocal model, state
        model, state = step(model, state, batch, tx)

    def draw():
        last = optax_smile.last_accepted(state, eqx.filter(model, eqx.is_inexact_array))
        return last.weight, last.bias

    return long_chain(advance, draw, LONGER * NUM_STEPS)


@way("own loop: Flax nnx")
def nnx() -> np.ndarray:
    """The recipe of Flax nnx."""
    from flax import nnx

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, sampler(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        of_model = lambda model: jnp.mean((model(batch[0])[:, 0] - batch[1]) ** 2) / 2  # noqa: E731
        value, grads = nnx.value_and_grad(of_model)(model)
        optimizer.update(model, grads, value=value)

    def draw():
        weights = nnx.as_pure(nnx.state(model, nnx.Param))
        last = optax_smile.last_accepted(nnx.as_pure(optimizer.opt_state), weights)
        return last["kernel"], last["bias"]

    return long_chain(lambda batch: step(model, optimizer, batch), draw, LONGER * NUM_STEPS)


# Functions of the library.

QUIET: dict[str, Any] = {"progress": False, "check": False, "steps_per_dispatch": THIN}


@way("sample: one batch", batches=1)
@way("sample: shuffled passes", batches=Passes)
@way("sample: shuffled passes, reused buffer", batches=lambda: Passes(reuse=True))
@way("sample: list of 4", batches=4)
@way("sample: list of 3", batches=3)
@way("sample: list of 4, one step a call", batches=4, options={"steps_per_dispatch": 1})
@way("sample: minimal norm, list of 1", batches=1, integrator="minimal_norm")
@way("sample: minimal norm, list of 2", batches=2, integrator="minimal_norm")
@way("sample: minimal norm, list of 3", batches=3, integrator="minimal_norm")
@way("sample: minimal norm, list of 4", batches=4, integrator="minimal_norm")
@way("sample: minimal norm, list of 5", batches=5, integrator="minimal_norm")
@way("sample: minimal norm, list of 6", batches=6, integrator="minimal_norm")
@way(
    "sample: minimal norm, batch per step, list of 4",
    batches=4,
    integrator="minimal_norm",
    options={"batch_per": "step"},
)
@way("sample: batch per chain", batches="own", options={"per_chain": True})
@way("sample: mesh of chains", batches=4, mesh=(0, 1))
@way("sample: mesh of chains and data", batches=4, mesh=(0, 2))
@way("sample: directory, float32", batches=4, options={"dtype": "float32"}, stored=True)
@way("sample: extended twice", batches=Passes, stored=True, ends=(600, 3_333, NUM_STEPS))
@way(
    "sample: interrupted and resumed",
    batches=lambda: Passes(interrupt=1_999),
    stored=True,
    ends=(NUM_STEPS, NUM_STEPS),
)
@way(
    "sample: minimal norm, list of 4, resumed",
    batches=4,
    integrator="minimal_norm",
    stored=True,
    ends=(601, 3_333, NUM_STEPS),
)
@way("sample: with aux", batches=4, aux=True)
@way("sample: stochastic", batches=4, options={"stochastic": True})
@way("sample: MultiSteps, list of 12", batches=12, wrap=lambda tx: optax.MultiSteps(tx, 3))
@way("sample: partition", batches=4, wrap=lambda tx: optax.partition({"all": tx}, "all"))
def sampled(
    batches: Any,
    options: Any = None,
    mesh: Any = None,
    stored=False,
    ends=(NUM_STEPS,),
    aux=False,
    wrap: Callable[[Any], Any] = lambda tx: tx,
    **arguments,
) -> np.ndarray:
    """`sample`, in one run or in several that continue each other."""
    options, params = QUIET | (options or {}), starts()
    loss_fn: Any = loss
    if mesh:
        data = min(mesh[1], jax.device_count())
        shape, axes = (jax.device_count() // data, data), ("chain", "data")
        kinds = (jax.sharding.AxisType.Auto,) * 2
        options["mesh"] = jax.make_mesh(shape, axes, axis_types=kinds)
    if batches == "own":
        rows = np.random.default_rng(4).integers(NUM_ROWS, size=(200, NUM_CHAINS, SIZE))
        batches = [(X[each], Y[each]) for each in rows]
    elif isinstance(batches, int):
        batches = fixed(batches)
    else:
        batches = batches()
    if aux:
        options["aux"], loss_fn = {"seen": jnp.zeros(NUM_CHAINS)}, counting

    if options.get("stochastic"):
        loss_fn = noisy

    with tempfile.TemporaryDirectory() as folder:
        if stored:
            options["directory"] = folder
        tx, draws = wrap(sampler(**arguments)), None
        for end in ends:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`sample` (ended early|was stopped by SIGINT)")
                draws = optax_smile.sample(
                    loss_fn, params, batches, tx, num_warmup=NUM_WARMUP, key=0, thin=THIN,
                    num_draws=(end - NUM_WARMUP) // THIN, **options,
                )  # fmt: skip
        assert draws is not None
        params: Any = draws.params
        return flat(params["params"] if aux else params)


@way("recorded: in a scan", directory=False)
@way("recorded: in a directory", directory=True)
def record(directory: bool) -> np.ndarray:
    """`recorded`, in a loop that hides the state and passes no parameters."""
    with tempfile.TemporaryDirectory() as folder:
        tx = optax_smile.recorded(
            sampler(), num_warmup=NUM_WARMUP, thin=THIN, directory=folder if directory else None
        )

        def fit(point, state):
            def step(carry, batch):
                point, state = carry
                updates, state = tx.update(jax.grad(loss)(point, batch), state, point)
                return (optax.apply_updates(point, updates), state), None

            batches = jax.tree.map(jnp.asarray, shuffled(NUM_STEPS))
            return jax.lax.scan(step, (point, state), batches)[0]

        states = optax_smile.parallel.init(tx, starts(), key=jax.random.key(1))
        jax.block_until_ready(jax.jit(jax.vmap(fit))(starts(), states))
        return flat(tx.draws().params)


@way("select")
def selected() -> np.ndarray:
    """`select` between the sampler and one that is far too cold."""
    candidates = {"psmile": sampler(), "frozen": sampler(temperature=1e-6)}
    found = optax_smile.select(
        loss, starts(), fixed(4), candidates, lambda p, x: (x @ p["w"] + p["b"], jnp.zeros(())),
        (X, Y), likelihood="gaussian", num_warmup=NUM_WARMUP, thin=THIN, key=0,
        num_draws=(NUM_STEPS - NUM_WARMUP) // THIN, **QUIET,
    )  # fmt: skip
    return flat(found.draws.params)


@way("NumPyro")
def numpyro_bridge() -> np.ndarray:
    """A model of NumPyro."""
    import numpyro
    import numpyro.distributions as dist

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", NUM_ROWS, subsample_size=len(x)):
            numpyro.sample("y", dist.Normal(x @ w + b, 1), obs=y)

    bridge = optax_smile.interop.from_numpyro(model, (X[:SIZE], Y[:SIZE]), num_data=NUM_ROWS)
    tx = optax_smile.psmile(**bridge.posterior, key=0, tuner=TUNER)
    draws = optax_smile.sample(
        bridge.loss_fn, starts(), Passes(), tx, num_warmup=NUM_WARMUP, thin=THIN, key=0,
        num_draws=(NUM_STEPS - NUM_WARMUP) // THIN, **QUIET,
    )  # fmt: skip
    return flat(bridge.constrain(draws).params)


@way("Keras")
def keras_fit() -> np.ndarray:
    """`fit` of Keras."""
    import keras
    import keras_fit

    model: Any = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    steps = LONGER * NUM_STEPS
    given = {"num_data": NUM_ROWS, "key": 0, "angle": TUNER.angle, "thin": THIN}
    optimizer = keras_fit.Sampler("psmile", num_warmup=steps // 16, **given)
    ops: Any = keras.ops

    def of_row(y, found):
        return ops.sum((y - found) ** 2, axis=-1) / 2

    model.compile(optimizer, of_row)
    model.fit(X, Y[:, None], batch_size=SIZE, epochs=steps * SIZE // NUM_ROWS, verbose=0)
    kernel, bias = (np.asarray(x) for x in optimizer.draws().params)
    return pieces(np.concatenate([kernel[0, :, :, 0], bias[0]], axis=1))


@way("BayesianRegressor without hidden layers")
def regressor() -> np.ndarray:
    """The estimator standardises; its noise is unknown, so its posterior is a mixture.

    Mean and variance of its weights are integrated over a grid of the log standard deviation; the
    draws are moved to the posterior of the other ways, to be compared with it.
    """
    fitted = interop.estimators.BayesianRegressor(
        widths=(), sampler=functools.partial(optax_smile.psmile, tuner=TUNER),
        num_chains=NUM_CHAINS, num_epochs=50, num_warmup=NUM_WARMUP, thin=THIN, random_state=0,
        num_draws=(NUM_STEPS - NUM_WARMUP) // THIN,
    ).fit(X, Y)  # fmt: skip
    weight, bias = (np.asarray(x, float) for x in fitted.draws_.params["network"][0])
    draws = np.concatenate([weight[..., 0], bias[..., 0]], axis=2)
    design = np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(NUM_ROWS)]).astype(float)
    target = (Y - Y.mean()).astype(float) / Y.std()
    grid, found = np.linspace(-2, 1, 3_001), []
    for log_std in grid:
        variance = np.exp(2 * log_std)
        covariance = np.linalg.inv(design.T @ design / variance + np.eye(3))
        mean = covariance @ design.T @ target / variance
        log_density = np.linalg.slogdet(covariance)[1] / 2 + mean @ design.T @ target / variance / 2
        log_density -= NUM_ROWS * log_std + target @ target / variance / 2 + log_std**2 / 2
        found.append((log_density, mean, np.diag(covariance) + mean**2))
    densities, means, squares = map(np.array, zip(*found, strict=True))
    weights = np.exp(densities - densities.max())
    mean, square = (np.average(x, axis=0, weights=weights) for x in (means, squares))
    return (draws - mean) / np.sqrt(square - mean**2) * np.sqrt(np.diag(COVARIANCE)) + MEAN


def run_cell(cell: records.Cell) -> dict[str, float]:
    """Sample in one way, and compare means and variances."""
    draws = (np.asarray(WAYS[cell["way"]](), float) - MEAN) / np.sqrt(np.diag(COVARIANCE))
    mean, chains = draws.mean(axis=(0, 1)), np.sqrt(len(draws))
    squares = np.square(draws - mean).mean(axis=1)
    error = draws.mean(axis=1).std(axis=0, ddof=1) / chains
    return {
        "mean_off": float(np.abs(mean / error).max()),
        "mean_error": float(error.max()),
        "smallest": float(squares.mean(axis=0).min()),
        "largest": float(squares.mean(axis=0).max()),
        "variance_error": float((squares.std(axis=0, ddof=1) / chains).max()),
    }


if __name__ == "__main__":
    records.main(__doc__, run_cell, "mean_off", ways, way=WAYS)
