"""Corruptions of images: their growth with severity, what they preserve, and their noise levels."""

import itertools

import data
import numpy as np
import pytest
from data import corruptions

# Corruptions that draw random numbers, and those whose distance need not grow with severity: glass
# smooths less as it moves more; an elastic one moves the whole image by 8 % to 3 % of its side.
RANDOM = {"gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow"}
RANDOM |= {"frost", "fog", "elastic_transform"}
UNEVEN = {"glass_blur", "frost", "motion_blur", "elastic_transform"}


@pytest.fixture(scope="module")
def photographs() -> np.ndarray:
    """Pieces of 32 x 32 pixels of the two photographs that scikit-learn ships."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    images = [Image.fromarray(x) for x in load_sample_images().images]
    small = [np.asarray(x.resize((192, 128), Image.Resampling.BOX)) for x in images]
    corners = itertools.product(range(0, 128, 32), range(0, 192, 32))
    return np.stack([x[i : i + 32, j : j + 32] for i, j in corners for x in small])


@pytest.mark.parametrize("name", data.CORRUPTIONS)
def test_severity_grows_and_seeds_repeat(photographs, name):
    changed = [data.corrupt(photographs, name, severity).astype(float) for severity in range(1, 6)]
    grown = [np.sqrt(np.mean((x - photographs) ** 2)) for x in changed]
    if name == "elastic_transform":
        assert min(grown) > 5
    elif name in UNEVEN:
        assert grown[4] > 1.1 * grown[0] > 1
    else:
        assert all(more > less for less, more in itertools.pairwise([1.0, *grown])), grown
    for images in (photographs[:6], photographs[:6, 2:30, 2:30, :1]):
        before = images.copy()
        one, same, other = (data.corrupt(images, name, 3, seed=seed) for seed in (3, 3, 4))
        assert one.shape == images.shape and one.dtype == np.uint8 and (one != images).any()
        assert (same == one).all() and (other != one).any() == (name in RANDOM)
        assert (images == before).all()


def test_noise_has_its_settings(monkeypatch):
    """Each chunk of images has its own noise. 196,608 numbers: standard errors are 0.16 % of a
    standard deviation, 0.0005 of a share.
    """
    monkeypatch.setattr(corruptions, "CHUNK", 30)
    grey = np.full((64, 32, 32, 3), 128, np.uint8)
    assert len({image.tobytes() for image in data.corrupt(grey, "gaussian_noise", 5)}) == 64
    numbers = (1, 0.04, 500, 0.01), (3, 0.08, 100, 0.03), (5, 0.10, 50, 0.07)
    for severity, deviation, photons, share in numbers:
        noise = data.corrupt(grey, "gaussian_noise", severity) / 255
        # Cutting off takes half a level, and adds the variance of one.
        assert np.std(noise) == pytest.approx(np.hypot(deviation, 12**-0.5 / 255), rel=0.01)
        assert np.mean(noise) == pytest.approx((128 - 0.5) / 255, abs=0.001)
        # A Poisson number of photons: the variance is the mean over their number.
        noise = data.corrupt(grey, "shot_noise", severity) / 255
        expected = np.sqrt(128 / 255 / photons + 255**-2 / 12)
        assert np.std(noise) == pytest.approx(expected, rel=0.02)
        noise = data.corrupt(grey, "impulse_noise", severity)
        for level, part in ((0, share / 2), (255, share / 2), (128, 1 - share)):
            assert np.mean(noise == level) == pytest.approx(part, abs=2e-3)
