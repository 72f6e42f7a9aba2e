"""Tall data: how many examples an effective draw costs, and whether the draws are right.

    linear, logistic, poisson, student   regressions with the prior N(0, 1) on every parameter
    groups, groups non-centred           8 or 100 groups, their mean and spread, and slopes

Methods with "cv" use `tall.find_mode` and `tall.control_variate`, those with "stored" the gradients
of single examples at the mode. "psmile centres" is `sample` with `control_variate=` a list of
batches: the centres move along. Steps of `sgld` and `sghmc` are the best of a grid, by the error of
the variances. "nuts" adapts itself, with a diagonal or dense mass matrix; "hmcecs" has the Taylor
proxy, and is told the mode and the covariance. Chains run in this process: for effective draws per
second of one core, `taskset -c 0`.

Errors are those of whole runs in coordinates in which the posterior has unit covariance, the first
third left out. References are exact, or by importance sampling; for the groups a long run of NUTS.
Examples count all gradients of one, after the warm-up.

    taskset -c 0 python benchmarks/correctness/tall.py --output benchmarks/results/tall.jsonl
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import records

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import HMC, HMCECS, MCMC, NUTS, init_to_value

import optax_smile
from optax_smile import tall

SIZES = {"linear": 30, "logistic": 30, "poisson": 20, "student": 31}
NUM_CHAINS, BATCH, BLOCKS = 8, 100, 10
# Draws of the reference, and degrees of freedom of their Student's t.
REFERENCE, FREEDOM = 100_000, 30
GRIDS = {"sgld": (0.6, 0.3, 0.1, 0.03), "sghmc": (0.9, 0.6, 0.3, 0.1)}
OWN = ("psmile cv", "psmile stored", "psmile", "smile cv", "sgld cv", "sghmc cv")
CENTRES, THIN = "psmile centres", 4
RIVALS = ("nuts diagonal", "nuts dense", "hmcecs")


class Problem(NamedTuple):
    """A posterior of flat parameters.

    Attributes:
        loss: mean loss of a batch.
        model: for NumPyro, `model(*batch)`, with the size of the data in its plate.
        data: arrays with the examples as first axis.
        given: prior, for the samplers.
        center: found there.
        sites: parameters of NumPyro's model from flat ones, constrained for `groups`.
    """

    loss: Callable[..., jax.Array]
    model: Callable
    data: tuple
    given: dict[str, Any]
    center: tall.Center
    sites: Callable


def of_predictor(name: str, w: Any, x: Any, offset: Any) -> Any:
    """Distribution of the targets."""
    if name == "student":
        return dist.StudentT(4.0, x @ w[:-1], jnp.exp(w[-1]))
    z = x @ w + offset
    if name == "linear":
        return dist.Normal(z, 1.0)
    return dist.Bernoulli(logits=z) if name == "logistic" else dist.Poisson(jnp.exp(z))


def loss_of(name: str, w: jax.Array, batch: tuple) -> jax.Array:
    """Mean of minus the log density, without constants."""
    x, y, offset = batch
    if name == "student":
        return jnp.mean(2.5 * jnp.log1p((x @ w[:-1] - y) ** 2 * jnp.exp(-2 * w[-1]) / 4)) + w[-1]
    z = x @ w + offset
    if name == "linear":
        return jnp.mean((z - y) ** 2) / 2
    return jnp.mean((jax.nn.softplus(z) if name == "logistic" else jnp.exp(z)) - y * z)


def features(random: np.random.Generator, num_data: int, size: int, smallest: float) -> Any:
    """Correlated ones, with standard deviations from one to the smallest along their axes."""
    turns = [np.linalg.qr(random.normal(size=(size, size)))[0] for _ in range(2)]
    return (
        random.normal(size=(num_data, size))
        @ (turns[0] * np.geomspace(1, smallest, size))
        @ turns[1]
    )


@functools.cache
def problem(name: str, num_data: int, size: int) -> Problem:
    """Simulate the data and find the mode."""
    random = np.random.default_rng(0)
    if name.startswith("groups"):
        return groups(random, num_data, size, "non-centred" not in name)
    offset: Any = np.zeros(num_data)
    w: Any = 0.5 * random.normal(size=size)
    if name == "logistic":
        # An intercept, ten indicators, some of them rare, and correlated numbers.
        rare = random.random((num_data, 10)) < np.geomspace(0.02, 0.4, 10)
        x = np.hstack([np.ones((num_data, 1)), rare, features(random, num_data, size - 11, 0.2)])
        w[0] = -1.5
    elif name == "poisson":
        x = np.hstack([np.ones((num_data, 1)), features(random, num_data, size - 1, 0.2)])
        w[0], offset = 0.0, 0.7 * random.normal(size=num_data)
    else:
        x = features(random, num_data, size - (name == "student"), 0.1)
    drawn = of_predictor(name, *map(jnp.asarray, (w, x, offset))).sample(jax.random.key(0))
    data = tuple(np.float32(a) for a in (x, drawn, offset))

    def model(x, y, offset):
        w: Any = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("data", num_data, subsample_size=len(y)):
            numpyro.sample("y", of_predictor(name, w, x, offset), obs=y)

    loss, given = functools.partial(loss_of, name), {"prior_precision": 1.0}
    return Problem(
        loss, model, data, given, mode(loss, np.zeros(size), data, given), lambda w: {"w": w}
    )


def groups(random: np.random.Generator, num_data: int, number: int, is_centred: bool) -> Problem:
    """Groups with a common mean and spread, and three slopes, or 27 for 100 groups."""
    slopes = 3 if number < 100 else 27
    group, x = random.integers(0, number, num_data), random.normal(size=(num_data, slopes))
    y = (0.5 + 0.7 * random.normal(size=number))[group] + x @ (0.5 * random.normal(size=slopes))
    data = group, np.float32(x), np.float32(y + random.normal(size=num_data))

    def model(group, x, y):
        mean: Any = numpyro.sample("mean", dist.Normal(0, 2))
        spread: Any = numpyro.sample("spread", dist.HalfNormal(1))
        noise: Any = numpyro.sample("noise", dist.LogNormal(0, 0.5))
        slope: Any = numpyro.sample("slope", dist.Normal(0, 1).expand([slopes]).to_event(1))
        with numpyro.plate("groups", number):
            if is_centred:
                level: Any = numpyro.sample("level", dist.Normal(mean, spread))
            else:
                level = mean + spread * numpyro.sample("height", dist.Normal(0, 1))
        with numpyro.plate("data", num_data, subsample_size=len(y)):
            numpyro.sample("y", dist.Normal(level[group] + x @ slope, noise), obs=y)

    first = jax.tree.map(lambda a: a[:BATCH], data)
    bridge = optax_smile.interop.from_numpyro(model, first, num_data=num_data)
    start, unravel = ravel_pytree(bridge.init_fn(jax.random.key(1)))
    given = {x: y for x, y in bridge.posterior.items() if x != "num_data"}
    given["log_prior"] = lambda w: bridge.log_prior(unravel(w))

    def loss(w, batch):
        return bridge.loss_fn(unravel(w), batch)

    def sites(w):
        found = unravel(w)
        return {x: jnp.exp(y) if x in ("spread", "noise") else y for x, y in found.items()}

    return Problem(loss, model, data, given, mode(loss, start, data, given), sites)


def mode(loss: Callable, start: Any, data: tuple, given: dict[str, Any]) -> tall.Center:
    """Search with large batches."""
    num_data = len(data[0])
    parts = [jax.tree.map(lambda a, i=i: a[i : i + 1_000], data) for i in range(0, num_data, 1_000)]
    sampler = optax_smile.psmile(num_data=num_data, key=0, **given)
    return tall.find_mode(loss, jnp.asarray(start, jnp.float32), parts, sampler)


@functools.cache
def reference(name: str, num_data: int, size: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and covariance of the constrained sites, and the effective size of their estimate."""
    task = problem(name, num_data, size)
    if name.startswith("groups"):
        draws, *_ = nuts(task, True, 1_000, 2_500, 2, 99)
        size = effective_sample_size(draws).min()
        return draws.mean((0, 1)), np.cov(draws.reshape(-1, draws.shape[-1]).T), float(size)
    place, data = task.center.params, jax.tree.map(jnp.asarray, task.data)

    def energy(w):
        return num_data * task.loss(w, data) + w @ w / 2

    hessian = np.asarray(jax.jit(jax.hessian(energy))(place), float)
    covariance = np.linalg.inv(hessian)
    if name == "linear":
        gradient = np.asarray(jax.jit(jax.grad(energy))(place), float)
        return place - covariance @ gradient, covariance, np.inf
    random, root = np.random.default_rng(1), np.linalg.cholesky(covariance)
    z = random.normal(size=(REFERENCE, size))
    z /= np.sqrt(random.chisquare(FREEDOM, size=(REFERENCE, 1)) / FREEDOM)
    draws = np.asarray(place) + z @ root.T
    energies = jax.jit(lambda w: jax.lax.map(energy, w, batch_size=50))(jnp.float32(draws))
    logs = (FREEDOM + size) / 2 * np.log1p((z**2).sum(1) / FREEDOM) - np.asarray(energies, float)
    weight = np.exp(logs - logs.max())
    weight /= weight.sum()
    found = weight @ draws
    return found, ((draws - found).T * weight) @ (draws - found), float(1 / (weight**2).sum())


