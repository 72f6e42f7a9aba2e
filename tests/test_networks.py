"""The benchmark of the paper's networks: its tables, its scores, and that a chain goes on."""

import dataclasses
import json
import os
import re
import warnings
from typing import Any

from benchmarks.prediction import network_cells, network_chains, networks

import data
import jax
import numpy as np
import optax
import pytest
from experiment import Experiment, Settings
from scipy.special import log_softmax

import optax_smile

LABELS = np.array([0, 1, 2, 1])


def task(likelihood="categorical", labels=LABELS) -> Experiment:
    part = np.zeros(labels.shape, np.uint8), labels
    no_one: Any = None
    return Experiment(no_one, data.Splits(part, part, part), likelihood, no_one)


def chain(seed, labels=LABELS, scale=1.0):
    logits = scale * np.random.default_rng(seed).normal(size=(*labels.shape, 3))
    return of(log_softmax(logits, axis=-1), labels)


def of(logs, labels=LABELS):
    density = np.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]
    with np.errstate(divide="ignore"):
        return {"test": np.log(np.exp(logs)), "density": density}


def test_scores_are_of_the_average_of_probabilities():
    chains = [chain(0), chain(1)]
    mean = np.mean([np.exp(x["test"]) for x in chains], axis=0)
    found = networks.scores(task(), chains)
    assert found["lppd"] == pytest.approx(np.log(mean[np.arange(4), LABELS]).mean())
    assert found["accuracy"] == np.mean(mean.argmax(axis=1) == LABELS)
    assert "ood_auroc" not in found and "perplexity" not in found
    # Foreign inputs that are less sure are told apart.
    sure, unsure = np.log([[0.98, 0.01, 0.01]] * 4), np.log([[0.4, 0.3, 0.3]] * 4)
    assert networks.scores(task(), [of(sure) | {"unseen": unsure}])["ood_auroc"] == 1
    # A target that underflows is not impossible.
    found = networks.scores(task(), [chain(0, scale=1_000.0)])
    assert found["lppd"] == pytest.approx(chain(0, scale=1_000.0)["density"].mean())
    assert np.isinf(chain(0, scale=1_000.0)["test"]).any()
    labels = np.array([[0, 1], [2, 2]])
    found = networks.scores(task("tokens", labels), [chain(0, labels)])
    logs = chain(0, labels)["test"].reshape(4, 3)[np.arange(4), labels.ravel()]
    assert found["perplexity"] == pytest.approx(np.exp(-logs.mean()))


def test_command_line(monkeypatch, capsys):
    """Scores of corrupted images are cells of their own; what no cell has is refused."""
    asked: list[dict] = []
    monkeypatch.setattr(networks.records, "complete", lambda _, cells, *__: asked.extend(cells))
    for given, rule in (
        (["--methods", "psmile"], None),
        (["--methods", "psmile", "--corrupted"], None),
        (["--settings", '{"num_epoch": 3}'], "--settings must be of .*num_epochs"),
        (["--members", "2"], "--members must be below the number of chains, 2, got 2"),
        (["--corrupted", "--methods", "laplace"], "--methods must be of"),
    ):
        monkeypatch.setattr("sys.argv", ["networks.py", *given])
        if rule is None:
            networks.main()
            continue
        with pytest.raises(SystemExit):
            networks.main()
        assert re.search(rule, capsys.readouterr().err)
    half = len(asked) // 2
    assert [cell | {"scores": "corrupted"} for cell in asked[:half]] == asked[half:] != []


@pytest.mark.parametrize("form", network_cells.FORMS)
@pytest.mark.parametrize("table", network_cells.TABLES)
def test_every_cell_of_every_table_can_be_built(table, form, tmp_path, monkeypatch):
    """The samplers are made as they will be; only the search for a precision is left out."""
    found = {"prior_mean": "start", "prior_precision": 10.0}
    monkeypatch.setattr(network_chains, "around", lambda *_: found)
    names = set()
    for cell, settings in network_cells.cells_of(table, form, [0, 1], {}):
        if cell["method"] not in (networks.ENSEMBLE, *network_chains.BASELINES):
            network_chains.make_sampler(cell, settings, tmp_path, num_data=100, key=0)
        assert json.loads(json.dumps(cell)) == cell and cell["num_chains"] == settings.num_members
        names.add(network_chains.path_of(cell, 0, tmp_path).name)
    assert len(names) == len(list(network_cells.cells_of(table, form, [0, 1], {})))


