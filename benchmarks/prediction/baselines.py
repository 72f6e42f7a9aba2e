r"""Baselines of `networks.py` that are no samplers: checkpoints, SWAG, FGE, IVON, Laplace.

Each is `name(run, options)`, with the numbers that differ from the method's `DEFAULTS` as options,
and gives draws to predict with: `Snapshots` of one chain, which iterate as trees without a chain
axis; their `settings` have the name, the options and what was found.
"""

import dataclasses
import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Experiment, Settings, draw
from flax import serialization
from rivals import gaussian, ivon_optimizer, swag_draws

import optax_smile

DEFAULTS: dict[str, dict[str, Any]] = {
    # Those of LeNet's warm start, for every network: it is not the training of the others that
    # goes on.
    "checkpoints": {"learning_rate": 1e-3, "weight_decay": 0.02},
    # Moments of the checkpoints above.
    "swag": {"learning_rate": 1e-3, "weight_decay": 0.02, "rank": 20},
    # Cycles of `thin` steps, from the rate to a tenth of it.
    "fge": {"learning_rate": 2e-3, "weight_decay": 0.02},
    # Of the authors' runs on CIFAR-10: ivon-experiments, bdl_indomain/train_ivon.sh.
    "ivon": {
        "learning_rate": 0.2,
        "momentum_decay": 0.9,
        "hessian_decay": 0.99999,
        "hess_init": 0.5,
        "weight_decay": 2e-4,
    },
    # From the samplers' prior up, by half decades.
    "laplace": {
        "prior_precisions": [10 ** (power / 2) for power in range(15)],
        "num_tried": 10,
        "chunk_size": 16,
    },
}


class Run(NamedTuple):
    """Where a baseline begins and how long it is.

    Attributes:
        task: network and data.
        settings: as many gradients as a sampler takes, on the batches that `experiment.draw` gives
            it with the same seed.
        start: trained weights of one member `[1, ...]`, as `experiment.warm_start` gives them.
        seed: of the batches and of all that is random.
        directory: folder from which training that was cut off goes on.
    """

    task: Experiment
    settings: Settings
    start: Any
    seed: int
    directory: Path


