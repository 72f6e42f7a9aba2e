"""NumPyro models, sampled with mini-batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import distributions, handlers
from numpyro.infer import Predictive, init_to_uniform, log_likelihood, util
from numpyro.primitives import Messenger

from optax_smile import _check, _on_host, tall
from optax_smile._types import Options
from optax_smile.chains.sample import sample as run_chains
from optax_smile.chains.warmstart import chains_from_weights
from optax_smile.diagnostics.statistics import with_groups
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.samplers.smile import psmile

FUNCTION = "from_numpyro"
DRAWS = _check.kind(Snapshots, "draws of this model from `sample`")
NETWORK = (
    "Draw the weights of a network with `numpyro.sample` and pass them to its `apply`, instead of"
    " `random_flax_module` and its like; or leave NumPyro and give the sampler a `log_prior`."
)
NUM_STARTS = 4  # Number of searches for a mode.
# Whether densities or values of two batches are equal up to rounding.
close = functools.partial(np.allclose, rtol=1e-5, atol=1e-5, equal_nan=True)
Params = Mapping[str, jax.Array]
Site = Mapping[str, Any]  # A message of NumPyro; the values depend on its type.
Run = tuple[dict[str, jax.Array], dict[str, Site], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class NumpyroModel:
    """A NumPyro model for `sample`, made by `from_numpyro`, whose arguments are its attributes.

    Parameters are a dict from the name of a latent site to its unconstrained value.
    """

    model: Callable[..., Any]
    plate: str
    num_data: int
    batch: object = dataclasses.field(repr=False)

    @property
    def posterior(self) -> Options:
        """Arguments for a sampler: `psmile(**model.posterior, key=0)`."""
        given = {"num_data": self.num_data, "prior_precision": 0.0, "log_prior": self.log_prior}
        return given | {"temperature": 1.0}

    def loss_fn(self, params: Params, batch: object) -> jax.Array:
        """Compute minus the mean log likelihood of a batch, a scalar in nats per example."""
        densities, trace, _ = _run(self, params, batch)
        # NumPyro scales log densities in the plate to the size of the plate.
        inside = [x for name, x in densities.items() if _is_likelihood(self, trace[name])]
        return -jnp.asarray(sum(inside)) / trace[self.plate]["args"][0]

    def log_prior(self, params: Params) -> jax.Array:
        """Compute the log density of the latent sites in unconstrained space, a scalar in nats."""
        densities, trace, log_jacobian = _run(self, params, self.batch)
        outside = [x for name, x in densities.items() if not _is_likelihood(self, trace[name])]
        return log_jacobian + sum(outside)

    def map_loss(self, params: Params, batch: object) -> jax.Array:
        """Compute `loss_fn` minus `log_prior` / `num_data`: `warmstart` then ends near the mode."""
        densities, trace, log_jacobian = _run(self, params, batch)
        return -(sum(densities.values()) + log_jacobian) / trace[self.plate]["args"][0]

    def init_fn(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw parameters uniformly in [-2, 2], as NumPyro does, until the density is finite."""
        arguments, keywords, _ = _arguments(self, self.batch)
        given: Options = {"model_args": arguments, "model_kwargs": keywords}
        return dict(util.initialize_model(key, self.model, **given).param_info.z)

    @_check.arguments(
        "NumpyroModel.sample",
        batches=_check.REPEATABLE,
        num_warmup=_check.Whole(0),
        num_draws=_check.Whole(1),
        thin=_check.Whole(1),
        num_chains=_check.Whole(1),
        key=_check.Key(needed=True),
        sampler=_check.TRANSFORMATION | None,
    )
    def sample(
        self,
        batches: Iterable[object],
        *,
        num_warmup: int = 2_000,
        num_draws: int = 1_000,
        thin: int = 10,
        num_chains: int = 4,
        key: jax.Array | int,
        sampler: optax.GradientTransformation | None = None,
        control_variate: bool = True,
        **others: Any,
    ) -> Snapshots | StoredSnapshots:
        """Sample the model with mini-batches whose gradients have little noise.

        It searches for a mode of the unconstrained posterior, starts all chains there, and gives
        their gradients a control variate. If four searches find no mode, the chains start at draws
        of `init_fn`.

        Args:
            batches: as for `tall.center_at`; one pass has each example once.
            num_chains: number of chains, >= 1.
            sampler: None for `psmile(**model.posterior, key=0)`.
            control_variate: whether `optax_smile.sample` gets `batches` as its `control_variate`.

        The other arguments, the result and the errors are those of `optax_smile.sample`. Convert
        the draws with `constrain` or `to_arviz`.

        Cost: see `tall.find_mode`, then that of `optax_smile.sample`.
        """
        sampler = psmile(**self.posterior, key=0) if sampler is None else sampler
        for place in range(NUM_STARTS):
            start = self.init_fn(jax.random.key(place))
            with _check.called("NumpyroModel.sample", params="model", loss_fn="model"):
                center, _, is_mode = tall.search(self.loss_fn, start, batches, sampler)
            if is_mode:
                break
        if is_mode:
            starts = chains_from_weights([center.params], num_chains=num_chains, key=key)
        else:
            keys = jax.random.split(jax.random.key(NUM_STARTS), num_chains)
            starts = jax.vmap(self.init_fn)(keys)
        steps = {"num_warmup": num_warmup, "num_draws": num_draws, "thin": thin, "key": key}
        given: Options = {"steps_per_dispatch": thin} | steps | others
        given["control_variate"] = batches if control_variate else None
        with _check.called("NumpyroModel.sample", "sample", "Run"):
            return run_chains(self.loss_fn, starts, batches, sampler, **given)

    @_check.arguments("NumpyroModel.constrain", draws=DRAWS)
    def constrain(self, draws: Snapshots | StoredSnapshots) -> Snapshots:
        """Convert draws to the model's constrained space.

        The parameters of the result are a dict from the name of a site to its values: latent
        sites, and deterministic sites that depend on them but not on the examples.
        """
        example, params = _example(self), draws.params
        if (got := jax.tree.structure(params)) != jax.tree.structure(example):
            _check.fail("draws", f"{DRAWS.rule}, of {sorted(example)}", got)
        names = _independent(self, example)

        def values(params):
            trace = _run(self, params, self.batch)[1]
            found = {name: trace[name]["value"] for name in names}
            # Without `jit`, `vmap` traces only what depends on the parameters.
            names[:] = [name for name, x in found.items() if isinstance(x, jax.core.Tracer)]
            return {name: found[name] for name in names}

        jax.vmap(values)(jax.tree.map(lambda x: x[None], example))
        found = jax.jit(jax.vmap(jax.vmap(values)))(dict(params))
        return Snapshots(jax.tree.map(np.asarray, found), draws.trace, draws.settings)

    @_check.arguments("NumpyroModel.to_arviz", draws=DRAWS, key=_check.Key(needed=True))
    def to_arviz(
        self, draws: Snapshots | StoredSnapshots, data: object = None, *, key: jax.Array | int = 0
    ) -> Any:
        """Convert draws for ArviZ with the model's site names, see `diagnostics.to_arviz`.

        With `data`, a batch of at most `num_data` examples, the result has the groups
        `log_likelihood`, for `az.loo`, and `posterior_predictive`, one random draw with the `key`
        for each draw and example: observed sites in the plate, `[chain, draw, example, ...]`. Their
        values, for `az.plot_ppc`, are in `observed_data`.
        """
        sites = self.constrain(draws)
        return with_groups(sites, {} if data is None else _observed(self, sites, data, key))


