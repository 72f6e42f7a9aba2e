"""Checks of a run: its loss, its batches, the gradients that reach the sampler, and its start."""

import contextlib
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _noise, _on_host, _paths, _sums, _table, _tree, parallel
from optax_smile._types import Batch, Options, Tree
from optax_smile._warn import warn
from optax_smile.diagnostics.findings import Check, chooser
from optax_smile.potential import Potential, excess_loss, least_excess_loss
from optax_smile.state import AT_REST, MOST_RISE, SamplerState, find

# Losses `[chain]` of a batch, at the parameters of the chains or at others.
ChainLosses: TypeAlias = Callable[..., jax.Array]
# A loss in the form `(params, aux, key, batch) -> (loss, aux)`, see `loss_of`.
FullLoss: TypeAlias = Callable[..., tuple[jax.Array, Tree]]
NEAR_ONE = 0.05  # A loss is a sum if its halves add up to the whole within this difference.
# `num_data` and the examples of a list may differ by less than this factor: lists may be a part of
# the data, or hold several passes. The same for its tokens, some of which may be padding.
MOST_RATIO, MOST_TOKEN_RATIO = 10, 4
NEARLY_EQUAL = 1.1  # Ratio of the sizes of batches that weight their examples about equally.
NUM_DATA = "Set it to the number of terms of the mean loss over all data: examples, or tokens."
SUMMED = "`loss_fn` looks like a sum over the examples: divide by their number."
UNEQUAL = "Drop the smaller batch: a mean loss counts its examples more than those of a large one."
TOO_FEW = "Too many parameters for these data: see `optax_smile.local.curvature_precision`."
PASS = "Pass each example once, in one pass: none dropped, repeated or augmented."
USABLE = "an iterable of batches, numeric arrays with examples, all of the same structure"

# Rounding errors of a fingerprint, relative to the norm: twenty times what was seen in float32.
TOLERANCE = 2e-5
# Relative variation up to which ratios, or the norms of clipped gradients, count as constant.
CONSTANT = 1e-3
MOST_ALTERED = 0.01  # Share of the calls that may look altered by accident.
# Share of the calls with a clipped or non-finite gradient above which to warn.
MOST_CLIPPED, MOST_NONFINITE_CALLS = 0.01, 0.001
LOST = "These steps were rejected, and `aux` stays as it was. Are there batches of one example?"
# Fewer calls that move leaves uphill may be an accident.
LEAST_UPHILL = 8
BEFORE = (
    "Remove what comes before the sampler. A sampler has no learning rate, and its prior replaces"
    " weight decay. Only `optax.clip_by_global_norm` may go before it."
)
CLIP = "Clip at a norm that gradients rarely exceed, or not at all."
SINGLE = "Put a single batch in a list: `[batch]`."
PAIR = "Put the arrays of a single batch in a tuple: `[(x, y)]`."
NOT_FINITE = "Are the batches finite, and the labels in their range?"
NONFINITE = "Their steps were rejected, which biases the draws. Are the batches finite?"

# By which a mean may be divided, such as that of squares.
FACTORS = 0.5, 1, 2, 4
# Batches of a list of which the terms of the loss are counted.
MOST_COUNTED = 256
# For what is no mistake. Where a program cannot be read, the reason goes here too: the tests of the
# package make it an error.
LOG = logging.getLogger("optax_smile")
STOPPED = "Without a gradient, only prior and noise move it. To freeze it, leave it out of the"
STOPPED += " sampler, with `optax.partition` and `optax.set_to_zero`, or with `eqx.partition`."

# What `_program.read` finds: the text of the check, its verbs if it fails or passes, and advice.
PROGRAM = {
    "penalty": (
        "`loss_fn` {} a term of the parameters alone, like weight decay or a prior.",
        ("has", "does not have"),
        "Leave it out: the loss is multiplied by num_data, and the sampler's prior replaces it.",
    ),
    "logits": (
        "`loss_fn` {} a softmax or sigmoid to probabilities.",
        ("applies", "does not apply"),
        "Pass logits: leave the softmax or sigmoid out of the model.",
    ),
    "pairs": (
        "`loss_fn` {} each example with its own target.",
        ("does not compare", "compares"),
        "Arrays of shapes (n, 1) and (n,) broadcast to (n, n): give outputs and targets one shape.",
    ),
}
LOSS_ROUNDING = 1e-5  # Relative rounding errors of a mean loss.
# Angle by which the change of the gradients turns the momentum in a step of `angle_tuner`, and the
# factor by which shorter steps of a user are too short.
ANGLE, MOST_SHORT = 0.06, 10.0

# Displacement relative to the size of the weights: losses are nearly quadratic at this distance,
# and float32 still resolves the difference.
DISTURBANCE = 0.02
SEED = 0
NUM_PAIRS = 8  # Of random directions, which estimate the trace of the squared Hessian to a third.


def judge(kind: str, value: tuple, bound: float, passed: bool, text: str, advice: str) -> Check:
    """Make a check of all chains, with advice if it failed."""
    return Check(kind, (), value, bound, passed, "" if passed else advice, text)


def warn_if_failed(check: Check | None):
    """Warn of a check that failed; write a line about one that passed with advice."""
    if check is not None and check.advice:
        tell = LOG.warning if check.passed else warn
        tell(f"`{_check.function_name()}`: {check.text} {check.advice}")


STACK = "Stack a list of networks: `chains_from_weights([params, ...], num_chains=4, key=0)`."
STARTS = dataclasses.replace(parallel.STACKED, floating=True, advice=STACK)
WITHOUT_KEYS = "a tree of arrays of numbers [chain, ...]; a `stochastic` loss gets keys as `key=`"
AUX = dataclasses.replace(parallel.STACKED, text=WITHOUT_KEYS, keys=False)


