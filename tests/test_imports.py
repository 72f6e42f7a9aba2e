"""Who may import whom, read from the sources."""

import ast
import importlib
import inspect
import pathlib
import subprocess
import sys
import types

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


# What each room may import besides the helpers and itself. The first five are the sampler core; the
# others are the host side, which meets it in `parallel` and asks a state what it knows.
ROOMS = {
    "potential": set(),
    "state": set(),
    "stages": {"potential"},
    "samplers": {"potential", "stages", "state"},
    "published": {"potential", "stages", "samplers"},
    "parallel": set(),
    "draws": {"parallel"},
    "chains": {"parallel", "potential", "state", "draws"},
    "diagnostics": {"state", "draws"},
    "metrics": set(),
    "calibrate": {"metrics"},
    "plots": {"metrics"},
    "local": {"chains", "draws", "potential", "samplers", "stages"},
    "report": {"draws", "diagnostics", "metrics", "plots"},
    "interop": {"chains", "diagnostics", "draws", "samplers"},
}
EVIDENCE = {"evidence", "energy", "products"}


def room_of(module):
    return module.split(".")[1]


def test_every_module_has_a_room():
    rooms = {room_of(name) for name in MODULES if name != "optax_smile" and not is_helper(name)}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "optax_smile"])
def test_rooms_import_what_they_may(module):
    names = imported(at_module_level(parse(MODULES[module])))
    own = {name for name in names if name.startswith("optax_smile.") and not is_helper(name)}
    allowed = set() if is_helper(module) else ROOMS[room_of(module)] | {room_of(module)}
    assert {room_of(name) for name in own} <= allowed


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name, "stages")])
def test_stages_import_no_other_stage(module):
    """What the calls have shown, and the formula of a kick, are no stages."""
    stages = {name.split(".")[2] for name in own_imports(module) if part_of(name, "stages")}
    assert not stages - EVIDENCE - {"kick"}


def test_imports_go_in_one_direction():
    waiting = {module: own_imports(module) for module in MODULES if module != "optax_smile"}
    while waiting:
        free = {module for module, needs in waiting.items() if not needs & waiting.keys()}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {module: needs for module, needs in waiting.items() if module not in free}


def test_no_module_is_hidden_by_a_name_of_its_package():
    for module in MODULES:
        package, _, name = module.rpartition(".")
        if package and name != "__main__":
            assert isinstance(
                getattr(importlib.import_module(package), name), types.ModuleType
            ) or (module not in sys.modules)


def test_size_of_files_and_functions():
    for module, path in MODULES.items():
        assert len(path.read_text().splitlines()) <= 400, module
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                length = (node.end_lineno or 0) - node.lineno + 1 - len(docstring.splitlines())
                assert length <= 80, f"{module}.{node.name}"


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name, "samplers")])
def test_samplers_import_no_other_sampler(module):
    """What a family shares is no sampler, and neither is what tunes one."""
    shared = {f"optax_smile.samplers.{name}" for name in ("_call", "_langevin", "_microcanonical")}
    tuned = {module.replace("samplers.tune_", "samplers.")} - {module}
    assert not {name for name in own_imports(module) if part_of(name, "samplers")} - shared - tuned


@pytest.mark.parametrize("module", [name for name in MODULES if name != "optax_smile.potential"])
def test_only_the_potential_multiplies_by_num_data(module):
    tree = parse(MODULES[module])
    operations = (ast.BinOp, ast.AugAssign, ast.UnaryOp)
    for operation in (node for node in ast.walk(tree) if isinstance(node, operations)):
        names = {node.id for node in ast.walk(operation) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(operation) if isinstance(node, ast.Attribute)}
        assert "num_data" not in names, f"line {operation.lineno}"


def test_the_potential_does_multiply_by_num_data():
    products = [
        node
        for node in ast.walk(parse(PACKAGE / "potential.py"))
        if isinstance(node, ast.BinOp) and "num_data" in ast.unparse(node)
    ]
    assert products


# Modules that are imported when they are asked for, since their classes are of another library.
ASKED_FOR = {"optax_smile.interop.estimators": {"sklearn"}}


@pytest.mark.parametrize("module", MODULES)
def test_run_time_imports(module):
    names = imported(at_module_level(parse(MODULES[module])))
    allowed = RUN_TIME | ASKED_FOR.get(module, set()) | sys.stdlib_module_names
    assert {name.partition(".")[0] for name in names} <= allowed


@pytest.mark.parametrize("module", MODULES)
def test_private_modules_of_the_dependencies_are_not_imported(module):
    names = imported(ast.walk(parse(MODULES[module])))
    foreign = {name for name in names if not name.startswith("optax_smile")}
    assert not {name for name in foreign if "._" in name}


def test_import_loads_no_optional_dependency():
    script = (
        "import sys; before = set(sys.modules); import optax_smile;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert {"optax_smile", "jax", "optax"} <= loaded
    optional = (
        "flax matplotlib tqdm sklearn orbax safetensors arviz equinox tensorflow grain numpyro"
    )
    assert not loaded & set(optional.split())


def test_public_names_exist():
    assert sorted(optax_smile.__all__) == list(optax_smile.__all__)
    assert all(hasattr(optax_smile, name) for name in optax_smile.__all__)
    shown = [name for name in dir(optax_smile) if not name.startswith("__")]
    assert shown == optax_smile.__all__


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


@pytest.mark.parametrize("name", [name for name, _ in public_objects()])
def test_public_docstrings(name):
    """A sentence for each, and signatures without what an alias stands for."""
    found = dict(public_objects())[name]
    assert inspect.getdoc(found), name
    if inspect.isfunction(found):
        signature = str(inspect.signature(found))
        assert "Union[" not in signature and "typing." not in signature, signature


# `as_shipped.py` replaces a part of a stage: that is its purpose.
USERS = [path for path in SCRIPTS if path.name != "as_shipped.py"]


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_use_public_names_only(path):
    tree = parse(path)
    public = {"optax_smile", *(f"optax_smile.{name}" for name in optax_smile.__all__)}
    names = imported(ast.walk(tree))
    assert {name for name in names if name.startswith("optax_smile")} <= public
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "optax_smile":
            assert {alias.name for alias in node.names} <= set(optax_smile.__all__)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "optax_smile":
            assert node.attr in {*optax_smile.__all__, "__version__"}, f"line {node.lineno}"
