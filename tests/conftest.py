"""Configuration of the suite: devices, compiler options, memory, and settings of modules.

`pytest -n 3` starts two workers with one CPU device, for most files, and one with eight virtual
devices for those that need several: the number of devices is fixed when a process first uses JAX.
A single process has eight.

Compilation is most of the cost of the suite. Compiled programs are cached between runs, also for
processes that tests start. Most optimizations are off, except in slow tests and in modules with
`OPTIMIZED = True`, which measure memory or statistics. With `OPTIMIZED = False` they are off in
slow tests as well, so that these can compare bits with results of a fixture.

`--full` runs the full campaigns of `tests/faults`, which then record their results.
"""

import gc
import logging
import os
import pathlib
import signal

import jax
import pytest
from xdist.scheduler import LoadFileScheduling

COMPILED = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Without XLA's fusion emitters a program of psmile compiles in a quarter of the time; without
# splitting modules, all compile 5 % faster. XLA exits at an unknown flag: that of JAX 0.12 no
# longer has the first one.
FLAGS = os.environ.get("XLA_FLAGS", "")
if jax.__version_info__[:2] == (0, 10) and "fusion_emitters" not in FLAGS:
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = FLAGS.strip()
NUM_DEVICES = 8
# Name of the worker with several devices, if there are several workers.
DEVICE_WORKER, DEVICE_TESTS = "gw0", ("tests/devices/", "tests/faults/test_kills.py")
NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
IS_SINGLE = NUM_WORKERS > 1 and os.environ["PYTEST_XDIST_WORKER"] != DEVICE_WORKER

# Background jobs of a shell ignore SIGINT, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1 if IS_SINGLE else NUM_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
# Public under this name since JAX 0.8.
if not hasattr(jax, "enable_x64"):
    from jax import experimental

    jax.enable_x64 = getattr(experimental, "enable_x64")  # noqa: B009


class Failing(logging.Handler):
    """Fail a test if the package logs that it cannot read the program of a loss."""

    def emit(self, record):
        if record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]


logging.getLogger("optax_smile").addHandler(Failing())
logging.getLogger("optax_smile").setLevel(logging.DEBUG)


def needs_devices(path):
    return any(part in path for part in DEVICE_TESTS)


class DevicesApart(LoadFileScheduling):
    """Give the files that need several devices to one worker, and all others to the others."""

    def schedule(self):
        # If there are more workers than files, the last ones end at once.
        by_name = sorted(self.assigned_work.items(), key=lambda item: item[0].gateway.id)
        self.assigned_work = type(self.assigned_work)(by_name)
        super().schedule()

    def _assign_work_unit(self, node):
        wants_devices, is_alone = node.gateway.id == DEVICE_WORKER, len(self.assigned_work) == 1
        for scope in self.workqueue:
            if is_alone or needs_devices(scope) == wants_devices:
                self.workqueue.move_to_end(scope, last=False)
                return super()._assign_work_unit(node)
        # A worker runs its last test when it knows that no other follows.
        node.shutdown()


def pytest_xdist_make_scheduler(config, log):
    if config.getoption("numprocesses") and config.getoption("numprocesses") > 1:
        return DevicesApart(config, log)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="campaigns of tests/faults in full")


def optimize(is_optimized):
    """Set the compiler options of this process and of its child processes."""
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not is_optimized))


@pytest.fixture(autouse=True, scope="module")
def module_settings(request):
    """Apply the settings of a module, and free its compiled programs afterwards."""
    optimize(bool(getattr(request.module, "OPTIMIZED", False)))
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def optimizations(request):
    """Compile quickly, except where memory or statistics are measured."""
    is_long = any(request.node.get_closest_marker(name) for name in ("slow", "nightly"))
    of_module = getattr(request.module, "OPTIMIZED", None)
    optimize(is_long if of_module is None else of_module)
    yield
    optimize(bool(of_module))
    # Programs for eight devices take several times the memory of those for one.
    if needs_devices(request.path.as_posix()):
        jax.clear_caches()
