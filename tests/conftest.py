"""Eight virtual CPU devices, no silent broadcasting, and short windows for modules that ask.

`--full` makes the campaigns of `tests/faults` whole, which record what they found then.

Compiling is most of what the suite costs, so what is compiled is kept between runs, for the
processes that tests start as well.
"""

import os
import pathlib

import jax
import pytest

from optax_smile.stages import preconditioner

COMPILED = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="campaigns of tests/faults as a whole")


@pytest.fixture(autouse=True, scope="module")
def short_windows(request):
    """Where a module asks for it, psmile measures its scale within the few calls of a test."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "SHORT_WINDOWS", False):
            patch.setattr(preconditioner, "FIRST_WINDOW", 4)
        yield
