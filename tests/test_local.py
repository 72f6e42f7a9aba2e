"""Sampling around trained weights, against closed forms and refits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_samplers import settings_of

import optax_smile
from optax_smile import local

NUM_DATA, SIZE = 200, 400
CURVATURES = np.geomspace(1e-2, 3, SIZE)
BATCHES = [np.zeros((20, 1), np.float32)] * 2
QUIET: dict[str, Any] = {"key": 0, "progress": False}


def bowl(params, batch):
    """A quadratic whose minimum, 0.3, is at 1."""
    return jnp.sum(CURVATURES.astype(np.float32) * (params["w"] - 1) ** 2) / 2 + 0.3 + batch.mean()


EIGHT = {"w": jnp.ones((8, SIZE))}


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

    def test_by_norm(self):
        """At the temperature, the draws of the prior have the norm of the weights."""
        params = {"k": jnp.full((2, 3, 5), 0.5), "b": jnp.zeros((2, 5))}
        square = 15 * 0.5**2
        found = local.norm_precision(params, temperature=0.1)
        assert 0.1 / found * 20 == pytest.approx(square)
        with pytest.raises(ValueError, match=r"params=.*not all zero"):
            local.norm_precision({"w": jnp.zeros((2, 3))})


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
        """As in networks: 20 of 400 directions cost 20 / 2 N nats, while the upper bound is 5."""

        def flat(params, batch):
            return jnp.sum((params["w"][:20] - 1) ** 2) / 2 + batch.mean()

        self.run(flat)


class TestPrecision:
    def of(self, loss=bowl, params=EIGHT, batches=BATCHES, **options):
        return local.curvature_precision(loss, params, batches, num_data=NUM_DATA, **options)

    def test_costs_at_most_what_is_allowed(self):
        """The median of eight traces errs by 5 %. Without a prior a draw costs 1 at most."""
        for allowed, temperature in (0.03, 1.0), (0.1, 1.0), (0.03, 0.5):
            precision = self.of(allowed=allowed, temperature=temperature)
            assert 0.75 * allowed < excess_of(precision, temperature) < allowed
        equal = lambda params, batch: jnp.sum((params["w"] - 1) ** 2) + batch.mean()  # noqa: E731
        assert SIZE / (NUM_DATA * 2 + self.of(equal)) == pytest.approx(0.03, rel=0.1)
        assert self.of(allowed=1.1) == self.of(lambda params, batch: -bowl(params, batch)) == 0

    def test_of_networks_and_batches(self):
        """The median of networks, of which one is at a sharp place, and the mean of batches."""

        def scaled(params, batch):
            return batch.mean() * jnp.sum(jnp.exp(params["scale"]) * (params["w"] - 1) ** 2)

        params = {"w": jnp.ones((3, SIZE)), "scale": jnp.array([0.0, 0.0, 9.0])[:, None]}
        given, rows = {"loss": scaled, "params": params}, [np.full((20, 1), x) for x in (1.0, 3.0)]
        one, other, both = (self.of(**given, batches=x) for x in (rows[:1], rows[1:], rows))
        assert [other, both] == pytest.approx([3 * one, 2 * one], rel=1e-4)
        # T H / (2 a) - N H / d, with H = 2 d.
        assert one == pytest.approx(SIZE / 0.03 - 2 * NUM_DATA, rel=0.2)
        assert self.of(**given, batches=[rows[0]] * 20 + rows[1:]) == one

    def test_is_that_of_the_candidate(self):
        given: Any = {"num_data": NUM_DATA, "allowed": 0.1, "key": 0}
        found = local.network_candidates(bowl, EIGHT, BATCHES, optax.sgd(0.1), **given)
        given = {"num_warmup": 0, "num_draws": 1, "check": False} | QUIET
        given |= {"sampler": found["psmile, around the start"]}
        settings: Any = optax_smile.sample(bowl, EIGHT, BATCHES, **given).settings
        expected = {"prior_mean": "start", "prior_precision": self.of(allowed=0.1)}
        assert expected.items() <= settings.items()
        settings = settings_of(found["spectral"], {"w": jnp.ones(SIZE)})
        # For weights that are one, the precision equals the temperature.
        assert settings["prior_precision"] == pytest.approx(settings["temperature"])

    def test_wrong_models(self):
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"batches": []}, r"batches=.*at least one batch"),
            ({"loss": lambda params, batch: params["w"]}, r"loss_fn=.*got one that.*\[400\]"),
            ({"loss": lambda params, batch: jnp.sum(params["v"])}, r"params=.*valid argument"),
            ({"loss": lambda params, batch: jnp.sum(params["w"]) + jnp.inf}, "loss is finite"),
            ({"params": {"w": jnp.ones((2, 3), int)}}, r"params=.*floating-point"),
        ]
        for changes, message in wrong:
            with pytest.raises(ValueError, match=f"^`curvature_precision\\(.*{message}"):
                self.of(**changes)
