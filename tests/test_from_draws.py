"""Draws of a loop of one's own: what was collected goes wherever the result of `sample` goes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import ArgumentError, Snapshots, diagnostics, plots, report
from optax_smile.draws import _format

RNG = np.random.default_rng
X = RNG(0).normal(size=(30, 2)).astype(np.float32)
Y = X @ np.array([1, -1], np.float32) + 0.5 * RNG(1).normal(size=30).astype(np.float32)


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) * 2


def outputs(params, x):
    return x @ params["w"] + params["b"], jnp.log(0.5)


def loop(num_chains=None, num_draws=24) -> tuple[list[Any], list[Any]]:
    """Draws and statistics of a loop, vectorized over chains."""
    sampler = optax_smile.psmile(num_data=30, key=0)

    def step(params, state):
        loss, grads = jax.value_and_grad(mean_loss)(params, (X, Y))
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


def predicted(draws):
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": Y, "per": "draw"}
    return optax_smile.predict(outputs, draws, X, **given)


@pytest.mark.parametrize("num_chains", [None, 2])
def test_in_memory_and_in_a_directory(num_chains, tmp_path):
    """A run that `summary` judges, `thin_to` thins and `report` shows."""
    draws, stats = loop(num_chains)
    memory = Snapshots.from_draws(draws, stats, num_chains=num_chains)
    disk = Snapshots.from_draws(draws, stats, num_chains=num_chains, directory=tmp_path / "run")
    found = optax_smile.load_snapshots(tmp_path / "run")
    for each in (memory, disk, found):
        assert (each.num_chains, each.num_draws) == (num_chains or 1, 24)
        for name in ("w", "b"):
            for number, draw in enumerate(draws):
                expected = draw[name] if num_chains else draw[name][None]
                np.testing.assert_array_equal(each.params[name][:, number], expected)
        sizes = np.stack([np.atleast_1d(x.step_size) for x in stats], axis=1)
        np.testing.assert_array_equal(each.trace["step_size"], sizes)
        assert each.start is None and each.settings is None and each.subset is None
        summary = diagnostics.summary(each, predicted(each))
        assert summary.num_draws == 24 and summary.last_step_size.tolist() == sizes[:, -1].tolist()
        assert {check.kind for check in summary.checks} >= {"altered", "frozen", "step size"}
        assert all(np.isnan(summary.travelled))
    small: Any = memory.thin_to(3, predicted(memory))
    assert (small.subset.step == 210 + 10 * small.subset.draw).all()
    plots.step_size(memory.trace)
    plots.chain_paths(memory.params)
    report.store(tmp_path / "run", "train", predicted(disk), targets=Y)
    page = report.write(tmp_path / "run").read_text()
    assert "a sampler" in page and "LPPD" in page and "One draw every" not in page


def test_without_a_trace(tmp_path):
    """Weights alone, judged by weights and predictions."""
    draws = [{"w": w, "b": np.float32(0)} for w in RNG(0).normal(size=(40, 2)).astype(np.float32)]
    disk = Snapshots.from_draws((x for x in draws), directory=tmp_path / "run")
    assert disk.trace == {} and disk.num_draws == 40
    assert np.isnan(diagnostics.summary(disk).first_step_size).all()
    small: Any = disk.thin_to(2, predicted(disk))
    assert small.subset.step is None
    assert "Can the chains be trusted?" in report.write(tmp_path / "run").read_text()
    again = Snapshots.from_draws(list(disk))
    jax.tree.map(np.testing.assert_array_equal, again.params, disk.params)


def test_copies_and_arrays_that_the_loop_reuses():
    """`summary` finds chains with equal draws; draws do not change with the loop's buffer."""

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


