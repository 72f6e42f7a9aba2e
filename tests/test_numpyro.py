"""NumPyro models: the density, sites of draws, and models that are rejected.

`docs/recipes/numpyro.md` asserts that draws are those of known posteriors.
"""

import functools
import warnings
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions
import pytest
from flax import linen as nn
from numpyro.contrib.module import random_flax_module
from numpyro.infer.util import potential_energy
from runs import Shuffled, refused

import optax_smile
from optax_smile.interop import from_numpyro

NUM_DATA, BATCH, FIRST = 400, 40, slice(0, 40)
# Type checkers see only one type for all kinds of sites.
numpyro_: Any = numpyro
sample, dist = numpyro_.sample, numpyro_.distributions
RNG = np.random.default_rng(0)
GROUP = RNG.integers(0, 8, NUM_DATA)


@pytest.fixture(autouse=True)
def promotion():
    """NumPyro's distributions need it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def observe(distribution, y, name="data", size=NUM_DATA):
    with numpyro.plate(name, size, subsample_size=len(y)):
        sample("y", distribution, obs=y)


def hierarchical(group, y):
    mean = sample("mean", dist.Normal(0, 2))
    spread = sample("spread", dist.HalfNormal(1))
    noise = sample("noise", dist.LogNormal(0, 0.5))
    with numpyro.plate("groups", 8):
        height = sample("height", dist.Normal(0, 1))
    effect: Any = numpyro.deterministic("effect", mean + spread * height)
    observe(dist.Normal(effect[group], noise), y)


def mixture(y):
    weight = sample("weight", dist.Dirichlet(jnp.full(2, 2.0)))
    first = sample("first", dist.Normal(0, 3))
    # A support that depends on another site.
    second = sample("second", dist.TruncatedNormal(0, 5, low=first))
    scale = sample("scale", dist.HalfNormal(2))
    parts = dist.Normal(jnp.stack([first, second]), scale)
    observe(dist.MixtureSameFamily(dist.Categorical(weight), parts), y)


EFFECT = RNG.normal(1.0, 0.7, size=8)[GROUP]
PLACE = np.where(RNG.random(NUM_DATA) < 0.3, -1.5, 1.5)
MODELS: dict[str, tuple[Any, Any]] = {
    "hierarchical": (hierarchical, (GROUP, np.float32(EFFECT + RNG.normal(size=NUM_DATA)))),
    "mixture": (mixture, (np.float32(PLACE + 0.8 * RNG.normal(size=NUM_DATA)),)),
}
DATA = MODELS["hierarchical"][1]


def rows(data, index):
    return tuple(x[index] for x in data)


@pytest.mark.parametrize("name", MODELS)
def test_the_density_is_that_of_numpyro(name):
    model, data = MODELS[name]
    bridge = from_numpyro(model, rows(data, FIRST), num_data=NUM_DATA)
    batches = jax.tree.map(lambda *x: np.stack(x), *Shuffled(data, BATCH))
    shapes = jax.eval_shape(bridge.init_fn, jax.random.key(1))

    @jax.jit
    def energies(at):
        losses = jax.lax.map(lambda batch: bridge.loss_fn(at, batch), batches)
        whole = bridge.loss_fn(at, data), bridge.map_loss(at, data)
        return losses.mean(), *whole, bridge.log_prior(at), potential_energy(model, data, {}, at)

    for key in jax.random.split(jax.random.key(1), 3):
        noise = functools.partial(jax.random.uniform, key, minval=-2, maxval=2)
        at = {name: noise(x.shape) for name, x in shapes.items()}
        loss, whole, map_loss, log_prior, energy = energies(at)
        np.testing.assert_allclose(NUM_DATA * loss - log_prior, energy, rtol=2e-5)
        np.testing.assert_allclose(whole, loss, rtol=2e-5)
        np.testing.assert_allclose(NUM_DATA * map_loss, energy, rtol=2e-5)


def few_draws(bridge):
    """Draws that differ, without a run."""
    params, steps = bridge.init_fn(jax.random.key(0)), np.arange(10).reshape(2, 5) / 10
    return optax_smile.Snapshots({x: np.add.outer(steps, np.asarray(y)) for x, y in params.items()})


def test_draws_have_the_names_and_shapes_of_the_model():
    bridge = from_numpyro(hierarchical, rows(DATA, FIRST), num_data=NUM_DATA)
    assert "array" not in repr(bridge).lower()
    # A model is sampled as it was written.
    assert bridge.posterior.get("temperature", 1) == 1
    posterior = bridge.to_arviz(few_draws(bridge)).posterior
    values = {name: posterior[name].values for name in posterior.data_vars}
    vectors = dict.fromkeys(["height", "effect"], (2, 5, 8))
    shapes = dict.fromkeys(["mean", "spread", "noise"], (2, 5)) | vectors
    assert {name: x.shape for name, x in values.items()} == shapes
    assert (values["noise"] > 0).all() and (values["spread"] > 0).all()
    expected = values["mean"][..., None] + values["spread"][..., None] * values["height"]
    np.testing.assert_allclose(values["effect"], expected, rtol=1e-5)
    other = optax_smile.Snapshots({"other": np.zeros((1, 1, 2))})
    refused("draws=.*draws of this model", bridge.constrain, other)


def test_a_model_that_holds_the_data_gets_indices():
    x, y = RNG.normal(size=(NUM_DATA, 3)).astype(np.float32), RNG.integers(0, 2, NUM_DATA)

    def model(indices=None):
        w = sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", NUM_DATA, subsample_size=BATCH) as index:
            sample("y", dist.Bernoulli(logits=x[index] @ w), obs=y[index])

    rule = r"batch=.*with the indices of the plate, {'data'"
    refused(rule, from_numpyro, model, (), num_data=NUM_DATA)
    index = np.arange(100, 100 + BATCH)
    bridge = from_numpyro(model, {"data": index}, num_data=NUM_DATA)
    w = jnp.array([0.5, 1.0, -1.0])
    expected = -dist.Bernoulli(logits=x[index] @ w).log_prob(y[index]).mean()
    np.testing.assert_allclose(bridge.loss_fn({"w": w}, {"data": index}), expected, rtol=1e-5)


def with_data_and_constants(x):
    level = sample("level", dist.ImproperUniform(dist.constraints.positive, (), ()))
    w = sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    sample("total", dist.Normal(w.sum(), 0.1), obs=1.0)
    sample("unused", dist.Normal(0, 1), obs=jnp.ones(2))
    numpyro.factor("penalty", -jnp.sum(w**2))
    numpyro.deterministic("one", jnp.ones(3))
    numpyro.deterministic("of_data", x.mean() + w)
    numpyro.deterministic("is_large", w.sum() > 100)
    with numpyro.plate("others", 2):
        sample("other", dist.Normal(level, 1), obs=jnp.array([0.5, 1.0]))
        masked: Any = {"obs": jnp.zeros(2), "obs_mask": jnp.array([True, False])}
        sample("part", dist.Normal(level, 1), **masked)
    numpyro.deterministic("twice", 2 * level)
    observe(dist.Normal(x @ w, level), x[:, 0])


def test_only_sites_that_depend_on_latent_ones_are_draws():
    x = RNG.normal(size=(BATCH, 3)).astype(np.float32)
    bridge = from_numpyro(with_data_and_constants, x, num_data=NUM_DATA)
    draws = few_draws(bridge)
    assert draws.params.keys() == {"level", "w", "part_unobserved"}
    found = bridge.to_arviz(draws).posterior
    assert set(found.data_vars) == draws.params.keys() | {"is_large", "twice", "part"}
    level = found["level"].values
    assert (level > 0).all() and np.allclose(found["twice"].values, 2 * level)


SCHOOLS = np.array([[28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18]], np.float32)


def schools(y, error):
    mean, spread = sample("mean", dist.Normal(0, 5)), sample("spread", dist.HalfCauchy(5))
    with numpyro.plate("data", 8, subsample_size=len(y)):
        effect = sample("effect", dist.Normal(mean, spread))
        sample("y", dist.Normal(effect, error), obs=y)


REPARAMETRIZED = numpyro.handlers.reparam(
    schools, config={"effect": numpyro.infer.reparam.LocScaleReparam(0)}
)


@pytest.fixture(scope="module")
def bridge_of_schools():
    return from_numpyro(REPARAMETRIZED, tuple(SCHOOLS), num_data=8)


def test_batches_of_all_examples_may_have_latent_sites_of_their_own(bridge_of_schools):
    bridge, data = bridge_of_schools, tuple(SCHOOLS)
    at, draws = bridge.init_fn(jax.random.key(1)), few_draws(bridge)
    energy = 8 * bridge.loss_fn(at, data) - bridge.log_prior(at)
    np.testing.assert_allclose(energy, potential_energy(REPARAMETRIZED, data, {}, at), rtol=1e-5)
    # The loss is the likelihood alone: `check` would find a prior in it.
    effect = bridge.constrain(draws).params["effect"]
    expected = -dist.Normal(effect[0, 0], SCHOOLS[1]).log_prob(SCHOOLS[0]).mean()
    first = jax.tree.map(lambda x: x[0, 0], draws.params)
    np.testing.assert_allclose(bridge.loss_fn(first, data), expected, rtol=1e-5)
    assert effect.shape == (2, 5, 8)
    rule = "Move it outside the plate.*batches of all examples"
    refused(rule, bridge.loss_fn, at, rows(data, slice(0, 4)))


def test_densities_and_draws_of_the_data_go_to_arviz(bridge_of_schools):
    """For `az.loo`; the noise of the schools is known, so a draw is an effect plus that."""
    bridge, (y, error) = bridge_of_schools, SCHOOLS
    params = bridge.init_fn(jax.random.key(0))
    noise = {x: RNG.normal(scale=0.1, size=(2, 200, *np.shape(y))) for x, y in params.items()}
    draws = optax_smile.Snapshots({x: np.asarray(y) + noise[x] for x, y in params.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = bridge.to_arviz(draws, (y, error), key=1)
        assert np.isfinite(float(arviz.loo(found).elpd_loo))
        assert arviz.plot_ppc(found, num_pp_samples=5) is not None
    effect = found.posterior["effect"].values
    np.testing.assert_array_equal(found.observed_data["y"], y)
    expected = dist.Normal(effect, error).log_prob(y)
    np.testing.assert_allclose(found.log_likelihood["y"].values, expected, rtol=1e-4)
    drawn = found.posterior_predictive["y"].values
    z = (drawn - effect) / error
    assert drawn.shape == (2, 200, 8) and abs(z.mean()) < 0.06 and abs(z.std() - 1) < 0.05
    refused(r"to_arviz\(data=...\)` must be valid arguments", bridge.to_arviz, draws, (1.0,))
    # Fewer examples than the plate has.
    batch = rows(DATA, FIRST)
    bridge = from_numpyro(hierarchical, batch, num_data=NUM_DATA)
    found = bridge.to_arviz(few_draws(bridge), batch)
    effect, noise = (found.posterior[x].values for x in ("effect", "noise"))
    expected = dist.Normal(effect[..., batch[0]], noise[..., None]).log_prob(batch[1])
    np.testing.assert_allclose(found.log_likelihood["y"], expected, rtol=1e-4)


def test_predictive_draws_keep_what_is_observed_outside_the_plate():

    def model(y):
        center: Any = sample("center", dist.Normal(sample("mean", dist.Normal(0, 1)), 1), obs=50.0)
        observe(dist.Normal(center, 1), y)

    y = RNG.normal(size=BATCH).astype(np.float32)
    bridge = from_numpyro(model, y, num_data=NUM_DATA)
    found = bridge.to_arviz(few_draws(bridge), y)
    assert set(found.posterior_predictive.data_vars) == {"y"}
    assert abs(float(found.posterior_predictive["y"].mean()) - 50) < 1


def observed_mean(y, mean: Any = 0.0, **given):
    observe(dist.Normal(sample("mean", dist.Normal(0, 1)) + mean, 1), y, **given)


def with_param(y):
    observed_mean(y, numpyro_.param("a", 0.0))


def without_plate(y):
    sample("y", dist.Normal(sample("mean", dist.Normal(0, 1)), 1), obs=y)


def local(y):
    with numpyro.plate("data", NUM_DATA, subsample_size=len(y)):
        sample("y", dist.Normal(sample("each", dist.Normal(0, 1)), 1), obs=y)


def empirical(y):
    observe(dist.Normal(sample("mean", dist.Normal(y.mean(), 1)), 1), y)


def counts_outside(y):
    rate = sample("rate", dist.Gamma(2, 1))
    sample("sum", dist.Poisson(10 * rate), obs=jnp.round(9 * y).sum())
    observe(dist.Poisson(rate), jnp.round(9 * y))


def random_network(y):
    net: Any = random_flax_module("net", nn.Dense(1), dist.Normal(0, 1), input_shape=(1,))
    observe(dist.Normal(net(y[:, None])[:, 0], 1), y)


WRONG: dict[str, Any] = {
    r"num_data=.*the size of the plate 'data', 40, got 400": lambda y: observed_mean(
        y, size=len(y)
    ),
    r"plate=.*the plate over the data, one of \[\], got 'data' \(the default\)": without_plate,
    r"model=.*without latent sites in the plate 'data', got the site 'each'": local,
    r"model=.*without `numpyro.param`.*, got the param a": with_param,
    r"batch=.*that does not change the prior, got .*'mean'": empirical,
    r"batch=.*does not change the prior, got .*'sum'": counts_outside,
    r"model=.*got the param net\$params. Draw the weights .*`apply`": random_network,
}


@pytest.mark.parametrize("rule", WRONG)
def test_models_that_would_be_sampled_wrongly_are_refused(rule):
    y = np.linspace(0, 1, BATCH, dtype=np.float32)
    refused(rule, from_numpyro, WRONG[rule], y, num_data=NUM_DATA)


def test_batches_without_rows_or_beyond_int32_are_refused():
    rule, large = r"batch=.*first axis, got 8. Bind .*`functools.partial`", np.arange(BATCH) + 2**32
    number = lambda number, y: observe(dist.Normal(0, 1), y)  # noqa: E731
    refused(rule, from_numpyro, number, (8, np.ones(9)), num_data=9)
    rule = r"^`from_numpyro\(batch=.*beyond int32"
    refused(rule, from_numpyro, observed_mean, large, num_data=NUM_DATA)
    bridge = from_numpyro(observed_mean, np.ones(BATCH, ">f4"), num_data=NUM_DATA)
    rule = r"^`NumpyroModel.to_arviz\(data=.*beyond int32"
    refused(rule, bridge.to_arviz, few_draws(bridge), large)


def test_a_model_is_sampled():
    bridge = from_numpyro(hierarchical, rows(DATA, FIRST), num_data=NUM_DATA)
    few: dict[str, Any] = {"num_warmup": 10, "num_draws": 10, "key": 0, "progress": False}
    few["sampler"] = optax_smile.sgld(1e-4, **bridge.posterior, key=0)
    draws = bridge.sample(batches := [*Shuffled(DATA, BATCH)], num_chains=2, **few)
    assert (draws.trace["num_passes"][:, -1] > 0).all()
    assert bridge.constrain(draws).params["effect"].shape == (2, 10, 8)
    rule = r"NumpyroModel.sample\(batches=.*400 rows, got 360"
    refused(rule, bridge.sample, batches[1:], **few)
