"""Two figures of the paper's appendix: the energy errors on a Gaussian, and 25 modes.

`energies`: |Delta E| of psmile_naive on the ill-conditioned Gaussian with isotropic noise, beside
the Gamma distribution of the same moments, whose 98 % quantile is the paper's guardrail, and the
half-normal one. `modes`: a mixture of 25 Gaussians in the first two of ten dimensions, psmile_naive
at a step of .6, and cyclical SGLD with cycles of 5,000 steps at the step size that gives updates of
the same mean length. One draw of the noise covers the end of a step and the middle of the next, as
with `sample(batch_per="step")`, so that an energy error compares the energies of two draws.

    python benchmarks/correctness/appendix.py --output out/appendix.jsonl
"""

import functools
from typing import Any

from benchmarks import records, samplers
from benchmarks.correctness import analytic

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

import optax_smile

CYCLE, THIN = 5_000, 50
STEP_SIZES = {"energies": 0.1, "modes": 0.6}
MEANS, VARIANCE, EDGES = np.arange(-4.0, 5, 2), 0.3, np.linspace(-6, 6, 61)
# A mode counts as found from a tenth of its share on.
FOUND = 0.1 / 25


def mixture(theta):
    """Energy of the 25 modes and of eight standard normal dimensions."""
    # The mixture is a product, as its means are a grid.
    pairs = -((theta[:2, None] - MEANS) ** 2) / (2 * VARIANCE)
    return jnp.sum(theta[2:] ** 2) / 2 - jnp.sum(jax.nn.logsumexp(pairs, axis=1))


@functools.partial(jax.jit, static_argnames=("part", "sampler", "num_steps"))
def run(part, sampler, step_size, num_steps, keys):
    """Run chains; positions `[chain, draw, 2]`, energy errors and lengths of updates."""
    energy = mixture if part == "modes" else analytic.TARGETS["gaussian"].energy
    calls, options = 2, {}
    if sampler == "cyclical_sgld":
        calls, options = 1, {"total_steps": num_steps, "num_cycles": num_steps // CYCLE}

    def one_chain(key):
        given = options | {"key": key} if options else {}
        tx = samplers.build(sampler, step_size, num_data=1, prior_precision=0.0, **given)

        def step(carry: tuple[Any, Any], key: jax.Array):
            noise = jax.random.normal(key, (10,)) * np.sqrt(analytic.NOISE_VARIANCE)
            start, told = carry[0], ()
            for _ in range(calls):
                params, state = carry
                gradient = jax.grad(energy)(params) + noise
                value = energy(params) + noise @ params
                updates, state = tx.update(gradient, state, params, value=value)
                moved: Any = optax.apply_updates(params, updates)
                carry = moved, state
                # The first call gets the end of the step before.
                seen = optax_smile.stats(state)
                told = told or (params[:2], seen.is_draw, seen.energy_change)
            return carry, (*told, jnp.linalg.norm(carry[0] - start))

        def chunk(carry, key):
            carry, (places, is_draw, errors, lengths) = jax.lax.scan(
                step, carry, jax.random.split(key, THIN)
            )
            return carry, (places[-1], is_draw[-1], errors, jnp.mean(lengths))

        start = jnp.zeros(10)
        keys = jax.random.split(key, num_steps // THIN)
        return jax.lax.scan(chunk, (start, tx.init(start)), keys)[1]

    return jax.vmap(one_chain)(keys)


def energies(cell, keys):
    """Histogram of |Delta E| in units of its mean, and what the Gamma quantile leaves out."""
    found = run("energies", "psmile_naive published", cell["step_size"], cell["num_steps"], keys)
    errors = np.abs(np.asarray(found[2], float)).reshape(len(keys), -1)
    errors = errors[:, errors.shape[1] // 10 :].ravel()
    mean, std = errors.mean(), errors.std()
    gamma = scipy.stats.gamma((mean / std) ** 2, scale=std**2 / mean)
    normal = scipy.stats.halfnorm(scale=np.sqrt(np.mean(errors**2)))
    bounds = [float(of.ppf(0.98)) for of in (gamma, normal)]
    counts, edges = np.histogram(errors / mean, 60, (0, 6))
    return {
        "mean": float(mean),
        "std": float(std),
        "above_gamma": float(np.mean(errors > bounds[0])),
        "above_normal": float(np.mean(errors > bounds[1])),
        "bounds": [bound / mean for bound in bounds],
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }


def matched(wanted: float, num_steps: int, keys) -> float:
    """Step size of cyclical SGLD whose updates have a mean length."""
    low, high = np.log([1e-6, 1.0])
    for _ in range(20):
        middle = (low + high) / 2
        length = np.mean(run("modes", "cyclical_sgld", np.exp(middle), num_steps, keys)[3])
        low, high = (middle, high) if length < wanted else (low, middle)
    return float(np.exp((low + high) / 2))


def modes(cell, keys):
    """How many modes one chain and all chains find, and the draws of the first two dimensions."""
    size, trial = cell["step_size"], 2 * CYCLE
    lengths = run("modes", "psmile_naive published", size, trial, keys)[3]
    if cell["sampler"] == "cyclical_sgld":
        size = matched(float(np.mean(lengths)), trial, keys)
    places, is_draw, *_ = run("modes", cell["sampler"], size, cell["num_steps"], keys)
    drawn = [np.asarray(x)[np.asarray(of)] for x, of in zip(places, is_draw, strict=True)]

    def shares(draws):
        nearest = np.argmin(np.abs(draws[..., None] - MEANS), axis=2) @ [5, 1]
        return np.bincount(nearest, minlength=25) / len(draws)

    pooled = shares(np.concatenate(drawn))
    grids = [
        np.histogram2d(of[:, 0], of[:, 1], [EDGES, EDGES])[0]
        for of in (drawn[0], np.concatenate(drawn))
    ]
    return {
        "matched_step_size": size,
        "found_by_one": [int(np.sum(shares(of) > FOUND)) for of in drawn],
        "found_by_all": int(np.sum(pooled > FOUND)),
        "least_share": float(25 * pooled.min()),
        "distance": float(np.abs(pooled - 1 / 25).sum() / 2),
        "grids": [grid.astype(int).tolist() for grid in grids],
    }


def run_cell(cell: records.Cell) -> records.Record:
    """Run a part."""
    keys = jax.random.split(jax.random.key(cell["seed"]), cell["num_chains"])
    found = energies(cell, keys) if cell["part"] == "energies" else modes(cell, keys)
    return {"shown": found.get("above_gamma", found.get("found_by_all")), **found}


def main():
    """Run the cells that are missing."""
    parser = records.parser(__doc__)
    parser.add_argument("--num-chains", type=int, default=10)
    parser.add_argument("--num-steps", type=int, default=1_000_000)
    arguments = parser.parse_args()
    rest = {"num_chains": arguments.num_chains, "num_steps": arguments.num_steps, "seed": 0}
    pairs = [("energies", "psmile_naive published")]
    pairs += [("modes", name) for name in ("psmile_naive published", "cyclical_sgld")]
    cells = [
        {"part": part, "sampler": name, "step_size": STEP_SIZES[part], **rest}
        for part, name in pairs
    ]
    records.complete(arguments, cells, run_cell, "shown")


if __name__ == "__main__":
    main()