@dataclasses.dataclass
class Counted:
    """What a count of the data needs: `number` is `num_data`, `like` the shapes of one chain.

    The loss is None if its program is not to be read. `means` has what `divisors` has read.
    """

    number: object
    per_chain: bool
    loss: FullLoss | None = None
    like: Tree = None
    means: dict[str, Tree] = dataclasses.field(default_factory=dict)


# The loss.


def loss_of(loss_fn: Callable, has_aux: bool, is_stochastic: bool) -> FullLoss:
    """Convert a loss to the form `(params, aux, key, batch) -> (loss, aux)`."""
    form = ", ".join(["params", "batch", *["aux="] * has_aux, *["key="] * is_stochastic])
    advice = "It also gets `aux` if you pass one, and `key` if `stochastic`."
    _check.Function(f"({form})", advice)("loss_fn", loss_fn)

    def loss(params, aux, key, batch) -> Tree:
        extras = {"aux": aux} if has_aux else {}
        if is_stochastic:
            extras["key"] = key
        result = loss_fn(params, batch, **extras)
        if isinstance(result, tuple) != has_aux or has_aux and len(result) != 2:
            rule = "a function that returns a scalar loss, or with `aux=` a pair (loss, new_aux)"
            _check.fail("loss_fn", rule, f"one that returns {_check.show(result)}")
        result = result if has_aux else (result, None)
        given, new = (jax.tree.map(jnp.shape, x) for x in (aux, result[1]))
        if has_aux and jax.tree.flatten(given) != jax.tree.flatten(new):
            rule = f"a function that returns `new_aux` like `aux`, {_check.cut(given)}"
            _check.fail("loss_fn", rule, _check.cut(new))
        return result

    return loss


@dataclasses.dataclass
class Losses:
    """Losses of a `number` of chains on a batch; `hint` is advice where the loss raises."""

    loss: FullLoss
    number: int
    per_chain: bool
    mesh: Mesh | None
    hint: str = ""

    def __post_init__(self):
        def of_chain(chain, batch):
            # The next step splits the key in two.
            key = None if chain.key is None else jax.random.fold_in(chain.key, 2)
            return self.loss(chain.params, chain.aux, key, batch)[0]

        axes = 0, 0 if self.per_chain else None
        mapped = parallel.over_chains(of_chain, mesh=self.mesh, in_axes=axes)
        own = None if self.mesh is None else parallel._chain_sharding(self.mesh)
        self.compiled = jax.jit(mapped, out_shardings=own)

    def put(self, batch: Batch, stacked: bool = False) -> Batch:
        """Put a batch, or a stack of batches, on the devices."""
        given = {"mesh": self.mesh, "per_chain": self.per_chain, "stacked": stacked}
        return batch if self.mesh is None else parallel.place_batch(batch, **given)

    def __call__(self, chains: Tree, batch: Batch) -> jax.Array:
        """Compute the losses `[chain]` at the `params`, `aux` and `key` of the chains."""
        self.check(chains, batch)
        return self.compiled(chains, self.put(batch))

    def check(self, chains: Tree, batch: Batch, argument: str = "loss_fn"):
        """Require a scalar loss and, if each chain has its own batch, one batch per chain."""
        number = self.number
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if self.per_chain and rows != {(number,)}:
            rule = f"batches whose leaves have a leading axis of {number}, with `per_chain`"
            _check.fail("batches", rule, f"the leading axes {sorted(rows)}")
        rule = "a function that returns a scalar mean loss"
        if argument != "loss_fn":
            rule = "one batch, for which `loss_fn` returns a scalar mean loss"
        of_params = jax.tree.map(lambda x: np.shape(x)[1:], chains.params)
        shapes = [_check.cut(x) for x in (of_params, jax.tree.map(np.shape, batch))]
        called = f"It was called with the params {shapes[0]} and the batch {shapes[1]} (shapes)."
        advice = f"{called} {self.hint}".rstrip()
        given = chains, self.put(batch)
        loss = _check.traced(argument, self.compiled, *given, rule=rule, advice=advice)
        is_scalar = getattr(loss, "shape", None) == (number,)
        if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
            of_chain = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", loss)
            _check.fail(argument, rule, f"one that returns {of_chain}")


def warn_of_sum(losses: ChainLosses, batch: Batch, counted: Counted, mesh: Mesh | None):
    """Warn of a loss that looks like a sum, see `check_mean`, or of one that cannot be tested."""
    check, skip = check_mean(losses, batch, counted, mesh), "To skip this test, pass check=False."
    if isinstance(check, Check):
        advice = "" if check.passed else f"{check.advice} {skip}"
        warn_if_failed(check._replace(advice=advice))
    elif check:
        name = _check.function_name()
        warn(f"`{name}`: could not test whether `loss_fn` is a mean, because {check}. {skip}")


