"""pSMILE-naive as its paper writes it and as its code computes it, in NumPy and float64.

An oracle beside `analytic.py`: with 10^6 steps of two gradients and ten chains that start at the
mean, nothing differs from the first table of the paper but a coarser grid of step sizes and what
the paper does not say. That is the rotation of the noise (`rotation`) and the scale (`scale`): a
variance about a moving mean as in the text, or the second moment about one of the published code.
The smallest bias is that of the chains that chose the step size, and then that of fresh ones.

    python benchmarks/correctness/literal.py --output out/literal.jsonl
"""

from benchmarks import records
from benchmarks.correctness import analytic

import numpy as np

KICKS, DRIFT, ALPHA = (0.1931833275037836, 1 - 2 * 0.1931833275037836), 0.5, 0.01
DIM = analytic.DIM
STEP_SIZES = np.logspace(-4, 0, 13)


def gaussian(x):
    """Gradient of the energy, `[..., 10]`."""
    return x @ np.linalg.inv(analytic.rotated(analytic.VARIANCES, seed=0))


def funnel(x):
    """Gradient of the energy, `[..., 10]`."""
    first, rest = x[..., :1], x[..., 1:]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.exp(-first) * rest
        head = first / 9 + (DIM - 1) / 2 - np.sum(scaled * rest, axis=-1, keepdims=True) / 2
    return np.concatenate([head, scaled], axis=-1)


def rosenbrock(x):
    """Gradient of the energy, `[..., 10]`."""
    first, second = np.split(x, 2, axis=-1)
    gap = 10 * (first**2 - second)
    return np.concatenate([2 * gap * first + first - 1, -gap], axis=-1)


GRADIENTS = {"gaussian": gaussian, "rosenbrock": rosenbrock, "funnel": funnel}


def kick(u, g, length):
    """Turn the direction; the appendix's formula with both parts over exp(delta)."""
    norm = np.maximum(np.linalg.norm(g, axis=-1, keepdims=True), 1e-300)
    e, delta = -g / norm, length * norm / (DIM - 1)
    decay, along = np.exp(-delta), np.sum(u * -g / norm, axis=-1, keepdims=True)
    u = 2 * decay * u + (1 - decay**2 + along * (1 - decay) ** 2) * e
    return u / np.linalg.norm(u, axis=-1, keepdims=True)


def chains(gradient, root, start, sizes, num_steps, rng, scale):
    """Mean of theta^2 over the steps, `[step size, chain, 10]`, of `sizes` `[step size, chain, 1]`.

    Args:
        root: from a point to the root of the covariance of the noise there.
        scale: `"text"`, `"code"` or `"none"`.
    """
    x = np.broadcast_to(start, (*sizes.shape[:2], DIM)).copy()
    u, closing, mean = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    variance, total = np.ones_like(x), np.zeros_like(x)
    for _ in range(num_steps):
        sd = np.sqrt(variance)
        s = sd / np.sqrt(np.mean(variance, axis=-1, keepdims=True))
        noise = rng.standard_normal((x.shape[1], DIM))
        for part in range(3):
            if part:
                x = x + DRIFT * sizes * u / s
                raw = gradient(x) + root(x, noise)
                closing = np.clip(np.nan_to_num(raw / s), -1e6, 1e6)
            u = kick(u, closing, KICKS[part % 2] * sizes) if np.any(closing) else u
        if scale == "text":
            mean = (1 - ALPHA) * mean + ALPHA * raw
            variance = (1 - ALPHA) * variance + ALPHA * (raw - mean) ** 2
        elif scale == "code":
            square = ((1 - ALPHA) * (closing * s - 1)) ** 2
            variance = np.maximum((1 - ALPHA) * variance + ALPHA * square, 1e-7)
        total += x**2
    return total / num_steps


def run_cell(cell: records.Cell) -> records.Record:
    """Search the step size as published, and report the best of the same chains."""
    target, rng = analytic.TARGETS[cell["target"]], np.random.default_rng(0)
    variances = analytic.NOISE_VARIANCE * analytic.VARIANCES
    matrix = np.linalg.cholesky(analytic.rotated(variances, seed=cell["rotation"]))
    matrix = {"isotropic": 16 * np.eye(DIM), "diagonal": np.diag(np.sqrt(variances))}.get(
        cell["noise"], matrix
    )

    def root(x, noise):
        moved = noise @ matrix.T
        if cell["noise"] != "varied":
            return moved
        return moved * np.exp(np.clip(-x[..., 1:2] / (2 * target.second_std), -300, 300))

    def run(sizes):
        sizes = np.broadcast_to(sizes[:, None, None], (len(sizes), cell["num_chains"], 1))
        gradient, steps = GRADIENTS[cell["target"]], cell["num_steps"]
        squares = chains(gradient, root, target.mean, sizes, steps, rng, cell["scale"])
        bias = target.total((squares - target.square) ** 2 / target.square_variance, axis=-1)
        return np.nan_to_num(bias, nan=np.inf)

    searched = run(STEP_SIZES)
    best = np.argmin(searched.mean(axis=1))
    fresh = run(STEP_SIZES[best : best + 1])[0]
    return {
        "chosen": float(searched[best].mean()),
        "chosen_error": analytic.bootstrap_error(searched[best]),
        "bias": float(fresh.mean()),
        "error": analytic.bootstrap_error(fresh),
        "step_size": float(STEP_SIZES[best]),
        "searched": searched.mean(axis=1).tolist(),
    }


def main():
    """Run the cells that are missing."""
    parser = records.parser(
        __doc__, target=GRADIENTS, noise=analytic.NOISES, scale=("text", "code"), rotation=(1,)
    )
    parser.add_argument("--num-steps", type=int, default=1_000_000)
    parser.add_argument("--num-chains", type=int, default=10)
    arguments = parser.parse_args()
    rest = {"num_steps": arguments.num_steps, "num_chains": arguments.num_chains}
    records.complete(arguments, records.cells_of(arguments, **rest), run_cell, "bias")


if __name__ == "__main__":
    main()
