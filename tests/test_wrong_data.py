"""Data that would silently change the posterior: they lead to warnings or errors."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from runs import Tensor, refused

import optax_smile
from optax_smile import diagnostics

NUM_DATA, SIZE = 140, 2


def mean_loss(w, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) / 2


def data() -> tuple[np.ndarray, np.ndarray]:
    """The last ten examples are of another line, so that their weight shows."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_DATA, SIZE)).astype(np.float32)
    line = np.where(np.arange(NUM_DATA)[:, None] < NUM_DATA - 10, 1.0, -3.0)
    y = (x * line).sum(axis=1) + generator.normal(size=NUM_DATA)
    return x, y.astype(np.float32)


def split(*sizes: int) -> list[Any]:
    x, y = data()
    ends = np.cumsum((0, *sizes))
    return [(x[a:b], y[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


EQUAL = split(*[20] * 7)
SAMPLER, STUB = optax_smile.sgld(5e-4, num_data=NUM_DATA, key=0), runs.stub(0.01)
TWO = runs.quiet(integrator="minimal_norm")


def sample(batches, sampler=SAMPLER, **given):
    start = jnp.asarray(np.linalg.lstsq(*data())[0] + np.array([[0.0], [0.1]]), jnp.float32)
    steps: dict[str, Any] = {"num_warmup": 100, "num_draws": 60, "thin": 2, "key": 0}
    steps |= {"progress": False, **given}
    return optax_smile.sample(mean_loss, start, batches, sampler, **steps)


def check(batches, sampler=SAMPLER, **given):
    return optax_smile.check(mean_loss, jnp.ones(SIZE), batches, sampler, **given)


def found(report) -> dict[str, Any]:
    return {finding.kind: finding for finding in report.findings}


class Stop(Exception): ...


def told(batches, num_data: float = NUM_DATA, **given) -> list[str]:
    """Warnings of a run about its batches before it calls the loss."""

    def loss(w, batch):
        raise Stop

    sampler = optax_smile.sgld(1e-6, num_data=num_data, key=0)
    with warnings.catch_warnings(record=True) as seen, pytest.raises(Stop):
        warnings.simplefilter("always")
        optax_smile.Run(loss, jnp.ones((2, SIZE)), batches, sampler, key=0, **given).advance(1)
    return [str(x.message) for x in seen]


def sized(*sizes: int, axis: int = 0) -> list[Any]:
    return [{"x": np.ones((2,) * axis + (size, 2)), "step": np.ones((2,) * axis)} for size in sizes]


UNEQUAL = split(130, 10)


class TestSizes:
    def test_unequal_batches_are_told_once_before_the_first_step(self):
        """They would weight the last ten examples thirteen times as much."""
        sizes = r"^`sample`: batches have different sizes: 1 of 130, 1 of 10 examples"
        given = {"num_warmup": 0, "num_draws": 4, "steps_per_dispatch": 2}
        for batches in (UNEQUAL, iter(UNEQUAL * 200)):
            with pytest.warns(UserWarning, match=f"{sizes}.*Drop the smaller") as seen:
                sample(batches, STUB, **given)
            assert len(seen) == 1
        sample(UNEQUAL, STUB, check=False, **given)
        with pytest.warns(UserWarning, match="different sizes"):
            optax_smile.Run(mean_loss, jnp.eye(2, SIZE), UNEQUAL, STUB, key=0)
        (finding,) = check(UNEQUAL).findings
        assert finding.kind == "batch sizes" and finding.value == (10, 130)

    def test_what_is_no_number_of_examples_does_not_count(self):
        """Scalars, graphs whose arrays disagree, and the axis of the chains."""
        graph = {"nodes": np.ones((5, 2)), "edges": np.ones((9, 2)), "count": 3}
        assert not told([graph, {**graph, "nodes": np.ones((50, 2))}])
        assert not told(split(21, 21, 20)) and "2 of 20, 1 of 3 ex" in told(split(20, 20, 3))[0]
        for given in ({}, {"per_chain": True}):
            (text,) = told(sized(9, 5, axis=len(given)), num_data=14, **given)
            assert "different sizes: 1 of 9, 1 of 5 examples" in text


def spoilt(number: int, rows: slice, what: float = np.nan) -> list[Any]:
    batches = list(EQUAL)
    x, y = batches[number]
    batches[number] = x, np.concatenate([y[: rows.start], y[rows] + what, y[rows.stop :]])
    return batches


class TestFinite:
    def test_rows_that_are_not_are_told_at_the_end_and_by_the_summary(self):
        broken = spoilt(3, slice(2, 4))
        text = r"^`sample`: 31 of 220 losses .* of a chain were not finite \(14\.09%\).*Are the bat"
        with pytest.warns(UserWarning, match=text):
            draws = sample(broken, num_draws=6, thin=20, steps_per_dispatch=20)
        advice = found(diagnostics.summary(draws))
        assert "are all batches finite" in advice["not finite"].advice and "diverged" not in advice
        finding = found(check(broken))["non-finite gradients"]
        assert "batches [3]" in finding.text

    def test_gradients_have_to_be_at_the_start(self):
        def loss(w, batch):
            """Finite, with a gradient that is not."""
            return mean_loss(w, batch) + jnp.sqrt(jnp.abs(w - w)).sum()

        rule = r"start at which the gradients of every chain are finite, got nan .*\[0, 1\]"
        start = jnp.ones((2, SIZE)) + jnp.arange(2)[:, None]
        given = {"num_warmup": 5, "num_draws": 2, "key": 0, "progress": False}
        refused(rule, optax_smile.sample, loss, start, EQUAL, STUB, **given)

    def test_a_batch_that_does_not_fit_is_named_and_ends_the_run(self):
        """In a stream it ends the run after 12 draws; in a list it is found before any step."""
        x, y = EQUAL[0]
        empty, narrow = (x[:0], y[:0]), (x[:, :1], y)
        given: dict[str, Any] = {"sampler": STUB, "num_warmup": 2, "thin": 1}
        early = "ended early with 12 of 60 draws per chain: batch 15 of pass 1"
        for reason, bad in (
            ("is empty", empty),
            (r"has the structure PyTreeDef\(None\), not PyTreeDef\(\(\*, \*\)\) as the fi", None),
            ("has an array of dtype object", (np.array([None] * 4), y)),
        ):
            with pytest.warns(UserWarning, match=f"{early} {reason}"):
                assert sample(iter([*EQUAL, *EQUAL, bad]), **given).num_draws == 12
            refused(rf"batches\[7\], which {reason}", sample, [*EQUAL, bad], STUB)
        # Only the loss knows the shapes that it takes.
        rows = [*EQUAL, *EQUAL, narrow]
        for batches in (iter(rows), rows):
            with pytest.warns(UserWarning, match=f"{early} does not fit"):
                assert sample(batches, **given).num_draws == 12
        rows = iter([*EQUAL, *EQUAL, empty])
        refused("got one whose batch 15 of pass 1 is empty", sample, rows, STUB)
        finding = found(check([*EQUAL, empty]))["empty batches"]
        assert finding.value == (7,) and "batches [7]" in finding.text


def tokens(dtype: Any = np.int32) -> list[Any]:
    return [(np.ones((20, 50), dtype), np.ones((20, 50), dtype))] * 7


COUNTS: list[tuple[list[Any], int, bool]] = [
    (EQUAL, 140, True),
    (EQUAL, 1_000, True),
    # The size of a batch.
    (EQUAL, 20, False),
    (EQUAL, 21, True),
    (EQUAL, 1_400, False),
    # The number of the batches, and as many examples as there are batches.
    (split(*[4] * 10), 10, False),
    (split(10) * 10, 10, True),
    (split(*[1] * 10), 10, True),
    # A list may hold many passes; of another one this is the number of batches.
    (EQUAL * 20, 140, True),
    ([(x + i, y) for i in range(20) for x, y in EQUAL], 140, False),
    (tokens(), 7_000, True),
    (tokens(), 6_000, True),
    (tokens(np.uint8), 7_000, True),
    (tokens(), 70_000, False),
    # An image is no sequence.
    ([(np.ones((20, 8, 8), np.uint8),)] * 7, 9_000, False),
]


def test_a_number_of_data_far_from_that_of_the_batches_is_told():
    """It is of tokens or examples."""
    for number, (batches, num_data, passed) in enumerate(COUNTS):
        texts = told(batches, num_data)
        assert [text[:16] for text in texts] == ["`Run`: num_data="] * (not passed), number
    assert "num_data=1400, but the batches have 140 examples." in told(EQUAL, 1_400)[0]
    wrong = optax_smile.sgld(1e-6, num_data=1_400, key=0)
    assert found(check(EQUAL, wrong)).keys() == {"num_data"}
    # The number of examples of one batch is not known.
    assert not check(EQUAL[0], wrong).findings


def of_tokens(table, batch):
    logits = table[batch[:, :-1]]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return loss.mean(axis=1).mean()


def of_labelled(table, batch):
    """The division of a mean over positions is not that of the loss."""
    logits = (table[batch] - batch.mean(axis=1)[:, None, None]).mean(axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 0]).mean()


def padded(lengths, width=20) -> np.ndarray:
    """Sequences of real numbers of some lengths; the rest is missing."""
    series = np.random.default_rng(0).normal(size=(len(lengths), width)).astype(np.float32)
    series[np.arange(width) >= np.array(lengths)[:, None]] = np.nan
    return series


def over_all(w, batch):
    return jnp.mean((batch - w[None]) ** 2) / 2


def over_known(w, batch):
    known = ~jnp.isnan(batch)
    return jnp.sum(jnp.where(known, (batch - w[None]) ** 2, 0)) / (2 * jnp.sum(known))


def over_known_where(w, batch):
    return jnp.mean(jnp.nan_to_num((batch - w[None]) ** 2), where=~jnp.isnan(batch))


@jax.jit
def over_all_weighted(w, batch):
    """Divided by a constant, all terms count the same."""
    return jnp.sum(jnp.nan_to_num((batch - w[None]) ** 2)) / 200


def over_sequences(w, batch):
    known = ~jnp.isnan(batch)
    each = jnp.sum(jnp.where(known, (batch - w[None]) ** 2, 0), axis=1) / jnp.sum(known, axis=1)
    return jnp.mean(each)


def of_pairs(w, batch):
    """The two columns are indices of users and items."""
    ids, y = batch
    return jnp.mean((jnp.sum(w[ids[:, 0]] * w[ids[:, 1]], axis=1) - y) ** 2) / 2


IDS = np.random.default_rng(0).integers(7, size=(7, 20, 2)), np.zeros((7, 20), np.float32)
RATINGS = list(zip(*IDS, strict=True))
TEXTS = list(np.random.default_rng(0).integers(5, size=(5, 8, 20)))
PAIRS, TABLE, SERIES = jnp.ones((7, 3)), jnp.eye(5), jnp.ones(20)
FULL, EVEN = [padded([20] * 20)] * 9, [padded([10] * 20)] * 3 + [padded([9, 11] * 10)]
UNEVEN = [padded([2] * 20), padded([18] * 20)]
# Loss, parameters, batches, right values of `num_data`, a wrong one, and what is said of it.
TERMS: dict[str, tuple[Any, Any, Any, tuple[int, ...], int, str]] = {
    "tokens": (of_tokens, TABLE, TEXTS, (760, 200), 40, "the first batch has 152 tokens"),
    "labelled texts": (of_labelled, TABLE, TEXTS, (40,), 760, "the batches have 40 examples"),
    "index columns": (of_pairs, PAIRS, RATINGS, (140,), 14, "num_data=14, but the f"),
    "series": (over_all, SERIES, FULL, (180, 3_600), 99_000, "the batches have 180 e"),
    "known entries": (over_known, SERIES, EVEN, (800, 700), 80, "the first batch has 200 tokens"),
    "a mean where": (over_known_where, SERIES, EVEN, (800,), 8_100, "the batches have 800 tok"),
    "unequal numbers": (over_known, SERIES, UNEVEN, (), 400, "the batch, which is 40 to 360"),
    "unequal means": (over_known_where, SERIES, UNEVEN, (), 400, "by their mean, 200."),
    "a constant": (over_all_weighted, SERIES, UNEVEN, (400, 40), 9, "the first batch has 20 e"),
    "sequences": (over_sequences, SERIES, UNEVEN, (40,), 4_000, "the batches have 40 examples"),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_a_mean_are_those_of_the_program(name):
    """Other integer arrays are not counted: a correct `num_data` gives no warning."""
    loss, params, batches, right, wrong, said = TERMS[name]
    for num_data in (*right, wrong):
        sampler = optax_smile.sgld(1e-6, num_data=num_data, key=0)
        report = optax_smile.check(loss, params, batches, sampler)
        kinds = "num_data", "batch terms"
        texts = [f"{x.text} {x.advice}" for x in report.findings if x.kind in kinds]
        assert len(texts) == (num_data == wrong) and (not texts or said in texts[0])


def test_a_run_says_it_too():
    sampler = optax_smile.sgld(1e-6, num_data=152, key=0)
    with pytest.warns(UserWarning, match="^`Run`: num_data=152 is the size of a batch, .*760 tok"):
        optax_smile.Run(of_tokens, jnp.stack([TABLE] * 2), TEXTS, sampler, key=0).advance(1)


def harmless() -> dict[str, Any]:
    rows = np.random.default_rng(1).permutation(NUM_DATA).reshape(7, 20)
    x, y = data()
    shuffled = [(x[of], y[of]) for of in rows]
    return {
        "list": EQUAL,
        "tuple": tuple(EQUAL),
        "several passes": EQUAL + shuffled,
        "full batch": [data()],
        "nearly equal": split(*[21] * 6, 14)[:6] + [(x[:20], y[:20])],
        "sequences": [np.ones((20, length), int) for length in (5, 6)],
        "one array": [x[:70], x[70:]],
        "one device": [jax.device_put(batch) for batch in EQUAL],
        "loader": Loader(EQUAL),
        "float16": [(x.astype(np.float16), y) for x, y in EQUAL],
        "tensors": Loader([tuple(map(Tensor, batch)) for batch in EQUAL]),
        "list of tensors": [tuple(map(Tensor, batch)) for batch in EQUAL],
        "byte order": [(x.astype(">f4"), y.astype(">f8")) for x, y in EQUAL],
    }


class Broken(Tensor):
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("on another device")


class Loader:
    """Batches in another order in each pass."""

    def __init__(self, batches):
        self.batches, self.generator = batches, np.random.default_rng(0)

    def __iter__(self):
        return iter([self.batches[i] for i in self.generator.permutation(len(self.batches))])


@pytest.mark.parametrize("name", harmless())
def test_of_harmless_data_nothing_is_told(name):
    """Warnings are errors."""
    batches = harmless()[name]
    if isinstance(batches, list | tuple):
        assert not told(batches, 40 if name == "sequences" else NUM_DATA)
    if name in ("tuple", "loader", "float16", "list of tensors", "byte order"):
        sample(batches, STUB, num_warmup=2, num_draws=6, thin=4)
    if name in ("list", "tensors"):
        assert not check(batches).findings


NOT_NUMERIC: dict[str, Any] = {
    "an array of dtype object": np.array([None] * 20),
    "an array of dtype datetime64": np.zeros(20, "datetime64[s]"),
    "an array with masked entries": np.ma.masked_array(np.ones(20), np.eye(20)[0]),
    "a Tensor of dtype object": Tensor(np.array([None] * 20)),
    r"an array with 4294967296 \(beyond int32\) at .*Map identifiers": np.full(20, 2**32),
    r"a Broken \(RuntimeError: on another device\)": Broken(np.ones(20)),
}


@pytest.mark.parametrize("got", NOT_NUMERIC)
def test_what_is_no_number_is_named(got):
    bad = EQUAL[0][0], NOT_NUMERIC[got]
    refused(rf"^`sample\(batches.* {got}", sample, [bad], STUB)
    for batches in ([EQUAL[0], bad], bad):
        refused(rf"^`check\(batch=.* {got}", check, batches)


def test_every_function_names_its_own_argument():
    bad = EQUAL[0][0], np.full(20, "a")
    select: Any = functools.partial(
        optax_smile.select, mean_loss, jnp.ones((2, SIZE)), EQUAL, {"a": STUB},
        lambda w, x: (x @ w, 0.0), likelihood="gaussian", num_warmup=0, num_draws=1, key=0,
    )  # fmt: skip
    for argument, call in {
        r"sample\(batches": lambda: sample(Loader([bad]), STUB),
        r"warmstart\(batches": lambda: runs.train(batches=Loader([bad])),
        r"warmstart\(validation": lambda: runs.train(validation=bad),
        r"select\(validation": lambda: select(validation=bad),
    }.items():
        refused(f"^`{argument}.* an array of dtype <U1", call)
    refused(r"^`sample\(batches.* 4294967296 .*enable 64 bits", sample, [(*EQUAL[0], 2**32)], STUB)


@pytest.mark.parametrize("sampler", [SAMPLER, TWO], ids=["sgld", "two gradients"])
def test_parameters_that_are_not_finite_are_no_draw(sampler):
    """Unless they are not known, in a compiled function, or none of the sampler's."""
    start: Any = {"w": jnp.ones(SIZE), "other": jnp.full(2, jnp.nan)}
    parts: Any = {"on": sampler, "off": optax.set_to_zero()}
    tx = optax.partition(parts, {"w": "on", "other": "off"})
    updates, state = jax.jit(tx.update)(start, tx.init(start), start)
    params: Any = optax.apply_updates(start, updates)
    assert np.isfinite(optax_smile.last_accepted(state, params)["w"]).all()
    broken = {**params, "w": params["w"].at[0].set(jnp.nan)}
    rule = r"`last_accepted\(params=...\)` must be finite, got nan"
    refused(rule, optax_smile.last_accepted, state, broken)
    jax.jit(optax_smile.last_accepted)(state, broken)


class TestCheck:
    def test_finds_batches_that_always_get_the_same_weight(self):
        assert found(check(EQUAL[:6], TWO)).keys() == {"two gradients"}
        for batches in (EQUAL, iter(EQUAL[:6])):
            assert not check(batches, TWO).findings
        assert not check(EQUAL[:6]).findings

    def test_finds_what_surrounds_the_sampler_and_says_it(self):
        def summed(w, batch):
            return len(batch[1]) * mean_loss(w, batch)

        tx = optax.chain(optax.scale_by_learning_rate(1e-3), SAMPLER)
        report = optax_smile.check(summed, jnp.ones(SIZE), EQUAL[0], tx)
        assert [x.kind for x in report.findings] == ["mean loss", "before the sampler"]
        assert "multiplied by -0.001" in str(report)
        finding = found(check(EQUAL, optax.chain(SAMPLER, optax.scale(-1.0))))["after the sampler"]
        assert finding.advice.startswith("Remove what comes after the sampler")

    def test_finds_chains_that_share_a_key(self):
        params = jnp.ones((3, SIZE)) * jnp.arange(1.0, 4)[:, None]
        shared = jax.vmap(SAMPLER.init)(params)
        run = functools.partial(optax_smile.check, mean_loss, params, EQUAL, SAMPLER)
        (finding,) = run(state=shared).findings
        assert finding.kind == "random numbers" and finding.chains == (1, 2)
        own = optax_smile.parallel.init(SAMPLER, params, key=1)
        assert not run(state=own).findings
