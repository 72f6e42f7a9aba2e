"""Runs made sick on purpose beside healthy ones: pictures and printed lines of what-to-trust.md.

    python docs/findings.py                 all of them, and the blocks of the page
    python docs/findings.py frozen slow     some

Each run takes seconds on a CPU. It fails if `summary` does not tell the finding of a sick run, or
tells it of the healthy one.
"""

import argparse
import dataclasses
import functools
import io
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image

import optax_smile
from optax_smile import diagnostics, metrics

FOLDER = Path(__file__).parent
PAGE, PICTURES = FOLDER / "what-to-trust.md", FOLDER / "_static" / "findings"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
SICK, HEALTHY = "#B3261E", "#1A7F37"
NUM_CHAINS, NUM_DRAWS, NUM_DATA, NOISE = 4, 100, 40, 0.5
# A code block of the documentation holds so many characters without scrolling.
LINE_WIDTH = 88


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model with its data; `gaussian` has noise of a known size, else there are classes."""

    model: Callable[[Any, Any], jax.Array]
    init: Callable[[jax.Array], Any]
    x: np.ndarray
    y: np.ndarray
    likelihood: str = "gaussian"
    noise: float = NOISE
    held_out: tuple[Any, Any] | None = None

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Mean of minus the log likelihood, up to a constant."""
        x, y = batch
        outputs = self.model(params, x)
        if self.likelihood == "gaussian":
            return jnp.mean((outputs - y) ** 2) / (2 * self.noise**2)
        return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

    def outputs(self, params: Any, x: Any) -> Any:
        """What the likelihood reads."""
        means = self.model(params, x)
        return (means, jnp.log(self.noise)) if self.likelihood == "gaussian" else means


