"""Each way in which loops call `update`: the same chain as in a loop that passes everything."""

import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# With it `stats` and `last_accepted` look for variables in a state.
from flax import nnx  # noqa: F401
from test_contract import SHARED, make

import optax_smile

CALLS, KEY = 12, jax.random.key(0)
RNG = np.random.default_rng(0)
BATCHES = jnp.asarray(RNG.normal(size=(CALLS, 16, 3)), jnp.float32)
START = {"mean": jnp.ones(3), "offset": jnp.zeros(2)}
apply_updates: Any = optax.apply_updates
last_accepted: Any = optax_smile.last_accepted
stats = optax_smile.stats


def loss_fn(params, batch):
    offset = params["offset"] - 1 - 0 * batch.mean()  # A penalty otherwise.
    return jnp.mean((params["mean"][None] - batch) ** 2) + jnp.sum(offset**2) / 2


def value_and_grad(params, batch):
    return jax.value_and_grad(loss_fn)(params, batch)


def sghmc(**options) -> Any:
    return optax_smile.sghmc(1e-2, num_data=100, key=KEY, **options)


def psmile(**options) -> Any:
    # Its state holds the start of a step.
    return optax_smile.psmile(num_data=100, key=KEY, integrator="minimal_norm", **options)


def follow(tx, call, compiled=True, batches=BATCHES, start: Any = START):
    """Parameters and state after calls `call(tx, grads, state, params, loss)`."""

    def step(params, state, batch):
        loss, grads = value_and_grad(params, batch)
        updates, state = call(tx, grads, state, params, loss)
        return apply_updates(params, updates), state

    step, params, state = jax.jit(step) if compiled else step, start, tx.init(start)
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def plain(tx, grads, state, params, loss):
    return tx.update(grads, state, params, value=loss)


def without_params(tx, grads, state, params, loss):
    return tx.update(grads, state, value=loss)


FORMS: dict[str, Any] = {
    "no params": without_params,
    "loss=": lambda tx, grads, state, params, loss: tx.update(grads, state, params, loss=loss),
    "keywords": lambda tx, grads, state, params, loss: tx.update(
        value=loss, params=params, state=state, updates=grads
    ),
}


@functools.cache
def expected(build):
    params, state = follow(build(), plain)
    return params, last_accepted(state, params), stats(state)


def assert_same(found, build):
    chex.assert_trees_all_close(found, expected(build), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [sghmc, psmile])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compiled", [True, False])
def test_calls(build, form, compiled):
    params, state = follow(build(track_params=form == "no params"), FORMS[form], compiled)
    drawn = last_accepted(state) if form == "no params" else last_accepted(state, params)
    assert_same((params, drawn, stats(state)), build)
    if form == "no params":
        # The state has the parameters of the loop.
        chex.assert_trees_all_close(state.tracked_params, params, rtol=1e-6)
        for name in state._fields:
            chex.assert_trees_all_equal(optax.tree.get(state, name), getattr(state, name))


def test_a_state_inside_a_class():
    class Trainer:
        def __init__(self, tx, params):
            self.tx, self.params, self.state = tx, params, tx.init(params)

        def fit(self, batch):
            grads = jax.grad(loss_fn)(self.params, batch)
            updates, self.state = self.tx.update(
                grads, self.state, loss=loss_fn(self.params, batch)
            )
            self.params = apply_updates(self.params, updates)

    trainer = Trainer(sghmc(track_params=True), START)
    for batch in BATCHES:
        trainer.fit(batch)
    assert_same((trainer.params, last_accepted(trainer.state), stats(trainer.state)), sghmc)


def scanned(tx, params, state, batches=BATCHES):
    def step(carry, batch):
        params, state = carry
        loss, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, value=loss)
        return (apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), batches)[0]


def test_scan_over_batches_and_vmap_over_members():
    tx = sghmc(track_params=True)
    params, state = jax.jit(lambda x: scanned(tx, x, tx.init(x)))(START)
    assert_same((params, last_accepted(state), stats(state)), sghmc)
    members: Any = jax.tree.map(lambda x: jnp.stack([x, x + 1]), START)
    states = optax_smile.parallel.init(tx, members, key=KEY)
    found, after = jax.jit(jax.vmap(functools.partial(scanned, tx)))(members, states)
    drawn = jax.vmap(last_accepted)(after)
    for i in range(2):
        one: Any = jax.tree.map(lambda x, i=i: x[i], (members, states, drawn))
        _, alone = scanned(tx, *one[:2])
        chex.assert_trees_all_close(last_accepted(alone), one[2], rtol=1e-5, atol=1e-6)
    assert not stats(after).is_altered.any()


def frozen(tx):
    labels: Any = {"mean": "sampled", "offset": "sampled", "table": "frozen"}
    return optax.partition({"sampled": tx, "frozen": optax.set_to_zero()}, labels)


