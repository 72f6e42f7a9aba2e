"""Each way in which loops call `update`: the same chain as in a loop that passes everything."""

import copy
import dataclasses
import warnings
from typing import Any

import chex
import cloudpickle
import equinox as eqx
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# With it `stats` and `last_accepted` look for variables in a state.
from flax import nnx  # noqa: F401
from public_samplers import settings_of
from test_contract import make

import optax_smile

CALLS, KEY = 12, jax.random.key(0)
RNG = np.random.default_rng(0)
BATCHES = jnp.asarray(RNG.normal(size=(CALLS, 16, 3)), jnp.float32)
START = {"mean": jnp.ones(3), "offset": jnp.zeros(2)}
apply_updates: Any = optax.apply_updates
last_accepted: Any = optax_smile.last_accepted
tracked: Any = optax_smile.tracked
stats = optax_smile.stats


def loss_fn(params, batch):
    offset = params["offset"] - 1 - 0 * batch.mean()  # A penalty otherwise.
    return jnp.mean((params["mean"][None] - batch) ** 2) + jnp.sum(offset**2) / 2


def sghmc(**options) -> Any:
    return optax_smile.sghmc(1e-2, num_data=100, key=KEY, **options)


def follow(tx, call, start: Any = START, batches=BATCHES):
    """Parameters and state after calls `call(tx, grads, state, params, loss)`."""

    def step(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = call(tx, grads, state, params, loss)
        return (apply_updates(params, updates), state), None

    return jax.jit(lambda *start: jax.lax.scan(step, start, batches)[0])(start, tx.init(start))


def plain(tx, grads, state, params, loss):
    return tx.update(grads, state, params, value=loss)


def without_params(tx, grads, state, params, loss):
    return tx.update(grads, state, value=loss)


@pytest.fixture(scope="module")
def expected():
    params, state = follow(sghmc(), plain)
    return params, last_accepted(state, params), stats(state)


def assert_same(found, expected):
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_params_the_state_has_those_of_the_loop(expected):
    params, state = follow(tracked(sghmc()), without_params)
    assert_same((params, last_accepted(state), stats(state)), expected)
    chex.assert_trees_all_close(state.tracked_params, params, rtol=1e-6)
    for part in state, state.sampler_state:
        for name in part._fields:
            chex.assert_trees_all_equal(optax.tree.get(state, name), getattr(part, name))


def test_arguments_may_have_names():
    tx = sghmc()
    state = tx.init(START)
    expected = tx.update(START, state, START, value=2.0)
    chex.assert_trees_all_equal(tx.update(START, state, START, loss=2.0), expected)
    named = tx.update(value=2.0, params=START, state=state, updates=START)
    chex.assert_trees_all_equal(named, expected)


def injected(**options) -> Any:
    build: Any = optax.inject_hyperparams(optax_smile.sghmc, static_args=("key",))
    return build(step_size=1e-2, num_data=100, key=KEY, **options)


LABELS: Any = {"mean": "sampled", "offset": "sampled", "table": "frozen"}
WRAPPED: dict[str, Any] = {
    "inject_hyperparams": lambda tx: tracked(injected()),
    "MultiSteps": lambda tx: optax.MultiSteps(tracked(tx), 2),
    "chain": lambda tx: tracked(optax.chain(optax.clip_by_global_norm(1e9), tx)),
    "partition": lambda tx: optax.partition(
        {"sampled": tracked(tx), "frozen": optax.set_to_zero()}, LABELS
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_pass_on_that_there_are_no_params(name, expected):
    tx, has_table = WRAPPED[name](sghmc()), name == "partition"
    start = START | ({"table": jnp.arange(3.0)} if has_table else {})
    batches = jnp.repeat(BATCHES, 2, axis=0) if name == "MultiSteps" else BATCHES
    params, state = follow(tx, without_params, start, batches)
    table, drawn = params.pop("table", None), last_accepted(state)
    if has_table:
        # In the place of what the sampler does not see; with `params` the whole tree comes back.
        assert drawn.pop("table") == optax.MaskedNode()
        np.testing.assert_array_equal(table, start["table"])
        whole = last_accepted(state, params | {"table": table})
        chex.assert_trees_all_equal(whole["table"], table)
        chex.assert_trees_all_close(whole["mean"], drawn["mean"], rtol=1e-6)
    assert_same((params, drawn, stats(state)), expected)


def test_a_bfloat16_model_with_a_master_copy(expected):
    """The loop has half-precision weights alone; gradients are in half precision."""
    tx = tracked(sghmc())

    @jax.jit
    def step(model, state, batch):
        grads = jax.grad(loss_fn)(model, batch)
        assert grads["mean"].dtype == jnp.bfloat16
        _, state = tx.update(grads, state)
        return optax.tree.cast(state.tracked_params, jnp.bfloat16), state

    model, state = optax.tree.cast(START, jnp.bfloat16), tx.init(START)
    for batch in BATCHES:
        model, state = step(model, state, batch)
    chex.assert_trees_all_close(last_accepted(state), expected[1], atol=3e-2)
    assert last_accepted(state)["mean"].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"with float32\[3\] at \['mean'\], got bfloat16"):
        last_accepted(state, model)


# Eager calls.


def test_eager_calls_equal_compiled_ones_to_the_bit():
    tx = make("psmile, rich")
    update: Any = jax.jit(tx.update)
    states = [tx.init(START)] * 2
    for seed in range(3):
        grads = optax.tree.random_like(jax.random.key(seed), START)
        (updates, *states[:1]), (wanted, *states[1:]) = (
            call(grads, state, START, value=1.5)
            for call, state in zip((tx.update, update), states, strict=True)
        )
        chex.assert_trees_all_equal((updates, states[0]), (wanted, states[1]))


@pytest.mark.parametrize("build", [sghmc, injected])
def test_eager_calls_compile_nothing_after_the_first(build, caplog):
    """Also through `inject_hyperparams`, which builds its sampler in every call."""
    tx = tracked(build())
    state = tx.init(START)
    for number in range(3):
        with jax.log_compiles(number == 2):
            _, state = tx.update(START, state)
    assert stats(state).num_gradients == 3
    assert "Compiling" not in caplog.text


# Trees.


class Model(eqx.Module):
    layer: eqx.nn.Linear
    activation: Any
    count: jax.Array
    rate: float = 0.5

    def __call__(self, x):
        return self.activation(self.layer(x))


MODEL = Model(eqx.nn.Linear(3, 3, key=KEY), jax.nn.relu, jnp.arange(2))
SPEC = eqx.tree_at(lambda m: m.layer.bias, jax.tree.map(eqx.is_inexact_array, MODEL), False)


def model_loop(tx, start, passes=lambda model: model):
    @eqx.filter_jit
    def step(model, state, batch):
        moving, others = eqx.partition(model, SPEC)

        def loss(moving):
            return jnp.mean(jax.vmap(eqx.combine(moving, others))(batch) ** 2)

        updates, state = tx.update(jax.grad(loss)(moving), state, passes(model))
        return eqx.apply_updates(model, updates), state

    model, state = MODEL, tx.init(start)
    for batch in BATCHES[:3]:
        model, state = step(model, state, batch)
    return model, state


def test_whole_models_and_gradients_that_are_none():
    """As a sampler that never saw the frozen leaf, which a loop may well change."""
    moving = eqx.filter(MODEL, SPEC)
    wanted, alone = model_loop(sghmc(), moving, lambda model: eqx.filter(model, SPEC))
    model, state = model_loop(sghmc(), MODEL)
    assert stats(state).num_parameters == optax.tree.size(moving)
    chex.assert_trees_all_close(
        eqx.filter(model, SPEC), eqx.filter(wanted, SPEC), rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(stats(state), stats(alone), rtol=1e-3, atol=1e-4)
    changed = eqx.tree_at(lambda m: m.layer.bias, model, jnp.full(3, jnp.inf))
    drawn, expected = last_accepted(state, changed), last_accepted(alone, eqx.filter(wanted, SPEC))
    chex.assert_trees_all_equal(drawn.layer.bias, changed.layer.bias)
    chex.assert_trees_all_close(eqx.filter(drawn, SPEC), expected, atol=1e-5)
    assert drawn.activation is jax.nn.relu and drawn.rate == 0.5
    # What the loop makes of a leaf without a gradient is its own.
    _, state = model_loop(tracked(sghmc()), MODEL, lambda model: None)
    at = eqx.combine(eqx.filter(state.tracked_params, SPEC), changed)
    chex.assert_trees_all_equal(last_accepted(state, at).layer.bias, changed.layer.bias)
    chex.assert_trees_all_equal(last_accepted(state).layer.bias, MODEL.layer.bias)


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


WHOSE_CALLS = r"\(state=...\)` must be a state whose calls"


def test_parameters_that_a_loop_passes_replace_the_tracked_ones():
    """And what changes them is counted, as without `tracked`."""
    tx = tracked(sghmc())
    params, state = follow(tx, without_params)
    chex.assert_trees_all_close(last_accepted(state, params), last_accepted(state), rtol=1e-6)
    with pytest.raises(ValueError, match=r"`last_accepted\(params=...\)` must be those that the"):
        last_accepted(state, jax.tree.map(lambda x: 0.9 * x, params))
    for altered in range(1, 4):
        params = jax.tree.map(lambda x: x + 0.1, params)
        updates, state = tx.update(START, state, params)
        params = apply_updates(params, updates)
        chex.assert_trees_all_equal(state.tracked_params, params)
        assert stats(state).num_altered == altered
    with pytest.raises(ValueError, match="only the sampler changes the parameters"):
        last_accepted(state)


def test_what_has_no_parameters_or_another_state_is_refused():
    with pytest.raises(ValueError, match=r"`last_accepted\(params=...\)` must be the .*tracked"):
        last_accepted(sghmc().init(START))
    with pytest.raises(ValueError, match=r"`tracked.update\(state=...\)` must be what `init` or"):
        tracked(sghmc()).update(START, sghmc().init(START))
    with pytest.raises(ValueError, match="must be what `init` or `update` of sghmc returned"):
        sghmc().update(START, tracked(sghmc()).init(START), START)
    # Buffers of the loop may be donated.
    params = jax.tree.map(jnp.copy, START)
    state = tracked(sghmc()).init(params)
    jax.tree.map(lambda x: x.delete(), params)
    chex.assert_trees_all_equal(last_accepted(state), START)


def test_gradients_for_other_leaves_than_at_first_are_refused():
    part: Any = {"mean": jnp.ones(3), "offset": None}
    for tx in (sghmc(), tracked(sghmc())):
        updates, state = tx.update(part, tx.init(START), START)
        params: Any = eqx.apply_updates(START, updates)
        assert updates["offset"] is None and stats(state).num_parameters == 3
        assert optax.tree.get(state, "displacement")["offset"] is None
        for update in tx.update, jax.jit(tx.update):
            with pytest.raises(ValueError, match=r"updates=...\)` must be None at \['offset'\]"):
                update(START, state, params)
        _, whole = tx.update(START, tx.init(START), START)
        with pytest.raises(ValueError, match=r"None at \['offset'\], where the first call had"):
            tx.update(part, whole, START)
        # A compiled call can raise nothing.
        for _ in range(2):
            _, whole = jax.jit(tx.update)(part, whole, START)
            assert stats(whole).is_altered and stats(whole).num_parameters == 3
            with pytest.raises(ValueError, match=f"`last_accepted{WHOSE_CALLS}"):
                last_accepted(whole, START)
    # The number is that of one chain.
    chains = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    number: Any = jax.vmap(stats)(chains).num_parameters
    with pytest.warns(UserWarning, match="equal keys"):
        np.testing.assert_array_equal(stats(chains).num_parameters, [3, 3])
    np.testing.assert_array_equal(number, [3, 3])
    with pytest.raises(ValueError, match=r"`sghmc.update\(updates=...\)` must be None at .*'n'"):
        params = START | {"n": 3.0}
        sghmc().update(params | {"n": jnp.ones(())}, sghmc().init(params), params)
    with pytest.raises(ValueError, match="at least 2 parameters, got 0"):
        sghmc().update({"mean": None, "offset": None}, sghmc().init(START), START)


# A sampler is a pair of functions, which JAX, `copy` and cloudpickle rebuild.

PAIR = {"w": jnp.arange(1.0, 4.0)}
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = X @ np.ones(3, np.float32)
SMALL: dict[str, Any] = {"num_data": 40, "key": 0}


TRANSFORMATIONS: dict[str, Any] = {
    "sghmc": lambda: optax_smile.sghmc(lambda count: 0.1, **SMALL),
    "recorded": lambda: optax_smile.recorded(optax_smile.sgld(1e-3, **SMALL), num_warmup=1),
    "scale_by_gradient_noise": optax_smile.scale_by_gradient_noise,
}
UNMOVED: dict[str, Any] = {
    "published.psmile": lambda: optax_smile.published.psmile(1e-3, num_data=40),
    "psmile": lambda: optax_smile.psmile(**SMALL),
    "cyclical_sgld": lambda: optax_smile.cyclical_sgld(1e-3, total_steps=9, num_cycles=2, **SMALL),
}


@dataclasses.dataclass
class Config:
    tx: Any


def moved(tx):
    updates, _ = tx.update(PAIR, tx.init(PAIR), PAIR)
    return updates["w"]


def copies_of(tx):
    leaves, structure = jax.tree.flatten(tx)
    return {
        "tree": jax.tree.unflatten(structure, leaves),
        "map": jax.tree.map(lambda x: x, tx),
        "copy": copy.copy(tx),
        "deepcopy": copy.deepcopy({"tx": tx})["tx"],
        "asdict": dataclasses.asdict(Config(tx))["tx"],
        "pickle": cloudpickle.loads(cloudpickle.dumps(tx)),
    }


@pytest.mark.parametrize("name", [*UNMOVED, *TRANSFORMATIONS])
def test_it_survives_what_rebuilds_it(name):
    tx = (UNMOVED | TRANSFORMATIONS)[name]()
    copies, settings = copies_of(tx), settings_of(tx, PAIR)
    for way, made in copies.items():
        assert type(made) is type(tx) and settings_of(made, PAIR) == settings, way
        if name in UNMOVED:
            chex.assert_trees_all_equal(made.init(PAIR), tx.init(PAIR))
    if name in UNMOVED:
        return
    expected = moved(tx)
    for way, made in copies.items():
        np.testing.assert_array_equal(moved(made), expected, err_msg=way)
    traces = []

    @eqx.filter_jit
    def step(params, state, tx):
        traces.append(1)
        return tx.update(params, state, params)

    for made in (tx, copies["tree"]):
        updates, _ = step(PAIR, made.init(PAIR), made)
        # Compiled as one program, with other rounding than the call by itself.
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)
    assert len(traces) == 1
    # Optimistix makes what functions enclose static, which JAX hashes.
    closed = eqx.internal.closure_to_pytree(tx.update)
    call = eqx.filter_jit(lambda update, *given: update(*given)[0])
    call.lower(closed, PAIR, tx.init(PAIR), PAIR)


def test_copies_of_a_recorded_sampler_have_its_draws():
    tx = TRANSFORMATIONS["recorded"]()
    made = jax.tree.map(lambda x: x, tx)
    state, params = made.init(PAIR), PAIR
    for _ in range(4):
        updates, state = made.update(params, state, params)
        params = optax.apply_updates(params, updates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert copy.deepcopy(tx).draws().num_draws == made.draws().num_draws > 0


def test_seeds_are_those_of_jax_and_others_are_refused():
    seeds: Any = 0, 2**31, 2**32 - 1, np.uint32(7)
    for seed in seeds:
        state: Any = optax_smile.psmile(num_data=40, key=seed).init(PAIR)
        np.testing.assert_array_equal(state.key, jax.random.key_data(jax.random.key(seed)))
    wrong: Any = -1, 2**32, np.int64(2**32), np.int32(-1), 2**70
    for seed in wrong:
        with pytest.raises(ValueError, match=r"key=...\)` must be .* from 0 to 2\*\*32 - 1"):
            optax_smile.psmile(num_data=40, key=seed)


def test_an_eager_update_and_stats_do_not_wait_for_the_device():
    tx, params = optax_smile.sgld(1e-3, **SMALL), PAIR
    state = tx.init(params)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)

    @jax.jit
    def slow(x, number=20):
        matrix = jax.lax.fori_loop(0, number, lambda _, a: a @ a / 800, jnp.ones((800, 800)))
        return x * matrix[0, 0].astype(x.dtype)

    # Compile all.
    jax.block_until_ready((slow(params["w"], 1), slow(states.key, 1)))
    updates, after = tx.update(params, state, params)
    jax.block_until_ready(tx.update(params, after, optax.apply_updates(params, updates)))
    optax_smile.stats(state)
    gradient = {"w": slow(params["w"])}
    updates, after = tx.update(gradient, state, params)
    tx.update(gradient, after, optax.apply_updates(params, updates))
    assert not gradient["w"].is_ready()
    waiting = optax.tree.set(states, key=slow(states.key))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = optax_smile.stats(waiting)
    noise_id: Any = told.noise_id
    assert not noise_id.is_ready()
    with pytest.warns(UserWarning, match="equal keys"):
        optax_smile.stats(jax.block_until_ready(waiting))


def square_loss(params, batch):
    return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) / 2


def outputs(params, x):
    return x @ params["w"], jnp.float32(0)


@pytest.mark.parametrize(
    "flags",
    [
        {"jax_debug_nans": True, "jax_debug_infs": True},
        {"jax_disable_jit": True, "jax_numpy_dtype_promotion": "strict"},
    ],
)
def test_flags_of_jax_are_for_the_users_code(flags):
    start = {"w": jnp.stack([PAIR["w"], 2 * PAIR["w"]])}
    given: Any = {"num_warmup": 1, "num_draws": 2, "key": 0, "progress": False}
    tx = optax_smile.sgld(1e-3, **SMALL)
    before = {flag: getattr(jax.config, flag) for flag in flags}
    for flag, value in flags.items():
        jax.config.update(flag, value)
    try:
        draws = optax_smile.sample(square_loss, start, [(X, Y)], tx, **given)
        found = optax_smile.predict(outputs, draws, X, likelihood="gaussian", targets=Y, per="draw")
        assert str(optax_smile.diagnostics.summary(draws, found))
        _, state = tx.update(PAIR, tx.init(PAIR), PAIR)
        optax_smile.last_accepted(state, PAIR)
        assert np.all(np.isfinite(draws.params["w"])) and str(optax_smile.stats(state))
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


def test_any_zero_is_a_precision_of_zero():
    for zero in 0, 0.0, np.float32(0), np.int64(0), jnp.zeros(()):
        optax_smile.smile(log_prior=lambda p: jnp.zeros(()), prior_precision=zero, **SMALL)
    with pytest.raises(ValueError, match="must be 0 together"):
        optax_smile.smile(log_prior=lambda p: jnp.zeros(()), prior_precision=np.float32(1), **SMALL)
