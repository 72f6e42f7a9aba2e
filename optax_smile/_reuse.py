"""Compiled programs that outlive a run, so that the next run need not compile."""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Callable, Hashable

import jax
import jax.core
import numpy as np

from optax_smile._types import Tree

LIMIT = 32  # Programs that are kept, those used last.
LARGEST = 2**24  # Bytes of constants, such as data in a closure, above which none is kept.
_KEPT: collections.OrderedDict[Hashable, Callable] = collections.OrderedDict()
_CALLED = threading.local()


class Program:
    """A function to be compiled, which shares the programs of the same code and devices.

    The code is that which is compiled, with all constants: a function that is made anew, or whose
    closure has changed, shares that of another one only where it computes the same. Code that calls
    Python is not shared, since it has no more than an address. Only the last argument may change
    its shapes from call to call.
    """

    def __init__(self, function: Callable, compiled: Callable = jax.jit):
        # If a kept program is traced again, for another configuration, it is that of the caller.
        self._function, self._own = function, compiled(lambda *given: _CALLED.function(*given))
        self._programs: dict[Hashable, Callable] = {}

    def __call__(self, *given: Tree) -> Tree:
        _CALLED.function = self._function
        leaves, structure = jax.tree.flatten(given[-1])
        # A batch may be empty.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves or jax.tree.leaves(given)):
            return self._own(*given)
        shapes = structure, *map(jax.typeof, leaves)
        if shapes not in self._programs:
            self._programs[shapes] = self._shared(given)
        return self._programs[shapes](*given)

    def _shared(self, given: tuple) -> Callable:
        """Return the kept program that these arguments lower to, or keep its own."""
        traced = self._own.trace(*given)
        if sum(np.size(x) * x.dtype.itemsize for x in traced.jaxpr.consts) > LARGEST:
            return self._own
        lowered = traced.lower()
        if "callback" in (code := lowered.as_text()):
            return self._own
        # An argument that is not used is not in the code.
        leaves, structure = jax.tree.flatten(given)
        places = [getattr(leaf, "sharding", None) for leaf in leaves]
        device = getattr(jax.config, "jax_default_device", None)
        shapes = structure, *map(jax.typeof, leaves), *places, device
        key = hashlib.sha256(code.encode()).digest(), lowered.out_tree, shapes
        _KEPT[key] = _KEPT.pop(key, self._own)
        if len(_KEPT) > LIMIT:
            _KEPT.popitem(last=False)
        return _KEPT[key]
