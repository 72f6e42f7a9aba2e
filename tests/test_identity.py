"""A directory is one run: what may differ and what is refused. What a first batch gives away."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import CHAINS, content_of, copy, mean_loss, noisy, quiet, run, start

import optax_smile
from optax_smile import _settings
from optax_smile.chains import _identity, _loop

ROWS = 60
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
TARGETS = (INPUTS.sum(1) + np.random.default_rng(1).normal(size=ROWS)).astype(np.float32)


def other_loss(params, batch):
    return 1.01 * mean_loss(params, batch)


def batches(inputs=INPUTS, order: Any = None, size=12):
    order = np.arange(ROWS) if order is None else order
    places = [order[i : i + size] for i in range(0, ROWS, size)]
    return [(inputs[place], TARGETS[place]) for place in places]


def shuffled(seed=2, **changes):
    return batches(order=np.random.default_rng(seed).permutation(ROWS), **changes)


def changed():
    inputs = INPUTS.copy()
    inputs[7, 1] += 1
    return inputs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    return directory, run(directory, batches=batches(), num_draws=2).params["w"]


DATA, SHAPES, LOSS = "batches have the number of ex", "batches have the shapes", "loss at the start"
ADDED: dict[str, Any] = {
    "stochastic": True,
    "loss": lambda params, batch, *, key: mean_loss(params, batch),
}
AUX: dict[str, Any] = {
    "aux": {"mean": jnp.zeros((CHAINS, 2))},
    "loss": lambda params, batch, *, aux: (mean_loss(params, batch), aux),
}
SHIFTED = start() | {"w": start()["w"] + 1}
WIDER = start() | {"w": jnp.zeros((CHAINS, 4))}
REFUSED: dict[str, Any] = {
    "other data, shuffled": ({"batches": shuffled(inputs=changed())}, "batches", DATA),
    "targets of others": ({"batches": [(x, y[::-1]) for x, y in batches()]}, "batches", DATA),
    "another batch size": ({"batches": batches(size=20)}, "batches", SHAPES),
    "fewer batches": ({"batches": batches()[:4]}, "batches", "batches are so many"),
    "another tree": ({"batches": [list(x) for x in batches()]}, "batches", "batches are"),
    "another loss": ({"loss": other_loss, "batches": shuffled()}, "loss_fn", LOSS),
    "another loss and start": ({"loss": other_loss, "params": SHIFTED}, "loss_fn", LOSS),
    "key": ({"key": 4}, "directory", r"settings\.key = \[0, 4\]"),
    "thin": ({"thin": 2}, "directory", r"settings\.thin = 2, got .* with 3\."),
    "warm-up": ({"num_warmup": 7}, "directory", r"settings\.num_warmup = 7, got .* with 2\."),
    "batch_per": ({"batch_per": "step"}, "directory", r"settings\.batch_per = 'step'"),
    "step size": ({"sampler": noisy(0.03)}, "directory", r"sampler\.step_size = 0\.03, got .* 0"),
    "prior": (
        {"sampler": noisy(prior_precision=2.0)},
        "directory",
        r"settings\.sampler\.prior_precision = 2\.0",
    ),
    "in front": (
        {"sampler": optax.chain(optax.clip(1.0), noisy())},
        "directory",
        r"settings\.chain =",
    ),
    "stochastic": (ADDED, "directory", r"settings\.stochastic = True"),
    "wider": ({"params": WIDER}, "directory", r"leaves = .*'shape': \[4\]"),
    "fewer chains": (
        {"params": jax.tree.map(lambda x: x[:2], start())},
        "directory",
        r"num_chains = 2, got .* with 3\.",
    ),
    "aux": (AUX, "directory", "leaves = .*'name': 'aux/mean'"),
    "dtype": ({"dtype": "float16"}, "directory", r"stored_dtype = 'float16', got .* with None\."),
    "observed": ({"observe": lambda draw: draw}, "directory", r"settings\.observe ="),
}


@pytest.mark.filterwarnings("ignore:.*began at another start")
def test_another_run_is_refused(finished):
    """Also where no more draws are asked for than there are."""
    directory, _ = finished
    before = content_of(directory)
    for number, (arguments, argument, what) in enumerate(REFUSED.values()):
        arguments = {"batches": batches(), **arguments, "num_draws": 2 + number % 2}
        with pytest.raises(ValueError, match=rf"`sample\({argument}=...\)` must be .*{what}"):
            run(directory, **arguments)
    assert content_of(directory) == before


LAWFUL: dict[str, dict[str, Any]] = {
    "shuffled": {"batches": shuffled()},
    "a tuple of arrays of JAX": {"batches": tuple(jax.tree.map(jnp.asarray, batches()))},
    "rounded elsewhere": {"batches": [(x * np.float32(1 + 1e-7), y) for x, y in batches()]},
    "accepted loss": {"batches": batches(), "loss": other_loss, "accept": ["loss"]},
    "a loss that rounds": {"batches": batches(), "loss": lambda p, b: mean_loss(p, b) * (1 + 1e-5)},
    "accepted data": {"batches": batches(changed()), "accept": ("data",)},
}


def test_the_same_run_goes_on(finished, tmp_path):
    finds = r"`sample`: 2 draws of 20\d\d-\d\d-\d\d loaded from .*: it is finished"
    for name, arguments in LAWFUL.items():
        directory = copy(finished[0], tmp_path / name)
        with pytest.warns(UserWarning, match=finds):
            again = run(directory, num_draws=2, **arguments)
        np.testing.assert_array_equal(again.params["w"], finished[1], err_msg=name)
    # What was accepted is the run from now on.
    with pytest.warns(UserWarning, match=finds):
        run(directory, num_draws=2, batches=batches(changed()))
    with pytest.raises(ValueError, match=DATA):
        run(directory, num_draws=2, batches=batches())


@pytest.mark.parametrize("per_chain", [False, True])
def test_the_examples_of_a_shuffle_are_found_again(per_chain):
    def stacked(data):
        if not per_chain:
            return data
        pairs = zip(data, data[::-1], strict=True)
        return [jax.tree.map(lambda x, y: np.stack([x, y]), *pair) for pair in pairs]

    first, second = (
        _identity.of_batches(stacked(data), per_chain) for data in (batches(), shuffled())
    )
    assert first.told["shapes"] == second.told["shapes"]
    np.testing.assert_allclose(first.told["examples"], second.told["examples"], rtol=1e-6)
    assert jax.tree.map(np.shape, first.batch) == jax.tree.map(np.shape, stacked(batches())[0])
    jax.tree.map(np.testing.assert_array_equal, first.batch, second.batch)


def test_batches_without_examples():
    for data in (iter([1]), [object()], [], ["text"], [None], [jax.random.key(0)]):
        assert _identity.of_batches(data, False).batch is None
    data = [{"a": np.ones((2, 3)), "b": np.float32(i)} for i in range(4)]
    found, batch = _identity.of_batches(data, False)
    assert found["examples"][0] == 4 and batch["b"] in range(4)
    rows = [((3, 2), (3,), False), ((3, 2), (3, 2), True), ((3, 2), (4,), False), ((), (), False)]
    found = [_loop.num_rows((np.ones(x), np.ones(y)), own) for x, y, own in rows]
    assert found == [3, 2, None, None]


# Warm starts.


def warm(directory, loss=mean_loss, **arguments) -> Any:
    defaults = {"num_members": 2, "key": 0, "num_epochs": 2, "validation": batches()[0]}
    arguments = {"batches": batches(), "optimizer": optax.adam(0.1), **defaults, **arguments}
    arguments |= {"directory": directory, "progress": False}

    def init(key):
        return {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())}

    return optax_smile.warmstart(
        loss, init, arguments.pop("batches"), arguments.pop("optimizer"), **arguments
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    return directory, warm(directory)["w"]


TRAINED: dict[str, Any] = {
    "decay": ({"optimizer": optax.adam(0.1, b1=0.8)}, "optimizer", "optimizer is"),
    "key": ({"key": 1}, "key", "key is"),
    "members": ({"num_members": 3}, "num_members", "num_members is 2"),
    "patience": ({"patience": 3}, "patience", "patience is 10"),
    "data": ({"batches": batches(changed())}, "batches", DATA),
    "loss": ({"loss": other_loss}, "loss_fn", LOSS),
    "validation": ({"validation": batches()[1]}, "validation", "validation have the number of"),
    "no validation": ({"validation": None}, "validation", "validation is True"),
}


def test_another_training_is_refused(trained):
    for arguments, argument, what in TRAINED.values():
        with pytest.raises(ValueError, match=rf"`warmstart\({argument}=...\)` must be .*{what}"):
            warm(trained[0], **arguments)


def test_the_same_training_is_found(trained):
    for arguments in ({}, {"batches": shuffled()}, {"loss": other_loss, "accept": ("loss",)}):
        with pytest.warns(
            UserWarning, match="2 members of 2 epochs loaded from .*: it is finished"
        ):
            again = warm(trained[0], **arguments)
        np.testing.assert_array_equal(again["w"], trained[1])


# What the first batch gives away.


def summed(params, batch):
    return len(batch[1]) * mean_loss(params, batch)


def dropped(params, batch, *, key):
    return summed(params, batch) * jax.random.bernoulli(key)


SHORT: dict[str, Any] = {"num_warmup": 0, "num_draws": 1, "thin": 1}
SUM = r"`{}\(loss_fn=...\)` must be a mean over the examples, and looks like a sum.* 1\.000 of"


def test_a_summed_loss_and_a_small_num_data_are_warned_of():
    """Unless `check` is False, or the loss draws random numbers."""
    small = optax_smile.sgld(1e-5, num_data=5, key=0)
    arguments: dict[str, Any] = SHORT | {"sampler": small, "batches": batches()}
    with pytest.warns() as seen:
        run(loss=summed, **arguments)
    messages = " ".join(str(one.message) for one in seen)
    assert len(seen) == 2 and "num_data=5, fewer than the 12 examples of the first" in messages
    with pytest.warns(UserWarning, match=SUM.format("sample")):
        run(loss=summed, **arguments | {"sampler": quiet(0.01)})
    run(loss=summed, check=False, **arguments)
    run(loss=dropped, stochastic=True, **arguments | {"sampler": quiet(0.01)})
    with pytest.warns(UserWarning, match=SUM.format("warmstart")):
        warm(None, loss=summed, num_epochs=1)
    warm(None, loss=summed, num_epochs=1, check=False)


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
    silent = [
        (square_mean, batch),
        (square_mean, jax.tree.map(lambda x: x[:3], batch)),
        (square_sum, jax.tree.map(lambda x: x[:1], batch)),
        (square_sum, batch | {"weight": np.ones(3)}),
        (lambda w, batch: square_sum(w, {"x": batch["x"].reshape(12, 2), "y": batch["y"]}), batch),
    ]
    for loss, data in silent:
        _loop.warn_of_sum("sample", of_chains(loss), data, False, None)
    assert not recwarn.list
    for data, per_chain in ((batch, False), (own, True)):
        with pytest.warns(UserWarning, match=SUM.format("sample")):
            _loop.warn_of_sum("sample", of_chains(square_sum, per_chain), data, per_chain, None)


def test_copies_are_refused():
    same = jax.tree.map(jnp.zeros_like, start())
    with pytest.raises(ValueError, match=r"`sample\(params=...\)` .* in the chains \[1, 2\]"):
        run(params=same, sampler=quiet())
    # The losses of all chains are equal, and their keys are not.
    run(params=same, sampler=quiet(), **ADDED, **SHORT)


def test_sample_stops_where_steps_are_changed():
    """In a `named_chain` the order is lost, so that the structure cannot tell."""
    decay = optax.add_decayed_weights(0.1)
    late = optax.named_chain(("sampler", noisy()), ("weight decay", decay))
    with pytest.raises(ValueError, match=r"`sample\(sampler=...\)` .* in the chains \[0, 1, 2\]"):
        run(sampler=late, params=start() | {"b": jnp.ones(CHAINS)}, check=False)


def test_a_transformation_is_told_from_others_and_not_from_itself():
    """Large arrays of any dtype count, such as the mean of a prior on all weights."""
    means = [jnp.arange(20, dtype=x) for x in (jnp.float32, jnp.bfloat16, jnp.int32)]
    made = [
        lambda: noisy(),
        lambda: noisy(temperature=0.5),
        lambda: optax.chain(optax.clip(1.0), noisy()),
        lambda: optax.chain(optax.clip(2.0), noisy()),
        lambda: optax.adamw(1e-3),
        lambda: optax.adamw(1e-3, b1=0.8),
        lambda: optax.adam(optax.cosine_decay_schedule(0.1, 100)),
        lambda: optax.adam(optax.cosine_decay_schedule(0.1, 200)),
        lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        lambda: optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation(),
        lambda: optax.inject_hyperparams(optax.sgd)(0.1),
        lambda: optax.inject_hyperparams(optax.sgd)(0.2),
        *[lambda mean=mean: quiet(prior_mean=mean) for mean in (*means, means[1] + 1)],
    ]
    params, sums = jnp.ones(20), []
    for make in made:
        tx = make()
        sums.append(_settings.checksum(tx))
        if len(sums) in (1, 7):
            tx.update(params, tx.init(params), params)
        assert _settings.checksum(tx) == _settings.checksum(make()) == sums[-1]
    assert len(set(sums)) == len(made)