def check_mean(
    losses: ChainLosses, batch: Batch, counted: Counted, mesh: Mesh | None
) -> Check | str:
    """Find a loss that looks like a sum: the losses of two halves add up to that of the whole.

    A sum passes if it is divided by a constant from the number of examples to that of its terms.
    Returns the reason if that cannot be tested; "" if the batch is a single example or a vector.
    """
    per_chain = counted.per_chain
    # The axis "data" of the mesh must divide the halves.
    rows, least = num_rows(batch, per_chain), 1 if mesh is None else mesh.shape.get("data", 1)
    half = 0 if rows is None else rows // 2 // least * least
    # Otherwise the batch may be no more than a vector that the loss compares with the parameters.
    has_examples = any(np.ndim(leaf) > 1 + per_chain for leaf in jax.tree.leaves(batch))
    if not half:
        is_mixed = rows is None and has_examples
        return "the arrays of a batch share no axis of examples" if is_mixed else ""

    def of_part(first: int, stop: int) -> np.ndarray:
        rows = slice(first, stop)
        part = jax.tree.map(lambda x: x[:, rows] if per_chain else x[rows], batch)
        return np.asarray(_on_host.local(losses(part)), float)

    try:
        halves = of_part(0, half), of_part(half, 2 * half)
        whole = of_part(0, 2 * half)
    except Exception as error:
        reason = str(getattr(error, "got", error)).splitlines() or [""]
        return f"it rejects half of a batch: {_check.cut(reason[0])}" if has_examples else ""
    with np.errstate(all="ignore"):
        ratio = float(np.median(sum(halves) / whole))
    text = (
        f"the losses of the two halves of the first batch add up to {ratio:.3f} times the loss of"
        " the whole (2 for a mean, 1 for a sum)."
    )
    is_sum = abs(ratio - 1) < NEAR_ONE
    if is_sum and (found := divisors([batch], counted)):
        # The loss is multiplied by the number of all data, so it must not be divided by it as well.
        number = counted.number if isinstance(counted.number, int | float) else math.inf
        is_of_all = 2 * half < number and found.constant / number in FACTORS
        is_sum = is_of_all or not 2 * half <= found.constant <= FACTORS[-1] * found.number
    return judge("mean loss", (ratio,), 1.0, not is_sum, text, SUMMED)


def traced(loss: FullLoss, like: Tree, batch: Batch) -> Tree:
    """Return the program of a loss of one chain; None if the loss fails, which is told elsewhere.

    Its arguments are `params`, `aux` and `key` of `like`, and the batch.
    """
    with contextlib.suppress(Exception):
        given = like.params, like.aux, like.key, batch
        return jax.make_jaxpr(lambda *given: loss(*given)[0])(*given)


def reading(function: str, *given: Tree) -> Tree:
    """Call a function of `_program`; None if there is no program or it fails.

    It reads programs of JAX, whose parts change from version to version. That must not end a run.
    """
    if given[0] is None:
        return None
    try:
        from optax_smile.chains import _program

        return getattr(_program, function)(*given)
    except Exception:
        LOG.debug("The program of a loss could not be read.", exc_info=True)
        return None


def check_program(
    program: Tree, params: Tree, losses: ChainLosses, batch: Batch, per_chain: bool
) -> Iterator[Check]:
    """Find what is wrong in the program of a loss, see `_program.read`; `params` `[chain, ...]`."""
    one = jax.tree.map(lambda x: x[0], params)
    found = reading("read", program, one, size(batch, per_chain))
    if found is None:
        yield skipped("penalty, logits, pairs")
        return
    if "pairs" in found and not _loses_pairs(losses, batch, params, per_chain):
        found.remove("pairs")
    for kind, (text, verbs, advice) in PROGRAM.items():
        passed = kind not in found
        yield judge(kind, (float(not passed),), 0.0, passed, text.format(verbs[passed]), advice)


def skipped(kind: str) -> Check:
    """Name tests that were not made, with a bound of NaN."""
    text = "the program of `loss_fn` cannot be read with this version of JAX."
    return judge(kind, (), math.nan, True, text, "")


def check_leaves(program: Tree, like: Tree, has_log_prior: bool) -> Iterator[Check]:
    """Find leaves that the sampler moves, but for which the program of the loss has no gradient.

    `like` has the shapes of one chain. A log prior may depend on what the loss does not read.
    """
    received = find(like.state).last_received()
    moved = leaf_names(like.params if received is None else received[0])
    paths = leaf_names(like.params)
    found = reading("reached", program, len(paths))
    if found is None:
        yield skipped("gradients, unread")
        return
    pairs = [(path, *one) for path, one in zip(paths, found, strict=True) if path in moved]
    stopped = [path for path, is_read, has_gradient in pairs if is_read and not has_gradient]
    unread = [path for path, is_read, _ in pairs if not is_read]
    text = f"`loss_fn` depends on {', '.join(stopped)}, but has no gradient there."
    text = text if stopped else "`loss_fn` has a gradient wherever it depends on parameters."
    yield judge("gradients", (float(len(stopped)),), 0.0, not stopped, text, STOPPED)
    if unread and not has_log_prior:
        text = f"`loss_fn` does not read {', '.join(unread)}: these are draws from the prior."
        advice = "Leave it out of the parameters, if that is not meant."
        yield Check("unread", (), (float(len(unread)),), 0.0, True, advice, text)


