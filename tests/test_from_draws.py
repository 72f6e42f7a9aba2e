"""Draws of a loop of one's own: they are accepted wherever the result of `sample` is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import stub, warned

import optax_smile
from optax_smile import ArgumentError, Snapshots, diagnostics

RNG = np.random.default_rng
X = RNG(0).normal(size=(30, 2)).astype(np.float32)
Y = X @ np.array([1, -1], np.float32) + 0.5 * RNG(1).normal(size=30).astype(np.float32)


def outputs(params, x):
    return x @ params["w"] + params["b"], jnp.log(0.5)


def mean_loss(params):
    return jnp.mean((outputs(params, X)[0] - Y) ** 2) * 2


def loop(num_chains=None, num_draws=24, *before: Any) -> tuple[list[Any], list[Any]]:
    """Draws and statistics of a loop, vectorized over chains."""
    sampler = optax.chain(*before, optax_smile.sgld(1e-3, num_data=30, key=0))

    def step(params, state):
        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = sampler.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    def both(params, state):
        return optax_smile.last_accepted(state, params), optax_smile.stats(state)

    params: Any = {"w": jnp.float32([1.0, -1.0]), "b": jnp.zeros(())}
    state = sampler.init(params)
    if num_chains is not None:
        keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), num_chains))
        params, state = jax.tree.map(lambda x: jnp.stack([x] * num_chains), (params, state))
        state = optax.tree.set(state, key=keys)
        step, both = jax.vmap(step), jax.vmap(both)
    step, both, found = jax.jit(step), jax.jit(both), []
    for number in range(200 + 10 * num_draws):
        params, state = step(params, state)
        if number >= 200 and number % 10 == 9:
            found.append(both(params, state))
    draws, stats = zip(*found, strict=True)
    return list(draws), list(stats)


@pytest.mark.parametrize("num_chains", [None, 2])
def test_lists_and_stacked_trees(num_chains):
    draws, stats = loop(num_chains)
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *rows) for rows in (draws, stats)]
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": Y, "per": "draw"}
    sizes = np.stack([np.atleast_1d(x.step_size) for x in stats], axis=1)
    for parts in ((draws, stats), (iter(draws), iter(stats)), stacked):
        kept = Snapshots.from_draws(*parts, num_chains=num_chains)
        assert (kept.num_chains, kept.num_draws) == (num_chains or 1, 24)
        for name in ("w", "b"):
            for number, draw in enumerate(draws):
                expected = draw[name] if num_chains else draw[name][None]
                np.testing.assert_array_equal(kept.params[name][:, number], expected)
        np.testing.assert_array_equal(kept.trace["step_size"], sizes)
        assert kept.start is None and kept.settings is None
    summary = diagnostics.summary(kept, optax_smile.predict(outputs, kept, X, **given))
    assert summary.num_draws == 24 and summary.last_step_size.tolist() == sizes[:, -1].tolist()
    assert {check.kind for check in summary.checks} >= {"altered", "frozen", "step size"}
    untraced = diagnostics.summary(Snapshots.from_draws(draws))
    assert np.isnan(untraced.first_step_size).all()
    unknown = "no trace: the chains may still be on their way"
    assert unknown in str(untraced) and unknown not in str(summary)


def test_a_clip_before_the_sampler_shows_in_the_trace():
    (finding,) = diagnostics.summary(
        Snapshots.from_draws(*loop(2, 40, optax.clip_by_global_norm(1e-2)), num_chains=2)
    ).findings
    assert finding.kind == "altered" and finding.chains == (0, 1)
    assert finding.text.startswith("the gradients at 100% of the draws have the same norm")


def test_copies_and_arrays_that_the_loop_reuses():

    def reusing():
        buffer = np.zeros(3)
        for number in range(3):
            buffer[:] = number
            yield buffer

    assert Snapshots.from_draws(reusing()).params[0, :, 0].tolist() == [0, 1, 2]
    rows = [np.stack([x, x]) for x in RNG(0).normal(size=(40, 3))]
    found = diagnostics.summary(Snapshots.from_draws(rows, num_chains=2)).findings
    assert [check.kind for check in found] == ["copies"]


TREE = {"w": np.ones(3), "b": np.zeros(1)}
INFINITE = [np.ones((2, 3)), np.array([[0, 0, 0], [0, np.inf, 0]])]


def test_what_is_no_draw_or_not_its_trace_is_named():
    for draws, num_chains, message in (
        ([TREE, TREE | {"b": "x"}], None, r"\(draws\[1\]=...\)` must be a tree of arrays of num"),
        ([TREE], 3, r"draws=.*of 3 chains, got the leading axes \[\(1,\), \(3,\)\]"),
        (INFINITE, 2, r"\[1\]=...\)` must be finite, got nan or inf at the only leaf of chain 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Snapshots.from_draws(draws, num_chains=num_chains)
    stats: Any = optax_smile.stats(stub().init(jnp.ones(3)))
    wide = jax.tree.map(lambda x: np.stack([x, x]), stats)
    skipped = stats._replace(is_draw=np.array(False))
    for trace in ([stats], [{}, {}], [{"loss": 1.0}] * 2, [wide, wide], [skipped, stats]):
        with pytest.raises(ArgumentError, match=r"from_draws\(trace=...\)` must be "):
            Snapshots.from_draws([np.ones(3), np.zeros(3)], trace)


def test_chains_on_their_way_are_found():
    """Chain 1 falls at two of the last three of nine draws, chain 0 at one."""
    stats: Any = optax_smile.stats(stub().init(jnp.ones(3)))
    falls = np.ones((9, 2), bool)
    falls[[7, 8], 0] = falls[8, 1] = False
    trace = stats._replace(on_its_way=falls)
    trace = jax.tree.map(lambda x: np.broadcast_to(x, (9, 2)), trace)
    given: Any = RNG(2).normal(size=(9, 2, 3)), trace
    message = r"the chains \[1\] are still on their way"
    warned(f"`Snapshots.from_draws`: {message}", Snapshots.from_draws, *given, num_chains=2)


def test_chains_with_equal_keys_are_found():
    """The trap of `jax.vmap(sampler.init)`: the noise is the same in all chains."""
    state = jax.vmap(optax_smile.sgld(0.1, num_data=1, key=0).init)(jnp.ones((3, 2)))
    message, draws = r"the chains \[0, 1, 2\] have equal keys", RNG(2).normal(size=(24, 3, 2))
    warned(f"`stats`: {message}", optax_smile.stats, state)
    given: Any = list(draws), [jax.vmap(optax_smile.stats)(state)] * 24
    kept = warned(f"`Snapshots.from_draws`: {message}", Snapshots.from_draws, *given, num_chains=3)
    (finding,) = diagnostics.summary(kept).findings
    assert finding.kind == "equal keys" and finding.chains == (0, 1, 2)
    assert "`parallel.init(sampler, params, key=...)`" in finding.advice
    assert "24 of 24 draws use the random numbers of another chain" in finding.text
