"""A deep ensemble: best weights, resuming, and chains from weights that are trained already."""

import os
import signal
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

# Also slow tests compare bits with those of fixtures.
OPTIMIZED = False
TARGET = jnp.array([1.0, -2.0])


def mean_loss(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def init(key):
    return {"w": jax.random.normal(key, (2,))}


def train(batches, **arguments) -> Any:
    defaults: dict[str, Any] = {"num_members": 3, "key": jax.random.key(0), "progress": False}
    optimizer = arguments.pop("optimizer", optax.sgd(0.2))
    return optax_smile.warmstart(mean_loss, init, batches, optimizer, **defaults | arguments)


def test_members_start_apart_and_converge():
    begun = train([TARGET], num_epochs=1)["w"]
    assert np.ptp(begun, axis=0).min() > 0.1
    np.testing.assert_allclose(train([TARGET])["w"], jnp.tile(TARGET, (3, 1)), atol=1e-4)


def test_best_weights_of_each_member_by_validation():
    """The optimizer walks past the validation optimum: members cross it at different epochs."""
    walk = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jax.tree.map(lambda x: 0.1 + 0 * x, updates), state),
    )
    optimum = jnp.array([3.0, 3.0])
    got = train([TARGET], optimizer=walk, validation=optimum, num_epochs=100, patience=5)["w"]
    starts = np.asarray(jax.vmap(init)(jax.random.split(jax.random.key(0), 3))["w"])
    paths = starts[:, None] + 0.1 * np.arange(1, 101)[:, None]
    losses = np.mean((paths - 3.0) ** 2, axis=-1)
    expected = paths[np.arange(3), losses.argmin(axis=1)]
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert len(set(losses.argmin(axis=1).tolist())) > 1


def test_stops_when_no_member_improves():
    passes = []

    class Counted:
        def __iter__(self):
            passes.append(1)
            return iter([TARGET])

    still = optax.set_to_zero()
    train(Counted(), optimizer=still, validation=TARGET, num_epochs=50, patience=4)
    assert len(passes) == 1 + 4


def test_batches_per_member():
    targets = jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    got = train([targets], per_member=True, optimizer=optax.adam(0.1), num_epochs=300)["w"]
    np.testing.assert_allclose(got, targets, atol=1e-2)


def test_batches_that_do_not_suffice():
    for batches, arguments, message in (
        ([], {}, r"batches=...\)` must be .*got none in epoch 1"),
        (iter([TARGET]), {"num_epochs": 2}, r"batches=...\)` must be .*got none in epoch 2"),
        ([TARGET], {"per_member": True}, r"axis of 3, with `per_member`, got the .* \[\(2,\)\]"),
        ([TARGET * jnp.nan], {"num_epochs": 1}, r"optimizer=...\)` must be .* members \[0, 1, 2\]"),
        ([TARGET], {"validation": {"w": TARGET}}, r"validation=...\)` must be "),
    ):
        with pytest.raises(ValueError, match=rf"`warmstart\(.*{message}"):
            train(batches, **arguments)


PATIENCE = 6
ROWS = [TARGET, TARGET + 0.3, TARGET - 0.2]


class Crash(Exception):
    """What a test throws into a training."""


class Batches:
    """Counts its passes; in the middle of one of them something happens."""

    def __init__(self, at=None, happens=None):
        self.at, self.happens, self.passes = at, happens, 0

    def __iter__(self):
        self.passes += 1
        for number, batch in enumerate(ROWS):
            if number == 1 and self.passes == self.at:
                assert self.happens is not None
                self.happens()
            yield batch


def crash():
    raise Crash


def train_long(batches, **arguments) -> Any:
    """Members pass the validation optimum on their way to the target, each in its own epoch."""
    defaults: dict[str, Any] = {
        "optimizer": optax.adam(optax.cosine_decay_schedule(0.2, 60)),
        "validation": TARGET / 2,
        "num_epochs": 40,
        "patience": PATIENCE,
        "checkpoint_minutes": 0,
    }
    return train(batches, **defaults | arguments)


@pytest.fixture(scope="module")
def in_one_go():
    """Members of a training without interruption, and the epochs that it took."""
    batches = Batches()
    members = train_long(batches)
    # A crash in epoch 9 comes after the best epoch of the last member, and before the end.
    assert 9 < batches.passes < 9 + PATIENCE
    return members, batches.passes


def assert_same_bits(actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)


def test_a_training_in_pieces_gives_the_bits_of_one_in_one_go(in_one_go, tmp_path):
    for at in (1, 3, 9):
        with pytest.raises(Crash):
            train_long(Batches(at, crash), directory=tmp_path)
    rest, (expected, epochs) = Batches(), in_one_go
    assert_same_bits(train_long(rest, directory=tmp_path), expected)
    assert rest.passes == epochs  # those before are read again