@pytest.mark.parametrize(
    "draws, given, message",
    [
        ([], {}, r"\(draws=...\)` must be at least one parameter tree, got none"),
        (TREE, {}, r"\(draws=...\)` must be a list of parameter trees.*got a dict"),
        ([TREE, {}], {}, r"\(draws\[1\]=...\)` must be a tree with at least one array"),
        (
            [TREE, TREE, {"w": np.ones(3)}],
            {},
            r"\(draws\[2\]=...\)` must be a tree of the structure of draws\[0\], PyTreeDef",
        ),
        (
            [TREE, TREE | {"b": np.zeros(2)}],
            {},
            r"\(draws\[1\]=...\)` must be of shape \(1,\) at \['b'\], as draws\[0\], got \(2,\)",
        ),
        (
            [TREE, TREE | {"b": np.nan * np.ones(1)}],
            {},
            r"draws\[1\]=.* finite, .*inf at \['b'\]\.",
        ),
        ([TREE, TREE | {"b": "x"}], {}, r"\(draws\[1\]=...\)` must be a tree of arrays of numbers"),
        ([TREE], {"num_chains": 3}, r"draws\[0\]=.*of 3 chains, got shape \(1,\) at \['b'\]"),
        (
            [np.ones((2, 3)), np.ones((1, 3))],
            {"num_chains": 2},
            r"\(draws\[1\]=...\)` .*got \(1, 3\)",
        ),
        (
            [np.ones((2, 3)), np.array([[0, 0, 0], [0, np.inf, 0]])],
            {"num_chains": 2},
            r"\(draws\[1\]=...\)` must be finite, got nan or inf at the only leaf of chain 1",
        ),
    ],
)
def test_what_is_no_list_of_draws_is_named(draws, given, message):
    with pytest.raises(ArgumentError, match=message):
        Snapshots.from_draws(draws, **given)


def test_a_trace_is_of_these_draws():
    state = optax_smile.sgld(0.1, num_data=1, key=0).init(jnp.ones(3))
    stats: Any = optax_smile.stats(state)
    draws = [np.ones(3), np.zeros(3)]
    wrong = {
        r"trace=...\)` must be one entry for each of the 2 draws, got 1 entries": [stats],
        r"trace\[1\]=...\)` must be what `optax_smile.stats` returns, got a dict": [stats, {}],
        r"trace\[1\]=.*shape \(\), got shape \(2,\) at step_size": [
            stats,
            stats._replace(step_size=np.ones(2)),
        ],
        r"trace\[0\]=.*one whose `is_draw` is True, got False": [
            stats._replace(is_draw=np.array(False)),
            stats,
        ],
    }
    for message, trace in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            Snapshots.from_draws(draws, trace)


def test_a_directory_must_be_new(tmp_path):
    (tmp_path / "note.txt").touch()
    with pytest.raises(ArgumentError, match="a new or empty directory"):
        Snapshots.from_draws([np.ones(3)], directory=tmp_path)


def test_chains_with_equal_keys_are_found():
    """The trap of `jax.vmap(sampler.init)`: the noise is the same in all chains."""
    draws = list(RNG(2).normal(size=(24, 3, 2)))
    for sampler, is_random in (
        (optax_smile.sgld(0.1, num_data=1, key=0), True),
        (optax_smile.smile(0.1, num_data=1, decoherence_length=None), False),
    ):
        state = jax.vmap(sampler.init)(jnp.ones((3, 2)))
        trace = [jax.vmap(optax_smile.stats)(state)] * 24
        if not is_random:
            assert diagnostics.summary(Snapshots.from_draws(draws, trace, num_chains=3))
            assert optax_smile.stats(state).noise_id.tolist() == [0] * 3
            continue
        message = r"the chains \[0, 1, 2\] have equal keys"
        with pytest.warns(UserWarning, match=f"`stats`: {message}"):
            optax_smile.stats(state)
        with pytest.warns(UserWarning, match=f"`Snapshots.from_draws`: {message}"):
            kept = Snapshots.from_draws(draws, trace, num_chains=3)
        (finding,) = diagnostics.summary(kept).findings
        assert finding.kind == "copies" and finding.chains == (0, 1, 2)
        assert "24 of 24 draws use the random numbers of another chain" in finding.text


def test_a_directory_before_its_first_draw_says_so(tmp_path):
    manifest = _format.manifest_of({"w": np.ones((2, 3))}, None, {})
    _format.write_manifest(tmp_path, manifest)
    draws = optax_smile.load_snapshots(tmp_path)
    assert len(draws) == 0 and list(draws) == [] and "2 chains of 0 draws" in repr(draws)
    for name in "params", "trace":
        with pytest.raises(ValueError, match=f"`{name}` needs at least one draw, and {tmp_path}"):
            getattr(draws, name)
    with pytest.raises(ArgumentError, match="must be draws of a run that has at least one"):
        diagnostics.summary(draws)
