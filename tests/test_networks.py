"""The benchmark of the paper's networks: its scores, and that a chain goes on."""

import dataclasses
import os
from typing import Any

from benchmarks.prediction import network_cells, network_chains, networks

import data
import numpy as np
import pytest
from experiment import Experiment
from scipy.special import log_softmax

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


# A temperature fitted to fifty images may lie at the end of its range.
@pytest.mark.filterwarnings("ignore:.*the likelihood is highest at the end of the range")
@pytest.mark.nightly
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
