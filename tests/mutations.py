"""Mutation tests: defects are put into a copy of the package, one at a time.

    python tests/mutations.py --output mutations.jsonl [--only TEXT ...]
    python tests/mutations.py --list stages/integrator.py Euclidean.open
    python tests/mutations.py --draw 25 --seed 3
    python tests/mutations.py --rename

A defect is an operator at a place in a named function: "swap the sign of the second sum". It needs
no text of the function, so it survives a rewrite that keeps the name; `--list` shows the places.
It is caught if the tests of its file fail, and counts only if they pass without it. `--draw` tries
defects that nobody has chosen: of those that survive, some change nothing that matters.
A line of the output: name, result (`caught`, `survived`, or `broken` with a reason), the tests that
failed, seconds. The exit status is 0 if all are caught; `--check` only lists names that are gone.
"""

import argparse
import ast
import copy
import fnmatch
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "optax_smile"
# Seconds after which tests count as hanging.
LONGEST = 900
NOT_COPIED = ".git", ".venv", ".*_cache", "__pycache__", "out", "build", "dist", "*.egg-info"
# Exit statuses of pytest, with and without a defect; others are not a result.
PASSED, FAILED = 0, 1
RESULTS: dict[Any, str] = {PASSED: "survived", FAILED: "caught"}
INVERSE: dict[Any, Any] = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.BitAnd: ast.BitOr}
INVERSE |= {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
INVERSE[ast.In] = ast.NotIn
INVERSE |= {value: key for key, value in INVERSE.items()}
# Modules whose functions return a result of about the same form as their first argument.
MODULES = {"jnp", "np", "math", "optax", "_tree", "_xla", "lax"}


def inverse(node: Any) -> Iterator[ast.AST]:
    """+ and -, * and /, & and |, comparisons and their opposites."""
    changed = copy.deepcopy(node)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in INVERSE:
        changed.op = INVERSE[type(node.op)]()
        yield changed
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed.ops = [INVERSE[type(node.ops[0])]()]
        yield changed


def left(node: Any) -> Iterator[ast.AST]:
    """Only the first operand of a sum, product, power, `and`, `or`."""
    if isinstance(node, ast.BinOp):
        yield node.left
    elif isinstance(node, ast.BoolOp):
        yield node.values[0]


def right(node: Any) -> Iterator[ast.AST]:
    """Only the last operand."""
    if isinstance(node, ast.BinOp):
        yield node.right
    elif isinstance(node, ast.BoolOp):
        yield node.values[-1]


def choices(node: Any) -> list[ast.AST]:
    """Both results of a conditional expression or a `where`."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    name = getattr(getattr(node, "func", None), "attr", "")
    return node.args[1:3] if name in ("where", "replace") and len(node.args) > 2 else []


def then(node: Any) -> Iterator[ast.AST]:
    """Always the first choice."""
    yield from choices(node)[:1]


def otherwise(node: Any) -> Iterator[ast.AST]:
    """Always the second choice."""
    yield from choices(node)[1:]


def positive(node: Any) -> Iterator[ast.AST]:
    """Without a `not`, ~ or minus."""
    if isinstance(node, ast.UnaryOp):
        yield node.operand


def argument(node: Any) -> Iterator[ast.AST]:
    """The number itself in place of a bound, a root, a cast."""
    is_call = isinstance(node, ast.Call) and bool(node.args)
    if is_call and ast.unparse(node.func).split(".")[-2:][0] in MODULES and not choices(node):
        yield from (x for x in node.args[:1] if not isinstance(x, ast.Starred | ast.List))


def without_argument(node: Any) -> Iterator[ast.AST]:
    """Without the last of several arguments of a call."""
    if isinstance(node, ast.Call) and len(node.args) > 1 and not choices(node):
        yield ast.Call(node.func, node.args[:-1], node.keywords)


def without_keyword(node: Any) -> Iterator[ast.AST]:
    """Without one of the keywords of a call."""
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        if keyword.arg:
            yield ast.Call(node.func, node.args, [x for x in node.keywords if x is not keyword])


def number_of(node: Any) -> Any:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) in (int, float) else None


def double(node: Any) -> Iterator[ast.AST]:
    """Twice a number, or 1 for 0."""
    if (value := number_of(node)) is not None:
        yield ast.Constant(2 * value or 1)


def halve(node: Any) -> Iterator[ast.AST]:
    """Half of a number."""
    if value := number_of(node):
        yield ast.Constant(type(value)(value / 2))


def never(node: Any) -> Iterator[ast.AST]:
    """Without what stands under an `if`."""
    if isinstance(node, ast.If):
        yield ast.If(ast.Constant(False), node.body, node.orelse)


def skip(node: Any) -> Iterator[ast.AST]:
    """Without a statement that calls, raises, adds, or gives a name another value."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        is_call |= node.targets[0].id in {getattr(x, "id", "") for x in ast.walk(node.value)}
    if is_call or isinstance(node, ast.AugAssign | ast.Raise):
        yield ast.Pass()


OPERATORS: dict[str, Callable[[Any], Iterator[ast.AST]]] = {
    x.__name__: x
    for x in (inverse, left, right, then, otherwise, positive, argument, without_argument)
} | {x.__name__: x for x in (without_keyword, double, halve, never, skip)}


class Change(ast.NodeTransformer):
    """Change one of the places where an operator applies; `shown` are all of them."""

    def __init__(self, operator: str, place: int = -1):
        self.operator, self.place, self.shown = OPERATORS[operator], place, []

    def visit(self, node: Any) -> Any:
        # Docstrings, annotations and defaults are no places.
        if isinstance(node, ast.FunctionDef):
            node.body = [self.visit(x) for x in node.body]
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
            return node
        for changed in self.operator(node):
            self.shown.append(f"{ast.unparse(node)}  ->  {ast.unparse(changed)}")
            if len(self.shown) == self.place + 1:
                return changed
        return self.generic_visit(node)


# The tests of a file, which run in this order: of the first entry that fits.
TESTS = """
stages/probe.py test_probe.py
stages/spectral.py test_reference.py test_spectral.py
stages/* test_reference.py test_rejections.py test_scale.py test_arrival.py faults/test_counters.py
samplers/_microcanonical.py test_reference.py test_step_cost.py test_contract.py test_langevin.py
samplers/_transformation.py test_langevin.py test_sampling.py test_local.py faults/test_arguments.py
_xla.py test_step_cost.py
samplers/_leaves.py test_wrappers.py faults/test_arguments.py
samplers/* test_langevin.py
potential.py test_reference.py test_potential.py test_contract.py
state.py test_wrappers.py test_objects.py test_rejections.py
_packed.py test_contract.py faults/test_trees.py
_joined.py test_noise.py test_contract.py
_places.py test_noise.py test_reference.py
_sums.py test_noise.py test_reference.py test_step_cost.py
diagnostics/* test_diagnostics.py test_what_to_trust.py
metrics.py test_metrics.py
draws/prediction.py test_metrics.py test_predict.py
draws/predict.py test_predict.py devices/test_predict_on_meshes.py
draws/likelihoods.py test_predict.py
draws/* test_snapshots.py faults/test_runs.py faults/test_directories.py
_disk.py faults/test_directories.py faults/test_runs.py
tall.py test_tall.py
chains/select.py test_select.py
chains/warmstart.py test_warmstart.py
chains/run.py faults/test_runs.py faults/test_directories.py test_sampling.py
chains/_directory.py faults/test_directories.py faults/test_runs.py test_sampling.py
mistakes/* test_wrong_data.py test_wrong_likelihood.py test_centers.py
chains/* test_centers.py test_sampling.py faults/test_runs.py
"""
# "# file", then of each defect the function, the operator and its place, and what is broken.
DEFECTS = """
# potential.py
_weight: left 0: no temperature in the gradient
gradient: left 3: prior mean left out
prior_terms: left 4: prior change without its half
_prior: left 0: temperature does not apply to the Gaussian prior
excess_loss: left 5: bound without the prior
excess_loss: left 2: no temperature in the part of the prior
with_log_prior: argument 0: any density is outside of the support
check_prior: never 0: a prior per leaf hinders Optax's maps over states
# diagnostics/summarize.py
_surplus: inverse 6: confidence and accuracy are added
# stages/scale.py
MeanSquare.observe: then 5: scale moves within a window
MeanSquare.observe: left 16: a restart keeps the scale
inverse_scale: left 1: isotropic part not taken from the measured one
# stages/spectral.py
Spectral.velocity: left 4: matrices of all sizes weigh alike
# stages/integrator.py
Norm.close: left 3: a kick does not lengthen its own time
Norm.close: otherwise 9: the norm of a gradient is Euclidean
Norm.close: then 2: a chain at rest goes on with its old momentum
Euclidean.open: left 24: no half in the energy of a long kick
Momentum.proceed: skip 0: step size changes in the middle of a step
Momentum.proceed: left 3: momentum is kept after a rejected step
drift: argument 0: drift without the scale
Momentum.diffuse: right 14: noise forgets over twice the length
Momentum.diffuse: double 3: noise forgets over half a radius
Momentum.diffuse: then 0: noise in the middle of a step
# stages/step_size.py
QuantileTuner.update: right 3: upper threshold too high
QuantileTuner.update: double 0: lower threshold too low
AngleTuner.update: then 6: angle tuner never settles
AngleTuner.update: otherwise 3: angle tuner takes the change at its word
AngleTuner.update: right 5: noise gets the angle of clean gradients
AngleTuner._angle: left 7: noise counts as clean gradients
AngleTuner._per_angle: left 1: share is not squared
# stages/rejection.py
judge: left 1: non-finite steps are kept
judge: then 1: a bad call does not end a run of good ones
# stages/evidence.py
Sums.cosine: positive 1: kick uphill
EnergyAverages.is_outlier: argument 0: a loss of energy is no outlier
EnergyAverages.observe: left 1: averages not debiased
collect: left 2: rejected gradients enter the scale
TurnAverage.observe: right 0: rejected steps enter the turns
ChangeAverage.observe: left 8: change from the middle of a step
turn_rate: argument 1: uphill gradients are discounted like downhill ones
Evidence.rates: otherwise 1: matched noise by whole gradients
OpenStep.advance: left 1: prior's change over the first of two drifts forgotten
SHARE, LONGEST_AVERAGE: double 2: averages stand still in the end
# stages/probe.py
look: argument 9: what arrives elsewhere is not counted
look: otherwise 4: a rejected step looks altered
look: inverse 14: either condition makes parameters altered
WINDOW, MOST_ALTERED, LEAST_ALTERED: double 1: what is altered now and then is no matter
# stages/matrix.py
FullMatrix.observe: left 19: a width that still grows is not extrapolated
FullMatrix.observe: left 20: a restart keeps the matrix
FullMatrix.observe: right 14: the mean of whitened squares does not stay
# samplers/_microcanonical.py
Microcanonical.decide: left 3: change across a new scale
Microcanonical.decide: left 0: steps of negative size are made
Microcanonical.decide: without_argument 11: schedule counts calls instead of steps
Microcanonical.decide: without_keyword 11: noise key never advances
Microcanonical.move: otherwise 0: a rejected call moves the chain
_momentum: without_argument 5: no explicit noise
# samplers/_transformation.py
_bound: skip 0: defaults of a sampler not recorded
Dynamics.update: skip 4: around zero, not the start
# _xla.py
second_pass: without_argument 0: XLA copies what the probe reads
# samplers/_leaves.py
select: never 1: a gradient that is lost is no error
candidates: without_keyword 1: init accepts parameters that are not finite
# samplers/sgld.py
sgld: right 0: half the noise
# samplers/sghmc.py
sghmc: left 9: gradient noise not subtracted
sghmc: left 6: velocity is not rescaled when the step size changes
# samplers/scale_adapted_sghmc.py
scale_adapted_sghmc: then 0: the mass adapts for ever
# samplers/cyclical_sgld.py
cyclical_sgld: inverse 5: sampling and search swapped
# samplers/_langevin.py
Langevin.process: otherwise 5: rejected gradients enter the memory
Langevin.process: without_argument 10: rejected steps advance the schedule
Langevin.process: otherwise 6: a rejected step leaves a displacement in the state
Langevin.process: left 5: is_draw is that of the step that begins
# chains/_directory.py
check_settings: never 0: any settings are the same
MemoryRun.result: halve 0: chains and draws swapped
Checkpoints.place: never 1: a checkpoint of another format is read
KEPT: halve 0: the newest checkpoint is kept alone
DirectoryRun.checkpoint: skip 0: a checkpoint does not wait for the draws before it
DirectoryRun._find: right 4: a resumed run forgets at which steps its draws are
# _packed.py
State._replace: never 0: a packed scalar is set without effect
pack: then 1: a scalar is rounded to the precision of others
# _joined.py
_places_of: left 0: joined leaves share their random numbers
choose: left 1: leaves of two precisions are joined
# _places.py
Place.through: left 0: leaves share their random numbers
# draws/_format.py
read_manifest: never 1: an older format is read
find: inverse 2: draws of some chains count as whole
fits: left 1: a leaf too large for the stored precision is stored
DrawFiles.put: skip 1: the error of a draw that could not be written is dropped
# _disk.py
read: never 0: statistics are read unchecked
read: never 3: arrays are read unchecked
read: never 1: checkpoints of other numbers are read
# draws/predict.py
Average.join: left 18: densities joined without their largest
Average.join: left 12: the spread of the means lacks the number of snapshots
Average.outcome: left 2: total variance without that of the means
Predictor.finalize: skip 5: draws and chains stay mixed up
Predictor._concatenate: then 0: padding has a log density
Predictor._evaluate: left 4: chains on a mesh averaged together
# draws/prediction.py
Prediction.tempered: left 16: a tempered density is not normalised
Prediction.tempered: inverse 11: a vector is taken for classes
# metrics.py
temperature: left 0: errors are not in units of the variance
temperature: never 1: labels that are all predicted have a temperature
# chains/_centers.py
Centered.gathered: left 0: parts of the data weigh too much
Centered.measured: skip 0: noise of random losses forgotten
# chains/_host.py
Stream.place: left 1: places of batches forget that passes are rotated
# chains/_renewal.py
Centers.check_batches: never 1: data of the centres not compared with the batches
Centers.look: skip 5: centres are never renewed
# mistakes/batches.py
require_all: never 0: rows of a pass not compared with num_data
"""


class Defect(NamedTuple):
    """An operator at a place of a function, method or constant of a file."""

    file: str
    function: str
    operator: str
    place: int
    what: str = ""

    @property
    def name(self) -> str:
        place = f"{self.file} {self.function} {self.operator} {self.place}"
        return f"{self.what} ({place})" if self.what else place

    @property
    def tests(self) -> tuple[str, ...]:
        entries = (line.split() for line in TESTS.strip().splitlines())
        return next(
            (tuple(tests) for pattern, *tests in entries if fnmatch.fnmatch(self.file, pattern)), ()
        )

    def put_into(self, package: Path) -> tuple[Path, str, str]:
        """The path, its text, and its text with the defect."""
        path = package / self.file
        whole = path.read_text() if path.exists() else ""
        node = dict(functions(ast.parse(whole))).get(self.function)
        if node is None:
            raise LookupError(f"{self.file} has no {self.function}")
        change = Change(self.operator, self.place)
        changed = change.visit(copy.deepcopy(node))
        if len(change.shown) <= self.place:
            raise LookupError(f"{self.function} has {len(change.shown)} places of {self.operator}")
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
        lines = whole.splitlines(keepends=True)
        text = textwrap.indent(
            ast.unparse(ast.fix_missing_locations(changed)), " " * node.col_offset
        )
        lines[first - 1 : node.end_lineno] = [text + "\n"]
        return path, whole, "".join(lines)


def functions(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Functions, methods and constants, by their names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple):
            yield prefix + ast.unparse(node.targets[0]).strip("()"), node


def places(file: str, function: str) -> Iterator[tuple[Defect, str]]:
    """All defects of a function, each with the expression that it changes."""
    node = dict(functions(ast.parse((ROOT / PACKAGE / file).read_text())))[function]
    for operator in OPERATORS:
        change = Change(operator)
        change.visit(copy.deepcopy(node))
        for place, shown in enumerate(change.shown):
            yield Defect(file, function, operator, place), shown


def parse(text: str) -> list[Defect]:
    found, file = [], ""
    for line in text.strip().splitlines():
        if line.startswith("# "):
            file = line[2:]
            continue
        function, where, what = line.split(": ", 2)
        operator, place = where.split()
        found.append(Defect(file, function, operator, int(place), what))
    return found


def draw(number: int, seed: int) -> list[Defect]:
    """Defects at random places of the files that have tests here, each function alike."""
    package, random_ = ROOT / PACKAGE, random.Random(seed)
    files = [str(path.relative_to(package)) for path in sorted(package.rglob("*.py"))]
    files = [file for file in files if Defect(file, "", "", 0).tests]
    names = [(x, y) for x in files for y, _ in functions(ast.parse((package / x).read_text()))]
    random_.shuffle(names)
    found = ([*places(*name)] for name in names)
    return [random_.choice(defects)[0] for defects in found if defects][:number]


def rename(package: Path):
    """Give all classes of `stages` other names, but for those of the public interface."""
    public = re.findall(r"[A-Z]\w+", (package / "__init__.py").read_text())
    paths = sorted((package / "stages").glob("*.py"))
    found = {
        x for path in paths for x in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }
    private = "|".join(sorted(found - set(public)))
    for path in package.rglob("*.py"):
        path.write_text(re.sub(rf"\b({private})\b", r"\1Renamed", path.read_text()))
    print("renamed:", private.replace("|", ", "))


def check(chosen: list[Defect]) -> list[str]:
    """Say what is out of date: functions, places and tests that are gone."""
    wrong = []
    for one in chosen:
        missing = [file for file in one.tests if not (ROOT / "tests" / file).exists()]
        wrong += [f"{one.name}: no {file}" for file in missing]
        try:
            compile(one.put_into(ROOT / PACKAGE)[-1], one.file, "exec")
        except (LookupError, SyntaxError) as error:
            wrong.append(f"{one.name}: {error}")
    return wrong


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Two mutations of one size within a second would share compiled files.
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LONGEST}
    return subprocess.run([sys.executable, *arguments], cwd=root, env=env, **options)