def nuts(
    task: Problem, is_dense: bool, warmup: int, number: int, num_chains: int, seed: int
) -> Any:
    """Draws `[chain, draw, entry]`, seconds without compilation, and examples."""
    kernel = NUTS(task.model, dense_mass=is_dense, init_strategy=begun(task))
    chains = MCMC(
        kernel, num_warmup=warmup, num_samples=number, num_chains=num_chains, progress_bar=False
    )
    data = jax.tree.map(jnp.asarray, task.data)
    chains.warmup(jax.random.key(seed), *data)
    began = time.perf_counter()
    chains.run(jax.random.key(seed + 1), *data, extra_fields=("num_steps",))
    seconds = time.perf_counter() - began
    steps = int(np.asarray(chains.get_extra_fields()["num_steps"]).sum())
    return flat(chains.get_samples(group_by_chain=True), task), seconds, steps * len(data[0])


def begun(task: Problem) -> Any:
    """Start at the mode."""
    return init_to_value(values=task.sites(task.center.params))


def flat(sites: dict[str, Any], task: Problem) -> np.ndarray:
    """Join the sites of draws `[chain, draw, ...]`, in the order of flat parameters."""
    names = jax.eval_shape(task.sites, task.center.params)
    parts = [np.asarray(sites[x], float) for x in sorted(names)]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], axis=-1)


