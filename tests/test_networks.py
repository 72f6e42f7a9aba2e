"""The benchmark of the paper's networks: its tables, its scores, and that a chain goes on."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import data  # noqa: E402
import network_cells  # noqa: E402
import networks  # noqa: E402
from experiment import Experiment  # noqa: E402

LABELS = np.array([0, 1, 2, 1])


def task(likelihood="categorical", labels=LABELS) -> Experiment:
    part = np.zeros(labels.shape, np.uint8), labels
    splits = data.Splits(part, part, part)
    no_one: object = None
    return Experiment(no_one, splits, likelihood, no_one)  # type: ignore[arg-type]


def chain(seed, shape=(4, 3)):
    generator = np.random.default_rng(seed)
    return {"test": log_softmax(generator.normal(size=shape), axis=-1)}


def test_the_average_is_that_of_probabilities():
    logs = [chain(seed)["test"] for seed in range(3)]
    expected = np.log(np.mean([np.exp(x) for x in logs], axis=0))
    np.testing.assert_allclose(networks.averaged(logs), expected)


def test_scores_of_an_average():
    chains = [chain(0), chain(1)]
    mean = np.mean([np.exp(x["test"]) for x in chains], axis=0)
    found = networks.scores(task(), chains)
    assert found["lppd"] == pytest.approx(np.log(mean[np.arange(4), LABELS]).mean())
    assert found["accuracy"] == np.mean(mean.argmax(axis=1) == LABELS)
    assert "ood_auroc" not in found and "perplexity" not in found


def test_foreign_inputs_that_are_less_sure_are_told_apart():
    sure, unsure = np.log([[0.98, 0.01, 0.01]] * 4), np.log([[0.4, 0.3, 0.3]] * 4)
    assert networks.scores(task(), [{"test": sure, "unseen": unsure}])["ood_auroc"] == 1


def test_scores_of_tokens():
    labels = np.array([[0, 1], [2, 2]])
    found = networks.scores(task("tokens", labels), [chain(0, (2, 2, 3))])
    logs = chain(0, (2, 2, 3))["test"].reshape(4, 3)[np.arange(4), labels.ravel()]
    assert found["perplexity"] == pytest.approx(np.exp(-logs.mean()))


@pytest.mark.parametrize("form", network_cells.FORMS)
@pytest.mark.parametrize("table", network_cells.TABLES)
def test_every_cell_of_every_table_can_be_built(table, form, tmp_path, monkeypatch):
    """The samplers are made as they will be; only the search for a precision is left out."""
    found = {"prior_mean": "start", "prior_precision": 10.0}
    monkeypatch.setattr(networks, "around", lambda *_: found)
    names = set()
    for cell, settings in network_cells.cells_of(table, form, [0, 1], {}):
        known = cell["method"] in (networks.ENSEMBLE, *networks.BASELINES)
        if not known:
            made = networks.make_sampler(cell, settings, tmp_path, num_data=100, key=0)
            assert callable(made.update)
        assert json.loads(json.dumps(cell)) == cell and cell["num_chains"] == settings.num_members
        names.add(networks.path_of(cell, 0, tmp_path).name)
    assert len(names) == len(list(network_cells.cells_of(table, form, [0, 1], {})))


def test_a_sweep_of_the_batch_shares_its_warm_start(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(networks, "load", lambda *_: None)
    monkeypatch.setattr(
        networks.experiment, "warm_start", lambda *_, directory, **__: seen.append(directory)
    )
    for cell, settings in network_cells.cells_of("lenet batch", "tiny", [0], {"num_epochs": 2}):
        networks.warm_member(cell, settings, 0, tmp_path)
    assert len(set(seen)) == 1 and "num_epochs_2" in seen[0].name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* it is finished")
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
