"""A directory is one run: what may differ and what is refused. What a first batch gives away."""

import shutil
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import CHAINS, content_of, mean_loss, noisy, quiet, run, start

import optax_smile
from optax_smile import _settings
from optax_smile.chains import _identity, _loop

INPUTS = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
TARGETS = (INPUTS.sum(1) + np.random.default_rng(1).normal(size=60)).astype(np.float32)
CHANGED = INPUTS.copy()
CHANGED[7, 1] += 1


def other_loss(params, batch):
    return 1.01 * mean_loss(params, batch)


def batches(inputs=INPUTS, order: Any = None, size=12):
    order = np.arange(60) if order is None else order
    return [(inputs[at], TARGETS[at]) for at in np.split(order, 60 // size)]


def shuffled(inputs=INPUTS):
    return batches(inputs, np.random.default_rng(2).permutation(60))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Any:
    return run(tmp_path_factory.mktemp("finished"), batches=batches(), num_draws=2)


DATA, SHAPES, LOSS = "batches have the number of ex", "batches have the shapes", "loss at the start"
FINISHED = r"`sample`: 2 draws of 20\d\d-\d\d-\d\d loaded from .*: it is finished"
ADDED: dict[str, Any] = {"stochastic": True, "loss": lambda p, batch, *, key: mean_loss(p, batch)}
AUX = {"aux": {"mean": jnp.zeros((CHAINS, 2))}, "loss": lambda p, b, *, aux: (mean_loss(p, b), aux)}
SHIFTED, WIDER = start() | {"w": start()["w"] + 1}, start() | {"w": jnp.zeros((CHAINS, 4))}
OTHER_BATCHES: list[tuple[Any, str]] = [
    (shuffled(CHANGED), DATA),
    ([(x, y[::-1]) for x, y in batches()], DATA),
    (batches(size=20), SHAPES),
    (batches()[:4], "batches are so many"),
    ([list(x) for x in batches()], "batches are"),
]
OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"key": 4}, r"settings\.key = \[0, 4\]"),
    ({"thin": 2}, r"settings\.thin = 2, got .* with 3\."),
    ({"num_warmup": 7}, r"settings\.num_warmup = 7, got .* with 2\."),
    ({"batch_per": "step"}, r"settings\.batch_per = 'step'"),
    ({"sampler": noisy(0.03)}, r"sampler\.step_size = 0\.03, got .* 0"),
    ({"sampler": noisy(prior_precision=2.0)}, r"settings\.sampler\.prior_precision = 2\.0"),
    ({"sampler": optax.chain(optax.clip(1.0), noisy())}, r"settings\.chain ="),
    (ADDED, r"settings\.stochastic = True"),
    ({"params": WIDER}, r"leaves = .*'shape': \[4\]"),
    ({"params": jax.tree.map(lambda x: x[:2], start())}, r"num_chains = 2, got .* with 3\."),
    (AUX, "leaves = .*'name': 'aux/mean'"),
    ({"dtype": "float16"}, r"stored_dtype = 'float16', got .* with None\."),
    ({"observe": lambda draw: draw}, r"settings\.observe ="),
]


@pytest.mark.filterwarnings("ignore:.*began at another start")
def test_another_run_is_refused(finished):
    """Also where no more draws are asked for than there are."""
    before, losses = content_of(finished.directory), ({"batches": shuffled()}, {"params": SHIFTED})
    refused: list[Any] = [({"batches": other}, "batches", what) for other, what in OTHER_BATCHES]
    refused += [({"loss": other_loss, **given}, "loss_fn", LOSS) for given in losses]
    refused += [(arguments, "directory", what) for arguments, what in OTHER_SETTINGS]
    for number, (arguments, argument, what) in enumerate(refused):
        arguments = {"batches": batches(), **arguments, "num_draws": 2 + number % 2}
        with pytest.raises(ValueError, match=rf"`sample\({argument}=...\)` must be .*{what}"):
            run(finished.directory, **arguments)
    assert content_of(finished.directory) == before


def test_the_same_run_goes_on(finished, tmp_path):
    lawful: list[dict[str, Any]] = [
        {"batches": shuffled()},
        {"batches": tuple(jax.tree.map(jnp.asarray, batches()))},
        {"batches": [(x * np.float32(1 + 1e-7), y) for x, y in batches()]},
        {"batches": batches(), "loss": other_loss, "accept": ["loss"]},
        {"batches": batches(), "loss": lambda p, b: mean_loss(p, b) * (1 + 1e-5)},
        {"batches": batches(CHANGED), "accept": ("data",)},
    ]
    for number, arguments in enumerate(lawful):
        directory = shutil.copytree(finished.directory, tmp_path / str(number))
        with pytest.warns(UserWarning, match=FINISHED):
            again = run(directory, num_draws=2, **arguments)
        np.testing.assert_array_equal(again.params["w"], finished.params["w"])
    # What was accepted is the run from now on.
    with pytest.warns(UserWarning, match=FINISHED):
        run(directory, num_draws=2, batches=batches(CHANGED))
    with pytest.raises(ValueError, match=DATA):
        run(directory, num_draws=2, batches=batches())


