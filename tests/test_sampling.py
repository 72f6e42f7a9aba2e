"""Draws and trace of `sample`, and the arguments of the loss."""

import functools
import json
from signal import SIGTERM
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from runs import CHAINS, NUM_DATA, mean_loss, own_batches, quiet, refused, regression, run, stub

import optax_smile

EVERY: dict[str, Any] = {"num_warmup": 0, "thin": 1}
STILL = stub(noise=0.0)


def test_draws_are_those_of_a_hand_written_loop():
    """With two gradients per step, so that the last accepted point differs from the parameters."""
    tx: Any = quiet(integrator="minimal_norm")
    begun = runs.start()
    got = run(params=begun, sampler=tx, num_warmup=3, num_draws=3, thin=2)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = tx.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return params, state, optax_smile.last_accepted(state, params)["w"]

    params, expected = runs.start(), []
    state = jax.jit(jax.vmap(tx.init))(params)
    for call in range(9 * 2):
        params, state, last = step(params, state, regression()[call % 7])
        expected.append(last)
    np.testing.assert_allclose(got.params["w"], np.stack(expected[9::4], 1), atol=2e-6)
    assert got.params["w"].shape == (CHAINS, 3, 2) and got.params["b"].shape == (CHAINS, 3)
    assert (got.num_chains, got.num_draws, len(got)) == (CHAINS, 3, CHAINS * 3)
    assert got.trace["num_gradients"].tolist() == [[2, 6, 10, 14, 18]] * CHAINS
    np.testing.assert_array_equal(list(got)[4]["w"], got.params["w"][1, 1])
    for kept in (begun, got.start):
        jax.tree.map(np.testing.assert_array_equal, kept, runs.start())


def test_chains_get_their_own_keys_and_batches():
    """Keys alone, and batches alone, keep chains with equal starts apart."""
    same, own = jax.tree.map(jnp.zeros_like, runs.start()), {"batches": own_batches(3)}
    for arguments in ({}, {"sampler": STILL, "per_chain": True, **own}):
        got = run(params=same, num_warmup=2, num_draws=1, thin=1, **arguments)
        assert len(np.unique(got.params["w"][:, 0], axis=0)) == CHAINS


def test_a_random_loss_draws_new_numbers_in_every_step_and_chain():
    def loss(params, batch, *, aux, key):
        return mean_loss(params, batch), jnp.roll(aux, 1).at[0].set(jax.random.uniform(key))

    arguments: dict[str, Any] = {"num_draws": 4, "steps_per_dispatch": 3, "stochastic": True}
    got = run(loss=loss, sampler=STILL, aux=jnp.zeros((CHAINS, 12)), num_warmup=0, **arguments)
    assert len(np.unique(got.params["aux"][:, -1])) == CHAINS * 12


def running(params, batch, *, aux):
    mean = aux["mean"] + batch[0].mean()
    return mean_loss(params, batch), {"calls": aux["calls"] + 1, "mean": mean}


INJECTED = optax.inject_hyperparams(optax_smile.sgld)(1e-4, num_data=9, key=jax.random.PRNGKey(0))
TWICE = optax.MultiSteps(stub(kind=runs.TwoGradients), 2)
NAN_BATCHES = [(x * np.nan, y) for x, y in regression()]
AUX_LOSS = {"loss": lambda p, b, aux: 0.0, "aux": jnp.zeros(3)}
INTEGERS = runs.start() | {"n": jnp.zeros(CHAINS, int)}
MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("sampler", {"sampler": optax.chain(quiet(), quiet())}, "must be .*exactly one .* with 2"),
    ("sampler", {"sampler": INJECTED}, "must be .*static_args"),
    ("sampler", {"sampler": TWICE}, 'must be one with `integrator="leapf'),
    ("params", {"params": INTEGERS}, r"must be .* got int32.* at \['n'\]"),
    ("loss_fn", {"loss": lambda p, batch: batch[1] @ batch[0]}, r".* returns float32\[2\]"),
    ("loss_fn", AUX_LOSS, r"must be .*with `aux=` a pair \(loss, new_aux\)"),
    ("loss_fn", {"loss": lambda p, b: jnp.zeros((), int)}, "must be .*, got one .* returns int32"),
    ("loss_fn", {"batches": regression()[0]}, r".* axis of `params`, length 3, .* `\[batch\]`\."),
    ("dtype", {"dtype": "float16"}, "must be None without a `directory`"),
    ("batches", {"per_chain": True}, r"must be .*axis of 3, with `per_chain`, .* \[\(20,\)\]"),
    ("batches", {"batches": []}, "must be a list with at least one batch, got an empty"),
    ("batches", {"batches": NAN_BATCHES}, r"must be finite, got nan or inf in the first batch\."),
    ("batches", {"batches": iter(regression()[:4])}, "must be .*, got 4 batches"),
]


