"""What the host loops of `warmstart` and `sample` share."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check


def num_rows(where: str, params: optax.Params) -> int:
    """Length of the leading axis that all leaves share."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths == {()}:
        rule = "a tree whose leaves share a leading chain axis"
        _check.fail(where, "params", rule, f"the shapes {shapes}")
    return shapes[0][0]


def check_batch(
    where: str,
    loss_fn: Callable,
    params: optax.Params,
    batch: Any,
    has_rows: bool,
    num_rows: int,
):
    """Require a scalar loss and, where a batch has one row each, as many rows as parameters."""
    if has_rows:
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if rows != {(num_rows,)}:
            rule = f"batches whose leaves have a leading axis of {num_rows}"
            _check.fail(where, "batches", rule, f"the leading axes {sorted(rows)}")
        batch = jax.tree.map(lambda x: x[0], batch)
    one = jax.tree.map(lambda x: x[0], params)
    loss = jax.eval_shape(loss_fn, one, batch)
    if not hasattr(loss, "shape") or loss.shape != ():
        _check.fail(where, "loss_fn", "a function that returns a scalar mean loss", loss)


def endless(batches: Iterable) -> Iterator:
    """Go through `batches` again and again; stop where a second pass yields nothing."""
    while True:
        passed = False
        for batch in batches:
            passed = True
            yield batch
        if not passed:
            return


def progress_bar(total: int, label: str, show: bool) -> Any:
    """Make a tqdm bar, or None where it is not wanted or tqdm is not installed."""
    if not show:
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=label)
