"""What the fast tests can tell: defects put into a copy of the package, one at a time.

    python tests/mutations.py --output mutations.jsonl [--only TEXT ...] [--check]

A mutation is caught if the tests named with it fail, and counts only if they pass without it.
A line of the output: name, file, tests, result (`caught`, `survived`, or `broken` with a reason),
the tests that failed, seconds. The exit status is 0 if all are caught. `--check` only lists old
texts and tests that are gone. With JAX_COMPILATION_CACHE_DIR a run takes half the time.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "optax_smile"
# Seconds after which a test counts as hanging.
LONGEST = 300
OPTIONS = ("-p", "no:cacheprovider")
NOT_COPIED = ".*", "__pycache__", "out", "build", "dist", "*.egg-info"
# By pytest's exit status, with and without a defect; all else is no verdict.
PASSED, FAILED = 0, 1
RESULTS: dict[Any, str] = {PASSED: "survived", FAILED: "caught"}

# "# file | tests", and for each defect "= what is broken | -k expression", then the lines of the
# old text and those of the new one.
# The last ones were chosen without knowledge of the tests: 24 of 25 were caught at the first run.
DEFECTS = r"""
# potential.py | test_potential.py
= no temperature in the gradient | gradient
- return _count(potential) / potential.temperature
+ return _count(potential)
= prior mean left out | gradient
- precision * (x - mean)).astype
+ precision * x).astype
= prior change without its half | prior_change
- (x - mean + dx / 2)
+ (x - mean + dx)
# _reuse.py | test_reuse.py
= programs of one shape are one program | changed
- key = hashlib.sha256(code.encode()).digest(), known
+ key = b"", known
= code that calls Python is shared | not_shared
- BY_ADDRESS = ("callback",
+ BY_ADDRESS = ("no callback",
# diagnostics/summarize.py | test_diagnostics.py
= confidence minus accuracy | confidence
- np.isclose(target, confidence, rtol=1e-5) / ties - confidence
+ confidence - np.isclose(target, confidence, rtol=1e-5) / ties
# stages/scale.py | test_preconditioner.py
= scale moves within a window | window
- closes | weight.restart, measured
+ weight.counts | weight.restart, measured
= variance about zero | formula
- return jax.tree.map(jnp.subtract, gradient, state.gradient_mean)
+ return gradient
= isotropic part added without taking it from the measured one | scale_is_that_of_the_formula
- (1 - isotropic_weight) / jnp.where(noisy, mean, 1)
+ 1 / jnp.where(noisy, mean, 1)
# stages/spectral.py | test_spectral.py
= a kick that does not lengthen its own time | textbook
- jnp.expm1(exponent) / jnp.where(is_zero, 1, exponent)
+ jnp.ones_like(exponent)
= matrices of all shapes weigh alike | velocity_is
- math.sqrt(max(shape) / size)
+ math.sqrt(1 / len(leaves))
= a rejected call changes the momentum | rejected
- optax.tree.where(reject, state.conjugate, heading.momentum)
+ heading.momentum
= the norm of a gradient is Euclidean | pure_noise
- jnp.where(is_evident, jnp.sqrt(bend), 0)
+ jnp.zeros_like(bend)
# stages/integrator.py | test_momentum.py
= kick uphill | kick_is_that
- cosine = -sums.direction_dot_whitened
+ cosine = sums.direction_dot_whitened
= noise of twice the length | right_angle
- exponent = 2 * length / rule
+ exponent = length / rule
= step size changes in the middle of a step | keeps_its_length
- step_length = jnp.where(begins, step_length, state.step_length)
+ 
= missing half in the kinetic energy of a long kick | ten_million
- jnp.log((1 - cosine) / 2) - delta
+ jnp.log(1 - cosine) - delta
# stages/integrator.py | test_preconditioner.py
= drift without the scale | sampler_whitens
- return _tree.scaled(moved, inverse_scale)
+ return moved
# stages/step_size.py | test_tuner.py
= upper threshold too high | rises_after
- 1 - 2 * self.adapt_probability / 3
+ 1 - self.adapt_probability / 3
= angle tuner never settles | stays_after
- jnp.where(adapts, usual, jnp.maximum(state.usual_length, shortest))
+ jnp.maximum(usual, shortest)
= angle tuner takes the change at its word | angle_over_the_change
- jnp.sqrt(state.usual_length) * jnp.sqrt(length)
+ length
= narrow posteriors take the rate of old changes | twice_the_width
- self._angle(evidence, rate, share, noisiness)
+ self._angle(evidence, change, share, noisiness)
= clean gradients count as noise | follow_the_width
- clean + noisiness * (noise - clean)
+ noise
= noise gets the angle of clean gradients | angle_over_the_change
- jnp.maximum(share, NOISE_PART) ** 2
+ jnp.maximum(share, NOISE_PART)
# stages/rejection.py | test_guardrail.py
= non-finite steps are kept | without_values
- reject = is_outlier | ~is_finite
+ reject = is_outlier
= run of good calls is not reset by a bad one | after_non_finite_calls
- finite_run = jnp.where(is_finite, optax.safe_increment(state.finite_run), 0)
+ finite_run = jnp.where(is_finite, optax.safe_increment(state.finite_run), state.finite_run)
# stages/evidence.py | test_guardrail.py
= a loss of energy is no outlier | point_survives
- (jnp.abs(error.change) > threshold)
+ (error.change > threshold)
= rejected gradients enter the scale | point_survives
- counts=end.opens_step & (trust > 0) & accepted,
+ counts=end.opens_step & (trust > 0),
# stages/evidence.py | test_tuner.py
= averages not debiased | bias_corrected
- / (1 - ENERGY_DECAY**power)
+
= rejected steps enter the turns | enter_the_turns
- evident = accepted & (trust > 0)
+ evident = trust > 0
= change across a rejected step | step_ends_that_are_kept
- is_comparable=jnp.where(end.opens_step, True, self.is_comparable) & accepted,
+ is_comparable=jnp.where(end.opens_step, True, self.is_comparable),
= change from the middle of a step | step_ends_that_are_kept
- enters = self.is_comparable & end.is_end & accepted
+ enters = self.is_comparable & accepted
= uphill gradients are discounted like downhill ones | says_of_the_turns
- 1 - jnp.maximum(cosine, 0) ** 2, SMALLEST_SHARE
+ 1 - cosine**2, SMALLEST_SHARE
# stages/evidence.py | test_momentum.py
= matched noise by whole gradients | right_angle and matched
- change = jnp.where(known, jnp.sqrt(
+ change = jnp.where(~known, jnp.sqrt(
# samplers/_microcanonical.py | test_preconditioner.py
= change across a new scale | change_of_the_scale
- scale_stays = self.preconditioner.stays(state.dynamics.preconditioner, measured.weight)
+ scale_stays = True
# stages/evidence.py | test_tuner.py
= a loss that falls is not told | loss_still_falls
- is_falling=jnp.where(judges, fall > chance,
+ is_falling=jnp.where(judges, fall > 1e9 * chance,
# stages/evidence.py | faults/test_counters.py
= averages that stand still in the end | counters
- SHARE, LONGEST_AVERAGE = 0.25, 2**22
+ SHARE, LONGEST_AVERAGE = 0.25, 2**40
# stages/probe.py | test_probe.py
= what arrives elsewhere is not counted | on_its_way
- num_altered=_tree.count(state.num_altered, altered),
+ num_altered=_tree.count(state.num_altered, altered & reject),
= what is altered now and then is no matter | one_percent
- WINDOW, MOST_ALTERED, LEAST_ALTERED = 512, 0.01, 3
+ WINDOW, MOST_ALTERED, LEAST_ALTERED = 512, 0.05, 3
= a rejected step looks altered | silent
- num_read=jnp.where(reject, 0, num_read)
+ num_read=jnp.where(reject, num_read, num_read)
# chains/_directory.py | test_identity.py
= any settings are the same | another_run
- if mine != theirs.get(name) and
+ if False and
# samplers/_transformation.py | test_momentum.py
= noise key never advances | right_angle
- return jax.random.key_data(key), noise_key
+ return data, noise_key
# samplers/_microcanonical.py | test_momentum.py
= psmile without its noise | right_angle
- return Momentum(scheme, length)
+ return Momentum(scheme, None)
# potential.py | test_contract.py
= a prior per leaf hinders Optax's maps over states | maps_over_states
- if not jax.tree.leaves(params):
+ if False:
# samplers/_transformation.py | test_langevin.py
= temperature lost | test_sgld
- for x in Potential._fields if x in arguments
+ for x in {*Potential._fields} - {"temperature"} if x in arguments
# samplers/_microcanonical.py | test_langevin.py
= steps of negative size are made | negative_size
- is_finite = error.all_finite & (base >= 0)
+ is_finite = error.all_finite
# samplers/sgld.py | test_langevin.py
= half the noise | test_sgld
- amplitude = jnp.sqrt(2 * call.step_size)
+ amplitude = jnp.sqrt(call.step_size)
# samplers/sghmc.py | test_langevin.py
= gradient noise not subtracted | test_sghmc
- 2 * friction - eps**2 * gradient_noise
+ 2 * friction
# samplers/cyclical_sgld.py | test_langevin.py
= sampling and search swapped | right_step
- (in_cycle >= exploration * cycle_length)
+ (in_cycle < exploration * cycle_length)
= cycle length rounded down instead of up | cyclical_sgld
- cycle_length = -(-total_steps // num_cycles)
+ cycle_length = total_steps // num_cycles
# samplers/_langevin.py | test_langevin.py
= rejected gradients enter the memory | taken_back
- memory=optax.tree.where(reject, before.memory, memory)
+ memory=memory
= rejected steps advance the schedule count | nonfinite_inputs
- num_steps=_tree.count(state.num_steps, ~reject)
+ num_steps=_tree.count(state.num_steps)
# samplers/_transformation.py | test_sampling.py
= defaults of a sampler not recorded | settings_hold
- bound.apply_defaults()
+
# chains/_directory.py | test_sampling.py
= chains and draws swapped | hand_written
- np.stack(x, axis=1)
+ np.stack(x, axis=0)
# chains/_directory.py | test_resume.py
= keys are not restored | pieces and aux
- structure(like), list(made)), place
+ structure(like), list(made))._replace(key=like.key), place
= a checkpoint of another format is read | other_states
- if header["formats"] != FORMATS:
+ if False:
= the newest checkpoint is kept alone | one_before_serves
- KEPT = 2
+ KEPT = 1
= checkpoint does not wait for the draws before it | checkpoint_waits
-         self.files.flush()
-         if wide :=
+         if wide :=
# draws/_format.py | test_resume.py
= an older format is read | another_format
- if version != FORMAT:
+ if version > FORMAT:
# _disk.py | faults/test_directories.py
= statistics are read unchecked | harmless
- if checksum(text) != metadata.get("checksum"):
+ if False:
= arrays are read unchecked | harmless
- if _sum_of(arrays) != header["arrays"]:
+ if False:
= checkpoints of other numbers are read | harmless
- if header.get("file", file.name) != file.name:
+ if False:
# draws/predict.py | test_predict.py
= densities joined without their largest | extreme or categorical
- x * jnp.exp(of_x - base) + y * jnp.exp(of_y - base)
+ x + y
= total variance without that of the means | test_gaussian
- variance = self.variance + self.spread / self.count
+ variance = self.variance + 0 * self.spread
= draws of the chains mixed up | categorical_equals
- x.reshape(*axes, *x.shape[1:]).swapaxes(0, 1)
+ x.reshape(*axes[::-1], *x.shape[1:])
= total variance takes the unbiased spread of the means | gaussian
- variance = self.variance + self.spread / self.count
+ variance = self.variance + self.spread / jnp.maximum(self.count - 1, 1)
# draws/predict.py | devices/test_predict_on_meshes.py
= chains on a mesh averaged together | on_a_mesh
- group = first // self._rows % self._num_groups
+ group = first // self._rows % self._num_groups // 2
# potential.py | test_potential.py
= local: bound without the prior | bound_is_exact
- (_weight(potential) + prior))
+ (_weight(potential)))
= temperature missing in the prior's part of the expected excess loss | bound_is_exact
- prior = potential.prior_precision / potential.temperature * num_parameters / curvature
+ prior = potential.prior_precision * num_parameters / curvature
# samplers/_transformation.py | test_local.py
= local: around zero, not the start | each_chain_has
- posterior._replace(prior_mean=state.prior_mean)
+ posterior._replace(prior_mean=0.0)
# stages/integrator.py | test_momentum.py
= local: forgets over half a radius | forgets_over
- exponent = 2 * length * turns
+ exponent = 4 * length * turns
# samplers/_microcanonical.py | test_step_cost.py
= XLA copies what the probe reads | moves_and_keeps
- reject = _xla.after(reject, probed.altered_share)
+ reject = reject
# samplers/_microcanonical.py | test_contract.py
= schedule counts calls instead of steps | given_step_size
- _tree.count(state.num_steps, end.opens_step)
+ _tree.count(state.num_steps)
# draws/_format.py | test_snapshots.py
= a draw with a gap between its files counts as whole | missing_files
- return len(chains) == num_chains
+ return max(chains) == num_chains - 1
# stages/evidence.py | test_tuner.py
= turn rate discounts an uphill gradient instead of a downhill one | what_a_gradient_says_of
- share = jnp.maximum(1 - jnp.maximum(cosine, 0) ** 2, SMALLEST_SHARE)
+ share = jnp.maximum(1 - jnp.maximum(-cosine, 0) ** 2, SMALLEST_SHARE)
# stages/evidence.py | test_momentum.py
= prior's change over the first of two drifts forgotten | trajectory_and_energies_are_those
- prior_change=jnp.where(opens, 0, self.prior_change + sums.prior_change),
+ prior_change=jnp.where(opens, 0, self.prior_change),
# stages/evidence.py | test_tuner.py
= last loss is that of rejected calls | a_chain_whose_loss_still_falls_is_on_its_way
- last_loss=jnp.where(accepted, value, self.last_loss).astype(dtype),
+ last_loss=jnp.where(accepted, self.last_loss, value).astype(dtype),
# stages/integrator.py | test_guardrail.py
= the momentum is not dropped after a rejected step | nothing_else_of_a_rejected_point_survives
- moving=heading.moving & ~reject,
+ moving=heading.moving,
# stages/integrator.py | test_momentum.py
= noise also in the middle of a step of two drifts | explicit_noise_turns_the_direction
- length = jnp.where(end.is_end, end.step_length, 0)
+ length = end.step_length
# stages/probe.py | test_probe.py
= either condition makes parameters altered | what_is_changed_on_its
- is_altered = (share * number > LEAST_ALTERED - 0.5) & (share > MOST_ALTERED)
+ is_altered = (share * number > LEAST_ALTERED - 0.5) | (share > MOST_ALTERED)
# stages/scale.py | test_preconditioner.py
= the scale is not one while the averages restart | a_chain_on_its_way_begins_again
- isotropic_weight = jnp.where(weight.restart, 1, ISOTROPIC / (ISOTROPIC + number))
+ isotropic_weight = ISOTROPIC / (ISOTROPIC + number)
# stages/matrix.py | test_matrix.py
= the matrix is one percent off | second_moment
- entries=matrix,
+ entries=matrix * 1.01,
= the width of a chain that still explores is not extrapolated | before_it_is_explored
- width * change**EXTRAPOLATION
+ width / change
= a restart keeps the matrix | before_it_is_explored
- closes | weight.restart
+ closes
# stages/step_size.py | test_tuner.py
= the two shares of quantile_tuner are exchanged | step_size_rises_after_small
- low, high = self.adapt_probability / 3, 1 - 2 * self.adapt_probability / 3
+ low, high = 2 * self.adapt_probability / 3, 1 - self.adapt_probability / 3
# samplers/_langevin.py | test_langevin.py
= a rejected step leaves the old displacement in the state | a_step_of_negative_size
- displacement=optax.tree.where(reject, still, displacement),
+ displacement=optax.tree.where(reject, before.displacement, displacement),
= is_draw is that of the step that begins, not of the one that ends | scale_adapted_sghmc
- is_draw = self.is_draw(state.num_steps - 1)
+ is_draw = self.is_draw(state.num_steps)
# samplers/_microcanonical.py | test_preconditioner.py
= drift with the scale from before its call | sampler_whitens_the_gradient_of
- inverse_scale = scale.inverse_of(scaling)
-         displacement
+ inverse_scale = scale.inverse_of(state.dynamics.preconditioner)
+         displacement
# samplers/sghmc.py | test_langevin.py
= the velocity is not rescaled when the step size changes | sghmc
- kept = (1 - friction) * call.step_ratio * displacement
+ kept = (1 - friction) * displacement
# samplers/scale_adapted_sghmc.py | test_langevin.py
= the mass keeps adapting after adapt_steps | scale_adapted_sghmc
- rate = jnp.where(adapts, 1 / (tau + 1), 0)
+ rate = 1 / (tau + 1)
# samplers/_transformation.py | faults/test_arguments.py
= init accepts parameters that are not finite | messages
- _check.Tree(finite=True)(where, "params", floating)
+ _check.Tree()(where, "params", floating)
# potential.py | test_potential.py
= the temperature does not apply to the Gaussian prior | gradient_and_prior_change
- return jax.tree.map(lambda x: x / potential.temperature, precision), mean
+ return precision, mean
= a point outside of the support of log_prior keeps its gradient | where_there_is_no_density
- number, is_outside = _count(potential), jnp.isneginf(density)
+ number, is_outside = _count(potential), jnp.isnan(density)
# draws/predict.py | test_predict.py
= the spread of the means lacks the number of snapshots so far | gaussian
- return x + y + (to - at) ** 2 * share(x) * self.count.astype(x.dtype)
+ return x + y + (to - at) ** 2 * share(x)
= predictions sorted as if draws came chain by chain | categorical_equals_the_average_over
- each = jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]).swapaxes(0, 1), each)
+ each = jax.tree.map(lambda x: x.reshape(*axes[::-1], *x.shape[1:]), each)
= padding has the log density 0 instead of NaN | padding_is_nan_in_every
- return whole._replace(log_density=np.where(self._has_target, whole.log_density, np.nan))
+ return whole._replace(log_density=np.where(self._has_target, whole.log_density, 0.0))
# chains/_directory.py | test_resume.py
= a checkpoint does not wait for the draws before it | signals_end_a_run_in
-         self.files.flush()
-         if wide := sorted(self.files.wide - self.warned):
+         if wide := sorted(self.files.wide - self.warned):
= a resumed run forgets at which steps its draws are | a_run_in_pieces_gives
- self.manifest["settings"] = before["settings"] | self.manifest["settings"]
+ before["settings"] = before["settings"] | self.manifest["settings"]
# draws/_format.py | test_resume.py
= the error of a draw that could not be written is dropped | a_full_disk_names_the
-         while self.waiting and (self.waiting[0].done() or len(self.waiting) > QUEUE_SIZE):
-             self.waiting.popleft().result()
+         while self.waiting and (self.waiting[0].done() or len(self.waiting) > QUEUE_SIZE):
+             self.waiting.popleft()
# chains/_centers.py | test_centers.py
= the gradient of all data left out | gradients_are
- excess = jax.tree.map(jnp.subtract, gradient, center.gradient)
+ excess = gradient
= parts of the data weigh alike | gradients_are
- share = (_checks.size(batch, False) or 0) / number
+ share = 0.5
= stored gradients of another batch | effective_draws
- lambda x: x[place], self.stored
+ lambda x: x[0], self.stored
= noise of random losses forgotten | does_not_pay
- left += passes * square(here[0], gradient(params, 0, 2))
+ left += 0.0
# chains/_checks.py | test_centers.py
= rows of a pass not compared with num_data | refused
- if rows != number:
+ if rows > 3 * number:
# chains/_host.py | test_centers.py
= places of batches forget that passes are rotated | stored_gradients
- (self.taken - 1 + self.is_rotated)
+ (self.taken - 1)
# chains/_renewal.py | test_centers.py
= data of the centres not compared with the batches | refused
- > MOST_EXCESS:
+ > np.inf:
= centres are never renewed | effective_draws
- chains.move_centers()
+ plan.is_on or chains.move_centers()
# draws/_format.py | test_snapshots.py
= a leaf too small for the stored precision is rounded | a_leaf_too_large_or
- return largest == 0 or float(kind.tiny) <= largest <= float(kind.max)
+ return largest <= float(kind.max)
"""


class Mutation(NamedTuple):
    """A defect: `new` in place of `old`, which stands once in the file."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    expression: str

    def put_into(self, package: Path) -> tuple[Path, str, str]:
        path = package / self.file
        whole = path.read_text() if path.exists() else ""
        if (times := whole.count(self.old)) != 1:
            raise LookupError(f"the old text occurs {times} times in {self.file}")
        return path, whole, whole.replace(self.old, self.new)


def parse(text: str) -> list[Mutation]:
    found = []
    for section in text.split("\n# ")[1:]:
        place, *defects = section.strip("\n").split("\n= ")
        file, tests = place.split(" | ")
        for head, *lines in map(str.splitlines, defects):
            what, expression = head.split(" | ")
            old, new = ("\n".join(x[2:] for x in lines if x[0] == sign) for sign in "-+")
            name = f"{Path(file).stem.lstrip('_')}: {what}"
            found.append(Mutation(name, file, old, new, tests, expression))
    return found


def check(chosen: list[Mutation]) -> list[str]:
    """Say what is out of date: texts, and tests that pytest does not collect."""
    files = {file for one in chosen if (file := ROOT / "tests" / one.tests).exists()}
    done = run(ROOT, "-m", "pytest", "--collect-only", "-q", *OPTIONS, *map(str, files))
    collected = [line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line]
    wrong = [f"pytest cannot collect: {done.stdout[-2000:]}"] if done.returncode else []
    for one in chosen:
        try:
            compile(one.put_into(ROOT / PACKAGE)[-1], one.file, "exec")
        except (LookupError, SyntaxError) as error:
            wrong.append(f"{one.name}: {error}")
        own = [test.lower() for test in collected if test.startswith(f"{one.tests}::")]
        selects: Any = Expression.compile(one.expression.lower()).evaluate
        if not any(selects(lambda word, test=test: word in test) for test in own):
            wrong.append(f"{one.name}: {one.tests} -k '{one.expression}' selects nothing")
    return wrong


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Two mutations of one size within a second would share compiled files.
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LONGEST}
    return subprocess.run([sys.executable, *arguments], cwd=root, env=env, **options)


def test(root: Path, file: str, expression: str) -> tuple[int | str, list[str]]:
    """Run tests: pytest's exit status, or that it has none, and which failed."""
    options = ["-x", "-q", "--hypothesis-seed=0", "-k", expression, *OPTIONS]
    try:
        done = run(root, "-m", "pytest", *options, f"tests/{file}")
    except subprocess.TimeoutExpired:
        return f"no end within {LONGEST} s", []
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed


def judge(root: Path, one: Mutation, sound: tuple[int | str, list[str]]) -> dict[str, Any]:
    """Try one mutation; `sound` is what its tests give without it."""
    begun, record = time.monotonic(), {"name": one.name, "file": one.file, "result": "broken"}
    record["tests"] = f"{one.tests} -k '{one.expression}'"
    try:
        path, whole, new = one.put_into(root / PACKAGE)
    except LookupError as error:
        return record | {"reason": str(error)}
    path.write_text(new)
    status, failed = test(root, one.tests, one.expression)
    path.write_text(whole)
    if sound[0] != PASSED or status not in RESULTS:
        return record | {"reason": f"unmutated: {sound}, mutated: {status}"}
    seconds = round(time.monotonic() - begun, 1)
    return record | {"result": RESULTS[status], "by": failed, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description="Which defects do the fast tests catch?")
    parser.add_argument("--output", type=Path, default=Path(os.devnull), help="JSON lines")
    parser.add_argument("--only", nargs="+", default=[""], help="those whose name has such a text")
    parser.add_argument("--check", action="store_true", help="look for texts and tests alone")
    given = parser.parse_args()
    chosen = [one for one in parse(DEFECTS) if any(text in one.name for text in given.only)]
    begun, sound, missed = time.monotonic(), {}, []
    if given.check:
        wrong = check(chosen)
        print(f"{len(chosen)} mutations, {len(wrong)} out of date", *wrong, sep="\n")
        sys.exit(bool(wrong))
    with tempfile.TemporaryDirectory() as folder, given.output.open("a") as file:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        found = run(root, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)").stdout.strip()
        assert Path(found).is_relative_to(root), f"{PACKAGE} would be imported from {found}"
        for tests in dict.fromkeys(one.tests for one in chosen):
            wanted = dict.fromkeys(f"({one.expression})" for one in chosen if one.tests == tests)
            sound[tests] = test(root, tests, " or ".join(wanted))
            print("unmutated:", tests, *sound[tests], flush=True)
        for one in chosen:
            record = judge(root, one, sound[one.tests])
            print(json.dumps(record), flush=True)
            print(json.dumps(record), file=file, flush=True)
            missed += [one.name] * (record["result"] != "caught")
    caught = len(chosen) - len(missed)
    print(f"{caught} of {len(chosen)} caught in {time.monotonic() - begun:.0f} s")
    if missed:
        sys.exit("Not caught: " + "; ".join(missed))


if __name__ == "__main__":
    main()
