"""A directory is one run: what may differ and what is refused. What a first batch gives away."""

import json
import re
import shutil
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import CHAINS, content_of, mean_loss, noisy, quiet, run, start

import optax_smile
from optax_smile import _settings
from optax_smile.chains import _checks, _directory

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


DATA, SHAPES = r"with the same examples, got \d+ examples with", "with the shapes"
FINISHED = r"`sample`: the run in .* is finished. Its 2 draws per chain, of 20\d\d-\d\d-\d\d,"
LOSS = r"`loss_fn` is not that of the run in .* {} \d was [\d.]+ and is [\d.]+ now"
OTHER = "`{}`: values that `{}` or a function in it uses have changed since the run"
ADDED: dict[str, Any] = {"stochastic": True, "loss": lambda p, batch, *, key: mean_loss(p, batch)}
AUX = {"aux": {"mean": jnp.zeros((CHAINS, 2))}, "loss": lambda p, b, *, aux: (mean_loss(p, b), aux)}
SHIFTED, WIDER = start() | {"w": start()["w"] + 1}, start() | {"w": jnp.zeros((CHAINS, 4))}
OTHER_BATCHES: list[tuple[Any, str]] = [
    (shuffled(CHANGED), DATA),
    ([(x, y[::-1]) for x, y in batches()], DATA),
    (batches(size=20), SHAPES),
    (batches()[:4], "with the number of batches 5, got 4"),
    ([list(x) for x in batches()], "with the structure"),
]
OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"key": 4}, r"\[0, 0\], as in the run in .*, got \[0, 4\]"),
    ({"thin": 2}, r"3, as in .*, got 2\. Pass 3, or choose another directory\."),
    ({"num_warmup": 7}, r"2, as in .*, got 7\."),
    ({"batch_per": "step"}, r"'gradient', as in .*, got 'step'"),
    ({"sampler": noisy(0.03)}, r"with step_size = 0.*, got 0\.03\. "),
    ({"sampler": noisy(prior_precision=2.0)}, r"prior_precision = 1\.0, as in .*, got 2\.0"),
    (ADDED, r"False, as in .*, got True"),
    ({"params": WIDER}, r"with leaves = .*, got .*'shape': \[4\]"),
    ({"params": jax.tree.map(lambda x: x[:2], start())}, r"num_chains = 3, as in .*, got 2\."),
    ({"params": start(), **AUX}, "with leaves = .*, got .*'name': 'aux/mean'"),
    ({"dtype": "float16"}, r"None, as in .*, got 'float16'\. Pass None, or"),
]


def test_another_run_is_refused(finished):
    """Also if there are enough draws already."""
    before = content_of(finished.directory)
    refused: list[Any] = [({"batches": other}, "batches", what) for other, what in OTHER_BATCHES]
    refused += [(arguments, next(iter(arguments)), what) for arguments, what in OTHER_SETTINGS]
    for number, (arguments, argument, what) in enumerate(refused):
        arguments = {"batches": batches(), **arguments, "num_draws": 2 + number % 2}
        with pytest.raises(ValueError, match=rf"`sample\({argument}=...\)` must be .*{what}"):
            run(finished.directory, **arguments)
    assert content_of(finished.directory) == before


def messages_of(directory, **arguments) -> str:
    """Load a finished run, and return its warnings."""
    with pytest.warns(UserWarning) as seen:
        run(directory, num_draws=2, **arguments)
    return "\n".join(str(one.message) for one in seen)