def injected(**options) -> Any:
    build: Any = optax.inject_hyperparams(optax_smile.sghmc, static_args=("key",))
    return build(step_size=1e-2, num_data=100, key=KEY, **options)


WRAPPED: dict[str, Any] = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx),
    "inject_hyperparams": lambda tx: injected(track_params=True),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "partition": frozen,
    "masked": lambda tx: optax.masked(tx, {"mean": True, "offset": True, "table": False}),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("passes_params", [False, True])
def test_wrappers_pass_on_that_there_are_no_params(name, passes_params):
    tx = WRAPPED[name](sghmc(track_params=True))
    has_table = name in ("partition", "masked")
    start = START | ({"table": jnp.arange(3.0)} if has_table else {})
    batches = jnp.repeat(BATCHES, 2, axis=0) if name == "MultiSteps" else BATCHES
    params, state = follow(
        tx, plain if passes_params else without_params, batches=batches, start=start
    )
    table = params.pop("table", None)
    drawn = last_accepted(state)
    if has_table:
        # In the place of what the sampler does not see; with `params` the whole tree comes back.
        assert drawn.pop("table") == optax.MaskedNode()
        np.testing.assert_array_equal(table, start["table"])
        whole = last_accepted(state, params | {"table": table})
        chex.assert_trees_all_equal(whole["table"], table)
        chex.assert_trees_all_close(whole["mean"], drawn["mean"], rtol=1e-6)
    assert_same((params, drawn, stats(state)), sghmc)


def test_a_bfloat16_model_with_a_master_copy():
    """The loop has half-precision weights alone; gradients are in half precision."""
    tx: Any = sghmc(track_params=True)

    @jax.jit
    def step(model, state, batch):
        grads = jax.grad(loss_fn)(model, batch)
        assert grads["mean"].dtype == jnp.bfloat16
        _, state = tx.update(grads, state)
        return optax.tree.cast(state.tracked_params, jnp.bfloat16), state

    model, state = optax.tree.cast(START, jnp.bfloat16), tx.init(START)
    for batch in BATCHES:
        model, state = step(model, state, batch)
    chex.assert_trees_all_close(last_accepted(state), expected(sghmc)[1], atol=3e-2)
    assert last_accepted(state)["mean"].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"with float32\[3\] at \['mean'\], got bfloat16"):
        last_accepted(state, model)


# Eager calls.


@pytest.mark.parametrize("case", SHARED)
def test_eager_calls_equal_compiled_ones_to_the_bit(case):
    tx, start = make(case), jax.tree.map(jnp.asarray, {"layer": {"w": jnp.ones((4, 8))}})
    start["layer"]["b"] = jnp.zeros(8)
    update: Any = jax.jit(tx.update)
    states = [tx.init(start)] * 2
    for seed in range(3):
        grads = optax.tree.random_like(jax.random.key(seed), start)
        (updates, *states[:1]), (wanted, *states[1:]) = (
            call(grads, state, start, value=1.5)
            for call, state in zip((tx.update, update), states, strict=True)
        )
        chex.assert_trees_all_equal((updates, states[0]), (wanted, states[1]))


@pytest.mark.parametrize("build", [sghmc, injected])
def test_eager_calls_compile_nothing_after_the_first(build, caplog):
    """Also through `inject_hyperparams`, which builds its sampler in every call."""
    tx = build(track_params=True)
    state = tx.init(START)
    for number in range(3):
        with jax.log_compiles(number == 2):
            _, state = tx.update(START, state)
    assert stats(state).num_gradients == 3
    assert "Compiling" not in caplog.text


# Trees.


class Model(eqx.Module):
    layer: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: Any
    count: jax.Array
    rate: float = 0.5
    name: str = "model"
    is_deep: bool = True

    def __call__(self, x):
        return self.head(self.activation(self.layer(x)))[0]


LAYERS = [eqx.nn.Linear(3, size, key=KEY) for size in (3, 1)]
MODEL = Model(LAYERS[0], LAYERS[1], jax.nn.relu, jnp.arange(2))
ARRAYS = eqx.filter(MODEL, eqx.is_inexact_array)
SPEC = eqx.tree_at(lambda m: m.layer.bias, jax.tree.map(eqx.is_inexact_array, MODEL), False)


def model_loop(tx, start, spec, passes=lambda model, spec: model, compiled=True):
    """An unfiltered model, and gradients for a part of it."""

    def step(model, state, batch):
        moving, others = eqx.partition(model, spec)

        def loss(moving):
            return jnp.mean(jax.vmap(eqx.combine(moving, others))(batch) ** 2)

        grads = jax.grad(loss)(moving)
        updates, state = tx.update(grads, state, passes(model, spec))
        return eqx.apply_updates(model, updates), state

    model, state = MODEL, tx.init(start)
    step = eqx.filter_jit(step) if compiled else step
    for batch in BATCHES[:4]:
        model, state = step(model, state, batch)
    return model, state


