"""A run in a directory that is stopped, killed or made longer gives the draws of one in one go."""

import contextlib
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import optax_smile
from optax_smile import _settings
from optax_smile.chains import _checkpoint
from optax_smile.draws import _files, _manifest

CHAINS, NUM_DATA, SAMPLES, THIN, WARMUP = 3, 200, 5, 4, 3
STEPS = WARMUP + SAMPLES * THIN


@pytest.fixture(autouse=True, scope="module")
def compile_once(tmp_path_factory):
    """The runs of a test compile the same programs."""
    limit = "jax_persistent_cache_min_compile_time_secs"
    names = ("jax_compilation_cache_dir", limit)
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update(limit, 0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def regression(count: int, size: int = 20) -> list[Any]:
    generator = np.random.default_rng(count)
    x = generator.normal(size=(count, size, 2)).astype(np.float32)
    y = (x.sum(axis=-1) + generator.normal(size=(count, size))).astype(np.float32)
    return list(zip(x, y, strict=True))


def own_batches(count: int) -> list[Any]:
    """A batch for each chain, along a leading axis."""
    rows = regression(count * CHAINS)
    return [
        jax.tree.map(lambda *x: np.stack(x), *rows[i : i + CHAINS])
        for i in range(0, len(rows), CHAINS)
    ]


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def normalised_loss(params, batch, *, aux, key):
    """Moves a running mean as BatchNorm does, and drops inputs."""
    x, y = batch
    mean = 0.9 * aux["mean"] + 0.1 * jnp.mean(x, axis=0)
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return mean_loss(params, (jnp.where(kept, x - mean[None], 0.0), y)), {"mean": mean}


def noisy_loss(params, batch, *, key):
    x, y = batch
    return mean_loss(params, (x + 0.1 * jax.random.normal(key, x.shape), y))


def start() -> Any:
    return {"w": jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2) / 10, "b": jnp.zeros(CHAINS)}


def smile(integrator="leapfrog", **arguments) -> optax.GradientTransformationExtraArgs:
    return optax_smile.smile_naive(
        0.02,
        num_data=NUM_DATA,
        integrator=integrator,
        decoherence_length=0.1,
        key=jax.random.key(5),
        **arguments,
    )


def run(directory: Path | None = None, loss=mean_loss, params=None, sampler=None, **arguments):
    """Sample; every step begins on a checkpoint unless told otherwise."""
    defaults: dict[str, Any] = {
        "num_warmup": WARMUP,
        "num_draws": SAMPLES,
        "thin": THIN,
        "key": jax.random.key(0),
        "progress": False,
        "checkpoint_minutes": 0,
    }
    return optax_smile.sample(
        loss,
        start() if params is None else params,
        arguments.pop("batches", regression(7)),
        smile() if sampler is None else sampler,
        directory=directory,
        **defaults | arguments,
    )


def assert_same_bits(actual, expected):
    """Draws and what was said about them, bit for bit."""
    for mine, other in ((actual.params, expected.params), (actual.trace, expected.trace)):
        assert jax.tree.structure(mine) == jax.tree.structure(other)
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())


def newest_checkpoint(directory: Path) -> int:
    return max(int(path.name) for path in (directory / "checkpoints").iterdir())


class Crash(Exception):
    """What a test throws into a run."""


def crash_at(at: int):
    def callback(step, stats):
        if step == at:
            raise Crash

    return callback


def signal_at(at: int, *numbers: signal.Signals):
    def callback(step, stats):
        if step == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    return callback


class Again:
    """Batches from a generator function: gone through again, with no place of their own."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


class Positioned:
    """Batches whose iterators can tell their place and go to one, as Grain's."""

    def __init__(self, rows, as_bytes=False):
        self.rows, self.as_bytes, self.num_read = rows, as_bytes, 0

    def __iter__(self):
        return Cursor(self)


class Cursor:
    def __init__(self, owner):
        self.owner, self.at = owner, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.owner.rows):
            raise StopIteration
        self.at, self.owner.num_read = self.at + 1, self.owner.num_read + 1
        return self.owner.rows[self.at - 1]

    def get_state(self):
        state = {"at": self.at, "nested": {"name": "cursor"}}
        return json.dumps(state).encode() if self.as_bytes else state

    def set_state(self, state):
        assert isinstance(state, bytes if self.as_bytes else dict)
        self.at = (json.loads(state) if isinstance(state, bytes) else state)["at"]

    @property
    def as_bytes(self):
        return self.owner.as_bytes


