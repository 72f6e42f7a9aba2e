"""A directory is one run: what may differ and what is refused. What a first batch gives away."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import CHAINS, content_of, mean_loss, noisy, quiet, run, start, stub

import optax_smile
from optax_smile.chains import _checks

INPUTS = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
TARGETS = (INPUTS.sum(1) + np.random.default_rng(1).normal(size=60)).astype(np.float32)


def other_loss(params, batch):
    return 1.01 * mean_loss(params, batch)


def batches(rows: Any = np.arange(60)):  # noqa: B008
    return [(INPUTS[at], TARGETS[at]) for at in np.split(rows, 5)]


def shuffled():
    return batches(np.random.default_rng(2).permutation(60))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Any:
    directory = tmp_path_factory.mktemp("finished")
    return run(directory, sampler=noisy(), batches=batches(), num_draws=2)


FINISHED = r"`sample`: the run in .* is finished. Its draws are returned"
ADDED: dict[str, Any] = {"stochastic": True, "loss": lambda p, batch, *, key: mean_loss(p, batch)}
AUX = {"aux": {"mean": jnp.zeros((CHAINS, 2))}, "loss": lambda p, b, *, aux: (mean_loss(p, b), aux)}
WIDER = start() | {"w": jnp.zeros((CHAINS, 4))}
OTHER_BATCHES: list[tuple[Any, str]] = [
    ([(x[:6], y[:6]) for x, y in batches()], r"one with shapes = .*\[12\].*, got .*\[6\]"),
    (batches()[:4], "one with num_batches = 5, as in .*, got 4"),
    ([list(x) for x in batches()], "one with shapes = "),
]
OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"key": 4}, r"\[0, 0\], as in the run in .*, got \[0, 4\]"),
    ({"thin": 2}, r"3, as for the draws that the run has, got 2\."),
    ({"num_warmup": 7}, r"2, as in .*, got 7\."),
    ({"batch_per": "step"}, r"'gradient', as in .*, got 'step'"),
    ({"sampler": noisy(0.03)}, r"with step_size = 0.*, got 0\.03\. "),
    ({"sampler": noisy(prior_precision=2.0)}, r"prior_precision = 1\.0, as in .*, got 2\.0"),
    (ADDED, r"False, as in .*, got True"),
    ({"params": WIDER}, r"with leaves = .*, got .*'shape': \[4\]"),
    ({"params": jax.tree.map(lambda x: x[:2], start())}, r"num_chains = 3, as in .*, got 2\."),
    ({"params": start(), **AUX}, "with leaves = .*, got .*'name': 'aux/mean'"),
    ({"dtype": "float16"}, r"None, as in .*, got 'float16'\."),
]


def test_another_run_is_refused(finished):
    """Also if there are enough draws already."""
    before = content_of(finished.directory)
    refused: list[Any] = [({"batches": other}, "batches", what) for other, what in OTHER_BATCHES]
    refused += [(arguments, next(iter(arguments)), what) for arguments, what in OTHER_SETTINGS]
    for number, (arguments, argument, what) in enumerate(refused):
        given = {"batches": batches(), "sampler": noisy(), "num_draws": 2 + number % 2}
        with pytest.raises(ValueError, match=rf"`sample\({argument}=...\)` must be .*{what}"):
            run(finished.directory, **given | arguments)
    assert content_of(finished.directory) == before


def test_the_same_run_is_resumed_whatever_its_functions_and_examples(finished, tmp_path):
    directory = shutil.copytree(finished.directory, tmp_path / "run")
    with pytest.warns(UserWarning, match=FINISHED) as seen:
        run(directory, other_loss, num_draws=2, sampler=noisy(), batches=shuffled())
    assert len(seen) == 1
    again = optax_smile.load_snapshots(directory)
    np.testing.assert_array_equal(again.params["w"], finished.params["w"])


def test_examples_are_counted_along_an_axis_that_all_arrays_share():
    rows = ((3, 2), (3,), 0, 3), ((3, 2), (3, 2), 1, 2), ((3, 2), (4,), 0, None), ((), (), 0, None)
    for x, y, own, number in rows:
        assert _checks.num_rows((np.ones(x), np.ones(y)), bool(own)) == number


def warm(directory=None, loss=mean_loss, **arguments) -> Any:
    defaults: dict[str, Any] = {"batches": batches(), "optimizer": optax.adam(0.1), "key": 0}
    defaults |= {"num_members": 2, "num_epochs": 2, "validation": batches()[0], "progress": False}

    def init(key):
        return {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())}

    return optax_smile.warmstart(loss, init, directory=directory, **defaults | arguments)


def test_a_directory_of_something_else_is_refused(tmp_path):
    warm(tmp_path / "warm")
    with pytest.raises(ValueError, match=r"directory=...\)` must be new.*a run of `warmst"):
        run(tmp_path / "warm")
    run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"directory=...\)` must be new.*a run of `sample`"):
        warm(tmp_path / "run")
    (tmp_path / "file").touch()
    for place, got in (("file", "File exists"), ("file/inside", "Not a directory")):
        with pytest.raises(optax_smile.ArgumentError, match=rf"directory=...\)` must be .*{got}"):
            run(tmp_path / place)


def test_another_training_is_refused_and_the_same_is_found(tmp_path):
    others: list[tuple[dict[str, Any], str, str]] = [
        ({"key": 1}, "key", r"\[0, 0\], as in the run in .*, got \[0, 1\]"),
        ({"num_members": 3}, "num_members", r"2, as in the run in .*, got 3\."),
        ({"patience": 3}, "patience", r"10, as in the run in .*, got 3\."),
        ({"batches": batches()[:2]}, "batches", "one with num_batches = 5, as in .*, got 2"),
        ({"validation": None}, "validation", r"'\(\(12, 2\), \(12,\)\)', as in the .*, got None\."),
    ]
    trained = warm(tmp_path)["w"]
    for arguments, argument, what in others:
        with pytest.raises(ValueError, match=rf"`warmstart\({argument}=...\)` must be .*{what}"):
            warm(tmp_path, **arguments)
    finds = "the training in .* is finished. Its 2 members, trained for 2 epochs, are returned"
    for arguments in ({}, {"batches": shuffled()}, {"optimizer": optax.adam(0.2)}):
        with pytest.warns(UserWarning, match=finds) as seen:
            np.testing.assert_array_equal(warm(tmp_path, **arguments)["w"], trained)
        assert len(seen) == 1
    with pytest.raises(ValueError, match="The checkpoint .* damaged"):
        warm(tmp_path, optimizer=optax.sgd(0.1))


SHORT: dict[str, Any] = {"num_warmup": 0, "num_draws": 1, "thin": 1}
SUM = r"`{}`: the losses .* add up to 1\.000 .* `loss_fn` looks like a sum"


@pytest.mark.filterwarnings("ignore:.*step_size=")
def test_a_summed_loss_and_a_small_num_data_are_warned_of():
    """Unless `check` is False, or the loss draws random numbers."""

    def summed(params, batch):
        return len(batch[1]) * mean_loss(params, batch)

    def dropped(params, batch, *, key):
        return summed(params, batch) * jax.random.bernoulli(key)

    small = optax_smile.sgld(1e-5, num_data=5, key=0)
    arguments: dict[str, Any] = SHORT | {"sampler": small, "batches": batches()}
    with pytest.warns() as seen:
        run(loss=summed, **arguments)
    messages = " ".join(str(one.message) for one in seen)
    assert len(seen) == 2 and "num_data=5, but the first batch has 12 examples." in messages
    with pytest.warns(UserWarning, match=SUM.format("warmstart")):
        warm(loss=summed, num_epochs=1)
    run(loss=summed, check=False, **arguments)
    run(loss=dropped, stochastic=True, **arguments | {"sampler": stub()})
    warm(loss=summed, num_epochs=1, check=False)


def test_a_sum_is_told_from_a_mean_by_the_halves_of_a_batch(recwarn):
    params = jnp.ones((2, 2))

    def of_chains(loss, per_chain=False):
        return lambda batch: jax.vmap(loss, (0, 0 if per_chain else None))(params, batch)

    def square_sum(w, batch):
        return jnp.sum((batch["x"] @ w - batch["y"]) ** 2)

    def square_mean(w, batch):
        return square_sum(w, batch) / len(batch["x"])

    batch = {"x": INPUTS[:12], "y": TARGETS[:12]}
    own = jax.tree.map(lambda x: np.stack([x, x]), batch)
    for loss, data in (
        (square_mean, batch),
        (square_sum, jax.tree.map(lambda x: x[:1], batch)),
    ):
        _checks.warn_of_sum("sample", of_chains(loss), data, False, None)
    assert not recwarn.list

    def fixed(w, batch):
        return square_sum(w, batch) / 12 + jnp.zeros(12) @ batch["y"]

    for loss, data, reason in (
        (square_sum, batch | {"factor": 1.0}, "the arrays of a batch share no axis of ex"),
        (fixed, batch, "it rejects half of a batch: "),
    ):
        with pytest.warns(UserWarning, match=f"^`sample`: could not test .*, because {reason}"):
            _checks.warn_of_sum("sample", of_chains(loss), data, False, None)
    for data, per_chain in ((batch, False), (own, True)):
        with pytest.warns(UserWarning, match=SUM.format("sample")):
            _checks.warn_of_sum("sample", of_chains(square_sum, per_chain), data, per_chain, None)


def test_copies_and_steps_that_are_changed_are_refused():
    same = jax.tree.map(jnp.zeros_like, start())
    with pytest.raises(ValueError, match=r"`sample\(params=...\)` .* in the chains \[1, 2\]"):
        run(params=same, sampler=quiet())
    # The losses of all chains are equal, and their keys are not.
    run(params=same, sampler=quiet(), **ADDED, **SHORT)
    # In a `named_chain` the order is lost, so that the structure cannot tell.
    late = optax.named_chain(("sampler", noisy()), ("decay", optax.add_decayed_weights(0.1)))
    with pytest.raises(ValueError, match=r"`sample\(sampler=...\)` .* in the chains \[0, 1, 2\]"):
        run(sampler=late, params=start() | {"b": jnp.ones(CHAINS)}, check=False)
