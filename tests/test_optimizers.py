"""An Optax optimizer instead of a sampler: its iterates are stored, but are not draws."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from jax.flatten_util import ravel_pytree
from runs import CHAINS, mean_loss, own_batches, quiet, regression, start

import optax_smile
from optax_smile import diagnostics, report

ANNOUNCED = "is an optimizer. Its iterates are checkpoints, not posterior draws"
MOMENTUM = {"sampler": optax.sgd(0.1, momentum=0.9), "thin": 1, "num_warmup": 0}
SETTINGS = {"name": "optimizer", "is_posterior": False}
# Ticks and draws of a run are at these steps.
TICKS = [2, 5, 8, 11, 14]


def run(*given, **arguments) -> Any:
    with pytest.warns(UserWarning, match=ANNOUNCED) as caught:
        got = runs.run(*given, **arguments)
    assert len(caught) == 1 and caught[0].filename == runs.__file__
    return got


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Any:
    return run(tmp_path_factory.mktemp("iterates"), sampler=optax.adamw(0.05))


def test_iterates_are_those_of_a_hand_written_loop():
    """The optimizer requires the loss."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.polyak_sgd(0.5))
    got = run(sampler=optimizer)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    params, state, expected, losses = start(), jax.vmap(optimizer.init)(start()), [], []
    for call in range(TICKS[-1]):
        params, state, loss = step(params, state, regression()[call % 7])
        if call + 1 in TICKS:
            expected.append(params["w"])
            losses.append(loss)
    np.testing.assert_allclose(got.params["w"], np.stack(expected[1:], 1), atol=1e-6)
    np.testing.assert_allclose(got.trace["loss"], np.stack(losses, 1), rtol=1e-5)
    assert got.trace["num_gradients"].tolist() == [TICKS] * CHAINS
    assert np.isnan(got.trace["step_size"]).all() and not got.trace["num_nonfinite"].any()


def test_a_run_that_was_killed_gives_the_same_iterates(stored, tmp_path):
    killed: dict[str, Any] = {"callback": runs.at(9, runs.crash), "checkpoint_minutes": 0}
    with pytest.raises(runs.Crash):
        run(tmp_path, sampler=optax.adamw(0.05), **killed)
    runs.assert_same_bits(run(tmp_path, sampler=optax.adamw(0.05)), stored)
    rule = r"sampler=...\)` must be .* 'optimizer', as in the .*, got 'sghmc'"
    runs.refused(rule, runs.run, tmp_path, sampler=runs.sghmc())


def test_a_step_to_what_is_not_finite_is_left_out():
    """As with `optax.apply_if_finite`; other chains continue, and one warning names the chain."""
    batches = own_batches()
    batches[2][1][1, 3] = np.nan
    given: dict[str, Any] = MOMENTUM | {"per_chain": True, "batches": batches, "num_draws": 9}
    found = []
    for optimizer in (MOMENTUM["sampler"], optax.apply_if_finite(MOMENTUM["sampler"], 3)):
        with pytest.warns(UserWarning) as caught:
            found.append(runs.run(**given | {"sampler": optimizer}))
        announced, warned = (str(each.message) for each in caught)
        assert re.search(ANNOUNCED, announced)
        assert "`sample`: 1 step of the chains [1] had a non-finite gradient" in warned
        assert {each.filename for each in caught} == {runs.__file__}
    got, expected = found
    np.testing.assert_allclose(got.params["w"], expected.params["w"], atol=1e-6)
    np.testing.assert_array_equal(got.params["w"][1, 2], got.params["w"][1, 1])
    assert got.trace["num_nonfinite"].tolist() == [[0] * 9, [0, 0] + [1] * 7, [0] * 9]
    assert got.trace["accepted"][1].tolist() == [True, True, False] + [True] * 6


WRAPPERS: list[Any] = [
    lambda tx: optax.MultiSteps(tx, 2),
    lambda tx: optax.partition({"in": tx, "out": optax.set_to_zero()}, {"w": "in", "b": "out"}),
    lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
]


def test_what_is_neither_an_optimizer_nor_ends_with_a_sampler_is_refused():
    after, plain = optax.chain(quiet(), optax.clip_by_global_norm(1.0)), quiet()
    # A state that is one flat array, in which no sampler can be seen.
    hidden = plain._replace(init=lambda params: ravel_pytree(plain.init(params))[0])
    for sampler, rule in (
        (after, "chain` that ends with the sampler"),
        (optax.adamw, "must be an Optax transf"),
        (hidden, "exactly one .*, got .* without a sampler"),
    ):
        runs.refused(rf"`sample\(sampler=...\)` .*{rule}", runs.run, sampler=sampler)
    with pytest.raises(ValueError, match=r"`sample\(params=...\)` .* copies in the chains \[1, 2"):
        run(params=jax.tree.map(jnp.zeros_like, start()), **MOMENTUM)


def test_samplers_are_seen_wherever_they_are():
    begin: Any = functools.partial(
        optax_smile.Run, mean_loss, start(), regression(), key=0, check=False
    )
    for wrap in WRAPPERS:
        begin(wrap(optax_smile.sgld(0.1, num_data=9, key=0)))
        with pytest.warns(UserWarning, match=ANNOUNCED):
            begin(wrap(optax.adamw(0.1)))


def test_everything_can_tell_iterates_from_draws(stored, tmp_path):
    loaded = optax_smile.load_snapshots(stored.directory)
    in_memory = optax_smile.Snapshots(loaded.params, loaded.trace, loaded.settings)
    for draws in (stored, loaded, in_memory):
        assert draws.settings == SETTINGS
        assert "iterates of an optimizer, not posterior draws" in repr(draws)
        for call in (diagnostics.summary, diagnostics.to_arviz):
            rule = r"\(snapshots=...\)` must be draws from a posterior.*, got iterates of an opt"
            runs.refused(f"`{call.__name__}{rule}", call, draws)


def test_the_page_says_so(stored):
    x, y = regression()[0]
    model = lambda params, x: (x @ params["w"] + params["b"], jnp.zeros(()))  # noqa: E731
    prediction = optax_smile.predict(model, stored, x, likelihood="gaussian", targets=y)
    page = report.write(stored.directory, prediction=prediction).read_text()
    assert "These draws are optimizer iterates, not posterior draws" in page
    assert "No paths" not in page
