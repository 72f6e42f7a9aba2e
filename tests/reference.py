"""`smile`, `psmile` and `mclmc` in NumPy and float64, written from the paper and the docstrings.

`Chain.call` is one iteration of algorithm 1 of Sommer et al. (ICML 2026), with the differences that
the docstrings list: it closes a step with the gradient at its end, accepts or rejects the step, and
opens the next one. Parameters, gradients and noise are vectors. It is written to be read.
"""

from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.linalg import norm, svd

A = 0.1931833275037836  # Omelyan, Mryglod and Folk 2003.
# Lengths of the kicks and of the drifts between them, in steps.
KICKS = {"leapfrog": (0.5, 0.5), "minimal_norm": (A, 1 - 2 * A, A)}
DRIFTS = {"leapfrog": (1.0,), "minimal_norm": (0.5, 0.5)}
TINY = np.finfo(float).tiny
# Polynomials a s + b s^3 + c s^5, which take singular values s to one.
POLYNOMIALS = (8.0934, -23.6206, 17.4463), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)
POLYNOMIALS += (1.9562, -1.3375, 0.3838), (1.8751, -1.2501, 0.3750)
# Arguments of samplers, by their names. `tuner` is "quantile", "angle" or None, `scale` is
# "squares", "differences", "published" or None; `shapes` of the leaves are for the spectral norm.
DEFAULTS: dict[str, Any] = {"num_data": 1.0, "prior_precision": 0.0, "prior_mean": 0.0}
DEFAULTS |= {"temperature": 1.0, "shapes": None, "eps": np.finfo(float).eps}
DEFAULTS |= {"step_size": 1.0, "integrator": "leapfrog", "decoherence_length": None, "angle": None}
DEFAULTS |= {"adapt_probability": 0.1, "adapt_rate": 0.02, "adapt_steps": np.inf, "tuner": None}
DEFAULTS |= {"reject_quantile": None, "scale": None, "has_matrix": False, "first_window": 64}