@_check.arguments(
    FUNCTION,
    model=_check.Where("a function with NumPyro sites", callable),
    batch=_check.Tree("concrete arrays, not tracers", traced=False),
    num_data=_check.Whole(1),
    plate=_check.kind(str, "the name of a plate"),
)
def from_numpyro(
    model: Callable[..., object], batch: object, *, num_data: int, plate: str = "data"
) -> NumpyroModel:
    """Prepare a NumPyro model for mini-batch sampling.

    Observed sites inside the plate over the data form the likelihood; all others form the prior.
    Constrained sites are sampled in NumPyro's unconstrained space. Latent sites inside the plate
    need batches of all examples, in the same order. Of the result, `init_fn` and `map_loss` are for
    `warmstart`, the others for `sample`.

    Args:
        model: called as `model(*batch)` for a tuple, `model(**batch)` for a dict, else
            `model(batch)`; with `numpyro.plate("data", num_data, subsample_size=len(x))`.
        batch: an example batch, arrays with the examples as first axis. A model that holds all the
            data and uses the indices of its plate gets them as `{"data": indices}`.
        num_data: total number of examples, >= 1.
        plate: name of the plate over the data.

    Raises:
        ValueError: no such plate, one of another size, or none of whose sites is observed; a latent
            site that is discrete, or in the plate with a batch of some examples; a prior that
            depends on the batch; indices that the batch lacks; `numpyro.param` or random numbers.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax_smile
        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("data", 100, subsample_size=len(x)):
        ...         numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)
        >>> batch = jnp.eye(2), jnp.ones(2)
        >>> bridge = optax_smile.interop.from_numpyro(model, batch, num_data=100)
        >>> bridge.loss_fn({"w": jnp.ones(2)}, batch)
        Array(0.9189385, dtype=float32)
    """
    batch = _on_host.as_numeric("batch", batch)
    bridge = NumpyroModel(model, plate, num_data, batch)
    if loose := [x for x in jax.tree.leaves(batch) if not np.ndim(x)]:
        remedy = "Bind other arguments of the model with `functools.partial`."
        _check.fail("batch", "arrays with the examples as first axis", loose[0], remedy)
    with _check.calling("batch", "valid arguments of the model"):
        params = _example(bridge)
        densities, trace, _ = _run(bridge, params, batch)
        turned, *_ = _run(bridge, params, batch, turn=True)
        independent = _independent(bridge, params)
    for name, density in densities.items():
        is_inside = _plates(bridge, trace[name])
        if not is_inside and name not in independent:
            rule = "a batch that does not change the prior"
            _check.fail("batch", rule, f"one that changes the prior of the site {name!r}")
        if is_inside and not close(density, turned[name]):
            rule = f"a dict with the indices of the plate, {{{plate!r}: indices, ...}}"
            got = f"a batch without indices, on which the site {name!r} depends"
            _check.fail("batch", rule, got)
    return bridge


