"""Linear regressions whose posteriors are known: variances, memory, and the way to the mode.

    independent  rows of five sizes; the default beside fixed angles with the diagonal scale
    correlated   features mixed by a random matrix, four problems of each size; beside the diagonal
                 scale and an oracle: `smile` in coordinates in which noise and posterior are round
    from zeros   how many gradients a chain needs to get near the mode

Batches go through permutations of the rows, or are drawn with replacement. The first quarter of a
chain is left out. Errors are those of single chains: of the variance, relative to the exact one,
and of the mean, in posterior standard deviations; root mean squares over chains and eigendirections
of the posterior. The variances themselves are means over the chains.

    python benchmarks/correctness/regular.py --output benchmarks/results/regular.jsonl
"""

from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.tables import FIXED_ANGLES

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile
from optax_smile import parallel

ORDERS = ("permutations", "replacement")
# Of a chain that is as near as a draw of the posterior: standard deviations of its distance.
NEAR = 3
EARLY = 6_000
DEFAULT, DIAGONAL = "psmile", "diagonal"


class Problem(NamedTuple):
    """A regression with unit noise, and its posterior under the prior N(0, 1).

    Attributes:
        x: features `[row, size]`.
        y: targets `[row]`.
        mean: of the posterior, `[size]`.
        covariance: of the posterior, `[size, size]`.
    """

    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