def tuned(integrator):
    return optax_smile.psmile(num_data=NUM_DATA, integrator=integrator, key=jax.random.key(5))


def aux() -> Any:
    return {"mean": jnp.ones((CHAINS, 2)) * jnp.arange(CHAINS)[:, None]}


# Each makes the arguments anew: some iterables remember how far they were read.
CASES: dict[str, Any] = {
    "a list": dict,
    "psmile": lambda: {"sampler": tuned("leapfrog"), "prefetch": 2},
    "minimal_norm": lambda: {"sampler": tuned("minimal_norm"), "batches": Again(regression(7))},
    "a batch per step": lambda: {
        "sampler": smile("minimal_norm"),
        "batch_per": "step",
        "steps_per_dispatch": 3,
        "batches": Again(regression(7)),
    },
    "an odd number of batches in one go": lambda: {
        "sampler": smile("minimal_norm"),
        "steps_per_dispatch": 3,
        "prefetch": 2,
    },
    "a batch per chain": lambda: {
        "per_chain": True,
        "batches": own_batches(7),
        "steps_per_dispatch": 3,
        "prefetch": 2,
    },
    "stochastic": lambda: {"loss": noisy_loss, "stochastic": True, "prefetch": 2},
    "aux": lambda: {
        "loss": normalised_loss,
        "stochastic": True,
        "aux": aux(),
        "sampler": smile("minimal_norm"),
        "steps_per_dispatch": 3,
    },
    "a generator": lambda: {"batches": (x for x in regression(60)), "prefetch": 2},
    "a place": lambda: {"batches": Positioned(regression(7)), "prefetch": 2},
    "a place in bytes": lambda: {
        "batches": Positioned(regression(7), as_bytes=True),
        "sampler": smile("minimal_norm"),
        "steps_per_dispatch": 3,
        "prefetch": 2,
    },
    "inside a chain": lambda: {
        "sampler": optax.chain(optax.clip_by_global_norm(1.0), smile()),
        "batches": itertools.cycle(regression(7)),
    },
}


FAST = ("aux", "a generator")


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_run_in_pieces_gives_the_bits_of_one_in_one_go(tmp_path, case):
    """A crash, whose last checkpoint is before its last draw; a signal; the rest."""
    expected = run(tmp_path / "whole", checkpoint_minutes=60, **CASES[case]())
    pieces = tmp_path / "pieces"
    with pytest.raises(Crash):
        run(pieces, callback=crash_at(11), **CASES[case]())
    assert newest_checkpoint(pieces) > 0
    with pytest.warns(UserWarning, match="ended early with 4 of 5 draws"):
        run(pieces, callback=signal_at(19, signal.SIGTERM), checkpoint_minutes=60, **CASES[case]())
    assert_same_bits(run(pieces, **CASES[case]()), expected)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_batches_with_a_place_are_not_read_again(tmp_path, as_bytes):
    with pytest.raises(Crash):
        run(tmp_path, batches=Positioned(regression(7), as_bytes), callback=crash_at(11))
    again = Positioned(regression(7), as_bytes)
    run(tmp_path, batches=again)
    assert again.num_read == STEPS - 10


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_grain_goes_on_where_it_was(tmp_path, kind):
    grain = pytest.importorskip("grain")
    x, y = (np.concatenate(part) for part in zip(*regression(4), strict=True))

    def batches():
        rows = list(zip(x, y, strict=True))
        if kind == "dataset":
            return grain.MapDataset.source(rows).shuffle(seed=3).batch(20).to_iter_dataset()
        return grain.DataLoader(
            data_source=rows,
            sampler=grain.samplers.IndexSampler(len(rows), shuffle=True, seed=3, num_epochs=1),
            operations=[grain.transforms.Batch(20)],
            worker_count=0,
        )

    expected = run(batches=batches())
    pieces = tmp_path / "pieces"
    with pytest.raises(Crash):
        run(pieces, batches=batches(), prefetch=2, callback=crash_at(11))
    got = run(pieces, batches=batches(), prefetch=2)
    np.testing.assert_array_equal(got.params["w"], expected.params["w"])


