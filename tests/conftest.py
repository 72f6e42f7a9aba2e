"""Eight virtual CPU devices for the whole suite, and no silent broadcasting."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_what_was_compiled():
    """Compiled functions hold memory maps, of which a process has 65,530."""
    yield
    jax.clear_caches()