def test_the_same_run_is_resumed_and_other_functions_are_warned_of(finished, tmp_path):
    clips = optax.clip_by_global_norm(1e3), optax.clip_by_global_norm(2e3)
    wrapped = [optax.chain(clip, noisy()) for clip in clips]
    first: Any = run(tmp_path / "clip", batches=batches(), num_draws=2, sampler=wrapped[0])
    for sampler, what in zip(wrapped, ("", OTHER.format("sample", "sampler")), strict=True):
        messages = messages_of(first.directory, batches=batches(), sampler=sampler)
        assert re.search(FINISHED, messages) and re.search(what, messages)
        assert messages.count("\n") == bool(what)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batches": shuffled()}, ""),
        ({"batches": tuple(jax.tree.map(jnp.asarray, batches()))}, ""),
        ({"batches": [(x * np.float32(1 + 1e-7), y) for x, y in batches()]}, ""),
        ({"loss": lambda p, b: mean_loss(p, b) * (1 + 1e-5)}, ""),
        ({"loss": other_loss}, LOSS.format("chain")),
        ({"loss": other_loss, "batches": shuffled()}, LOSS.format("chain")),
        ({"loss": other_loss, "params": SHIFTED}, LOSS.format("chain")),
        ({"observe": lambda draw: draw}, ""),
    ]
    for number, (arguments, what) in enumerate(cases):
        directory = shutil.copytree(finished.directory, tmp_path / str(number))
        messages = messages_of(directory, **{"batches": batches(), **arguments})
        assert re.search(FINISHED, messages)
        assert messages.count("\n") == bool(what) + ("params" in arguments)
        assert re.search(what, messages), messages
        again = optax_smile.load_snapshots(directory)
        np.testing.assert_array_equal(again.params["w"], finished.params["w"])


def flat_prior(scale, is_other=False):
    if is_other:
        return lambda params: -scale * jnp.sum(params["w"] ** 4) - jnp.sum(params["b"] ** 4)
    return lambda params: -scale * jnp.sum(params["w"] ** 2) - jnp.sum(params["b"] ** 2)


def test_the_values_of_functions_are_compared_and_their_code_is_not(tmp_path):
    """Another Python compiles the same source to other code."""

    def sampled(log_prior, name, step_size: Any = 0.02):
        sampler = noisy(step_size, prior_precision=0.0, log_prior=log_prior)
        return run(tmp_path / name, sampler=sampler, num_draws=2)

    for name, first, second, warns in (
        ("value", flat_prior(1.0), flat_prior(2.0), True),
        ("code", flat_prior(1.0), flat_prior(1.0, is_other=True), False),
    ):
        made = [quiet(prior_precision=0.0, log_prior=x) for x in (first, second)]
        described = [_settings.whole(x, jax.tree.map(lambda x: x[0], start())) for x in made]
        assert (described[0] != described[1]) == warns, name
    schedules = [optax.cosine_decay_schedule(0.02, number) for number in (10, 10, 20)]
    for number, schedule in enumerate(schedules):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sampled(flat_prior(1.0), "schedule", schedule)
        messages = "\n".join(str(one.message) for one in seen)
        assert bool(re.search(OTHER.format("sample", "sampler"), messages)) == (number == 2)


def test_the_examples_of_a_shuffle_are_found_again_if_there_are_any():
    def stacked(data):
        pairs = zip(data, data[::-1], strict=True)
        return [jax.tree.map(lambda *x: np.stack(x), *pair) for pair in pairs]

    for per_chain, form in ((False, list), (True, stacked)):
        data = form(batches()), form(shuffled())
        described = (_directory.describe_batches(one, per_chain) for one in data)
        (mine, first), (theirs, second) = described
        assert mine["shapes"] == theirs["shapes"]
        np.testing.assert_allclose(mine["examples"], theirs["examples"], rtol=1e-6)
        assert jax.tree.map(np.shape, first) == jax.tree.map(np.shape, data[0][0])
        jax.tree.map(np.testing.assert_array_equal, first, second)
    for data in (iter([1]), [object()], [], ["text"], [None], [jax.random.key(0)]):
        assert _directory.describe_batches(data, False)[1] is None
    data = [{"a": np.ones((2, 3)), "b": np.float32(i)} for i in range(4)]
    found, batch = _directory.describe_batches(data, False)
    assert found["examples"][0] == 4 and batch["b"] in range(4)
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
    for place, got in (("file", "got the file"), ("file/inside", "Not a directory")):
        with pytest.raises(optax_smile.ArgumentError, match=rf"directory=...\)` must be .*{got}"):
            run(tmp_path / place)