@pytest.mark.slow
def test_batches_that_ran_out_may_grow(tmp_path):
    """Nine batches are four steps of two and a rest, which the next run takes again."""
    arguments: dict[str, Any] = {"sampler": smile("minimal_norm"), "steps_per_dispatch": 3}
    arguments |= {"num_warmup": 1, "num_draws": 2}

    def batches(count):
        return iter(regression(18)[:count])

    pieces = tmp_path / "pieces"
    expected = run(tmp_path / "whole", batches=batches(18), **arguments)
    for _ in range(2):
        with pytest.warns(UserWarning, match="ended early with 1 of 2 draws"):
            assert run(pieces, batches=batches(13), **arguments).num_draws == 1
    rule = r"`sample\(batches=...\)` must be those of the run .* took 12 in pass 0, got 9 in pass 0"
    with pytest.raises(ValueError, match=rule):
        run(pieces, batches=batches(9), **arguments)
    assert_same_bits(run(pieces, batches=batches(18), **arguments), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_signal_ends_the_run_in_order(tmp_path, number, prefetch):
    """The step is finished, a checkpoint written; afterwards signals mean what they did before."""
    told = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda *_: told.append(_)) for each in numbers}
    handlers = {each: signal.getsignal(each) for each in numbers}
    try:
        with pytest.warns(UserWarning, match=r"^`sample` ended early with 3 of 5 draws"):
            got = run(
                tmp_path,
                callback=signal_at(15, number),
                prefetch=prefetch,
                checkpoint_minutes=60,
            )
        assert {each: signal.getsignal(each) for each in numbers} == handlers and not told
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert got.num_draws == 3
    assert newest_checkpoint(tmp_path) == 15
    assert run(tmp_path).num_draws == SAMPLES