def hmcecs(
    name: str, task: Problem, warmup: int, number: int, seed: int, covariance: np.ndarray
) -> Any:
    """Like `nuts`, with batches, told the covariance and the mode."""
    (x, y, offset), w = jax.tree.map(jnp.asarray, task.data), task.center.params

    def model():
        w = numpyro.sample("w", dist.Normal(0, 1).expand([len(covariance)]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=BATCH) as rows:
            numpyro.sample("y", of_predictor(name, w, x[rows], offset[rows]), obs=y[rows])

    told = {"inverse_mass_matrix": jnp.float32(covariance), "dense_mass": True}
    inner = HMC(model, init_strategy=begun(task), trajectory_length=1.5, **told)
    proxy = HMCECS.taylor_proxy({"w": w})
    chains = MCMC(
        HMCECS(inner, num_blocks=BLOCKS, proxy=proxy),
        num_warmup=warmup,
        num_samples=number,
        progress_bar=False,
    )
    chains.warmup(jax.random.key(seed))
    began = time.perf_counter()
    chains.run(jax.random.key(seed + 1), extra_fields=("hmc_state.num_steps",))
    seconds = time.perf_counter() - began
    steps = int(np.asarray(chains.get_extra_fields()["hmc_state.num_steps"]).sum())
    # A block of the batch is replaced in each draw: its proxies take a gradient and a Hessian.
    examples = steps * BATCH + number * BATCH / BLOCKS * (1 + len(covariance))
    return flat(chains.get_samples(group_by_chain=True), task), seconds, examples


def own(task: Problem, method: str, step: float | None, cell: records.Cell) -> Any:
    """Draws `[chain, draw, entry]` of all steps, seconds, and examples, see `nuts`."""
    name, form = (*method.split(), "plain")[:2]
    loss, data, gradients = task.loss, task.data, 1
    if form == "cv":
        loss, gradients = tall.control_variate(loss, task.center), 2
    elif form == "stored":
        loss, data = tall.stored(loss, task.center, task.data)
    num_data, batch, seed = cell["num_data"], cell["batch_size"], cell["seed"]
    sampler = getattr(optax_smile, name)
    tx = sampler(*[step] * (step is not None), num_data=num_data, key=0, **task.given)
    data, per_pass = jax.tree.map(jnp.asarray, data), num_data // batch

    def call(carry, rows):
        params, state = carry
        part = jax.tree.map(lambda a: a[rows], data)
        value, gradient = jax.value_and_grad(loss)(params, part)
        updates, state = tx.update(gradient, state, params, value=value)
        params: Any = optax.apply_updates(params, updates)
        return (params, state), optax_smile.last_accepted(state, params)

    def one_pass(carry, key):
        rows = jax.random.permutation(key, num_data)[: per_pass * batch].reshape(per_pass, batch)
        return jax.lax.scan(call, carry, rows)

    def chain(params, state, key):
        keys = jax.random.split(key, -(-cell["num_steps"] // per_pass))
        return jax.lax.scan(one_pass, (params, state), keys)[1].reshape(-1, len(params))

    starts = jnp.tile(task.center.params, (NUM_CHAINS, 1))
    states = optax_smile.parallel.init(tx, starts, key=jax.random.key(seed))
    keys = jax.random.split(jax.random.key(1_000 + seed), NUM_CHAINS)
    program = jax.jit(jax.vmap(chain)).lower(starts, states, keys).compile()
    began = time.perf_counter()
    draws = jax.block_until_ready(program(starts, states, keys))
    seconds = time.perf_counter() - began
    draws = draws[:, draws.shape[1] // 3 :]
    sites = jax.jit(jax.vmap(jax.vmap(task.sites)))(draws)
    examples = draws.shape[0] * draws.shape[1] * batch * gradients
    return flat(sites, task), seconds * 2 / 3, examples


def centred(task: Problem, cell: records.Cell) -> Any:
    """Draws, seconds and examples of `Run` with moving centres, see `own`."""
    num_data, batch, seed, steps = (
        cell[x] for x in ("num_data", "batch_size", "seed", "num_steps")
    )
    order = np.random.default_rng(seed).permutation(num_data).reshape(-1, batch)
    batches = [jax.tree.map(lambda a, of=rows: a[of], task.data) for rows in order]
    run = optax_smile.Run(
        task.loss,
        optax_smile.chains_from_weights([task.center.params], num_chains=NUM_CHAINS, key=seed),
        batches,
        optax_smile.psmile(num_data=num_data, key=0, **task.given),
        key=seed,
        control_variate=batches,
        steps_per_dispatch=100,
        check=False,
    )
    run.advance(steps // 3)
    before, began = np.median(run.stats["num_passes"]), time.perf_counter()
    for _ in run.draws(steps * 2 // 3 // THIN, thin=THIN):
        pass
    seconds, passes = time.perf_counter() - began, np.median(run.stats["num_passes"]) - before
    sites = jax.jit(jax.vmap(jax.vmap(task.sites)))(run.snapshots().params)
    draws = flat(sites, task)
    examples = NUM_CHAINS * (draws.shape[1] * THIN * batch + float(passes) * num_data)
    return draws, seconds, examples


def judged(found: Any, cell: records.Cell) -> dict[str, Any]:
    """Errors against the reference, and the cost of an effective draw."""
    draws, seconds, examples = found
    mean, covariance, size = reference(*(cell[x] for x in ("problem", "num_data", "size")))
    values, axes = np.linalg.eigh(covariance)
    if cell["problem"].startswith("groups"):
        # Of single parameters, as users read them.
        values, axes = np.diag(covariance), np.eye(len(mean))
    z = (draws - mean) @ axes / np.sqrt(values)
    if not np.all(np.isfinite(z)):
        return {"lost": True}
    pooled = (z**2).mean((0, 1)) - z.mean((0, 1)) ** 2
    sizes = effective_sample_size(z), effective_sample_size(z**2)
    return {
        "mean_error": float(np.sqrt(np.mean(z.mean((0, 1)) ** 2))),
        "largest_mean_error": float(np.abs(z.mean((0, 1))).max()),
        "variance_error": float(np.sqrt(np.mean((pooled - 1) ** 2))),
        "variances": [float(pooled.min()), float(pooled.mean()), float(pooled.max())],
        "ess": [float(sizes[0].min()), float(np.median(sizes[0])), float(sizes[1].min())],
        "reference_ess": size,
        "rhat": float(split_gelman_rubin(z).max()) if len(z) > 1 else None,
        "examples": examples / float(np.median(sizes[0])),
        "per_second": float(sizes[0].min()) / seconds,
    }


def run_cell(cell: records.Cell) -> records.Record:
    """Run a method; the best of several steps."""
    name, method, seed = cell["problem"], cell["method"], cell["seed"]
    task = problem(name, cell["num_data"], cell["size"])
    if method.startswith("nuts"):
        warmup, number = cell["num_steps"] // 3, cell["num_steps"]
        return judged(nuts(task, method.endswith("dense"), warmup, number, 1, seed), cell)
    if method == "hmcecs":
        covariance = reference(name, cell["num_data"], cell["size"])[1]
        return judged(hmcecs(name, task, 500, cell["num_steps"], seed, covariance), cell)
    if method == CENTRES:
        return judged(centred(task, cell), cell)
    kind = method.split()[0]
    if kind not in GRIDS:
        return judged(own(task, method, None, cell), cell)
    covariance = reference(name, cell["num_data"], cell["size"])[1]
    shortest = np.linalg.eigvalsh(covariance)[0] ** (1 if kind == "sgld" else 0.5)
    tried = [(x, judged(own(task, method, x * shortest, cell), cell)) for x in GRIDS[kind]]
    step, best = min(tried, key=lambda x: x[1].get("variance_error", np.inf))
    return best | {"relative_step": step}


def cells() -> list[records.Cell]:
    """All of the table."""
    found = []
    sizes = [("linear", 20_000), ("logistic", 5_000), ("logistic", 50_000), ("poisson", 20_000)]
    for name, num_data in [*sizes, ("student", 20_000)]:
        for method in (CENTRES, *OWN) + RIVALS[: 2 if name == "student" else 3]:
            for seed in range(3):
                steps = {"hmcecs": 8_000}.get(method, 300 if "nuts" in method else 12_000)
                found.append((name, num_data, SIZES[name], method, seed, BATCH, steps))
    for name, size in (("groups", 8), ("groups non-centred", 8), ("groups", 100)):
        for method in ("psmile cv", "psmile", "nuts diagonal", "nuts dense"):
            steps = 600 if "nuts" in method else 40_000
            found += [(name, 20_000, size, method, seed, 200, steps) for seed in range(3)]
        batch = 1_000 if "non-centred" in name else 200
        found += [(name, 20_000, size, CENTRES, seed, batch, 40_000) for seed in range(3)]
    names = "problem", "num_data", "size", "method", "seed", "batch_size", "num_steps"
    return [dict(zip(names, values, strict=True)) for values in found]


def main():
    """Run the cells that are missing, print the table."""
    parser = records.parser(__doc__, problem=dict.fromkeys(x["problem"] for x in cells()))
    parser.add_argument("--methods", nargs="+", help="of the cells to run; default: all")
    arguments = parser.parse_args()
    chosen = [x for x in cells() if x["problem"] in arguments.problem]
    chosen = [x for x in chosen if arguments.methods is None or x["method"] in arguments.methods]
    records.complete(arguments, chosen, run_cell, "seconds", "tall")


if __name__ == "__main__":
    main()
