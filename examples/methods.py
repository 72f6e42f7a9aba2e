"""Methods of `compare.py`: each trains on a problem, and gives draws for each of its settings."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from data import Batches, Splits
from rivals import dropout_draws, last_layer_laplace, masked, muon, noisy_ivon, swag_draws

import optax_smile
from optax_smile import local


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network, its data, and how long every method may train.

    Attributes:
        splits: training, validation and test data, pairs of inputs and targets.
        init: `init(key)`, fresh parameters.
        apply: `apply(params, inputs)`: logits, or mean and log standard deviation.
        loss: `loss(outputs, targets)`: mean negative log likelihood, without a penalty.
        likelihood: `"categorical"` or `"gaussian"`, see `optax_smile.predict`.
        apply_dropout: `apply_dropout(params, inputs, key)`, if the network has dropout.
        last_layer: text in the paths of the last layer's leaves, for the Laplace approximation.
        foreign: inputs of another kind, which a prediction should be unsure about.
        learning_rate, weight_decay: of AdamW.
        batch_size: of every method.
        num_chains: networks from which samplers and checkpoints start.
        num_epochs: passes through the data that train each of them.
        num_steps: gradients per chain after that; a quarter is the warm-up.
        num_draws: draws per chain.
        steps_per_dispatch: see `optax_smile.sample`; 1 for convolutions on a CPU.
    """

    splits: Splits
    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], jax.Array]
    likelihood: str
    apply_dropout: Callable[[Any, Any, jax.Array], Any] | None = None
    last_layer: str | None = None
    foreign: np.ndarray | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    batch_size: int = 128
    num_chains: int = 4
    num_epochs: int = 60
    num_steps: int = 6_000
    num_draws: int = 36
    steps_per_dispatch: int = 25


# Setting, draws, and what predicts with one of them.
Tried = tuple[str, Any, Callable[[Any, Any], Any]]


