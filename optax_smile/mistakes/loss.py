"""Mistakes in a loss: its form, a sum instead of a mean, and those visible in its program."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from optax_smile import _check, _on_host, _paths, _settings, parallel
from optax_smile._on_host import num_examples, num_rows
from optax_smile._types import Options, T
from optax_smile._warn import warn
from optax_smile.diagnostics.findings import Check
from optax_smile.mistakes.gradients import STOPPED
from optax_smile.state import find

# A loss in the form `(params, aux, key, batch) -> (loss, aux)`, see `loss_of`.
FullLoss: TypeAlias = Callable[..., tuple[jax.Array, Any]]
NEAR_ONE = 0.05  # If the losses of halves add up to the whole within this, it is a sum.
SUMMED = "`loss_fn` looks like a sum over the examples: divide by their number."
# Factors by which a mean may be divided, such as 2 for squares.
FACTORS = 0.5, 1, 2, 4
# Number of batches in a list whose terms of the loss are counted.
MOST_COUNTED = 256
# Logs notes that are not warnings, and the error if a program cannot be read. The tests of the
# package make the latter a failure.
LOG = logging.getLogger("optax_smile")
# For each finding of `program.read`: text of the check, verbs for failure and success, advice.
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


def loss_of(loss_fn: Callable, has_aux: bool, is_stochastic: bool) -> FullLoss:
    """Convert a loss to the form `(params, aux, key, batch) -> (loss, aux)`."""
    form = ", ".join(["params", "batch", *["aux="] * has_aux, *["key="] * is_stochastic])
    advice = "It also gets `aux` if you pass one, and `key` if `stochastic`."
    _check.Function(f"({form})", advice)("loss_fn", loss_fn)

    def loss(params, aux, key, batch) -> Any:
        extras = {"aux": aux} if has_aux else {}
        if is_stochastic:
            extras["key"] = key
        result = loss_fn(params, batch, **extras)
        if isinstance(result, tuple) != has_aux or has_aux and len(result) != 2:
            rule = "a function that returns a scalar loss, or with `aux=` a pair (loss, new_aux)"
            _check.fail("loss_fn", rule, f"one that returns {_check.show(result)}")
        result = result if has_aux else (result, None)
        before, new = (jax.tree.map(jnp.shape, x) for x in (aux, result[1]))
        if has_aux and jax.tree.flatten(before) != jax.tree.flatten(new):
            rule = f"a function that returns `new_aux` like `aux`, {_check.cut(before)}"
            _check.fail("loss_fn", rule, _check.cut(new))
        return result

    return loss


@dataclasses.dataclass
class Losses:
    """The losses of many chains on a batch, and the context that tests of the loss need.

    Attributes:
        loss: loss of one chain.
        like: shapes of one chain, with `params`, `aux` and `key`.
        number: number of chains.
        per_chain, mesh, specs: as for `sample`.
        hint: advice if the loss raises.
        settings: settings of the sampler; None if there is none.
        means: cache of `divisors`, by the shapes of a batch.
    """

    loss: FullLoss
    like: Any
    number: int
    per_chain: bool = False
    mesh: Mesh | None = None
    specs: Any = None
    hint: str = ""
    settings: Options | None = None
    means: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        def of_chain(chain, batch):
            # The next step splits the key in two.
            key = None if chain.key is None else jax.random.fold_in(chain.key, 2)
            return self.loss(chain.params, chain.aux, key, batch)[0]

        axes = 0, 0 if self.per_chain else None
        mapped = parallel.over_chains(of_chain, mesh=self.mesh, in_axes=axes)
        own = None if self.mesh is None else parallel._chain_sharding(self.mesh)
        self.compiled = jax.jit(mapped, out_shardings=own)

    @property
    def num_data(self) -> object:
        """`num_data` of the sampler; None if there is no sampler."""
        return (self.settings or {}).get("num_data")

    def put(self, batch: object, stacked: bool = False) -> object:
        """Put a batch, or a stack of batches, on the devices."""
        given = {"mesh": self.mesh, "per_chain": self.per_chain, "stacked": stacked}
        return batch if self.mesh is None else parallel.place_batch(batch, **given)

    def __call__(self, chains: Any, batch: object, params: object = None) -> np.ndarray:
        """Compute the losses `[chain]` of the chains of this process.

        They are at the `aux`, `key` and `params` of the chains, or at other `params`.
        """
        if params is not None:
            placed = parallel.place(params, mesh=self.mesh, specs=self.specs)
            chains = chains._replace(params=placed)
        self.check(chains, batch)
        return np.asarray(_on_host.local(self.compiled(chains, self.put(batch))), float)

    def check(self, chains: Any, batch: Any, argument: str = "loss_fn"):
        """Require a scalar loss and, if each chain has its own batch, one batch per chain."""
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if self.per_chain and rows != {(self.number,)}:
            rule = f"batches whose leaves have a leading axis of {self.number}, with `per_chain`"
            _check.fail("batches", rule, f"the leading axes {sorted(rows)}")
        rule = "a function that returns a scalar mean loss"
        if argument != "loss_fn":
            rule = "one batch, for which `loss_fn` returns a scalar mean loss"
        of_params = jax.tree.map(lambda x: np.shape(x)[1:], chains.params)
        shapes = [_check.cut(x) for x in (of_params, jax.tree.map(np.shape, batch))]
        called = f"It was called with the params {shapes[0]} and the batch {shapes[1]} (shapes)."
        advice = f"{called} {self.hint}".rstrip()
        passed = chains, self.put(batch)
        loss = _check.traced(argument, self.compiled, *passed, rule=rule, advice=advice)
        is_scalar = getattr(loss, "shape", None) == (self.number,)
        if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
            of_chain = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", loss)
            _check.fail(argument, rule, f"one that returns {of_chain}")

    def program(self, batch: object) -> Any:
        """Return the program of the loss of one chain; None if it cannot be traced.

        Its arguments are `params`, `aux` and `key` of `like`, and the batch of one chain.
        """
        # Other losses may need arrays that are sharded over devices.
        if self.specs is not None or self.mesh and parallel.DATA in self.mesh.shape:
            return None
        with contextlib.suppress(Exception):
            arguments = self.like.params, self.like.aux, self.like.key, batch
            return jax.make_jaxpr(lambda *x: self.loss(*x)[0])(*arguments)


def warn_of(checks: Iterable[Check]):
    """Warn of checks that failed; write a line about one that passed with advice."""
    for check in checks:
        if check.advice:
            tell = LOG.warning if check.passed else warn
            tell(f"`{_check.function_name()}`: {check.text} {check.advice}")


def warn_of_sum(losses: Losses, chains: Any, batch: object):
    """Warn of a loss that looks like a sum, see `check_mean`, or of one that cannot be tested."""
    check, skip = check_mean(losses, chains, batch), "To skip this test, pass check=False."
    if isinstance(check, Check):
        warn_of([check._replace(advice=check.advice and f"{check.advice} {skip}")])
    elif check:
        name = _check.function_name()
        warn(f"`{name}`: could not test whether `loss_fn` is a mean, because {check}. {skip}")


def check_mean(losses: Losses, chains: Any, batch: object) -> Check | str:
    """Find a loss that looks like a sum: the losses of two halves add up to the loss of the whole.

    A sum passes if it is divided by a constant between the numbers of examples and of terms.
    Returns the reason if this cannot be tested; "" if the batch is a single example or a vector, or
    the loss is random.
    """
    if chains.key is not None:
        return ""
    per_chain, mesh = losses.per_chain, losses.mesh
    # The length of the axis "data" of the mesh must divide the halves.
    rows, least = num_rows(batch, per_chain), 1 if mesh is None else mesh.shape.get("data", 1)
    half = 0 if rows is None else rows // 2 // least * least
    # Without such an array, the batch may be a vector that the loss compares with the parameters.
    has_examples = any(np.ndim(leaf) > 1 + per_chain for leaf in jax.tree.leaves(batch))
    if not half:
        is_mixed = rows is None and has_examples
        return "the arrays of a batch share no axis of examples" if is_mixed else ""

    def of_part(first: int, stop: int) -> np.ndarray:
        rows = slice(first, stop)
        return losses(chains, jax.tree.map(lambda x: x[:, rows] if per_chain else x[rows], batch))

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
    if is_sum and (divided := divisors([batch], losses)):
        # The sampler multiplies the loss by `num_data`, so the loss must not divide by it.
        number = losses.num_data if isinstance(losses.num_data, int | float) else math.inf
        is_of_all = 2 * half < number and divided.constant / number in FACTORS
        is_sum = is_of_all or not 2 * half <= divided.constant <= FACTORS[-1] * divided.number
    return Check.of("mean loss", (ratio,), 1.0, not is_sum, text, SUMMED)


def reading(function: str, *arguments: object) -> Any:
    """Call a function of `program`; None if there is no program or it fails.

    JAX's internals change from version to version; an error here must not end a run.
    """
    if arguments[0] is None:
        return None
    try:
        from optax_smile.mistakes import program

        return getattr(program, function)(*arguments)
    except Exception:
        LOG.debug("The program of a loss could not be read.", exc_info=True)
        return None


def checks(losses: Losses, chains: Any, batch: object) -> Iterator[Check]:
    """Run the tests that read the program of a loss; some only without a mesh."""
    one = jax.tree.map(lambda x: x[0], batch) if losses.per_chain else batch
    program = losses.program(one)
    if program is None or not _settings.are_posterior(losses.settings):
        return
    yield from _of_leaves(losses, program)
    if losses.mesh is None:
        yield from _of_terms(losses, program, chains, batch)


def _of_leaves(losses: Losses, program: Any) -> Iterator[Check]:
    """Find sampled leaves for which the program of the loss has no gradient."""
    params, received = losses.like.params, find(losses.like.state).last_received()
    moved, paths = _paths.names(params if received is None else received[0]), _paths.names(params)
    uses = reading("reached", program, len(paths))
    if uses is None:
        yield _skipped("gradients, unread")
        return
    pairs = [(path, *one) for path, one in zip(paths, uses, strict=True) if path in moved]
    stopped = [path for path, is_read, has_gradient in pairs if is_read and not has_gradient]
    unread = [path for path, is_read, _ in pairs if not is_read]
    text = f"`loss_fn` depends on {', '.join(stopped)}, but has no gradient there."
    text = text if stopped else "`loss_fn` has a gradient wherever it depends on parameters."
    yield Check.of("gradients", (float(len(stopped)),), 0.0, not stopped, text, STOPPED)
    # A log prior may depend on leaves that the loss does not read.
    if unread and (losses.settings or {}).get("log_prior") is None:
        text = f"`loss_fn` does not read {', '.join(unread)}: these are draws from the prior."
        advice = "Leave it out of the parameters, if that is not meant."
        yield Check("unread", (), (float(len(unread)),), 0.0, True, advice, text)


def _of_terms(losses: Losses, program: object, chains: Any, batch: object) -> Iterator[Check]:
    """Find the mistakes of `program.read` in the program of a loss."""
    one = jax.tree.map(lambda x: x[0], chains.params)
    found = reading("read", program, one, num_examples(batch, losses.per_chain))
    if found is None:
        yield _skipped("penalty, logits, pairs")
        return
    if "pairs" in found and not _loses_pairs(losses, chains, batch):
        found.remove("pairs")
    for kind, (text, verbs, advice) in PROGRAM.items():
        passed = kind not in found
        yield Check.of(kind, (float(not passed),), 0.0, passed, text.format(verbs[passed]), advice)


def _skipped(kind: str) -> Check:
    """Make a check for tests that could not be made; its bound is NaN."""
    text = "the program of `loss_fn` cannot be read with this version of JAX."
    return Check.of(kind, (), math.nan, True, text)


def _loses_pairs(losses: Losses, chains: Any, batch: object) -> bool:
    """Whether permuting an array with one number per example leaves the loss unchanged."""
    axis, moved = int(losses.per_chain), reading("elsewhere", chains.params)
    leaves, structure = jax.tree.flatten(batch)

    def loss_with(place: int, leaf: np.ndarray) -> np.ndarray:
        changed = jax.tree.unflatten(structure, [*leaves[:place], leaf, *leaves[place + 1 :]])
        return losses(chains, changed, moved)

    for place, leaf in enumerate(map(np.asarray, leaves)):
        if leaf.ndim <= axis or leaf.size != math.prod(leaf.shape[: axis + 1]):
            continue
        same = np.broadcast_to(leaf.take([0], axis), leaf.shape)
        parts = leaf, np.roll(leaf, 1, axis), same
        whole, mixed, constant = (loss_with(place, part) for part in parts)
        rounding = LOSS_ROUNDING * np.abs(whole)
        # Exclude unused arrays, which never change the loss.
        is_used = np.abs(constant - whole) > 10 * rounding
        if np.all(is_used & (np.abs(mixed - whole) <= rounding)):
            return True
    return False


class Divisors(NamedTuple):
    """The divisors of the mean loss of a batch."""

    each: np.ndarray  # Divisor of each of some batches, `[batch]`.
    are_terms: bool  # Whether the divisor is the number of terms of the mean.
    depends: bool  # Whether it depends on the contents of the batch, not only on shapes.
    number: float  # Number of terms in the mean of the first batch.
    constant: float  # Constant that divides the sum of the first batch; NaN if unknown.


def some(batches: Sequence[T]) -> Sequence[T]:
    """Return at most `MOST_COUNTED` of the batches."""
    return batches[:: -(-len(batches) // MOST_COUNTED)]


def divisors(batches: Sequence[object], losses: Losses) -> Divisors | None:
    """Read the divisors of a loss from its program; None if they cannot be found."""
    each, first = [], None
    for batch in some(batches):
        rows = num_examples(batch, losses.per_chain) or 0
        batch = jax.tree.map(lambda x: x[0], batch) if losses.per_chain else batch
        shapes = str(jax.tree.map(jnp.shape, batch))
        if shapes not in losses.means:
            mean = reading("mean_of", losses.program(batch), batch) if rows else None
            losses.means[shapes] = mean and (mean[0], jax.jit(mean[1]))
        if not losses.means[shapes]:
            return None
        mean, others = losses.means[shapes]
        first = first or mean
        each.append(float(others(batch)) if mean.others else _num_terms(mean, batch, rows))
    first, numbers = cast(Any, first), np.array(each)
    are_terms = bool(np.all((numbers >= 1) & (numbers == np.round(numbers))))
    are_terms &= not first.others or numbers[0] <= first.number
    return Divisors(numbers, are_terms, bool(first.others), first.number, abs(first.constant))


def _num_terms(mean: Any, batch: object, rows: int) -> float:
    """Count the terms of a mean, tokens or examples; NaN if neither number fits."""
    leaves = [x for x in jax.tree.leaves(batch) if np.ndim(x) == 2]
    lengths = {x.shape[1] for x in leaves if np.issubdtype(jnp.result_type(x), np.integer)}
    # The targets of a sequence may be the sequence without its first token.
    counts = [*(rows * (x - cut) for x in lengths for cut in (0, 1)), rows]
    fits = [x for x in counts if x and mean.number % x == 0 and mean.constant / x in FACTORS]
    is_of_more = mean.number != rows and mean.constant % mean.number == 0
    return math.nan if not fits or fits[0] == rows and is_of_more else float(fits[0])
