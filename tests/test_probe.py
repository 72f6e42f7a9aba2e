"""What comes after the sampler: by the structure of a state, and by where parameters arrive."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile.stages import probe

KEY = jax.random.key(0)
SAMPLERS: dict[str, Any] = {
    "smile": lambda: optax_smile.smile(num_data=100, key=KEY),
    "psmile, rejections": lambda: optax_smile.psmile(
        num_data=100, key=KEY, reject_quantile=0.9, integrator="minimal_norm"
    ),
    "sghmc": lambda: optax_smile.sghmc(1e-3, num_data=100, key=KEY),
}
START = {"matrix": jnp.ones((30, 20)), "offset": jnp.ones(7), "scalar": jnp.ones(())}
NUM_GRADIENTS = 200


@functools.cache
def loop(name):
    """What `stats` says after a loop that adds `factor * updates - decay * params + offset`."""
    tx = SAMPLERS[name]()

    def run(factors, decay, offset, is_poisoned):
        def step(carry, count):
            params, state = carry
            noise = optax.tree.random_like(jax.random.fold_in(KEY, count), params)
            lost = jnp.where(is_poisoned & (count % 37 == 5), jnp.nan, 0)
            grads = jax.tree.map(lambda x, z: x + 0.3 * z + lost, params, noise)
            value = optax.tree.norm(params, squared=True) / 2
            updates, state = tx.update(grads, state, params, value=value)
            altered = jax.tree.map(
                lambda u, x: factors[count] * u - decay * x + offset, updates, params
            )
            return (optax.apply_updates(params, altered), state), optax_smile.stats(state)

        return jax.lax.scan(step, (START, tx.init(START)), jnp.arange(NUM_GRADIENTS))[1]

    return jax.jit(run)


def told(name, factors: Any = 1.0, decay=0.0, offset=0.0, is_poisoned=False):
    factors = jnp.broadcast_to(jnp.asarray(factors, jnp.float32), NUM_GRADIENTS)
    found = loop(name)(factors, decay, offset, is_poisoned)
    return {name: np.asarray(values) for name, values in found.items()}


@pytest.mark.parametrize("is_poisoned", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_what_arrives_as_sent_is_silent(name, is_poisoned):
    seen = told(name, is_poisoned=is_poisoned)
    assert seen["num_altered"][-1] == 0 and not seen["is_altered"].any()
    assert (seen["num_nonfinite"][-1] > 0) == is_poisoned
    assert (seen["num_rejected"][-1] > 0) == ("rejections" in name)


@pytest.mark.parametrize(
    "change", [{"factors": 0.5}, {"factors": -1.0}, {"decay": 1e-3}, {"offset": 1e-3}], ids=str
)
@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_changed_on_its_way_is_counted(name, change):
    seen = told(name, **change)
    assert seen["is_altered"][-1] and not seen["is_altered"][:3].any()
    assert seen["num_altered"][-1] > 0.5 * NUM_GRADIENTS


@pytest.mark.parametrize("name", SAMPLERS)
def test_three_times_running(name):
    """Two are counted, and the third tells; what is as sent again begins anew."""
    for number in (1, 2, 3):
        changed = (np.arange(NUM_GRADIENTS) >= 20) & (np.arange(NUM_GRADIENTS) < 20 + number)
        seen = told(name, np.where(changed, 0.5, 1.0))
        assert seen["num_altered"][-1] <= number
        if "rejections" not in name:
            assert seen["num_altered"][-1] == number
            assert seen["is_altered"].sum() == (number == 3)


def test_a_change_below_a_thousandth_of_the_step_is_counted_alone():
    seen = told("smile", factors=1 + 5e-4)
    assert seen["num_altered"][-1] > 0.5 * NUM_GRADIENTS and not seen["is_altered"].any()


def after(tx, post=lambda params: params, num_gradients=24, lost_at=()):
    """`stats` after a loop of any transformation, and after each call whether it was altered."""
    params, state = START, tx.init(START)
    update: Any = jax.jit(tx.update)
    altered = []
    for count in range(num_gradients):
        grads = jax.tree.map(lambda x: x + 0.1, params)
        if count in lost_at:
            grads = jax.tree.map(lambda x: x * jnp.nan, grads)
        updates, state = update(grads, state, params)
        params = post(optax.apply_updates(params, updates))
        altered.append(int(optax_smile.stats(state)["num_altered"]))
    return altered


def naive():
    return optax_smile.smile_naive(0.3, num_data=100)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), tx),
        lambda tx: optax.MultiSteps(tx, 3),
        lambda tx: optax.apply_if_finite(tx, 5),
        lambda tx: optax.masked(tx, {"matrix": True, "offset": False, "scalar": True}),
        lambda tx: optax.partition(
            {"sampled": tx, "trained": optax.sgd(0.1)},
            {"matrix": "sampled", "offset": "trained", "scalar": "sampled"},
        ),
        optax.flatten,
        lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("sampler", tx)),
    ],
    ids=["before", "MultiSteps", "apply_if_finite", "masked", "partition", "flatten", "named"],
)
def test_wrappers_that_leave_the_steps_alone_are_silent(wrap):
    assert after(wrap(naive()))[-1] == 0


def test_undone_and_resumed_steps_are_silent():
    assert after(optax.apply_if_finite(naive(), 5), lost_at=(3, 4, 11))[-1] == 0
    assert after(naive(), lost_at=(3, 4, 11))[-1] == 0


def test_averages_projections_and_late_transformations_are_counted():
    def projected(params):
        return jax.tree.map(lambda x: jnp.maximum(x, 0.97), params)

    def averaged(params):
        return jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, params, START)

    assert after(naive(), post=projected)[-1] > 0
    assert after(naive(), post=averaged)[-1] > 10
    # In a `named_chain` the order is lost, so that only the parameters can tell.
    late = optax.named_chain(("sampler", naive()), ("rate", optax.scale(0.5)))
    assert after(late)[-1] > 10


def test_lookahead_is_counted():
    tx = optax.lookahead(naive(), sync_period=5, slow_step_size=0.5)
    params: Any = optax.LookaheadParams.init_synced(START)
    state = tx.init(params)
    for _ in range(24):
        grads = jax.tree.map(lambda x: x + 0.1, params.fast)
        updates, state = tx.update(grads, state, params)
        params = cast(Any, optax.apply_updates(params, updates))
    assert int(optax_smile.stats(state)["num_altered"]) >= 3


LATE = {
    "scale": (lambda: optax.scale(-1.0), "followed by"),
    "clip": (lambda: optax.clip(1.0), "followed by"),
    "decay": (lambda: optax.add_decayed_weights(1e-4), "followed by"),
    "schedule": (
        lambda: optax.scale_by_schedule(lambda count: 0.5),
        "followed by ScaleByScheduleState",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_chain_that_goes_on_after_the_sampler_is_refused(name):
    make, got = LATE[name]
    tx = optax.chain(optax.clip(1.0), naive(), make())
    state = tx.init(START)
    rule = "must be that of a chain whose last transformation is the sampler, got one"
    with pytest.raises(ValueError, match=rf"`stats\(state=...\)` {rule} {got}"):
        optax_smile.stats(state)
    with pytest.raises(ValueError, match=rf"`last_accepted\(state=...\)` {rule} {got}"):
        optax_smile.last_accepted(state, START)
    with pytest.raises(ValueError, match=rf"`sample\(sampler=...\)` {rule} {got}"):
        optax_smile.sample(
            lambda params, batch: jnp.sum(params**2),
            jnp.ones((2, 3)),
            [0],
            tx,
            num_warmup=1,
            num_draws=1,
            key=0,
        )


def test_a_loops_own_tuple_is_no_chain():
    state = naive().init(START)
    assert optax_smile.stats((state, jnp.zeros(3), {"ema": START}))["num_altered"] == 0


def test_entries_are_few_and_of_every_kind_of_leaf():
    tree = {f"leaf {i:02}": jnp.full((3, 5 + i), float(i)) for i in range(40)}
    entries = probe.init(tree | {"none": jnp.zeros((0, 3))}).start
    assert entries.shape == (probe.MOST_LEAVES,)
    assert probe.init({"scalar": jnp.ones(()), "short": jnp.ones(2)}).start.shape == (2,)
