import itertools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper import PAPER

import optax_smile
from optax_smile import _settings

CHAINS = 3


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def regression(num_data=200, dim=2):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_data, dim)).astype(np.float32)
    y = (x @ np.ones(dim) + generator.normal(size=num_data)).astype(np.float32)
    return x, y


def batches(num_batches=7, size=20):
    x, y = regression()
    generator = np.random.default_rng(1)
    rows = [generator.choice(len(x), size) for _ in range(num_batches)]
    return [(x[r], y[r]) for r in rows]


def start(chains=CHAINS) -> Any:
    return {
        "w": jnp.arange(2.0 * chains).reshape(chains, 2) / 10,
        "b": jnp.zeros(chains),
    }


def draw(sampler, **arguments):
    defaults: dict[str, Any] = {
        "num_warmup": 3,
        "num_draws": 4,
        "thin": 2,
        "key": jax.random.key(0),
        "progress": False,
    }
    return optax_smile.sample(
        arguments.pop("loss", mean_loss),
        start(),
        arguments.pop("batches", batches()),
        sampler,
        **defaults | arguments,
    )


@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_draws_are_those_of_a_hand_written_loop(integrator):
    published: Any = PAPER | {"integrator": integrator}
    tx = optax_smile.psmile(0.02, num_data=200, **published)
    gradients_per_step = {"leapfrog": 1, "minimal_norm": 2}[integrator]
    got = draw(tx)
    step = jax.jit(jax.value_and_grad(mean_loss))
    for chain in range(CHAINS):
        params = jax.tree.map(lambda x, at=chain: x[at], start())
        state, stream, expected = tx.init(params), itertools.cycle(batches()), []
        for count in range(1, 12):
            for _ in range(gradients_per_step):
                loss, grads = step(params, next(stream))
                updates, state = tx.update(grads, state, params, value=loss)
                params = optax.apply_updates(params, updates)
            if count in (5, 7, 9, 11):
                expected.append(optax_smile.last_accepted(state, params)["w"])
        np.testing.assert_allclose(got.params["w"][chain], expected, atol=2e-6)


def test_shapes_trace_and_callback():
    seen = []
    got = draw(
        optax_smile.smile_naive(0.02, num_data=200), callback=lambda *told: seen.append(told)
    )
    assert got.params["w"].shape == (CHAINS, 4, 2) and got.params["b"].shape == (CHAINS, 4)
    assert (got.num_chains, got.num_draws, len(got)) == (CHAINS, 4, CHAINS * 4)
    assert got.trace["num_gradients"].tolist() == [[1, 3, 5, 7, 9, 11]] * CHAINS
    assert [step for step, _ in seen] == [1, 3, 5, 7, 9, 11]
    listed = list(got)
    np.testing.assert_array_equal(listed[5]["w"], got.params["w"][2, 1])


def test_chains_get_their_own_keys_and_batches():
    noisy = optax_smile.smile_naive(
        0.02, num_data=200, decoherence_length=0.1, key=jax.random.key(5)
    )
    same_start = jax.tree.map(jnp.zeros_like, start())
    arguments: dict[str, Any] = {
        "num_warmup": 2,
        "num_draws": 1,
        "key": jax.random.key(0),
        "progress": False,
    }
    got = optax_smile.sample(mean_loss, same_start, batches(), noisy, **arguments)
    assert not np.allclose(got.params["w"][0], got.params["w"][1])

    quiet = optax_smile.smile_naive(0.02, num_data=200)
    with pytest.raises(ValueError, match=r"copies in the chains \[1, 2\]"):
        optax_smile.sample(mean_loss, same_start, batches(), quiet, **arguments)
    own = [jax.tree.map(lambda *rows: np.stack(rows), *batches(CHAINS))]
    got = optax_smile.sample(mean_loss, same_start, own, quiet, per_chain=True, **arguments)
    assert not np.allclose(got.params["w"][0], got.params["w"][1])


def test_start_survives_and_works_inside_a_chain():
    params = start()
    tx = optax.chain(optax.clip_by_global_norm(1e6), optax_smile.smile_naive(0.02, num_data=200))
    got = optax_smile.sample(
        mean_loss,
        params,
        batches(),
        tx,
        num_warmup=0,
        num_draws=2,
        key=jax.random.key(0),
        progress=False,
    )
    np.testing.assert_array_equal(params["w"], start()["w"])
    # The draw after one call is the point the call was given.
    np.testing.assert_allclose(got.params["w"][:, 0], params["w"], atol=1e-6)


def test_batches_that_run_out_end_the_run_with_what_there_is():
    tx = optax_smile.smile_naive(0.02, num_data=200)
    with pytest.warns(UserWarning, match="ended early with 2 of 4 draws"):
        got = draw(tx, batches=iter(batches(8)))
    assert got.num_draws == 2
    with pytest.raises(ValueError, match="ran out before the first draw"):
        draw(tx, batches=iter(batches(2)))