@_check.called(FUNCTION)
def _run(bridge: NumpyroModel, params: Params, batch: object, turn: bool = False) -> Run:
    """Return log densities of sites, all sites, and log |Jacobian|; `turn` reverses the indices."""
    (arguments, keywords, indices), jacobians = _arguments(bridge, batch), []

    def value_of(message: Site) -> jax.Array | None:
        if message["type"] == "plate" and message["name"] == bridge.plate:
            size, rows = message["args"]
            if size != (number := bridge.num_data):
                remedy = f"In the model: numpyro.plate(..., {number}, subsample_size=len(x))."
                rule = f"the size of the plate {bridge.plate!r}, {size}"
                _check.fail("num_data", rule, number, remedy)
            counted = jnp.arange(rows or size) if indices is None else jnp.asarray(indices)
            return size - 1 - counted if turn and indices is None else counted
        if not _is_latent(message):
            return None
        if any(frame.size < bridge.num_data for frame in _plates(bridge, message)):
            rule = f"a model without latent sites in the plate {bridge.plate!r}"
            remedy = "Move it outside the plate and index it, or use batches of all examples."
            _check.fail("model", rule, f"the site {message['name']!r}", remedy)
        transform = distributions.biject_to(message["fn"].support)
        value = transform(at := params[message["name"]])
        jacobians.append(jnp.sum(transform.log_abs_det_jacobian(at, value)))
        return value

    model = handlers.substitute(bridge.model, substitute_fn=value_of)
    densities, trace = util.compute_log_probs(model, arguments, keywords, {})
    return cast(Any, densities), cast(Any, trace), jnp.asarray(sum(jacobians, start=0.0))


def _observed(
    bridge: NumpyroModel, sites: Snapshots, data: object, key: object
) -> dict[str, dict[str, np.ndarray]]:
    """Return log likelihoods and draws of the observed sites in the plate."""
    data = _on_host.as_numeric("data", data)
    (arguments, keywords, _), example = _arguments(bridge, data), _example(bridge)
    latent, given = {name: sites.params[name] for name in example}, dict[str, Any](batch_ndims=2)
    with _check.calling("data", "valid arguments of the model"):
        trace = _run(bridge, example, data)[1]
        # Without indices, the plate would draw random ones.
        model = handlers.substitute(bridge.model, {bridge.plate: trace[bridge.plate]["value"]})
        densities = log_likelihood(model, latent, *arguments, **keywords, **given)
        names = [name for name in densities if _plates(bridge, trace[name])]
        given |= {"return_sites": names}
        predict = Predictive(_Unobserved(model, names), latent, **given)
        drawn = predict(key, *arguments, **keywords)
    groups = {"log_likelihood": densities, "posterior_predictive": drawn}
    groups["observed_data"] = {x: trace[x]["value"] for x in names}
    return {group: {x: np.asarray(of[x]) for x in names} for group, of in groups.items()}