def test_a_second_control_c_raises_at_once(tmp_path):
    expected, handler = run(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callback=signal_at(15, signal.SIGINT, signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is handler
    got = run(tmp_path)
    np.testing.assert_array_equal(got.params["w"], expected.params["w"])


def test_stopped_before_the_first_draw(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="stopped before the first draw"):
        run(tmp_path, callback=signal_at(3, signal.SIGTERM))
    assert newest_checkpoint(tmp_path) == 3
    np.testing.assert_array_equal(run(tmp_path).params["w"], run().params["w"])


@pytest.mark.parametrize("steps_per_dispatch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_more_draws_make_a_run_longer(tmp_path, steps_per_dispatch):
    arguments: dict[str, Any] = {
        "steps_per_dispatch": steps_per_dispatch,
        "sampler": tuned("leapfrog"),
    }
    arguments |= {"checkpoint_minutes": 60}
    expected = run(tmp_path / "long", num_draws=8, **arguments)
    begun = run(tmp_path / "grown", num_draws=3, **arguments)
    assert begun.num_draws == 3
    got = run(tmp_path / "grown", num_draws=8, **arguments)
    assert_same_bits(got, expected)


def test_a_finished_run_computes_nothing(tmp_path):
    expected = run(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}

    def refuse(*_):
        raise AssertionError("there is nothing left to do")

    with pytest.warns(
        UserWarning, match=r"draws of 20\d\d-\d\d-\d\d loaded from .*: it is finished"
    ):
        again = run(tmp_path, callback=refuse)
    assert_same_bits(again, expected)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run that crashed at step 11, with two draws and checkpoints after steps 9 and 10."""
    directory = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Crash):
        run(directory, callback=crash_at(11))
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["10", "9"]
    assert optax_smile.load_snapshots(directory).num_draws == 2
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copied(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "run"))


def content_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


WIDER = {"w": jnp.zeros((CHAINS, 4)), "b": jnp.zeros(CHAINS)}
FEWER: Any = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
OTHER_STEP = optax_smile.smile_naive(
    0.03, num_data=NUM_DATA, decoherence_length=0.1, key=jax.random.key(5)
)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"thin": 2}, r"settings\.thin = 2, got .* with 4\."),
        ({"num_warmup": 7}, r"settings\.num_warmup = 7, got .* with 3\."),
        ({"key": jax.random.key(1)}, r"settings\.key = \[0, 1\]"),
        ({"batch_per": "step"}, r"settings\.batch_per = 'step'"),
        ({"sampler": OTHER_STEP}, r"settings\.sampler\.step_size = 0\.03, got .* with 0\.02\."),
        ({"sampler": smile("minimal_norm")}, r"settings\.sampler\.integrator = 'minimal_norm'"),
        ({"sampler": smile(prior_precision=2.0)}, r"settings\.sampler\.prior_precision = 2\.0"),
        ({"sampler": tuned("leapfrog")}, r"settings\.sampler\.name = 'psmile'"),
        ({"loss": noisy_loss, "stochastic": True}, r"settings\.stochastic = True"),
        ({"params": WIDER}, r"leaves = .*'shape': \[4\]"),
        ({"params": {**start(), "c": jnp.zeros(CHAINS)}}, "leaves = .*'name': 'c'"),
        ({"params": FEWER}, r"num_chains = 2, got .* with 3\."),
        (
            {"aux": aux(), "loss": lambda params, batch, aux: (0.0, aux)},
            "leaves = .*'name': 'aux/mean'",
        ),
        ({"dtype": "float16"}, r"stored_dtype = 'float16', got .* with None\."),
    ],
)
def test_the_directory_of_another_run_is_refused(half, arguments, name):
    before = content_of(half)
    rule = r"`sample\(directory=...\)` must be a new one or that of the same run, with "
    with pytest.raises(ValueError, match=rule + name):
        run(half, **arguments)
    assert content_of(half) == before


def test_a_state_of_other_arrays_is_refused(copied):
    """A chain with something new in front, or what a later version of the library might have."""
    before = content_of(copied)
    other = optax.chain(optax.trace(0.9), smile())
    with pytest.raises(ValueError, match=r"that of the same run, with settings.chain = "):
        run(copied, sampler=other)
    assert content_of(copied) == before
    manifest = _manifest.read("sample", copied)
    _manifest.write(copied, manifest | {"versions": {"optax": "0.1"}})
    with pytest.raises(
        ValueError, match=r"(?s)checkpoint .*/10 cannot be read .*sampler has changed"
    ):
        run(copied, sampler=other)


def test_what_cannot_be_resumed(copied):
    form = r"`sample\(directory=...\)` must be "
    with pytest.raises(ValueError, match=form + "a directory without draws where `resume` is Fa"):
        run(copied, resume=False)
    for draw in copied.glob("draw-*"):
        draw.unlink()
    with pytest.raises(ValueError, match=form + "a directory without draws where `resume` is Fa"):
        run(copied, resume=False)


def test_draws_without_a_checkpoint_are_refused(copied):
    shutil.rmtree(copied / "checkpoints")
    rule = r"`sample\(directory=...\)` must be a directory with a checkpoint .* holds draws alone"
    with pytest.raises(ValueError, match=rule):
        run(copied)


def test_the_start_is_needed_to_go_on(copied):
    for file in copied.glob("start.*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"lacks the file start.chains-\*.safetensors"):
        run(copied)
    kept = optax_smile.load_snapshots(copied)
    assert np.all(np.isfinite(kept.params["w"]))


def test_a_schedule_of_optax_is_described():
    """One of its branches leaves a variable unset, another rate is another run."""

    def described(rate):
        schedule = optax.exponential_decay(0.05, 100, rate)
        return _settings.of(optax_smile.smile_naive(schedule, num_data=NUM_DATA), jnp.zeros(2))

    assert described(0.2) == described(0.2) != described(0.3)


def test_another_large_array_is_another_run():
    def described(last):
        table = jnp.append(jnp.full(20, 0.1), last)
        return _settings.of(
            optax_smile.smile_naive(lambda at: table[at], num_data=NUM_DATA), jnp.zeros(2)
        )

    assert described(0.1) == described(0.1) != described(0.2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda old: json.dumps({**json.loads(old), "format": 99}).encode(), "format 3, got fo"),
        (lambda old: old[: len(old) // 2], "readable manifest.json, got .*/manifest.json"),
        (lambda old: None, "directory with a manifest.json, got"),
    ],
    ids=["foreign", "truncated", "missing"],
)
def test_a_manifest_that_cannot_be_trusted(copied, content, message):
    file = copied / "manifest.json"
    written = content(file.read_bytes())
    file.unlink() if written is None else file.write_bytes(written)
    before = content_of(copied)
    with pytest.raises(ValueError, match=r"`sample\(directory=...\)` must be a .*" + message):
        run(copied)
    assert content_of(copied) == before


def test_a_directory_in_use_is_refused_until_its_process_ends(copied, whole):
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX);"
        "file.truncate(0); file.write('4711'); file.flush(); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(copied / ".lock-0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        rule = r"must be in use by no live run, got .*, where process 4711 is at work"
        before = content_of(copied)
        with pytest.raises(ValueError, match=rule):
            run(copied)
        assert content_of(copied) == before
        other.kill()
    assert_same_bits(run(copied), whole)


def test_a_run_holds_its_directory_and_lets_go_of_it(tmp_path):
    refused = []

    def second(step, stats):
        with pytest.raises(ValueError, match=f"where process {os.getpid()} is at work"):
            run(tmp_path)
        refused.append(step)

    run(tmp_path, callback=second, num_draws=1)
    assert refused == [3, 7]
    with _checkpoint.lock("test", tmp_path):
        pass


def test_a_process_that_was_forked_meanwhile_does_not_hold_the_directory(tmp_path):
    """As the workers of a data loader are: they share the open file."""
    with _checkpoint.lock("test", tmp_path):
        held = [
            name for name in os.listdir("/proc/self/fd") if _is_open(name, tmp_path / ".lock-0")
        ]
        shared = [os.dup(int(name)) for name in held]
    try:
        with _checkpoint.lock("test", tmp_path):
            assert len(shared) == 1
    finally:
        for descriptor in shared:
            os.close(descriptor)


def _is_open(descriptor: str, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    return False


@pytest.mark.parametrize("wrong", ["rows", "later"])
def test_after_wrong_batches_the_right_ones_will_do(tmp_path, whole, wrong):
    def ends_badly():
        yield from regression(7)[:5]
        raise Crash

    batches = [np.zeros(3)] if wrong == "rows" else ends_badly()
    with pytest.raises((Crash, ValueError, TypeError)):
        run(tmp_path, batches=batches)
    assert_same_bits(run(tmp_path), whole)


@pytest.mark.parametrize("damage", ["truncate", "empty", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(copied, whole, damage):
    newest = copied / "checkpoints" / "10"
    if damage == "remove":
        shutil.rmtree(newest / "carry")
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 * (damage != "empty")])
    with pytest.raises(ValueError, match=f"The checkpoint {newest} cannot be read .*one before"):
        run(copied)
    assert len(list(optax_smile.load_snapshots(copied))) == 2 * CHAINS
    shutil.rmtree(newest)
    assert_same_bits(run(copied), whole)


@contextlib.contextmanager
def largest_file(size: int):
    """Let writing beyond so many bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wide_start() -> Any:
    """A frozen leaf that no compression makes small, and a sampled one of 24 kB a chain."""
    noise = np.random.default_rng(0).normal(size=(CHAINS, 60_000)).astype(np.float32)
    return {**start(), "frozen": jnp.asarray(noise), "wide": jnp.zeros((CHAINS, 6_000))}


def wide_loss(params, batch):
    return mean_loss(params, batch) + jnp.sum(params["wide"] ** 2) / 2


def wide_sampler():
    labels = {"w": "sampled", "b": "sampled", "wide": "sampled", "frozen": "frozen"}
    return optax.partition({"sampled": smile(), "frozen": optax.set_to_zero()}, labels)


# Where a save fails Orbax drops other writes of it in the middle, which are reported one by one.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("full", ["draws", pytest.param("checkpoints", marks=pytest.mark.slow)])
def test_a_full_disk_names_the_file_and_room_lets_it_go_on(tmp_path, full):
    """Draws are 72 kB and checkpoints 800 kB."""
    arguments: dict[str, Any] = {"loss": wide_loss, "params": wide_start()}
    arguments |= {
        "sampler": wide_sampler(),
        "check": False,
        "checkpoint_minutes": 60 if full == "draws" else 0,
    }
    size = 20_000 if full == "draws" else 100_000
    expected = run(tmp_path / "whole", **arguments)
    pieces = tmp_path / "pieces"
    with contextlib.ExitStack() as stack:

        def fill(step, stats):
            if step == 11:
                while optax_smile.load_snapshots(pieces).num_draws < 2:
                    time.sleep(0.01)
                stack.enter_context(largest_file(size))

        name = r": .*/pieces/draw-00000002" if full == "draws" else ".*/pieces/checkpoints/11 could"
        with pytest.raises(OSError, match=name):
            run(pieces, callback=fill, **arguments)
    kept = optax_smile.load_snapshots(pieces)
    assert kept.num_draws == 2
    np.testing.assert_array_equal(kept.params["wide"], expected.params["wide"][:, :2])
    assert_same_bits(run(pieces, **arguments), expected)


def test_a_directory_that_cannot_be_written_is_named(half, whole):
    """Root may write anywhere, hence becomes somebody else, who cannot read compiled programs."""
    compiled = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    with contextlib.ExitStack() as stack:
        outside = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        directory = Path(shutil.copytree(half, outside / "run"))
        stack.callback(jax.config.update, "jax_compilation_cache_dir", compiled)
        stack.callback(compilation_cache.reset_cache)
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        for path in (outside, directory):
            path.chmod(0o555)
        (directory / ".lock-0").chmod(0o444)
        if (me := os.geteuid()) == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=str(directory)):
                run(directory)
            with pytest.raises(PermissionError, match=str(outside / "new")):
                run(outside / "new")
            assert optax_smile.load_snapshots(directory).num_draws == 2
        finally:
            os.seteuid(me)
            for path in (outside, directory):
                path.chmod(0o755)
        (directory / ".lock-0").chmod(0o644)
        assert_same_bits(run(directory), whole)


def names_in(file: Path) -> set[str]:
    """Names of the arrays in a safetensors file."""
    content = file.read_bytes()
    return set(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])) - {
        "__metadata__"
    }


