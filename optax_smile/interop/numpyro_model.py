"""NumPyro models, sampled with mini-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile import _check
from optax_smile._types import Batch, Options, Output, Tree
from optax_smile.diagnostics.statistics import to_arviz
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

WHERE = "from_numpyro"
DRAWS = _check.kind((Snapshots, StoredSnapshots), "draws of this model from `sample`")
# Relative tolerance for prior and deterministic values to count as equal between batches.
TOLERANCE = 1e-5
# Seed of the parameter values at which a model is inspected.
SEED = 0
# A message of NumPyro: a dict whose values depend on the kind of site.
Site = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class NumpyroModel:
    """A NumPyro model for `sample`, made by `from_numpyro`, whose arguments are its attributes.

    Parameters are a dict from the name of a latent site to its unconstrained value, an array.
    """

    model: Callable[..., Output]
    plate: str
    num_data: int
    batch: Batch = dataclasses.field(repr=False)

    @property
    def posterior(self) -> Options:
        """Arguments for a sampler: `psmile(**model.posterior, key=0)`.

        In models with few parameters, `tuner=angle_tuner(0.1)` moves faster than the default.
        """
        given = {"num_data": self.num_data, "prior_precision": 0.0, "log_prior": self.log_prior}
        return given | {"temperature": 1.0}

    def loss_fn(self, params: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
        """Compute minus the mean log likelihood of a batch, a scalar in nats per example."""
        run = _run(self, params, batch)
        # NumPyro scales log densities in the plate to the size of the plate.
        inside = [x for name, x in run.log_densities.items() if name in run.inside]
        return -jnp.asarray(sum(inside)) / run.size

    def log_prior(self, params: Mapping[str, jax.Array]) -> jax.Array:
        """Compute the log density of the latent sites in unconstrained space, a scalar in nats."""
        run = _run(self, params, self.batch)
        return run.log_jacobian + sum(
            x for name, x in run.log_densities.items() if name not in run.inside
        )

    def map_loss(self, params: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
        """Compute `loss_fn` plus the prior's share, for `warmstart` to start near the mode."""
        run = _run(self, params, batch)
        return -(sum(run.log_densities.values()) + run.log_jacobian) / run.size

    def init_fn(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw parameters where the density is finite, uniform in [-2, 2] as NumPyro does."""
        arguments, keywords, _ = _arguments(self, self.batch)
        initialize = _import_numpyro().infer.util.initialize_model
        info = initialize(key, self.model, model_args=arguments, model_kwargs=keywords)
        return {name: jnp.asarray(x) for name, x in info.param_info.z.items()}

    @_check.arguments("NumpyroModel.constrain", draws=DRAWS)
    def constrain(self, draws: Snapshots | StoredSnapshots) -> Snapshots:
        """Convert draws to the model's constrained space.

        The parameters of the result are a dict from the name of a site to its values,
        `[chain, draw, ...]`: latent sites, and deterministic sites that depend on them but not on
        the examples. Observed sites and factors are left out.
        """
        example = _example(self)
        if not isinstance(draws.params, Mapping) or draws.params.keys() != example.keys():
            got = sorted(draws.params) if isinstance(draws.params, Mapping) else "another tree"
            _check.fail(
                "NumpyroModel.constrain", "draws", f"{DRAWS.rule}, of {sorted(example)}", got
            )
        kept = _independent(self, example)

        @jax.vmap
        def depends(params):
            # Without `jit`, `vmap` traces only what depends on the parameters.
            values = _run(self, params, self.batch).values
            kept[:] = [name for name in kept if isinstance(values[name], jax.core.Tracer)]

        depends(jax.tree.map(lambda x: x[None], example))

        def values(params):
            run = _run(self, params, self.batch)
            return {name: run.values[name] for name in kept}

        params = jax.jit(jax.vmap(jax.vmap(values)))(dict(draws.params))
        return Snapshots(jax.tree.map(np.asarray, params), draws.trace, draws.settings)

    def to_arviz(self, draws: Snapshots | StoredSnapshots) -> Tree:
        """Convert draws for ArviZ with the model's site names, see `diagnostics.to_arviz`."""
        return to_arviz(self.constrain(draws))


@_check.arguments(
    WHERE,
    model=_check.Where("a function with NumPyro sites", callable),
    batch=_check.Tree("concrete arrays, not tracers", traced=False),
    num_data=_check.Whole(1),
    plate=_check.kind(str, "the name of a plate"),
)
def from_numpyro(
    model: Callable[..., Output], batch: Batch, *, num_data: int, plate: str = "data"
) -> NumpyroModel:
    """Prepare a NumPyro model for mini-batch sampling.

    Sites inside the plate over the data form the likelihood; all other sites form the prior.
    Constrained sites are sampled in NumPyro's unconstrained space. Latent sites inside the plate
    need batches of all examples, in the same order.

    Args:
        model: called as `model(*batch)` for a tuple, `model(**batch)` for a dict, else
            `model(batch)`. Its plate gives the size of the data and of the batch:
            `with numpyro.plate("data", num_data, subsample_size=len(x))`. Bind other arguments
            with `functools.partial`.
        batch: an example batch, arrays with the examples as first axis. A model that holds all the
            data and uses the indices of its plate gets them as `{"data": indices}`.
        num_data: total number of examples, >= 1.
        plate: name of the plate over the data.

    Returns:
        A `NumpyroModel`: `init_fn` and `map_loss` for `warmstart`, `loss_fn` and `posterior` for
        `sample`, and `to_arviz` for the draws.

    Raises:
        ValueError: no such plate, or one of another size; no observed site in the plate; a latent
            site that is discrete, or inside the plate with a batch of some examples; a prior that
            depends on the batch; a model that uses the indices of its plate with a batch without
            indices; `numpyro.param`, or random numbers in the model.
        ImportError: NumPyro is not installed.

    Cost: compiling a step of the sampler traces the model twice, for likelihood and prior.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax_smile
        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     noise = numpyro.sample("noise", dist.HalfNormal(1))
        ...     with numpyro.plate("data", 100, subsample_size=len(x)):
        ...         numpyro.sample("y", dist.Normal(x @ w, noise), obs=y)
        >>> x = jax.random.normal(jax.random.key(0), (100, 2))
        >>> batches = [(x[i : i + 10], x[i : i + 10, 0]) for i in range(0, 100, 10)]
        >>> bridge = optax_smile.interop.from_numpyro(model, batches[0], num_data=100)
        >>> sampler = optax_smile.psmile(**bridge.posterior, key=0)
        >>> draws = optax_smile.sample(
        ...     bridge.loss_fn, jax.vmap(bridge.init_fn)(jax.random.split(jax.random.key(1))),
        ...     batches * 10, sampler, num_warmup=50, num_draws=5, thin=10, key=0, progress=False,
        ... )
        >>> {name: x.shape for name, x in bridge.constrain(draws).params.items()}
        {'noise': (2, 5), 'w': (2, 5, 2)}
    """
    _import_numpyro()
    bridge = NumpyroModel(model, plate, num_data, batch)
    with _check.calling(WHERE, "batch", "valid arguments of the model"):
        params = _example(bridge)
        run, turned = (_run(bridge, params, batch, turn) for turn in (False, True))
        independent = _independent(bridge, params)
    for name, density in run.log_densities.items():
        if name not in run.inside and name not in independent:
            rule = "a batch that does not change the prior"
            _check.fail(WHERE, "batch", rule, f"one that changes the prior of the site {name!r}")
        if name in run.inside and not _close(density, turned.log_densities[name]):
            rule = f"a dict with the indices of the plate, {{{plate!r}: indices, ...}}"
            got = f"a batch without indices, on which the site {name!r} depends"
            _check.fail(WHERE, "batch", rule, got)
    return bridge


class _Run(NamedTuple):
    """Results of a run of the model: log density and value of each site by name, and others."""

    log_densities: dict[str, jax.Array]
    values: dict[str, jax.Array]
    # Sites in the plate over the data, its size, and its rows in the batch.
    inside: list[str]
    size: int
    rows: int
    # The sum of log |Jacobian|.
    log_jacobian: jax.Array


def _run(
    bridge: NumpyroModel, params: Mapping[str, jax.Array], batch: Batch, turn: bool = False
) -> _Run:
    """Run the model at unconstrained values; `turn` reverses the indices of its plate."""
    numpyro = _import_numpyro()
    arguments, keywords, indices = _arguments(bridge, batch)
    jacobians = []

    def value_of(message: Site) -> jax.Array | None:
        if message["type"] == "plate" and message["name"] == bridge.plate:
            size, rows = message["args"]
            _check_plate(bridge, size)
            if indices is None:
                counted = jnp.arange(rows or size)
                return size - 1 - counted if turn else counted
            return jnp.asarray(indices)
        if _is_latent(message):
            if any(frame.size < bridge.num_data for frame in _plates(bridge, message)):
                rule = f"a model without latent sites in the plate {bridge.plate!r}"
                remedy = "Move it outside the plate and index it, or use batches of all examples."
                _check.fail(WHERE, "model", rule, f"the site {message['name']!r}", remedy)
            transform = numpyro.distributions.biject_to(message["fn"].support)
            value = transform(at := params[message["name"]])
            jacobians.append(jnp.sum(transform.log_abs_det_jacobian(at, value)))
            return value
        return None

    model = numpyro.handlers.substitute(bridge.model, substitute_fn=value_of)
    log_densities, trace = numpyro.infer.util.compute_log_probs(model, arguments, keywords, {})
    sites = {name: s for name, s in trace.items() if s["type"] in ("sample", "deterministic")}
    return _Run(
        log_densities,
        {name: site["value"] for name, site in sites.items()},
        [name for name, site in sites.items() if _plates(bridge, site)],
        trace[bridge.plate]["args"][0],
        len(trace[bridge.plate]["value"]),
        jnp.asarray(sum(jacobians, start=0.0)),
    )


def _plates(bridge: NumpyroModel, site: Site) -> list[Any]:
    """Return the plate over the data, with the size of the batch, if a site is inside."""
    return [frame for frame in site["cond_indep_stack"] if frame.name == bridge.plate]


def _is_latent(site: Site) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _example(bridge: NumpyroModel) -> dict[str, jax.Array]:
    """Check the sites of the model, and return example parameters."""
    numpyro = _import_numpyro()
    arguments, keywords, _ = _arguments(bridge, bridge.batch)
    rule = "a model without `numpyro.param`, state or random numbers"

    class Refuse(numpyro.primitives.Messenger):
        def process_message(self, message: Site):
            if message["type"] in ("param", "mutable", "prng_key"):
                got = f"the {message['type']} {message.get('name') or ''}".strip()
                _check.fail(WHERE, "model", rule, got)

    # An improper prior has no draws.
    begun = numpyro.handlers.substitute(
        numpyro.handlers.seed(Refuse(bridge.model), jax.random.key(SEED)),
        substitute_fn=numpyro.infer.init_to_uniform,
    )
    trace = numpyro.handlers.trace(begun).get_trace(*arguments, **keywords)
    plates = {name: site for name, site in trace.items() if site["type"] == "plate"}
    if bridge.plate not in plates:
        _check.fail(WHERE, "plate", f"one of the model's plates, {sorted(plates)}", bridge.plate)
    _check_plate(bridge, plates[bridge.plate]["args"][0])
    latent = {name: site for name, site in trace.items() if _is_latent(site)}
    for name, site in latent.items():
        if site["fn"].support.is_discrete:
            rule = "a model without discrete latent sites"
            remedy = "Sum over its values, for example with `dist.MixtureSameFamily`."
            _check.fail(WHERE, "model", rule, f"the site {name!r}", remedy)
    samples = [site for site in trace.values() if site["type"] == "sample"]
    if not any(site["is_observed"] and _plates(bridge, site) for site in samples):
        rule = f"a model with an observed site in the plate {bridge.plate!r}"
        _check.fail(WHERE, "model", rule, "none")
    to = numpyro.distributions.biject_to
    return {name: to(site["fn"].support).inv(site["value"]) for name, site in latent.items()}


def _check_plate(bridge: NumpyroModel, size: int):
    if size != (number := bridge.num_data):
        rule = f"the size of the plate {bridge.plate!r}, {size}"
        remedy = f"numpyro.plate({bridge.plate!r}, {number}, subsample_size=len(x))"
        _check.fail(WHERE, "num_data", rule, number, f"In the model: {remedy}.")


def _arguments(bridge: NumpyroModel, batch: Batch) -> tuple[tuple, Options, Batch]:
    """Return the model's positional and keyword arguments, and the plate's indices or None."""
    if isinstance(batch, Mapping):
        named = dict(batch)
        indices = named.pop(bridge.plate, None)
        return (), named, indices
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}, None


def _close(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> bool:
    same_shape = np.shape(a) == np.shape(b)
    return same_shape and np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _independent(bridge: NumpyroModel, params: Mapping[str, jax.Array]) -> list[str]:
    """List the sites whose density and value do not depend on the batch or its size."""

    def other(x: jax.typing.ArrayLike) -> jax.Array:
        """Make other examples; integers repeat those of the first one."""
        x = jnp.asarray(x)
        is_real = jnp.issubdtype(x.dtype, jnp.floating)
        return 2 * x[::-1] + 1 if is_real else jnp.broadcast_to(x[:1], x.shape)

    batches = bridge.batch, jax.tree.map(other, bridge.batch)
    run, changed = (_run(bridge, params, batch) for batch in batches)
    return [
        name
        for name, value in run.values.items()
        if (name not in run.inside or run.rows == run.size)
        and _close(*(x.log_densities.get(name, 0.0) for x in (run, changed)))
        and _close(value, changed.values[name])
    ]


def _import_numpyro() -> ModuleType:
    with _check.needed("`optax_smile.interop.from_numpyro` needs NumPyro", "numpyro"):
        import numpyro
    return numpyro