def leaf_names(tree: Tree) -> list[str]:
    """Name the leaves of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) or "the only leaf" for path, _ in leaves]


def _loses_pairs(losses: ChainLosses, batch: Batch, params: Tree, per_chain: bool) -> bool:
    """Whether an array with one number per example may be permuted without the others."""
    axis, moved = int(per_chain), reading("elsewhere", params)
    leaves, structure = jax.tree.flatten(batch)

    def loss_with(place: int, leaf: np.ndarray) -> np.ndarray:
        changed = jax.tree.unflatten(structure, [*leaves[:place], leaf, *leaves[place + 1 :]])
        return np.asarray(losses(changed, moved), float)

    for place, leaf in enumerate(map(np.asarray, leaves)):
        if leaf.ndim <= axis or leaf.size != math.prod(leaf.shape[: axis + 1]):
            continue
        same = np.broadcast_to(leaf.take([0], axis), leaf.shape)
        parts = leaf, np.roll(leaf, 1, axis), same
        whole, mixed, constant = (loss_with(place, part) for part in parts)
        rounding = LOSS_ROUNDING * np.abs(whole)
        # A change of an unused array changes nothing either.
        is_used = np.abs(constant - whole) > 10 * rounding
        if np.all(is_used & (np.abs(mixed - whole) <= rounding)):
            return True
    return False


def check_step_size(settings: Options | None, state: Tree) -> Check | None:
    """Find a step size that is far too short, as learning rates are; None if the user gave none."""
    names = "mean_change_square", "num_changes", "mean_turn_rate", "change_share", "step_size"
    sampler: Tree = find(state)
    stats = sampler.stats()._asdict()
    known = [stats[name] if name in stats else optax.tree.get(sampler, name) for name in names]
    if chooser(settings or {}) != "number" or any(x is None for x in known):
        return None
    square, number, turn_rate, share, length = (np.asarray(_on_host.local(x), float) for x in known)
    # Too short a step changes no gradient: the average turn by whole gradients is a bound.
    rate = np.where(number > 0, np.sqrt(square), turn_rate)
    angle = ANGLE * np.minimum(0.5 / np.fmax(share, 0.5) ** 2, 1)
    # If the change grows with the step, as without noise, a longer step turns the square of it.
    with np.errstate(all="ignore"):
        factor = float(np.median(np.sqrt(angle / (rate * length))))
    size, short = float(np.median(length)), factor > MOST_SHORT
    many = int(np.max(stats["num_parameters"]))
    fits = "too short for them" if short else "long enough for them"
    text = f"step_size={size:.3g} is the length of a step of all {many} parameters, and {fits}."
    each = f"each parameter moves by about {size / math.sqrt(many):.2g}"
    advice = (
        f"It is not a learning rate: {each}. Leave it out, or try at least {size * factor:.2g}."
    )
    return judge("step size", (factor,), MOST_SHORT, not short, text, advice)


# The batches.


def num_rows(batch: Batch, per_chain: bool) -> int | None:
    """Return the length of the example axis if all leaves, scalars included, share one."""
    axis = int(per_chain)
    lengths = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else None


def size(batch: Batch, per_chain: bool) -> int | None:
    """Return the number of examples of all arrays but scalars; None if they disagree."""
    return num_rows([x for x in jax.tree.leaves(batch) if np.ndim(x) > per_chain], per_chain)


def require_all(argument: str, rows: int, number: float):
    """Require that a pass, which may have ended early, has all data."""
    if rows != number:
        rule = f"a pass over all data, `num_data` = {number:g} rows"
        got = f"more than {number:g}" if rows > number else f"{rows}"
        _check.fail(argument, rule, f"{got} rows", PASS)


def is_finite(batch: Batch) -> bool:
    """Tell whether all floating-point numbers of a batch are finite."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    return all(jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


def defect(batch: Batch, expected: Tree, per_chain: bool) -> str:
    """Say why a batch cannot be used after one of the structure `expected`; "" if it can."""
    if (structure := jax.tree.structure(batch)) != expected:
        return f"has the structure {structure}, not {expected} as the first"
    try:
        _on_host.as_numeric("batches", batch)
    except _check.ArgumentError as error:
        return f"has {error.got}. {error.advice}".rstrip(". ")
    return "is empty" if size(batch, per_chain) == 0 else ""


def advice_on_single(batches: object) -> str:
    """Say how to pass a single batch, if `batches` may be one; "" if not."""
    are_arrays = isinstance(batches, (list, tuple)) and all(hasattr(x, "shape") for x in batches)
    if isinstance(batches, list):
        return PAIR * (are_arrays and len(batches) > 1)
    return SINGLE * (are_arrays or hasattr(batches, "shape"))


def advice_on_axes(params: optax.Params, batches: object) -> str:
    """Say how `params` and `batches` were understood, for errors of the loss."""
    axes = f"The first axis of `params`, length {len(jax.tree.leaves(params)[0])}, was taken as"
    return f"{axes} chains. {advice_on_single(batches)}".rstrip()


def check_list(batches: Sequence, per_chain: bool, counted: Counted | None = None):
    """Require a list of usable batches; with `counted` also warn of their sizes and amount."""
    hint, kind = advice_on_single(batches), type(batches).__name__
    if not batches:
        _check.fail("batches", "a list with at least one batch", "an empty list")
    expected = jax.tree.structure(batches[0])
    for number, batch in enumerate(batches):
        if reason := defect(batch, expected, per_chain):
            _check.fail("batches", USABLE, f"batches[{number}], which {reason}")
    if counted:
        batches = [_on_host.as_numeric("batches", batch) for batch in batches]
        if hint and len({(x.shape[1:], x.dtype) for x in batches}) > 1:
            # Batches of a list may be sequences or images of several sizes.
            are_tokens = all(x.dtype.kind in "iu" for x in batches)
            are_few = len(batches) < 4 and len({*map(len, batches)}) == 1
            if kind == "tuple" or are_few and not are_tokens:
                name = _check.function_name()
                warn(f"`{name}`: each array of the {kind} `batches` is taken as a batch. {hint}")
        sizes, found = unequal([size(x, per_chain) for x in batches]), divisors(batches, counted)
        warn_if_failed(sizes if not sizes.passed else unequal_terms(found))
        warn_if_failed(amount(batches, counted, found))


def unequal(sizes: Sequence[int | None]) -> Check:
    """Find batches of several sizes, whose mean losses weight their examples unequally."""
    counts = Counter(rows for rows in sizes if rows is not None)
    passed = len(counts) < 2 or max(counts) <= NEARLY_EQUAL * min(counts)
    text = "batches have the same size."
    if not passed:
        parts = [f"{counts[rows]} of {rows}" for rows in sorted(counts, reverse=True)]
        text = f"batches have different sizes: {_table.some(parts)} examples."
    return judge("batch sizes", tuple(map(float, sorted(counts))), 1.0, passed, text, UNEQUAL)


