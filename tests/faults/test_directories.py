"""Damaged and hostile run directories: what is read is as it was written, or named.

A damage may leave all that is read as it was, or make something unreadable by a sentence that names
the file. Other values without a word are silent differences; any other traceback is raw.
"""

import collections
import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import optax_smile
from optax_smile import _disk, report
from optax_smile.chains._checkpoint import SUMS, Checkpoints
from optax_smile.draws import _manifest, _stored

CHAINS, DRAWS, CRASH = 3, 4, 4
# Flipped bits of a whole campaign and of the short one; a tenth as many files are cut, and so on.
WHOLE, SHORT = 5_000, 100
# Of so many damages one is met by a run that resumes; otherwise what it begins with is read.
RESUMED = 100
# Seconds to refuse a lie on a busy machine; a set of all chains of a name took 45.
AT_ONCE = 5.0
# Names that need care, and a leaf that never moves.
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


def sample(directory: Path | None = None, **arguments) -> Any:
    settings: dict[str, Any] = {"num_warmup": 1, "num_draws": DRAWS, "checkpoint_minutes": 0}
    settings |= {"key": 0, "progress": False, "directory": directory} | arguments
    return optax_smile.sample(loss, START, [jnp.zeros(2), jnp.ones(2)], SAMPLER, **settings)


def logits(params: Any, inputs: Any) -> Any:
    return inputs @ params["w"][:, None] * jnp.arange(2.0)[None]


class Crash(Exception):
    """What ends a run before its time."""


class Intact:
    """A run that crashed before its last draw, and all that can be read of it.

    Attributes:
        directory: of the run, with a prediction.
        like: what its checkpoints hold, as shapes.
        expected: what is read of the directory.
        checkpoints: what a resumed run begins with, by the number of the checkpoint.
        whole: what is read of the run that went on.
    """

    def __init__(self, folder: Path):
        self.directory = folder / "run"
        save, carries = Checkpoints.save, []

        def keep(self, number, carry, place):
            carries.append(carry)
            save(self, number, carry, place)

        def stop(step, stats):
            if step == CRASH:
                raise Crash

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "save", keep)
            with pytest.raises(Crash):
                sample(self.directory, callback=stop)
        self.like = carries[-1]
        shutil.copytree(self.directory, folder / "whole")
        prediction = optax_smile.predict(
            logits,
            optax_smile.load_snapshots(self.directory),
            np.ones((5, 2), np.float32),
            likelihood="categorical",
            targets=np.arange(5) % 2,
            per="draw",
        )
        report.store(self.directory, "test", prediction, targets=np.arange(5) % 2)
        self.expected = read(self.directory)
        self.checkpoints = {}
        before = shutil.copytree(self.directory, folder / "before")
        while (found := begin(Path(before), self.like))["checkpoint"][0] is not None:
            number = found["checkpoint"][0]
            self.checkpoints[number] = found
            shutil.rmtree(Path(before) / "checkpoints" / str(number))
        assert len(self.checkpoints) == 2
        sample(folder / "whole")
        self.whole = read(folder / "whole")


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Intact:
    return Intact(tmp_path_factory.mktemp("intact"))


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    return Path(shutil.copytree(intact.directory, tmp_path / "run"))


def told(of: Callable[[], Any]) -> Any:
    """What a function gives, or its error."""
    try:
        return of()
    except Exception as error:
        return error


def read(directory: Path) -> dict[str, Any]:
    """Everything that can be read of the draws, each thing or the error that it gives."""
    found = {}
    for file in directory.glob(_stored.FILE.format("*")):
        found["prediction"] = told(lambda file=file: vars(_stored.Stored(file)))
    draws = told(lambda: optax_smile.load_snapshots(directory))
    if isinstance(draws, Exception):
        return found | {"manifest": draws}
    found |= {"manifest": draws.manifest, "start": told(lambda: draws.start)}
    for blocks in draws.draws:
        one = copy.copy(draws)
        one.draws = [blocks]
        found[f"draw {blocks[0].draw}"] = told(lambda one=one: one.params)
        found[f"trace {blocks[0].draw}"] = told(lambda one=one: one.trace)
    return found


