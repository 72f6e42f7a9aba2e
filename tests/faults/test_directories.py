"""Damaged and hostile run directories: what is read is as it was written, or named.

A damage may leave all that is read as it was, or make something unreadable by a sentence that names
the file. Other values without a word are silent differences; any other traceback is raw.
"""

import collections
import copy
import json
import shutil
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import Crash, refused, stub

import optax_smile
from optax_smile import report
from optax_smile.chains._directory import Checkpoints

CHAINS, DRAWS, CRASH = 3, 4, 4
# Flipped bits of a whole campaign and of the short one; a fiftieth as often files are cut, ...
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
SAMPLER = optax.partition({"sampled": stub(1e-3), "frozen": optax.set_to_zero()}, LABELS)
BATCHES = [jnp.zeros(2), jnp.ones(2)]


def loss(params, batch):
    moving = params["w"], params["a.b"], params["a/b"], params["a"]["b"], params["__metadata__"]
    return sum(jnp.mean((x - batch[: x.size]) ** 2) for x in moving)


def sample(directory: Path | None = None) -> Any:
    given: Any = {"num_warmup": 1, "num_draws": DRAWS, "checkpoint_minutes": 0, "key": 0}
    given |= {"progress": False, "directory": directory}
    return optax_smile.sample(loss, START, BATCHES, SAMPLER, **given)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> types.SimpleNamespace:
    """A run with a prediction that crashed before its last draw, and what can be read of it.

    `like` is what checkpoints hold, `checkpoints` what a resumed run begins with, by their number,
    `whole` what is read of the run once it is resumed.
    """
    folder, checkpoints = tmp_path_factory.mktemp("intact"), {}
    given: Any = {"directory": (directory := folder / "run"), "checkpoint_minutes": 0, "key": 0}
    with pytest.raises(Crash), optax_smile.Run(loss, START, BATCHES, SAMPLER, **given) as run:
        run.advance(1)
        for _ in run.draws(CRASH - 1):
            like = run._chains.tree
        raise Crash
    whole, before = (shutil.copytree(directory, folder / name) for name in ("whole", "before"))
    draws, targets = optax_smile.load_snapshots(directory), np.arange(5) % 2
    prediction = optax_smile.predict(
        lambda params, x: x @ params["w"][:, None] * jnp.arange(2.0)[None],
        draws,
        np.ones((5, 2), np.float32),
        **{"likelihood": "categorical", "targets": targets, "per": "draw"},
    )
    report.store(directory, "test", prediction, targets=targets)
    while (found := begin(before, like))["checkpoint"][0] is not None:
        checkpoints[number := found["checkpoint"][0]] = found
        next(before.glob(f"checkpoint-{number:010d}.*")).unlink()
    assert len(checkpoints) == 2
    sample(whole)
    found = {"like": like, "expected": read(directory), "whole": read(whole)}
    return types.SimpleNamespace(directory=directory, checkpoints=checkpoints, **found)


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
    checkpoints = Checkpoints(directory, 5)
    return {"checkpoint": attempt(lambda: (checkpoints.newest(), checkpoints.restore(like)))}


def are_same(first: Any, second: Any) -> bool:
    """Whether two trees have the same bits."""

    def bits(x):
        array = np.asarray(x)
        return array.shape, str(array.dtype), array.tobytes()

    leaves = [[bits(leaf) for leaf in jax.tree.leaves(tree)] for tree in (first, second)]
    return jax.tree.structure(first) == jax.tree.structure(second) and leaves[0] == leaves[1]


def verdict_on(got: Any, value: Any, names: list[str]) -> str:
    """Say whether something is the same, named as damaged, absent, silently another, or raw.

    An error is ours if its sentence names one of the files and tells what to do.
    """
    if got is None:
        return "absent"
    if not isinstance(got, Exception):
        return "same" if are_same(got, value) else f"silent: {names} {value}"
    is_kind = type(got) in (ValueError, optax_smile.ArgumentError) or isinstance(got, OSError)
    tells = any(word in str(got) for word in ("Remove", "Restore", "must be a directory"))
    is_ours = is_kind and tells and any(name in str(got) for name in names)
    return "named" if is_ours else f"raw: {names} {got!r}"


def judge(found: dict[str, Any], expected: dict[str, Any], names: list[str]) -> list[str]:
    of_all = found.get("manifest")
    of_all = of_all if isinstance(of_all, Exception) else None
    return [verdict_on(found.get(name, of_all), x, names) for name, x in expected.items()]


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
    file.unlink() if kind == "delete" else file.write_bytes(contents[kind])
    if kind != "swap":
        return [file]
    other.write_bytes(mine)
    return [file, other]


def harm(intact: Any, directory: Path, kind: str, generator: Any, resumes: bool) -> list[str]:
    """Damage a file of a copy of the run, read all that may depend on it, and mend it."""
    files = [x for x in sorted(directory.rglob("*")) if x.is_file() and x.name[0] != "."]
    is_checkpoint = bool(generator.integers(2))
    before = {x: x.read_bytes() for x in files if x.name.startswith("checkpoint-") == is_checkpoint}
    names = [path.name for path in hurt(kind, list(before), generator)]
    names += [name.partition(".")[0] for name in names if name.startswith(("start", "draw"))]
    verdicts = []
    if resumes:
        again = shutil.copytree(directory, directory.parent / "again")
        resumed = attempt(lambda: sample(again))
        if isinstance(resumed, Exception):
            verdicts.append(verdict_on(resumed, None, names))
        else:
            verdicts += judge(read(again), intact.whole, names)
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
    wrong = {kind: [x for x in seen if x.startswith(kind)] for kind in ("silent", "raw")}
    figures = {kind: sum(seen[x] for x in found) for kind, found in wrong.items()}
    record("directories", cases=len(cases), flips=flips, **figures)
    assert not any(wrong.values()), wrong
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
    file = damaged / "manifest.json"
    for content in ("[" * 100_000, "[]", "7", '{"format": true}', "\udcff"):
        file.write_bytes(content.encode(errors="surrogateescape"))
        readers = [optax_smile.load_snapshots, report.write] + [sample] * (content == "[]")
        for function in readers:
            refused(f"must be a directory .*{file}", function, damaged)


def test_no_text_of_a_user_is_part_of_the_page(damaged, tmp_path):
    script, file = "<script>alert('1')</script>\"'", damaged / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("checksum")
    manifest["settings"] |= {script: script, "key": {script: script}}
    manifest["settings"]["sampler"] = {"name": script, script: [script]}
    manifest["versions"][script] = script
    checksum = f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"
    file.write_text(json.dumps(manifest | {"checksum": checksum}))
    prediction = optax_smile.Prediction(None, np.zeros(5), uncertainty=None)
    scores: Any = {script: 0.5}
    report.store(damaged, "test", prediction, targets=np.zeros(5), scores=scores)
    page = report.write(damaged, tmp_path / f"{script.replace('/', '')}.html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 8