def test_frozen_leaves_are_stored_once_and_others_come_back_right(tmp_path):
    """`late` is moved by another optimiser, from the tenth step on: after the first draw."""
    params = {**start(), "frozen": {"deep": jnp.arange(15.0).reshape(CHAINS, 5)}}
    params["late"] = jnp.zeros((CHAINS, 2))
    labels = {"w": "sampled", "b": "sampled", "frozen": "frozen", "late": "late"}
    transforms: dict[Any, Any] = {
        "sampled": smile(),
        "frozen": optax.set_to_zero(),
        "late": optax.sgd(lambda count: jnp.where(jnp.less(count, 9), 0.0, 0.1)),
    }

    def loss(params, batch):
        return mean_loss(params, batch) + jnp.sum((params["late"] - 1.0) ** 2)

    arguments: dict[str, Any] = {"loss": loss, "params": params}
    arguments["sampler"] = optax.partition(transforms, labels)
    expected = run(**arguments)
    with pytest.raises(Crash):
        run(tmp_path, callback=crash_at(15), **arguments)
    got = run(tmp_path, **arguments)
    for mine, other in zip(*map(jax.tree.leaves, (got.params, expected.params)), strict=True):
        np.testing.assert_array_equal(mine, other)
    late = got.params["late"]
    assert not late[:, 0].any() and np.all(np.diff(late[:, 1:], axis=1) > 0)
    np.testing.assert_array_equal(
        got.params["frozen"]["deep"], np.repeat(params["frozen"]["deep"][:, None], SAMPLES, axis=1)
    )
    files = sorted(tmp_path.glob("draw-*"))
    assert [("late" in names_in(file)) for file in files] == [False] + [True] * (SAMPLES - 1)
    assert not any("frozen/deep" in names_in(file) for file in files)
    (begin,) = tmp_path.glob("start.*")
    assert names_in(begin) == {"w", "b", "frozen/deep", "late"}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_draws(tmp_path):
    """800 draws would be 40 MB, on the device or the host."""
    params = {**start(), "wide": jnp.zeros((CHAINS, 4_000))}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    live, host, told, alive = {}, {}, [], []

    def look(step, stats):
        told.append(weakref.ref(stats["num_gradients"]))
        if step % 100 < 10:
            live[step] = sum(array.nbytes for array in jax.live_arrays())
        if step in (200, 1000):
            gc.collect()
            host[step] = resident()
            alive.append(sum(ref() is not None for ref in told))

    run(
        tmp_path,
        loss=lambda params, batch: mean_loss(params, batch) + jnp.sum(params["wide"] ** 2),
        params=params,
        num_warmup=0,
        num_draws=1001,
        thin=1,
        checkpoint_minutes=60,
        check=False,
        callback=look,
    )
    early = max(live[step] for step in range(5, 10))
    for begin in (300, 900):
        late = max(live[step] for step in range(begin, begin + 10))
        assert late - early <= (_files.QUEUE_SIZE + 1) * size
    assert host[1000] - host[200] < 16e6
    # Those of this step, of the step before, and of the draws that wait.
    assert max(alive) <= _files.QUEUE_SIZE + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"steps_per_dispatch": 0},
            r"`sample\(steps_per_dispatch=...\)` must be an integer >= 1, got 0",
        ),
        ({"prefetch": -1}, r"`sample\(prefetch=...\)` must be an integer >= 0, got -1"),
        ({"prefetch": 1.5}, r"`sample\(prefetch=...\)` must be an integer >= 0, got 1.5"),
        ({"checkpoint_minutes": -1}, r"`sample\(checkpoint_minutes=...\)` must be >= 0, got -1"),
        (
            {"checkpoint_minutes": float("nan")},
            r"`sample\(checkpoint_minutes=...\)` must be >= 0, got nan",
        ),
        ({"batch_per": "epoch"}, r"`sample\(batch_per=...\)` must be one of 'gradient', 'step'"),
        (
            {"aux": {"mean": jnp.zeros((2, 2))}},
            r"`sample\(aux=...\)` must be .* a leading axis of 3 chains, got .*\(2, 2\)",
        ),
    ],
)
def test_arguments_are_judged_before_anything_is_written(tmp_path, arguments, message):
    def refuse(*_, **__):
        raise AssertionError("the loss was asked")

    directory = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        run(directory, loss=refuse, **arguments)
    assert not directory.exists()