class Divisors(NamedTuple):
    """What the mean loss of a batch is divided by."""

    each: np.ndarray  # Of some of the batches, `[batch]`.
    are_terms: bool  # Whether it is the number of terms of the mean.
    depends: bool  # Whether it depends on the batch, beyond its shapes.
    number: float  # How many numbers the mean of the first batch is over.
    constant: float  # By what the sum of the first batch is divided, besides; NaN if unknown.


def at_least(batch: Batch, counted: Counted) -> Check | None:
    """Require `num_data` to be at least the size of a batch; None if one of them is unknown."""
    rows, number = size(batch, counted.per_chain), counted.number
    if rows is None or not isinstance(number, int | float):
        return None
    found = divisors([batch], counted)
    terms = int(found.each[0]) if found is not None and found.are_terms else rows
    kind, passed = "tokens" if terms > rows else "examples", number >= terms
    text = f"num_data={number}, {'and' if passed else 'but'} the first batch has {terms} {kind}."
    return judge("num_data", (float(number),), float(terms), passed, text, NUM_DATA)


def unequal_terms(found: Divisors | None) -> Check | None:
    """Find a loss that is divided by a number that depends on the batch, such as of real tokens."""
    if found is None or not found.depends:
        return None
    low, high, mean = (float(f(found.each)) for f in (np.min, np.max, np.mean))
    passed = high <= NEARLY_EQUAL * low
    text = f"`loss_fn` divides by a number of the batch, which is {low:.4g} to {high:.4g}."
    advice = (
        f"The terms of a batch with a small number count more. Divide by their mean, {mean:.6g}."
    )
    return judge("batch terms", (low, high), NEARLY_EQUAL, passed, text, advice)


def amount(batches: Sequence[Batch], counted: Counted, found: Divisors | None) -> Check | None:
    """Compare `num_data` with the examples of a list of batches; None if that is impossible.

    A list may be a part of the data, hold several passes, or have been augmented. So only a factor
    of `MOST_RATIO` fails and, if the list is longer, only if its examples are distinct. The terms
    of the mean that the loss is count in place of the examples, if its program tells them. The
    number of the batches, or the size of one, fails if there are more distinct examples.
    """
    number, per_chain = counted.number, counted.per_chain
    sizes = [size(batch, per_chain) or 0 for batch in batches]
    if 0 in sizes or not isinstance(number, int | float):
        return None
    terms = found.each if found is not None and found.are_terms else None
    first = sizes[0] if terms is None else int(terms[0])
    # `at_least` warns of fewer than in a batch.
    if number < first:
        return None
    # Each chain has its own examples of the same data.
    copies = len(jax.tree.leaves(batches[0])[0]) if per_chain else 1
    each = 1.0 if terms is None else float(np.mean(terms) / np.mean(_some(sizes)))
    examples = sum(sizes) * copies
    wrong: dict[float, str] = {len(batches): "number of batches", first: "size of a batch"}
    wrong |= {examples: "number of sequences"} if each > 1 else {}
    kind, what = "tokens" if each > 1 else "examples", ""
    if number < examples * each:
        what = wrong.get(number, "")
    is_few = number / (examples * each) <= 1 / MOST_RATIO
    if is_few or what:
        distinct = _num_distinct(batches, per_chain)
        what = f" is the {what}" if what and number < distinct * each else ""
        if is_few or what:
            examples, kind = distinct, f"distinct {kind}"
    total = examples * each
    ratio = number / total
    others = [] if terms is not None else _tokens(batches, per_chain)
    if found is not None and terms is None:
        # A mean over outputs is often taken for one over examples.
        others.append(int(found.number / sizes[0] * examples))
    are_near = [1 / MOST_TOKEN_RATIO < number / x < MOST_TOKEN_RATIO for x in others]
    passed = not what and (1 / MOST_RATIO < ratio < MOST_RATIO or any(are_near))
    has = f"{'and' if passed else 'but'} the batches have {total:,.0f} {kind}."
    text = f"num_data={number:g}{what}, {has}"
    return judge("num_data", (ratio,), MOST_RATIO, passed, text, NUM_DATA)


def _some(batches: Sequence[Batch]) -> Sequence[Batch]:
    return batches[:: -(-len(batches) // MOST_COUNTED)]


def divisors(batches: Sequence[Batch], counted: Counted) -> Divisors | None:
    """Read in the program of the loss what it is divided by; None if it does not tell."""
    if counted.loss is None:
        return None
    each, first = [], None
    for batch in _some(batches):
        rows = size(batch, counted.per_chain) or 0
        batch = jax.tree.map(lambda x: x[0], batch) if counted.per_chain else batch
        shapes = str(jax.tree.map(jnp.shape, batch))
        if shapes not in counted.means:
            program = traced(counted.loss, counted.like, batch)
            found = reading("mean_of", program, batch) if rows else None
            counted.means[shapes] = found and (found[0], jax.jit(found[1]))
        if not counted.means[shapes]:
            return None
        mean, others = counted.means[shapes]
        first = first or mean
        each.append(float(others(batch)) if mean.others else _num_terms(mean, batch, rows))
    first, numbers = cast(Tree, first), np.array(each)
    are_terms = bool(np.all((numbers >= 1) & (numbers == np.round(numbers))))
    are_terms &= not first.others or numbers[0] <= first.number
    return Divisors(numbers, are_terms, bool(first.others), first.number, abs(first.constant))


def _num_terms(mean: Tree, batch: Batch, rows: int) -> float:
    """Count the tokens or examples that a loss is a mean of; NaN if neither fits."""
    leaves = [x for x in jax.tree.leaves(batch) if np.ndim(x) == 2]
    lengths = {x.shape[1] for x in leaves if np.issubdtype(jnp.result_type(x), np.integer)}
    # The targets of a sequence may be the sequence without its first token.
    counts = [*(rows * (x - cut) for x in lengths for cut in (0, 1)), rows]
    fits = [x for x in counts if x and mean.number % x == 0 and mean.constant / x in FACTORS]
    is_of_more = mean.number != rows and mean.constant % mean.number == 0
    return math.nan if not fits or fits[0] == rows and is_of_more else float(fits[0])


def _tokens(batches: Sequence[Batch], per_chain: bool) -> list[int]:
    """Count the entries of each integer array `[example, position]`, over all batches."""
    return [
        sum(map(np.size, leaves))
        for leaves in zip(*map(jax.tree.leaves, batches), strict=False)
        if np.ndim(leaves[0]) == 2 + per_chain
        and np.issubdtype(jnp.result_type(leaves[0]), np.integer)
    ]


def _num_distinct(batches: Sequence[Batch], per_chain: bool) -> int:
    """Count the distinct examples."""
    hashes = set()
    for batch in batches:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf) > per_chain]
        if per_chain:
            leaves = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
        for example in zip(*leaves, strict=True):
            hashes.add(hash(b"".join(np.ascontiguousarray(x).tobytes() for x in example)))
    return len(hashes)