@dataclasses.dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        problem: model and data.
        sampler: what takes the place of AdamW.
        thin: steps from draw to draw.
        num_warmup: steps before the first draw.
        num_epochs: of training before; 0 starts from random parameters.
        batch_size: examples per gradient.
        away: added to every parameter of the start.
        alike: whether all chains start from one network, a little apart.
        keys: of the calls that share out the chains, as jobs on a cluster do.
    """

    problem: Problem
    sampler: Any
    thin: int = 100
    num_warmup: int = 2_000
    num_epochs: int = 200
    batch_size: int = 10
    away: float = 0.0
    alike: bool = False
    keys: tuple[int, ...] = (0,)


class Done(NamedTuple):
    """A run when it is done."""

    run: Run
    start: Any
    draws: optax_smile.Snapshots
    prediction: optax_smile.Prediction
    summary: diagnostics.Summary

    @property
    def found(self) -> set[str]:
        """Kinds of the findings."""
        return {finding.kind for finding in self.summary.findings}


class Case(NamedTuple):
    """Two runs, how each is drawn, what stands above it, and the picture in words."""

    draw: Callable[[Any, Done], None]
    sick: Run
    healthy: Run
    titles: tuple[str, str]
    alt: str


@functools.cache
def do(run: Run) -> Done:
    """Train, sample, predict the training data, judge."""
    problem = run.problem
    parts = [_sample(run, key, NUM_CHAINS // len(run.keys)) for key in run.keys]
    start, draws = parts[0]
    if len(parts) > 1:
        together = [(d.params, dict(d.trace), d.start) for _, d in parts]
        params, trace, _ = jax.tree.map(lambda *leaves: np.concatenate(leaves), *together)
        start = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(s for s, _ in parts))
        draws = optax_smile.Snapshots(params, trace, draws.settings, start)
    arguments: dict[str, Any] = {"likelihood": problem.likelihood, "targets": problem.y}
    prediction = optax_smile.predict(problem.outputs, draws, problem.x, per="draw", **arguments)
    return Done(run, start, draws, prediction, diagnostics.summary(draws, prediction))


def _sample(run: Run, seed: int, num_chains: int) -> tuple[Any, Any]:
    problem, number = run.problem, len(run.problem.x)
    generator = np.random.default_rng(seed)
    # A prime number: ticks do not see the same batches again and again.
    orders = [generator.permutation(number) for _ in range(47)]
    rows = [r for order in orders for r in np.split(order, number // run.batch_size)]
    batches = [(problem.x[r], problem.y[r]) for r in rows]
    keys = jax.random.split(jax.random.key(seed), 3)
    if run.num_epochs:
        start = optax_smile.warmstart(
            problem.loss,
            problem.init,
            batches[: number // run.batch_size],
            optax.adamw(0.02),
            num_members=num_chains,
            num_epochs=run.num_epochs,
            key=keys[0],
            progress=False,
        )
    else:
        start = jax.vmap(problem.init)(jax.random.split(keys[0], num_chains))
    start = jax.tree.map(lambda x: x + run.away, start)
    if run.alike:
        one = jax.tree.map(lambda x: x[0], start)
        start = optax_smile.chains_from_weights([one], num_chains=num_chains, key=keys[1])
    with warnings.catch_warnings():
        # That the loss of the draws rises is what the page is about.
        warnings.filterwarnings("ignore", message=".*the loss of the draws will be")
        warnings.filterwarnings("ignore", message=".*were not finite")
        draws = optax_smile.sample(
            problem.loss,
            start,
            batches,
            run.sampler,
            num_warmup=run.num_warmup,
            num_draws=NUM_DRAWS,
            thin=run.thin,
            steps_per_dispatch=run.thin,
            key=keys[2],
            progress=False,
        )
    return start, draws


# Models and data.


def bumps(params: Any, x: Any) -> jax.Array:
    """A curve that is linear in its seven parameters, so that the posterior is known exactly."""
    centres = jnp.linspace(-2, 2, 6)
    return jnp.exp(-((x[:, None] - centres[None]) ** 2)) @ params["w"] + params["b"]


def init_bumps(key: jax.Array) -> Any:
    """Random parameters."""
    return {"w": jax.random.normal(key, (6,)), "b": jnp.zeros(())}


def network(params: Any, x: Any) -> jax.Array:
    """A curve by a network with one hidden layer."""
    return jnp.tanh(x[:, None] * params["a"][None] + params["b"][None]) @ params["w"] + params["c"]


def init_network(key: jax.Array, hidden: int) -> Any:
    """Random parameters."""
    b, w = jax.random.normal(key, (2, hidden))
    return {"a": jnp.full(hidden, 3.0), "b": 3 * b, "w": w, "c": jnp.zeros(())}


def linear(params: Any, x: Any) -> jax.Array:
    """Logits of classes."""
    return x @ params["w"] + params["b"][None]


def init_linear(key: jax.Array) -> Any:
    """Random parameters for ten classes."""
    return {"w": 0.1 * jax.random.normal(key, (20, 10)), "b": jnp.zeros(10)}


def spikes(params: Any, x: Any) -> jax.Array:
    """A curve with more freedom than the data can use, linear in its 25 parameters."""
    centres = jnp.linspace(-2, 2, 24)
    return jnp.exp(-(((x[:, None] - centres[None]) / 0.15) ** 2)) @ params["w"] + params["b"]


def init_spikes(key: jax.Array) -> Any:
    """Small random parameters."""
    return {"w": 0.3 * jax.random.normal(key, (24,)), "b": jnp.zeros(())}


@dataclasses.dataclass(frozen=True, eq=False)
class Broken(Problem):
    """One whose last example is not a number, which makes the loss of its batches none."""

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The loss, NaN with the last example."""
        has_last = jnp.any(batch[0] == self.x[-1])
        return super().loss(params, batch) * jnp.where(has_last, jnp.nan, 1.0)


def _classes() -> Problem:
    generator = np.random.default_rng(3)
    centres, labels = generator.normal(size=(10, 20)), generator.integers(0, 10, 30)
    features = 0.12 * (centres[labels] + 1.5 * generator.normal(size=(30, 20)))
    return Problem(linear, init_linear, features.astype(np.float32), labels, "categorical")


def ripple(params: Any, x: Any, unit: float) -> jax.Array:
    """A curve with a feature in units of its own, and a weight to match."""
    return bumps(params, x) + params["r"] * jnp.cos(9 * x) / unit


def init_ripple(key: jax.Array, unit: float) -> Any:
    """Random parameters."""
    one, other = jax.random.split(key)
    return init_bumps(one) | {"r": 0.15 * unit * jax.random.normal(other)}


