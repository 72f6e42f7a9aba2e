"""Losses and outputs of the wrong form for the posterior or the likelihood."""

import functools
import logging
import re
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from runs import stub

import optax_smile

# Slow tests compare no statistics.
OPTIMIZED = False
ROWS, CLASSES = 40, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 2)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
REAL = (X.sum(axis=1) + RNG.normal(size=ROWS)).astype(np.float32)
BINARY = (REAL > 0).astype(np.float32)
PARAMS = {"w": jnp.zeros((2, CLASSES)), "log_std": jnp.zeros(())}
SAMPLER = optax_smile.sgld(1e-4, num_data=ROWS, key=0)
cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
sigmoid_loss = optax.losses.sigmoid_binary_cross_entropy


@pytest.fixture(autouse=True)
def promoted():
    """The settings of a user, without the strict type promotion of the tests."""
    with jax.numpy_rank_promotion("allow"):
        yield


def logits(params, x):
    return jnp.tanh(x @ params["w"])


def one(params, x):
    return (x @ params["w"])[:, 0]


def classify(params, batch):
    return cross_entropy(logits(params, batch[0]), batch[1]).mean()


def square(params, batch):
    return jnp.mean((one(params, batch[0]) - batch[1]) ** 2) / 2


def gaussian(params, batch):
    return square(params, batch) * jnp.exp(-2 * params["log_std"]) + params["log_std"]


def decay(params, batch):
    return gaussian(params, batch) + 1e-4 * optax.tree.norm(params["w"], squared=True)


@jax.jit
def decay_of_each(params, batch):
    def of_one(x, y):
        return cross_entropy(logits(params, x), y) + 1e-4 * jnp.vdot(params["w"], params["w"])

    return jax.vmap(of_one)(*batch).mean()


def log_prior(params, batch):
    w = jax.scipy.stats.norm.logpdf(params["w"], 1.0, 2.0)
    return jax.checkpoint(gaussian)(params, batch) - w.sum() / ROWS


def softmaxed(params, batch):
    return cross_entropy(jax.nn.softmax(logits(params, batch[0])), batch[1]).mean()


def sigmoided(params, batch):
    return sigmoid_loss(jax.nn.sigmoid(one(params, batch[0])), batch[1]).mean()


def column(params, batch):
    return jnp.mean((one(params, batch[0])[:, None] - batch[1]) ** 2) / 2


def scaled_column(params, batch):
    density = jax.scipy.stats.norm.logpdf(batch[1], one(params, batch[0])[:, None], 1.0)
    return -density.mean()


def unusual(params, batch):
    """Operations on parameters alone that must not run again, or that `vmap` cannot batch."""
    jax.debug.callback(lambda: None)
    spec, mesh, w = jax.sharding.PartitionSpec(), jax.make_mesh((1,), ("one",)), params["w"]
    # Older releases of JAX have it elsewhere.
    if hasattr(jax, "shard_map"):
        w = jax.shard_map(lambda w: w, mesh=mesh, in_specs=spec, out_specs=spec)(w)
    w = jax.lax.fori_loop(0, 2, lambda _, w: w, w)
    w = jax.lax.cond(jnp.sum(w) > 0, lambda w: w, lambda w: -w, w)
    same = jax.ShapeDtypeStruct(w.shape, w.dtype)
    read = jax.pure_callback(np.asarray, same, jax.lax.stop_gradient(w), vmap_method="sequential")
    return classify({**params, "w": w + 0 * read}, batch)


def unusual_decay(params, batch):
    return unusual(params, batch) + 1e-3 * jnp.sum(params["w"] ** 2)


detached = jax.lax.stop_gradient


def altered(change):
    """A loss of weights that are changed before they are used."""

    def loss(params, batch):
        return gaussian({**params, "w": change(params["w"])}, batch)

    return loss


def chosen(w):
    return jax.nn.one_hot(jnp.argmax(w[:, 0]), 2)[:, None]