# The gradients. The state of a sampler keeps a fingerprint of the gradient that it received last:
# its norm, and its product with fixed random signs. The product is linear, so the product of a
# mean over several calls, which `optax.MultiSteps` passes on, is the mean of the products.


class Gradients(NamedTuple):
    """Record of the gradients of one chain; counters are int32."""

    num_calls: jax.Array  # Gradients of the loss.
    num_nonfinite_calls: jax.Array  # Of these, gradients or losses with a non-finite entry.
    starts_finite: jax.Array  # Whether the first one was finite.
    pending: jax.Array  # Sum of fingerprints `[2]` since the last gradient of the sampler.
    num_pending: jax.Array  # Number of these fingerprints.
    num_compared: jax.Array  # Gradients that the sampler received and that could be compared.
    num_shorter: jax.Array  # Of these, shorter ones in the same direction.
    num_changed: jax.Array  # Of these, ones changed in any other way.
    shorter_ratios: jax.Array  # Smallest and largest ratio of the shorter ones, `[2]`.
    shorter_norms: jax.Array  # Smallest and largest norm of the shorter ones, `[2]`.
    changed_ratio: jax.Array  # Ratio of the last changed one, NaN if its direction differs.
    num_uphill: jax.Array  # Calls that moved the other leaves along the gradient.
    num_lost: jax.Array | None  # Calls that made an array of `aux` non-finite, `[array]`.


def no_gradients(number: int, aux: Tree) -> Gradients:
    """Return the record before the first call, arrays `[chain, ...]`."""
    ends = jnp.tile(jnp.array([jnp.inf, -jnp.inf], jnp.float32), (number, 1))
    counters = {name for name in Gradients._fields if name.startswith("num_")} - {"num_lost"}
    arrays = len(jax.tree.leaves(aux))
    lost = jnp.zeros((number, arrays), jnp.int32) if arrays else None
    return Gradients(
        **dict.fromkeys(counters, jnp.zeros(number, jnp.int32)),
        num_lost=lost,
        starts_finite=jnp.ones(number, bool),
        pending=jnp.zeros((number, _sums.FINGERPRINT), jnp.float32),
        shorter_ratios=ends,
        shorter_norms=ends,
        changed_ratio=jnp.full(number, jnp.nan, jnp.float32),
    )


def keep_finite(new: Tree, old: Tree, value: jax.Array) -> tuple[Tree, jax.Array | None]:
    """Return an auxiliary state, or the old one if numbers are lost, and which arrays lose some.

    A number is lost if it becomes NaN or infinite. The flags are `[array]`, None without arrays.
    They are false where the loss `value` is not finite either.
    """

    def loses(x: jax.Array, y: jax.Array) -> jax.Array:
        return ~jnp.all(jnp.isfinite(x) | (x == y)) if _tree.is_floating(x) else jnp.zeros((), bool)

    flags = jax.tree.leaves(jax.tree.map(loses, new, old))
    if not flags:
        return new, None
    are_lost = jnp.stack(flags)
    return optax.tree.where(jnp.any(are_lost), old, new), are_lost & jnp.isfinite(value)


def count_others(
    past: Gradients,
    grads: optax.Updates,
    updates: optax.Updates,
    state: SamplerState,
    are_lost: jax.Array | None,
) -> Gradients:
    """Count arrays of `aux` that lose numbers, and raw gradients of leaves that do not move.

    `optax.masked` passes these on as updates.
    """
    if are_lost is not None and past.num_lost is not None:
        past = past._replace(num_lost=_tree.count(past.num_lost, are_lost))
    received = state.last_received()
    seen = {*leaf_names(grads if received is None else received[0])}
    pairs = zip(leaf_names(grads), jax.tree.leaves(grads), jax.tree.leaves(updates), strict=True)
    others = [(g, u) for name, g, u in pairs if name not in seen]
    if not others:
        return past
    raw, moves = map(list, zip(*others, strict=True))
    along = _tree.inner(raw, moves)
    length = jnp.sqrt(_tree.inner(raw, raw) * _tree.inner(moves, moves))
    is_uphill = (along > 0) & (along > (1 - CONSTANT) * length)
    return past._replace(num_uphill=_tree.count(past.num_uphill, is_uphill))


