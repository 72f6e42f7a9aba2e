"""Runs with a fault beside a healthy one, for what-to-trust.md and for the tests of `summary`.

    python docs/findings.py    draws the pictures of the page, and writes what `summary` says

No sampler runs: `made` has four chains that sample a known posterior, with the trace of a healthy
run, and a fault changes what `summary` reads. `tests/test_diagnostics.py` requires of each run in
`SICK` the finding of its name alone, `tests/test_what_to_trust.py` that the page shows them.
"""

import io
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from optax_smile import Outcome, Prediction, Snapshots, diagnostics

FOLDER = Path(__file__).parent
PAGE, PICTURES = FOLDER / "what-to-trust.md", FOLDER / "_static" / "findings"
BLOCK = re.compile(r"(?<=<!-- finding )(.*?)( -->\n)(.*?)(?=\n<!-- end -->)", re.DOTALL)
COLORS, RED, GREEN = ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), "#B3261E", "#1A7F37"
# A code block of the documentation holds so many characters without scrolling.
LINE_WIDTH = 88

NUM_DRAWS, NUM_INPUTS, NUM_DATA, NOISE = 100, 16, 40, 0.5
RNG = np.random.default_rng
X, GRID = np.sort(RNG(0).uniform(-2, 2, NUM_DATA)), np.linspace(-2, 2, NUM_INPUTS)
ERRORS = NOISE * RNG(1).normal(size=NUM_DATA)
Y, HELD_OUT = np.sin(2 * X) + ERRORS, np.sin(2 * GRID) + NOISE * RNG(5).normal(size=NUM_INPUTS)


# A curve whose posterior is known, and chains that sample it.


def bumps(x: np.ndarray) -> np.ndarray:
    """Seven features of a curve that is linear in its weights."""
    return np.c_[np.exp(-((x[:, None] - np.linspace(-2, 2, 6)) ** 2)), np.ones(len(x))]


def spikes(x: np.ndarray) -> np.ndarray:
    """Features with more freedom than the data can use."""
    return np.exp(-(((x[:, None] - np.linspace(-2, 2, 24)) / 0.15) ** 2))


def posterior(features: Any = bumps, num_data: int = NUM_DATA, precision: float = 1.0) -> Any:
    """Mean and covariance of the weights, given so many examples like `X`, `Y`."""
    rows, share = features(X), num_data / NUM_DATA / NOISE**2
    covariance = np.linalg.inv(share * rows.T @ rows + precision * np.eye(rows.shape[1]))
    return share * covariance @ rows.T @ Y, covariance


def autoregressive(shape: tuple[int, ...], rho: float = 0.5, seed: int = 0) -> np.ndarray:
    """Chains `[chain, draw, ...]` with the autocorrelation rho^lag and unit variance."""
    noise = RNG(seed).normal(size=shape)
    for draw in range(1, shape[1]):
        noise[:, draw] = rho * noise[:, draw - 1] + np.sqrt(1 - rho**2) * noise[:, draw]
    return noise


def weights(features: Any = bumps, rho: float = 0.2, seed: int = 0, **given: Any) -> np.ndarray:
    """Four chains of draws from this posterior."""
    centre, covariance = posterior(features, **given)
    noise = autoregressive((4, NUM_DRAWS, len(centre)), rho, seed)
    return centre + noise @ np.linalg.cholesky(covariance).T


def curves(features: Any = bumps, **given: Any) -> np.ndarray:
    """What draws predict for the inputs, `[chain, draw, input]`."""
    return weights(features, seed=1, **given) @ features(GRID).T


def held_out(curve: np.ndarray) -> np.ndarray:
    """Log density of held-out data."""
    return -(((curve - HELD_OUT) / NOISE) ** 2) / 2 - np.log(NOISE * np.sqrt(2 * np.pi))


def predicted(mean: Any, density: Any, whole: Any = None) -> Prediction:
    """A prediction with the outcome of each draw."""
    return Prediction(None, whole, each=Outcome(mean, None, None, density))