@pytest.mark.filterwarnings("ignore:.*each array of the tuple")
def test_what_does_not_fit_together():
    for name, arguments, message in MISFITS:
        refused(rf"`sample\({name}=...\)` {message}", run, **arguments)


def test_parameters_may_have_any_byte_order():
    swapped = jax.tree.map(lambda x: np.asarray(x).astype(">f4"), runs.start())
    runs.assert_same_bits(run(params=swapped), run())


def test_points_that_are_no_samples_are_traced_but_not_kept(tmp_path):
    """In each six steps, the first two and the last are no samples."""
    exploring = stub(kind=runs.Exploring)
    with pytest.warns(UserWarning, match="kept 6 draws per chain instead of 12: at the other"):
        got = run(sampler=exploring, num_draws=12, **EVERY)
    marked = got.trace["is_draw"][0]
    assert marked.tolist() == [step % 6 >= 3 for step in range(1, 13)]
    assert got.num_draws == marked.sum() == 6
    # A repeated run raises the same error.
    for _ in range(2):
        rule = r"`sample\(num_draws=...\)` must be large .* got 2"
        refused(rule, run, tmp_path, sampler=exploring, num_draws=2, **EVERY)


def test_several_steps_in_one_go_see_the_batches_of_their_chain():
    """A wrong axis would have the right length; the last three batches cannot be stacked."""
    rows = own_batches(8)
    rows.append(jax.tree.map(lambda x: x[:, :12], rows[0]))
    arguments: dict[str, Any] = {"batches": rows, "per_chain": True, "thin": 3}
    arguments |= {"sampler": STILL, "num_warmup": 0, "num_draws": 3, "check": False}
    one, three = (run(steps_per_dispatch=number, **arguments) for number in (1, 3))
    np.testing.assert_allclose(three.params["w"], one.params["w"], atol=1e-6)
    assert three.trace["num_gradients"][0].tolist() == [3, 6, 9]
    # The two gradients of a step may share a batch, as if each came twice.
    tx = stub(kind=runs.TwoGradients)
    twice = [batch for batch in regression() for _ in range(2)]
    shared = run(sampler=tx, num_draws=5, batch_per="step", **EVERY)
    repeated = run(sampler=tx, num_draws=5, batches=twice, **EVERY)
    np.testing.assert_array_equal(shared.params["w"], repeated.params["w"])


def test_auxiliary_state_follows_the_accepted_points():
    """The fifth batch is not finite: its step and its change of `aux` are rejected."""
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
    first = mean_loss(jax.tree.map(lambda x: x[0], runs.start()), rows[0])
    losses, mean = got.trace["loss"], got.trace["start_loss"]
    np.testing.assert_allclose(losses[0, 0], first, rtol=1e-6)
    np.testing.assert_allclose(mean[:, :4], np.cumsum(losses, 1)[:, :4] / [1, 2, 3, 4], rtol=1e-5)
    # The mean leaves out a loss that is not finite.
    np.testing.assert_array_equal(mean[:, 4], mean[:, 3])
    assert np.isfinite(mean).all()


def broken(params, batch, *, aux):
    """The variance of a single example is not a number; the loss is finite."""
    value, new = running(params, batch, aux=aux)
    return value, new | {"mean": jnp.where(batch[1][0] > 9, jnp.nan, new["mean"])}


@pytest.mark.slow
def test_auxiliary_state_keeps_its_last_finite_numbers():
    """The step is rejected and counted apart: no gradient is at fault, and no step shorter."""
    rows: Any = regression(8)
    rows[4] = rows[4][0], rows[4][1].copy()
    rows[4][1][0] = 10
    begun = {"calls": jnp.zeros(CHAINS, int), "mean": jnp.zeros(CHAINS)}
    given: dict[str, Any] = {"batches": rows, "num_warmup": 0, "num_draws": 16, "thin": 1}
    said = r"^`sample`: `aux` would not be finite at \['mean'\] after 12\.50% of the calls"
    for sampler in (quiet(), optax_smile.sgld(1e-3, num_data=NUM_DATA, key=0)):
        got = runs.warned(said, run, loss=broken, sampler=sampler, aux=begun, **given)
        assert np.isfinite(got.params["aux"]["mean"]).all()
        calls, path = got.params["aux"]["calls"][0], got.params["params"]["w"]
        assert calls.tolist() == [*range(1, 5), *range(4, 12), *range(11, 15)]
        assert not got.trace["num_nonfinite"].any() and not got.trace["accepted"][:, 4].any()
        np.testing.assert_array_equal(path[:, 4], path[:, 3])
    with pytest.warns(UserWarning, match="no.* posterior|not post"):
        runs.warned(said, run, loss=broken, sampler=optax.adam(1e-2), aux=begun, **given)
    lost = begun | {"mean": begun["mean"] * jnp.nan}
    rule = r"`sample\(aux=...\)` must be finite after a call of `loss_fn`, got .* \['mean'\]"
    refused(rule, run, loss=running, sampler=quiet(), aux=lost)
    one = jax.tree.map(lambda x: x[0], (runs.start(), begun))
    report = optax_smile.check(broken, one[0], rows, quiet(), aux=one[1])
    assert [x.kind for x in report.findings] == ["auxiliary state"]