class Shuffled:
    """Another order in every pass."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        return iter([ROWS[row] for row in self.generator.permutation(len(ROWS))])


def test_shuffled_batches_come_in_the_same_order_after_a_resume(tmp_path):
    expected = train_long(Shuffled(), num_epochs=6)
    train_long(Shuffled(), num_epochs=3, directory=tmp_path)
    assert_same_bits(train_long(Shuffled(), num_epochs=6, directory=tmp_path), expected)


def test_a_member_that_is_done_stays_done():
    """The first would get better again while the second still trains."""
    paths = jnp.array([[3.0, 1.0, 2.0, 2.0, 0.0, 0.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    key = jax.random.key(0)
    first = jax.random.key_data(jax.random.split(key)[0])

    def start(key):
        return {"epoch": -jnp.ones(()), "row": 1.0 - jnp.all(jax.random.key_data(key) == first)}

    def loss_fn(params, batch):
        return paths[params["row"].astype(int), params["epoch"].astype(int)]

    count = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: ({"epoch": jnp.ones(()), "row": jnp.zeros(())}, state),
    )
    members: Any = optax_smile.warmstart(
        loss_fn,
        start,
        [()],
        count,
        num_members=2,
        key=key,
        validation=(),
        patience=2,
        num_epochs=6,
        progress=False,
    )
    assert members["epoch"].tolist() == [1.0, 5.0]


def test_a_longer_training_goes_on_and_a_finished_one_is_returned_at_once(in_one_go, tmp_path):
    """A crash before the time of a checkpoint loses what came after the last one."""
    expected, epochs = in_one_go
    train_long(Batches(), directory=tmp_path, num_epochs=4)
    with pytest.raises(Crash):
        train_long(Batches(6, crash), directory=tmp_path, checkpoint_minutes=60)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name > "4"] == []
    rest = Batches()
    assert_same_bits(train_long(rest, directory=tmp_path), expected)
    assert rest.passes == epochs
    never = Batches(1, crash)
    with pytest.warns(UserWarning, match=r"\d+ epochs loaded from .*: it is finished"):
        assert_same_bits(train_long(never, directory=tmp_path), expected)
    assert never.passes == 0


def send(number, times=1):
    def happens():
        for _ in range(times):
            os.kill(os.getpid(), number)

    return happens


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_training_after_the_epoch(number, in_one_go, tmp_path):
    """A job that SIGTERM ends must not sample from members half trained: it will come back."""
    handler, batches = signal.getsignal(number), Batches(3, send(number))
    if number == signal.SIGTERM:
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM: run again"):
            train_long(batches, directory=tmp_path, checkpoint_minutes=60)
        with pytest.warns(UserWarning, match=r"stopped after 3 of at most 40 epochs\.$"):
            got = train_long(Batches(3, send(number)))
    else:
        with pytest.warns(UserWarning, match=r"stopped after 3 of at most 40 .* go on\."):
            got = train_long(batches, directory=tmp_path, checkpoint_minutes=60)
    assert signal.getsignal(number) is handler
    assert batches.passes == 3
    assert_same_bits(got, train_long(Batches(), num_epochs=3))
    assert_same_bits(train_long(Batches(), directory=tmp_path), in_one_go[0])


def test_a_second_control_c_interrupts_at_once(in_one_go, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_long(Batches(3, send(signal.SIGINT, times=2)), directory=tmp_path)
    assert signal.getsignal(signal.SIGINT) is handler
    assert_same_bits(train_long(Batches(), directory=tmp_path), in_one_go[0])


def test_a_directory_in_use_is_refused(in_one_go, tmp_path):
    message = rf"`warmstart\(directory=...\)` must be in use by no live run, .*{os.getpid()}"

    def happens():
        with pytest.raises(ValueError, match=message):
            train_long(Batches(), directory=tmp_path)

    assert_same_bits(train_long(Batches(2, happens), directory=tmp_path), in_one_go[0])


def test_members_of_an_optimizer_with_noise_draw_their_own():
    members: Any = optax_smile.warmstart(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        lambda key: {"w": jnp.zeros(2)},
        [TARGET],
        optax_smile.sgld(0.01, num_data=10, key=0),
        num_members=3,
        key=0,
        num_epochs=2,
        progress=False,
    )
    assert len(np.unique(members["w"], axis=0)) == 3


def test_a_chain_for_each_of_the_weights_or_more_that_go_round():
    weights = [{"w": np.full(2, i, np.float32), "b": jnp.float32(i)} for i in range(3)]
    chains: Any = optax_smile.chains_from_weights(weights)
    np.testing.assert_array_equal(chains["w"], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(chains["b"], [0, 1, 2])
    assert chains["w"].dtype == jnp.float32
    chains = optax_smile.chains_from_weights(weights, num_chains=7, jitter=0)
    np.testing.assert_array_equal(chains["w"][:, 0], [0, 1, 2, 0, 1, 2, 0])


def test_chains_from_equal_weights_start_apart():
    """One network, the same one twice, zeros, zeros and others."""
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
        without_key = given | {"key": None}
        with pytest.raises(
            ValueError, match=r"key=...\)` must be a JAX key .* for a jitter, which"
        ):
            optax_smile.chains_from_weights(weights, **without_key)


def test_jitter_is_relative_to_each_array_of_each_chain():
    size = 1000
    weights = [
        {"w": jnp.full(size, scale), "v": jnp.full(size, -5 * scale), "zero": jnp.zeros(size)}
        for scale in (1.0, 100.0)
    ]
    arguments: dict[str, Any] = {"num_chains": 4, "jitter": 0.01}
    chains: Any = optax_smile.chains_from_weights(weights, key=jax.random.key(0), **arguments)
    for name, factor in (("w", 1), ("v", 5)):
        for chain in range(4):
            start, rms = weights[chain % 2][name], factor * (1, 100)[chain % 2]
            noise = np.asarray(chains[name][chain] - start) / rms
            # Five standard errors of a standard deviation and of a mean.
            assert abs(noise.std() / 0.01 - 1) < 5 / np.sqrt(2 * size)
            assert abs(noise.mean() / 0.01) < 5 / np.sqrt(size)
    np.testing.assert_array_equal(chains["zero"], np.zeros((4, size)))
    assert chains["w"].dtype == weights[0]["w"].dtype
    for one, other in ((0, 2), (1, 3)):
        assert np.abs(chains["w"][one] - chains["w"][other]).min() > 0
    correlation = np.corrcoef(chains["w"][0], chains["v"][0])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)


def test_auxiliary_state_of_another_number_of_members():
    given: dict[str, Any] = {"num_members": 3, "key": 0, "aux": {"count": jnp.zeros(2)}}
    with pytest.raises(ValueError, match=r"`warmstart\(aux=...\)` must be .* axis of 3 members"):
        optax_smile.warmstart(
            lambda params, batch, aux: (0.0, aux), init, [TARGET], optax.sgd(0.2), **given
        )


def test_weights_that_do_not_fit_together():
    one = {"w": jnp.ones(3)}
    for weights, arguments, message in (
        ([{}], {}, r"weights=...\)` must be a list .*, got trees without arrays"),
        ([one, {"v": jnp.ones(3)}], {}, r"weights=...\)` must be a tree of the structure of the"),
        ([one, {"w": jnp.ones(4)}], {}, r"weights=...\)` must be of shape \(3,\) at \['w'\], .*4"),
        ([one, {"w": jnp.array([1, jnp.nan, 1])}], {}, r"weights=...\)` must be finite, got nan"),
        ([one, one], {"num_chains": 1}, r"num_chains=...\)` must be at least 2, .* got 1. Give"),
        ([one], {"jitter": 0.1}, r"key=...\)` must be a JAX key .* for a jitter, which keeps"),
    ):
        given: dict[str, Any] = arguments
        with pytest.raises(ValueError, match=rf"`chains_from_weights\({message}"):
            optax_smile.chains_from_weights(weights, **given)


def counting_loss(params, batch, *, aux, key):
    """Counts its steps, keeps the last number it drew, and goes down."""
    drawn = jax.random.uniform(key)
    seen = {"count": aux["count"] + 1, "drawn": aux["drawn"].at[aux["count"]].set(drawn)}
    return jnp.mean((params["w"] - batch) ** 2), seen


def test_auxiliary_state_is_that_of_the_best_epoch_and_keys_are_fresh():
    """The weights walk past the optimum of the validation and are best after epoch three."""
    away = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jax.tree.map(jnp.ones_like, updates), state),
    )
    got: Any = optax_smile.warmstart(
        counting_loss,
        lambda key: {"w": jnp.zeros(2)},
        [TARGET, TARGET],
        away,
        num_members=3,
        key=0,
        num_epochs=5,
        validation=jnp.full(2, 6.0),
        aux={"count": jnp.zeros(3, int), "drawn": jnp.zeros((3, 10))},
        stochastic=True,
        progress=False,
    )
    np.testing.assert_array_equal(got["params"]["w"], np.full((3, 2), 6.0))
    assert got["aux"]["count"].tolist() == [6] * 3
    assert len(np.unique(got["aux"]["drawn"][:, :6])) == 3 * 6