def test_the_examples_of_a_shuffle_are_found_again_if_there_are_any():
    def stacked(data):
        pairs = zip(data, data[::-1], strict=True)
        return [jax.tree.map(lambda *x: np.stack(x), *pair) for pair in pairs]

    for per_chain, form in ((False, list), (True, stacked)):
        data = form(batches()), form(shuffled())
        first, second = (_identity.of_batches(one, per_chain) for one in data)
        assert first.told["shapes"] == second.told["shapes"]
        np.testing.assert_allclose(first.told["examples"], second.told["examples"], rtol=1e-6)
        assert jax.tree.map(np.shape, first.batch) == jax.tree.map(np.shape, data[0][0])
        jax.tree.map(np.testing.assert_array_equal, first.batch, second.batch)
    for data in (iter([1]), [object()], [], ["text"], [None], [jax.random.key(0)]):
        assert _identity.of_batches(data, False).batch is None
    data = [{"a": np.ones((2, 3)), "b": np.float32(i)} for i in range(4)]
    found, batch = _identity.of_batches(data, False)
    assert found["examples"][0] == 4 and batch["b"] in range(4)
    rows = ((3, 2), (3,), 0, 3), ((3, 2), (3, 2), 1, 2), ((3, 2), (4,), 0, None), ((), (), 0, None)
    for x, y, own, number in rows:
        assert _loop.num_rows((np.ones(x), np.ones(y)), bool(own)) == number


def warm(directory=None, loss=mean_loss, **arguments) -> Any:
    defaults: dict[str, Any] = {"batches": batches(), "optimizer": optax.adam(0.1), "key": 0}
    defaults |= {"num_members": 2, "num_epochs": 2, "validation": batches()[0], "progress": False}

    def init(key):
        return {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())}

    return optax_smile.warmstart(loss, init, directory=directory, **defaults | arguments)


def test_another_training_is_refused_and_the_same_is_found(tmp_path):
    others: list[tuple[dict[str, Any], str, str]] = [
        ({"optimizer": optax.adam(0.1, b1=0.8)}, "optimizer", "optimizer is"),
        ({"key": 1}, "key", "key is"),
        ({"num_members": 3}, "num_members", "num_members is 2"),
        ({"patience": 3}, "patience", "patience is 10"),
        ({"batches": batches(CHANGED)}, "batches", DATA),
        ({"loss": other_loss}, "loss_fn", LOSS),
        ({"validation": batches()[1]}, "validation", "validation have the number of"),
        ({"validation": None}, "validation", "validation is True"),
    ]
    trained = warm(tmp_path)["w"]
    for arguments, argument, what in others:
        with pytest.raises(ValueError, match=rf"`warmstart\({argument}=...\)` must be .*{what}"):
            warm(tmp_path, **arguments)
    finds = "2 members of 2 epochs loaded from .*; the training is finished"
    for arguments in ({}, {"batches": shuffled()}, {"loss": other_loss, "accept": ("loss",)}):
        with pytest.warns(UserWarning, match=finds):
            np.testing.assert_array_equal(warm(tmp_path, **arguments)["w"], trained)


SHORT: dict[str, Any] = {"num_warmup": 0, "num_draws": 1, "thin": 1}
SUM = r"`{}\(loss_fn=...\)` must be a mean over the examples, and looks like a sum.* 1\.000 of"


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
    assert len(seen) == 2 and "num_data=5, fewer than the 12 examples of the first" in messages
    with pytest.warns(UserWarning, match=SUM.format("sample")):
        run(loss=summed, **arguments | {"sampler": quiet(0.01)})
    with pytest.warns(UserWarning, match=SUM.format("warmstart")):
        warm(loss=summed, num_epochs=1)
    run(loss=summed, check=False, **arguments)
    run(loss=dropped, stochastic=True, **arguments | {"sampler": quiet(0.01)})
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
        (square_mean, jax.tree.map(lambda x: x[:3], batch)),
        (square_sum, jax.tree.map(lambda x: x[:1], batch)),
        (square_sum, batch | {"weight": np.ones(3)}),
        (lambda w, batch: square_sum(w, {"x": batch["x"].reshape(12, 2), "y": batch["y"]}), batch),
    ):
        _loop.warn_of_sum("sample", of_chains(loss), data, False, None)
    assert not recwarn.list
    for data, per_chain in ((batch, False), (own, True)):
        with pytest.warns(UserWarning, match=SUM.format("sample")):
            _loop.warn_of_sum("sample", of_chains(square_sum, per_chain), data, per_chain, None)


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


def test_a_transformation_is_told_from_others_and_not_from_itself():
    """Large arrays of any dtype count, such as the mean of a prior on all weights."""
    means = [jnp.arange(20, dtype=x) for x in (jnp.float32, jnp.bfloat16, jnp.int32)]
    kinds: list[tuple[Any, Any]] = [
        (lambda number: noisy(temperature=number), (1.0, 0.5)),
        (lambda number: optax.chain(optax.clip(number), noisy()), (1.0, 2.0)),
        (lambda number: optax.adamw(1e-3, b1=number), (0.9, 0.8)),
        (lambda number: optax.adam(optax.cosine_decay_schedule(0.1, number)), (100, 200)),
        (lambda n: optax.MultiSteps(optax.sgd(0.1), n).gradient_transformation(), (2, 3)),
        (optax.inject_hyperparams(optax.sgd), (0.1, 0.2)),
        (lambda mean: quiet(prior_mean=mean), (*means, means[1] + 1)),
    ]
    made = [partial(build, value) for build, values in kinds for value in values]
    params, sums = jnp.ones(20), []
    for make in made:
        tx = make()
        sums.append(_settings.checksum(tx))
        if len(sums) in (1, 7):
            tx.update(params, tx.init(params), params)
        assert _settings.checksum(tx) == _settings.checksum(make()) == sums[-1]
    assert len(set(sums)) == len(made)
