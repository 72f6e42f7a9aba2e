"""How a state travels: its small leaves joined in a call, its scalars packed between calls."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_samplers import quick_psmile

import optax_smile
from optax_smile import _joined, _tree
from optax_smile._packed import pack, unpack

SHAPES = {"a": (10,), "b": (40, 50), "c": (3, 4), "d": (), "e": (600,), "f": (2, 300)}
KEYS = jax.random.split(jax.random.key(0), len(SHAPES))
PARAMS: dict[str, jax.Array] = {
    name: jax.random.normal(key, shape)
    for key, (name, shape) in zip(KEYS, SHAPES.items(), strict=True)
}
SMALL = ["a", "c", "d", "e", "f"]


def mean_loss(params, shift):
    return sum(jnp.mean(jnp.square(leaf - shift)) for leaf in jax.tree.leaves(params))


def follow(tx, frozen) -> Any:
    """Parameters and state after 20 calls, in which a scale is measured and replaced.

    The gradient of the leaf `frozen` is None.
    """

    def call(carry, shift):
        params, state = carry
        value, grads = jax.value_and_grad(mean_loss)(params, shift)
        updates, state = tx.update(grads | {frozen: None}, state, params, value=value)
        return (optax.apply_updates(params, updates | {frozen: 0}), state), None

    shifts = jax.random.normal(jax.random.key(1), (20,))
    # As in `optax.adamw`, a scan needs a state without the leaf.
    state = tx.init(PARAMS | {frozen: None})
    return jax.jit(lambda start: jax.lax.scan(call, start, shifts)[0])((PARAMS, state))


def test_joined_leaves_take_the_same_way(monkeypatch):
    """Two calls a step, a prior for each leaf, and a leaf that does not move."""
    given: dict[str, Any] = {"num_data": 100, "key": 0, "integrator": "minimal_norm"}
    given |= {"prior_precision": {**dict.fromkeys(SHAPES, 2.0), "c": jnp.ones((3, 4))}}
    given |= {"prior_mean": "start"}
    layout: Any = _joined.choose(PARAMS, _tree.SMALLEST_NETWORK)
    assert layout.is_small.count(True) == len(SMALL)
    found = follow(quick_psmile(**given), "e")
    monkeypatch.setattr(_joined, "choose", lambda params, smallest: None)
    expected = follow(quick_psmile(**given), "e")
    assert found[1].unpack().dynamics.preconditioner.window > 6
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, x in jax.tree_util.tree_leaves_with_path(found):
        y = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3, err_msg=jax.tree_util.keystr(path))
    probe = found[1].unpack().probe
    assert not probe.num_altered and probe.num_read == len(probe.start)


def test_join_and_part_give_back_the_tree_and_what_is_around_it():
    layout = _joined.choose(PARAMS, 0)
    tree: Any = {"like": PARAMS, "number": jnp.ones(()), "none": None, "text": "x"}
    joined: Any = _joined.join(layout, tree)
    assert joined["like"].joined.shape == (sum(PARAMS[name].size for name in SMALL),)
    assert [leaf.shape for leaf in joined["like"].apart] == [SHAPES["b"]]
    found = jax.jit(lambda tree: _joined.part(_joined.join(layout, tree)))
    for x, y in zip(found(PARAMS).values(), PARAMS.values(), strict=True):
        np.testing.assert_array_equal(x, y)
    noise, expected = (
        _tree.isotropic_like(jax.random.key(3), like) for like in (joined["like"], PARAMS)
    )
    for x, y in zip(_joined.part(noise).values(), expected.values(), strict=True):
        np.testing.assert_array_equal(x, y)
    marks = [_tree.fingerprint(like) for like in (joined["like"], PARAMS)]
    np.testing.assert_allclose(*marks, rtol=1e-5)


def test_only_leaves_of_one_precision_on_one_device_are_joined():
    with jax.enable_x64(True):
        assert _joined.choose(PARAMS | {"a": PARAMS["a"].astype("float64")}, 0) is None
    few = {name: PARAMS[name] for name in "ab"}
    assert _joined.choose(few, 0) is None and _joined.choose(PARAMS, 10**6) is None
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        assert _joined.choose(placed, 0) is None


def test_a_change_of_one_joined_leaf_is_seen():
    tx = optax_smile.psmile(num_data=100, key=0)
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    params: Any = optax.apply_updates(PARAMS, updates)
    for name in SMALL:
        changed = {**params, name: params[name] + 1e-2}
        after: Any = tx.update(PARAMS, state, changed, value=1.0)[1]
        assert after.unpack().probe.num_altered == 1, name


# Between calls.

WIDTHS = 8, 16, 16, 16, 1
NETWORK = {
    f"layer {i}": {"kernel": jnp.ones(shape), "bias": jnp.zeros(shape[1])}
    for i, shape in enumerate(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
}


@pytest.mark.parametrize(
    ("name", "most"), [("psmile", 40), ("published.psmile", 48), ("psgld", 25)]
)
def test_a_state_has_few_arrays_and_gives_back_its_scalars(name, most):
    make: Any = operator.attrgetter(name)(optax_smile)
    options: Any = {"key": 0} if name != "published.psmile" else {}
    options |= {"step_size": 1e-3} if name != "psmile" else {}
    state: Any = make(num_data=100, **options).init(NETWORK)
    assert len(jax.tree.leaves(state)) <= most
    scalars = [x for x in jax.tree.leaves(state.arrays) if x.ndim == 0]
    # Those of a tuner, or the factor that a user sets.
    assert len(scalars) <= 2
    of_chains = jax.tree.map(lambda x: jnp.stack([x, jnp.ones_like(x)]), state)
    for one in (0, 1):
        expected = jax.tree.map(lambda x, one=one: x[one], of_chains).unpack()
        found = jax.tree.map(lambda x, one=one: x[one], of_chains.unpack())
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)
    jax.tree.map(np.testing.assert_array_equal, pack(unpack(*state[:4])), state[:4])
    kinds = {x.dtype.name for x in jax.tree.leaves(state.unpack()) if x.ndim == 0}
    assert kinds == {"float32", "int32", "bool"}


def test_float64_arguments_do_not_widen_a_float32_state():
    with jax.enable_x64(True):
        numbers = {"num_data": 9.0, "temperature": 0.5, "decoherence_length": 2.0}
        given: Any = {name: np.float64(number) for name, number in numbers.items()}
        tuner = optax_smile.angle_tuner(np.float64(0.1))
        tx = optax_smile.psmile(**given, tuner=tuner, key=0)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), NETWORK)
        state = jax.eval_shape(tx.init, params)
        value = jax.ShapeDtypeStruct((), jnp.float32)
        after = jax.eval_shape(
            lambda *x: tx.update(*x[:3], value=x[3]), params, state, params, value
        )[1]
        kinds, expected = (jax.tree.map(lambda x: x.dtype, x) for x in (after, state))
        assert kinds == expected