def test_interrupt_returns_the_draws(monkeypatch):
    tx = optax_smile.smile_naive(0.02, num_data=200)

    def interrupt(step, stats):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="ended early with 2 of 4 draws"):
        assert draw(tx, callback=interrupt).num_draws == 2


@pytest.mark.slow
def test_control_c():
    tx = optax_smile.smile_naive(0.02, num_data=200)
    timer = threading.Timer(5, lambda: __import__("_thread").interrupt_main())
    timer.start()
    begun = time.monotonic()
    with pytest.warns(UserWarning, match="ended early"):
        got = draw(tx, num_draws=10_000_000, thin=1)
    assert time.monotonic() - begun < 60
    assert got.num_draws > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"thin": 0}, r"`sample\(thin=...\)` must be an integer >= 1, got 0"),
        ({"num_draws": 0}, r"`sample\(num_draws=...\)` must be an integer >= 1, got 0"),
        ({"num_warmup": -1}, r"`sample\(num_warmup=...\)` must be an integer >= 0, got -1"),
        ({"num_warmup": 1.5}, "must be an integer >= 0, got 1.5"),
        ({"per_chain": True}, r"axis of 3, with `per_chain`, got the leading axes \[\(20,\)\]"),
        ({"batches": []}, "ran out before the first draw"),
        ({"key": None}, r"`sample\(key=...\)` must be a JAX key .* got None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(optax_smile.smile_naive(0.02, num_data=200), **arguments)


def test_bad_functions():
    arguments: dict[str, Any] = {
        "num_warmup": 1,
        "num_draws": 1,
        "key": jax.random.key(0),
        "progress": False,
    }
    tx = optax_smile.smile_naive(0.02, num_data=200)
    with pytest.raises(ValueError, match="exactly one optax_smile sampler, got 0"):
        optax_smile.sample(mean_loss, start(), batches(), optax.sgd(0.1), **arguments)
    with pytest.raises(ValueError, match=r"`sample\(params=...\)` must be .*leading chain axis"):
        optax_smile.sample(mean_loss, {"w": jnp.ones((3, 2)), "b": 0.0}, batches(), tx, **arguments)
    none = {"w": jnp.ones((0, 2)), "b": jnp.ones(0)}
    with pytest.raises(ValueError, match=r"`sample\(params=...\)` must be .*at least one chain"):
        optax_smile.sample(mean_loss, none, batches(), tx, **arguments)
    with pytest.raises(ValueError, match=r"`sample\(loss_fn=...\)` must be .*scalar mean loss"):
        optax_smile.sample(
            lambda params, batch: batch[1] @ batch[0], start(), batches(), tx, **arguments
        )


def test_snapshots_check_their_axes():
    with pytest.raises(ValueError, match=r"`Snapshots\(params=...\)` must be .*two leading axes"):
        optax_smile.Snapshots({"w": np.zeros((2, 3, 4)), "b": np.zeros((2, 4))})


def test_points_that_are_no_samples_are_traced_but_not_kept():
    """Cycles of six steps, the first three of each without noise."""
    cyclical = optax_smile.cyclical_sgld(
        1e-4,
        num_data=200,
        total_steps=12,
        num_cycles=2,
        exploration=0.5,
        key=jax.random.key(0),
    )
    with pytest.warns(UserWarning, match="kept what the sampler calls a draw, with 5 of 12"):
        got = draw(cyclical, num_warmup=0, num_draws=12, thin=1)
    marked = got.trace["is_draw"][0]
    # After call k the last accepted point is the end of step k - 1, counted from 0.
    assert marked.tolist() == [(k - 1) % 6 >= 3 and k > 0 for k in range(12)]
    assert got.num_draws == marked.sum() == 5


def test_a_sampler_that_never_samples_is_an_error():
    adapting = optax_smile.scale_adapted_sghmc(
        1e-3, num_data=200, adapt_steps=100, key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match=r"`sample\(num_draws=...\)` must be .* got 4"):
        draw(adapting)


def test_a_second_field_for_the_key_is_named():
    injected = optax.inject_hyperparams(optax_smile.sgld)
    with pytest.raises(ValueError, match=r"`sample\(sampler=...\)` must be .*static_args"):
        draw(injected(1e-4, num_data=200, key=jax.random.PRNGKey(0)))


NAIVE = optax_smile.smile_naive(0.02, num_data=200)
EVERY: dict[str, Any] = {"num_warmup": 0, "thin": 1}


def test_several_steps_in_one_go_see_the_batches_of_their_chain():
    """Three steps of three chains: a wrong axis would have the right length."""
    rows = batches(9 * CHAINS)
    groups = [rows[i : i + CHAINS] for i in range(0, len(rows), CHAINS)]
    own = [jax.tree.map(lambda *x: np.stack(x), *group) for group in groups]
    arguments: dict[str, Any] = EVERY | {"batches": own, "per_chain": True, "thin": 3}
    one, three = (
        draw(NAIVE, num_draws=3, steps_per_dispatch=number, **arguments) for number in (1, 3)
    )
    np.testing.assert_allclose(three.params["w"], one.params["w"], atol=1e-6)


def test_a_random_loss_draws_new_numbers_in_every_step_and_chain():
    def loss(params, batch, *, aux, key):
        return mean_loss(params, batch), jnp.roll(aux, 1).at[0].set(jax.random.uniform(key))

    arguments = EVERY | {"thin": 3, "steps_per_dispatch": 3, "stochastic": True}
    drawn = draw(NAIVE, loss=loss, aux=jnp.zeros((CHAINS, 12)), **arguments).params["aux"][:, -1]
    assert len(np.unique(drawn)) == CHAINS * 12


def test_auxiliary_state_follows_the_accepted_points():
    """The fifth batch is not finite: its step is rejected, and what it did to the state."""
    rows: Any = batches(8)
    rows[4] = jax.tree.map(lambda x: x * np.nan, rows[4])

    def loss(params, batch, *, aux):
        seen = {"count": aux["count"] + 1, "sum": aux["sum"] + batch[0]}
        return mean_loss(params, batch), seen

    aux = {"count": jnp.zeros(CHAINS), "sum": jnp.zeros((CHAINS, 20, 2))}
    got = draw(NAIVE, loss=loss, batches=rows, num_draws=8, aux=aux, **EVERY)
    accepted = np.cumsum(got.trace["accepted"], axis=1)
    assert not got.trace["accepted"][:, 4].any() and accepted[:, -1].tolist() == [7] * CHAINS
    np.testing.assert_array_equal(got.params["aux"]["count"], accepted)
    total = np.sum([x for number, (x, _) in enumerate(rows) if number != 4], axis=0)
    np.testing.assert_allclose(got.params["aux"]["sum"][:, -1], [total] * CHAINS, atol=1e-5)


SAMPLED = {"w": "sampled", "b": "still"}
WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition({"sampled": tx, "still": optax.set_to_zero()}, SAMPLED),
    "injected": lambda tx: optax.inject_hyperparams(optax_smile.smile_naive)(0.02, num_data=200),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_settings_hold_what_was_not_given_as_well(wrapper):
    told: Any = _settings.of(WRAPPERS[wrapper](NAIVE), jax.tree.map(lambda x: x[0], start()))
    numbers = [told[x] for x in ("step_size", "num_data", "prior_precision", "temperature")]
    assert told["name"] == "smile_naive" and told["integrator"] == "leapfrog"
    assert numbers == pytest.approx([0.02, 200, 1, 1])


def test_an_injected_quantile_is_the_nominal_rejection_rate():
    injected: Any = optax.inject_hyperparams(optax_smile.smile, static_args=("key", "tuner"))
    tx = injected(0.02, num_data=200, reject_quantile=0.9, tuner=None, key=jax.random.key(0))
    told = _settings.of(tx, jax.tree.map(lambda x: x[0], start()))
    found = optax_smile.diagnostics.summary(optax_smile.Snapshots(np.zeros((2, 4, 3)), {}, told))
    assert found.nominal_rate == pytest.approx(0.1)


def test_rounded_draws_need_a_directory():
    with pytest.raises(ValueError, match=r"`sample\(dtype=...\)` must be None without a `dir"):
        draw(NAIVE, dtype="float16")


@pytest.mark.parametrize("label", ["sampling", "warm start"])
def test_the_bar_says_that_it_compiles_until_the_first_step_is_done(label, capsys):
    at_tick = []
    if label == "sampling":
        tx = optax_smile.smile_naive(0.01, num_data=200)
        look = lambda step, stats: at_tick.append(capsys.readouterr().err)  # noqa: E731
        draw(tx, progress=True, thin=3, num_warmup=0, num_draws=2, callback=look)
    else:
        one: Any = jax.tree.map(lambda x: x[0], start())
        optax_smile.warmstart(
            mean_loss,
            lambda key: one,
            batches(),
            optax.sgd(0.1),
            num_members=2,
            num_epochs=2,
            key=0,
        )
    lines = "".join([*at_tick, capsys.readouterr().err]).split("\r")
    lines = [line for line in lines if line.startswith(f"{label}:")]
    compiling = [number for number, line in enumerate(lines) if "compiling" in line]
    told = [number for number, line in enumerate(lines) if "step_size=" in line or "loss=" in line]
    assert compiling and told and max(compiling) + 1 < min(told)
    assert all(" 0/" in lines[number] for number in compiling)
    # It stops saying so before there is anything to tell.
    assert " 0/" in lines[max(compiling) + 1]
