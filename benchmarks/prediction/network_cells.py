"""What `networks.py` runs: the paper's tables as cells, in a tiny, a small and the paper's form."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lenet
import nanogpt
import resnet
import vit
from experiment import Settings

Methods = list[tuple[str, dict[str, Any]]]
SCRIPTS = {
    "perceptron": lenet,
    "lenet": lenet,
    "resnet7": resnet,
    "resnet18": resnet,
    "vit": vit,
    "nanogpt": nanogpt,
}
SMALL = {"sampling_batch_size": 64, "num_draws": 32, "thin": 250}
# What a form changes in the preset of the script that has its name.
TINY: dict[str, Any] = {"num_members": 2, "num_epochs": 12, "num_warmup": 300, "num_draws": 10}
TINY |= {"thin": 60, "num_train": 4_000, "num_test": 1_000, "sampling_batch_size": 64}
FORMS = {
    "small": {
        "perceptron": SMALL | {"num_members": 2, "batch_size": 256, "steps_per_dispatch": 50},
        "lenet": SMALL,
        "resnet7": {"width": 0.25, "num_epochs": 8, "num_test": 2_500},
        "resnet18": {"width": 0.125, "num_test": 2_500},
        "nanogpt": {"num_epochs": 4},
    },
    "tiny": {
        "perceptron": TINY,
        "lenet": TINY,
        "resnet7": TINY | {"width": 0.125},
        "resnet18": TINY | {"width": 0.0625, "num_warmup": 100, "thin": 20},
        "vit": TINY | {"width": 0.125, "depth": 2},
        "nanogpt": TINY | {"num_test": 200, "depth": 1, "width": 1 / 12},
    },
    "paper": {},
}
ENSEMBLE = "deep ensemble"


def at(method: str, steps: Iterable[float]) -> list[tuple[str, dict[str, Any]]]:
    """A method at several step sizes."""
    return [(method, {"step_size": step}) for step in steps]


def tuned(name: str, values: Iterable[Any]) -> list[tuple[str, dict[str, Any]]]:
    """The paper's SMILE at several values of a setting of its tuner."""
    return [("paper's smile", {"step_size": 0.015, name: value}) for value in values]