X = np.sort(np.random.default_rng(0).uniform(-2, 2, NUM_DATA)).astype(np.float32)
Z = np.random.default_rng(1).normal(size=NUM_DATA).astype(np.float32)
WAVE = np.sin(2 * X) + NOISE * Z
CURVE = Problem(bumps, init_bumps, X, WAVE)
HOLE = Broken(bumps, init_bumps, X, WAVE)
OUTLIER = Problem(bumps, init_bumps, X, WAVE + 3 * (np.arange(NUM_DATA) == 23))
PLATEAU = np.float32(np.tanh(5 * (X + 1)) - np.tanh(5 * (X - 1)) - 1) + 0.4 * Z
ONE_HIDDEN, FOUR_HIDDEN = (
    Problem(network, functools.partial(init_network, hidden=h), X, PLATEAU, noise=0.4)
    for h in (1, 4)
)
UNITS, SAME_UNITS = (
    Problem(functools.partial(ripple, unit=u), functools.partial(init_ripple, unit=u), X, WAVE)
    for u in (1_000.0, 1.0)
)
CLASSES = _classes()
NEW_X = np.random.default_rng(5).uniform(-2, 2, 500).astype(np.float32)
NEW_Y = np.sin(2 * NEW_X) + NOISE * np.random.default_rng(6).normal(size=500).astype(np.float32)
SPIKES = Problem(spikes, init_spikes, X, WAVE, held_out=(NEW_X, NEW_Y))


# Pictures: each function draws one run onto one of two axes that share their scale.


def draw_paths(ax: Any, done: Done):
    """Draw what single draws predict for one input; a copy is dashed over what it copies."""
    values = done.prediction.each.mean[:, :, len(done.run.problem.x) // 2]
    for chain, original in enumerate(done.summary.copy_of):
        style: dict[str, Any] = {"lw": 1.2, "color": COLORS[chain]}
        if original != chain:
            style |= {"lw": 1.6, "color": "black", "ls": (0, (1.5, 3))}
        ax.plot(values[chain], **style)
    ax.set(xlabel="draw", ylabel="prediction\nat one input")


def draw_curves(ax: Any, done: Done):
    """Draw the data, and average and two standard deviations of the curves of every chain."""
    draw_data(ax, done)
    for chain, color in enumerate(COLORS):
        mean, deviation = on_grid(jax.tree.map(lambda x, c=chain: x[c], done.draws.params), done)
        ax.fill_between(GRID, mean - 2 * deviation, mean + 2 * deviation, color=color, alpha=0.2)
        ax.plot(GRID, mean, color=color, lw=1.5)


def draw_band(ax: Any, done: Done):
    """Draw average and band of all draws, and the exact ones of a model that is linear."""
    draw_data(ax, done)
    together = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done.draws.params)
    mean, deviation = on_grid(together, done)
    ax.fill_between(
        GRID, mean - 2 * deviation, mean + 2 * deviation, color=COLORS[0], alpha=0.35, label="draws"
    )
    columns = [bumps({"w": row[:6], "b": row[6]}, np.r_[GRID, X]) for row in np.eye(7)]
    grid, data = np.split(np.transpose(columns), [len(GRID)])
    covariance = np.linalg.inv(data.T @ data / NOISE**2 + np.eye(7))
    exact = grid @ covariance @ data.T @ WAVE / NOISE**2
    width = 2 * np.sqrt(np.einsum("ij,jk,ik->i", grid, covariance, grid))
    ax.plot(GRID, exact - width, "k--", lw=1, label="exact posterior")
    ax.plot(GRID, exact + width, "k--", lw=1)
    ax.set_ylim(-2.3, 1.9)
    ax.legend(loc="lower center", fontsize=9, ncols=2)


def draw_data(ax: Any, done: Done):
    """Draw the examples that the chains learn from."""
    ax.plot(done.run.problem.x, done.run.problem.y, ".", color="0.6", ms=5)
    ax.set(xlabel="x", ylabel="y")


def on_grid(params: Any, done: Done) -> tuple[np.ndarray, np.ndarray]:
    """Average and standard deviation over draws of the curves."""
    curves = jax.vmap(done.run.problem.model, (0, None))(params, GRID)
    return np.mean(curves, axis=0), np.std(curves, axis=0)


def draw_norms(ax: Any, done: Done):
    """Draw how large the parameters are."""
    leaves = [x.reshape(*x.shape[:2], -1) for x in jax.tree.leaves(done.draws.params)]
    norms = np.linalg.norm(np.concatenate(leaves, axis=2), axis=2)
    for chain, color in enumerate(COLORS):
        ax.plot(norms[chain], color=color, lw=1.2)
    ax.set(xlabel="draw", ylabel="norm of the\nparameters", yscale="log")