def checkpoints(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Go on with AdamW at a constant rate; keep every `thin`-th weights after the warm-up.

    Options: `learning_rate` and `weight_decay` of `optax.adamw`.
    """
    chosen = _chosen("checkpoints", options)
    return _snapshots("checkpoints", chosen, run.start, _train_on(run, **chosen))


def fge(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Go on with AdamW at a cyclical rate; keep the weights where it is lowest.

    Options: the highest `learning_rate` and `weight_decay`. The rate falls linearly to a tenth
    within the first half of `thin` steps and rises again; weights are kept in the middle.

    Source: Garipov et al., NeurIPS 2018. Differs: AdamW in place of SGD.
    """
    chosen, thin = _chosen("fge", options), run.settings.thin
    offset = thin - (run.settings.num_warmup + thin // 2) % thin  # draws are in the middle

    def rate(count):
        phase = (count + offset) % thin / thin
        return chosen["learning_rate"] * (0.1 + 0.9 * jnp.abs(1 - 2 * phase))

    draws = _train_on(run, rate, chosen["weight_decay"])
    return _snapshots("fge", chosen, run.start, draws)


def swag(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Draw from a Gaussian with the moments of the checkpoints.

    Half of the covariance is the diagonal one, half that of the last `rank` deviations from the
    mean.

    Options: `learning_rate` and `weight_decay` of `optax.adamw`, and `rank`.

    Source: Maddox et al., NeurIPS 2019. Differs: AdamW in place of SGD, deviations from the final
    mean in place of the running one.
    """
    chosen = _chosen("swag", options)
    visited = _train_on(run, chosen["learning_rate"], chosen["weight_decay"])
    random = np.random.default_rng(run.seed)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *visited)
    drawn = swag_draws(stacked, run.settings.num_draws, chosen["rank"], random)
    draws = [jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(run.settings.num_draws)]
    return _snapshots("swag", chosen, run.start, draws)


def ivon(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    """Fit a diagonal Gaussian around the weights by IVON and draw from it.

    Options: those of `ivon_optimizer`. The learning rate falls to zero along a cosine. A
    `weight_decay` of `prior_precision / num_data` is the prior of the samplers. At the end
    `hess_init` has the weight `hessian_decay ** steps` in the Hessian: much in few steps.
    """
    chosen, task, settings = _chosen("ivon", options), run.task, run.settings
    num_steps = settings.num_warmup + settings.num_draws * settings.thin
    rate = optax.cosine_decay_schedule(chosen["learning_rate"], num_steps)
    optimizer = ivon_optimizer(**chosen | {"learning_rate": rate, "num_data": task.num_data})

    def precision_of(state):
        return jax.tree.map(lambda h: task.num_data * (h + chosen["weight_decay"]), state.hessian)

    def place(key, mean, state):
        return gaussian(key, mean, precision_of(state))

    *_, (_, mean, state) = train(run, optimizer, place)
    draws = list(_drawn(run.seed, mean, precision_of(state), settings.num_draws))
    return _snapshots("ivon", chosen, run.start, draws)


def laplace(run: Run, options: Mapping[str, Any]) -> optax_smile.Snapshots:
    r"""Draw from N(start, 1 / (N F + delta)), with a diagonal precision.

    N is the number of targets, F the Fisher diagonal of each by `fisher`, delta the precision of
    the prior whose draws predict the validation data best.

    Options: `prior_precisions`, what delta is chosen from; `num_tried`, draws that decide;
    `chunk_size`, examples whose gradients are in memory together. The draws' settings tell delta,
    `prior_precision`, and the LPPD of each, `tried`. Raises a ValueError without classes.

    Cost: one gradient per example, and `num_tried` predictions of the validation data per delta.
    Keeps nothing in the directory.

    Source: Ritter, Botev & Barber, ICLR 2018; delta by validation: Daxberger et al., NeurIPS 2021.
    Differs: own code, as laplax 0.0.2 takes one product with the Gauss-Newton matrix for each
    parameter (`laplax.util.mv.diagonal`), 61,706 for LeNet. Draws go through the network as it is.
    """
    chosen = _chosen("laplace", options)
    task, settings, start, seed, _ = run
    if task.likelihood not in ("categorical", "tokens"):
        raise ValueError(f"`laplace` takes classes or tokens, got {task.likelihood!r}.")
    mean = jax.tree.map(_own, start)
    information = fisher(task, settings, mean, seed, chosen["chunk_size"])

    def drawn(delta, number):
        precision = jax.tree.map(lambda x: task.num_data * x + delta, information)
        return _drawn(seed, mean, precision, number)

    def lppd(draws):
        inputs, targets = task.splits.valid
        kept = {"targets": targets, "likelihood": task.likelihood, "batch_size": 500}
        return float(optax_smile.predict(task.outputs_of, draws, inputs, **kept).log_density.mean())

    deltas = chosen["prior_precisions"]
    tried = [lppd(drawn(delta, chosen["num_tried"])) for delta in deltas]
    best = int(np.argmax(tried))
    if len(deltas) > 1 and best in (0, len(deltas) - 1):
        warnings.warn(f"`laplace`: best at {deltas[best]:g}, an end of the grid.", stacklevel=2)
    chosen |= {"prior_precision": deltas[best], "tried": tried}
    return _snapshots("laplace", chosen, start, list(drawn(deltas[best], settings.num_draws)))


METHODS = {"checkpoints": checkpoints, "swag": swag, "fge": fge, "ivon": ivon, "laplace": laplace}


def train(
    run: Run,
    optimizer: optax.GradientTransformation,
    place: Callable[[jax.Array, Any, Any], Any],
) -> Iterator[tuple[int, Any, Any]]:
    """Train on the batches of a sampler; yield number, weights and state where it makes a draw.

    The next step overwrites what was yielded, and begins when it is in the directory: what was cut
    off goes on at the draw that was yielded last, and yields it again.

    `place(key, params, state)` gives the weights at which the gradient is taken, and the
    optimizer's update gets them as `point`.
    """
    task, settings, start, seed, directory = run
    optimizer = optax.with_extra_args_support(optimizer)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, key, number, batch):
        point = place(jax.random.fold_in(key, number), params, state)
        gradient = jax.grad(task.mean_loss)(point, batch)
        updates, state = optimizer.update(gradient, state, params, point=point)
        return optax.apply_updates(params, updates), state

    params, key = jax.tree.map(_own, start), jax.random.key(seed)
    state, drawn = optimizer.init(params), 0
    directory.mkdir(parents=True, exist_ok=True)
    last, told = directory / "last.msgpack", json.dumps(dataclasses.asdict(settings))
    if last.exists():
        like = told, drawn, params, state
        found: Any = serialization.from_bytes(like, last.read_bytes())
        before, drawn, params, state = found
        if before != told:
            raise SystemExit(f"{directory} is of other settings: {before}. Delete it.")
        yield drawn - 1, params, state
    # Each `iter` of the batches is another pass.
    batches = task.batches(settings.sampling_batch_size, seed)
    passes = itertools.chain.from_iterable(itertools.repeat(batches))
    num_steps = settings.num_warmup + settings.num_draws * settings.thin
    done = settings.num_warmup + drawn * settings.thin if drawn else 0
    for number, batch in enumerate(itertools.islice(passes, done, num_steps), done + 1):
        params, state = step(params, state, key, number, batch)
        after = number - settings.num_warmup
        if after > 0 and after % settings.thin == 0:
            drawn = after // settings.thin
            yield drawn - 1, params, state
            _save(last, (told, drawn, params, state))


def fisher(task: Experiment, settings: Settings, params: Any, seed: int, chunk_size: int) -> Any:
    r"""Estimate the Fisher diagonal E[(grad log p(y | x))^2] per target, on one pass of batches.

    Targets are drawn from the network itself. Those of one example, such as the tokens of a piece,
    are independent and their scores have mean zero: the square of their sum has the mean of the
    sum of their squares, and one gradient per example is enough.
    """
    # As many gradients in memory as divide the batch.
    size = math.gcd(settings.sampling_batch_size, chunk_size)

    def squared(params, key, inputs):
        logits, pull = jax.vjp(lambda p: task.outputs_of(p, inputs[None]), params)
        targets = jax.random.categorical(key, logits)
        (score,) = pull(jax.nn.one_hot(targets, logits.shape[-1]) - jax.nn.softmax(logits))
        return jax.tree.map(jnp.square, score)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(total, params, key, number, inputs):
        def of_chunk(total, chunk):
            found = jax.vmap(squared, (None, 0, 0))(params, *chunk)
            return jax.tree.map(lambda a, b: a + jnp.sum(b, axis=0), total, found), None

        keys = jax.random.split(jax.random.fold_in(key, number), (len(inputs) // size, size))
        chunks = inputs.reshape(-1, size, *inputs.shape[1:])
        return jax.lax.scan(of_chunk, total, (keys, chunks))[0]

    total, num_targets, key = jax.tree.map(jnp.zeros_like, params), 0, jax.random.key(seed)
    batches = task.batches(settings.sampling_batch_size, seed)
    for number, (inputs, targets) in enumerate(batches, 1):
        total = add(total, params, key, number, inputs)
        num_targets += targets.size
    return jax.tree.map(lambda x: x / num_targets, total)


def _train_on(
    run: Run, learning_rate: optax.ScalarOrSchedule, weight_decay: float
) -> Sequence[Any]:
    """Weights where a sampler would make draws. Moments begin at zero: a warm start keeps none."""
    task, settings, start, seed, directory = run
    optimizer = optax.adamw(learning_rate, weight_decay=weight_decay)
    kept: dict[str, Any] = {"directory": directory, "check": False, "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`sample`: `sampler` is an optimizer")
        # Less than was asked for would be scored as if it were all.
        warnings.filterwarnings("error", message="`sample` ended early")
        return list(draw(task, settings, start, optimizer, seed, **kept))


def _save(path: Path, tree: Any):
    """Write a file that is whole or not there."""
    part = path.with_suffix(".part")
    part.write_bytes(serialization.to_bytes(jax.device_get(tree)))
    part.rename(path)


def _own(x: Any) -> jax.Array:
    """Leaf of the one member, in a buffer that may be donated."""
    return jnp.array(np.asarray(x)[0])


def _drawn(seed: int, mean: Any, precision: Any, number: int) -> Iterator[Any]:
    """Draws of a Gaussian on the host."""
    # The numbers of steps and batches begin at one.
    key = jax.random.fold_in(jax.random.key(seed), 0)
    for i in range(number):
        yield jax.device_get(gaussian(jax.random.fold_in(key, i), mean, precision))


def _chosen(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with defaults; none that the method does not know."""
    if unknown := sorted(set(options) - set(DEFAULTS[method])):
        raise ValueError(f"`{method}` takes the options {list(DEFAULTS[method])}, got {unknown}.")
    return {**DEFAULTS[method], **options}


def _snapshots(
    method: str, chosen: Mapping[str, Any], start: Any, draws: Sequence[Any]
) -> optax_smile.Snapshots:
    """One chain of draws."""
    params = jax.tree.map(lambda *leaves: np.stack(leaves)[None], *draws)
    told = {"name": method, **chosen}
    return optax_smile.Snapshots(params, settings=told, start=jax.tree.map(np.asarray, start))
