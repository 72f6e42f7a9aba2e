"""Names for values that the type system cannot describe further."""

from typing import Any, TypeAlias

# A pytree of arrays. Where it has a role of its own, use `optax.Params`, `optax.Updates` or
# `optax.OptState`.
Tree: TypeAlias = Any
# A pytree of numeric arrays that the loss function takes as its second argument.
Batch: TypeAlias = Any
# What `apply_fn` returns: an array, or the pair or tree that the likelihood expects.
Output: TypeAlias = Any
# Keyword arguments that are collected before a call.
Options: TypeAlias = dict[str, Any]