def begin(directory: Path, like: Any) -> dict[str, Any]:
    """What a run that goes on begins with: number of the checkpoint, chains, place."""

    def restored():
        checkpoints = Checkpoints(directory, 5)
        try:
            carry, place = checkpoints.restore(like) or (None, None)
            return checkpoints.newest(), carry, place
        finally:
            checkpoints.close()

    return {"checkpoint": told(restored)}


def are_same(first: Any, second: Any) -> bool:
    """Whether two trees have the same bits."""

    def bits(x):
        array = np.asarray(x)
        return array.shape, str(array.dtype), array.tobytes()

    leaves = [jax.tree.leaves(tree) for tree in (first, second)]
    is_alike = jax.tree.structure(first) == jax.tree.structure(second)
    return is_alike and all(bits(x) == bits(y) for x, y in zip(*leaves, strict=True))


def is_ours(error: Exception, names: list[str]) -> bool:
    """Whether an error is a sentence that names one of the files and tells what to do."""
    is_kind = type(error) in (ValueError, optax_smile.ArgumentError) or isinstance(error, OSError)
    tells = any(word in str(error) for word in ("Remove", "Bring", "must be a directory"))
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


def flip(file: Path, _: list[Path], generator: np.random.Generator) -> list[Path]:
    content = bytearray(file.read_bytes())
    content[generator.integers(len(content))] ^= 1 << generator.integers(8)
    file.write_bytes(content)
    return [file]


def cut(file: Path, _: list[Path], generator: np.random.Generator) -> list[Path]:
    content = file.read_bytes()
    file.write_bytes(content[: generator.integers(len(content))])
    return [file]


def lengthen(file: Path, _: list[Path], generator: np.random.Generator) -> list[Path]:
    file.write_bytes(file.read_bytes() + generator.bytes(int(generator.integers(1, 100))))
    return [file]


def blank(file: Path, _: list[Path], generator: np.random.Generator) -> list[Path]:
    """As a disk does that has lost a sector."""
    content = bytearray(file.read_bytes())
    at = generator.integers(len(content))
    content[at : at + 64] = bytes(len(content[at : at + 64]))
    file.write_bytes(content)
    return [file]


def delete(file: Path, _: list[Path], generator: np.random.Generator) -> list[Path]:
    file.unlink()
    return [file]


def swap(file: Path, others: list[Path], generator: np.random.Generator) -> list[Path]:
    other = others[generator.integers(len(others))]
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return [file, other]


def harm(
    intact: Intact, directory: Path, damage: Callable, generator: np.random.Generator, resumes: bool
) -> list[str]:
    """Damage a file of a copy of the run, read all that may depend on it, and mend it."""
    is_checkpoint = bool(generator.integers(2))
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and path.name[0] != "."
        and path.stat().st_size
        and (directory / "checkpoints" in path.parents) == is_checkpoint
    ]
    before = {path: path.read_bytes() for path in files}
    harmed = damage(files[generator.integers(len(files))], files, generator)
    parts = [path.relative_to(directory).parts for path in harmed]
    names = ["/".join(part[:2]) for part in parts]
    names += [name.partition(".")[0] for name in names if name.startswith("start")]
    verdicts = []
    if resumes:
        again = Path(shutil.copytree(directory, directory.parent / "again"))
        went_on = told(lambda: sample(again))
        if isinstance(went_on, Exception):
            is_named = is_ours(went_on, names)
            verdicts.append("named" if is_named else f"raw: resumed {names} {went_on!r}")
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
    if damage is not delete and damage is not swap and "absent" in verdicts:
        verdicts.append(f"silent: lost {names}")
    return verdicts