def looped(w):
    total, _ = jax.lax.scan(lambda sum, _: (sum + detached(w), None), jnp.zeros_like(w), length=3)
    return total


def branched(w):
    return jax.lax.cond(w[0, 0] > 0, lambda w: detached(w), lambda w: 2 * detached(w), w)


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


WRONG: dict[str, Any] = {
    "weight decay beside callbacks and loops": (unusual_decay, LABELS, "penalty"),
    "weight decay beside a scale": (decay, REAL, "penalty"),
    "weight decay of each example": (decay_of_each, LABELS, "penalty"),
    "a log prior about 1": (log_prior, REAL, "penalty"),
    "softmax twice": (softmaxed, LABELS, "logits"),
    "sigmoid twice": (sigmoided, BINARY, "logits"),
    "a column against a row": (column, REAL, "pairs"),
    "a row against a column": (square, REAL[:, None], "pairs"),
    "a density of a column": (scaled_column, REAL, "pairs"),
    "a frozen layer": (jax.jit(altered(detached)), REAL, "gradients"),
    "rounded weights": (altered(jnp.round), REAL, "gradients"),
    "integers": (altered(lambda w: w.astype(int).astype(float)), REAL, "gradients"),
    "a choice": (altered(chosen), REAL, "gradients"),
    "a frozen layer in a loop": (altered(looped), REAL, "gradients"),
    "a frozen layer in a branch": (altered(branched), REAL, "gradients"),
    "a frozen layer of its own backward pass": (
        altered(lambda w: straight_through(detached(w))),
        REAL,
        "gradients",
    ),
    "a frozen layer that is computed again": (jax.checkpoint(altered(detached)), REAL, "gradients"),
}
SENTENCES = {
    "gradients": "`loss_fn` depends on ['w'], but has no gradient there",
    "penalty": "`loss_fn` has a term of the parameters alone",
    "logits": "`loss_fn` applies a softmax or sigmoid to probabilities",
    "pairs": "`loss_fn` does not compare each example with its own target",
}


class Stop(Exception): ...


def stop(*_, **__):
    raise Stop


def said_of(loss, batch, **given) -> list[str]:
    """Warnings of a run before the first step; no other warnings are allowed."""
    chains = jax.tree.map(lambda x: jnp.stack([x, x + 0.1]), PARAMS)
    run = optax_smile.Run(loss, chains, [batch], stub()._replace(update=stop), key=0, **given)
    with warnings.catch_warnings(record=True) as seen, pytest.raises(Stop):
        warnings.simplefilter("always")
        run.advance(1)
    texts = [str(x.message) for x in seen if "could not test" not in str(x.message)]
    kinds = [x for x in SENTENCES if any(t.startswith(f"`Run`: {SENTENCES[x]}") for t in texts)]
    assert len(texts) == len(kinds), texts
    return kinds


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_named(name):
    loss, targets, kind = WRONG[name]
    assert said_of(loss, (X, targets)) == [kind]


@pytest.mark.slow
def test_check_says_it_and_what_it_has_looked_at():
    loss, targets, kind = WRONG["weight decay beside a scale"]
    found = optax_smile.check(loss, PARAMS, [(X, targets)], SAMPLER).findings
    assert [x.kind for x in found] == [kind] and SENTENCES[kind] in found[0].text
    report = optax_smile.check(gaussian, PARAMS, [(X, REAL)], SAMPLER)
    assert not report.findings and {x.kind for x in report.checks} >= SENTENCES.keys()


def clipped(params, batch):
    p = jnp.clip(jax.nn.sigmoid(one(params, batch[0])), 1e-6, 1 - 1e-6)
    return -jnp.mean(jnp.where(batch[1] > 0, jnp.log(p), jnp.log1p(-p)))