def test_another_training_is_refused_and_the_same_is_found(tmp_path):
    others: list[tuple[dict[str, Any], str, str]] = [
        ({"key": 1}, "key", r"\[0, 0\], as in the run in .*, got \[0, 1\]"),
        ({"num_members": 3}, "num_members", r"2, as in the run in .*, got 3\. Pass 2, or"),
        ({"patience": 3}, "patience", r"10, as in the run in .*, got 3\."),
        ({"optimizer": optax.sgd(0.1)}, "optimizer", r"that of the run in .*, got one whose state"),
        ({"batches": batches(CHANGED)}, "batches", DATA),
        ({"validation": batches()[1]}, "validation", DATA),
        ({"validation": None}, "validation", r"a batch, as in the run in .*, got None\."),
    ]
    trained = warm(tmp_path)["w"]
    for arguments, argument, what in others:
        with pytest.raises(ValueError, match=rf"`warmstart\({argument}=...\)` must be .*{what}"):
            warm(tmp_path, **arguments)
    finds = "the training in .* is finished. Its 2 members, trained for 2 epochs, are returned"
    cases: list[tuple[dict[str, Any], str]] = [({}, ""), ({"batches": shuffled()}, "")]
    cases += [({"loss": other_loss}, LOSS.format("member"))]
    cases += [({"optimizer": optax.adam(0.1, b1=0.8)}, OTHER.format("warmstart", "optimizer"))]
    for arguments, what in cases:
        with pytest.warns(UserWarning) as seen:
            np.testing.assert_array_equal(warm(tmp_path, **arguments)["w"], trained)
        messages = "\n".join(str(one.message) for one in seen)
        assert re.search(finds, messages) and re.search(what, messages)
        assert len(seen) == 1 + bool(what)


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
    ):
        _checks.warn_of_sum("sample", of_chains(loss), data, False, None)
    assert not recwarn.list

    def fixed(w, batch):
        return square_sum(w, batch) / 12 + jnp.zeros(12) @ batch["y"]

    for loss, data, reason in (
        (square_sum, batch | {"weight": np.ones(3)}, "the arrays of a batch share no axis of ex"),
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


CLIP = optax.clip(1.0)


class Prior(NamedTuple):
    scale: float

    def log_prob(self, params):
        return -self.scale * jnp.sum(params**2)


def named(params, c=0.0, d=0.0):
    return -jnp.sum((1 + c + 2 * d) * params**2)


def partitioned(names):
    parts = dict(zip(names, (CLIP, optax.set_to_zero()), strict=True))
    return optax.partition(parts, {"w": "x"})


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
        (lambda name: optax.masked(optax.sgd(0.1), {name: True, "b": False}), ("a", "c")),
        (partitioned, ("xy", "yx")),
        (lambda last: optax.chain(CLIP, optax.sgd(0.1), last), (CLIP, optax.sgd(0.1))),
        (lambda scale: quiet(prior_precision=0.0, log_prior=Prior(scale).log_prob), (1.0, 2.0)),
        (lambda name: quiet(prior_precision=0.0, log_prior=partial(named, **{name: 1})), "cd"),
    ]

    def whole(tx):
        try:
            found = _settings.whole(tx, params)
        except (ValueError, TypeError, KeyError):
            # A mask of other parameters.
            found = _settings._describe(tx, -_settings.DEEPEST)
        return json.loads(json.dumps(found))

    made = [partial(build, value) for build, values in kinds for value in values]
    params, sums = jnp.ones(20), []
    for make in made:
        tx = make()
        sums.append(whole(tx))
        if len(sums) in (1, 7):
            tx.update(params, tx.init(params), params)
        assert whole(tx) == whole(make()) == sums[-1]
    assert len({json.dumps(x, sort_keys=True) for x in sums}) == len(made)