def test_settings_hold_what_was_not_given_and_what_is_injected(tmp_path):
    labels = {"w": "sampled", "b": "still"}
    injected: Any = optax.inject_hyperparams(optax_smile.sgld, static_args=("key",))

    def settings_of(tx) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        optax_smile.Run(mean_loss, runs.start(), regression(), tx, key=0, directory=folder).close()
        return json.loads((folder / "manifest.json").read_text())["settings"]["sampler"]

    for name, tx in (
        ("smile", quiet()),
        ("smile", optax.chain(optax.clip_by_global_norm(1.0), quiet())),
        ("smile", optax.partition({"sampled": quiet(), "still": optax.set_to_zero()}, labels)),
        ("sgld", injected(0.02, num_data=NUM_DATA, key=0)),
    ):
        settings = settings_of(tx)
        numbers = [settings[x] for x in ("step_size", "num_data", "prior_precision", "temperature")]
        assert settings["name"] == name and numbers == pytest.approx([0.02, NUM_DATA, 1, 1])
    # The advice of `summary` depends on this.
    for tx, chooser in (
        (optax_smile.psmile(num_data=NUM_DATA, key=0), "angle_tuner"),
        (quiet(tuner=optax_smile.quantile_tuner()), "quantile_tuner"),
    ):
        assert settings_of(tx)["tuner"]["name"] == chooser
    assert isinstance(settings_of(quiet(optax.constant_schedule(0.02)))["step_size"], str)
    injected = optax.inject_hyperparams(optax_smile.smile, static_args=("key", "tuner"))
    tx = injected(0.02, num_data=200, reject_quantile=0.9, tuner=None, key=jax.random.key(0))
    draws = optax_smile.Snapshots(np.zeros((2, 4, 3)), {}, settings_of(tx))
    assert optax_smile.diagnostics.summary(draws).nominal_rate == pytest.approx(0.1)


@pytest.mark.parametrize("label", ["sampling", "warm start"])
def test_the_bar_says_that_it_compiles_until_the_first_step_is_done(label, capsys):
    if label == "sampling":
        run(progress=True, num_warmup=0, num_draws=2)
    else:
        runs.train(progress=True)
    lines = [x for x in capsys.readouterr().err.split("\r") if x.startswith(f"{label}:")]
    compiling = [number for number, line in enumerate(lines) if "compiling" in line]
    shown = [number for number, line in enumerate(lines) if "step_size=" in line or "loss=" in line]
    assert compiling and shown and max(compiling) < min(shown)


class TestTwoGradients:
    """The two gradients of a step have different weights: each batch must get both."""

    def order(self, batches, *, num_steps=12, **given) -> list[int]:
        """Numbers of the batches in the order in which the loss gets them."""

        def loss(params, batch, *, aux):
            return jnp.sum((params["w"] - batch) ** 2), jnp.roll(aux, -1).at[-1].set(batch[0])

        aux, params = jnp.full((2, 2 * num_steps), -1.0), {"w": jnp.eye(2)}
        given = {"check": False, "sampler": stub(kind=runs.TwoGradients)} | given
        given |= {"params": params, "aux": aux, "num_warmup": 0, "num_draws": num_steps, "thin": 1}
        seen = run(loss=loss, batches=batches, **given).params["aux"][0, -1].astype(int)
        return seen[seen >= 0].tolist()

    def test_every_second_pass_of_an_even_number_of_batches_is_rotated(self):
        four, five = ([np.full(1, x, np.float32) for x in range(n)] for n in (4, 5))
        rotated = [0, 1, 2, 3, 1, 2, 3, 0]
        for batches in (four, runs.Reused(four)):
            assert self.order(batches) == 3 * rotated
        assert self.order(four[:2], num_steps=4) == [0, 1, 1, 0] * 2
        for batches in (five, runs.Reused(five)):
            assert self.order(batches) == (5 * list(range(5)))[:24]
        assert self.order(four, sampler=stub()) == 3 * [0, 1, 2, 3]
        shared = np.repeat(3 * [0, 1, 2, 3], 2).tolist()
        assert self.order(four, batch_per="step") == shared
        # Longer and shorter passes, and one of a single batch.
        lengths = iter([2, 1, 2, 4, 4, 3, 4])
        varying = type("Varying", (), {"__iter__": lambda _: iter(four[: next(lengths)])})
        seen = [0, 1, 0, 0, 1, 1, 2, 3, 0, 0, 1, 2, 3, 1, 2, 0, 0, 1, 2, 3]
        assert self.order(varying(), num_steps=10) == seen

    def test_a_run_is_resumed_in_a_rotated_pass(self, tmp_path):
        """After six steps, where one batch of the second pass is still to come."""
        four = [np.full(1, x, np.float32) for x in range(4)]
        with pytest.raises(runs.Crash):
            crash: Any = {"callback": runs.at(13, runs.crash), "checkpoint_minutes": 0}
            self.order(four, directory=tmp_path, **crash)
        assert runs.checkpoints_in(tmp_path)[-1] == 12
        assert self.order(runs.Reused(four), directory=tmp_path) == 3 * [0, 1, 2, 3, 1, 2, 3, 0]