def test_damage_is_named_or_harmless(intact, damaged, full, record):
    generator, flips = np.random.default_rng(0), WHOLE if full else SHORT
    others = [cut, lengthen, blank, delete, swap]
    cases = [flip] * flips + [one for one in others for _ in range(flips // 50)]
    seen: collections.Counter[str] = collections.Counter()
    for number, damage in enumerate(cases):
        seen.update(harm(intact, damaged, damage, generator, number % RESUMED == RESUMED - 1))
    wrong = {verdict: seen[verdict] for verdict in seen if verdict.startswith(("silent", "raw"))}
    figures = {
        kind: sum(wrong[verdict] for verdict in wrong if verdict.startswith(kind))
        for kind in ("silent", "raw")
    }
    record("directories", cases=len(cases), flips=flips, **figures)
    assert not wrong
    assert seen["named"] > len(cases) / 2 and seen["same"] > len(cases)


def test_leaves_of_any_name_come_back(intact):
    """Also from a checkpoint: Orbax took `a.b` and `b` inside `a` for the same."""
    expected = sample().params
    for draw in range(DRAWS):
        one = jax.tree.map(lambda x, at=draw: x[:, at : at + 1], expected)
        assert are_same(intact.whole[f"draw {draw}"], one)
    (stored,) = {
        tuple(x) for x in map(sorted, optax_smile.load_snapshots(intact.directory, flat=True))
    }
    assert stored == ("a.b", "a/b", "a/frozen", "a~1b", "w", "~__metadata__")


def rewrite(file: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]):
    """Change header and arrays of a file, and let its checksum fit again."""
    with safetensors.safe_open(file, framework="numpy") as content:
        header = json.loads(content.metadata()["optax_smile"])
    arrays = safetensors.numpy.load_file(file)
    header = change(header, arrays) or header
    text = header if isinstance(header, str) else json.dumps(header)
    metadata = {"optax_smile": text, "checksum": _disk.checksum(text)}
    file.write_bytes(safetensors.numpy.save(arrays, metadata=metadata))


def of_stats(values: Any) -> Callable:
    return lambda header, arrays: header["stats"].update(step_size=values)


def add_array(header, arrays):
    header["arrays"]["more"] = ["float32", [1], "00000000"]


HEADERS = {
    "no statistics": lambda header, arrays: header.pop("stats") and None,
    "text as statistics": of_stats(["<script>"] * CHAINS),
    "fewer statistics": of_stats([0.1]),
    "nested statistics": of_stats([[0.1]] * CHAINS),
    "text as step": lambda header, arrays: header.update(step="1"),
    "another draw": lambda header, arrays: header.update(draw=0),
    "other chains": lambda header, arrays: header.update(chains=[0, 7]),
    "an array more": add_array,
    "an array less": lambda header, arrays: arrays.pop("w") is None,
    "a huge array": lambda header, arrays: header["arrays"].update(w=["float32", [10**12], "0"]),
    "no arrays": lambda header, arrays: header.update(arrays=None),
    "a list": lambda header, arrays: "[]",
    "no JSON": lambda header, arrays: "{",
    "deep": lambda header, arrays: "[" * 100_000,
}


def test_a_header_that_lies_is_named(intact, damaged):
    """Whoever wrote the checksum."""
    (file,) = damaged.glob("draw-00000001.*")
    content = file.read_bytes()
    for name, lie in HEADERS.items():
        file.write_bytes(content)
        rewrite(file, lie)
        begun = time.monotonic()
        of_each = judge(read(damaged), intact.expected, [file.name])
        assert time.monotonic() - begun < AT_ONCE, name
        verdicts = dict(zip(intact.expected, of_each, strict=True))
        assert "named" in (verdicts.pop("trace 1"), verdicts.pop("draw 1")), name
        assert set(verdicts.values()) == {"same"}, name
    # One that has other statistics than the first is not found before they are joined.
    file.write_bytes(content)
    rewrite(file, lambda header, arrays: header["stats"].update(more=[1.0] * CHAINS))
    with pytest.raises(ValueError, match=f"The snapshot {file} is damaged .*Remove it"):
        _ = optax_smile.load_snapshots(damaged).trace


@pytest.mark.parametrize("claim", ["length", "shape", "sparse", "pipe"])
def test_a_file_that_claims_to_be_huge_or_endless_is_refused_at_once(intact, damaged, claim):
    (file,) = damaged.glob("draw-00000001.*")
    content = file.read_bytes()
    if claim == "length":
        file.write_bytes((2**62).to_bytes(8, "little") + content[8:])
    elif claim == "shape":
        file.write_bytes(content.replace(b'"shape":[3,2]', b'"shape":[9' + b"9" * 20 + b",2]"))
    elif claim == "sparse":
        rewrite(file, lambda header, arrays: None)
        os.truncate(file, 1 << 40)
    else:
        file.unlink()
        os.mkfifo(file)
    begun = time.monotonic()
    verdicts = judge(read(damaged), intact.expected, [file.name])
    assert time.monotonic() - begun < AT_ONCE
    assert verdicts.count("named") == 2 and set(verdicts) == {"same", "named"}


def test_a_name_that_lies_is_no_draw(damaged):
    """All chains of the name in a set took 45 s."""
    (file,) = damaged.glob("draw-00000001.*")
    for last in ("00000000003", "9" * 12, "9" * 100):
        shutil.copy(file, damaged / f"draw-00000007.chains-00000-{last}.safetensors")
    begun = time.monotonic()
    assert optax_smile.load_snapshots(damaged).num_draws == DRAWS - 1
    assert time.monotonic() - begun < AT_ONCE


def of_leaf(**fields) -> Callable:
    return lambda manifest: manifest["leaves"][0].update(fields)


LIES = {
    "num_chains": [lambda m: m.update(num_chains="3"), lambda m: m.update(num_chains=True)],
    "stored_dtype": [lambda m: m.update(stored_dtype="int8"), lambda m: m.update(stored_dtype=[])],
    "settings": [lambda m: m.update(settings=None)],
    "settings.sampler": [lambda m: m["settings"].update(sampler="psmile")],
    "settings.thin": [lambda m: m["settings"].update(thin="<script>alert(1)</script>")],
    "settings.num_warmup": [lambda m: m["settings"].update(num_warmup=-1)],
    "versions": [lambda m: m.pop("versions")],
    "leaves": [
        lambda m: m.update(leaves={}),
        lambda m: m.pop("leaves"),
        lambda m: m["leaves"].append(m["leaves"][0]),
        lambda m: m["leaves"].append(
            m["leaves"][0]
            | {"path": m["leaves"][0]["path"] * 2, "name": "__metadata__/__metadata__"}
        ),
    ],
    "leaves[0]": [of_leaf(more=1), lambda m: m["leaves"].insert(0, 7)],
    "leaves[0].path": [of_leaf(path=None), of_leaf(path=[["key", []]]), of_leaf(path=[7])],
    "leaves[0].name": [of_leaf(name="../w"), of_leaf(name=None)],
    "leaves[0].shape": [of_leaf(shape=[-1]), of_leaf(shape=2), of_leaf(shape=[1.5])],
    "leaves[0].dtype": [of_leaf(dtype="object"), of_leaf(dtype=7), of_leaf(dtype="no such")],
}


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], Any]):
    manifest = _manifest.read("test", directory)
    change(manifest)
    _manifest.write(directory, manifest)


