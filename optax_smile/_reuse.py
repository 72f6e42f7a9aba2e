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
# In code that refers to an object of Python by its address.
BY_ADDRESS = ("callback", "CustomSPMDPartitioning")
# Configurations on which a program depends.
CONFIG = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_device")
CONFIG += ("jax_threefry_partitionable",)
_KEPT: collections.OrderedDict[Hashable, Callable] = collections.OrderedDict()
_LOCK, _CALLED = threading.Lock(), threading.local()


class Program:
    """A function to be compiled, which shares the programs of the same code and devices.

    The code is that which is compiled, with all constants: a function that is made anew, or whose
    closure has changed, shares that of another one only where it computes the same. Code that calls
    Python is not shared, since it has no more than an address. Only the last argument may change
    its shapes from call to call. `mesh` are the devices of `compiled`.
    """

    def __init__(self, function: Callable, compiled: Callable = jax.jit, mesh: Hashable = None):
        # If a kept program is traced again, for another configuration, it is that of the caller.
        self._function, self._own = function, compiled(lambda *given: _CALLED.function(*given))
        self._mesh, self._programs = mesh, dict[Hashable, Callable]()

    def __call__(self, *given: Tree) -> Tree:
        before = getattr(_CALLED, "function", None)
        _CALLED.function = self._function
        try:
            return self._program(given)(*given)
        finally:
            _CALLED.function = before

    def _program(self, given: tuple) -> Callable:
        leaves, structure = jax.tree.flatten(given[-1])
        # A batch may be empty.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves or jax.tree.leaves(given)):
            return self._own
        # Python keeps a reference to each new string by which an attribute is looked up.
        config = (getattr(jax.config, name, None) for name in CONFIG)
        shapes = structure, *map(jax.typeof, leaves), *config
        if shapes not in self._programs:
            self._programs[shapes] = self._shared(given, shapes)
        return self._programs[shapes]

    def _shared(self, given: tuple, shapes: Hashable) -> Callable:
        """Return the kept program that these arguments lower to, or keep its own."""
        traced = self._own.trace(*given)
        size = sum(np.size(x) * x.dtype.itemsize for x in traced.jaxpr.consts)
        # With this flag constants are not in the code.
        if size > LARGEST or getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):
            return self._own
        lowered = traced.lower()
        code = lowered.as_text()
        if len(code) > 4 * LARGEST or any(name in code for name in BY_ADDRESS):
            return self._own
        # An argument that is not used is not in the code.
        leaves, structure = jax.tree.flatten(given)
        places = [(jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves]
        known = structure, *places, shapes, self._mesh, lowered.out_tree
        with _LOCK:
            key = hashlib.sha256(code.encode()).digest(), known
            found = _KEPT[key] = _KEPT.pop(key, self._own)
            if len(_KEPT) > LIMIT:
                _KEPT.popitem(last=False)
        return found
