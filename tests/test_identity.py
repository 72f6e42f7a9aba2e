"""A directory is one run: what may differ, what is refused, and what a first batch gives away."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import _settings
from optax_smile.chains import _identity, _loop

ROWS = 60
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
TARGETS = (INPUTS.sum(1) + np.random.default_rng(1).normal(size=ROWS)).astype(np.float32)
START = {"w": jax.random.normal(jax.random.key(0), (3, 4))}


def mean_loss(params, batch):
    return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) / 2


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
    inputs[7, 2] += 1
    return inputs


def psmile(**arguments):
    return optax_smile.psmile(**{"num_data": ROWS, "key": 1, **arguments})


def run(directory=None, loss=mean_loss, start=START, data: Any = None, sampler=None, **arguments):
    arguments = {"num_warmup": 4, "num_draws": 3, "thin": 2, "key": 3, **arguments}
    data = batches() if data is None else data
    sampler = psmile() if sampler is None else sampler
    arguments |= {"directory": directory, "progress": False}
    return optax_smile.sample(loss, start, data, sampler, **arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    return directory, run(directory).params["w"]


DATA, SHAPES, LOSS = "batches have the number of ex", "batches have the shapes", "loss at the start"
REFUSED: dict[str, Any] = {
    "other data": ({"data": batches(changed())}, "batches", DATA),
    "other data, shuffled": ({"data": shuffled(inputs=changed())}, "batches", DATA),
    "targets of others": ({"data": [(x, y[::-1]) for x, y in batches()]}, "batches", DATA),
    "another batch size": ({"data": batches(size=20)}, "batches", SHAPES),
    "fewer batches": ({"data": batches()[:4]}, "batches", "batches are so many"),
    "another tree": ({"data": [list(batch) for batch in batches()]}, "batches", "batches are"),
    "another loss": ({"loss": other_loss}, "loss_fn", LOSS),
    "another loss, shuffled": ({"loss": other_loss, "data": shuffled()}, "loss_fn", LOSS),
    "another loss and start": (
        {"loss": other_loss, "start": {"w": START["w"] + 1}},
        "loss_fn",
        LOSS,
    ),
    "another key": ({"key": 4}, "directory", "settings.key.* ="),
    "another thinning": ({"thin": 1}, "directory", "settings.thin ="),
    "another sampler": (
        {"sampler": psmile(temperature=0.5)},
        "directory",
        "settings.sampler.temperature =",
    ),
    "something in front": (
        {"sampler": optax.chain(optax.clip(1.0), psmile())},
        "directory",
        "settings.chain =",
    ),
}


@pytest.mark.filterwarnings("ignore:.*began at another start")
@pytest.mark.parametrize("name", REFUSED)
def test_another_run_is_refused(finished, name):
    """Also one that is finished, and asked for as many draws or more."""
    directory, expected = finished
    arguments, argument, what = REFUSED[name]
    for number in (3, 5):
        with pytest.raises(ValueError, match=rf"`sample\({argument}=...\)` must be .*{what}"):
            run(directory, **arguments, num_draws=number)
    np.testing.assert_array_equal(
        optax_smile.load_snapshots(directory).params["w"], expected, strict=True
    )


LAWFUL: dict[str, dict[str, Any]] = {
    "shuffled": {"data": shuffled()},
    "as arrays of JAX": {"data": jax.tree.map(jnp.asarray, batches())},
    "a tuple": {"data": tuple(batches())},
    "rounded elsewhere": {"data": [(x * np.float32(1 + 1e-7), y) for x, y in batches()]},
    "accepted data": {"data": batches(changed()), "accept": ("data",)},
    "accepted loss": {"loss": other_loss, "accept": ["loss"]},
    "a loss that rounds": {"loss": lambda p, b: mean_loss(p, b) * (1 + 1e-5)},
}


@pytest.mark.parametrize("name", LAWFUL)
def test_the_same_run_goes_on(finished, name, tmp_path):
    told = r"`sample`: 3 draws of 20\d\d-\d\d-\d\d loaded from .*: it is finished"
    with pytest.warns(UserWarning, match=told):
        again = run(finished[0], **LAWFUL[name])
    np.testing.assert_array_equal(again.params["w"], finished[1])
    # What was accepted last is the run from now on.
    with pytest.warns(UserWarning, match=told):
        run(finished[0], **{**LAWFUL[name], "accept": ("data", "loss")})
    with pytest.warns(UserWarning, match=told):
        run(finished[0], accept=("data", "loss"))


def test_fewer_draws_are_what_was_asked(finished):
    with pytest.warns(UserWarning, match="`sample`: 2 draws of .* loaded"):
        fewer = run(finished[0], num_draws=2)
    np.testing.assert_array_equal(fewer.params["w"], finished[1][:, :2])
    assert optax_smile.load_snapshots(finished[0]).num_draws == 3


def test_another_start_is_not_used_and_a_warning_says_so(tmp_path):
    run(tmp_path)
    with pytest.warns(UserWarning, match="goes on from its checkpoint. It began at another start"):
        got = run(tmp_path, start={"w": START["w"] + 1}, num_draws=5)
    np.testing.assert_array_equal(got.params["w"], run(num_draws=5).params["w"])


def test_a_rounded_run_knows_its_start(tmp_path):
    run(tmp_path, dtype="float16")
    with pytest.warns(UserWarning) as seen:
        run(tmp_path, dtype="float16")
    assert len(seen) == 1 and "is finished" in str(seen[0].message)


def test_accept_takes_known_names():
    for wrong in ("data", ("start",), 3):
        with pytest.raises(ValueError, match=r"`sample\(accept=...\)` must be a tuple of names"):
            run(accept=wrong)


# What is told of batches.


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


def test_what_cannot_be_told_is_not_told():
    for data in (iter([1]), [object()], [], ["text"], [None], [jax.random.key(0)]):
        assert _identity.of_batches(data, False).batch is None


def test_batches_without_rows_are_one_example_each():
    data = [{"a": np.ones((2, 3)), "b": np.float32(i)} for i in range(4)]
    told, batch = _identity.of_batches(data, False)
    assert told["examples"][0] == 4 and batch["b"] in range(4)


# Warm starts.


def init(key):
    return {"w": jax.random.normal(key, (4,))}


def warm(directory, loss=mean_loss, data: Any = None, optimizer=None, **arguments):
    arguments = {"num_members": 2, "key": 0, "num_epochs": 2, **arguments}
    data = batches() if data is None else data
    optimizer = optax.adam(0.1) if optimizer is None else optimizer
    arguments |= {"directory": directory, "progress": False}
    return optax_smile.warmstart(loss, init, data, optimizer, **arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    members: Any = warm(directory, validation=batches()[0])
    return directory, members["w"]


TRAINED: dict[str, Any] = {
    "rate": ({"optimizer": optax.adam(0.2)}, "optimizer", "optimizer is"),
    "decay": ({"optimizer": optax.adam(0.1, b1=0.8)}, "optimizer", "optimizer is"),
    "rule": ({"optimizer": optax.sgd(0.1)}, "optimizer", "optimizer is"),
    "key": ({"key": 1}, "key", "key is"),
    "members": ({"num_members": 3}, "num_members", "num_members is 2"),
    "patience": ({"patience": 3}, "patience", "patience is 10"),
    "data": ({"data": batches(changed())}, "batches", DATA),
    "loss": ({"loss": other_loss}, "loss_fn", LOSS),
    "validation": ({"validation": batches()[1]}, "validation", "validation have the number of"),
    "no validation": ({"validation": None}, "validation", "validation is True"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_another_training_is_refused(trained, name):
    arguments, argument, what = TRAINED[name]
    arguments = {"validation": batches()[0], **arguments}
    with pytest.raises(ValueError, match=rf"`warmstart\({argument}=...\)` must be .*{what}"):
        warm(trained[0], **arguments)


def test_the_same_training_is_found(trained):
    for arguments in ({}, {"data": shuffled()}, {"loss": other_loss, "accept": ("loss",)}):
        with pytest.warns(
            UserWarning, match="2 members of 2 epochs loaded from .*: it is finished"
        ):
            again: Any = warm(trained[0], validation=batches()[0], **arguments)
        np.testing.assert_array_equal(again["w"], trained[1])


# What the first batch gives away.


def summed(params, batch):
    return jnp.sum((batch[0] @ params["w"] - batch[1]) ** 2) / 2


SUM = r"`{}\(loss_fn=...\)` must be a mean over the examples, and looks like a sum.* 1\.000 of"


def test_a_summed_loss_is_told():
    with pytest.warns(UserWarning, match=SUM.format("sample")):
        run(loss=summed)
    with pytest.warns(UserWarning, match=SUM.format("warmstart")):
        warm(None, loss=summed)
    own = [jax.tree.map(lambda x: np.stack([x] * 3), batch) for batch in batches()]
    with pytest.warns(UserWarning, match=SUM.format("sample")):
        run(loss=summed, data=own, per_chain=True)
    mesh = jax.make_mesh((1, 2), ("chain", "data"))
    with pytest.warns(UserWarning, match=SUM.format("sample")):
        run(loss=summed, mesh=mesh)
    run(loss=summed, check=False)
    warm(None, loss=summed, check=False)


def test_a_search_tells_it_once():
    def apply(params, x):
        return x @ params["w"], jnp.zeros(())

    with pytest.warns(UserWarning) as seen:
        optax_smile.find_step_size(
            summed,
            START,
            batches(),
            lambda step_size: optax_smile.smile_naive(step_size, num_data=ROWS),
            apply,
            (INPUTS, TARGETS),
            likelihood="gaussian",
            num_warmup=2,
            num_draws=2,
            key=0,
            step_sizes=(1e-3, 1e-2),
            progress=False,
        )
    assert len([one for one in seen if "looks like a sum" in str(one.message)]) == 1


def dropped(params, batch, *, key):
    return summed(params, batch) * jax.random.bernoulli(key)


SILENT: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of three rows": {"data": [(INPUTS[i : i + 3], TARGETS[i : i + 3]) for i in range(9)]},
    "stochastic": {"loss": dropped, "stochastic": True},
    "no common axis": {
        "loss": lambda params, batch: summed(params, (batch["x"], batch["y"])),
        "data": [{"x": x, "y": y, "weight": np.ones(3)} for x, y in batches()],
    },
    "no halves": {
        "loss": lambda params, batch: summed(params, (batch[0].reshape(12, 4), batch[1]))
    },
    "one row": {"loss": summed, "data": [(INPUTS[:1], TARGETS[:1])], "check": True},
}


@pytest.mark.parametrize("name", SILENT)
def test_what_cannot_be_told_is_silent(name):
    run(num_warmup=0, num_draws=1, thin=1, **SILENT[name])


def test_num_data_below_a_batch_is_told():
    with pytest.warns(UserWarning, match="num_data=5, fewer than the 12 examples of the first"):
        run(sampler=psmile(num_data=5))
    run(sampler=psmile(num_data=5), check=False)


def test_copies_are_refused():
    same = {"w": jnp.ones((3, 4))}
    quiet = optax_smile.smile_naive(0.1, num_data=ROWS)
    with pytest.raises(ValueError, match=r"`sample\(params=...\)` .* in the chains \[1, 2\]"):
        run(start=same, sampler=quiet)
    # Their noise keeps them apart, and so do batches of their own.
    run(start=same)
    own = [jax.tree.map(lambda *rows: np.stack(rows), *batches()[:3])]
    run(start=same, sampler=quiet, data=own, per_chain=True)


def test_sample_stops_where_steps_are_changed():
    """In a `named_chain` the order is lost, so that the structure cannot tell."""
    decay = optax.add_decayed_weights(0.1)
    late = optax.named_chain(("sampler", psmile()), ("weight decay", decay))
    with pytest.raises(ValueError, match=r"`sample\(sampler=...\)` .* in the chains \[0, 1, 2\]"):
        run(sampler=late, num_draws=10)


def test_control_c_in_the_warm_up_says_how_to_go_on(tmp_path):
    def interrupt(step, stats):
        raise KeyboardInterrupt

    message = f"before the first draw. A checkpoint is in {tmp_path}: call it again in the same way"
    with pytest.raises(KeyboardInterrupt, match=message):
        run(tmp_path, callback=interrupt)
    with pytest.raises(KeyboardInterrupt, match="Without a `directory` nothing of it is kept"):
        run(callback=interrupt)
    np.testing.assert_array_equal(run(tmp_path).params["w"], run().params["w"])


def test_rows_of_batches():
    assert _loop.num_rows((np.ones((3, 2)), np.ones(3)), False) == 3
    assert _loop.num_rows((np.ones((3, 2)), np.ones((3, 2))), True) == 2
    assert _loop.num_rows((np.ones((3, 2)), np.ones(4)), False) is None
    assert _loop.num_rows(np.ones(()), False) is None


def test_a_transformation_is_told_from_others_and_not_from_itself():
    schedules = [optax.cosine_decay_schedule(0.1, steps) for steps in (100, 200)]
    made = [
        lambda: psmile(),
        lambda: psmile(num_data=7),
        lambda: optax.chain(optax.clip(1.0), psmile()),
        lambda: optax.chain(optax.clip(2.0), psmile()),
        lambda: optax.adamw(1e-3),
        lambda: optax.adamw(1e-3, b1=0.8),
        lambda: optax.adamw(1e-3, weight_decay=0.1),
        lambda: optax.adam(schedules[0]),
        lambda: optax.adam(schedules[1]),
        lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        lambda: optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation(),
        lambda: optax.inject_hyperparams(optax.sgd)(0.1),
        lambda: optax.inject_hyperparams(optax.sgd)(0.2),
    ]
    params, sums = jnp.ones(3), []
    for make in made:
        tx = make()
        sums.append(_settings.checksum(tx))
        tx.update(params, tx.init(params), params)
        assert _settings.checksum(tx) == _settings.checksum(make()) == sums[-1]
    assert len(set(sums)) == len(made)


def test_large_arrays_of_any_dtype_have_a_checksum():
    """Such as the mean of a prior on all weights of a network, some of them in bfloat16."""
    made = [jnp.arange(20, dtype=x) for x in (jnp.float32, jnp.bfloat16, jnp.int32)]
    tx = [optax_smile.psmile_naive(0.1, num_data=9, prior_mean=x) for x in [*made, made[1] + 1]]
    assert len({_settings.checksum(x) for x in tx}) == len(tx)