def made(**changes: Any) -> tuple[Snapshots, Prediction]:
    """Four healthy chains in all that `summary` reads, and what is changed in them.

    A change is another array, or a function of the healthy one.
    """
    shape = 4, NUM_DRAWS
    parts: dict[str, Any] = {
        "params": weights(),
        "mean": curves(),
        "density": -1 + 0.3 * autoregressive((*shape, NUM_INPUTS), 0.2, seed=2),
        "settings": {"reject_quantile": 0.98, "tuner": {"name": "angle_tuner"}},
        "start": np.tile(posterior()[0], (4, 1)),
        "step_size": np.full(shape, 0.01),
        "energy_change": RNG(3).gamma(2, 1, shape),
        "num_gradients": np.tile(10 * np.arange(1, NUM_DRAWS + 1), (4, 1)),
        "num_rejected": np.cumsum(RNG(6).random(shape) < 0.2, axis=1),
        **dict.fromkeys(("num_nonfinite", "num_altered"), np.zeros(shape, int)),
        **dict.fromkeys(("below_resolution", "on_its_way"), np.zeros(shape, bool)),
        "is_draw": np.ones(shape, bool),
        "gradient_norm": RNG(4).gamma(9, 1, shape),
        "loss": 0.5 + 0.04 * autoregressive(shape, seed=7),
        "start_loss": np.full(shape, 0.2),
    }
    for name, change in changes.items():
        parts[name] = change(np.array(parts[name])) if callable(change) else change
    names = "params", "mean", "density", "settings", "start"
    params, mean, density, settings, start = map(parts.pop, names)
    return Snapshots(params, parts, settings, start), predicted(mean, density)


# The faults.

ALL = (0, 1, 2, 3)
ANY, LATE, LAST = (slice(x, None) for x in (0, 80, -40))
COUNT = np.arange(NUM_DRAWS)
RISES = 0.1 * COUNT[:, None]
# The standard deviation of the prediction for each input.
WIDTH = np.sqrt(np.diag(bumps(GRID) @ posterior()[1] @ bumps(GRID).T))


