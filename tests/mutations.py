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
# By pytest's exit status, with and without a defect; all else is no verdict.
PASSED, FAILED = 0, 1
RESULTS: dict[Any, str] = {PASSED: "survived", FAILED: "caught"}

# "# file | tests", and for each defect "= what is broken | -k expression", then the lines of the
# old text and those of the new one.
# 25 of them were chosen without knowledge of the tests; 17 were caught at the first run.
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
- return moved if inverse_scale is None else
+ return moved if True else
# stages/step_size.py | test_tuner.py
= upper threshold too high | rises_after
- 1 - 2 * self.adapt_probability / 3
+ 1 - self.adapt_probability / 3
= angle tuner never settles | stays_after
- jnp.where(adapts, usual, jnp.maximum(state.usual_length, shortest))
+ jnp.maximum(usual, shortest)
= angle tuner takes the change at its word | angle_over_the_change
- jnp.sqrt(state.usual_length) * jnp.sqrt(over(angle, change))
+ over(angle, change)
= noise gets the angle of clean gradients | angle_over_the_change
- jnp.maximum(share, NOISE_PART) ** 2
+ jnp.maximum(share, NOISE_PART)
# stages/rejection.py | test_guardrail.py
= non-finite steps are kept | without_values
- return counted, is_outlier | ~is_finite
+ return counted, is_outlier
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
- return turn, jnp.where(known, jnp.sqrt(
+ return turn, jnp.where(~known, jnp.sqrt(
# samplers/_microcanonical.py | test_preconditioner.py
= change across a new scale | change_of_the_scale
- scale_stays = self.preconditioner.stays(state.dynamics.preconditioner, measured.weight)
+ scale_stays = True
# _tree.py | test_step_cost.py
= sketch without signs | sketch_estimates
- % 2 == 0, leaf, -leaf) for sign
+ % 2 == 0, leaf, leaf) for sign
= sketch of two signs counted twice | sketch_estimates
- / math.sqrt(NUM_SIGNS)
+ / 1
# stages/evidence.py | test_arrival.py
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
# state.py | test_after_sampler.py
= what follows the sampler is not looked at | test_refused
- chain[place + 1 :] if hasattr
+ chain[len(chain) :] if hasattr
= altered chains have draws | accepted_refuses
- if is_concrete(last.is_altered) and last.is_altered:
+ if False:
# chains/_directory.py | test_identity.py
= any settings are the same | another_run
- if mine != theirs.get(name) and
+ if False and
# chains/_chains.py | test_identity.py
= copies go through | copies
- copies = [chain for chain, like in enumerate(first) if like != chain]
+ copies = []
# samplers/_transformation.py | test_momentum.py
= noise key never advances | right_angle
- return jax.random.key_data(key), noise_key
+ return data, noise_key
# samplers/_microcanonical.py | test_log_prior.py
= psmile without its noise | another_prior
- Momentum(SCHEMES[arguments["integrator"]], length)
+ Momentum(SCHEMES[arguments["integrator"]], None)
# _packed.py | test_packed.py
= scalars are taken along the axis of the chains | few_arrays
- array[..., place]
+ array[place % len(array)]
# potential.py | test_contract.py
= a prior per leaf hinders Optax's maps over states | maps_over_states
- if not jax.tree.leaves(params):
+ if False:
# samplers/_transformation.py | test_log_prior.py
= temperature lost | gaussian_function
- for x in Potential._fields if x in arguments
+ for x in {*Potential._fields} - {"temperature"} if x in arguments
# samplers/_microcanonical.py | test_langevin.py
= steps of negative size are made | negative_size
- error.all_finite & (base >= 0), is_outlier
+ error.all_finite, is_outlier
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
# _tree.py | test_langevin.py
= one key for all leaves | noise_of_each_leaf
- keys = jax.random.split(key, len(leaves))
+ keys = [key] * len(leaves)
# _tree.py | test_momentum.py
= signs repeat along the rows | isotropic_noise_of or no_memory
- stride *= leaf.shape[axis]
+ stride *= 1
= stride of the third axis forgets the second | random_signs
- stride *= leaf.shape[axis]
+ stride = leaf.shape[axis]
# samplers/_transformation.py | test_sampling.py
= defaults of a sampler not recorded | settings_hold
- bound.apply_defaults()
+
# _settings.py | test_sampling.py
= what is injected stays unknown | injected
- if isinstance(x, jax.core.Tracer)}
+ if False}
# parallel.py | test_sampling.py
= one key for all chains | own_keys
- lambda key: jax.random.split(key, chains)
+ lambda key: jnp.broadcast_to(key, (chains,))
= key is ignored for a single chain | single_chain
- if key is None and chains == 1:
+ if chains == 1:
# parallel.py | devices/test_parallel.py
= examples not spread over the mesh | examples_are_spread
- after = (DATA,) if size > 1 and divides else ()
+ after = ()
# chains/run.py | test_sampling.py
= thin off by one | hand_written
- return num_warmup + (passed // thin + 1) * thin
+ return num_warmup + (passed // thin + 1) * thin - 1
# chains/run.py | test_run.py
= a checkpoint has the position before its batches | every_way
- self._position, self._stats = position, None
+ self._stats = None
= handed out draws are those that are kept | hands_out_copies
- return _on_host.local(self._chains.draw())
+ return self._kept.draws[-1] if self._num_kept else _on_host.local(self._chains.draw())
= a signal ends nothing | signal_in_a_step
- if signal is not None:
+ if False:
# chains/warmstart.py | test_warmstart.py
= one pass too few is skipped | training_in_pieces
- for _ in range(0 if isinstance(batches, Sequence) else epoch):
+ for _ in range(0 if isinstance(batches, Sequence) else epoch - 1):
# chains/_chains.py | test_sampling.py
= batches of each chain stacked along the chains | several_steps_in_one_go
- .stack(leaves, axis=axis)
+ .stack(leaves, axis=0)
# chains/_chains.py | test_sampling.py
= draws are proposals | hand_written
- draw = last_accepted(chain.state, chain.params)
+ draw = chain.params
= a loss draws the same numbers in every step | random_loss
-             aux=optax.tree.where(now.accepted, aux, chain.aux),
-             key=key,
+             aux=optax.tree.where(now.accepted, aux, chain.aux),
+             key=chain.key,
= a rejected step moves the auxiliary state | auxiliary_state_follows
- aux=optax.tree.where(now.accepted, aux, chain.aux)
+ aux=aux
= key of a stochastic loss never moves on | random_loss
-             key=key,
-             loss=jnp.where(now.accepted
+             key=chain.key,
+             loss=jnp.where(now.accepted
# chains/_directory.py | test_sampling.py
= chains and draws swapped | shapes
- np.stack(x, axis=1)
+ np.stack(x, axis=0)
# chains/_host.py | test_resume.py
= an ignored interrupt ends a run | ignored_interrupt
- handled = [x for x in numbers if signal.getsignal(x) is not signal.SIG_IGN]
+ handled = list(numbers)
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
# draws/snapshots.py | test_choose.py
= a draw is chosen twice | best_addition
- np.logaddexp(total, bounded[best]), False
+ np.logaddexp(total, bounded[best]), True
= draws are chosen by their own score | best_addition
- np.logaddexp(total, bounded).mean(axis=1)
+ bounded.mean(axis=1)
= chosen draws are of other chains | best_addition
- (density).swapaxes(0, 1).reshape(len(self), -1)
+ (density).reshape(len(self), -1)
# draws/snapshots.py | test_from_draws.py
= arrays of the loop are not copied | reuses
- rows.append(jax.tree.map(np.array, tree))
+ rows.append(jax.tree.map(np.asarray, tree))
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
# _tree.py | faults/test_directories.py
= names of leaves as they are | any_name
- str(entry).translate(str.maketrans(codes))
+ str(entry)
# chains/warmstart.py | test_warmstart.py
= the worst weights are kept | by_validation
- (value < member.best_loss)
+ (value > member.best_loss)
= auxiliary state stays that of the start | best_epoch
- aux=aux, key=key, loss=value
+ key=key, loss=value
= a loss draws the same numbers in every step | best_epoch
- aux=aux, key=key, loss=value
+ aux=aux, loss=value
= a member that has stopped early may get better again | stays_done
- better = (value < member.best_loss) & (member.stale < patience) | keeps_last
+ better = (value < member.best_loss) | keeps_last
# chains/select.py | test_select.py
= rounds take a third of a run whatever was asked | share_of_the_steps
- steps = largest_cost * self.end
+ steps = self.end / 3
= all draws of a round are judged | last_half
- BURN_IN = 0.5
+ BURN_IN = 0.0
= error of the score of a candidate, not of the difference | last_half
- difference = np.subtract(first, second)
+ difference = np.asarray(first)
= candidates are ranked by what they reached, not by the projection | last_half
- density + GAIN_KEPT * doublings * gain
+ density + 0 * gain
= a few inputs that gain much decide | twice_as_many
- gain = np.minimum(density - np.average(halves, 0, counts), LARGEST_GAIN)
+ gain = density - np.average(halves, 0, counts)
= the cheaper survives though it is clearly worse | among_equals
- min(filter(is_equal, ranked), key=preference)
+ min(ranked, key=preference)
= broken chains score like their start | last_half
- if np.any(run.stats["num_nonfinite"]
+ if not np.any(run.stats["num_gradients"]
= points of exploration score | exploration
- if is_due(step) and (is_draw.all() or (step == end and not scored)):
+ if is_due(step):
= the last round decides among two | share_of_the_steps
- left.append(max(left[-1] // 2, 3) if left[-1] > 3 else 1)
+ left.append(left[-1] // 2)
= a chosen one that overfits runs to its end | takes_the_place
- _contenders(running, finalists, scores):
+ _contenders(running, {}, scores):
= what the draws to come add counts for the others alone | runs_again
- before, best = finalists[name].density, _best(scores)
+ before, best = finalists[name].density, max((x.density for x in scores.values()), key=_mean)
= draws that are made again count twice | stopped_selection
- scored, counts = header["scored"], header["counts"]
+ scored, counts = 0, header["counts"]
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
# diagnostics/summarize.py | test_diagnostics.py
= score of a chain is that of its single draws | summary_holds
- by_chain = statistics.log_mean_exp(density, (1,))
+ by_chain = density.mean(axis=1)
= copies of chains count in the Monte Carlo error | copies_count_once
- statistics.mcse_lppd(density[own])
+ statistics.mcse_lppd(density)
# metrics.py | test_metrics.py
= ECE not weighted | ece
- np.sum(bins.count * gaps) / np.sum(bins.count)
+ np.mean(gaps)
= bins of equal width hold their lower edge | ece_by_hand
- np.ceil(confidence * num_bins).astype(int) - 1
+ np.floor(confidence * num_bins).astype(int)
# interop/estimators.py | test_estimators.py
= estimator: means without the target's | units
- "mean": found.mean * self.width_ + self.center_
+ "mean": found.mean * self.width_
= estimator: noise in units of another | units
- np.sqrt(found.total) * self.width_
+ np.sqrt(found.total)
= num_data counts the rows without the held-out ones | units_of_features
- "num_data": len(data[0])
+ "num_data": len(x)
# plots.py | test_plots.py
= axes of the reliability diagram swapped | reliability
- ax.plot(*places, color
+ ax.plot(*places[::-1], color
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
# _joined.py | test_joined.py
= joined leaves: noise by their own places | around_it
- return [layout.numbers(False), *(start
+ return [layout.numbers(True), *(start
= joined leaves: another order than that of the tree | give_back
- return Joined(jnp.concatenate(few), apart, layout)
+ return Joined(jnp.concatenate(few[::-1]), apart, layout)
# _xla.py | test_step_cost.py
= operands of a stack are stored | moves_and_keeps_little
- return jnp.select(is_at, columns, last)
+ return jnp.stack(arrays, axis=-1)
= XLA stores the gradient | moves_and_keeps
- tree, cpu=jax.lax.optimization_barrier, default
+ tree, cpu=lambda same: same, default
= XLA copies the scale | moves_and_keeps
- jnp.where(after(condition, *others), x, y)
+ jnp.where(condition, x, y)
= XLA computes joined arrays for each leaf | share_what
- if len(arrays) < 2:
+ if arrays:
# samplers/_microcanonical.py | test_step_cost.py
= XLA copies what the probe reads | moves_and_keeps
- reject = _xla.after(reject, probed.altered_share)
+ reject = reject
# chains/_checks.py | test_local.py
= local: rise without temperature | not_told_where
- Potential(number, max(precisions), temperature)
+ Potential(number, max(precisions), 1.0)
# local/precision.py | test_local.py
= local: excess on one side alone | no_minimum
- excess = (loss + losses(mirrored)) / 2 - start_loss
+ excess = loss - start_loss
# samplers/_microcanonical.py | test_contract.py
= schedule counts calls instead of steps | given_step_size
- _tree.count(state.num_steps, end.opens_step)
+ _tree.count(state.num_steps)
# state.py | test_after_sampler.py
= masked transformation after the sampler is not refused | refused
- chain[place : place + 1]
+ chain[place:]
# _check.py | faults/test_arguments.py
= finite and positive are judged in float64 though JAX has float32 | wrong_calls
- self.dtype or jax.dtypes.canonicalize_dtype(np.float64)
+ self.dtype or np.float64
# draws/snapshots.py | test_snapshots.py
= thinned keeps the cached trace of all draws | disk_and_memory
-         vars(thinned).pop("trace", None)
- 
# draws/_format.py | test_snapshots.py
= a draw with a gap between its files counts as whole | gap
- return len(chains) == num_chains
+ return max(chains) == num_chains - 1
# diagnostics/findings.py | test_diagnostics.py
= trend compares with the first tenth | figures_of_a_trace
- second = sizes[:, tenth : 2 * tenth] if
+ second = sizes[:, :tenth] if
"""


class Mutation(NamedTuple):
    """A defect: `new` in place of `old`, which stands once in the file."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    expression: str


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


def mutated(package: Path, mutation: Mutation) -> tuple[Path, str, str]:
    """Find the file, what it holds and what it would."""
    path = package / mutation.file
    whole = path.read_text() if path.exists() else ""
    if (times := whole.count(mutation.old)) != 1:
        raise LookupError(f"the old text occurs {times} times in {mutation.file}")
    return path, whole, whole.replace(mutation.old, mutation.new)


def check(chosen: list[Mutation]) -> list[str]:
    """Say what is out of date: texts, and tests that pytest does not collect."""
    files = {file for one in chosen if (file := ROOT / "tests" / one.tests).exists()}
    done = run(ROOT, "-m", "pytest", "--collect-only", "-q", *OPTIONS, *map(str, files))
    collected = [line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line]
    wrong = [f"pytest cannot collect: {done.stdout[-2000:]}"] if done.returncode else []
    for one in chosen:
        try:
            path, _, new = mutated(ROOT / PACKAGE, one)
            compile(new, path, "exec")
        except (LookupError, SyntaxError) as error:
            wrong.append(f"{one.name}: {error}")
        own = [test.lower() for test in collected if test.startswith(f"{one.tests}::")]
        selects: Any = Expression.compile(one.expression.lower()).evaluate
        if not any(selects(lambda word, test=test: word in test) for test in own):
            wrong.append(f"{one.name}: {one.tests} -k '{one.expression}' selects nothing")
    return wrong


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the package in a folder."""
    # Two mutations of one size within a second would share compiled files.
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LONGEST}
    return subprocess.run([sys.executable, *arguments], cwd=root, env=env, **options)


def copy_to(root: Path):
    """Copy the working tree, in which pytest then runs."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, root, ignore=ignored)
    found = run(root, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)").stdout.strip()
    if not Path(found).is_relative_to(root):
        raise SystemExit(f"{PACKAGE} would be imported from {found}")


def test(root: Path, file: str, expression: str) -> tuple[int | str, list[str]]:
    """Run tests: pytest's exit status, or that it has none, and which failed."""
    options = ["-x", "-q", "--hypothesis-seed=0", "-k", expression, *OPTIONS]
    try:
        done = run(root, "-m", "pytest", *options, f"tests/{file}")
    except subprocess.TimeoutExpired:
        return f"no end within {LONGEST} s", []
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed


def judge(root: Path, mutation: Mutation, sound: tuple[int | str, list[str]]) -> dict[str, Any]:
    """Try one mutation; `sound` is what its tests give without it."""
    begun, (_, file, _, _, tests, expression) = time.monotonic(), mutation
    record: dict[str, Any] = {"name": mutation.name, "tests": f"{tests} -k '{expression}'"}
    try:
        path, whole, new = mutated(root / PACKAGE, mutation)
    except LookupError as error:
        return record | {"result": "broken", "reason": str(error)}
    path.write_text(new)
    status, failed = test(root, tests, expression)
    path.write_text(whole)
    if sound[0] != PASSED or status not in RESULTS:
        record["reason"] = f"unmutated: {sound}, mutated: {status}"
    result = "broken" if "reason" in record else RESULTS[status]
    seconds = round(time.monotonic() - begun, 1)
    return record | {"file": file, "result": result, "by": failed, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description="Which defects do the fast tests catch?")
    parser.add_argument("--output", type=Path, help="JSON lines, appended")
    parser.add_argument("--only", nargs="+", default=[""], help="those whose name has such a text")
    parser.add_argument("--check", action="store_true", help="look for texts and tests alone")
    given = parser.parse_args()
    chosen = [one for one in parse(DEFECTS) if any(text in one.name for text in given.only)]
    begun, sound, missed = time.monotonic(), {}, []
    if given.check:
        wrong = check(chosen)
        print(f"{len(chosen)} mutations, {len(wrong)} out of date", *wrong, sep="\n")
        sys.exit(bool(wrong))
    with tempfile.TemporaryDirectory() as folder:
        copy_to(root := Path(folder) / "copy")
        for tests in dict.fromkeys(one.tests for one in chosen):
            wanted = dict.fromkeys(f"({one.expression})" for one in chosen if one.tests == tests)
            sound[tests] = test(root, tests, " or ".join(wanted))
            print("unmutated:", tests, *sound[tests], flush=True)
        for one in chosen:
            record = judge(root, one, sound[one.tests])
            print(json.dumps(record), flush=True)
            if given.output is not None:
                with given.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            missed += [one.name] * (record["result"] != "caught")
    caught = len(chosen) - len(missed)
    print(f"{caught} of {len(chosen)} caught in {time.monotonic() - begun:.0f} s")
    if missed:
        sys.exit("Not caught: " + "; ".join(missed))


if __name__ == "__main__":
    main()
