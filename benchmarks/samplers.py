"""Samplers by their names in tables, which stay when those of the library change."""

from typing import Any

import optax_smile

NAIVE = ("smile_naive", "psmile_naive")


def build(name: str, step_size: Any = None, *, key: Any = None, **options: Any) -> Any:
    """Build the sampler of a row.

    Args:
        name: of a function of the library; `"... published"` has the settings of the paper, and
            `"smile_naive"` and `"psmile_naive"` have no noise but the gradient's.
        step_size: None if the sampler chooses its own.
        key: random; left out where no random numbers are drawn.
        options: of the function.
    """
    first = () if step_size is None else (step_size,)
    name, _, is_published = name.partition(" ")
    if is_published:
        return getattr(optax_smile.published, name)(*first, **options)
    if name in NAIVE:
        name, options = name.removesuffix("_naive"), {"decoherence_length": None} | options
    if options.get("decoherence_length", "drawn") is not None:
        options["key"] = key
    return getattr(optax_smile, name)(*first, **options)
