"""Read the program of a loss: find penalties, logits, pairs, gradients, and terms of the mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from optax_smile import _tree
from optax_smile._types import T

# Equations that run another program once, with the same inputs.
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {"checkpoint", "remat", "remat2"}
# Linear functions of one array that preserve the properties of its entries.
LINEAR = {"broadcast_in_dim", "convert_element_type", "copy", "neg", "reduce_sum", "reshape"}
LINEAR |= {"squeeze", "stop_gradient", "transpose"}
SUMS, PRODUCTS = {"add", "add_any", "sub"}, {"mul", "div"}
# Linear functions of one array if all other arrays are known.
WEIGHTINGS = LINEAR | SUMS | PRODUCTS | {"select_n", "dot_general"}
MOST_TERMS = 999  # Arrays with more terms are not tracked.
# Multiples of the parameters at which terms are evaluated, and relative rounding errors.
MULTIPLES, ROUNDING = (-1.0, 0.0, 1.0, 2.0), 1e-3


class Mark(NamedTuple):
    """Known properties of an array in the program of a loss."""

    value: Any  # Its value; None if it depends on the batch.
    terms: Sequence[Any]  # Terms of the array that do not depend on the batch.
    # "exp"; "sum" of such an array; "probability"; "shifted", as in a log-softmax of probabilities;
    # or "". In `mean_of`, a `Mean` or a number.
    form: Any = ""


def read(program: ClosedJaxpr, params: optax.Params, rows: int | None) -> set[str]:
    """Read the program of a loss; its arguments after `params` depend on the batch.

    Returns the findings: `"penalty"`, a term that depends only on the parameters; `"logits"`, a
    softmax or sigmoid of probabilities; `"pairs"`, an array that combines all pairs of `rows`.
    """
    found, number = set(), len(jax.tree.leaves(params))

    def rule(eqn, marks: list[Mark]) -> list[Mark]:
        name, forms = eqn.primitive.name, [mark.form for mark in marks]
        shapes = [getattr(x.aval, "shape", ()) for x in eqn.outvars] or [()]
        if name == "exp" and forms == ["shifted"]:
            found.add("logits")
        if name in SUMS | PRODUCTS and shapes[0][:2] == (rows, rows):
            found.add("pairs")
        return _combine(eqn, name, marks, _form_of(name, forms))

    def terms_at(multiple: jax.Array, directions: object) -> list[jax.Array]:
        leaves = jax.tree.leaves(directions)
        given = [multiple.astype(x.dtype) * x if _tree.is_floating(x) else x for x in leaves]
        known = [Mark(x, [x]) for x in given]
        known += [Mark(None, [])] * (len(program.jaxpr.invars) - number)
        (result,) = _follow(program.jaxpr, program.consts, known, rule)
        return [x.astype(float) for x in result.terms] if result.value is None else []

    # A loop, since not every operation has a rule for `vmap`.
    def compute(at: object) -> list[jax.Array]:
        return jax.lax.map(lambda x: terms_at(x, at), jnp.asarray(MULTIPLES))

    terms = jax.jit(compute)(elsewhere(params))
    if any(_grows(*np.asarray(term, float)) for term in terms):
        found.add("penalty")
    return found


def reached(program: ClosedJaxpr, number: int) -> list[tuple[bool, bool]]:
    """Return, for each of the first arguments, if a loss depends on it, and if it has a gradient.

    A gradient that is zero by chance, such as of an inactive unit, counts as a gradient.
    """
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in program.jaxpr.invars]
    places = [i for i in range(number) if _tree.is_floating(shapes[i])]

    def gradients(change: jax.Array, *given: jax.Array) -> list[jax.Array]:
        def loss(moving: list[jax.Array]) -> jax.Array:
            rest = dict(zip(places, moving, strict=True))
            return jaxpr_as_fun(program)(*(rest.get(i, x) for i, x in enumerate(given)))[0]

        return jax.vjp(loss, [given[i] for i in places])[1](change)[0]

    (loss,) = program.out_avals
    backwards = jax.make_jaxpr(gradients)(jax.ShapeDtypeStruct(loss.shape, loss.dtype), *shapes)

    def has_gradient(place: int) -> bool:
        # Whether the cotangent of the loss reaches the argument.
        return dce_jaxpr(backwards.jaxpr, [place == x for x in places])[1][0]

    _, reads = dce_jaxpr(program.jaxpr, [True])
    return [(reads[i], i in places and has_gradient(i)) for i in range(number)]


class Mean(NamedTuple):
    """A mean: the number of added terms, and the divisors of their sum."""

    number: float = 1
    constant: float = 1  # NaN if it is not known.
    others: Sequence[jax.Array] = ()  # Divisors that depend on the batch.

    def divided(self, name: str, factor: Any, mark: Mark) -> Mean:
        """Return the mean after `div` or `mul` by a known factor."""
        power, constant, others = 1 if name == "div" else -1, 1.0, self.others
        if mark.form and math.prod(factor.aval.shape) == 1:
            others, constant = (*others, (mark.value.ravel()[0] / mark.form) ** power), mark.form
        elif isinstance(factor, Literal) or not isinstance(mark.value, jax.core.Tracer):
            number = np.asarray(getattr(factor, "val", mark.value))
            constant = math.nan if number.size > 1 or not number.all() else float(number.ravel()[0])
        elif not factor.aval.shape:
            constant = math.nan
        return self._replace(constant=self.constant * constant**power, others=others)


def mean_of(program: ClosedJaxpr, batch: object) -> tuple[Mean, Callable[[object], jax.Array]]:
    """Return the mean in a loss, and a function that returns the product of its `others`.

    The last argument of the loss, and that of the function, is the batch.
    """
    known, found = len(jax.tree.leaves(batch)), Mean()
    unknown = [Mark(None, [], Mean())] * (len(program.jaxpr.invars) - known)

    def others(batch: object) -> jax.Array:
        nonlocal found
        marks = unknown + [Mark(jnp.asarray(x), [], 1.0) for x in jax.tree.leaves(batch)]
        (result,) = _follow(program.jaxpr, program.consts, marks, _mean_rule)
        found = result.form if isinstance(result.form, Mean) else Mean()
        return jnp.prod(jnp.stack([jnp.asarray(x, float) for x in (1, *found.others)]))

    jax.eval_shape(others, batch)
    return found, others


def _mean_rule(eqn, marks: list[Mark]) -> list[Mark]:
    name, unknown = eqn.primitive.name, [mark for mark in marks if mark.value is None]
    # The form of a known array is its constant factor if it depends on the batch, else 0.
    form: Any = Mean() if unknown else max((mark.form or 0.0 for mark in marks), default=0.0)
    if form and not unknown and name not in LINEAR | {"max"}:
        factor: Any = next((x.val for x in eqn.invars if isinstance(x, Literal)), None)
        is_scaled = name in PRODUCTS and np.size(factor) == 1 and factor
        form = form * float(factor) ** (1 if name == "mul" else -1) if is_scaled else 1.0
    is_inverse = name == "div" and marks[1].value is None
    if unknown and name in WEIGHTINGS and not is_inverse and (len(unknown) == 1 or name in SUMS):
        # For a sum, use the mean with the largest number of terms.
        form = max((mark.form for mark in unknown), key=lambda mean: mean.number)
        if name == "reduce_sum":
            added = eqn.invars[0].aval.size / eqn.outvars[0].aval.size
            form = form._replace(number=form.number * added)
        if name in PRODUCTS:
            place = int(marks[0].value is None)
            form = form.divided(name, eqn.invars[place], marks[place])
    return [mark._replace(form=form) for mark in _combine(eqn, name, marks, "")]


def elsewhere(params: T) -> T:
    """Return other parameters, since at a start outputs may be equal and penalties zero."""

    def moved(x: jax.Array) -> jax.Array:
        if not _tree.is_floating(x):
            return x
        return x + jax.random.normal(jax.random.key(0), x.shape, x.dtype)

    return jax.tree.map(moved, params)


def _grows(back: float, zero: float, there: float, twice: float) -> bool:
    """Whether a term grows like a square or an absolute value, unlike a log standard deviation."""
    near, far = back + there - 2 * zero, twice + zero - 2 * there
    size = max(abs(there - zero), abs(twice - zero))
    is_square = abs(far - near) <= ROUNDING * size
    is_even = abs(back - there) <= ROUNDING * size and twice - zero >= 1.9 * (there - zero)
    return bool(near > ROUNDING * size and (is_square or is_even))


def _form_of(name: str, forms: list[str]) -> str:
    """Return the form of a result, given those of the inputs."""
    if name in ("exp", "logistic"):
        return {"exp": "exp", "logistic": "probability"}[name]
    if name == "div":
        return "probability" if forms == ["exp", "sum"] else ""
    if name == "reduce_sum":
        return "sum" if forms == ["exp"] else ""
    if name in ("sub", "abs"):
        return "shifted" if {"probability", "shifted"} & set(forms) else ""
    return forms[0] if name in LINEAR else ""


def _combine(eqn, name: str, marks: list[Mark], form: str) -> list[Mark]:
    """Return the marks of the results of an equation."""

    def apply(*values) -> jax.Array:
        return eqn.primitive.bind(*values, **eqn.params)

    # Equations with side effects, such as printing, are not run again.
    is_known = not eqn.effects and all(mark.value is not None for mark in marks)
    results = _run(eqn, marks) if is_known else [None] * len(eqn.outvars)
    if not results:
        return []
    terms = [] if results[0] is None else results[:1]
    if name in LINEAR:
        terms = [apply(x) for x in marks[0].terms]
    elif name in SUMS:
        negated = [-x for x in marks[1].terms] if name == "sub" else marks[1].terms
        shape = eqn.outvars[0].aval.shape
        terms = [jnp.broadcast_to(x, shape) for x in (*marks[0].terms, *negated)]
    elif name in PRODUCTS and marks[1].value is not None:
        terms = [apply(x, marks[1].value) for x in marks[0].terms]
    if name == "mul" and marks[0].value is not None and len(marks[1].terms) > len(terms):
        terms = [apply(marks[0].value, x) for x in marks[1].terms]
    terms = terms if len(terms) <= MOST_TERMS else []
    others = [Mark(x, [] if x is None else [x]) for x in results[1:]]
    return [Mark(results[0], terms, form), *others]


def _run(eqn, marks: list[Mark]) -> list[Any]:
    """Compute the results of an equation from known inputs, as a program of its own."""
    pairs = zip(eqn.invars, marks, strict=True)
    known = {x: mark.value for x, mark in pairs if not isinstance(x, Literal)}
    # Fill an empty program: the class for the debug info of a new one is public since JAX 0.10.
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    program = empty.replace(invars=[*known], outvars=eqn.outvars, eqns=[eqn])
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*known.values())


def _inner(eqn) -> Any:
    """Return the program that an equation runs once, with its own inputs; None if it runs none."""
    if eqn.primitive.name not in CALLS:
        return None
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next((eqn.params[name] for name in names if name in eqn.params), None)


def _follow(program: Jaxpr, constants: Sequence, given: list[Mark], rule: Callable) -> list[Mark]:
    """Apply `rule` to all equations, also of called programs; return the marks of the results."""
    known = dict(zip(program.invars, given, strict=True))
    known |= {x: Mark(c, [c]) for x, c in zip(program.constvars, constants, strict=True)}

    def mark_of(x) -> Mark:
        dtype = cast(jax.core.ShapedArray, x.aval).dtype
        return Mark(jnp.asarray(x.val, dtype), []) if isinstance(x, Literal) else known[x]

    for eqn in program.eqns:
        marks, inner = [mark_of(x) for x in eqn.invars], _inner(eqn)
        if inner is None:
            results = rule(eqn, marks)
        else:
            called = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            results = _follow(*called, marks, rule)
        known.update(zip(eqn.outvars, results, strict=True))
    return [mark_of(x) for x in program.outvars]
