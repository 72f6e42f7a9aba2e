"""Damaged and hostile run directories: what is read is as it was written, or named.

A damage may leave all that is read as it was, or make something unreadable by a sentence that names
the file. Other values without a word are silent differences; any other traceback is raw.
"""

import collections
import copy
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import watching

import optax_smile
from optax_smile import report
from optax_smile.chains._directory import Checkpoints
from optax_smile.draws import _format

CHAINS, DRAWS, CRASH = 3, 4, 4
# Flipped bits of a whole campaign and of the short one; a tenth as many files are cut, and so on.
WHOLE, SHORT = 5_000, 100
# Of so many damages one is met by a run that resumes; otherwise what it begins with is read.
RESUMED = 100
# Names that need care, and a frozen leaf.
START: dict[str, Any] = {
    "w": jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2),
    "a.b": jnp.zeros((CHAINS, 1)),
    "a/b": jnp.full((CHAINS, 1), 2.0),
    "a": {"b": jnp.ones((CHAINS, 1)), "frozen": jnp.ones((CHAINS, 2))},
    "__metadata__": jnp.full((CHAINS, 1), 3.0),
}
LABELS: Any = jax.tree.map(lambda _: "sampled", START)
LABELS["a"]["frozen"] = "frozen"
SAMPLED = optax_smile.sgld(1e-3, num_data=10, key=0)
SAMPLER = optax.partition({"sampled": SAMPLED, "frozen": optax.set_to_zero()}, LABELS)


def loss(params, batch):
    moving = params["w"], params["a.b"], params["a/b"], params["a"]["b"], params["__metadata__"]
    return sum(jnp.mean((x - batch[: x.size]) ** 2) for x in moving)


def sample(directory: Path | None = None, **arguments: Any) -> Any:
    settings: Any = {"num_warmup": 1, "num_draws": DRAWS, "checkpoint_minutes": 0, "key": 0}
    settings |= {"progress": False, "directory": directory} | arguments
    return optax_smile.sample(loss, START, [jnp.zeros(2), jnp.ones(2)], SAMPLER, **settings)


def logits(params: Any, inputs: Any) -> Any:
    return inputs @ params["w"][:, None] * jnp.arange(2.0)[None]


