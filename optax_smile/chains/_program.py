"""What the program of a loss says about it: terms of the parameters alone, logits, and pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, jaxpr_as_fun

from optax_smile import _reuse, _tree
from optax_smile._types import Tree

# Equations that run another program once, with their own inputs.
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {"checkpoint", "remat", "remat2"}
# Linear functions of one array, which keep what is known of its entries.
LINEAR = {"broadcast_in_dim", "convert_element_type", "copy", "neg", "reduce_sum", "reshape"}
LINEAR |= {"squeeze", "stop_gradient", "transpose"}
SUMS, PRODUCTS = {"add", "add_any", "sub"}, {"mul", "div"}
MOST_TERMS = 999  # More terms of an array are not followed.
# Multiples of the parameters at which terms are computed, and relative rounding errors.
MULTIPLES, ROUNDING = (-1.0, 0.0, 1.0, 2.0), 1e-3


class Mark(NamedTuple):
    """What is known of an array in the program of a loss."""

    value: Tree  # Its value; None if it depends on the batch.
    terms: Sequence[Tree]  # Values that do not depend on the batch, of which it is a sum.
    # "exp", "sum" of it, "probability", such an array "shifted" as by a log-softmax, or "".
    form: str = ""


def read(loss: Callable[..., jax.Array], params: Tree, others: Tree, rows: int | None) -> set[str]:
    """Read the program of `loss(params, others)`, where only `others` depends on the batch.

    Returns what is found: `"penalty"`, a term of the parameters alone; `"logits"`, a softmax or a
    sigmoid of probabilities; `"pairs"`, a combination of each of the `rows` with each other one.
    """
    program = jax.make_jaxpr(loss)(params, others)
    found, number = set(), len(jax.tree.leaves(params))

    def rule(eqn, marks: list[Mark]) -> list[Mark]:
        name, forms = eqn.primitive.name, [mark.form for mark in marks]
        shapes = [getattr(x.aval, "shape", ()) for x in eqn.outvars] or [()]
        if name == "exp" and forms == ["shifted"]:
            found.add("logits")
        if name in SUMS | PRODUCTS and shapes[0][:2] == (rows, rows):
            found.add("pairs")
        return _combine(eqn, name, marks, _form_of(name, forms))

    def terms_at(multiple: jax.Array, directions: Tree) -> list[jax.Array]:
        leaves = jax.tree.leaves(directions)
        given = [multiple.astype(x.dtype) * x if _tree.is_floating(x) else x for x in leaves]
        known = [Mark(x, [x]) for x in given]
        known += [Mark(None, [])] * (len(program.jaxpr.invars) - number)
        (result,) = _follow(program.jaxpr, program.consts, known, rule)
        return [x.astype(float) for x in result.terms] if result.value is None else []

    # A loop, since not every operation has a rule for `vmap`.
    def compute(at: Tree) -> list[jax.Array]:
        return jax.lax.map(lambda x: terms_at(x, at), jnp.asarray(MULTIPLES))

    terms = _reuse.Program(compute)(elsewhere(params))
    if any(_grows(*np.asarray(term, float)) for term in terms):
        found.add("penalty")
    return found


def num_terms(loss: Callable[..., jax.Array], given: Sequence, counts: Sequence[int]) -> int | None:
    """Find of how many terms `loss(*given)` is a mean; None if it is none of the `counts`.

    The first of `counts` is that of the examples; others are multiples of it, such as tokens. A
    mean of tokens may be one over the positions of each example, and then over the examples.
    """
    means: set[float] = set()

    def rule(eqn, marks: list[Mark]) -> list[Mark]:
        # The form of a mark is what a linear function of its array has been divided by.
        form = marks[0].form if marks and eqn.primitive.name in {*LINEAR, "div"} else ""
        if eqn.primitive.name == "div":
            divisor = eqn.invars[1]
            is_known = isinstance(divisor, Literal) and np.ndim(divisor.val) == 0
            form = str(float(form or 1) * float(divisor.val)) if is_known else ""
            if form and not eqn.outvars[0].aval.shape:
                means.add(float(form))
        return [Mark(None, [], form)] * len(eqn.outvars)

    program = jax.make_jaxpr(loss)(*given)
    _follow(program.jaxpr, program.consts, [Mark(None, [])] * len(program.jaxpr.invars), rule)
    return next((count for count in (*counts[1:], counts[0]) if count in means), None)


def elsewhere(params: Tree) -> Tree:
    """Return other parameters: at a start, outputs may be equal and penalties zero."""

    def moved(x: jax.Array) -> jax.Array:
        if not _tree.is_floating(x):
            return x
        return x + jax.random.normal(jax.random.key(0), x.shape, x.dtype)

    return jax.tree.map(moved, params)


def _grows(back: float, zero: float, there: float, twice: float) -> bool:
    """Whether a term grows like a square or an absolute value; a log standard deviation is odd."""
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

    def apply(*values) -> Tree:
        return eqn.primitive.bind(*values, **eqn.params)

    # What prints, or calls Python for its effects, is not run again.
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
    return [Mark(results[0], terms, form), *(Mark(x, [x]) for x in results[1:])]


def _run(eqn, marks: list[Mark]) -> list[Tree]:
    """Compute the results of an equation from known inputs, as a program of its own."""
    pairs = zip(eqn.invars, marks, strict=True)
    known = {x: mark.value for x, mark in pairs if not isinstance(x, Literal)}
    inside = [], [*known], eqn.outvars, [eqn]
    program = Jaxpr(*inside, debug_info=DebugInfo("loss", "loss", None, None))
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*known.values())


def _follow(program: Jaxpr, constants: Sequence, given: list[Mark], rule: Callable) -> list[Mark]:
    """Go through a program and those that it calls, and return the marks of its results."""
    known = dict(zip(program.invars, given, strict=True))
    known |= {x: Mark(c, [c]) for x, c in zip(program.constvars, constants, strict=True)}

    def mark_of(x) -> Mark:
        dtype = cast(jax.core.ShapedArray, x.aval).dtype
        return Mark(jnp.asarray(x.val, dtype), []) if isinstance(x, Literal) else known[x]

    for eqn in program.eqns:
        marks, inner = [mark_of(x) for x in eqn.invars], None
        if eqn.primitive.name in CALLS:
            names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
            inner = next((eqn.params[name] for name in names if name in eqn.params), None)
        if inner is None:
            results = rule(eqn, marks)
        else:
            called = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            results = _follow(*called, marks, rule)
        known.update(zip(eqn.outvars, results, strict=True))
    return [mark_of(x) for x in program.outvars]
