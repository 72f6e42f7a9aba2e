"""Allowed imports between modules, checked from the sources."""

import ast
import pathlib
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

import optax_smile

PACKAGE = pathlib.Path(optax_smile.__file__).parent
ROOT = pathlib.Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
SCRIPTS = sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])
RUN_TIME = {"jax", "optax", "numpy", "optax_smile"}


def part_of(module, package):
    return module.startswith(f"optax_smile.{package}.")


def is_helper(module):
    return module.startswith("optax_smile._")


def imported(nodes):
    """Names of the imported modules; `from a import b` counts as `a.b` where that is a module."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports are not used here"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in whole}
    return names


def at_module_level(tree):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_module_level(node)


def parse(path):
    return ast.parse(path.read_text(), str(path))


def own_imports(module):
    names = imported(ast.walk(parse(MODULES[module])))
    return {name for name in names if name.startswith("optax_smile")} - {"optax_smile"}


# Allowed imports of each room, besides the helpers and itself. The first five are the sampler core;
# the others are the host side, whose interface to it is `parallel` and `state`.
ROOMS = {
    "potential": set(),
    "state": set(),
    "stages": {"potential"},
    "samplers": {"potential", "stages", "state"},
    "published": {"potential", "stages", "samplers"},
    "parallel": set(),
    "draws": {"parallel"},
    "mistakes": {"diagnostics", "parallel", "potential", "state"},
    "chains": {"diagnostics", "mistakes", "parallel", "potential", "state", "draws"},
    "diagnostics": {"state", "draws"},
    "metrics": {"draws"},
    "plots": {"draws", "metrics"},
    "local": {"mistakes", "potential", "samplers", "stages"},
    "tall": {"chains", "mistakes", "potential"},
    "report": {"draws", "diagnostics", "plots"},
    "interop": {"chains", "diagnostics", "draws", "samplers", "stages", "state", "tall"},
}
SHARED = {
    # A norm of its own is a kind of momentum, a matrix a kind of scale.
    "stages": {"evidence", "integrator", "scale"},
    "samplers": {"_chain", "_langevin", "_leaves", "_microcanonical", "_transformation"},
}


def room_of(module):
    return module.split(".")[1]


def test_rooms_import_what_they_may():
    rooms = {room_of(name) for name in MODULES if name != "optax_smile" and not is_helper(name)}
    assert rooms == set(ROOMS)
    for module in MODULES.keys() - {"optax_smile"}:
        names = imported(at_module_level(parse(MODULES[module])))
        own = {name for name in names if name.startswith("optax_smile.") and not is_helper(name)}
        allowed = set() if is_helper(module) else ROOMS[room_of(module)] | {room_of(module)}
        assert {room_of(name) for name in own} <= allowed, module


def test_stages_and_samplers_import_no_other():
    """Except for the evidence between stages, and for what stages and samplers share."""
    for package, shared in SHARED.items():
        for module in MODULES:
            if part_of(module, package):
                names = {x.split(".")[2] for x in own_imports(module) if part_of(x, package)}
                assert names <= shared, module


def test_imports_go_in_one_direction():
    waiting = {module: own_imports(module) for module in MODULES if module != "optax_smile"}
    while waiting:
        free = {module for module, needs in waiting.items() if not needs & waiting.keys()}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {module: needs for module, needs in waiting.items() if module not in free}


def test_only_the_potential_multiplies_by_num_data():
    """The only exception is a finding that compares losses of a trace with energies."""
    operations = (ast.BinOp, ast.AugAssign, ast.UnaryOp)
    found = {
        module
        for module, path in MODULES.items()
        for operation in ast.walk(parse(path))
        if isinstance(operation, operations)
        for node in ast.walk(operation)
        if "num_data" in (getattr(node, "id", None), getattr(node, "attr", None))
    }
    assert found == {"optax_smile.potential", "optax_smile.diagnostics.findings"}


# Modules that are imported when they are asked for, since their classes are of another library.
ASKED_FOR = {
    "optax_smile.interop.estimators": {"sklearn"},
    "optax_smile.interop.numpyro_model": {"numpyro"},
}


def test_imports_of_other_packages():
    """At import time those that are always there; never private modules."""
    for module, path in MODULES.items():
        names = imported(at_module_level(parse(path)))
        allowed = RUN_TIME | ASKED_FOR.get(module, set()) | sys.stdlib_module_names
        assert {name.partition(".")[0] for name in names} <= allowed, module
        names = imported(ast.walk(parse(path)))
        foreign = {name for name in names if not name.startswith("optax_smile")}
        assert not {name for name in foreign if "._" in name}, module


def test_import_loads_no_optional_dependency():
    script = (
        "import sys; before = set(sys.modules); import optax_smile;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert {"optax_smile", "jax", "optax"} <= loaded
    optional = (
        "flax matplotlib tqdm sklearn orbax safetensors arviz arviz_stats equinox tensorflow grain"
    )
    assert not loaded & {*optional.split(), "numpyro"}


EXTRAS: dict[str, tuple[str, Any]] = {
    "plots": ("matplotlib.pyplot", lambda: optax_smile.plots.chain_paths(np.ones((1, 1, 4)))),
    "eval": ("sklearn.metrics", lambda: optax_smile.metrics.auroc(np.eye(2), [0, 1])),
    "sklearn": ("optax_smile.interop.estimators", lambda: optax_smile.interop.estimators),
    "numpyro": ("optax_smile.interop.numpyro_model", lambda: optax_smile.interop.from_numpyro),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_by_the_extra_that_has_it(extra, monkeypatch):
    """For the extra of stored draws see `test_snapshots.py`."""
    module, use = EXTRAS[extra]
    monkeypatch.setitem(sys.modules, module, None)
    parent, _, name = module.rpartition(".")
    # It may have been imported before.
    monkeypatch.delitem(vars(sys.modules.get(parent, pytest)), name, raising=False)
    with pytest.raises(ImportError, match=rf"needs .*pip install 'optax-smile\[{extra}\]'"):
        use()


def test_public_names_are_what_dir_shows():
    assert all(hasattr(optax_smile, name) for name in optax_smile.__all__)
    shown = [name for name in dir(optax_smile) if not name.startswith("__")]
    assert shown == optax_smile.__all__ == sorted(shown)


def public_objects():
    """Public functions and classes, and those of the public modules, by name."""
    for name in optax_smile.__all__:
        found = getattr(optax_smile, name)
        if isinstance(found, types.ModuleType):
            names = getattr(found, "__all__", None) or [
                each
                for each, value in vars(found).items()
                if not each.startswith("_") and getattr(value, "__module__", None) == found.__name__
            ]
            yield from ((f"{name}.{each}", getattr(found, each)) for each in names)
        else:
            yield name, found


def test_scripts_use_public_names_only():
    public = {"optax_smile", *(f"optax_smile.{name}" for name in optax_smile.__all__)}
    for path in SCRIPTS:
        tree = parse(path)
        names = imported(ast.walk(tree))
        assert {name for name in names if name.startswith("optax_smile")} <= public, path
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "optax_smile":
                assert {alias.name for alias in node.names} <= set(optax_smile.__all__), path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "optax_smile":
                assert node.attr in {*optax_smile.__all__, "__version__"}, (path, node.lineno)
