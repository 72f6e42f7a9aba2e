"""Text forms of draws, predictions and summaries, and the order of draws."""

import dataclasses
import inspect
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import refused, run, stub
from test_imports import public_objects

import optax_smile
from optax_smile import diagnostics

CHAINS, DRAWS = 3, 4
ALL = CHAINS * DRAWS
# In a notebook nobody may read <b> in a name as a tag.
PARAMS = {"<b>": np.arange(2.0 * ALL, dtype=np.float32).reshape(CHAINS, DRAWS, 2)}
KEPT = optax_smile.Snapshots(
    PARAMS, {"step_size": np.ones((CHAINS, 9))}, {"name": "sgld", "num_data": 7, "tuner": None}
)
# Tree i is draw i // CHAINS of chain i % CHAINS, whose first entry counts through `PARAMS`.
IN_ORDER = [2.0 * (chain * DRAWS + draw) for draw in range(DRAWS) for chain in range(CHAINS)]


def loss_fn(params, batch):
    return -jnp.sum(params["<b>"]) + 0 * jnp.sum(batch)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run in which every step adds 2."""
    start, steps = {"<b>": PARAMS["<b>"][:, 0] - 2}, {"num_warmup": 0, "thin": 1, "check": False}
    given: Any = tmp_path_factory.mktemp("run"), loss_fn, start, stub(2.0, noise=0)
    return run(*given, batches=[jnp.ones(3)], **steps)


@pytest.fixture(params=["memory", "disk"])
def draws(request):
    return KEPT if request.param == "memory" else request.getfixturevalue("stored")


def first_entries(trees):
    return [float(params["<b>"][0]) for params in trees]


def test_draws_are_counted_as_a_list_is(draws):
    assert len(draws) == ALL and draws[5]["<b>"].shape == (2,)
    assert first_entries(draws) == first_entries(draws[x] for x in range(ALL)) == IN_ORDER
    assert first_entries(draws[np.int32(x)] for x in range(-ALL, 0)) == IN_ORDER
    assert first_entries(reversed(draws)) == IN_ORDER[::-1]
    assert draws[[5, -1]].params["<b>"][0, :, 0].tolist() == [IN_ORDER[5], IN_ORDER[-1]]
    slices = [slice(4, 9), slice(None, None, 5), slice(-2, None), slice(9, 2, -3), slice(7, 7)]
    for part in [*slices, slice(8, 99)]:
        assert isinstance(draws[part], list) and first_entries(draws[part]) == IN_ORDER[part]


def test_what_is_no_number_of_a_draw(draws):
    for number in (ALL, -ALL - 1, 10**12):
        rule = rf"Snapshots\[\.\.\.\]` must be at least -{ALL} and below {ALL}, got {number}\."
        for index in (number, np.array([0, number])):
            with pytest.raises(IndexError, match=rule):
                draws[index]
    wrong = {"'w'": "w", "1.5": 1.5, "a tuple": (0, 1), "a list": []}
    for got, index in [*wrong.items(), ("a list", [0.5])]:
        rule = rf"must be an integer, a slice or a list of integers, got {got}\. For all draws"
        with pytest.raises(TypeError, match=rule):
            draws[index]


def test_stored_draws_are_read_one_by_one(stored, tmp_path):
    """All other files are removed first."""
    shutil.copytree(stored.directory, tmp_path / "copy")
    stored = optax_smile.load_snapshots(tmp_path / "copy")
    for number in range(DRAWS - 1):
        (file,) = stored.directory.glob(f"draw-*{number}.chains*")
        file.unlink()
    assert first_entries(stored[-2:]) == IN_ORDER[-2:] and repr(stored)
    refused("No such file", stored.__getitem__, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Model:
    w: Any


def test_a_tree_without_equality_is_sampled_and_predicts():
    start, loss = Model(jnp.ones((CHAINS, 2))), lambda model, batch: jnp.mean(model.w - batch)
    draws: Any = run(None, loss, start, batches=[jnp.zeros(2)], check=False)
    assert draws.params.w.shape == (CHAINS, DRAWS, 2) and draws.start.w.shape == (CHAINS, 2)
    logits = optax_smile.predict(
        lambda model, x: x @ model.w[None], draws, np.ones((6, 1)), likelihood="categorical"
    )
    assert logits.mean.shape == (6, 2)


# Public records without arrays: of functions, numbers and text.
WITHOUT_ARRAYS = ("Likelihood", "RecordedSampler", "Check", "CheckReport")


def test_objects_with_arrays_are_compared_and_hashed_by_identity(stored):
    rooms = "", "diagnostics", "interop", "local", "metrics"
    kinds: list[Any] = [
        found
        for path, found in public_objects()
        if path.rpartition(".")[0] in rooms and path.rpartition(".")[2] not in WITHOUT_ARRAYS
    ]
    pairs: list[Any] = [(stored, optax_smile.load_snapshots(stored.directory))]
    pairs.append([optax_smile.Snapshots(PARAMS) for _ in range(2)])
    for kind in filter(inspect.isclass, kinds):
        if fields := getattr(kind, "_fields", ()):
            pairs.append([kind(*[np.ones(3)] * len(fields)) for _ in range(2)])
        elif dataclasses.is_dataclass(kind):
            pairs.append([object.__new__(kind) for _ in range(2)])
            for one in pairs[-1]:
                vars(one).update({x.name: np.ones(3) for x in dataclasses.fields(kind)})
    assert len(pairs) > 9
    for one, other in pairs:
        assert one == one and one != other and not one == other and not one != one
        assert one != (1, 2) and (1, 2) != one and other in [one, other]
        assert len({one, other, one}) == 2 and {one: 1}[one] == 1


def test_a_text_says_what_is_stored_without_its_numbers(stored):
    """In a few lines, also of many layers."""
    layers = {f"layer_{i}": np.ones((8, 50, 9, 9), np.float32) for i in range(40)}
    given: dict[str, Any] = {"inputs": np.ones((50, 3)), "likelihood": "categorical"}
    given |= {"targets": np.zeros(50, int), "per": "draw"}
    found: Any = optax_smile.predict(lambda params, x: x * params["<b>"][0], KEPT, **given)
    for shown, said in (
        (KEPT, ("Snapshots: 3 chains of 4 draws", "<b> float32[2]", "sgld(num_data=7)", "9 ticks")),
        (optax_smile.Snapshots(layers), ("3,240 numbers per draw", "float32[9, 9], 37 more")),
        (optax_smile.Snapshots(np.ones((1, 1))), ("1 chain of 1 draw", "1 number per draw")),
        (stored, ("StoredSnapshots", str(stored.directory))),
        (found, (f"mean {np.mean(found.log_density):.4f}", "(entropy)", "float32[3, 4, 50, 3]")),
        (found.each, ("float32[3, 4, 50, 3]",)),
        (diagnostics.summary(optax_smile.Snapshots(PARAMS)), ()),
    ):
        text = repr(shown)
        assert all(each in text for each in said) and len(text.splitlines()) <= 10
        assert "array(" not in text and " at 0x" not in text