def test_a_sweep_of_the_batch_shares_its_warm_start(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(network_chains, "load", lambda *_: None)
    start = lambda *_, directory, **__: seen.append(directory)  # noqa: E731
    monkeypatch.setattr(network_chains.experiment, "warm_start", start)
    for cell, settings in network_cells.cells_of("lenet batch", "tiny", [0], {"num_epochs": 2}):
        network_chains.warm_member(cell, settings, 0, tmp_path)
    assert len(set(seen)) == 1 and "num_epochs_2" in seen[0].name


# A temperature fitted to fifty images may lie at the end of its range.
@pytest.mark.filterwarnings("ignore:.*the likelihood is highest at the end of the range")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the training in .* is finished")
def test_a_cell_runs_and_is_not_run_again(tmp_path, capsys):
    if "OPTAX_SMILE_DATA" not in os.environ:
        pytest.skip("needs the folder OPTAX_SMILE_DATA")
    changed = {"num_epochs": 1, "num_warmup": 4, "num_draws": 4, "thin": 2, "num_test": 50}
    changed |= {"num_train": 256, "width": 0.5}
    pairs = list(network_cells.cells_of("lenet", "tiny", [0], changed))
    for method in (networks.ENSEMBLE, "psmile", "checkpoints"):
        cell, settings = next(pair for pair in pairs if pair[0]["method"] == method)
        record = networks.run_cell(cell, settings, tmp_path)
        assert record["lppd"] > record["single"]["lppd"] and len(record["chains"]) == 2
        capsys.readouterr()
        assert networks.run_cell(cell, settings, tmp_path) == record
        assert capsys.readouterr().out == ""
    other = dataclasses.replace(settings, thin=3)
    with pytest.raises(SystemExit, match="of other settings: thin 2, not 3"):
        networks.run_cell(cell, other, tmp_path)


def cell_of(method, form="tiny", **options):
    cell = {"task": "lenet", "form": form, "method": method, "options": options}
    return cell | {"seed": 0, "num_chains": 2}


def test_all_methods_take_as_many_gradients():
    settings = network_cells.settings_of("lenet", "tiny", {})
    for method, form, expected in (
        ("psmile", "tiny", (300, 10, 60)),
        ("psmile published", "tiny", (150, 10, 30)),
        ("paper's smile", "tiny", (150, 10, 30)),
        ("psmile published", "paper", (300, 10, 60)),
        ("cyclical_sgld", "tiny", (0, 15, 60)),
    ):
        found = network_chains.counted(cell_of(method, form), settings)
        assert (found.num_warmup, found.num_draws, found.thin) == expected


@pytest.mark.parametrize("method", ["cyclical_sgld", "smile_naive"])
def test_schedules_span_the_whole_run(method, tmp_path):
    """Six steps: three cycles of two, and half a cosine."""
    options, expected = {
        "cyclical_sgld": ({"num_cycles": 3}, [1.0, 0.5, 1.0, 0.5, 1.0, 0.5]),
        "smile_naive": ({"schedule": "cosine"}, (1 + np.cos(np.pi * np.arange(6) / 6)) / 2),
    }[method]
    cell = cell_of(method, step_size=1.0, **options)
    settings = network_chains.counted(cell, Settings(num_warmup=2, num_draws=4, thin=1))
    sampler = network_chains.make_sampler(cell, settings, tmp_path, num_data=1.0, key=0)
    params, gradient = np.zeros(3, np.float32), np.ones(3, np.float32)
    update = jax.jit(lambda state: sampler.update(gradient, state, params, value=0.0)[1])
    state, sizes = sampler.init(params), []
    for _ in range(6):
        state = update(state)
        sizes.append(float(optax_smile.stats(state).step_size))
    np.testing.assert_allclose(sizes, expected, atol=1e-6)


@pytest.mark.parametrize("stage", ["warm", "chain"])
def test_what_a_signal_has_cut_short_is_not_kept(stage, tmp_path, monkeypatch):
    """Neither half-trained weights nor a part of the draws are taken for the whole."""
    name, message = {
        "warm": ("warmstart", "`warmstart` was stopped after 1"),
        "chain": ("sample", "`sample` ended early with 2"),
    }[stage]
    start = {"w": np.zeros((1, 3), np.float32)}

    def cut(*_, **__):
        warnings.warn(message, stacklevel=1)
        return start

    settings = Settings(num_epochs=2, batch_size=2, sampling_batch_size=2)
    # The training is never looked at.
    trained = task()._replace(optimizer=lambda num_steps: optax.sgd(0.1))
    monkeypatch.setattr(optax_smile, "warmstart", lambda *_, **__: start)
    monkeypatch.setattr(optax_smile, name, cut)
    monkeypatch.setattr(network_chains, "load", lambda *_: trained)
    with pytest.raises(UserWarning, match=message):
        network_chains.run_chain(cell_of("psmile"), settings, 0, tmp_path)
    assert not list(tmp_path.glob("*.npz"))
