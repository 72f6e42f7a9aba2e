from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

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


@pytest.mark.parametrize(
    ("batches", "arguments", "message"),
    [
        ([TARGET], {"num_members": 0}, r"`warmstart\(num_members=...\)` must be an integer >= 1"),
        ([TARGET], {"patience": 0}, r"`warmstart\(patience=...\)` must be an integer >= 1, got 0"),
        ([], {}, r"`warmstart\(batches=...\)` must be .*got none in epoch 1"),
        ([TARGET], {"per_member": True}, r"leading axis of 3, got the leading axes \[\(2,\)\]"),
        (
            [TARGET * jnp.nan],
            {"num_epochs": 2},
            r"`warmstart\(optimizer=...\)` must be .*got none for the members \[0, 1, 2\]",
        ),
    ],
)
def test_bad_input(batches, arguments, message):
    with pytest.raises(ValueError, match=message):
        train(batches, **arguments)


def test_one_pass_iterator_is_named():
    with pytest.raises(ValueError, match="got none in epoch 2"):
        train(iter([TARGET]), num_epochs=2)