@pytest.mark.parametrize("steps, two", [(3, False), (1, True)])
def test_a_loader_may_use_its_memory_again(steps, two):
    given: dict[str, Any] = {"steps_per_dispatch": steps, "batches": regression(3, 20_000)}
    given |= {"sampler": stub(kind=runs.TwoGradients)} if two else {}
    memory = tuple(runs.aligned(*part.shape) for part in given["batches"][0])
    again = run(**given | {"batches": runs.Reused(given["batches"], memory)})
    runs.assert_same_bits(again, run(**given))


def test_accumulated_gradients_count_as_one_step(tmp_path):
    """Inside `MultiSteps` the sampler moves as with the mean loss of several batches."""
    small, given = regression(8, 5), {"num_warmup": 3, "num_draws": 5, "thin": 2}
    pairs = zip(small[::2], small[1::2], strict=True)
    large = [jax.tree.map(lambda *x: np.concatenate(x), *pair) for pair in pairs]
    expected = run(batches=large, **given)
    given |= {"sampler": optax.MultiSteps(stub(), 2), "batches": small}
    got = run(**given)
    np.testing.assert_array_equal(got.trace["num_gradients"], expected.trace["num_gradients"])
    np.testing.assert_allclose(got.params["w"], expected.params["w"], atol=1e-5)
    runs.warned("2 draws", run, tmp_path, **given, callback=runs.at(14, runs.send(SIGTERM)))
    resumed = run(tmp_path, **given, steps_per_dispatch=2)
    np.testing.assert_allclose(resumed.params["w"], got.params["w"], atol=1e-6)


def test_one_batch_and_networks_that_are_not_stacked_are_told_apart():
    (x, y), given = regression()[0], {"check": False}
    pair = r"Put the arrays of a single batch in a tuple: `\[\(x, y\)\]`\."
    refused(rf"`sample\(loss_fn=...\).*{pair}", run, batches=[x, y], **given)
    with pytest.warns(UserWarning, match=f"^`sample`: each array of the list `batches` .*{pair}"):
        refused(pair, run, batches=[x, y])
    refused(rf"`warmstart\(loss_fn=...\).*{pair}", runs.train, batches=[x, y])
    rule, product = rf"`check\(batch=...\).*batch 1, .*not fit.*{pair}", lambda w, x: (x @ w).mean()
    refused(rule, optax_smile.check, product, jnp.ones(2), [x, y], quiet())
    one = {"w": jnp.ones((2, 4)), "b": jnp.zeros(4)}
    for params in (one, [one, one, one], (one["w"], one["b"])):
        advice = r"Stack .* `chains_from_weights\(\[params, \.\.\.\]"
        refused(rf"`sample\(params=...\)` must .*{advice}", run, params=params)


def test_no_key_is_used_twice():
    def loss(params, batch, *, key):
        x, y = batch
        return mean_loss(params, (x + jax.random.normal(key, x.shape), y))

    given: dict[str, Any] = {"loss": loss, "stochastic": True}
    with jax.debug_key_reuse(True):
        run(sampler=runs.sghmc(), key=jax.random.key(0), **given)
        # An optimizer with a key of its own.
        given |= {"optimizer": stub(), "validation": regression()[0]}
        runs.train(key=jax.random.key(0), **given)
        optax_smile.chains_from_weights([{"w": jnp.ones(2)}], num_chains=3, key=0)


@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_the_loss_in_the_trace_is_that_of_the_draw(integrator):
    """It is not that of a point within a step. With full batches, every draw has one loss."""
    (batch,) = runs.regression(1)
    given: Any = {"sampler": runs.quiet(integrator=integrator), "batches": [batch], "check": False}
    got = runs.run(**given)
    expected = jax.vmap(jax.vmap(lambda params: runs.mean_loss(params, batch)))(got.params)
    np.testing.assert_allclose(got.trace["loss"][:, -runs.DRAWS :], expected, rtol=1e-5)
    assert np.ptp(expected) > 1e-4
