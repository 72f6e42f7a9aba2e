"""Eight virtual CPU devices, no silent broadcasting, and short windows for modules that ask."""

import jax
import pytest

from optax_smile.stages import preconditioner

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def short_windows(request):
    """Where a module asks for it, psmile measures its scale within the few calls of a test."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "SHORT_WINDOWS", False):
            patch.setattr(preconditioner, "FIRST_WINDOW", 4)
        yield