def changed(chains: Any, draws: slice, values: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Put values, or what a function makes of the array, into some draws of some chains."""

    def change(array: np.ndarray) -> np.ndarray:
        array[np.ix_(chains, COUNT[draws])] = values(array) if callable(values) else values
        return array

    return change


def shifted(chains: Any, by: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Add numbers to all draws and inputs of some chains."""
    return changed(chains, ANY, lambda x: x[list(chains)] + by)


def copied(of: int, to: int, draws: slice = ANY) -> Callable[[np.ndarray], np.ndarray]:
    """Let draws of a chain be those of another."""
    return changed([to], draws, lambda x: x[[of]][:, draws])


def stopped(chains: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Let chains stay where they are."""
    return changed(chains, slice(30, None), lambda x: x[list(chains), 29:30])


# Two steps in the data, of which a small network fits one.
RISE, FALL = np.tanh(5 * (GRID + 1)), -np.tanh(5 * (GRID - 1))
PLATEAU = np.tanh(5 * (X + 1)) - np.tanh(5 * (X - 1)) - 1 + 0.8 * ERRORS
AROUND = curves() - curves().mean(axis=(0, 1))
MODES = {"mean": AROUND + np.stack([RISE, RISE, RISE, FALL])[:, None]}
SOME = {"mean": shifted([0, 2], 9 * WIDTH * (np.arange(NUM_INPUTS) < 0.4 * NUM_INPUTS))}
WIDE, NARROW = (curves(spikes, precision=x) for x in (0.01, 4.0))
# Training that ends early is like a prior of the right width.
START = held_out(posterior(spikes, precision=4.0)[0] @ spikes(GRID).T).mean()

COPY, STOP = copied(1, 3), stopped(ALL)
SHRUNK = {"num_altered": changed(ALL, LAST, [[7], [9], [8], [8]]), "mean": lambda x: 0.7 * x}
COUNTS = np.tile(10 * (COUNT % 25) + 10, (4, 1))
AGAIN = {"num_gradients": COUNTS, "num_rejected": 0 * COUNTS}
CLIPPED = {"gradient_norm": changed([1], LAST, 2)}
BROKEN = {"num_nonfinite": changed(ALL, ANY, 2 * COUNT), "mean": curves(num_data=10)}
ALONE = {"num_nonfinite": changed([1], ANY, 2 * COUNT)}
DECAYS = np.tile(0.05 * (1 + np.cos(np.pi * COUNT / NUM_DRAWS)), (4, 1))
SCHEDULE = {"settings": {"tuner": None, "step_size": "cosine_schedule"}, "step_size": DECAYS}
FIXED = {"settings": {"reject_quantile": 0.98, "tuner": None, "step_size": 0.01}}
QUANTILE = {"settings": {"reject_quantile": 0.98, "tuner": {"name": "quantile_tuner"}}}
FAR = {"params": changed([1, 2], ANY, lambda x: 40 * x[1:3]), **FIXED}
FROZEN = {"params": STOP, "mean": STOP, **SCHEDULE}
SHORT = {"step_size": changed([0], LAST, 2e-4), "mean": changed([0], LAST, 9)}
CLOSE = {"params": changed([0], ANY, lambda x: x[0] / 100), "mean": changed([0], ANY, RISES)}
FALLS = {"on_its_way": changed([1], LATE, True), "start_loss": changed([1], ANY, 2.5), **FIXED}
FALLS |= {"loss": changed([1], ANY, lambda x: x[1] + 2 * np.exp(-COUNT / 40))}
# In nats of energy: by 150 and by 5, where d = 100.
KNOWN = {"settings": {"num_data": 1000}, "num_parameters": np.full((4, NUM_DRAWS), 100)}
KNOWN |= {"temperature": np.ones((4, NUM_DRAWS))}
SINKS, RESTS = (
    {**KNOWN, "loss": changed([1], ANY, lambda x, by=by: x[1] - by * COUNT / NUM_DRAWS)}
    for by in (0.3, 0.01)
)
WIDE_NET = {**KNOWN, "num_parameters": np.full((4, NUM_DRAWS), 1001)}
DRIFTS = {"mean": shifted([2], RISES * WIDTH)}
OFTEN = {"num_rejected": changed([0], ANY, COUNT), **FIXED}
GROWS = {"step_size": changed([1], ANY, np.geomspace(0.01, 0.04, NUM_DRAWS)), **QUANTILE}
NOISY = {"change_share": np.full((4, NUM_DRAWS), 0.95)}
SLOW, APART = ({"mean": x, **NOISY} for x in (curves(rho=0.85), shifted([1, 3], WIDTH)))
NATS = r"of most inputs is (1\.9\d|2|2\.0\d)( to .*)? nats below"

# Of each kind of finding the run that the page shows, and variants: what is changed in the healthy
# run, which chains have the finding, and what it says.
SICK: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "copies": ({"params": COPY, "mean": COPY}, (1, 3), r"100 of 100 draws equal .*: \[1, 3\]"),
    "copies, in the end": ({"params": copied(0, 3, LAST)}, (0, 3), "40 of 100 draws equal those"),
    "altered": (SHRUNK, ALL, "7 to 9 of 1000 updates were changed"),
    "altered, one chain": ({"num_altered": changed([2], LAST, 1)}, (2,), "1 of 1000 updates"),
    "altered, by another init": (AGAIN, ALL, "started again 3 times: the state was initialized ag"),
    "altered, before the sampler": (CLIPPED, (1,), r"at 40% .* as behind a clip .* above 10%\)"),
    "not finite": (BROKEN, ALL, r"20\.00% of the gradients"),
    "diverged": (FAR, (1, 2), r"4\d\.\d to 5\d\.\d times that of .* \(flagged above 10\)"),
    "diverged, alone": (ALONE, (1,), r"20\.00% of the gradients"),
    "diverged, of all": ({"density": shifted([2], -2)}, (2,), NATS + r" that of the .*above 0.3\)"),
    "diverged, by and by": ({"density": shifted(ALL, -0.3 * RISES)}, ALL, NATS + " that of its "),
    "frozen": (FROZEN, ALL, r"70 of 99 draws equal the draw before \(flagged above half\)"),
    "frozen, one chain": ({"params": stopped([2])}, (2,), "70 of 99 draws equal the draw before"),
    "frozen, in bits": ({"below_resolution": changed([3], slice(20, None), 1)}, (3,), "at 80% of"),
    "frozen, by its step size": (SHORT, (0,), r"is 0.02 times the first .*below 0.1\)"),
    "frozen, by its draws": (CLOSE, (0,), r"draws are 0\.0\d+ times as far apart"),
    "still on its way": (FALLS, (1,), r"at 61% of the later records \(flagged above 50%\)"),
    "still on its way, by its losses": (SINKS, (1,), r"the loss fell \d.* times .* above 1\)"),
    "not settled": (DRIFTS, (2,), r"quarters .* 2\.\d\d .*above 1.3"),
    "slow": (SLOW, ALL, r"\d\d% to \d\d% of the R-hats within .* above 1.1"),
    "different modes": (MODES, ALL, r"at \d\d% or more .*: \[0, 1, 2\] and \[3\]"),
    "different modes, of some": (SOME, ALL, r"2 groups .* at 4\d% .*: \[0, 2\] and \[1, 3\]"),
    "chains differ": (APART, ALL, r"\d+% of .* across .* above 1.1"),
    "worse than the start": (
        {"loss": shifted([1, 3], 1.7)},
        (1, 3),
        r"1\.99 .* nats .*ged above 1 ",
    ),
    "worse than the start, of many weights": (
        {**WIDE_NET, "loss": changed([0, 2], ANY, lambda x: x[[0, 2]] - 0.25)},
        (1, 3),
        r"0\.\d+ .* with 1001 parameters and num_data=1000 \(flagged above 0\.08 plus",
    ),
    "rejected steps": (OFTEN, (0,), r"5 times .* above 3\)"),
    "step size": (GROWS, (1,), r"a factor of 3.07 during .* above 2\)"),
}

WALK = np.cumsum(RNG(0).normal(size=(4, NUM_DRAWS, NUM_INPUTS)), axis=1)
SLOWLY = autoregressive((4, NUM_DRAWS, NUM_INPUTS), 0.9)
SHRINKS, CYCLES = (np.tile(np.geomspace(1, 0.01, n), (4, NUM_DRAWS // n)) for n in (NUM_DRAWS, 20))
FEW, MORE = (np.tile(np.floor(x * COUNT), (4, 1)) for x in (0.4, 0.8))
FAILS = np.where(RNG(0).random((1, 40, NUM_INPUTS)) < 0.1, -60, 0)
OUTPUTS = np.stack([curves(), curves() + np.array([0, 9, 0, 0])[:, None, None]], axis=-1)
THREE, FIVE = ({"mean": partial(np.where, COUNT[:NUM_INPUTS] < x, SLOWLY)} for x in (3, 5))
AROUND_ONE = {"start": np.ones((4, NUM_INPUTS)), "settings": None}
TREND = {"params": 0.01 * WALK + 0.2 * RISES, **AROUND_ONE}
# Runs near to a finding: what is changed, and what is found; of weights alone if the name says so.
NEAR: dict[str, tuple[dict[str, Any], set[tuple[str, tuple[int, ...]]]]] = {
    # The loss at the start is that of one batch.
    "a loss of 60 in a tenth": ({"loss": changed(ALL, slice(None, None, 10), 60.0)}, set()),
    "a loss that hardly falls": (RESTS, set()),
    "a loss above that of few weights": (KNOWN, set()),
    "a loss of many weights, cold": ({**WIDE_NET, "temperature": np.full((4, 100), 0.5)}, set()),
    "a few inputs": ({"density": shifted([1], -60.0 * (np.arange(NUM_INPUTS) == 7))}, set()),
    # Single draws fail badly at a few inputs each, which their averages do not. On UCI energy the
    # best chain was called diverged for the mean over its draws.
    "draws": ({"density": changed([1], LAST, lambda x: x[[1], LAST] + FAILS)}, set()),
    "a chain that comes closer": ({"density": shifted([1], RISES / 2 - 5)}, set()),
    "a far one": ({"density": shifted([1], RISES / 2 - 14)}, {("diverged", (1,))}),
    # 2 % are nominal, of 10 gradients per draw; three times as many are common.
    "rejections": ({"num_rejected": FEW}, set()),
    "more rejections": ({"num_rejected": MORE}, {("rejected steps", ALL)}),
    "small steps that mix": ({"step_size": SHRINKS}, {("step size", ALL)}),
    "steps of a matrix": ({"step_size": SHRINKS, "width": np.ones((4, NUM_DRAWS))}, set()),
    "small steps": ({"step_size": SHRINKS, "mean": 0.1 * WALK}, {("frozen", ALL)}),
    "what wanders": ({"step_size": CYCLES, "mean": WALK}, {("not settled", ALL)}),
    "outputs": ({"mean": OUTPUTS}, {("different modes", ALL)}),
    "others": ({"mean": OUTPUTS[..., ::-1]}, {("different modes", ALL)}),
    "slow at three inputs": (THREE, set()),
    "slow at five inputs": (FIVE, {("slow", (3,))}),
    "weights that wander a little": ({"params": SLOWLY, **AROUND_ONE}, set()),
    "weights of different modes": ({"params": shifted([1, 3], 2)}, set()),
    "weights of one norm": ({"params": lambda x: np.concatenate([x[:3], -x[1:2]])}, set()),
    "weights that wander": ({"params": 0.1 * WALK, **AROUND_ONE}, set()),
    "weights with a trend": (TREND, {("not settled", ALL)}),
}
# What no finding tells.
UNTOLD: dict[str, dict[str, Any]] = {
    "a missed mode": {"mean": AROUND + RISE},
    "a wrong num_data": {"mean": curves(num_data=4 * NUM_DATA)},
    "a prior too wide": {"mean": WIDE, "density": held_out(WIDE)},
}


# Pictures: each function draws one run onto one of two axes that share their scale.


def draw_paths(ax: Any, draws: Snapshots, prediction: Prediction):
    """Draw what single draws predict for one input; a copy is dashed over what it copies."""
    values = prediction.each.mean[:, :, NUM_INPUTS // 2]
    for chain, color in enumerate(COLORS):
        is_copy = any(np.array_equal(values[chain], x) for x in values[:chain])
        style = {"lw": 1.6, "color": "black", "ls": (0, (1.5, 3))} if is_copy else {"color": color}
        ax.plot(values[chain], **{"lw": 1.2, **style})
    ax.set(xlabel="draw", ylabel="prediction\nat one input")


def draw_curves(ax: Any, draws: Snapshots, prediction: Prediction, y: np.ndarray = Y):
    """Draw the data, and average and two standard deviations of the curves of every chain."""
    ax.plot(X, y, ".", color="0.6", ms=5)
    for values, color in zip(prediction.each.mean, COLORS, strict=True):
        mean, deviation = values.mean(axis=0), values.std(axis=0)
        ax.fill_between(GRID, mean - 2 * deviation, mean + 2 * deviation, color=color, alpha=0.2)
        ax.plot(GRID, mean, color=color, lw=1.5)
    ax.set(xlabel="x", ylabel="y")


def draw_bands(ax: Any, draws: Snapshots, prediction: Prediction):
    """Draw them beside two standard deviations around the average of the exact posterior."""
    draw_curves(ax, draws, prediction)
    exact = bumps(GRID) @ posterior()[0]
    ax.plot(GRID, exact - 2 * WIDTH, "k--", lw=1, label="exact posterior")
    ax.plot(GRID, exact + 2 * WIDTH, "k--", lw=1)
    ax.legend(loc="upper left", fontsize=9)


def draw_norms(ax: Any, draws: Snapshots, prediction: Prediction):
    """Draw how large the parameters are."""
    ax.plot(np.linalg.norm(draws.params, axis=2).T, lw=1.2)
    ax.set(xlabel="draw", ylabel="norm of the\nparameters", yscale="log")


def draw_step_sizes(
    ax: Any,
    draws: Snapshots,
    prediction: Prediction,
    name: str = "step_size",
    label: str = "step size",
):
    """Draw an entry of the trace against the number of gradients."""
    ax.plot(draws.trace["num_gradients"].T, draws.trace[name].T, lw=1.2)
    ax.set(xlabel="gradients per chain", ylabel=label)


def draw_losses(ax: Any, draws: Snapshots, prediction: Prediction):
    """Draw the loss from draw to draw, and dashed that of the start."""
    draw_step_sizes(ax, draws, prediction, "loss", "training loss\n(nats per example)")
    ax.plot(draws.trace["num_gradients"].T, draws.trace["start_loss"].T, "--", lw=1)


def draw_rejections(ax: Any, draws: Snapshots, prediction: Prediction):
    """Draw how many steps have been rejected, and how many `reject_quantile` means."""
    draw_step_sizes(ax, draws, prediction, "num_rejected", "rejected steps")
    gradients, settings = draws.trace["num_gradients"][0], dict[str, Any](draws.settings or {})
    nominal = (1 - settings["reject_quantile"]) * gradients
    ax.plot(gradients, nominal, "k--", lw=1, label="as the quantile means")
    ax.legend(loc="upper left", fontsize=9)


def draw_held_out(ax: Any, draws: Snapshots, prediction: Prediction):
    """Draw the LPPD of more and more draws on held-out data beside that of the start."""
    densities = prediction.each.log_density.swapaxes(0, 1).reshape(-1, NUM_INPUTS)
    counts = np.arange(1, len(densities) + 1)
    averaged = np.logaddexp.accumulate(densities).mean(axis=1) - np.log(counts)
    ax.plot(counts, averaged, color=COLORS[0], label=f"average: {averaged[-1]:.2f}")
    ax.axhline(START, color="black", ls="--", lw=1, label=f"start: {START:.2f}")
    ax.set(xlabel="draws averaged", ylabel="LPPD on held-out\ndata (nats)", xscale="log")
    ax.legend(loc="lower right", fontsize=9)


draw_modes = partial(draw_curves, y=PLATEAU)
# How a fault is drawn, and the picture in words.
PICTURED: dict[str, tuple[Callable[[Any, Snapshots, Prediction], None], str]] = {
    "copies": (draw_paths, "Left, a line is dashed exactly over another; right, four lines differ"),
    "altered": (draw_bands, "Left, the bands are not the exact one; right, they agree with it"),
    "not finite": (draw_bands, "Left, the bands are wider than the exact one; right, they agree"),
    "diverged": (draw_norms, "Left, the norms of two chains are far above those on the right"),
    "frozen": (draw_paths, "Left, four lines become flat and stay flat; right, they go on moving"),
    "still on its way": (draw_losses, "Left, a loss falls until the end; right, none does"),
    "not settled": (draw_paths, "Left, a line leads slowly to another level; right, none does"),
    "slow": (draw_paths, "Left, lines wander in long waves; right, draws are unlike those before"),
    "different modes": (
        draw_modes,
        "Left, one chain fits another step than the others; right, all fit both",
    ),
    "chains differ": (draw_curves, "Left, averages differ by about their bands; right, they agree"),
    "worse than the start": (draw_losses, "Left, two losses are far above the start; right, none"),
    "rejected steps": (draw_rejections, "Left, one chain rejects far too many steps; right, none"),
    "step size": (draw_step_sizes, "Left, a step size changes until the end; right, none does"),
    "a missed mode": (draw_modes, "Left, all fit the same of two steps; right, one fits the other"),
    "a wrong num_data": (
        draw_bands,
        "Left, bands are narrower than the exact one; right, they agree",
    ),
    "a prior too wide": (
        draw_held_out,
        "Left, the average is far below the start; right, close to it",
    ),
}
FAULTS = {name: SICK[name][0] if name in SICK else UNTOLD[name] for name in PICTURED}
# What stands on the right in place of the healthy run.
RIGHT: dict[str, dict[str, Any]] = {
    "different modes": {"mean": AROUND + RISE + FALL - 1},
    "a missed mode": MODES,
    "a prior too wide": {"mean": NARROW, "density": held_out(NARROW)},
}


def picture(name: str):
    """Draw both runs of a case beside each other, in few colours."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(8, 2.9), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    sides = (name, RED, FAULTS[name]), ("healthy", GREEN, RIGHT.get(name, {}))
    for ax, (title, color, changes) in zip(axes, sides, strict=True):
        ax.set_prop_cycle(color=COLORS)
        PICTURED[name][0](ax, *made(**changes))
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=color)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_ylabel("")
    memory = io.BytesIO()
    figure.savefig(memory)
    Image.open(memory).convert("RGB").quantize(64).save(path_of(name), optimize=True)


def path_of(name: str) -> Path:
    """Where the picture of a fault lies."""
    return PICTURES / f"{name.replace(' ', '-')}.png"


def shown(name: str) -> str:
    """What the page shows of a run: all that `summary` says, or a picture and the findings."""
    said, lines = str(diagnostics.summary(*made(**FAULTS.get(name, {})))), []
    if name == "healthy":
        return f"```text\n{said}\n```"
    for text in said.rpartition("\n\n")[2].splitlines():
        # The rest of a line is indented by two more.
        start = " " * (len(text) - len(text.lstrip()))
        indents: dict[str, Any] = {"initial_indent": start, "subsequent_indent": start + "  "}
        lines += textwrap.wrap(text.strip(), LINE_WIDTH, break_on_hyphens=False, **indents)
    link = path_of(name).relative_to(FOLDER).as_posix()
    return "\n".join([f"![{PICTURED[name][1]}]({link})\n\n```text", *lines, "```"])


def page() -> str:
    """Return the page with what is shown between its markers."""
    return BLOCK.sub(lambda found: found[1] + found[2] + shown(found[1]), PAGE.read_text())


if __name__ == "__main__":
    for name in PICTURED:
        picture(name)
    PAGE.write_text(page())