class Chain:
    """A chain between two calls.

    `closest` is the smallest relative difference so far between the sides of a comparison that
    decides how the chain goes on.
    """

    def __init__(self, params, **arguments):
        self.s, self.d, self.closest = SimpleNamespace(**DEFAULTS | arguments), len(params), np.inf
        self.scale, self.u, self.p, self.last = Scale(self.s, self.d), None, None, None
        self.place, self.length, self.usual, self.backoff = 0, 0.0, 0.0, 1.0
        self.factor = 0.0 if self.s.tuner == "angle" else 1.0
        self.start, self.total, self.kinetic = params, np.nan, 0.0
        self.calls = self.steps = self.energies = self.turns = self.changes = 0
        self.rejected = self.nonfinite = self.outlying = self.bad_run = self.good_run = 0
        self.energy_mean = self.energy_std = self.fall = self.fall_square = self.descent = 0.0
        self.turn_rate = self.change_square = self.gradient_square = self.kurtosis = 0.0

    def call(self, gradient, value, params, noise=None):
        """Return the displacement, from the gradient and the value of the loss, or None."""
        s, kicks, drifts = self.s, KICKS[self.s.integrator], DRIFTS[self.s.integrator]
        g = (s.num_data * gradient + s.prior_precision * (params - s.prior_mean)) / s.temperature
        w, drift, square = g @ self.scale.A, (0, *drifts)[self.place] * self.length, norm(gradient)
        self.ends, self.opens = self.place == len(drifts), self.place in (0, len(drifts))
        moved = np.zeros(self.d) if self.u is None else drift * self.u
        base: Any = s.step_size(self.steps) if callable(s.step_size) else s.step_size

        # A kick ends the drift. Accept or reject the step by the energy that it has gained.
        end = self.close(w, (0, *kicks[1:])[self.place], kicks[0] if self.ends else 0)
        prior = np.sum(s.prior_precision * (params - s.prior_mean) ** 2) / 2
        total = np.nan if value is None else (s.num_data * value + prior) / s.temperature
        self.gained = total - self.total + self.kinetic + end.kinetic if self.ends else np.nan
        read = [w @ w, square, params @ params, end.kinetic, value or 0]
        if self.ends and value is not None and not np.isnan(self.total):
            read.append(self.gained)
        self.is_finite = bool(np.all(np.isfinite(read))) and base >= 0
        self.accepted = self.judge()

        # Averages over gradients, and the length of the next step.
        resolution, trust, changed = 4 * s.eps * norm(params), 0.0, 0.0
        if w @ w >= TINY and (square**2 >= TINY or self.calls >= 100):
            trust = min(1, 3 * self.turn_rate / end.rate) if self.turns else 1.0
        before = self.gradient_square
        if self.accepted:
            is_long = not self.above(30 * resolution, self.length)
            changed = self.observe(w, end, trust, is_long, drift * norm(w))
        explores = self.above(self.descent, 3)
        adapts = self.is_finite and self.calls < s.adapt_steps
        if s.tuner == "quantile" and adapts and self.known and self.energies >= 10:
            self.tune_by_energy(resolution / base)
        elif s.tuner == "angle":
            rate = end.rate if self.is_finite and trust > 0 else 0
            changed = changed if self.is_finite else 0
            self.factor = self.tuned(rate, changed, base, resolution, explores, adapts) / base
        self.observe_energy()
        self.calls, self.steps = self.calls + 1, self.steps + (self.opens and self.accepted)
        length = base * self.factor * self.backoff

        # Return to the step's start; or add noise, the first kick of the next step, and a drift.
        if not self.accepted:
            self.place, self.length, self.u, self.last = 0, length, None, None
            return self.start - params if drift else np.zeros(self.d)
        self.u, self.p, self.kinetic = end.u, end.p, self.kinetic + end.kinetic
        if self.opens:
            self.diffuse(noise, end, trust)
            kick_length = kicks[0] * length * self.heat(length, before)
            opened = (end.u, end.opening) if s.shapes else kick(self.u, w, kick_length)
            (self.u, self.kinetic), self.length = opened, length
            self.start, self.total = params, total
        self.place = self.place % len(drifts) + 1
        if self.scale.observe(g, trust, self.opens and trust > 0, explores, moved):
            self.last = None
        u = np.zeros(self.d) if self.u is None else self.u
        return drifts[self.place - 1] * self.length * self.scale.A @ u

    def above(self, x, y):
        if np.isfinite(x) and np.isfinite(y):
            self.closest = min(self.closest, abs(x - y) / max(abs(x), abs(y), TINY))
        return x > y

    def heat(self, length, square):
        """Factor of the kicks that keeps long steps from widening a posterior of known width."""
        if self.s.integrator != "leapfrog" or not np.isfinite(self.scale.width):
            return 1.0
        return 1 + (1 - 1 / self.d) ** 2 * (1 + 2 / self.d) * min(square * length**2, 1) / 12

    def close(self, w, closing, opening):
        """Kick at the end of a drift, for fractions of its step."""
        size, rest = norm(w), self.d - 1
        cosine = 0.0 if self.u is None or size == 0 else -self.u @ w / size / norm(self.u)
        rate = size / rest * max(1 - max(cosine, 0) ** 2, 0.03)
        end = SimpleNamespace(cosine=cosine, rate=rate, unit=rest, p=None)
        if not self.s.shapes:
            length = closing * self.length * self.heat(self.length, self.gradient_square)
            end.u, end.kinetic = kick(self.u, w, length)
            return end
        # With another norm: a momentum p, whose kicks are exact to second order in their length.
        slope, lengths = 0.0, np.array([closing, closing + opening]) * self.length
        if self.u is not None and self.u @ w != 0:
            slope = -self.u @ w / rest
            exponents = np.minimum(slope * lengths, 30)
            lengths = lengths * np.where(lengths > 0, np.expm1(exponents) / exponents, 1)
        p = -w if self.u is None else self.p - lengths[1] / rest * w
        end.u = spectral_velocity(p, self.s.shapes)
        bend = max(-(w @ end.u) / rest - slope, 0) / lengths[1] if lengths[1] > 0 else 0.0
        end.kinetic, whole = rest * np.log1p(slope * lengths + bend * lengths**2 / 2)
        end.p, end.opening = p / (p @ end.u), whole - end.kinetic
        if self.u is not None and lengths[1] * size >= 1e-2 * rest and bend > 0:
            end.rate, end.unit = np.sqrt(bend), size / np.sqrt(bend)
        return end

    def judge(self):
        """Accept or reject, and take shorter steps after many numbers that are not finite."""
        self.known, is_outlier = self.is_finite and np.isfinite(self.gained), False
        if self.known and self.energies >= 10 and self.s.reject_quantile:
            is_outlier = self.above(abs(self.gained), self.quantile(self.s.reject_quantile))
        self.rejected += is_outlier
        self.nonfinite += not self.is_finite
        self.bad_run = 0 if self.is_finite else self.bad_run + 1
        self.good_run = self.good_run + 1 if self.is_finite else 0
        if self.bad_run > 4:
            self.backoff = max(self.backoff / 2, 1 / 16)
        elif self.good_run >= 100:
            self.backoff = 1.0
        return self.is_finite and not is_outlier

    def quantile(self, probability):
        """Wilson and Hilferty 1931, for a Gamma distribution; the largest for heavier tails."""
        z = NormalDist().inv_cdf(probability)
        ratio = self.energy_std / self.energy_mean if self.energy_mean > 0 else 0.0
        ratio = min(ratio, 1.5 * z) if z > 0 else ratio
        return self.energy_mean * max(1 - ratio**2 / 9 + z * ratio / 3, 0) ** 3

    def observe_energy(self):
        """Exponential averages of the energy errors, each with an upper bound."""
        if self.known:
            energy, self.energies = abs(self.gained), self.energies + 1
            if self.energies > 10:
                energy = min(energy, 3 * self.quantile(self.s.reject_quantile or 0.98))
            weight = 0.01 / (1 - 0.99**self.energies)
            self.energy_mean += weight * (energy - self.energy_mean)
            square = (energy - self.energy_mean) ** 2
            self.energy_std = np.sqrt((1 - weight) * self.energy_std**2 + weight * square)

    def observe(self, w, end, trust, is_long, most):
        """Average the turns, the descent and the change of the gradient.

        `most` is the energy that a drift along the gradient would lose. Returns the angle per
        length by which the change turns the momentum.
        """
        self.outlying += trust < 1
        if trust > 0:
            self.turns += 1
            self.turn_rate = average(self.turn_rate, trust * end.rate, self.turns)
            most, n = min(trust * most, 1e18), self.turns / 4
            self.fall = average(self.fall, most * end.cosine, self.turns)
            self.fall_square = average(self.fall_square, most**2 / self.d, self.turns)
            chance = min(n**2 * self.fall_square, self.d / 2) + n * self.fall_square / 1.75
            self.descent = n * self.fall / np.sqrt(chance) if chance > 0 else 0.0
        rate, before, whole = 0.0, self.last, w @ w / end.unit**2
        if self.opens:
            self.last = w, whole
        if self.ends and before is not None and trust > 0 and is_long:
            square, both = np.sum((w - before[0]) ** 2) / 2 / end.unit**2, whole + before[1]
            if square >= TINY:
                rate, self.changes = np.sqrt(square), self.changes + 1
                weight = min(1, 9 * self.change_square / square) if self.changes > 1 else 1.0
                self.change_square = average(self.change_square, weight * square, self.changes)
                whole = average(self.gradient_square, weight * both / 2, self.changes)
                relative = (weight * square / self.change_square) ** 2
                self.kurtosis = average(self.kurtosis, relative, self.changes)
                self.gradient_square = whole
        return rate

    def share(self):
        """Share of the change in the square of the gradient."""
        known = self.changes > 0 and self.gradient_square > 0
        return self.change_square / self.gradient_square if known else np.nan

    def tune_by_energy(self, floor):
        """Raise the factor of the step size after small energy errors, lower it after large."""
        energy, p = abs(self.gained), self.s.adapt_probability / 3
        raised = 1 + self.s.adapt_rate * self.above(self.quantile(p), energy)
        is_large = self.above(energy, self.quantile(1 - 2 * p))
        factor = self.factor * (1 - self.s.adapt_rate if is_large else raised)
        self.factor = max(factor, min(floor, self.factor))

    def tuned(self, rate, changed, base, resolution, explores, adapts):
        """Length of a step in which the change of the gradients turns the momentum by an angle."""
        change, turn = np.sqrt(self.change_square), self.turn_rate
        known = self.changes > 0 and not self.above(30 * resolution, self.usual)
        share = np.nan_to_num(self.share(), nan=1.0) if known else 1.0
        half, r = min(0.5 / max(share, 0.5) ** 2, 1), change if known else turn
        follows = self.s.angle is None and self.scale.has_matrix
        is_wide = follows and np.isfinite(self.scale.width)
        angle = self.wide_angle(share, half, r) if is_wide else self.s.angle or 0.06
        angle = 1.0 if follows and explores else angle
        wanted = half * angle / r if r > 0 else 1.0
        wanted = np.sqrt(self.usual * wanted) if known else wanted
        wanted, shortest = min(wanted, 1 / turn if turn > 0 else 1.0), max(resolution, self.s.eps)
        longest = max(shortest, 10 * self.factor * base) if self.turns else shortest
        self.usual = max(min(wanted, longest), resolution) if adapts else max(self.usual, shortest)
        # A large gradient or change shortens its own step.
        length, slack = self.usual, 3.0 if is_wide else 1.0
        if rate > 0:
            length = min(length, slack * min(3 * self.usual * turn, 1) / rate)
        if known and changed > 0:
            length = min(length, slack * 3 * self.usual * change / changed)
        return length

    def wide_angle(self, share, half, rate):
        """Angle at which the momentum lasts for twice the width of the posterior."""
        noisiness = min(2 * (1 - half), 1)
        noise = self.scale.width**2 * rate**2 / share - 1
        clean = min(noise, share / max(1 - share, self.s.eps))
        noise = max(noisiness * noise + (1 - noisiness) * clean, self.s.eps)
        widest = 0.35 * (1 - 2 / self.d) / max(self.kurtosis, 1) ** max(1 - share, 0)
        widest = noisiness * 0.25 + (1 - noisiness) * max(widest, 0.06)
        return min(max(self.scale.width * rate / (2 * noise * half), 0.06), widest)

    def diffuse(self, noise, end, trust):
        """Turn the direction by the noise that belongs to the step that ends."""
        eps, rule = self.length if self.ends else 0.0, self.s.decoherence_length
        turn = max(self.turn_rate, end.rate / 3 if trust > 0 else 0)
        if rule is None:
            return
        if self.u is None:
            self.u, square = np.zeros(self.d), 1.0
        elif rule == "matched":
            change = np.sqrt(self.change_square) if self.changes else turn
            square = min((1 + 40 / self.d) * change**2, 2 * turn**2)
            square *= (eps * min(self.s.temperature, 1)) ** 2
            square += 2 * eps * np.nan_to_num(max(1 - self.share(), 0)) / self.scale.width
        else:
            square = 2 * eps * (turn if rule == "turning" else 1 / rule)
        self.u = self.u + np.sqrt(np.expm1(min(square, 40)) / self.d) * noise
        self.u = self.u / norm(self.u)