def draw_losses(ax: Any, done: Done):
    """Draw the loss from step to step, and that of the start."""
    trace = done.draws.trace
    for chain, color in enumerate(COLORS):
        ax.plot(trace["num_gradients"][chain], trace["loss"][chain], color=color, lw=1)
        ax.axhline(trace["start_loss"][chain, -1], color=color, ls="--", lw=1)
    ax.plot([], [], "k--", lw=1, label="start")
    ax.set(xlabel="gradients per chain", ylabel="training loss\n(nats per example)", yscale="log")
    ax.legend(loc="center right", fontsize=9)


def draw_rejections(ax: Any, done: Done):
    """Draw how many steps have been rejected, and how many `reject_quantile` means."""
    trace, gradients = done.draws.trace, done.draws.trace["num_gradients"]
    for chain, color in enumerate(COLORS):
        ax.plot(gradients[chain], trace["num_rejected"][chain], color=color, lw=1.5)
    nominal = done.summary.nominal_rate * gradients[0]
    ax.plot(gradients[0], nominal, "k--", lw=1, label="as the quantile means")
    ax.set(xlabel="gradients per chain", ylabel="rejected steps")
    ax.legend(loc="upper left", fontsize=9)


def draw_step_sizes(ax: Any, done: Done):
    """Draw the step size; what comes before the first draw is grey."""
    trace = done.draws.trace
    for chain, color in enumerate(COLORS):
        ax.plot(trace["num_gradients"][chain], trace["step_size"][chain], color=color, lw=1.2)
    first = trace["num_gradients"][0, -NUM_DRAWS]
    ax.axvspan(0, first, color="0.9", lw=0, label="warm-up")
    ax.set(xlabel="gradients per chain", ylabel="step size", yscale="log")
    ax.legend(loc="upper left", fontsize=9)


def draw_held_out(ax: Any, done: Done):
    """Draw the LPPD of more and more draws on held-out data beside that of the start."""
    problem, number = done.run.problem, len(done.draws)
    x, y = problem.held_out or (problem.x, problem.y)
    arguments: dict[str, Any] = {"likelihood": problem.likelihood, "targets": y}
    found: Any = optax_smile.predict(problem.outputs, done.draws, x, per="draw", **arguments)
    members = optax_smile.Snapshots.from_members(done.start)
    before = optax_smile.predict(problem.outputs, members, x, **arguments)
    average, start = (metrics.lppd(each.log_density) for each in (found, before))
    densities = found.each.log_density.swapaxes(0, 1).reshape(number, -1)
    counts = np.arange(NUM_CHAINS, number + 1)
    averaged = np.logaddexp.accumulate(densities).mean(axis=1)[NUM_CHAINS - 1 :]
    ax.plot(counts, averaged - np.log(counts), color=COLORS[0], label=f"average: {average:.2f}")
    ax.axhline(start, color="black", ls="--", lw=1, label=f"the four of the start: {start:.2f}")
    ax.set(xlabel="draws averaged", ylabel="LPPD on held-out\ndata (nats)", xscale="log")
    ax.legend(loc="lower right", fontsize=9)


# What is shown.