@pytest.mark.parametrize("build", [sghmc, psmile])
def test_whole_models_and_gradients_that_are_none(build):
    """As a sampler that never saw the frozen leaf, which a loop may well change."""
    tx, moving = build(), eqx.filter(MODEL, SPEC)
    wanted, alone = model_loop(tx, moving, SPEC, eqx.filter)
    size = optax.tree.size(moving)
    for compiled in (True, False):
        model, state = model_loop(tx, MODEL, SPEC, compiled=compiled)
        assert stats(state).num_parameters == stats(alone).num_parameters == size
        chex.assert_trees_all_close(
            eqx.filter(model, SPEC), eqx.filter(wanted, SPEC), rtol=1e-4, atol=1e-5
        )
        chex.assert_trees_all_close(stats(state), stats(alone), rtol=1e-3, atol=1e-4)
        changed = eqx.tree_at(lambda m: m.layer.bias, model, jnp.full(3, jnp.inf))
        drawn = last_accepted(state, changed)
        chex.assert_trees_all_equal(drawn.layer.bias, changed.layer.bias)
        chex.assert_trees_all_close(
            eqx.filter(drawn, SPEC), last_accepted(alone, eqx.filter(wanted, SPEC)), atol=1e-5
        )
        assert drawn.activation is jax.nn.relu and drawn.name == "model" and drawn.rate == 0.5
    # Without parameters, and all leaves.
    whole = jax.tree.map(eqx.is_inexact_array, MODEL)
    tracking = build(track_params=True)
    model, state = model_loop(tracking, MODEL, whole, lambda *_: None)
    wanted, _ = model_loop(tx, ARRAYS, whole, eqx.filter)
    chex.assert_trees_all_close(
        eqx.filter(model, whole), eqx.filter(wanted, whole), rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(state.tracked_params, eqx.filter(model, whole), rtol=1e-6)
    assert stats(state).num_parameters == optax.tree.size(ARRAYS)
    # What the loop makes of a leaf without a gradient is its own.
    _, state = model_loop(tracking, MODEL, SPEC)
    at = eqx.combine(eqx.filter(state.tracked_params, SPEC), changed)
    chex.assert_trees_all_equal(last_accepted(state, at).layer.bias, changed.layer.bias)


def test_integers_get_no_update():
    params: Any = {"w": jnp.ones(3), "table": jnp.arange(2), "mask": jnp.ones(2, bool)}
    tx = sghmc()
    grads = jax.grad(lambda x: jnp.sum(x["w"] ** 2), allow_int=True)(params)
    for update in (tx.update, jax.jit(tx.update)):
        given = grads if update is tx.update else grads | {"table": None, "mask": None}
        updates, state = update(given, tx.init(params), params)
        after = eqx.apply_updates(params, updates)
        chex.assert_trees_all_equal(after["table"], params["table"])
        chex.assert_trees_all_equal_dtypes(after, params)
        chex.assert_trees_all_equal(last_accepted(state, after)["mask"], params["mask"])
    # As Optax applies them.
    updates, _ = tx.update(grads, tx.init(params), params)
    chex.assert_trees_all_equal(apply_updates(params, updates)["table"], params["table"])


# What does not fit.


def test_other_parameters_than_the_tracked_ones_are_refused():
    tx = sghmc(track_params=True)
    params, state = follow(tx, without_params)
    grads: Any = jax.grad(loss_fn)(params, BATCHES[0])
    others = [START, jax.tree.map(lambda x: x.at[0].add(0.1), params), scale(params, jnp.nan)]
    for other in others:
        # The call that follows raises it if the first one ended before the device did.
        with pytest.raises(
            ValueError, match=r"`sghmc.update\((params|state)=...\)` must be .* track"
        ):
            _, after = tx.update(grads, state, other)
            tx.update(grads, jax.block_until_ready(after), other)
        with pytest.raises(
            ValueError, match=r"`last_accepted\(params=...\)` must be .* which the state tracks"
        ):
            last_accepted(state, other)
        # A compiled call can raise nothing.
        _, after = jax.jit(tx.update)(grads, state, other)
        for _ in range(2):
            assert stats(after).is_altered
            with pytest.raises(
                ValueError, match=r"`last_accepted\(state=...\)` must be a state whose calls"
            ):
                last_accepted(after)
            _, after = jax.block_until_ready(jax.jit(tx.update)(grads, after))
        with pytest.raises(
            ValueError, match=r"`sghmc.update\(state=...\)` must be a state whose calls"
        ):
            tx.update(grads, after)
    # A chain that goes on after the sampler is seen where parameters are passed at last.
    late = optax.named_chain(("sampler", tx), ("rate", optax.scale(0.5)))
    with pytest.raises(
        ValueError, match=r"`last_accepted\(params=...\)` must be .* which the state tracks"
    ):
        last_accepted(*reversed(follow(late, without_params)))
    # Rounding is no difference.
    near = jax.tree.map(lambda x: x * (1 + 2e-7), params)
    _, after = tx.update(grads, state, near)
    assert not stats(after).is_altered
    with pytest.raises(
        ValueError, match=r"`last_accepted\(params=...\)` must be the .*track_params"
    ):
        last_accepted(follow(sghmc(), plain)[1])
    for track in (True, False):
        with pytest.raises(ValueError, match="one of another sampler, or with other settings"):
            sghmc(track_params=track).update(
                grads, sghmc(track_params=not track).init(START), START
            )


def scale(params, factor):
    return jax.tree.map(lambda x: x * factor, params)


def test_sample_refuses_what_moves_the_tracked_parameters():
    """In a `named_chain`, whose order a state does not tell; from the second call on."""
    tx = optax.named_chain(("sampler", sghmc(track_params=True)), ("rate", optax.scale(0.5)))
    start = jax.tree.map(lambda x: jnp.stack([x, x + 1]), START)
    counts: Any = {"num_warmup": 0, "num_draws": 2, "thin": 1, "key": 0, "progress": False}
    with pytest.raises(ValueError, match=r"`sample\(sampler=...\)`"):
        optax_smile.sample(loss_fn, start, [*BATCHES], tx, **counts)


def test_gradients_for_other_leaves_than_at_first_are_refused():
    part: Any = {"mean": jnp.ones(3), "offset": None}
    for tx in (sghmc(), sghmc(track_params=True)):
        updates, state = tx.update(part, tx.init(START), START)
        params: Any = eqx.apply_updates(START, updates)
        assert updates["offset"] is None and stats(state).num_parameters == 3
        rule = (
            r"`sghmc.update\(updates=...\)` must be None at the same leaves .* gradient at \['off"
        )
        with pytest.raises(ValueError, match=rf"{rule}|update\(state=...\)` must be a state whose"):
            _, after = tx.update(START, state, params)
            tx.update(START, jax.block_until_ready(after), params)
        _, after = jax.jit(tx.update)(START, state, params)
        assert stats(after).is_altered and stats(after).num_parameters == 3
        with pytest.raises(
            ValueError, match=r"`last_accepted\(state=...\)` must be a state whose calls"
        ):
            last_accepted(after, after.tracked_params or params)
    with pytest.raises(ValueError, match=r"`sghmc.update\(updates=...\)` must be None at .*'n'"):
        params = START | {"n": 3.0}
        sghmc().update(params | {"n": jnp.ones(())}, sghmc().init(params), params)
    with pytest.raises(ValueError, match="at least 2 parameters, got 0"):
        sghmc().update({"mean": None, "offset": None}, sghmc().init(START), START)


def test_leaves_with_zero_gradients_move():
    """The prior moves them: only None, `optax.partition` and `masked` leave them out."""
    tx = sghmc()
    updates, state = tx.update({"mean": jnp.ones(3), "offset": jnp.zeros(2)}, tx.init(START), START)
    assert np.all(updates["offset"] != 0) and stats(state).num_parameters == 5


def test_draws_of_a_part_of_a_model_are_those_of_its_posterior():
    """Of 100 data of mean 1 and variance 1: mean 100 / 101, variance 1 / 101.

    Without parameters, and with a leaf whose gradient is None. Bounds are 4 standard errors at an
    autocorrelation time of 20 calls: 200 draws in each of 3 parameters of 8 chains.
    """
    tx: Any = optax_smile.smile(num_data=100, key=KEY, track_params=True)
    start: Any = {"mean": jnp.zeros((8, 3)), "frozen": jnp.ones((8, 100))}

    def chain(params, state):
        def step(carry, _):
            params, state = carry
            grads = {"mean": params["mean"] - 1.0, "frozen": None}
            value = jnp.sum((params["mean"] - 1) ** 2) / 2
            updates, state = tx.update(grads, state, value=value)
            return (eqx.apply_updates(params, updates), state), last_accepted(state)["mean"]

        return jax.lax.scan(step, (params, state), None, 5000)[1]

    states = optax_smile.parallel.init(tx, start, key=KEY)
    draws = np.asarray(jax.jit(jax.vmap(chain))(start, states), float)[:, 1000:]
    z = (draws - 100 / 101) * np.sqrt(101)
    assert abs(z.mean()) < 4 / np.sqrt(4800)
    assert z.var() == pytest.approx(1, abs=4 * np.sqrt(2 / 4800))