class Scale:
    """Coordinates phi, theta = A phi, from windows that grow; and the width of the posterior."""

    def __init__(self, s, size):
        self.kind, self.first, self.has_matrix, self.d = s.scale, s.first_window, s.has_matrix, size
        self.A, self.mean, self.variance, self.weight = np.eye(size), np.zeros(size), 0.0, 1.0
        self.last, self.level, self.is_new = np.zeros(size), 1.0, s.scale == "differences"
        self.width = self.last_width = np.inf
        self.begin(self.first)

    def begin(self, window):
        self.window, self.phi, self.seen = window, np.zeros(self.d), []

    def diagonal(self, q, isotropic):
        """A = 1 / s of the scale s^2 = (1 - w) q / mean(q) + w, with a bound on both sides."""
        mean = np.mean(q)
        relative = isotropic + (1 - isotropic) * q / mean if mean >= TINY else np.ones(self.d)
        return np.diag(1 / np.sqrt(np.clip(relative, 1e-4, 1e4)))

    def observe(self, g, trust, counts, restart, moved):
        """Add the gradient of an accepted call; return whether A has changed."""
        if self.kind == "published" and counts:
            deviation = trust * (g - self.mean)
            self.mean = self.mean + 0.01 * deviation
            self.variance = 0.99 * self.variance + 0.01 * (0.99 * deviation) ** 2
            self.weight *= 0.99
            self.A = self.diagonal(self.variance, self.weight)
        if self.kind in (None, "published"):
            return self.kind is not None
        was_first, self.phi = self.window == self.first, self.phi + moved
        if restart:
            self.is_new, self.seen, self.window = self.kind == "differences", [], self.first
        if counts:
            change = (g - self.last) * 0.5**0.5 if self.kind == "differences" else g
            self.last, skip = trust * g + (1 - trust) * self.last, self.is_new
            self.seen += [] if skip else [(trust * change, self.phi, trust * g @ self.A)]
            self.is_new = False
        closes = len(self.seen) >= self.window
        if restart and not closes:
            self.A, self.width, self.last_width = np.eye(self.d), np.inf, np.inf
            # The first gradient of the new window counts, but not its force.
            self.seen = [(change, 0 * x, 0 * x) for change, x, _ in self.seen]
            self.phi = np.zeros(self.d)
        if closes:
            self.close()
        return closes or (restart and not was_first)

    def close(self):
        """Use what the window has measured."""
        x, places, forces = map(np.array, zip(*self.seen, strict=True))
        n, prior, d, q = len(x), 4 * self.d, self.d, np.mean(x**2, axis=0)
        if not self.has_matrix or self.window == self.first:
            self.A, self.level = self.diagonal(q, 10 / (10 + n)), max(np.mean(q), TINY)
        else:
            # A square root of the second moment (Potter 1963), with one entry raised at a time.
            level, after = self.level, self.A
            for i, deviation in enumerate(x, start=1):
                raised = deviation + np.sqrt(1e-3 * d * level) * (np.arange(d) == i % d)
                along = raised / np.sqrt(prior * level) @ after
                root = np.sqrt(1 + along @ along)
                after = after - np.outer(after @ along, along) / (root * (1 + root))
            self.level = (prior * level + n * np.mean((x @ self.A) ** 2)) / (prior + n)
            self.A = after * np.sqrt((prior + n) / prior * self.level / level)
        if self.has_matrix:
            x, f = places - places.mean(axis=0), forces - forces.mean(axis=0)
            rises = np.sum(x * f) > 0 and np.sum(x * x) > 0
            width = np.sqrt(d * np.sum(x * x) / np.sum(x * f)) if rises else np.inf
            known = np.isfinite(width) and np.isfinite(self.last_width)
            change = max(width / self.last_width, self.last_width / width) if known else 1.0
            self.width, self.last_width = width * change**3 if known else np.inf, width
        self.begin(self.window + self.window // 2)


def kick(u, g, length):
    """Turn the direction towards -g, and return also the energy gained; None stands for rest."""
    rest, size = len(g) - 1, norm(g)
    delta = length * size / rest
    if not delta > 0:
        return u, 0.0
    e = -g / size
    if u is None:
        return e, rest * (np.logaddexp(delta, -delta) - np.log(2))
    p = e @ u
    if delta > 300:
        return e, rest * (delta + np.log((1 + p) / 2))
    growth = np.cosh(delta) + p * np.sinh(delta)
    turned = (u + (np.sinh(delta) + p * (np.cosh(delta) - 1)) * e) / growth
    return turned / norm(turned), rest * np.log(growth)


def spectral_velocity(p, shapes):
    """Gradient of a sum of nuclear norms of matrices and Euclidean norms of all else."""
    parts, first = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        leaf, first = p[first : first + size], first + size
        if len(shape) < 2 or not np.all(np.isfinite(leaf)):
            parts.append(np.sqrt(size / len(p)) * leaf / (norm(leaf) or 1))
            continue
        left, s, right = svd(leaf.reshape(-1, shape[-1]) / (norm(leaf) or 1), full_matrices=False)
        for a, b, c in POLYNOMIALS:
            s = a * s + b * s**3 + c * s**5
        weight = np.sqrt(max(size // shape[-1], shape[-1]) / len(p))
        parts.append(weight * np.ravel((left * s) @ right))
    return np.concatenate(parts)


def average(mean, new, count):
    """Average over about the last quarter of `count` numbers."""
    weight = min(4 / count, 1)
    return (1 - weight) * mean + weight * new
