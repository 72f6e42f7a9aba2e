"""A directory is one run: what may differ and what is refused. What a first batch gives away."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import CHAINS, content_of, mean_loss, quiet, refused, run, start, stub, warned

import optax_smile

INPUTS = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
TARGETS = (INPUTS.sum(1) + np.random.default_rng(1).normal(size=60)).astype(np.float32)
SHORT: dict[str, Any] = {"num_warmup": 0, "num_draws": 1, "thin": 1}


def sgld(step_size=0.02):
    return optax_smile.sgld(step_size, num_data=60, key=0)


def batches(rows: Any = np.arange(60)):  # noqa: B008
    return [(INPUTS[at], TARGETS[at]) for at in np.split(rows, 5)]


def shuffled():
    return batches(np.random.default_rng(2).permutation(60))


def keyed_loss(params, batch, *, key):
    return mean_loss(params, batch)


def aux_loss(params, batch, *, aux):
    return mean_loss(params, batch), aux


def own(directory=None, **given):
    return run(directory, **{"sampler": sgld(), "batches": batches(), "num_draws": 2, **given})


def warm(directory=None, loss=mean_loss, **given) -> Any:
    given = {"batches": batches(), "optimizer": optax.adam(0.1), "key": 0, **given}
    given = {"num_members": 2, "num_epochs": 2, "validation": batches()[0], **given}

    def init(key):
        return {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())}

    return optax_smile.warmstart(loss, init, directory=directory, progress=False, **given)


HALVES = [(x[:6], y[:6]) for x, y in batches()]
WIDER = start() | {"w": jnp.zeros((CHAINS, 4))}
AUX = {"aux": {"mean": jnp.zeros((CHAINS, 2))}, "loss": aux_loss}
OTHER_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"batches": HALVES}, r"one with shapes = .*\[12\].*, got .*\[6\]"),
    ({"batches": batches()[:4]}, "one with num_batches = 5, as in .*, got 4"),
    ({"batches": [list(x) for x in batches()]}, "one with shapes = "),
    ({"key": 4}, r"\[0, 0\], as in the run in .*, got \[0, 4\]"),
    ({"thin": 2}, r"3, as for the draws that the run has, got 2\."),
    ({"num_warmup": 7}, r"2, as in .*, got 7\."),
    ({"batch_per": "step"}, r"'gradient', as in .*, got 'step'"),
    ({"sampler": sgld(0.03)}, r"with step_size = 0.*, got 0\.03\. "),
    ({"stochastic": True, "loss": keyed_loss}, r"False, as in .*, got True"),
    ({"params": WIDER}, r"with leaves = .*, got .*'shape': \[4\]"),
    ({"params": jax.tree.map(lambda x: x[:2], start())}, r"num_chains = 3, as in .*, got 2\."),
    ({"params": start(), **AUX}, "with leaves = .*, got .*'name': 'aux/mean'"),
    ({"dtype": "float16"}, r"None, as in .*, got 'float16'\."),
]
OTHER_TRAININGS: list[tuple[dict[str, Any], str]] = [
    ({"key": 1}, r"\[0, 0\], as in the run in .*, got \[0, 1\]"),
    ({"num_members": 3}, r"2, as in the run in .*, got 3\."),
    ({"patience": 3}, r"10, as in the run in .*, got 3\."),
    ({"batches": batches()[:2]}, "one with num_batches = 5, as in .*, got 2"),
    ({"validation": None}, r"'\(\(12, 2\), \(12,\)\)', as in the .*, got None\."),
]


def test_another_run_is_refused_and_the_same_is_resumed_whatever_its_functions(tmp_path):
    finished: Any = own(tmp_path / "run")
    before = content_of(finished.directory)
    for number, (arguments, what) in enumerate(OTHER_RUNS):
        name, given = next(iter(arguments)), {"num_draws": 2 + number % 2} | arguments
        refused(rf"`sample\({name}=...\)` must be .*{what}", own, finished.directory, **given)
    assert content_of(finished.directory) == before
    with pytest.warns(UserWarning, match=r"`sample`: the run in .* is finished. Its") as seen:
        own(finished.directory, loss=lambda *x: 1.01 * mean_loss(*x), batches=shuffled())
    assert len(seen) == 1
    again = optax_smile.load_snapshots(finished.directory)
    np.testing.assert_array_equal(again.params["w"], finished.params["w"])


def test_another_training_is_refused_and_the_same_is_found(tmp_path):
    trained = warm(tmp_path)["w"]
    for arguments, what in OTHER_TRAININGS:
        name = next(iter(arguments))
        refused(rf"`warmstart\({name}=...\)` must be .*{what}", warm, tmp_path, **arguments)
    finds = "the training in .* is finished. Its 2 members, trained for 2 epochs, are returned"
    for arguments in ({}, {"batches": shuffled()}, {"optimizer": optax.adam(0.2)}):
        with pytest.warns(UserWarning, match=finds) as seen:
            np.testing.assert_array_equal(warm(tmp_path, **arguments)["w"], trained)
        assert len(seen) == 1
    refused("The checkpoint .* damaged", warm, tmp_path, optimizer=optax.sgd(0.1))


def test_a_directory_of_something_else_is_refused(tmp_path):
    warm(tmp_path / "warm")
    run(tmp_path / "run")
    (tmp_path / "file").touch()
    for function, place, got in (
        (run, "warm", "new.*a run of `warmst"),
        (warm, "run", "new.*a run of `sample`"),
        (run, "file", ".*File exists"),
        (run, "file/inside", ".*Not a directory"),
    ):
        with pytest.raises(optax_smile.ArgumentError, match=rf"directory=...\)` must be {got}"):
            function(tmp_path / place)


SUM = r"`{}`: the losses .* add up to 1\.000 .* `loss_fn` looks like a sum"


def summed(params, batch):
    return len(batch[1]) * mean_loss(params, batch)


@pytest.mark.filterwarnings("ignore:.*step_size=")
def test_a_summed_loss_and_a_small_num_data_are_warned_of():
    """By the halves of a batch, unless `check` is False, or the loss draws random numbers."""

    def dropped(params, batch, *, key):
        return summed(params, batch) * jax.random.bernoulli(key)

    def graph(params, batch):
        return summed(params, (batch[0] * batch[2], batch[1]))

    def fixed(params, batch):
        return summed(params, batch) / 12 + jnp.zeros(12) @ batch[1]

    # Also of batches that share no axis of examples, and of one for each chain.
    small = optax_smile.sgld(1e-5, num_data=5, key=0)
    each = [jax.tree.map(lambda x: np.stack([x] * CHAINS), batch) for batch in batches()]
    for loss, given, message in (
        (summed, {"sampler": small}, "num_data=5, but the first batch has 12 examples."),
        (summed, {"batches": each, "per_chain": True}, "looks like a sum"),
        (
            graph,
            {"batches": [(*batch, np.float32(1)) for batch in batches()]},
            "could not test .*, because the arrays of a batch share no axis of ex",
        ),
        (fixed, {}, "could not test .*, because it rejects half of a batch: "),
    ):
        with pytest.warns() as seen:
            run(loss=loss, **{"batches": batches(), "sampler": stub(1e-4), **SHORT, **given})
        told = " ".join(str(one.message) for one in seen)
        assert re.search(message, told) and ("looks like a sum" in told) == (loss is summed)
    warned(SUM.format("warmstart"), warm, loss=summed, num_epochs=1)
    given: dict[str, Any] = {"batches": batches(), **SHORT}
    run(loss=summed, check=False, sampler=small, **given)
    run(loss=dropped, stochastic=True, **given)
    run(loss=summed, **given | {"batches": [(x[:1], y[:1]) for x, y in batches()]})
    warm(loss=summed, num_epochs=1, check=False)


def test_copies_and_steps_that_are_changed_are_refused():
    same = jax.tree.map(jnp.zeros_like, start())
    refused(r"`sample\(params=...\)` .* in the chains \[1, 2\]", run, params=same, sampler=quiet())
    # In a `named_chain` the order is lost, so that the structure cannot tell.
    late = optax.named_chain(("sampler", sgld()), ("decay", optax.add_decayed_weights(0.1)))
    with pytest.raises(ValueError, match=r"`sample\(sampler=...\)` .* in the chains \[0, 1, 2\]"):
        run(sampler=late, params=start() | {"b": jnp.ones(CHAINS)}, check=False)
