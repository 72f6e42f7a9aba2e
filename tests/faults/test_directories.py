"""Directories that are damaged, foreign or of another run: read correctly or rejected.

After a damage, either all values are read correctly, or an error names the file. Wrong values
without an error count as silent; any other traceback counts as raw.
"""

import collections
import functools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from runs import CHAINS, THIN, WARMUP, assert_same_bits, checkpoints_in, content_of, refused, start
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import optax_smile
from optax_smile import report

# Flipped bits of a whole campaign and of the short one; a fiftieth as often files are cut, ...
WHOLE, SHORT = 5_000, 60
# One in so many damages is tested by resuming the run; for others, only its start is read.
RESUMED = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Any:
    return runs.run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A run that crashed after its second draw, in step 9, with the checkpoints 7 and 8."""
    directory, second = tmp_path_factory.mktemp("half"), WARMUP + 2 * THIN
    with pytest.raises(runs.Crash):
        runs.run(directory, callback=runs.at(second + 1, runs.crash), checkpoint_minutes=0)
    assert checkpoints_in(directory) == [second - 1, second]
    return directory


@pytest.fixture
def copied(half, tmp_path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "copy"))


def look(directory: Path, whole: Any, points: dict[int, Any]):
    """Require that both draws, and the state after the newest checkpoint, are correct."""
    draws = optax_smile.load_snapshots(directory)
    chex.assert_trees_all_equal(draws.start, whole.start)
    for mine, other in ((draws.params, whole.params), (draws.trace, whole.trace)):
        chex.assert_trees_all_equal(mine, jax.tree.map(lambda x: x[:, :2], other))
    run = runs.begin(directory, check=False)
    assert run.num_steps == max(checkpoints_in(directory))
    chex.assert_trees_all_equal(run.last_accepted(), points[run.num_steps])


def verdict_on(check, hurt: list[Path]) -> str:
    """Classify a read: the same, named as damaged, silently wrong, or raw.

    An error is ours if its sentence names one of the files and tells what to do.
    """
    names = [x.name for x in hurt]
    names += [x.partition(".")[0] for x in names if x.startswith(("start", "draw"))]
    try:
        check()
    except AssertionError as error:
        return f"silent: {names} {error}"
    except Exception as error:
        is_kind = type(error) in (ValueError, optax_smile.ArgumentError, OSError)
        tells = any(word in str(error) for word in ("Remove", "Restore", "must be a directory"))
        is_ours = is_kind and tells and any(name in str(error) for name in names)
        return "named" if is_ours else f"raw: {names} {error!r}"
    return "same"


def test_damage_is_named_or_harmless(half, copied, tmp_path, whole, full, record):
    """If the named checkpoint is removed, the run resumes from the one before."""
    generator, flips = np.random.default_rng(0), WHOLE if full else SHORT
    cases = ["flip"] * flips + [way for way in runs.DAMAGES[1:] for _ in range(max(flips // 50, 3))]
    points, seen = {}, collections.Counter[str]()
    for number in reversed(checkpoints_in(half)):
        with runs.begin(copied) as run:
            points[number] = run.last_accepted()
        next(copied.glob(f"checkpoint-{number:010d}.*")).unlink()
    for number, way in enumerate(cases):
        directory = tmp_path / "run"
        shutil.copytree(half, directory)
        of_run, files = bool(generator.integers(2)), sorted(directory.glob("[!.]*"))
        files = [x for x in files if x.name.startswith("checkpoint-") == of_run]
        hurt = runs.hurt(way, files, generator)

        def go_on(at=directory):
            assert_same_bits(runs.run(at, check=False), whole)

        seen[found := verdict_on(lambda at=directory: look(at, whole, points), hurt)] += 1
        if number % RESUMED == RESUMED - 1:
            seen[verdict_on(go_on, hurt)] += 1
        if found == "named" and way == "cut" and hurt[0].name.startswith("checkpoint-"):
            hurt[0].unlink()
            go_on()
        shutil.rmtree(directory)
    wrong = {kind: [x for x in seen if x.startswith(kind)] for kind in ("silent", "raw")}
    figures = {kind: sum(seen[x] for x in found) for kind, found in wrong.items()}
    record("directories", cases=len(cases), flips=flips, **figures)
    assert not any(wrong.values()), wrong
    assert seen["named"] > len(cases) / 2 and seen["same"] > len(cases) / 5


def test_another_manifest_is_named(copied):
    form, file = r"directory=...\)` must be a directory ", copied / "manifest.json"
    other = {"format": 3, "versions": {"optax-smile": "0.0.7"}}
    version = f"of .* format 5, got format 3 in {file}, written by optax_smile 0.0.7"
    contents = [(json.dumps(json.loads(file.read_text()) | other), version)]
    contents += [(x, f".*{file}") for x in ("[" * 100_000, "[]", "7", '{"format": true}', "\udcff")]
    for content, message in contents:
        file.write_bytes(content.encode(errors="surrogateescape"))
        for function in (optax_smile.load_snapshots, report.write, runs.run):
            refused(form + message, function, copied)


train = functools.partial(runs.train, validation=runs.regression()[0])


def test_checkpoints_of_other_states_are_refused(copied, tmp_path):
    (newest,) = copied.glob("checkpoint-0000000008.*")
    shapes = {name.partition("@")[0]: x.shape for name, x in load_file(newest).items()}
    assert shapes["params.w"] == (CHAINS, 2) and shapes["state.num_gradients"] == (CHAINS,)
    message = rf"(?s)The checkpoint {newest} is damaged .*is unknown.*sampler has changed"
    refused(message, runs.run, copied, sampler=optax.chain(optax.trace(0.9), runs.stub()))
    train(tmp_path / "start")
    message = r"(?s)The checkpoint .* damaged.*sampler has changed"
    refused(message, train, tmp_path / "start", optimizer=optax.sgd(0.1))
    *_, file = sorted((tmp_path / "start").glob("checkpoint-*"))
    shutil.copy(file, copied / "checkpoint-0000000099.part-00000-of-00001.safetensors")
    refused(r"The checkpoint .*-0000000099.* damaged \(it is check", runs.run, copied)
    with safe_open(file, "numpy") as content:
        header = json.loads(content.metadata()["optax_smile"])
    text = json.dumps(header | {"formats": [4, 999]})
    checksum = f"{zlib.crc32(text.encode()):08x}"
    save_file(load_file(file), file, {"optax_smile": text, "checksum": checksum})
    message = (
        r"`warmstart\(directory=...\)` must be .* got \[4, 999\] in .*, written by optax_smile "
    )
    refused(message, train, tmp_path / "start")


def sgld(step_size=0.02):
    return optax_smile.sgld(step_size, num_data=runs.NUM_DATA, key=0)


def own(directory, **given) -> Any:
    return runs.run(directory, **{"sampler": sgld(), "num_draws": 2, "check": False, **given})


def shuffled():
    return [runs.regression()[i] for i in np.random.default_rng(2).permutation(7)]


def keyed_loss(params, batch, *, key):
    return runs.mean_loss(params, batch)


def aux_loss(params, batch, *, aux):
    return runs.mean_loss(params, batch), aux


OTHER_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"batches": runs.regression(size=6)}, r"one with shapes = .*\[20\].*, got .*\[6\]"),
    ({"batches": runs.regression()[:4]}, "one with num_batches = 7, as in .*, got 4"),
    ({"batches": [list(x) for x in runs.regression()]}, "one with shapes = "),
    ({"key": 4}, r"\[0, 0\], as in the run in .*, got \[0, 4\]"),
    ({"thin": 2}, r"3, as for the draws that the run has, got 2\."),
    ({"num_warmup": 7}, r"2, as in .*, got 7\."),
    ({"batch_per": "step"}, r"'gradient', as in .*, got 'step'"),
    ({"sampler": sgld(0.03)}, r"with step_size = 0.*, got 0\.03\. "),
    ({"stochastic": True, "loss": keyed_loss}, r"False, as in .*, got True"),
    ({"per_chain": True, "batches": runs.own_batches()}, r"False, as in .*, got True"),
    (
        {"params": start() | {"w": jnp.zeros((CHAINS, 4))}},
        r"with leaves = .*, got .*'shape': \[4\]",
    ),
    ({"params": jax.tree.map(lambda x: x[:2], start())}, r"num_chains = 3, as in .*, got 2\."),
    (
        {"params": start(), "aux": {"mean": jnp.zeros((CHAINS, 2))}, "loss": aux_loss},
        "with leaves = .*, got .*'name': 'aux/mean'",
    ),
    ({"dtype": "float16"}, r"None, as in .*, got 'float16'\."),
]
OTHER_TRAININGS: list[tuple[dict[str, Any], str]] = [
    ({"key": 1}, r"\[0, 0\], as in the run in .*, got \[0, 1\]"),
    ({"num_members": 3}, r"2, as in the run in .*, got 3\."),
    ({"patience": 3}, r"10, as in the run in .*, got 3\."),
    ({"batches": runs.regression()[:2]}, "one with num_batches = 7, as in .*, got 2"),
    ({"validation": None}, r"'\(\(20, 2\), \(20,\)\)', as in the .*, got None\."),
]


@pytest.mark.parametrize(
    "function, others, same, finds",
    [
        (own, OTHER_RUNS, {"loss": lambda *x: 1.01 * runs.mean_loss(*x)}, "the run in .* Its draw"),
        (train, OTHER_TRAININGS, {"optimizer": optax.adam(0.2)}, ".* 2 members, trained for 2 ep"),
    ],
)
def test_another_run_is_refused_and_the_same_is_found(function, others, same, finds, tmp_path):
    """Its functions and the order of its batches are not compared."""
    finished = function(tmp_path)
    before = content_of(tmp_path)
    for number, (arguments, what) in enumerate(others):
        name = next(iter(arguments))
        # Also if the call would extend the run.
        longer = {"num_draws": 2 + number % 2} if function is own else {}
        refused(rf"`\w+\({name}=...\)` must be .*{what}", function, tmp_path, **arguments, **longer)
    assert content_of(tmp_path) == before
    with pytest.warns(UserWarning, match=f"{finds}.*(is|are) ") as seen:
        again = function(tmp_path, batches=shuffled(), **same)
    assert len(seen) == 1 and "is finished" in str(seen[0].message)
    mine, other = (x.params if function is own else x for x in (again, finished))
    chex.assert_trees_all_equal(mine, other)


def test_a_directory_of_something_else_is_refused(tmp_path):
    train(tmp_path / "warm")
    (tmp_path / "file").touch()
    own(tmp_path / "run")
    for function, place, got in (
        (own, "warm", "new.*a run of `warmst"),
        (train, "run", "new.*a run of `sample`"),
        (own, "file", ".*File exists"),
        (own, "file/inside", ".*Not a directory"),
    ):
        refused(rf"directory=...\)` must be {got}", function, tmp_path / place)