def shrunk(sampler: optax.GradientTransformationExtraArgs) -> Any:
    """Shrink the weights after every 200 steps: `sample` tolerates so few altered updates."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = sampler.update(updates, state, params, **extra)
        share = 0.3 * (optax_smile.stats(state).num_gradients % 200 == 0)
        return jax.tree.map(lambda move, x: move - share * x, updates, params), state

    return optax.GradientTransformationExtraArgs(sampler.init, update)


GRID = np.linspace(-2.4, 2.4, 97).astype(np.float32)
KEY = jax.random.key(7)
OPTIONS: dict[str, Any] = {"num_data": NUM_DATA, "key": KEY}
PSMILE = optax_smile.psmile(**OPTIONS)
LONG = optax_smile.psmile(tuner=optax_smile.angle_tuner(angle=0.1), **OPTIONS)
PLAIN = Run(CURVE, PSMILE, thin=300)
QUANTILE = functools.partial(
    optax_smile.smile, 0.05, reject_quantile=0.98, decoherence_length=None, **OPTIONS
)


@functools.cache
def cases() -> dict[str, Case]:
    """Make them: the findings, and what none of them tells."""
    units = {**OPTIONS, "prior_precision": {"w": 1.0, "b": 1.0, "r": 1e-6}}
    around: dict[str, Any] = {"prior_mean": "start", "prior_precision": 300.0}
    outliers = optax_smile.psmile(0.02, reject_quantile=0.993, **OPTIONS)
    return {
        "copies": Case(
            draw_paths,
            Run(CURVE, PSMILE, keys=(0, 0)),
            PLAIN,
            ("copies: two jobs with the same key", "healthy: a key for each chain"),
            "Left, two lines are dashed exactly over two others; right, four lines differ",
        ),
        "altered": Case(
            draw_band,
            Run(CURVE, shrunk(PSMILE)),
            PLAIN,
            ("altered: weights are shrunk", "healthy: steps as they are"),
            "Left, the band of the draws differs from the exact posterior; right, it matches it",
        ),
        "not finite": Case(
            draw_band,
            Run(HOLE, PSMILE, thin=300, num_epochs=0),
            PLAIN,
            ("not finite: a missing value on the right", "healthy: no value is missing"),
            "Left, the band is far wider than that of the exact posterior; right, it matches",
        ),
        "diverged": Case(
            draw_norms,
            Run(CURVE, optax_smile.smile(100.0, num_data=NUM_DATA, decoherence_length=None)),
            PLAIN,
            ("diverged: steps of length 100", "healthy: psmile finds its step size"),
            "Left, the norm of the parameters is far above that on the right",
        ),
        "frozen": Case(
            draw_paths,
            Run(
                CURVE,
                optax_smile.smile(
                    optax.cosine_decay_schedule(0.05, 7_000),
                    num_data=NUM_DATA,
                    decoherence_length=None,
                ),
            ),
            PLAIN,
            ("frozen: a learning rate schedule left on", "healthy: no schedule"),
            "Left, four lines become flat and stay where they are; right, they go on moving",
        ),
        "still on its way": Case(
            draw_losses,
            Run(
                ONE_HIDDEN,
                optax_smile.psmile(0.005, **OPTIONS),
                thin=4,
                num_warmup=0,
                num_epochs=0,
                batch_size=NUM_DATA,
                away=3.0,
            ),
            Run(ONE_HIDDEN, LONG, batch_size=NUM_DATA, alike=True),
            ("still on its way: begun far away", "healthy: from trained weights"),
            "Left, the loss falls until the end; right, it stays on a level",
        ),
        "not settled": Case(
            draw_paths,
            Run(
                CURVE,
                optax_smile.sgld(1e-5, **OPTIONS),
                thin=20,
                num_warmup=0,
                num_epochs=0,
            ),
            PLAIN,
            ("not settled: no warm-up, short steps", "healthy: warm start, warm-up, psmile"),
            "Left, four lines lead slowly to one level; right, they move around it",
        ),
        "slow": Case(
            draw_paths,
            Run(CURVE, PSMILE, thin=30),
            PLAIN,
            ("slow: a draw every 30 steps", "healthy: a draw every 300 steps"),
            "Left, lines wander in long waves; right, each draw is unlike the one before",
        ),
        "different modes": Case(
            draw_curves,
            Run(ONE_HIDDEN, LONG, batch_size=NUM_DATA),
            Run(FOUR_HIDDEN, LONG, batch_size=NUM_DATA),
            ("different modes: one hidden unit", "one mode: four hidden units"),
            "Left, chains fit either the rise or the fall of the data; right, all fit both",
        ),
        "chains differ": Case(
            draw_curves,
            Run(UNITS, optax_smile.smile(**units), thin=300),
            Run(SAME_UNITS, optax_smile.smile(**OPTIONS)),
            ("chains differ: a feature in other units", "healthy: features of one size"),
            "Left, the averages of the chains differ by about their bands; right, they agree",
        ),
        "worse than the start": Case(
            draw_losses,
            Run(CLASSES, optax_smile.psmile(num_data=30, key=KEY)),
            Run(CLASSES, optax_smile.psmile(num_data=30, key=KEY, **around)),
            ("worse than the start: prior N(0, 1)", "healthy: a prior around the start"),
            "Left, the loss rises far above that of the start; right, it stays close to it",
        ),
        "rejected steps": Case(
            draw_rejections,
            Run(OUTLIER, outliers, thin=100, num_warmup=500, batch_size=1),
            Run(OUTLIER, outliers, thin=100, num_warmup=500, batch_size=NUM_DATA),
            ("rejected steps: batches of one example", "healthy: all examples in a batch"),
            "Left, steps are rejected several times as often as asked for; right, less often",
        ),
        "step size": Case(
            draw_step_sizes,
            Run(CURVE, QUANTILE(tuner=optax_smile.quantile_tuner(adapt_rate=0.02))),
            Run(CURVE, QUANTILE(tuner=optax_smile.quantile_tuner(adapt_steps=300))),
            ("step size: a tuner that does not end", "healthy: it ends within the warm-up"),
            "Left, the step size changes until the end; right, it stays from the warm-up on",
        ),
        "a missed mode": Case(
            draw_curves,
            Run(ONE_HIDDEN, LONG, batch_size=NUM_DATA, alike=True),
            Run(ONE_HIDDEN, LONG, batch_size=NUM_DATA),
            ("all chains from one network", "from four networks"),
            "Left, all chains fit the same of two steps in the data; right, some fit the other",
        ),
        "a wrong num_data": Case(
            draw_band,
            Run(CURVE, optax_smile.psmile(num_data=4 * NUM_DATA, key=KEY), thin=300),
            PLAIN,
            ("num_data four times too large", "the right num_data"),
            "Left, the band of the draws is far narrower than the exact one; right, they agree",
        ),
        "a prior too wide": Case(
            draw_held_out,
            Run(SPIKES, optax_smile.psmile(prior_precision=0.01, **OPTIONS), num_epochs=25),
            Run(SPIKES, optax_smile.psmile(prior_precision=4.0, **OPTIONS), num_epochs=25),
            ("a prior with standard deviation 10", "standard deviation 0.5"),
            "Left, the average is far below the networks of the start; right, close to them",
        ),
    }


UNTOLD = ("a missed mode", "a wrong num_data", "a prior too wide")


def judge(name: str) -> Case:
    """Run both of a case.

    Raises:
        AssertionError: `summary` does not tell it, or tells it of the healthy one.
    """
    case = cases()[name]
    sick, healthy = do(case.sick), do(case.healthy)
    if name in UNTOLD:
        assert not sick.found, f"{name}: {sick.found}"
        return case
    assert sick.found == {name}, f"{name}: {sick.found}"
    assert not healthy.found, f"healthy beside {name}: {healthy.found}"
    return case


def picture(name: str, case: Case):
    """Draw both runs of a case beside each other, in few colours."""
    figure = Figure(figsize=(8, 2.9), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, run, title, color in zip(
        axes, (case.sick, case.healthy), case.titles, (SICK, HEALTHY), strict=True
    ):
        case.draw(ax, do(run))
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=color)
        ax.spines[["top", "right"]].set_visible(False)
        for axis in (ax.xaxis, ax.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
                axis.set_major_formatter("{x:,g}")
                axis.set_minor_formatter("")
            else:
                axis.set_major_locator(MaxNLocator(5))
    axes[1].set_ylabel("")
    memory = io.BytesIO()
    figure.savefig(memory)
    PICTURES.mkdir(parents=True, exist_ok=True)
    Image.open(memory).convert("RGB").quantize(64).save(path_of(name), optimize=True)


def path_of(name: str) -> Path:
    """Where the picture of a case lies."""
    return PICTURES / f"{name.replace(' ', '-')}.png"


def block(name: str, case: Case) -> str:
    """What the page shows of a case: its picture and what `summary` says of the sick run."""
    link = path_of(name).relative_to(FOLDER).as_posix()
    said = str(do(case.sick).summary).rpartition("\n\n")[2].splitlines()
    lines = [line for text in said for line in wrapped(text)]
    return f"![{case.alt}]({link})\n\n```text\n" + "\n".join(lines) + "\n```"


def wrapped(text: str) -> list[str]:
    """Break a line, the rest of it indented by two more."""
    indent = " " * (len(text) - len(text.lstrip()))
    given: dict[str, Any] = {"initial_indent": indent, "subsequent_indent": indent + "  "}
    return textwrap.wrap(text.strip(), LINE_WIDTH, break_on_hyphens=False, **given)


def write(name: str, text: str):
    """Put a block between its markers on the page.

    Raises:
        AssertionError: it has none.
    """
    page = PAGE.read_text()
    begin, end = f"<!-- finding {name} -->\n", "\n<!-- end -->"
    before, marker, rest = page.partition(begin)
    _, close, after = rest.partition(end)
    assert marker and close, f"{PAGE.name} has no {begin.strip()} with its end"
    PAGE.write_text(before + begin + text + end + after)


def main():
    """Run, draw and write what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="findings, such as frozen; none: all")
    names = parser.parse_args().names or ["healthy", *cases()]
    began = time.time()
    for name in names:
        if name == "healthy":
            write(name, f"```text\n{do(PLAIN).summary}\n```")
        else:
            case = judge(name)
            picture(name, case)
            write(name, block(name, case))
        print(f"{name}: {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
