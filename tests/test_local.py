"""Sampling around trained weights, against closed forms and refits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import local

NUM_DATA, SIZE = 200, 400
CURVATURES = np.geomspace(1e-2, 3, SIZE)
BATCHES = [np.zeros((20, 1), np.float32)] * 2
QUIET: dict[str, Any] = {"key": 0, "progress": False}


def bowl(params, batch):
    """A quadratic whose minimum, 0.3, is at 1."""
    return jnp.sum(CURVATURES.astype(np.float32) * (params["w"] - 1) ** 2) / 2 + 0.3 + batch.mean()


WEIGHTS = {"w": jnp.ones(SIZE)}
PAIR = {"w": jnp.ones((2, SIZE))}


def excess_of(precision, temperature=1.0):
    """Mean excess loss of the posterior around the minimum."""
    return temperature / 2 * np.sum(CURVATURES / (NUM_DATA * CURVATURES + precision))


class TestPrior:
    def test_each_chain_has_its_own(self):
        given: dict[str, Any] = {"num_data": 1, "prior_precision": 1e4, "prior_mean": "start"}
        tx, chains = optax_smile.sgld(2e-5, **given, key=0), jnp.array([[0.0] * 5, [7.0] * 5])
        steps: dict[str, Any] = {"num_warmup": 200, "num_draws": 100, "thin": 5, "check": False}
        flat = lambda params, batch: 0.0 * jnp.sum(params)  # noqa: E731
        draws = optax_smile.sample(flat, chains, BATCHES, tx, **steps, **QUIET).params
        np.testing.assert_allclose(draws.mean(axis=(1, 2)), [0, 7], atol=0.01)
        assert 0.005 < draws[1].std() < 0.02

    def test_inside_a_mask_and_with_donated_parameters(self):
        """The start is a copy; the update is that of the number, and at the start that of zero."""
        grads = {"a": jnp.array([0.1, 0.2, 0.3]), "b": jnp.ones(2)}

        def update(prior_mean):
            inner = optax_smile.sgld(1e-3, num_data=1, prior_mean=prior_mean, key=0)
            tx = optax.masked(inner, {"a": True, "b": False})
            params = {"a": jnp.ones(3), "b": jnp.ones(2)}
            step = jax.jit(functools.partial(tx.update, grads), donate_argnums=(0, 1))
            return step(tx.init(params), params)[0]

        got, expected = update("start"), update(1.0)
        np.testing.assert_array_equal(got["b"], 1)
        np.testing.assert_allclose(got["a"], expected["a"], rtol=1e-6)

    def test_by_fan_in(self):
        params = {"k": jnp.ones((3, 3, 8, 16)), "b": jnp.ones(16), "s": jnp.ones(())}
        assert local.fan_in_precision(params, scale=2.0) == {"k": 36.0, "b": 0.5, "s": 0.5}
        assert local.fan_in_precision(jnp.ones((5, 7)), out_axis=0) == 7.0
        with pytest.raises(ValueError, match=r"params=.*floating-point numbers, .*got int32\[2\]"):
            local.fan_in_precision({"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)})


@pytest.mark.filterwarnings("ignore:.*a term of the parameters alone")
class TestRise:
    def run(self, loss=bowl, **posterior):
        given: dict[str, Any] = {"num_data": 20, "key": 0} | posterior
        start, tx = {"w": jnp.ones((1, SIZE))}, optax_smile.sgld(1e-9, **given)
        optax_smile.Run(loss, start, BATCHES, tx, key=0).advance(1)

    def test_is_told_before_the_run_unless_there_is_none(self):
        with pytest.warns(UserWarning, match=r"will be more than 1 nat .*d / N = 20"):
            self.run(prior_precision={"w": 1.0})
        self.run(prior_precision=1e4)
        self.run(temperature=0.01)

    def test_is_not_told_where_most_directions_are_flat(self):
        """As of networks: 20 of 400 directions cost 20 / 2 N nats, and the bound from above 5."""

        def flat(params, batch):
            return jnp.sum((params["w"][:20] - 1) ** 2) / 2 + batch.mean()

        self.run(flat)


@pytest.fixture(scope="module")
def search():
    """The likelihood narrows the draws, so that the first guess is far off."""
    make = functools.partial(optax_smile.sgld, 2e-4)
    options = {"temperature": 0.5, "allowed": 0.1, "make_sampler": make, **QUIET}
    return local.local_precision(bowl, WEIGHTS, BATCHES, num_data=NUM_DATA, **options)


NOT_NEAR = "No precision came close to the allowed excess"


@pytest.mark.filterwarnings("ignore:.*a term of the parameters alone")
class TestPrecision:
    def test_costs_what_is_allowed(self, search):
        assert len(search.precisions) > 1
        assert 1 / 1.25 <= search.excess[search.best] / 0.1 <= 1.25
        assert excess_of(search.prior_precision, 0.5) == pytest.approx(0.1, rel=0.4)
        assert search.start_loss == pytest.approx(0.3, rel=1e-5)
        assert f"{search.prior_precision:.3g}" in str(search) and NOT_NEAR not in str(search)
        assert NOT_NEAR in str(search._replace(allowed=1.0))
        # Its sampler samples with the best.
        steps: dict[str, Any] = {"num_warmup": 200, "num_draws": 50, "thin": 5}
        draws = optax_smile.sample(bowl, PAIR, BATCHES, search.sampler(key=1), **steps, **QUIET)
        posterior = {"num_data": NUM_DATA, "temperature": 0.5, "prior_mean": "start"}
        posterior["prior_precision"] = search.prior_precision
        assert posterior.items() <= (draws.settings or {}).items()
        squares = (draws.params["w"] - 1) ** 2
        excess = np.sum(CURVATURES * squares, axis=-1).mean() / 2
        assert excess == pytest.approx(excess_of(search.prior_precision, 0.5), rel=0.3)
        distance = np.sqrt(squares.sum(axis=-1)).mean()
        assert search.distance[search.best] == pytest.approx(distance, rel=0.2)

    def test_is_that_of_the_width_alone_where_the_weights_are_no_minimum(self):
        """Linear, so that draws find smaller losses and cost nothing, and a little curvature."""

        def slope(params, batch):
            return jnp.sum(params["w"]) + jnp.sum(params["w"] ** 2) / 20 + batch.mean()

        options = {"allowed": 0.1, "make_sampler": functools.partial(optax_smile.sgld, 1e-3)}
        search = local.local_precision(slope, WEIGHTS, BATCHES, num_data=1, **options, **QUIET)
        assert search.loss[search.best] < search.start_loss
        assert 1 / 1.25 <= search.excess[search.best] / 0.1 <= 1.25

    def test_chains_that_leave_the_finite_numbers_are_no_candidate(self):
        """The loss ends at a distance of 1 from the minimum, where .05 nats are far beyond."""

        def walled(params, batch):
            square = jnp.sum((params["w"] - 1) ** 2)
            return jnp.where(square < 1, square * 1e-3, jnp.nan) + batch.mean()

        options = {"num_data": 1, "allowed": 5e-4, "check": False, **QUIET}
        search = local.local_precision(walled, WEIGHTS, BATCHES, **options)
        assert np.isfinite(search.excess[search.best]) and np.isfinite(search.precisions).all()
        assert search.distance[search.best] < 1

    def test_wrong_models(self):
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"batches": []}, "at least one batch"),
            ({"loss_fn": lambda params, batch: params["w"]}, "mean loss, a scalar"),
            ({"loss_fn": lambda params, batch: jnp.sum(params["w"]) + jnp.inf}, "loss is finite"),
            ({"loss_fn": lambda params, batch: 0.0 * jnp.sum(params["w"])}, "grows around"),
            ({"make_sampler": lambda **posterior: 3}, "returns a sampler"),
            ({"make_sampler": lambda **posterior: optax.sgd(0.1)}, "that returns an optimizer"),
        ]
        given: Any = {"loss_fn": bowl, "params": WEIGHTS, "batches": BATCHES, "num_data": 200}
        for changes, message in wrong:
            with pytest.raises(ValueError, match=f"^`local_precision\\(.*{message}"):
                local.local_precision(**given | QUIET | {"check": False} | changes)
