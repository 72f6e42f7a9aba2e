"""Corruptions of images: against slow formulas, what they leave alone, and how they grow."""

import itertools

import data
import numpy as np
import pytest
from data import corruptions

GREY = np.full((64, 32, 32, 3), 128, np.uint8)
SEVERITIES = range(1, 6)
RANDOM = {"gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow"}
RANDOM |= {"frost", "fog", "elastic_transform"}


@pytest.fixture(scope="module")
def photographs() -> np.ndarray:
    """Pieces of 32 x 32 pixels of the two photographs that scikit-learn ships."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    pieces = []
    for photograph in load_sample_images().images:
        small = np.asarray(Image.fromarray(photograph).resize((192, 128), Image.Resampling.BOX))
        corners = itertools.product(range(0, 128, 32), range(0, 192, 32))
        pieces += [small[i : i + 32, j : j + 32] for i, j in corners]
    return np.stack(pieces)


def distance(one, other) -> float:
    return float(np.sqrt(np.mean((one.astype(float) - other) ** 2)))


@pytest.mark.parametrize("name", data.CORRUPTIONS)
def test_severity_grows_and_seeds_repeat(photographs, name):
    """The published settings of some do not: glass smooths less as it moves more, and so on."""
    grown = [distance(data.corrupt(photographs, name, s), photographs) for s in SEVERITIES]
    if name == "elastic_transform":
        # What moves the whole image falls from 8 % of its side to 3 %, and is most of the distance.
        assert min(grown) > 5
    elif name in ("glass_blur", "frost", "motion_blur"):
        assert grown[4] > 1.1 * grown[0] > 1
    else:
        assert all(more > less for less, more in itertools.pairwise([1.0, *grown])), grown
    for images in (photographs[:6], photographs[:6, 2:30, 2:30, :1]):
        before = images.copy()
        for severity in (1, 3, 5):
            changed = data.corrupt(images, name, severity, seed=3)
            assert changed.shape == images.shape and changed.dtype == np.uint8
            assert (changed != images).any()
            assert (data.corrupt(images, name, severity, seed=3) == changed).all()
            other = data.corrupt(images, name, severity, seed=4)
            assert (other != changed).any() == (name in RANDOM)
        assert (images == before).all()


def test_noise_has_its_settings(monkeypatch):
    """Every chunk of images its own.

    196,608 numbers: standard errors are 0.16 % of a standard deviation, 0.0005 of a share.
    """
    monkeypatch.setattr(corruptions, "CHUNK", 30)
    assert len({image.tobytes() for image in data.corrupt(GREY, "gaussian_noise", 5)}) == 64
    numbers = (1, 0.04, 500, 0.01), (2, 0.06, 250, 0.02), (3, 0.08, 100, 0.03)
    numbers += (4, 0.09, 75, 0.05), (5, 0.10, 50, 0.07)
    for severity, deviation, photons, share in numbers:
        noise = data.corrupt(GREY, "gaussian_noise", severity) / 255
        # Cutting off takes half a level, and adds the variance of one.
        assert np.std(noise) == pytest.approx(np.hypot(deviation, 12**-0.5 / 255), rel=0.01)
        assert np.mean(noise) == pytest.approx((128 - 0.5) / 255, abs=0.001)
        # A Poisson number of photons: the variance is the mean over their number.
        variance = 128 / 255 / photons
        noise = data.corrupt(GREY, "shot_noise", severity) / 255
        assert np.std(noise) == pytest.approx(np.sqrt(variance + 255**-2 / 12), rel=0.02)
        noise = data.corrupt(GREY, "impulse_noise", severity)
        for level in (0, 255):
            assert np.mean(noise == level) == pytest.approx(share / 2, abs=0.002)
        assert np.mean(noise == 128) == pytest.approx(1 - share, abs=0.003)