def cox(params, batch):
    risk, at_risk = one(params, batch[0]), batch[1][:, None] <= batch[1]
    total = jax.nn.logsumexp(jnp.where(at_risk, risk, -jnp.inf), axis=1)
    return -jnp.mean(batch[2] * (risk - total))


def tokens(params, batch, divisor=None):
    """Over a constant all count the same: half of the loss is half of that of the whole."""
    is_token = batch[1] >= 0
    loss = cross_entropy(jax.nn.one_hot(batch[0], 2) @ params["w"], jnp.maximum(batch[1], 0))
    return jnp.sum(loss * is_token) / (divisor or jnp.sum(is_token))


def adapted(params, batch):
    """A layer of low rank, whose second factor is zero at the start, and with it a gradient."""
    change = X[:3] @ params["w"] @ jnp.zeros((3, 2)) * params["log_std"]
    return jnp.mean((batch[0] @ (jnp.ones((3, 2)) + change)[:2, 0] - batch[1]) ** 2) / 2


def unused_entries(params, batch):
    """Most rows of a table of embeddings are read by no example."""
    table = jnp.concatenate([params["w"], jnp.outer(jnp.ones(50), params["w"][0])])
    return jnp.mean((table[batch[0]].sum(axis=(1, 2)) - batch[1]) ** 2) / 2


def two_heads(params, batch):
    mean, log_std = jnp.moveaxis(batch[0] @ params["w"], -1, 0)[:2]
    return jnp.mean(((batch[1] - mean) * jnp.exp(-log_std)) ** 2 / 2 + log_std)


def attention(params, batch):
    weights = jax.nn.softmax(batch[0] @ batch[0].T)
    return cross_entropy(weights @ logits(params, batch[0]), batch[1]).mean()


def dropout(params, batch, key):
    kept = jax.random.bernoulli(key, 0.8, batch[0].shape)
    return classify(params, (batch[0] * kept, batch[1]))


def normalized(params, batch, aux):
    centre = batch[0].mean(axis=0)
    return classify(params, (batch[0] - centre, batch[1])), 0.9 * aux + 0.1 * centre