def test(root: Path, files: tuple[str, ...]) -> tuple[int | str, list[str]]:
    """Run tests up to the first that fails: pytest's exit status, or that it has none, and it."""
    options = ["-x", "-q", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
    options += ["-m", "not nightly"]
    try:
        done = run(root, "-m", "pytest", *options, *(f"tests/{file}" for file in files))
    except subprocess.TimeoutExpired:
        return f"no end within {LONGEST} s", []
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed


def judge(root: Path, one: Defect, sound: tuple[int | str, list[str]]) -> dict[str, Any]:
    """Try one defect; `sound` is what its tests give without it."""
    begun, record = time.monotonic(), {"name": one.name, "result": "broken"}
    path, whole, new = one.put_into(root / PACKAGE)
    path.write_text(new)
    status, failed = test(root, one.tests)
    path.write_text(whole)
    if sound[0] != PASSED or status not in RESULTS:
        return record | {"reason": f"without: {sound}, with: {status}"}
    seconds = round(time.monotonic() - begun, 1)
    return record | {"result": RESULTS[status], "by": failed, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description="Which defects do the tests catch?")
    parser.add_argument("--output", type=Path, default=Path(os.devnull), help="JSON lines")
    parser.add_argument("--only", nargs="+", default=[""], help="those whose name has such a text")
    parser.add_argument("--check", action="store_true", help="look for names and tests alone")
    parser.add_argument("--list", nargs=2, metavar=("FILE", "FUNCTION"), help="show its places")
    parser.add_argument("--draw", type=int, help="try so many random ones instead")
    parser.add_argument("--seed", type=int, default=0, help="of those")
    parser.add_argument("--rename", action="store_true", help="private classes of stages instead")
    given = parser.parse_args()
    if given.list:
        print(*(f"{one.operator} {one.place}: {x}" for one, x in places(*given.list)), sep="\n")
        return
    chosen = parse(DEFECTS) if given.draw is None else draw(given.draw, given.seed)
    chosen = [one for one in chosen if any(text in one.name for text in given.only)]
    begun, sound, missed = time.monotonic(), {}, []
    if given.check:
        wrong = check(chosen)
        print(f"{len(chosen)} mutations, {len(wrong)} out of date", *wrong, sep="\n")
        sys.exit(bool(wrong))
    with tempfile.TemporaryDirectory() as folder, given.output.open("a") as file:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        found = run(root, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)").stdout.strip()
        assert Path(found).is_relative_to(root), f"{PACKAGE} would be imported from {found}"
        if given.rename:
            rename(root / PACKAGE)
            command = [sys.executable, "-m", "pytest", "-q", "-n", "3"]
            env = os.environ | {"PYTHONPATH": str(root)}
            sys.exit(subprocess.run(command, cwd=root, env=env).returncode)
        for tests in dict.fromkeys(one.tests for one in chosen):
            sound[tests] = test(root, tests)
            print("without a defect:", *tests, *sound[tests], flush=True)
        for one in chosen:
            record = judge(root, one, sound[one.tests])
            print(json.dumps(record), flush=True)
            print(json.dumps(record), file=file, flush=True)
            missed += [one.name] * (record["result"] != "caught")
    caught = len(chosen) - len(missed)
    print(f"{caught} of {len(chosen)} caught in {time.monotonic() - begun:.0f} s")
    if missed:
        sys.exit("Not caught: " + "; ".join(missed))


if __name__ == "__main__":
    main()