def _plates(bridge: NumpyroModel, site: Site) -> list[Any]:
    """Return the plate over the data, with the size of the batch, if a site is inside."""
    return [frame for frame in site["cond_indep_stack"] if frame.name == bridge.plate]


def _is_likelihood(bridge: NumpyroModel, site: Site) -> bool:
    return bool(_plates(bridge, site)) and not _is_latent(site)


def _is_latent(site: Site) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


class _Unobserved(handlers.uncondition):
    """Make only some observed sites latent."""

    def __init__(self, model: Callable, names: list[str]):
        super().__init__(model)
        self.names = names

    def process_message(self, message: Site):
        if message.get("name") in self.names:
            super().process_message(cast(Any, message))


class _Refuse(Messenger):
    def process_message(self, message: Site):
        if message["type"] in ("param", "mutable", "prng_key"):
            rule = "a model without `numpyro.param`, state or random numbers"
            got = f"the {message['type']} {message.get('name') or ''}".strip()
            _check.fail("model", rule, got, NETWORK)


@_check.called(FUNCTION)
def _example(bridge: NumpyroModel) -> dict[str, jax.Array]:
    """Check the sites of the model, and return example parameters."""
    arguments, keywords, _ = _arguments(bridge, bridge.batch)
    seeded = handlers.seed(_Refuse(bridge.model), jax.random.key(0))
    # An improper prior has no draws.
    begun = handlers.substitute(seeded, substitute_fn=init_to_uniform)
    trace = handlers.trace(begun).get_trace(*arguments, **keywords)
    latent = {name: site["fn"].support for name, site in trace.items() if _is_latent(site)}
    if discrete := [name for name, support in latent.items() if support.is_discrete]:
        rule = "a model without discrete latent sites"
        remedy = "Sum over its values, for example with `dist.MixtureSameFamily`."
        _check.fail("model", rule, f"the site {discrete[0]!r}", remedy)
    plates = sorted(name for name, site in trace.items() if site["type"] == "plate")
    if bridge.plate not in plates:
        default = " (the default)" * (bridge.plate == "data")
        rule = f"the plate over the data, one of {plates}"
        _check.fail("plate", rule, f"{bridge.plate!r}{default}")
    if not any(site.get("is_observed") and _plates(bridge, site) for site in trace.values()):
        _check.fail("model", f"a model with an observed site in the plate {bridge.plate!r}", "none")
    to = distributions.biject_to
    return {name: to(support).inv(trace[name]["value"]) for name, support in latent.items()}


def _arguments(bridge: NumpyroModel, batch: object) -> tuple[tuple, Options, object]:
    """Return the model's positional and keyword arguments, and the plate's indices or None."""
    if not isinstance(batch, Mapping):
        return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}, None
    named = dict(batch)
    return (), named, named.pop(bridge.plate, None)


def _independent(bridge: NumpyroModel, params: Params) -> list[str]:
    """List the sites whose density and value do not depend on the batch or its size."""

    def other(x: jax.Array) -> jax.Array:
        # Repeat the integers of the first example.
        is_real = jnp.issubdtype(x.dtype, jnp.floating)
        return 2 * x[::-1] + 1 if is_real else jnp.broadcast_to(x[:1], x.shape)

    batches = bridge.batch, jax.tree.map(other, bridge.batch)
    (densities, trace, _), (others, changed, _) = (_run(bridge, params, x) for x in batches)
    is_whole = len(trace[bridge.plate]["value"]) == trace[bridge.plate]["args"][0]
    return [
        name
        for name, site in trace.items()
        if site["type"] in ("sample", "deterministic")
        and (is_whole or not _plates(bridge, site))
        and close(densities.get(name, 0.0), others.get(name, 0.0))
        and close(site["value"], changed[name]["value"])
    ]