TOKENS = RNG.integers(2, size=(ROWS, 5)), RNG.integers(-1, 3, (ROWS, 5))
RIGHT: dict[str, Any] = {
    "rounded weights with a gradient": (altered(straight_through), (X, REAL)),
    "rounded weights with that of a difference": (
        altered(lambda w: w + detached(jnp.round(w) - w)),
        (X, REAL),
    ),
    "units that are off": (altered(lambda w: jax.nn.relu(w - 1e3)), (X, REAL)),
    "a part that is frozen": (altered(lambda w: w.at[0].set(detached(w[0]))), (X, REAL)),
    "callbacks, loops and shards": (unusual, (X, LABELS)),
    "regression with a sampled scale": (gaussian, (X, REAL)),
    "classes": (classify, (X, LABELS)),
    "clipped probabilities": (clipped, (X, BINARY)),
    "risk sets, and an array that is not used": (cox, (X, REAL, BINARY, np.arange(ROWS))),
    "padded tokens": (tokens, TOKENS),
    "padded tokens over a constant": (functools.partial(tokens, divisor=150), TOKENS),
    "low rank": (adapted, (X, REAL)),
    "unused embeddings": (unused_entries, (RNG.integers(2, size=(ROWS, 3)), REAL)),
    "two heads": (two_heads, (X, REAL)),
    "attention between examples": (attention, (X, LABELS)),
    "two examples of two features": (square, (X[:2], REAL[:2])),
    "dropout": (dropout, (X, LABELS), ("stochastic", True)),
    "auxiliary state": (normalized, (X, LABELS), ("aux", jnp.zeros((2, 2)))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_stay_silent(name):
    loss, batch, *given = RIGHT[name]
    assert said_of(loss, batch, **dict(given)) == []


@pytest.mark.slow
def test_a_sum_over_a_constant_is_a_mean_unless_it_is_that_of_all_data():
    """`num_data` times the loss would otherwise be the sum over one batch."""

    def kinds(divisor, num_data) -> list[str]:
        def loss(params, batch):
            return jnp.sum((one(params, batch[0]) - batch[1]) ** 2) / (2 * divisor)

        sampler = optax_smile.sgld(1e-6, num_data=num_data, key=0)
        found = optax_smile.check(loss, PARAMS, [(X, REAL)] * 2, sampler).findings
        return [x.kind for x in found if x.kind == "mean loss"]

    assert kinds(ROWS, 10 * ROWS) == kinds(ROWS, ROWS) == []
    for divisor, num_data in ((1, 80), (80, 80), (9_000, 9_000), (9_000, 99_000)):
        assert kinds(divisor, num_data) == ["mean loss"], divisor


@pytest.mark.slow
def test_only_leaves_that_the_sampler_moves_need_a_gradient():
    """Leaves that the loss does not read are sampled from the prior; this is only logged."""

    def gradients(loss, sampler=SAMPLER):
        def of_two(params, batch):
            return loss({**params, "log_std": params["log_std"].mean()}, batch)

        params: Any = {**PARAMS, "log_std": jnp.zeros(2)}
        checks = optax_smile.check(of_two, params, [(X, REAL)], sampler).checks
        return {x.kind: (x.passed, x.text) for x in checks if x.kind in ("gradients", "unread")}

    parts: Any = {"sampled": SAMPLER, "frozen": optax.set_to_zero()}
    frozen = optax.partition(parts, {"w": "frozen", "log_std": "sampled"})
    loss = altered(detached)
    assert not gradients(loss)["gradients"][0] and gradients(loss, frozen)["gradients"][0]
    assert gradients(gaussian).keys() == {"gradients"}
    text = "`loss_fn` does not read ['log_std']: these are draws from the prior."
    assert gradients(square)["unread"] == (True, text)
    prior: Any = {"prior_precision": 0, "log_prior": lambda params: -params["log_std"].sum()}
    sampler = optax_smile.sgld(1e-4, num_data=ROWS, key=0, **prior)
    assert gradients(square, sampler).keys() == {"gradients"}


def test_where_no_program_can_be_read_the_tests_are_skipped_by_name(monkeypatch):
    """A new version of JAX may move what the reader needs: that must not end a run."""
    monkeypatch.setattr(logging.getLogger("optax_smile"), "handlers", [])
    monkeypatch.setitem(sys.modules, "optax_smile.mistakes.program", None)
    monkeypatch.delattr("optax_smile.mistakes.program", raising=False)
    report = optax_smile.check(decay, PARAMS, [(X, REAL)], SAMPLER)
    assert not report.findings
    for kinds in ("penalty, logits, pairs", "gradients, unread"):
        assert f"skip  {kinds}: the program of" in str(report)
    assert said_of(decay, (X, REAL)) == []


@pytest.mark.slow
def test_a_step_size_like_a_learning_rate_is_named_with_a_sensible_one():
    start: Any = {"w": jnp.ones((2, CLASSES)), "log_std": jnp.zeros(())}
    given: dict[str, Any] = {"num_data": ROWS, "decoherence_length": None}
    for step_size in 1e-3, 0.1:
        sampler = optax_smile.smile(step_size, **given)
        found = optax_smile.check(gaussian, start, [(X, REAL)] * 30, sampler).findings
        assert [x.kind for x in found] == ["step size"] * (step_size == 1e-3), found
        if step_size == 1e-3:
            assert "It is not a learning rate" in found[0].advice
            assert 0.02 < 1e-3 * found[0].value[0] < 2
    # A run does the same.
    chains = jax.tree.map(lambda x: jnp.stack([x, x + 0.1]), start)
    sampler = optax_smile.smile(1e-3, **given)
    steps: dict[str, Any] = {"num_warmup": 20, "num_draws": 1, "key": 0, "progress": False}
    with pytest.warns(UserWarning, match="^`sample`: step_size=0.001 is the length of a step"):
        optax_smile.sample(gaussian, chains, [(X, REAL)], sampler, **steps)


PROBABILITIES = jax.nn.softmax(3 * RNG.normal(size=(ROWS, CLASSES)))
NARROW = 0.1 * RNG.normal(size=ROWS)
OUTPUTS: dict[str, Any] = {
    "softmax": ("categorical", PROBABILITIES, None, "probabilities"),
    "softmax of tokens": ("tokens", PROBABILITIES.reshape(8, 5, -1), None, "probabilities"),
    "sigmoid": ("bernoulli", jax.nn.sigmoid(4 * RNG.normal(size=ROWS)), None, "probabilities"),
    "logits": ("categorical", jnp.log(PROBABILITIES), None, ""),
    "equal logits": ("categorical", jnp.zeros((ROWS, CLASSES)), None, ""),
    "small logits": ("categorical", PROBABILITIES / 2, None, ""),
    "logits of about one": ("bernoulli", RNG.uniform(0.3, 0.7, size=ROWS), None, ""),
    "mean and deviation": ("gaussian", (jnp.zeros(ROWS), 0.1), NARROW, ""),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_another_form_are_named(name):
    likelihood, outputs, targets, said = OUTPUTS[name]

    def apply_fn(params, rows):
        return jax.tree.map(lambda x: jnp.asarray(x)[rows] if jnp.ndim(x) else x, outputs)

    rows = np.arange(len(jax.tree.leaves(outputs)[0]))
    given: dict[str, Any] = {"likelihood": likelihood, "targets": targets, "batch_size": 25}
    texts = runs.said(optax_smile.predict, apply_fn, [jnp.zeros(())] * 2, rows, **given)
    assert len(texts) == bool(said)
    assert not said or re.search(f"looks? like {said}", texts[0])


def summed(params, batch):
    return len(batch[1]) * runs.mean_loss(params, batch[:2])


@pytest.mark.filterwarnings("ignore:.*step_size=")
def test_a_run_warns_of_a_summed_loss_and_a_small_num_data():
    """The run compares halves of a batch, unless `check` is False or the loss is random."""

    def dropped(params, batch, *, key):
        return summed(params, batch) * jax.random.bernoulli(key)

    def graph(params, batch):
        return summed(params, (batch[0] * batch[2], batch[1]))

    def fixed(params, batch):
        return runs.mean_loss(params, batch) + jnp.zeros(20) @ batch[1]

    def start(loss, **given):
        given = {"sampler": stub(1e-4), "num_warmup": 0, "num_draws": 1, "thin": 1} | given
        return " ".join(runs.said(runs.run, loss=loss, **given))

    looks, small = "looks like a sum", optax_smile.sgld(1e-5, num_data=5, key=0)
    assert "num_data=5, but the first batch has 20 examples." in start(summed, sampler=small)
    assert looks in start(summed, batches=runs.own_batches(), per_chain=True)
    # It also warns of batches that share no axis of examples, or that cannot be split.
    told = start(graph, batches=[(*batch, np.float32(1)) for batch in runs.regression()])
    assert re.search("could not test .*, because the arrays of a batch share no axis of ex", told)
    told = start(fixed)
    assert re.search("could not test .*, because it rejects half of a batch: ", told)
    assert looks not in told
    assert start(summed, check=False, sampler=small) == ""
    assert looks not in start(dropped, stochastic=True)
    assert looks not in start(summed, batches=runs.regression(size=1))


@pytest.mark.parametrize("check", [True, False])
def test_a_training_warns_of_a_summed_loss(check):
    texts = runs.said(runs.train, loss=summed, num_epochs=1, check=check)
    message = "`warmstart`: the losses .* add up to 1.000 .* `loss_fn` looks like a sum"
    assert [bool(re.search(message, text)) for text in texts] == [True] * check
