"""The manifest of a run: its parameter tree, its settings and the versions of libraries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _disk, _tree
from optax_smile._version import __version__
from optax_smile.draws import stopping as _stopping
from optax_smile.draws import subset as _subset

FORMAT = 3
FILE = "manifest.json"
# Precisions to which draws may be rounded on disk.
StoredDtype = Literal["float16", "float32", "float64"]
STORED_DTYPES = get_args(StoredDtype)
# Stay below Python's recursion limit of 1,000.
LONGEST_PATH = 500
REMEDY = "Restore it: a run with the same arguments in a new directory writes an identical one."


class Leaf(NamedTuple):
    """One array of the parameter tree.

    Attributes:
        name: path of the leaf, joined by slashes as in `_tree.name`, and name of its array in the
            files. Names are unique.
        path: the path as pairs of kind (`key`, `index` or `attribute`) and entry.
        shape: shape for one chain.
        dtype: dtype of the parameters in the run; a file may have a lower precision.
    """

    name: str
    path: list[list[Any]]
    shape: list[int]
    dtype: str


def _name(path: list[list[Any]]) -> str:
    """Name a leaf; a bare array has no path, and safetensors reserves one name."""
    name = _tree.name(path) if path else "params"
    return "~" + name if name == "__metadata__" else name


def leaves_of(params: Any) -> list[Leaf]:
    """Describe the leaves of stacked parameters `[chain, ...]`."""
    leaves = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = [_tree.entry(key) for key in keys]
        leaves.append(Leaf(_name(path), path, list(leaf.shape[1:]), str(leaf.dtype)))
    return leaves


def versions() -> dict[str, str]:
    """Return the versions of this library and of the libraries that affect a run."""
    libraries = {"jax": jax, "optax": optax, "numpy": np, "safetensors": _disk.import_safetensors()}
    others = {name: library.__version__ for name, library in libraries.items()}
    return {"optax-smile": __version__, **others}


def of_run(params: Any, dtype: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make the manifest of a run with stacked parameters, whose draws are rounded to `dtype`."""
    leaves = leaves_of(params)
    if len({leaf.name for leaf in leaves}) < len(leaves):
        rule = "a tree whose leaves have distinct paths"
        _check.fail("sample", "params", rule, sorted(leaf.name for leaf in leaves))
    described = {
        "format": FORMAT,
        "num_chains": int(jax.tree.leaves(params)[0].shape[0]),
        "leaves": [leaf._asdict() for leaf in leaves],
        "stored_dtype": dtype,
        "settings": dict(settings),
        "data": {},
        "loss": None,
        "versions": versions(),
    }
    return json.loads(json.dumps(described))


def _checksum(manifest: Mapping[str, Any]) -> str:
    return _disk.checksum(json.dumps(manifest, sort_keys=True))


def write(directory: Path, manifest: Mapping[str, Any]):
    """Write a manifest with its checksum."""
    content = json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)
    _disk.write(directory / FILE, content.encode())


def read(where: str, directory: Path) -> dict[str, Any]:
    """Read the manifest of a directory.

    Raises:
        ValueError: a missing or unreadable manifest, another format, a wrong checksum, or an
            invalid field.
    """
    file = directory / FILE
    if not file.is_symlink() and not file.exists():
        _check.fail(where, "directory", f"a directory with a {FILE}", directory)
    try:
        manifest = json.loads(_disk.read_text(file))
        version = manifest["format"]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        rule = f"a directory with a readable {FILE}"
        _check.fail(where, "directory", rule, f"{file} ({error})", REMEDY)
    if type(version) is not int or version != FORMAT:
        rule = f"a directory of snapshots of format {FORMAT}"
        remedy = "Read it with the version of optax_smile that its manifest names."
        _check.fail(where, "directory", rule, f"format {str(version)[:80]} in {file}", remedy)
    if manifest.pop("checksum", None) != _checksum(manifest):
        rule = f"a directory whose {FILE} matches its checksum"
        _check.fail(where, "directory", rule, file, REMEDY)
    _check_fields(where, file, manifest)
    return manifest