def test_a_manifest_that_lies_names_file_and_field(damaged):
    file = damaged / _manifest.FILE
    content = file.read_bytes()
    for field, change in ((name, change) for name in LIES for change in LIES[name]):
        file.write_bytes(content)
        change_manifest(damaged, change)
        rule = r"^`load_snapshots\(directory=...\)` must be a directory whose manifest"
        with pytest.raises(ValueError, match=rule) as caught:
            optax_smile.load_snapshots(damaged)
        assert f"`{field}`, got " in str(caught.value) and f"in {file}." in str(caught.value)


def test_a_manifest_that_is_not_that_of_the_draws(damaged):
    """12 TB were asked for."""
    content = (damaged / _manifest.FILE).read_bytes()
    of_chains = lambda manifest: manifest.update(num_chains=10**12)  # noqa: E731
    for change in (of_leaf(shape=[10**6, 10**6]), of_leaf(dtype="int32"), of_chains):
        (damaged / _manifest.FILE).write_bytes(content)
        change_manifest(damaged, change)
        begun = time.monotonic()
        draws = optax_smile.load_snapshots(damaged)
        with pytest.raises(ValueError, match=r"of the manifest's\). Remove it|lacks the file"):
            _ = list(draws), draws.start
        assert time.monotonic() - begun < AT_ONCE


