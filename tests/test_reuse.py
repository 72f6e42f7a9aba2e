"""A second run of the same program compiles nothing; one that computes anything else compiles."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import _reuse

BATCHES = [np.arange(6.0, dtype="float32").reshape(3, 2)] * 2
STARTS = jnp.eye(2)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of what has been compiled."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_):
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    _reuse._KEPT.clear()
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def draws_of(loss, batches=BATCHES, **options):
    given: dict[str, Any] = {"num_data": 6, "key": 0} | options
    sampler = optax_smile.sgld(0.1, **given)
    given = {"num_warmup": 1, "num_draws": 2, "key": 0, "check": False, "progress": False}
    return optax_smile.sample(loss, STARTS, batches, sampler, **given).params


def members_of(loss):
    given: dict[str, Any] = {"num_members": 2, "num_epochs": 2, "key": 0, "progress": False}
    start = lambda key: jax.random.normal(key, (2,))  # noqa: E731
    return optax_smile.warmstart(loss, start, BATCHES, optax.sgd(0.1), check=False, **given)


def make(scale=1.0, data=0.0):
    """A loss with a number and an array in its closure."""
    closure = {"scale": scale, "data": np.full(2, data, "float32")}

    def loss(w, batch):
        return closure["scale"] * jnp.mean((w[None] - batch - closure["data"][None]) ** 2)

    return loss, closure


def test_a_second_run_compiles_nothing(compiled):
    loss, _ = make()
    first = draws_of(loss)
    assert compiled
    trained = members_of(loss)
    compiled.clear()
    np.testing.assert_array_equal(draws_of(loss), first)
    np.testing.assert_array_equal(members_of(loss), trained)
    # So does a loss that is made anew and computes the same.
    np.testing.assert_array_equal(draws_of(make()[0]), first)
    assert not compiled


# The name of what changes between two runs, and how.
CHANGES = {
    "num_data": {"num_data": 7},
    "prior": {"prior_precision": 3.0},
    "batches": {"batches": [x + 1 for x in BATCHES]},
    "shapes": {"batches": [x[:2] for x in BATCHES]},
    "number": {},
    "array": {},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_computed(compiled, name):
    loss, closure = make()
    before = draws_of(loss)
    if name == "number":
        closure["scale"] = 2.0
    elif name == "array":
        closure["data"] += 1
    found = draws_of(loss, **CHANGES[name])
    _reuse._KEPT.clear()
    np.testing.assert_array_equal(found, draws_of(make(**closure_of(closure))[0], **CHANGES[name]))
    assert not np.array_equal(found, before)


def closure_of(closure):
    """Arguments of `make` that give a closure."""
    return {"scale": closure["scale"], "data": closure["data"][0]}


def test_what_the_code_does_not_show_is_not_shared(compiled, monkeypatch):
    scale, at = 1.0, jnp.zeros(2)
    shape = jax.ShapeDtypeStruct((), "float32")

    def called(x):
        return x + jax.pure_callback(lambda: np.float32(scale), shape)

    before = _reuse.Program(called)(at)
    scale = 2.0
    assert not np.array_equal(_reuse.Program(called)(at), before) and not _reuse._KEPT
    monkeypatch.setattr(_reuse, "LARGEST", 4)
    _reuse.Program(lambda x: x + np.arange(2.0))(at)
    assert not _reuse._KEPT


def test_devices_and_configuration_are_part_of_a_program(compiled):
    at, programs = jnp.ones((2, 2)), []
    for mesh in ("first", "second"):
        program = _reuse.Program(lambda x: x @ x, mesh=mesh)
        with jax.default_matmul_precision("float32"):
            program(at)
        program(at)
        programs += program._programs.values()
    assert len(_reuse._KEPT) == 4 and len(programs) == 4
    # A program that is traced within another one does not take its place.
    outer = _reuse.Program(lambda x: _reuse.Program(lambda y: 2 * y)(x) + 1)
    np.testing.assert_array_equal(outer(at), 3 * np.ones((2, 2)))
    assert _reuse._CALLED.function is None


def test_the_oldest_program_goes_first(compiled, monkeypatch):
    monkeypatch.setattr(_reuse, "LIMIT", 2)
    at = jnp.zeros(2)
    for number in (0, 1, 0, 2):
        _reuse.Program(lambda x, number=number: x + number)(at)
    compiled.clear()
    _reuse.Program(lambda x: x + 0)(at)
    assert not compiled and len(_reuse._KEPT) == 2
    _reuse.Program(lambda x: x + 1)(at)
    assert compiled
