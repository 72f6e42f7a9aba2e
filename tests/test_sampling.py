"""What `sample` draws, traces and hands to a loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from paper import PAPER
from runs import CHAINS, mean_loss, noisy, own_batches, quiet, regression, run, start

import optax_smile
from optax_smile import _settings

EVERY: dict[str, Any] = {"num_warmup": 0, "thin": 1}


@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_draws_are_those_of_a_hand_written_loop(integrator):
    published: Any = PAPER | {"integrator": integrator}
    tx = optax_smile.psmile(0.02, num_data=runs.NUM_DATA, **published)
    gradients_per_step = 1 + (integrator == "minimal_norm")
    got = run(sampler=tx, num_warmup=3, num_draws=3, thin=2)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = tx.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return params, state, optax_smile.last_accepted(state, params)["w"]

    params, expected = start(), []
    state = jax.jit(jax.vmap(tx.init))(params)
    for call in range(9 * gradients_per_step):
        params, state, last = step(params, state, regression()[call % 7])
        expected.append(last)
    at = np.array([5, 7, 9]) * gradients_per_step - 1
    np.testing.assert_allclose(got.params["w"], np.stack(expected, 1)[:, at], atol=2e-6)
    assert got.params["w"].shape == (CHAINS, 3, 2)


def test_shapes_trace_callback_and_the_start_of_the_user():
    seen, params = [], start()
    tx = optax.chain(optax.clip_by_global_norm(1e6), quiet())
    arguments: dict[str, Any] = {"callback": lambda *given: seen.append(given), "thin": 2}
    got = run(params=params, sampler=tx, num_warmup=1, num_draws=3, **arguments)
    assert got.params["w"].shape == (CHAINS, 3, 2) and got.params["b"].shape == (CHAINS, 3)
    assert (got.num_chains, got.num_draws, len(got)) == (CHAINS, 3, CHAINS * 3)
    assert got.trace["num_gradients"].tolist() == [[1, 3, 5, 7]] * CHAINS
    assert [step for step, _ in seen] == [1, 3, 5, 7]
    for number, (_, stats) in enumerate(seen):
        assert stats.keys() == got.trace.keys()
        np.testing.assert_array_equal(stats["loss"], got.trace["loss"][:, number])
    np.testing.assert_array_equal(list(got)[4]["w"], got.params["w"][1, 1])
    for kept in (params, got.start):
        jax.tree.map(np.testing.assert_array_equal, kept, start())


def test_chains_get_their_own_keys_and_batches():
    """Each alone keeps chains apart that begin at the same place."""
    same, own = jax.tree.map(jnp.zeros_like, start()), {"batches": own_batches(3)}
    for arguments in ({"sampler": noisy()}, {"sampler": quiet(), "per_chain": True, **own}):
        got = run(params=same, num_warmup=2, num_draws=1, thin=1, **arguments)
        assert len(np.unique(got.params["w"][:, 0], axis=0)) == CHAINS


def test_batches_that_run_out_and_interrupts_end_the_run_with_what_there_is():
    def interrupt(step, stats):
        if step == 3:
            raise KeyboardInterrupt

    whole = run(sampler=quiet(), **EVERY).params["w"]
    for arguments in ({"batches": iter(regression()[:3])}, {"callback": interrupt}):
        got = runs.run_early(3, sampler=quiet(), **EVERY, **arguments)
        np.testing.assert_array_equal(got.params["w"], whole[:, :3])
    # What is observed of the draws is kept in their place.
    seen = run(sampler=quiet(), observe=lambda draw: {"sum": draw["w"].sum(1)}, **EVERY)
    np.testing.assert_allclose(seen.params["sum"], whole.sum(-1), rtol=1e-6)


INJECTED = optax.inject_hyperparams(optax_smile.sgld)(1e-4, num_data=9, key=jax.random.PRNGKey(0))
MISFITS: list[tuple[dict[str, Any], str]] = [
    (
        {"sampler": optax.chain(quiet(), quiet())},
        r"sampler=...\)` must be .*exactly one .*got one with 2",
    ),
    (
        {"params": {"w": jnp.ones((3, 2)), "b": 0.0}},
        r"params=...\)` must be .*equal leading axes, none of them empty.*\. For one network, use",
    ),
    (
        {"loss": lambda p, batch: batch[1] @ batch[0]},
        r"loss_fn=...\)` .* got one that returns float32\[2\]",
    ),
    (
        {"loss": lambda p, batch: (0.0, None)},
        r"loss_fn=...\)` .*with `aux=` a pair .* returns a tuple",
    ),
    (
        {"loss": lambda p, b, aux: 0.0, "aux": jnp.zeros(3)},
        r"loss_fn=...\)` .*with `aux=` a pair \(loss, new_aux\)",
    ),
    (
        {"loss": lambda p, batch: jnp.zeros((), int)},
        r"loss_fn=...\)` must be .*, got one that returns int32",
    ),
    ({"aux": jnp.zeros(CHAINS)}, r"loss_fn=...\)` must be a function of \(params, ba"),
    ({"sampler": INJECTED}, r"sampler=...\)` must be .*static_args"),
    ({"dtype": "float16"}, r"dtype=...\)` must be None without a `directory`"),
    ({"observe": lambda draw: draw["w"][0], **EVERY}, r"observe=...\)` .* \[chain, ...\] of the 3"),
    ({"per_chain": True}, r"batches=...\)` must be .*axis of 3, with `per_chain`, .* \[\(20,\)\]"),
    ({"batches": []}, r"batches=...\)` must be a list with at least one batch, got an empty"),
    (
        {"batches": regression()[0]},
        r"loss_fn=...\)` .* The first axis of `params`, length 3, was .* `\[batch\]`\.",
    ),
    (
        {"batches": [(x * np.nan, y) for x, y in regression()]},
        r"batches=...\)` must be finite, got nan or inf in the first batch\.",
    ),
    ({"batches": iter(regression()[:4])}, r"batches=...\)` must be .*, got 4 batches"),
]


@pytest.mark.filterwarnings("ignore:.*each array of the tuple")
def test_what_does_not_fit_together():
    for arguments, message in MISFITS:
        with pytest.raises(ValueError, match=rf"`sample\({message}"):
            run(**{"sampler": quiet(), **arguments})


def test_points_that_are_no_samples_are_traced_but_not_kept():
    """Cycles of six steps, the first three of each without noise."""
    cycles: dict[str, Any] = {"total_steps": 12, "num_cycles": 2, "exploration": 0.5, "key": 0}
    cyclical = optax_smile.cyclical_sgld(1e-4, num_data=runs.NUM_DATA, **cycles)
    with pytest.warns(UserWarning, match="kept 5 draws per chain instead of 12. At the other"):
        got = run(sampler=cyclical, num_draws=12, **EVERY)
    marked = got.trace["is_draw"][0]
    # After call k the last accepted point is the end of step k - 1, counted from 0.
    assert marked.tolist() == [(k - 1) % 6 >= 3 and k > 0 for k in range(12)]
    assert got.num_draws == marked.sum() == 5
    with pytest.raises(ValueError, match=r"`sample\(num_draws=...\)` must be .* got 2"):
        run(sampler=cyclical, num_draws=2, **EVERY)


def test_several_steps_in_one_go_see_the_batches_of_their_chain():
    """A wrong axis would have the right length; the last three batches cannot be stacked."""
    rows = own_batches(8)
    rows.append(jax.tree.map(lambda x: x[:, :12], rows[0]))
    arguments: dict[str, Any] = {"batches": rows, "per_chain": True, "thin": 3}
    arguments |= {"sampler": quiet(), "num_warmup": 0, "num_draws": 3, "check": False}
    one, three = (run(steps_per_dispatch=number, **arguments) for number in (1, 3))
    np.testing.assert_allclose(three.params["w"], one.params["w"], atol=1e-6)
    assert three.trace["num_gradients"][0].tolist() == [3, 6, 9]
    # The two gradients of a step may share a batch, as if each came twice.
    tx = quiet(integrator="minimal_norm")
    twice = [batch for batch in regression() for _ in range(2)]
    shared = run(sampler=tx, num_draws=5, batch_per="step", **EVERY)
    repeated = run(sampler=tx, num_draws=5, batches=twice, **EVERY)
    np.testing.assert_array_equal(shared.params["w"], repeated.params["w"])


def test_a_random_loss_draws_new_numbers_in_every_step_and_chain():
    def loss(params, batch, *, aux, key):
        return mean_loss(params, batch), jnp.roll(aux, 1).at[0].set(jax.random.uniform(key))

    arguments: dict[str, Any] = {"num_draws": 4, "steps_per_dispatch": 3, "stochastic": True}
    got = run(loss=loss, sampler=quiet(), aux=jnp.zeros((CHAINS, 12)), num_warmup=0, **arguments)
    assert len(np.unique(got.params["aux"][:, -1])) == CHAINS * 12


def test_auxiliary_state_follows_the_accepted_points():
    """The fifth batch is not finite: its step is rejected, and what it did to the state."""
    rows: Any = regression(8)
    rows[4] = jax.tree.map(lambda x: x * np.nan, rows[4])

    def loss(params, batch, *, aux):
        seen = {"count": aux["count"] + 1, "sum": aux["sum"] + batch[0]}
        return mean_loss(params, batch), seen

    aux = {"count": jnp.zeros(CHAINS), "sum": jnp.zeros((CHAINS, 20, 2))}
    given: dict[str, Any] = {"aux": aux, "check": False, **EVERY}
    got = run(loss=loss, sampler=quiet(), batches=rows, num_draws=8, **given)
    accepted = np.cumsum(got.trace["accepted"], axis=1)
    assert not got.trace["accepted"][:, 4].any() and accepted[:, -1].tolist() == [7] * CHAINS
    np.testing.assert_array_equal(got.params["aux"]["count"], accepted)
    total = np.sum([x for number, (x, _) in enumerate(rows) if number != 4], axis=0)
    np.testing.assert_allclose(got.params["aux"]["sum"][:, -1], [total] * CHAINS, atol=1e-5)
    # The loss of a rejected step is not that of the point where the chain is.
    np.testing.assert_array_equal(got.trace["loss"][:, 4], got.trace["loss"][:, 3])
    expected = [mean_loss(jax.tree.map(lambda x: x[0], start()), rows[0])]
    np.testing.assert_allclose(got.trace["start_loss"][0], expected * 8, rtol=1e-6)


def test_settings_hold_what_was_not_given_and_what_is_injected():
    labels = {"w": "sampled", "b": "still"}
    injected: Any = optax.inject_hyperparams(optax_smile.sgld, static_args=("key",))
    for name, tx in (
        ("smile", quiet()),
        ("smile", optax.chain(optax.clip_by_global_norm(1.0), quiet())),
        ("smile", optax.masked(quiet(), {"w": True, "b": False})),
        ("smile", optax.partition({"sampled": quiet(), "still": optax.set_to_zero()}, labels)),
        ("sgld", injected(0.02, num_data=runs.NUM_DATA, key=0)),
    ):
        settings: Any = _settings.of(tx, jax.tree.map(lambda x: x[0], start()))
        numbers = [settings[x] for x in ("step_size", "num_data", "prior_precision", "temperature")]
        assert settings["name"] == name and numbers == pytest.approx([0.02, runs.NUM_DATA, 1, 1])
    injected = optax.inject_hyperparams(optax_smile.smile, static_args=("key", "tuner"))
    tx = injected(0.02, num_data=200, reject_quantile=0.9, tuner=None, key=jax.random.key(0))
    draws = optax_smile.Snapshots(np.zeros((2, 4, 3)), {}, _settings.of(tx, {"w": jnp.zeros(2)}))
    assert optax_smile.diagnostics.summary(draws).nominal_rate == pytest.approx(0.1)


@pytest.mark.parametrize("label", ["sampling", "warm start"])
def test_the_bar_says_that_it_compiles_until_the_first_step_is_done(label, capsys):
    told = []
    if label == "sampling":
        look = lambda step, stats: told.append(capsys.readouterr().err)  # noqa: E731
        run(sampler=quiet(), progress=True, num_warmup=0, num_draws=2, callback=look)
    else:
        given: dict[str, Any] = {"num_members": 2, "num_epochs": 2, "key": 0}
        given |= {
            "init_fn": lambda key: {"w": jax.random.normal(key, (2,)), "b": 0.0},
            "batches": regression(),
        }
        optax_smile.warmstart(mean_loss, optimizer=optax.sgd(0.1), **given)
    lines = "".join([*told, capsys.readouterr().err]).split("\r")
    lines = [line for line in lines if line.startswith(f"{label}:")]
    compiling = [number for number, line in enumerate(lines) if "compiling" in line]
    shown = [number for number, line in enumerate(lines) if "step_size=" in line or "loss=" in line]
    assert compiling and shown and max(compiling) + 1 < min(shown)
    # It stops saying so before there is anything to show.
    assert all(" 0/" in lines[number] for number in (*compiling, max(compiling) + 1))


def test_a_single_chain_has_the_noise_of_the_key():
    tx = optax_smile.sgld(1e-2, num_data=10, key=0)
    params = {"w": jnp.ones((1, 3))}
    states = [optax_smile.parallel.init(tx, params, key=key) for key in (None, 1, 2)]
    assert len({str(optax.tree.get(state, "key")) for state in states}) == 3