def test_a_manifest_that_is_none_is_named(damaged):
    file = damaged / _manifest.FILE
    for content in ("[" * 100_000, "[]", "7", '{"format": true}', "\udcff", "sparse"):
        file.write_bytes(content.encode(errors="surrogateescape"))
        if content == "sparse":
            os.truncate(file, 1 << 40)
        readers = [optax_smile.load_snapshots, report.write] + [sample] * (content == "[]")
        for function in readers:
            with pytest.raises(ValueError, match=f"must be a directory .*{file}"):
                function(damaged)


LINKED = ["manifest.json", "start.*", "draw-00000001.*", "prediction-*", ".lock-0"]


@pytest.mark.parametrize("name", [*LINKED, "checkpoints", "checkpoints/*", f"checkpoints/*/{SUMS}"])
def test_a_link_is_not_followed(intact, damaged, name, tmp_path):
    """Neither to read, where all would be as it was, nor to write."""
    path, outside = max(damaged.glob(name)), tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = contents(outside)
    found = [*read(damaged).values(), *begin(damaged, intact.like).values()]
    found += [told(lambda: list(sample(damaged)))] if name != "prediction-*" else []
    errors = [error for error in found if isinstance(error, Exception)]
    assert errors and (name == "prediction-*" or found[-1] is errors[-1])
    assert all("is a link" in str(error) and is_ours(error, [str(path)]) for error in errors)
    assert contents(outside) == before


def contents(path: Path) -> dict[str, bytes]:
    """Of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return {str(file): file.read_bytes() for file in files}


def test_a_draft_that_is_a_link_is_not_written_through(damaged, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    targets = [f"draw-{n:08d}.chains-00000-00002.safetensors" for n in range(4)]
    targets += ["manifest.json", "prediction-test.safetensors"]
    for name in [*targets, "start.chains-00000-00002.safetensors", "report.html"]:
        draft = damaged / f".{name}.{os.getpid()}"
        draft.hardlink_to(outside) if "draw" in name else draft.symlink_to(outside)
    (damaged / "report.html").symlink_to(outside)
    sample(damaged)
    report.write(damaged)
    assert outside.read_text() == "mine"
    assert not (damaged / "report.html").is_symlink()


def test_a_lock_that_is_a_file_elsewhere_is_not_written(damaged, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (damaged / ".lock-0").unlink()
    (damaged / ".lock-0").hardlink_to(outside)
    with pytest.raises(
        ValueError, match=r"`sample\(directory=...\)` must be one with files of its"
    ):
        sample(damaged)
    assert outside.read_text() == "mine"


def test_no_text_of_a_user_is_part_of_the_page(damaged, tmp_path):
    script = "<script>alert('1')</script>\"'"
    change_manifest(
        damaged,
        lambda manifest: (
            manifest["settings"].update({script: script, "key": {script: script}}),
            manifest["settings"].update(sampler={"name": script, script: [script]}),
            manifest["versions"].update({script: script}),
        ),
    )
    scores: Any = {script: 0.5}
    prediction = optax_smile.Prediction(None, np.zeros(5), uncertainty=None)
    report.store(damaged, "test", prediction, targets=np.zeros(5), scores=scores)
    page = report.write(damaged, tmp_path / f"{script.replace('/', '')}.html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 8