@dataclasses.dataclass
class Run:
    """All methods on one problem with one seed.

    As many networks are trained as take the gradients of the chains and of their start. They are
    the deep ensemble; chains start from the first ones.
    """

    problem: Problem
    seed: int

    def __post_init__(self):
        task = self.problem
        self.of_start = task.num_epochs * len(self.batches())
        self.gradients = task.num_chains * (self.of_start + task.num_steps)
        self.num_members = round(self.gradients / self.of_start)
        began = time.monotonic()
        self.members = self.trained(self.loss, self.num_members, task.num_epochs)
        self.seconds = time.monotonic() - began
        self.seconds_of_starts = self.seconds * task.num_chains / self.num_members
        self.starts = jax.tree.map(lambda x: x[: task.num_chains], self.members)
        self.visited: dict[float, Any] = {}

    def batches(self) -> Batches:
        """Training data, the same order for every method."""
        return Batches(self.problem.splits.train, self.problem.batch_size, self.seed)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Mean loss of a batch."""
        return self.problem.loss(self.problem.apply(params, batch[0]), batch[1])

    def optimizer(self, factor: float = 1.0) -> optax.GradientTransformation:
        """AdamW at a multiple of the problem's rate."""
        task = self.problem
        return optax.adamw(factor * task.learning_rate, weight_decay=task.weight_decay)

    def trained(self, loss: Any, number: int, num_epochs: int, **options: Any) -> Any:
        """Networks at their best validation loss."""
        given: dict[str, Any] = {"num_members": number, "num_epochs": num_epochs}
        given |= {"patience": num_epochs, "validation": self.problem.splits.valid} | options
        given |= {"key": self.seed, "progress": False}
        start = self.problem.init, self.batches(), self.optimizer()
        return optax_smile.warmstart(loss, *start, **given)

    def steps(self, share: float = 1.0) -> dict[str, Any]:
        """Length of a chain, or of a share of it, and what else `sample` and `select` take."""
        task, total = self.problem, int(self.problem.num_steps * share)
        thin = max(1, (total - total // 4) // task.num_draws)
        given = {"num_warmup": total - thin * task.num_draws, "num_draws": task.num_draws}
        given |= {"thin": thin, "steps_per_dispatch": task.steps_per_dispatch}
        return given | {"key": self.seed, "check": False, "progress": False}

    def sample(self, sampler: optax.GradientTransformation, **options: Any) -> Any:
        """Run a chain from every start."""
        given: dict[str, Any] = self.steps() | options
        return optax_smile.sample(self.loss, self.starts, self.batches(), sampler, **given)

    @property
    def posterior(self) -> dict[str, Any]:
        """Arguments that all samplers share."""
        return {"num_data": len(self.problem.splits.train[0]), "key": self.seed}

    def single(self) -> Iterator[Tried]:
        """Each network of the ensemble."""
        for i in range(self.num_members):
            one = jax.tree.map(lambda x, i=i: x[i : i + 1], self.members)
            yield f"best of {self.num_members}", _members(one), self.problem.apply

    def ensemble(self) -> Iterator[Tried]:
        """All networks."""
        yield f"{self.num_members} networks", _members(self.members), self.problem.apply

    def checkpoints(self) -> Iterator[Tried]:
        """Weights of AdamW that trains on."""
        for factor in (1 / 3, 1, 2, 4):
            self.visited[factor] = self.sample(self.optimizer(factor))
            rate = f"rate {factor * self.problem.learning_rate:.2g}"
            yield rate, self.visited[factor], self.problem.apply

    def muon(self) -> Iterator[Tried]:
        """Weights of Muon that trains on."""
        for rate in (1e-3, 2e-3, 4e-3, 8e-3):
            tx = muon(rate, self.problem.weight_decay)
            yield f"rate {rate:g}", self.sample(tx), self.problem.apply

    def swag(self) -> Iterator[Tried]:
        """Gaussians around the checkpoints of each chain."""
        random, number = np.random.default_rng(self.seed), self.problem.num_draws
        for factor, draws in self.visited.items():
            chains = range(self.problem.num_chains)
            drawn = [
                swag_draws(jax.tree.map(lambda x, i=i: x[i], draws.params), number, 20, random)
                for i in chains
            ]
            stacked = jax.tree.map(lambda *x: np.stack(x), *drawn)
            rate = f"rate {factor * self.problem.learning_rate:.2g}"
            yield rate, optax_smile.Snapshots(stacked), self.problem.apply

    def dropout(self) -> Iterator[Tried]:
        """Networks that train with dropout for as many gradients, and keep it to predict."""
        task, apply = self.problem, self.problem.apply_dropout
        assert apply is not None

        def loss(params, batch, *, key):
            return task.loss(apply(params, batch[0], key), batch[1])

        num_epochs = round(self.gradients / task.num_chains / len(self.batches()))
        networks = self.trained(loss, task.num_chains, num_epochs, stochastic=True)
        draws = dropout_draws(networks, task.num_draws)
        yield f"{task.num_chains} networks", draws, masked(apply)

    def laplace(self) -> Iterator[Tried]:
        """A Gaussian over the last layer of each network of the ensemble."""
        task = self.problem
        batches = self.batches()
        made = last_layer_laplace(
            task.apply, self.members, batches, task.likelihood, task.last_layer or ""
        )
        number = math.ceil(task.num_chains * task.num_draws / self.num_members)
        for delta in (0.1, 1.0, 10.0, 100.0, 1000.0):
            yield f"prior precision {delta:g}", made(delta, number, self.seed), task.apply

    def ivon(self) -> Iterator[Tried]:
        """A Gaussian fitted by IVON; the rate falls to zero before the draws."""
        number, total = self.problem.num_draws, self.problem.num_steps
        options = {"momentum_decay": 0.9, "hessian_decay": 0.9995, "hess_init": 1.0}
        options |= {"weight_decay": 1 / self.posterior["num_data"]}
        for rate in (0.01, 0.03, 0.1):
            schedule = optax.cosine_decay_schedule(rate, total - number)
            tx = noisy_ivon(schedule, **options, **self.posterior)
            draws = self.sample(tx, num_warmup=total - number, thin=1)
            yield f"rate {rate:g}", draws, self.problem.apply

    def sghmc(self) -> Iterator[Tried]:
        """Scale-adapted SGHMC, the mass measured during the warm-up."""
        adapt = {"adapt_steps": self.steps()["num_warmup"]}
        for size in (3e-3, 1e-2, 3e-2):
            tx = optax_smile.scale_adapted_sghmc(size, **adapt, **self.posterior)
            yield f"step {size:g}", self.sample(tx), self.problem.apply

    def published(self) -> Iterator[Tried]:
        """The paper's pSMILE: half as many steps of two gradients."""
        for size in (1e-3, 1e-2, 1e-1):
            tx = optax_smile.published.psmile(size, num_data=self.posterior["num_data"])
            draws = self.sample(tx, **self.steps(0.5), batch_per="step")
            yield f"step {size:g}", draws, self.problem.apply

    def psmile(self) -> Iterator[Tried]:
        """The default."""
        yield "", self.sample(optax_smile.psmile(**self.posterior)), self.problem.apply

    def cold(self) -> Iterator[Tried]:
        """Colder than the posterior where there are more weights than data, and longer steps."""
        one = jax.tree.map(lambda x: x[0], self.starts)
        temperature = optax_smile.cold_temperature(self.posterior["num_data"], one)
        options: dict[str, Any] = {"tuner": optax_smile.angle_tuner(0.3), **self.posterior}
        tx = optax_smile.psmile(temperature=temperature, **options)
        yield "", self.sample(tx), self.problem.apply

    def spectral(self) -> Iterator[Tried]:
        """Matrices move as matrices, at half, once and twice the cold temperature."""
        one = jax.tree.map(lambda x: x[0], self.starts)
        number = self.posterior["num_data"]
        for excess in (0.04, 0.08, 0.16):
            temperature = optax_smile.cold_temperature(number, one, excess)
            tx = optax_smile.smile(
                norm="spectral",
                temperature=temperature,
                decoherence_length=None,
                num_data=number,
            )
            yield f"temperature {temperature:.2g}", self.sample(tx), self.problem.apply

    def select(self) -> Iterator[Tried]:
        """What `select` keeps of the usual candidates."""
        task, batches = self.problem, self.batches()
        made = local.network_candidates(
            self.loss, self.starts, list(batches), self.optimizer(), **self.posterior
        )
        given: Any = self.steps() | {"likelihood": task.likelihood}
        start = self.loss, self.starts, self.batches(), made, task.apply, task.splits.valid
        found = optax_smile.select(*start, **given)
        yield f"chose {found.best}", found.draws, task.apply


def _members(params: Any) -> optax_smile.Snapshots:
    return optax_smile.Snapshots.from_members(params)


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        tries: draws for each setting.
        needs: field of the problem without which it cannot run.
        starts_trained: whether it goes on from the networks whose training took part of the time.
        reuses: method whose runs it takes.
        cost: gradients, as a multiple of those of the others.
    """

    tries: Callable[[Run], Iterator[Tried]]
    needs: str = ""
    starts_trained: bool = True
    reuses: str = ""
    cost: float = 1.0


METHODS = {
    "single network": Method(Run.single),
    "deep ensemble": Method(Run.ensemble),
    "checkpoints": Method(Run.checkpoints),
    "checkpoints of Muon": Method(Run.muon),
    "SWAG": Method(Run.swag, reuses="checkpoints"),
    "MC dropout": Method(Run.dropout, needs="apply_dropout", starts_trained=False),
    "last-layer Laplace": Method(Run.laplace, needs="last_layer"),
    "IVON": Method(Run.ivon),
    "scale-adapted SGHMC": Method(Run.sghmc),
    "published pSMILE": Method(Run.published),
    "psmile": Method(Run.psmile),
    "psmile, cold": Method(Run.cold),
    "smile, spectral": Method(Run.spectral),
    "select": Method(Run.select, cost=4 / 3),
}
