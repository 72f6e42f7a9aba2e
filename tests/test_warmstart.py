"""A deep ensemble: best weights, resuming, and chains from trained weights."""

import itertools
import re
from functools import partial
from signal import SIGINT, SIGTERM, getsignal
from typing import Any

from benchmarks import records

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from runs import Crash, crash, refused, send, warned

import optax_smile

TARGET = jnp.array([1.0, -2.0])


def mean_loss(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def init(key):
    return {"w": jax.random.normal(key, (2,))}


def train(batches, loss=mean_loss, init=init, optimizer=None, **arguments) -> Any:
    defaults: dict[str, Any] = {"num_members": 3, "key": jax.random.key(0), "progress": False}
    optimizer = optimizer or optax.sgd(0.2)
    return optax_smile.warmstart(loss, init, batches, optimizer, **defaults | arguments)


def walk(step):
    """Take this step always, a tree."""
    return optax.stateless(lambda updates, params: step)


@pytest.mark.filterwarnings("ignore:`warmstart`. `optimizer` is a sampler")
def test_members_start_apart_and_converge():
    begun = train([TARGET], num_epochs=1)["w"]
    assert np.ptp(begun, axis=0).min() > 0.1
    np.testing.assert_allclose(train([TARGET])["w"], jnp.tile(TARGET, (3, 1)), atol=1e-4)
    given = {"init": lambda key: {"w": jnp.zeros(2)}, "num_epochs": 1}
    sgld = optax_smile.sgld(0.01, num_data=10, key=0)
    assert len(np.unique(train([TARGET], optimizer=sgld, **given)["w"], axis=0)) == 3
    told = r"^`warmstart`: `init_fn` returned the same parameters for members \[0, 1, 2\]\."
    warned(told, train, [TARGET], **given)
    train([TARGET], num_members=1, **given)


def test_a_loader_may_use_its_memory_again():
    rows = [runs.aligned(20_000, 2) + np.array([TARGET]) + shift for shift in (0.1, -0.2, 0.3)]
    held = runs.aligned(20_000, 2)
    held[:] = TARGET
    reused = runs.Reused(rows, runs.aligned(20_000, 2))
    spoilt = runs.Watched(reused, runs.at(4, lambda: held.fill(np.nan)))

    def loss(params, batch):
        return jnp.mean((params["w"][None] - batch) ** 2)

    given = {"num_epochs": 3, "optimizer": optax.sgd(0.05), "loss": loss}
    again = train(spoilt, validation=held, **given)
    assert_same_bits(again, train(rows, validation=jnp.tile(TARGET, (20_000, 1)), **given))


def test_a_training_ends_early_and_the_bar_says_why(capsys):
    given = {"optimizer": optax.set_to_zero(), "validation": TARGET, "patience": 4}
    for number, end in ((50, "100%.* 5/5 .*no smaller validation loss"), (3, "100%.* 3/3 .*loss=")):
        train(batches := Batches(), num_epochs=number, progress=True, **given)
        last = capsys.readouterr().err.strip().split("\r")[-1]
        assert re.search(end, last) and ("smaller" in last) == (number == 50)
        assert batches.passes == min(number, 1 + 4)


def test_best_weights_of_each_member_by_validation():
    """The optimizer walks past the validation optimum: members cross it at different epochs."""
    arguments = {"validation": jnp.full(2, 3.0), "num_epochs": 100, "patience": 5}
    got = train([TARGET], optimizer=walk({"w": jnp.full(2, 0.1)}), **arguments)["w"]
    starts = np.asarray(jax.vmap(init)(jax.random.split(jax.random.key(0), 3))["w"])
    paths = starts[:, None] + 0.1 * np.arange(1, 101)[:, None]
    losses = np.mean((paths - 3.0) ** 2, axis=-1)
    expected = paths[np.arange(3), losses.argmin(axis=1)]
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert len(set(losses.argmin(axis=1).tolist())) > 1


@pytest.mark.parametrize(
    "message, batches, arguments",
    [
        (r"batches=...\)` must be .*got none in epoch 1", [], {}),
        (r"batches=...\)` must be .*got none in epoch 2", iter([TARGET]), {"num_epochs": 2}),
        (r"loss_fn=...\)` must be .* members \[0, 1, 2\]", [TARGET * jnp.nan], {"num_epochs": 1}),
        (r"validation=...\)` must be finite, got nan", [TARGET], {"validation": TARGET * jnp.nan}),
        (
            r"`new_aux` like `aux`, \(\), got \(2,\)\.",
            [TARGET],
            {"aux": jnp.ones(3), "loss": lambda params, batch, aux: (0.0, jnp.zeros(2))},
        ),
        (
            r"aux=...\)` .* axis of 3 members",
            [TARGET],
            {"aux": jnp.zeros(2), "loss": lambda params, batch, aux: (0.0, aux)},
        ),
    ],
)
def test_batches_and_losses_that_do_not_fit(message, batches, arguments):
    refused(rf"`warmstart\(.*{message}", train, batches, **arguments)


ROWS = [TARGET, TARGET + 0.3, TARGET - 0.2]
assert_same_bits = partial(chex.assert_trees_all_equal, strict=True)


class Batches:
    """Batches in a new order in every pass; counts passes, and triggers an event within one."""

    def __init__(self, at=None, happens: Any = None):
        self.at, self.happens, self.passes = at, happens, 0
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        self.passes += 1
        for number, row in enumerate(self.generator.permutation(3)):
            if number == 1 and self.passes == self.at:
                self.happens()
            yield ROWS[row]


def train_long(batches, **arguments) -> Any:
    """Members pass the validation optimum on their way to the target, each in its own epoch."""
    defaults: dict[str, Any] = {"validation": TARGET / 2, "num_epochs": 40, "patience": 6}
    defaults |= {"optimizer": optax.adam(optax.cosine_decay_schedule(0.2, 60))}
    return train(batches, **defaults | {"checkpoint_minutes": 0} | arguments)


@pytest.fixture(scope="module")
def in_one_go():
    """Members of a training without interruption, and the epochs that it took."""
    batches = Batches()
    members = train_long(batches)
    # A crash in epoch 9 comes after the best epoch of the last member, and before the end.
    assert 9 < batches.passes < 9 + 6
    return members, batches.passes


def test_a_training_in_pieces_gives_the_bits_of_one_in_one_go(in_one_go, tmp_path):
    """A crash before the time of a checkpoint loses what came after the last one."""

    def crash_in(at, **arguments):
        with pytest.raises(Crash):
            train_long(Batches(at, crash), directory=tmp_path, **arguments)

    (expected, epochs), rest, never = in_one_go, Batches(), Batches(1, crash)
    crash_in(1)
    crash_in(3)
    train_long(Batches(), directory=tmp_path, num_epochs=4)
    crash_in(6, checkpoint_minutes=60)
    assert max(runs.checkpoints_in(tmp_path)) == 4
    crash_in(9)
    assert_same_bits(train_long(rest, directory=tmp_path), expected)
    assert rest.passes == epochs  # those before are read again
    with pytest.warns(UserWarning, match=r"training in .* is finished.* for \d+ epochs, are ret"):
        assert_same_bits(train_long(never, directory=tmp_path), expected)
    assert never.passes == 0


def test_a_member_that_is_done_stays_done():
    """The first would get better again while the second still trains."""
    paths = jnp.array([[3.0, 1.0, 2.0, 2.0, 0.0, 0.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    key = jax.random.key(0)
    first = jax.random.key_data(jax.random.split(key)[0])

    def start(key):
        return {"epoch": -jnp.ones(()), "row": 1.0 - jnp.all(jax.random.key_data(key) == first)}

    def loss(params, batch):
        return paths[params["row"].astype(int), params["epoch"].astype(int)]

    count = walk({"epoch": jnp.ones(()), "row": jnp.zeros(())})
    given = {"num_members": 2, "validation": (), "patience": 2, "num_epochs": 6}
    members = train([()], loss, start, count, key=key, **given)
    assert members["epoch"].tolist() == [1.0, 5.0]


def test_a_signal_ends_the_training_after_the_epoch(in_one_go, tmp_path):
    """A job that SIGTERM ends must not sample from members half trained: it will come back."""
    before = [getsignal(number) for number in (SIGINT, SIGTERM)]
    slow = partial(train_long, checkpoint_minutes=60)
    with pytest.raises(KeyboardInterrupt, match="by SIGTERM after .* repeat the call"):
        slow(terminated := Batches(3, send(SIGTERM)), directory=tmp_path / "SIGTERM")
    told = "after 3 of at most 40 epochs. "
    with pytest.warns(UserWarning, match=f"^{records.INTERRUPTED} by SIGTERM {told}To be able"):
        alone = slow(Batches(3, send(SIGTERM)))
    with pytest.warns(UserWarning, match=f"stopped by SIGINT {told}.*repeat the call to resume."):
        got = slow(interrupted := Batches(3, send(SIGINT)), directory=tmp_path / "SIGINT")
    with pytest.raises(KeyboardInterrupt):
        train_long(Batches(3, send(SIGINT, SIGINT)), directory=tmp_path / "twice")
    assert [getsignal(number) for number in (SIGINT, SIGTERM)] == before
    assert terminated.passes == interrupted.passes == 3
    expected = train_long(Batches(), num_epochs=3)
    for members in (got, alone):
        assert_same_bits(members, expected)
    for name in ("SIGTERM", "SIGINT", "twice"):
        assert_same_bits(train_long(Batches(), directory=tmp_path / name), in_one_go[0])


def test_a_chain_for_each_of_the_weights_if_they_fit_together():
    weights = [{"w": np.full(2, i, np.float32), "b": jnp.float32(i)} for i in range(3)]
    chains: Any = optax_smile.chains_from_weights(weights)
    expected = {"w": np.array([[0, 0], [1, 1], [2, 2]], "f"), "b": np.array([0, 1, 2], "f")}
    chex.assert_trees_all_equal(chains, expected, strict=True)
    chains = optax_smile.chains_from_weights(weights, num_chains=7, jitter=0)
    np.testing.assert_array_equal(chains["w"][:, 0], [0, 1, 2, 0, 1, 2, 0])
    one = {"w": jnp.ones(3)}
    for rule, weights, given in (
        (r"weights=...\)` must be floating-point parameters, got i", [{"w": np.ones(3, int)}], {}),
        (r"num_chains=...\)` must be at least 2, .*got 1. Or pass", [one, one], {"num_chains": 1}),
        (r"key=...\)` must be a single JAX key.* jitter that separates", [one], {"jitter": 0.1}),
    ):
        rule = rf"`chains_from_weights\({rule}"
        refused(rule, optax_smile.chains_from_weights, weights, **given)


def test_chains_from_equal_weights_start_apart():
    for weights, num_chains in (
        ([{"w": np.ones(3), "b": np.zeros(2)}], 4),
        ([{"w": np.ones(3)}, {"w": np.full(3, 2.0)}, {"w": np.ones(3)}], None),
        ([{"w": np.zeros(3), "b": np.zeros(())}], 2),
        ([{"w": np.zeros(3)}, {"w": np.ones(3)}], 4),
    ):
        given: dict[str, Any] = {"num_chains": num_chains, "key": 0}
        chains: Any = optax_smile.chains_from_weights(weights, **given)
        exact: Any = optax_smile.chains_from_weights(weights, jitter=0, **given)
        number = num_chains or len(weights)
        assert len(np.unique(chains["w"], axis=0)) == number > len(np.unique(exact["w"], axis=0))
        unit = np.where(exact["w"] == 0, 1, exact["w"])
        assert 0 < np.abs((chains["w"] - exact["w"]) / unit).max() < 5 * 0.01
        rule = r"key=...\)` must be .* for the jitter that"
        refused(rule, optax_smile.chains_from_weights, weights, num_chains=num_chains)


def test_jitter_is_relative_to_each_array_of_each_chain():
    size = 1000
    one = {"w": jnp.ones(size), "v": jnp.full(size, -5.0), "zero": jnp.zeros(size)}
    weights = [one, jax.tree.map(lambda x: 100 * x, one)]
    given: dict[str, Any] = {"num_chains": 4, "jitter": 0.01, "key": jax.random.key(0)}
    chains: Any = optax_smile.chains_from_weights(weights, **given)
    rows = []
    for name, unit in (("w", 1), ("v", 5)):
        for chain, scale in enumerate((1, 100, 1, 100)):
            rows.append(chains[name][chain] / (unit * scale) - np.sign(one[name][0]))
    rows = np.stack(rows)
    # Five standard errors of a standard deviation, of a mean and of a correlation.
    assert np.all(abs(rows.std(axis=1) / 0.01 - 1) < 5 / np.sqrt(2 * size))
    assert np.all(abs(rows.mean(axis=1) / 0.01) < 5 / np.sqrt(size))
    assert np.all(abs(np.corrcoef(rows) - np.eye(8)) < 5 / np.sqrt(size))
    np.testing.assert_array_equal(chains["zero"], np.zeros((4, size)))


def test_a_number_of_steps_makes_an_epoch_of_an_endless_loader(tmp_path):
    """Each epoch goes on where the last one stopped, also when the training resumes."""

    def endless():
        for number in itertools.count():
            yield TARGET + number % 3

    def trained(batches, num_epochs, steps_per_epoch=2, directory=None) -> Any:
        given = {"num_epochs": num_epochs, "steps_per_epoch": steps_per_epoch}
        return train(batches, num_members=1, directory=directory, **given)["w"]

    whole = trained(endless(), 3)
    rows = [TARGET, TARGET + 1, TARGET + 2]
    np.testing.assert_array_equal(whole, trained(rows * 2, 1, steps_per_epoch=6))
    np.testing.assert_array_equal(whole, trained(rows, 3))
    trained(endless(), 1, directory=tmp_path)
    np.testing.assert_array_equal(whole, trained(endless(), 3, directory=tmp_path))


def test_weights_that_do_not_change_do_not_improve_by_chance():
    """The loss is random, as with dropout; its validation is the same in each epoch."""

    def loss(params, batch, *, key):
        return mean_loss(params, batch) + jax.random.normal(key)

    given = {"num_epochs": 20, "patience": 3, "validation": TARGET, "stochastic": True}
    train(batches := Batches(), loss, optimizer=optax.set_to_zero(), **given)
    assert batches.passes == 4


def test_auxiliary_state_keeps_its_last_finite_numbers():
    def loss(params, batch, *, aux):
        return mean_loss(params, batch), {"sum": aux["sum"] + jnp.where(batch[0] > 5, jnp.nan, 1)}

    batches, aux = [TARGET, TARGET + 9], {"sum": jnp.zeros(3)}
    told = r"^`warmstart`: `aux` was not finite at \['sum'\] after 2 steps\. It keeps its last"
    best = warned(told, train, batches, loss, aux=aux, num_epochs=2)
    assert best["aux"]["sum"].tolist() == [2.0] * 3


def test_auxiliary_state_is_that_of_the_best_epoch_and_keys_are_fresh():
    """The weights walk past the optimum of the validation and are best after epoch three."""

    def loss(params, batch, *, aux, key):
        drawn = aux["drawn"].at[aux["count"]].set(jax.random.uniform(key))
        return mean_loss(params, batch), {"count": aux["count"] + 1, "drawn": drawn}

    aux = {"count": jnp.zeros(3, int), "drawn": jnp.zeros((3, 10))}
    given: dict[str, Any] = {"num_epochs": 5, "validation": jnp.full(2, 6.0), "stochastic": True}
    given |= {"init": lambda key: {"w": jnp.zeros(2)}, "optimizer": walk({"w": jnp.ones(2)})}
    got = train([TARGET, TARGET], loss, aux=aux, **given)
    np.testing.assert_array_equal(got["params"]["w"], np.full((3, 2), 6.0))
    assert got["aux"]["count"].tolist() == [6] * 3
    assert len(np.unique(got["aux"]["drawn"][:, :6])) == 3 * 6