def _check_fields(where: str, file: Path, manifest: Mapping[str, Any]):
    """Require valid fields, even if the checksum is correct."""

    def need(field: str, value: Any, rule: str, holds: Any):
        if not holds:
            rule = f"a directory whose {FILE} has {rule} in the field `{field}`"
            _check.fail(where, "directory", rule, f"{str(value)[:80]!r} in {file}", REMEDY)

    def is_whole(value: Any, smallest: int) -> bool:
        return type(value) is int and value >= smallest

    fields = ("num_chains", "leaves", "stored_dtype", "settings", "versions")
    values: Any = map(manifest.get, fields)
    number, leaves, dtype, settings, versions = values
    need("num_chains", number, "an integer >= 1", is_whole(number, 1))
    is_known = dtype is None or isinstance(dtype, str) and dtype in STORED_DTYPES
    need("stored_dtype", dtype, f"null or one of {', '.join(STORED_DTYPES)}", is_known)
    need("settings", settings, "names and values", isinstance(settings, dict))
    sampler = settings.get("sampler")
    is_named = isinstance(sampler, dict) and isinstance(sampler.get("name"), str)
    need("settings.sampler", sampler, "null or a named sampler", sampler is None or is_named)
    for name, smallest in (("num_warmup", 0), ("thin", 1)):
        value = settings.get(name, smallest)
        need(f"settings.{name}", value, f"an integer >= {smallest}", is_whole(value, smallest))
    data, loss = manifest.get("data"), manifest.get("loss")
    need("data", data, "names and values", isinstance(data, dict))
    is_list = isinstance(loss, list) and all(isinstance(x, float) for x in loss)
    need("loss", loss, "null or a list of numbers", loss is None or is_list)
    has_start, chosen = manifest.get("has_start", True), manifest.get("subset")
    need("has_start", has_start, "true or false", isinstance(has_start, bool))
    is_subset = chosen is None or _subset.is_described(chosen)
    need("subset", chosen, "null or the lists of a subset, all of one length", is_subset)
    stopping = manifest.get("stopping")
    is_stopping = stopping is None or _stopping.is_described(stopping)
    need("stopping", stopping, "null or the looks of a stopping rule", is_stopping)
    need("versions", versions, "names and values", isinstance(versions, dict))
    need("leaves", leaves, "at least one leaf", isinstance(leaves, list) and leaves)
    for number, leaf in enumerate(leaves):
        at = f"leaves[{number}]"
        is_leaf = isinstance(leaf, dict) and leaf.keys() == set(Leaf._fields)
        need(at, leaf, f"the fields {', '.join(Leaf._fields)}", is_leaf)
        name, path, shape, dtype = (leaf[field] for field in Leaf._fields)
        need(f"{at}.path", path, "pairs of kind and entry", _is_path(path))
        need(f"{at}.name", name, "the name of its path", name == _name(path))
        is_shape = isinstance(shape, list) and all(is_whole(size, 0) for size in shape)
        need(f"{at}.shape", shape, "integers >= 0", is_shape)
        need(f"{at}.dtype", dtype, "a numeric dtype", _is_dtype(dtype))
    need("leaves", leaves, "the paths of a tree", _are_a_tree([leaf["path"] for leaf in leaves]))


def _is_path(path: Any) -> bool:
    kinds = {"key": (str, int), "attribute": (str, int), "index": int}

    def is_entry(entry):
        is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        return is_pair and isinstance(entry[1], kinds.get(entry[0], ()))

    return isinstance(path, list) and len(path) < LONGEST_PATH and all(map(is_entry, path))


def _is_dtype(name: Any) -> bool:
    try:
        return isinstance(name, str) and jnp.issubdtype(name, jnp.number) or name == "bool"
    except TypeError:
        return False


def _are_a_tree(paths: list[list[list[Any]]]) -> bool:
    """Return whether no path equals another path or is a prefix of it."""
    ends = {tuple(entry for _, entry in path) for path in paths}
    begun = {end[:length] for end in ends for length in range(len(end))}
    return len(ends) == len(paths) and not ends & begun
