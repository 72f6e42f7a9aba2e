"""Corruptions of images: against slow formulas, what they leave alone, and how they grow."""

import colorsys
import itertools
import re

import data
import numpy as np
import pytest
from data import corruptions, textures
from scipy import ndimage

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


def test_blurs_and_digital_ones_leave_an_even_image_alone():
    blurs = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform")
    for name, severity in itertools.product(blurs, SEVERITIES):
        changed = data.corrupt(GREY[:4], name, severity)
        assert np.ptp(changed) == 0 and abs(int(changed[0, 0, 0, 0]) - 128) <= 1
    for name in ("contrast", "pixelate", "jpeg_compression"):
        assert (data.corrupt(GREY[:4], name, 5) == 128).all()


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


def test_brightness_is_value_of_hsv_and_contrast_is_about_the_mean(photographs):
    bright = np.concatenate([photographs[:2], 0 * photographs[:1]])
    pixels = [colorsys.rgb_to_hsv(*pixel) for pixel in bright.reshape(-1, 3)[::37] / 255]
    images = photographs[:3] / 255
    means = images.mean(axis=(1, 2), keepdims=True)
    settings = (1, 0.05, 0.75), (2, 0.1, 0.5), (3, 0.15, 0.4), (4, 0.2, 0.3), (5, 0.3, 0.15)
    for severity, more, less in settings:
        changed = data.corrupt(bright, "brightness", severity).reshape(-1, 3)[::37]
        expected = [colorsys.hsv_to_rgb(h, s, min(1, value + more)) for h, s, value in pixels]
        assert np.abs(np.array(expected) * 255 - changed).max() < 1.001
        expected = np.clip((images - means) * less + means, 0, 1) * 255
        assert np.abs(data.corrupt(photographs[:3], "contrast", severity) - expected).max() < 1.001


def test_zoom_and_defocus_against_scipy(photographs):
    """Each magnification on its own, by resampling the image instead of by matrices."""
    image = photographs[0, 2:30, 2:30] / 255
    total, factors = image.copy(), np.arange(1, 1.16, 0.01)
    for factor in factors:
        kept = int(np.ceil(28 / factor))
        inner = slice((28 - kept) // 2, (28 - kept) // 2 + kept)
        large = np.asarray(ndimage.zoom(image[inner, inner], (factor, factor, 1), order=1))
        trim = (large.shape[0] - 28) // 2
        total += large[trim : trim + 28, trim : trim + 28]
    changed = data.corrupt(photographs[:1, 2:30, 2:30], "zoom_blur", 3)[0]
    assert np.abs(changed - total / (len(factors) + 1) * 255).max() < 1.01
    # Severity 4: a disk of radius 1, a cross of five pixels that 0.2 hardly smooths.
    cross = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]]) / 5
    expected = ndimage.correlate(photographs[0] / 255, cross[..., None], mode="mirror") * 255
    changed = data.corrupt(photographs[:1], "defocus_blur", 4)[0]
    assert np.abs(changed - expected).max() < 1.01


@pytest.mark.parametrize("mode", ["mirror", "reflect"])
def test_interpolation_against_scipy(mode):
    generator = np.random.default_rng(0)
    images = generator.random((2, 9, 9, 1), np.float32)
    rows, columns = generator.uniform(-8, 16, (2, 2, 9, 9))
    found = corruptions._interpolate(images, rows, columns, mode)
    for i in range(2):
        place = [rows[i], columns[i]]
        expected = ndimage.map_coordinates(images[i, ..., 0], place, order=1, mode=mode)
        np.testing.assert_allclose(found[i, ..., 0], expected, atol=1e-5)


def test_motion_draws_a_point_out_into_a_line():
    point = np.zeros((20, 33, 33, 1), np.float32)
    point[:, 16, 16] = 1
    degrees = np.repeat([0.0, 90.0, 45.0, -45.0], 5)
    line = corruptions._streak(point, 6, 2, degrees)
    np.testing.assert_allclose(line.sum((1, 2, 3)), 1, rtol=1e-5)
    steps = {0: (0, -1), 5: (-1, 0), 15: (1, -1)}
    for image, (down, across) in steps.items():
        found = {(i - 16, j - 16) for i, j in np.argwhere(line[image, ..., 0] > 1e-6)}
        assert found <= {(down * k, across * k) for k in range(13)} and len(found) >= 7
    # Half a Gaussian: the weight at one deviation is exp(-1/2) of that at none.
    ratio = line[0, 16, 14, 0] / line[0, 16, 16, 0]
    assert ratio == pytest.approx(np.exp(-0.5), rel=1e-5)


def test_glass_takes_neighbours():
    """Without smoothing every value comes from the pixel itself, or up or left of it."""
    image = (np.arange(1024) % 251).astype(np.uint8).reshape(1, 32, 32, 1)
    changed, moved = data.corrupt(image, "glass_blur", 1)[0, ..., 0], 0
    for i, j in np.ndindex(32, 32):
        steps = [(i - a, j - b) for a, b in np.argwhere(image[0, ..., 0] == changed[i, j])]
        assert any(step in ((0, 0), (0, 1), (1, 0), (1, 1)) for step in steps)
        moved += (0, 0) not in steps
    # Three quarters of the inner 30 x 30: 675 +- 13.
    assert 600 < moved < 750


def test_weather(photographs):
    assert data.corrupt(photographs, "snow", 5).mean() > photographs.mean() + 20
    brightest = photographs.max(axis=(1, 2, 3))
    assert (data.corrupt(photographs, "fog", 5).max(axis=(1, 2, 3)) <= brightest).all()
    make = lambda decay: textures.plasma(np.random.default_rng(0), 50, 32, decay)  # noqa: E731
    clouds = make(2.0)
    assert clouds.min() == 0 and clouds.max() == 1 and len(np.unique(clouds)) > 50_000
    # A larger decay is smoother.
    rough = [np.abs(np.diff(make(decay), axis=1)).mean() for decay in (1.0, 1.75, 3.0)]
    assert rough[0] > 1.5 * rough[1] > 1.8 * rough[2]
    frost = textures.crystals()
    assert frost.shape == (256, 256, 3) and 0 <= frost.min() and frost.max() <= 1
    assert 0.3 < frost.mean() < 0.7 and frost.std() > 0.1


def test_wrong_arguments():
    for images, name, severity, rule in (
        (GREY, "speckle", 1, "`corrupt(name=...)` must be one of"),
        (GREY, "fog", 6, "`corrupt(severity=...)` must be from 1 to 5, got 6"),
        (GREY / 1, "fog", 1, "channels, got float64"),
        (GREY[:, :, 1:], "fog", 1, "32, 31, 3"),
    ):
        with pytest.raises(ValueError, match=re.escape(rule)):
            data.corrupt(images, name, severity)