def problem(size: int, num_data: int, features: str, seed: int) -> Problem:
    """Normal features, those of ten weights on scales from 1 to 30, mixed if correlated."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_data, size))
    if features == "correlated":
        x = x @ random.normal(size=(size, size)) / np.sqrt(size)
    elif size == 10:
        x = x * np.geomspace(1, 30, size)
    y = x @ random.normal(size=size) + random.normal(size=num_data)
    covariance = np.linalg.inv(x.T @ x + np.eye(size))
    return Problem(x, y, covariance @ x.T @ y, covariance)


def build(method: str, num_data: int, precision: float) -> Any:
    """Build the default, the diagonal scale at an angle, or `smile` at an angle."""
    given: dict[str, Any] = {"num_data": num_data, "key": 0, "prior_precision": precision}
    name, _, angle = method.partition(" ")
    if name == DEFAULT:
        return optax_smile.psmile(**given)
    given["tuner"] = optax_smile.angle_tuner(float(angle) if angle else None)
    if name == DIAGONAL:
        return optax_smile.psmile(largest_matrix=0, **given)
    return optax_smile.smile(**given)


def chains(cell: records.Cell, task: Problem) -> np.ndarray:
    """Draws after every gradient, in posterior standard deviations along its eigendirections."""
    num_data, size, batch = len(task.x), cell["size"], cell["batch_size"]
    values, axes = np.linalg.eigh(task.covariance)
    to_theta = np.eye(size)
    if cell["method"].startswith("oracle"):
        to_theta = axes * np.sqrt(values)
    x, y = (jnp.asarray(a, jnp.float32) for a in (task.x, task.y))
    factor = jnp.asarray(to_theta, jnp.float32)
    tx = build(cell["method"], num_data, 0.0)

    def loss(params, rows):
        theta = factor @ params
        return jnp.mean((x[rows] @ theta - y[rows]) ** 2) / 2 + theta @ theta / (2 * num_data)

    def call(carry, rows):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, rows), state, params)
        params: Any = optax.apply_updates(params, updates)
        return (params, state), params

    def one_pass(carry, key):
        if cell["order"] == "permutations":
            rows = jax.random.permutation(key, num_data)
        else:
            rows = jax.random.randint(key, (num_data,), 0, num_data)
        return jax.lax.scan(call, carry, rows.reshape(-1, batch))

    def chain(params, state, key):
        keys = jax.random.split(key, -(-cell["num_gradients"] * batch // num_data))
        draws = jax.lax.scan(one_pass, (params, state), keys)[1]
        return draws.reshape(-1, size)[: cell["num_gradients"]]

    start = np.linalg.solve(to_theta, task.mean) if cell["start"] == "mode" else np.zeros(size)
    starts = jnp.tile(jnp.asarray(start, jnp.float32), (cell["num_chains"], 1))
    states = parallel.init(tx, starts, key=jax.random.key(cell["seed"]))
    keys = jax.random.split(jax.random.key(1_000 + cell["seed"]), cell["num_chains"])
    draws = np.asarray(jax.jit(jax.vmap(chain))(starts, states, keys), np.float64)
    return (draws @ to_theta.T - task.mean) @ axes / np.sqrt(values)


def errors(relative: np.ndarray) -> dict[str, Any]:
    """Errors of draws `[chain, draw, direction]`, those of single chains with a standard error."""
    relative = relative[:, relative.shape[1] // 4 :]
    squares = {
        "variance_error": np.mean((relative.var(axis=1) - 1) ** 2, axis=1),
        "mean_error": np.mean(relative.mean(axis=1) ** 2, axis=1),
    }
    found: dict[str, Any] = {name: float(np.mean(of) ** 0.5) for name, of in squares.items()}
    for name, of in squares.items():
        found[f"{name}_se"] = float(np.std(of, ddof=1) / len(of) ** 0.5 / (2 * found[name]))
    pooled, of_chains = (relative**2).mean(axis=(0, 1)), (relative**2).mean(axis=(1, 2))
    found["bias"] = float(pooled.mean() - 1)
    found["bias_se"] = float(of_chains.std(ddof=1) / len(of_chains) ** 0.5)
    return found | {"variances": np.round(pooled, 4).tolist()}


def run_cell(cell: records.Cell) -> records.Record:
    """Errors of the draws, or the gradients until a chain is near, the mean over chains."""
    task = problem(
        cell["size"], cell["per_pass"] * cell["batch_size"], cell["features"], cell["seed"]
    )
    relative = chains(cell, task)
    if cell["start"] == "zeros":
        size = cell["size"]
        is_near = (relative**2).sum(axis=2) <= size + NEAR * np.sqrt(2 * size)
        first = np.where(is_near.any(axis=1), is_near.argmax(axis=1), cell["num_gradients"])
        return {"arrival": float(first.mean()), "num_arrived": int(is_near.any(axis=1).sum())}
    found = errors(relative)
    if cell["features"] == "correlated":
        found["early"] = errors(relative[:, :EARLY])
    return found


def cells() -> list[records.Cell]:
    """All of the tables."""
    fields = ("size", "per_pass", "batch_size", "num_gradients")
    common: dict[str, Any] = {"features": "independent", "start": "mode", "num_chains": 16}
    rows = [(3, 4, 100, 4_000), (10, 10, 100, 8_000), (50, 50, 100, 4_000)]
    rows += [(50, 50, 100, 16_000), (200, 50, 200, 4_000), (10, 256, 20, 20_000)]
    methods = (DEFAULT, *(f"{DIAGONAL} {angle}" for angle in FIXED_ANGLES))
    found = [
        dict(zip(fields, row, strict=True), method=method, order=order, seed=0) | common
        for row in rows
        for order in ORDERS
        for method in methods
    ]
    common |= {"features": "correlated", "num_chains": 8}
    found += [
        dict(zip(fields, row, strict=True), method=method, order=order, seed=seed) | common
        for row in [(6, 10, 60, 20_000), (30, 30, 100, 20_000)]
        for order in ORDERS
        for method in (DEFAULT, DIAGONAL, "oracle 0.3")
        for seed in range(11, 15)
    ]
    common |= {"features": "independent", "start": "zeros", "order": "replacement", "seed": 0}
    found += [
        dict(zip(fields, row, strict=True), method=method) | common
        for row in [(3, 4, 100, 20_000), (10, 10, 100, 20_000), (50, 50, 100, 20_000)]
        for method in (DEFAULT, DIAGONAL)
    ]
    return found


def main():
    """Run the cells that are missing, print the tables."""
    parser = records.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help="of the cells to run; default: all")
    arguments = parser.parse_args()
    chosen = [x for x in cells() if arguments.sizes is None or x["size"] in arguments.sizes]
    shown = ("regular", "correlated", "from-zeros")
    records.complete(arguments, chosen, run_cell, "seconds", *shown)


if __name__ == "__main__":
    main()
