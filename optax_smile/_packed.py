"""The state of a chain between calls: scalars in a few arrays, still accessible by name.

A Python loop pays about 2 µs for every array that a compiled call takes or returns. Between calls,
the scalars of a state are therefore in three arrays. `process` does not depend on this.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check
from optax_smile._types import T

if TYPE_CHECKING:
    from optax_smile.state import SamplerState, Stats

# Scalars of these kinds are packed, except those that loops set or read around each call.
KINDS = {"reals": np.floating, "counts": np.signedinteger, "flags": np.bool_}
APART = ("step_size_factor", "state_format")


Inside = TypeVar("Inside", bound="SamplerState")


class Fields(tuple[str, ...]):
    """Names of the items of a `State`. `in` also finds its packed scalars; iteration does not."""

    # Kind and position of each packed scalar.
    packed: dict[str, tuple[str, int]]
    # Last parts of dotted names.
    ambiguous: set[str]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.packed or name in self.ambiguous


class State(tuple, Generic[Inside]):
    """State of a sampler between calls, a named tuple for JAX, Optax and Flax.

    It has the arrays and trees of the state inside a call, under the same names. Scalars are in the
    items `reals`, `counts` and `flags`, `[..., scalar]`, and can be read by their names:
    `state.num_rejected`, `optax.tree.get(state, "num_rejected")`. `optax.tree.set` sets items, and
    `state._replace(...)` also sets scalars.
    """

    _fields: ClassVar[Fields]
    # Structure of the state inside a call, with a leaf for each part, and their names and kinds.
    nested: ClassVar[Any]
    names: ClassVar[tuple[str, ...]]
    kinds: ClassVar[tuple[str, ...]]
    # Name of the part with the structure of the parameters.
    like: ClassVar[str]
    num_calls: ClassVar[int]

    def __new__(cls, *items: object, **named: object) -> State[Inside]:
        """Take items in their order or by name."""
        return super().__new__(cls, items or [named[name] for name in cls._fields])

    def __getattr__(self, name: str) -> Any:
        if name in self._fields.packed:
            kind, place = self._fields.packed[name]
            return _at(getattr(self, kind), place)
        if name in (items := self._items()):
            return items[name]
        if others := [x for x in self.names if x.endswith(f".{name}")]:
            raise AttributeError(f"this state has no {name!r}, but {', '.join(others)}")
        raise AttributeError(f"this state has no {name!r}")

    @classmethod
    def _make(cls, items: Iterable[object]) -> State[Inside]:
        return cls(*items)

    def _items(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _asdict(self) -> dict[str, Any]:
        """Return all parts by name, in the order of the state inside a call."""
        items, packed = self._items(), self._fields.packed
        arrays = {kind: items[kind] for kind in KINDS}
        if all(isinstance(array, jax.Array) for array in arrays.values()):
            # Outside of compiled functions, each is read by one program.
            split = {kind: _split(array) for kind, array in arrays.items()}
            items |= {name: split[kind][place] for name, (kind, place) in packed.items()}
        else:
            items |= {name: _at(arrays[kind], place) for name, (kind, place) in packed.items()}
        return {name: items[name] for name in self.names}

    def _replace(self, **given: object) -> State[Inside]:
        """Replace items or scalars by name."""
        items = self._items()
        if given.keys() == items.keys() and all(given[name] is x for name, x in items.items()):
            # `optax.tree.set` passes all items, and only items.
            rule = f"one of {', '.join(self._fields)}"
            advice = "Set a scalar by `state._replace(name=...)`."
            with _check.called("optax.tree.set"):
                _check.fail("name", rule, "a packed scalar", advice)
        if unknown := [name for name in given if name not in self._fields]:
            raise ValueError(f"Got unexpected field names: {unknown!r}")
        items |= {name: value for name, value in given.items() if name in items}
        for name, (kind, place) in self._fields.packed.items():
            if name in given and isinstance(items[kind], jax.Array):
                items[kind] = items[kind].at[..., place].set(given[name])
            elif name in given:
                items[kind] = np.array(items[kind])
                items[kind][..., place] = given[name]
        return type(self)(**items)

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={part!r}' for name, part in self._asdict().items())})"

    def __reduce__(self) -> tuple[object, ...]:
        skeleton = jax.tree.unflatten(self.nested, self.names)
        return _restored, (skeleton, self.kinds, self.like, self.num_calls, tuple(self))

    def unpack(self) -> Inside:
        """Return the state inside a call."""
        return jax.tree.unflatten(self.nested, self._asdict().values())

    def pack(self, inside: Inside) -> State[Inside]:
        """Return the state after a call, in the precision of this one."""
        parts = dict(zip(self.names, self.nested.flatten_up_to(inside), strict=True))
        return type(self)._of(parts, [getattr(self, kind).dtype for kind in KINDS])

    @classmethod
    def _of(cls, parts: dict[str, Any], dtypes: Sequence[jnp.dtype]) -> State[Inside]:
        scalars: dict[str, list[jax.Array]] = {kind: [] for kind in KINDS}
        for name, (kind, _) in cls._fields.packed.items():
            scalars[kind].append(parts.pop(name))
        pairs = zip(scalars.values(), dtypes, strict=True)
        return cls(*parts.values(), *(jnp.stack(x, axis=-1).astype(kind) for x, kind in pairs))

    @property
    def like_params(self) -> optax.Params:
        """A tree of the leaves that are sampled, with None for the others."""
        return getattr(self, self.like)

    @property
    def gradients_per_step(self) -> int:
        """See `state.SamplerState`."""
        return self.num_calls

    def stats(self) -> Stats:
        """See `state.SamplerState`."""
        return self.unpack().stats()

    def last_accepted(self, params: T) -> T:
        """See `state.SamplerState`."""
        return self.unpack().last_accepted(params)

    def last_received(self) -> tuple[optax.Updates, jax.Array] | None:
        """See `state.SamplerState`."""
        return self.unpack().last_received()


def pack(inside: Inside, like_params: optax.Params) -> State[Inside]:
    """Convert the state of one chain inside a call to the state between calls.

    A part is an array, or a tree with the structure of `like_params`. Its name is that of its
    field, preceded by those of enclosing fields, with dots, if it is not unique.
    """
    like = jax.tree.structure(like_params)

    def is_part(node: object) -> bool:
        return not hasattr(node, "_fields") or jax.tree.structure(node) == like

    paths, nested = jax.tree_util.tree_flatten_with_path(inside, is_leaf=is_part)
    names = _names([path for path, _ in paths])
    parts = dict(zip(names, (part for _, part in paths), strict=True))
    kinds, dtypes = [], {}
    for name, part in parts.items():
        kind = "" if name in APART or getattr(part, "shape", None) != () else _kind_of(part)
        # Scalars of another precision would be rounded.
        is_same = not kind or dtypes.setdefault(kind, part.dtype) == part.dtype
        kinds.append(kind if is_same else "")
    (name,) = (name for name, part in parts.items() if part is like_params)
    layout = nested, tuple(parts), tuple(kinds), name, inside.gradients_per_step
    return _class_of(*layout)._of(parts, [dtypes[kind] for kind in KINDS])


def _names(paths: list[Any]) -> list[str]:
    """Name each part by its last fields, as many as make the names unique."""
    fields = [[key.name for key in path] for path in paths]
    lengths = [1] * len(fields)
    while True:
        names = [".".join(x[-length:]) for x, length in zip(fields, lengths, strict=True)]
        number = Counter(names)
        is_taken = [number[x] > 1 or x in KINDS or hasattr(State, x) for x in names]
        longer = [
            min(n + more, len(x)) for n, more, x in zip(lengths, is_taken, fields, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer


def _kind_of(scalar: jax.Array) -> str:
    kinds = (kind for kind, base in KINDS.items() if jnp.issubdtype(scalar.dtype, base))
    return next(kinds, "")


@functools.cache
def _class_of(
    nested: object, names: tuple[str, ...], kinds: tuple[str, ...], like: str, num_calls: int
) -> type[State[Any]]:
    """Make one class for all states of a layout, so that JAX distinguishes layouts by type."""
    pairs = list(zip(names, kinds, strict=True))
    fields = Fields([*(name for name, kind in pairs if not kind), *KINDS])
    members = [(kind, [name for name, x in pairs if x == kind]) for kind in KINDS]
    fields.packed = {name: (kind, i) for kind, found in members for i, name in enumerate(found)}
    ends = {name.rpartition(".")[2] for name in names if "." in name}
    fields.ambiguous = {x for x in ends if x not in KINDS and not hasattr(State, x)}
    known = {"_fields": fields, "nested": nested, "names": names, "kinds": kinds}
    return type("State", (State,), {**known, "like": like, "num_calls": num_calls})


def _restored(
    skeleton: object, kinds: tuple[str, ...], like: str, num_calls: int, items: tuple[object, ...]
) -> State[Any]:
    """Rebuild a pickled state."""
    names, nested = jax.tree.flatten(skeleton)
    return _class_of(nested, tuple(names), kinds, like, num_calls)(*items)


def _at(array: Any, place: int) -> Any:
    """Return one scalar, its shape, or the leaf itself if a `tree.map` has replaced the array."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape[:-1], array.dtype)
    return array[..., place] if hasattr(array, "shape") else array


@functools.partial(jax.jit, inline=True)
def _split(array: jax.Array) -> Sequence[jax.Array]:
    return [array[..., place] for place in range(array.shape[-1])]