class Crash(Exception):
    """What ends a run before its time."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> types.SimpleNamespace:
    """A run with a prediction that crashed before its last draw, and what can be read of it.

    `like` is what checkpoints hold, `checkpoints` what a resumed run begins with, by their number,
    `whole` what is read of the run once it is resumed.
    """
    folder, save, carries = tmp_path_factory.mktemp("intact"), Checkpoints.save, []
    directory = folder / "run"

    def keep(self, number, carry, place):
        carries.append(carry)
        save(self, number, carry, place)

    def stop(step, stats):
        if step == CRASH:
            raise Crash

    with pytest.MonkeyPatch.context() as patch, watching(stop), pytest.raises(Crash):
        patch.setattr(Checkpoints, "save", keep)
        sample(directory)
    whole, before = (shutil.copytree(directory, folder / name) for name in ("whole", "before"))
    draws, targets = optax_smile.load_snapshots(directory), np.arange(5) % 2
    options: Any = {"likelihood": "categorical", "targets": targets, "per": "draw"}
    prediction = optax_smile.predict(logits, draws, np.ones((5, 2), np.float32), **options)
    report.store(directory, "test", prediction, targets=targets)
    checkpoints, like = {}, carries[-1]
    while (found := begin(before, like))["checkpoint"][0] is not None:
        number = found["checkpoint"][0]
        checkpoints[number] = found
        for file in before.glob(f"checkpoint-{number:010d}.*"):
            file.unlink()
    assert len(checkpoints) == 2
    sample(whole)
    return types.SimpleNamespace(
        directory=directory,
        like=like,
        expected=read(directory),
        checkpoints=checkpoints,
        whole=read(whole),
    )


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    return Path(shutil.copytree(intact.directory, tmp_path / "run"))


def attempt(function: Callable[[], Any]) -> Any:
    """What a function gives, or its error."""
    try:
        return function()
    except Exception as error:
        return error


def read(directory: Path) -> dict[str, Any]:
    """Everything that can be read of the draws, each thing or the error that it gives."""
    found = {}
    for file in directory.glob(report.FILE.format("*")):
        found["prediction"] = attempt(lambda file=file: report._read(file)._asdict())
    draws = attempt(lambda: optax_smile.load_snapshots(directory))
    if isinstance(draws, Exception):
        return found | {"manifest": draws}
    found |= {"manifest": draws.manifest, "start": attempt(lambda: draws.start)}
    for blocks in draws.draws:
        one = copy.copy(draws)
        one.draws = [blocks]
        found[f"draw {blocks[0].draw}"] = attempt(lambda one=one: one.params)
        found[f"trace {blocks[0].draw}"] = attempt(lambda one=one: one.trace)
    return found


def begin(directory: Path, like: Any) -> dict[str, Any]:
    """What a resumed run begins with: number of the checkpoint, chains, place."""

    def restored():
        checkpoints = Checkpoints(directory, 5)
        carry, place = checkpoints.restore(like) or (None, None)
        return checkpoints.newest(), carry, place

    return {"checkpoint": attempt(restored)}


def are_same(first: Any, second: Any) -> bool:
    """Whether two trees have the same bits."""

    def bits(x):
        array = np.asarray(x)
        return array.shape, str(array.dtype), array.tobytes()

    leaves = [[bits(leaf) for leaf in jax.tree.leaves(tree)] for tree in (first, second)]
    return jax.tree.structure(first) == jax.tree.structure(second) and leaves[0] == leaves[1]


def is_ours(error: Exception, names: list[str]) -> bool:
    """Whether an error is a sentence that names one of the files and tells what to do."""
    is_kind = type(error) in (ValueError, optax_smile.ArgumentError) or isinstance(error, OSError)
    tells = any(word in str(error) for word in ("Remove", "Restore", "must be a directory"))
    return is_kind and tells and any(name in str(error) for name in names)


def judge(found: dict[str, Any], expected: dict[str, Any], names: list[str]) -> list[str]:
    """Say of each thing whether it is the same, named as damaged, absent, silent or raw."""
    verdicts = []
    for name, value in expected.items():
        of_all = found.get("manifest")
        got = found.get(name, of_all if isinstance(of_all, Exception) else None)
        if got is None:
            verdicts.append("absent")
        elif isinstance(got, Exception):
            verdicts.append("named" if is_ours(got, names) else f"raw: {name} {names} {got!r}")
        else:
            verdicts.append("same" if are_same(got, value) else f"silent: {name} {names}")
    return verdicts


def hurt(kind: str, files: list[Path], generator: np.random.Generator) -> list[Path]:
    """Change the content of a file, delete it, or swap it with another."""
    file, other = (files[generator.integers(len(files))] for _ in range(2))
    mine, theirs = file.read_bytes(), other.read_bytes()
    at, bit = generator.integers(len(mine)), 1 << generator.integers(8)
    contents = {
        "flip": mine[:at] + bytes([mine[at] ^ bit]) + mine[at + 1 :],
        "cut": mine[:at],
        "lengthen": mine + generator.bytes(int(generator.integers(1, 100))),
        # As a disk does that has lost a sector.
        "blank": mine[:at] + bytes(len(mine[at : at + 64])) + mine[at + 64 :],
        "swap": theirs,
    }
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(contents[kind])
    if kind != "swap":
        return [file]
    other.write_bytes(mine)
    return [file, other]


def harm(intact: Any, directory: Path, kind: str, generator: Any, resumes: bool) -> list[str]:
    """Damage a file of a copy of the run, read all that may depend on it, and mend it."""
    is_checkpoint = bool(generator.integers(2))
    before = {
        path: path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and path.name[0] != "."
        and path.stat().st_size
        and path.name.startswith("checkpoint-") == is_checkpoint
    }
    harmed = hurt(kind, list(before), generator)
    names = [path.name for path in harmed]
    names += [name.partition(".")[0] for name in names if name.startswith(("start", "draw"))]
    verdicts = []
    if resumes:
        again = shutil.copytree(directory, directory.parent / "again")
        resumed = attempt(lambda: sample(again))
        if not isinstance(resumed, Exception):
            verdicts += judge(read(again), intact.whole, names)
        elif is_ours(resumed, names):
            verdicts.append("named")
        else:
            verdicts.append(f"raw: resumed {names} {resumed!r}")
        shutil.rmtree(again)
    if is_checkpoint:
        found = begin(directory, intact.like)
        newest = found["checkpoint"]
        number = max(intact.checkpoints) if isinstance(newest, Exception) else newest[0]
        verdicts += judge(found, intact.checkpoints[number], names)
    else:
        verdicts += judge(read(directory), intact.expected, names)
    for path, content in before.items():
        path.write_bytes(content)
    if kind not in ("delete", "swap") and "absent" in verdicts:
        verdicts.append(f"silent: lost {names}")
    return verdicts


def test_damage_is_named_or_harmless(intact, damaged, full, record):
    generator, flips = np.random.default_rng(0), WHOLE if full else SHORT
    others = ("cut", "lengthen", "blank", "delete", "swap")
    cases = ["flip"] * flips + [kind for kind in others for _ in range(flips // 50)]
    seen: collections.Counter[str] = collections.Counter()
    for number, kind in enumerate(cases):
        seen.update(harm(intact, damaged, kind, generator, number % RESUMED == RESUMED - 1))
    wrong = {verdict: seen[verdict] for verdict in seen if verdict.startswith(("silent", "raw"))}
    figures = {
        kind: sum(seen[x] for x in wrong if x.startswith(kind)) for kind in ("silent", "raw")
    }
    record("directories", cases=len(cases), flips=flips, **figures)
    assert not wrong
    assert seen["named"] > len(cases) / 2 and seen["same"] > len(cases)


def test_leaves_of_any_name_come_back(intact):
    """Also from a checkpoint, where `a.b` is not `b` inside `a`."""
    expected = sample().params
    for draw in range(DRAWS):
        one = jax.tree.map(lambda x, at=draw: x[:, at : at + 1], expected)
        assert are_same(intact.whole[f"draw {draw}"], one)
    draws = optax_smile.load_snapshots(intact.directory, flat=True)
    (stored,) = {tuple(draw) for draw in draws}
    assert set(stored) == {"a.b", "a/b", "a/frozen", "a~1b", "w", "~__metadata__"}


def test_a_manifest_that_is_none_is_named(damaged):
    file = damaged / _format.MANIFEST
    for content in ("[" * 100_000, "[]", "7", '{"format": true}', "\udcff"):
        file.write_bytes(content.encode(errors="surrogateescape"))
        readers = [optax_smile.load_snapshots, report.write] + [sample] * (content == "[]")
        for function in readers:
            with pytest.raises(ValueError, match=f"must be a directory .*{file}"):
                function(damaged)


def test_no_text_of_a_user_is_part_of_the_page(damaged, tmp_path):
    script = "<script>alert('1')</script>\"'"
    described = {"key": {script: script}, "sampler": {"name": script, script: [script]}}
    manifest = _format.read_manifest("test", damaged)
    manifest["settings"] |= {script: script, **described}
    manifest["versions"][script] = script
    _format.write_manifest(damaged, manifest)
    scores: Any = {script: 0.5}
    prediction = optax_smile.Prediction(None, np.zeros(5), uncertainty=None)
    report.store(damaged, "test", prediction, targets=np.zeros(5), scores=scores)
    page = report.write(damaged, tmp_path / f"{script.replace('/', '')}.html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 8