GRID = (1e-4, 1e-3, 1e-2)
OURS = [(ENSEMBLE, {}), ("psmile", {}), ("psmile", {"allowed": 0.03}), ("smile", {})]
OURS += [("psmile", {"temperature": "auto", "angle": 0.3})]
ANGLES = [("psmile", {"angle": angle}) for angle in (0.01, 0.1)]
# Continued training: the first is the rate of LeNet's own training.
CHECKPOINTS: Methods = [
    ("checkpoints", {}),
    *(("checkpoints", {"learning_rate": rate}) for rate in (5e-4, 2e-3, 4e-3, 8e-3)),
]
OTHERS: Methods = [*CHECKPOINTS, ("swag", {}), ("fge", {})]
# Matrices as matrices: by an optimizer, and by a sampler at several temperatures.
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
MATRICES: Methods = [("muon", {"learning_rate": rate}) for rate in RATES]
MATRICES += [("spectral", {"excess": excess}) for excess in (0.04, 0.08, 0.16, 0.32, 0.64)]
# At `cold_temperature`, and at twice this temperature, with the prior of `norm_precision`.
MATRICES += [("spectral", {"temperature": "auto", "prior_precision": x}) for x in ("norm", 1, 10)]
MATRICES += [("spectral", {"excess": 0.16, "prior_precision": "norm"})]
MATRICES += [("psmile", {"temperature": "auto", "angle": 0.3, "prior_precision": "norm"})]
PAPERS = tuple(f"{name} published" for name in ("smile_naive", "psmile_naive", "smile", "psmile"))
CYCLES = [
    ("cyclical_sgld", {"step_size": step, "num_cycles": 4}) for step in (1e-6, 5e-7, 1e-7, 5e-8)
]
# The starts, AdamW, Muon, and the main samplers.
MAIN: Methods = [(ENSEMBLE, {}), ("psmile", {}), *OURS[-1:], *CHECKPOINTS, *MATRICES]
GPT_STEPS = (2e-6, 2e-5, 2e-4, 2e-3)
# Task, methods with options, and values of settings that vary.
TABLES: dict[str, tuple[str, list[tuple[str, dict[str, Any]]], dict[str, Sequence[Any]]]] = {
    "lenet": (
        "lenet",
        [
            *OURS,
            *ANGLES,
            *OTHERS,
            *MATRICES,
            *(cell for method in (*PAPERS, "scale_adapted_sghmc") for cell in at(method, GRID)),
            *at("sgld", (1e-6, 1e-5)),
            *CYCLES[::2],
        ],
        {},
    ),
    "perceptron": ("perceptron", MAIN, {"width": (1.0, 0.109, 6.16)}),
    "lenet batch": (
        "lenet",
        [*OURS, *at("smile published", (1e-3,))],
        {"sampling_batch_size": (64, 32, 256, 512, 1_024)},
    ),
    "resnet7": (
        "resnet7",
        [
            *OURS,
            *CHECKPOINTS,
            *MATRICES,
            *at("psmile published", GRID),
            *at("smile_naive", GRID),
            *CYCLES[1:],
        ],
        {},
    ),
    "resnet7 batch": (
        "resnet7",
        [
            (method, {"step_size": 1e-3, **schedule})
            for method in ("smile_naive", "psmile_naive")
            for schedule in ({}, {"schedule": "cosine"})
        ]
        + [(name, {"step_size": 1e-3}) for name in (*PAPERS[2:], "scale_adapted_sghmc")],
        {"sampling_batch_size": (64, 256, 512)},
    ),
    "resnet18": (
        "resnet18",
        [
            *OURS,
            *OTHERS,
            CYCLES[0],
            ("scale_adapted_sghmc", {"step_size": 1e-3, "friction": 0.05}),
            *(cell for method in PAPERS for cell in at(method, (0.015,))),
        ],
        {},
    ),
    "kappa": ("resnet18", tuned("reject_quantile", (0.9, 0.95, 0.98, 0.99, None)), {}),
    "a": ("resnet18", tuned("adapt_probability", (0.0, 0.05, 0.1, 0.2, 0.4)), {}),
    "vit": (
        "vit",
        [
            *OURS,
            *CHECKPOINTS,
            *at("psmile published", (0.2, 0.15, 0.1, 0.05)),
            *at("scale_adapted_sghmc", (5e-5, 1e-4, 1.5e-4, 5e-4, 1e-3)),
            *CYCLES,
        ],
        {},
    ),
    "nanogpt": (
        "nanogpt",
        [
            *OURS,
            *ANGLES,
            *CHECKPOINTS,
            *MATRICES,
            ("psmile", {"temperature": "hot", "angle": 0.6, "decoherence_length": None}),
            *(
                cell
                for method in ("scale_adapted_sghmc", "smile published", "psmile published")
                for cell in at(method, GPT_STEPS)
            ),
        ],
        {},
    ),
}


def settings_of(task: str, form: str, changed: Mapping[str, Any]) -> Settings:
    """Settings of a form: the script's preset, and what differs from it."""
    preset = SCRIPTS[task].PRESETS["paper" if form == "paper" else "laptop"]
    return dataclasses.replace(preset, **FORMS[form].get(task, {}) | changed)


def cells_of(
    table: str, form: str, seeds: Sequence[int], changed: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Settings]]:
    """Cells of a table, each with its settings."""
    task, methods, swept = TABLES[table]
    swept = {name: values for name, values in swept.items() if name not in changed}
    variants = [{name: x} for name, values in swept.items() for x in values] or [{}]
    for seed, variant in itertools.product(seeds, variants):
        differs = {**changed, **variant}
        settings = settings_of(task, form, differs)
        label = " ".join([form, *(f"{name}={x}" for name, x in differs.items())])
        for method, options in methods:
            cell = {"task": task, "form": label, "method": method, "options": options}
            yield cell | {"seed": seed, "num_chains": settings.num_members}, settings