def record_gradient(
    past: Gradients, grads: optax.Updates, value: jax.Array, before: jax.Array, state: SamplerState
) -> Gradients:
    """Compare what the sampler received in one call of one chain with the gradient of the loss.

    The sampler had received `before` gradients before the call, and has the given state after it.
    """
    sampled, last = None, state.last_received()
    if last is not None:
        sampled = _paths.leaves_like(last[0], grads)
    mark = _sums.fingerprint(grads if sampled is None else sampled).astype(past.pending.dtype)
    is_finite = jnp.isfinite(mark[0]) & jnp.isfinite(value)
    past = past._replace(
        num_calls=_tree.count(past.num_calls),
        num_nonfinite_calls=_tree.count(past.num_nonfinite_calls, ~is_finite),
        starts_finite=past.starts_finite & (is_finite | (past.num_calls > 0)),
        pending=past.pending + mark,
        num_pending=past.num_pending + 1,
    )
    if last is None or sampled is None:
        none = past.num_pending * 0  # Before JAX 0.7 only this varies over chains on a mesh.
        return past._replace(pending=none + jnp.zeros_like(mark), num_pending=none)
    stats = state.stats()
    compared = _compare(past, last[1].astype(mark.dtype), stats.accepted)
    return optax.tree.where(stats.num_gradients > before, compared, past)


def _compare(past: Gradients, received: jax.Array, accepted: jax.Array) -> Gradients:
    """Compare the fingerprints of the loss's gradient and of the one that was received."""
    # For several gradients this is the mean of the norms, at least the norm of the mean.
    size, own = past.pending / past.num_pending
    norm, theirs = received
    is_one, rounding = past.num_pending == 1, TOLERANCE * size
    # A gradient whose product with the signs is nearly zero tells nothing.
    is_known = accepted & jnp.all(jnp.isfinite(past.pending)) & jnp.all(jnp.isfinite(received))
    is_known &= jnp.abs(own) > rounding / CONSTANT
    own, size = jnp.where(is_known, own, 1), jnp.where(is_known, size, 1)
    ratio = jnp.where(is_one, jnp.sign(theirs * own) * norm / size, theirs / own)
    is_equal = jnp.abs(theirs - own) <= rounding
    is_equal &= ~is_one | (jnp.abs(norm - size) <= rounding)
    # The direction of a mean is unknown.
    is_along = ~is_one | (jnp.abs(theirs - ratio * own) <= TOLERANCE * norm)
    is_shorter = is_known & ~is_equal & is_along & (ratio > 0) & (ratio < 1)
    is_changed = is_known & ~is_equal & ~is_shorter

    def ends(before: jax.Array, number: jax.Array) -> jax.Array:
        extended = jnp.stack([jnp.minimum(before[0], number), jnp.maximum(before[1], number)])
        return jnp.where(is_shorter, extended, before)

    return past._replace(
        pending=jnp.zeros_like(past.pending),
        num_pending=past.num_pending * 0,
        num_compared=_tree.count(past.num_compared, is_known),
        num_shorter=_tree.count(past.num_shorter, is_shorter),
        num_changed=_tree.count(past.num_changed, is_changed),
        shorter_ratios=ends(past.shorter_ratios, ratio),
        shorter_norms=ends(past.shorter_norms, norm),
        changed_ratio=jnp.where(
            is_changed, jnp.where(is_along, ratio, jnp.nan), past.changed_ratio
        ),
    )


def adds_gradients(seen: Gradients) -> bool:
    """Whether leaves that are not sampled move along their gradients, uphill."""
    calls = np.maximum(seen.num_calls - seen.num_nonfinite_calls, LEAST_UPHILL)
    return bool(np.any(seen.num_uphill > 0.9 * calls))


def check_aux(seen: Gradients, aux: Tree) -> Check | None:
    """Find arrays of an auxiliary state that lose numbers; None without any."""
    if (lost := seen.num_lost) is None:
        return None
    share = float(np.max(lost, initial=0)) / max(int(np.max(seen.num_calls, initial=0)), 1)
    at = listed(aux, np.any(lost, axis=0))
    text = f"`aux` would not be finite at {at} after {share:.2%} of the calls of `loss_fn`."
    return _of_share("auxiliary state", share, 0.0, text, LOST)


def listed(tree: Tree, flags: np.ndarray) -> str:
    """List the names of the leaves with a flag."""
    return ", ".join(name for name, flag in zip(leaf_names(tree), flags, strict=True) if flag)


def check_gradients(seen: Gradients, are_compared: bool, aux: Tree):
    """Require finite gradients at the start, which the sampler receives; a clip may act on them.

    Some call must leave `aux` finite, and leaves that are not sampled may not move uphill.
    """
    lost = np.flatnonzero(~seen.starts_finite).tolist()
    if lost:
        rule = "a start at which the gradients of every chain are finite"
        advice = f"{NOT_FINITE} A loss may be finite where its gradient is not."
        _check.fail("params", rule, f"nan or inf in the chains {lost}", advice)
    if seen.num_lost is not None:
        always = np.any(seen.num_lost == seen.num_calls[:, None], axis=0)
        if np.any(always & np.any(seen.num_calls)):
            got = f"nan or inf at {listed(aux, always)} after every call of `loss_fn`"
            _check.fail("aux", "finite after a call of `loss_fn`", got)
    if adds_gradients(seen):
        rule = "one beside which the other leaves rest or are optimized"
        _check.fail("sampler", rule, "one beside which their gradients are added", AT_REST)
    if are_compared and (how := changed(seen)):
        rule = "a chain in which the sampler receives the gradients of the loss"
        _check.fail("sampler", rule, f"gradients {how}", BEFORE)