def test_a_start_without_a_finite_loss_names_its_chains(tmp_path):
    params = start()
    params["w"] = params["w"].at[1, 0].set(jnp.nan)
    rule = r"`sample\(params=...\)` must be a start at which .* finite, got nan in the chains \[1\]"
    with pytest.raises(ValueError, match=rule):
        run(tmp_path, params=params)
    assert run(tmp_path, params=start()).num_draws == SAMPLES


def test_a_checkpoint_that_was_not_finished_is_none(copied, whole):
    """As a kill leaves it between its last file and its checksums."""
    (copied / "checkpoints" / "10" / _checkpoint.SUMS).unlink()
    assert_same_bits(run(copied), whole)


def test_checkpoints_name_parameters_and_fields_of_the_state(half):
    """Whatever way the arrays travel."""
    step = half / "checkpoints" / str(newest_checkpoint(half)) / "carry"
    read: Any = ocp.StandardCheckpointer().metadata(step.absolute())
    leaves = jax.tree_util.tree_leaves_with_path(read.item_metadata.tree)
    shapes = {jax.tree_util.keystr(x, simple=True, separator="."): y.shape for x, y in leaves}
    assert shapes["params.w"] == shapes["state.momentum.direction.w"] == (CHAINS, 2)
    assert shapes["state.num_steps"] == shapes["state.guardrail.num_rejected"] == (CHAINS,)


def test_a_directory_of_the_first_format_is_refused(copied):
    file = copied / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    rule = rf"\(directory=...\)` must be .* of format 3, got format 1 in {file}"
    for name, read in (("sample", run), ("load_snapshots", optax_smile.load_snapshots)):
        with pytest.raises(ValueError, match=f"`{name}{rule}"):
            read(copied)