def changed(seen: Gradients) -> str:
    """Say how gradients are changed, other than by one clip of their norm; "" if they are not."""
    is_changed = seen.num_changed > MOST_ALTERED * seen.num_compared
    if np.any(is_changed):
        ratios = seen.changed_ratio[is_changed]
        if np.any(np.isnan(ratios)):
            return "with another direction"
        low = high = float(np.median(ratios))
    else:
        is_shorter = seen.num_shorter > 0
        lows, highs = seen.shorter_ratios[is_shorter].T
        shortest, longest = seen.shorter_norms[is_shorter].T
        # Clipped gradients all have the same length.
        varies = longest > (1 + CONSTANT) * shortest
        if not np.any(varies):
            return ""
        low, high = float(np.min(lows[varies])), float(np.max(highs[varies]))
    if low < high and high >= (1 + CONSTANT) * low:
        return f"multiplied by numbers from {low:.3g} to {high:.3g}"
    return f"multiplied by {low:.6g}"


def check_clips(seen: Gradients) -> Check:
    """Find an active clip before the sampler, and say what it costs."""
    share = float(np.sum(seen.num_shorter) / max(np.sum(seen.num_compared), 1))
    shortest = float(np.nanmin(np.where(seen.num_shorter > 0, seen.shorter_ratios[:, 0], 1)))
    text = (
        f"A clip before the sampler shortens {share:.1%} of the gradients, by up to a factor of"
        f" {1 / shortest:.3g}. Where it acts, the draws come from a distribution that is flatter"
        " than the posterior."
    )
    return _of_share("clipped gradients", share, MOST_CLIPPED, text, CLIP)


def check_finite(seen: Gradients) -> Check:
    """Find gradients that are not finite."""
    # Bad data affect every chain; a diverging chain is alone.
    place = np.argmin(seen.num_nonfinite_calls)
    number, calls = int(seen.num_nonfinite_calls[place]), int(seen.num_calls[place])
    share = number / max(calls, 1)
    text = f"{number} of {calls} losses or gradients of a chain were not finite ({share:.2%})."
    return _of_share("non-finite gradients", share, MOST_NONFINITE_CALLS, text, NONFINITE)


def _of_share(kind: str, share: float, bound: float, text: str, advice: str) -> Check:
    return judge(kind, (share,), bound, share <= bound, text if share else "none.", advice)


# The start.


def rise(
    losses: ChainLosses, batch: Batch, params: Tree, start: np.ndarray, settings: Options | None
) -> Check | None:
    """Find a posterior whose draws certainly have a far larger loss than `start`, that of `params`.

    The test uses a lower bound for a quadratic loss: how far the loss of a network rises cannot be
    predicted from the curvature at its start. Returns None if the bound is unknown.
    """
    if not settings or not {"num_data", "temperature", "prior_precision"} <= settings.keys():
        return None
    number, temperature = settings["num_data"], settings["temperature"]
    precisions = jax.tree.leaves(settings["prior_precision"])
    are_known = all(isinstance(x, int | float) for x in (number, temperature, *precisions))
    if not are_known or not precisions or settings.get("log_prior") is not None:
        return None
    posterior = Potential(number, max(precisions), temperature)
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(params))
    # The largest possible value, without curvature: for most runs it suffices.
    excess = excess_loss(posterior, np.inf, size)
    if excess > MOST_RISE:
        excess = least_excess_loss(posterior, *_moments(losses, batch, params, start))
    passed = excess <= MOST_RISE
    outcome = "should stay near that of the start"
    if not passed:
        outcome = f"will be more than {MOST_RISE:g} nat per example above that of the start"
    text = (
        f"the loss of the draws {outcome}: {size} parameters, num_data={number:g}"
        f" (d / N = {size / number:.3g}), prior_precision={max(precisions):g} and"
        f" temperature={temperature:g}."
    )
    return judge("start", (excess,), MOST_RISE, passed, text, TOO_FEW)


def _moments(
    losses: ChainLosses, batch: Batch, params: Tree, start: np.ndarray
) -> tuple[float, float]:
    """Estimate the traces of the Hessian H of the mean loss and of its square, from losses alone.

    For random y and z, the mean of y H y is the first trace, that of (y H z)**2 the second.
    """
    traces, squares = [], []
    for pair in jax.random.split(jax.random.key(SEED), NUM_PAIRS):
        y, z = (_noise.normal_like(key, params) for key in jax.random.split(pair))
        both = [jax.tree.map(combine, y, z) for combine in (jnp.add, jnp.subtract)]
        plus, minus = (_along(direction, losses, batch, params, start) for direction in both)
        traces.append((plus + minus) / 4)
        squares.append(((plus - minus) / 4) ** 2)
    moments = float(np.mean(traces)), float(np.mean(squares))
    return moments if np.all(np.isfinite(moments)) else (0.0, 0.0)


def curvature(losses: ChainLosses, batch: Batch, params: Tree, start: np.ndarray) -> float:
    """Estimate the trace of the Hessian of the mean loss, from one random direction per chain."""
    noise = _noise.normal_like(jax.random.key(SEED), params)
    with np.errstate(all="ignore"):
        trace = float(np.median(_along(noise, losses, batch, params, start)))
    return max(trace, 0.0) if np.isfinite(trace) else 0.0


def _along(
    direction: Tree, losses: ChainLosses, batch: Batch, params: Tree, start: np.ndarray
) -> np.ndarray:
    """Return y H y `[chain]` for a direction y and the Hessian H of the loss."""
    leaves = jax.tree.leaves(params)
    square = sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves)
    width = DISTURBANCE * (float(jnp.sqrt(square)) or 1.0)

    def at(sign: int) -> np.ndarray:
        moved = jax.tree.map(lambda x, y: x + sign * width * y, params, direction)
        return np.asarray(_on_host.local(losses(batch, moved)), float)

    return (at(1) + at(-1) - 2 * np.asarray(start, float)) / width**2
