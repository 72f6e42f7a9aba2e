"""The fifteen corruptions of CIFAR-10-C, made on the fly.

Recipes and constants are those of the small images. Lengths in pixels stay what they are for 32
pixels, except where the recipe itself goes by the size of the image: zoom, pixelate, elastic.

Source: Hendrycks & Dietterich (2019), Benchmarking neural network robustness to common corruptions
and perturbations. Differences from the paper, whose code needs photographs, ImageMagick or OpenCV:

- frost: a texture of crystals that is computed stands in for six photographs;
- motion blur, snow: a line of whole-pixel steps, weighted by half a Gaussian, edges repeated;
- random numbers are NumPy's, drawn for many images at once.
"""

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from data.textures import crystals, plasma

# Images in one go, which bounds memory.
CHUNK = 1_000


def corrupt(images: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    """Corrupt images as CIFAR-10-C does.

    Args:
        images: uint8 `[image, row, column, channel]`, square, of 1 or 3 channels.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: of the random numbers, at least 0; they also depend on name and severity.

    Returns:
        New images of the same shape and type; fractions are cut off, as in the published data.

    Raises:
        ValueError: an argument is none of the above.

    Cost:
        Up to 2 s for 1,000 images of 32 x 32 x 3 on one core.
    """
    if name not in RECIPES:
        raise ValueError(f"`corrupt(name=...)` must be one of {CORRUPTIONS}, got {name!r}.")
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"`corrupt(severity=...)` must be from 1 to 5, got {severity!r}.")
    if seed < 0:
        raise ValueError(f"`corrupt(seed=...)` must be >= 0, got {seed}.")
    shape = images.shape
    if (
        images.dtype != np.uint8
        or len(shape) != 4
        or shape[1] != shape[2]
        or shape[3] not in (1, 3)
    ):
        raise ValueError(
            "`corrupt(images=...)` must be uint8 [image, row, column, channel], square, of 1 or 3"
            f" channels, got {images.dtype} {shape}."
        )
    recipe, settings = RECIPES[name]
    result = np.empty_like(images)
    for start in range(0, len(images), CHUNK):
        place = CORRUPTIONS.index(name), severity, start
        part = recipe(
            images[start : start + CHUNK].astype(np.float32) / 255,
            settings[severity - 1],
            np.random.default_rng((seed, *place)),
        )
        result[start : start + CHUNK] = _bytes(part)
    return result


def _bytes(images: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 to 255; what lies below one by rounding alone counts as it."""
    return (np.clip(images, 0, 1) * 255 + 1e-3).astype(np.uint8)


def _at(images: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Values at `[image, row, column]` places, which is what `images[which, rows, columns]` is."""
    count, size = images.shape[:2]
    first = (np.arange(count, dtype=np.int32) * size**2)[:, None, None]
    places = first + rows.astype(np.int32) * np.int32(size) + columns.astype(np.int32)
    return np.take(images.reshape(count * size**2, -1), places, axis=0)


# Noise.


def _gaussian_noise(images, deviation, generator):
    return images + deviation * generator.standard_normal(images.shape, np.float32)


def _shot_noise(images, photons, generator):
    return generator.poisson(images * photons).astype(np.float32) / photons


def _impulse_noise(images, share, generator):
    """Salt or pepper in a share of the entries, channel by channel."""
    chance = generator.random(images.shape, np.float32)
    return np.where(chance < share / 2, 0, np.where(chance < share, 1, images))


# Blur.


def _defocus_blur(images, settings, _):
    """A disk that is smoothed by a Gaussian of three pixels."""
    from scipy import ndimage

    radius, smoothing = settings
    reach = int(radius) + 1
    steps = np.arange(-reach, reach + 1)
    disk = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float32)
    side = np.exp(-0.5 / smoothing**2)
    taps = np.array([side, 1, side], np.float32) / (1 + 2 * side)
    disk = ndimage.correlate(disk, np.outer(taps, taps), mode="constant")
    disk /= np.sum(disk)
    size = images.shape[1]
    padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    result = np.zeros_like(images)
    for i, j in np.argwhere(disk > 0):
        result += disk[i, j] * padded[:, i : i + size, j : j + size]
    return result


def _smooth(images, deviation, mode="nearest", truncate=4.0):
    from scipy import ndimage

    sigmas = (0, deviation, deviation, 0)[: images.ndim]
    return np.asarray(ndimage.gaussian_filter(images, sigmas, mode=mode, truncate=truncate))


def _glass_blur(images, settings, generator):
    """Every inner pixel takes the value of itself or a neighbour above and to the left.

    The publication swaps the two; its program overwrites one by the other, which made the data.
    """
    deviation, reach, repeats = settings
    count, size = images.shape[:2]
    images = _bytes(_smooth(images, deviation)) / np.float32(255)
    inner = np.arange(reach + 1, size - reach + 1)
    inner = inner[inner < size]
    for _ in range(repeats):
        rows, columns = generator.integers(-reach, reach, size=(2, count, len(inner), len(inner)))
        images[:, inner[:, None], inner] = _at(images, inner[:, None] + rows, inner + columns)
    return _smooth(images, deviation)


def _motion_blur(images, settings, generator):
    radius, deviation = settings
    return _streak(images, radius, deviation, generator.uniform(-45, 45, len(images)))


def _streak(images, radius, deviation, degrees):
    """Mean over the pixels that lie behind, by half a Gaussian; one direction for each image."""
    count, size = images.shape[:2]
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * deviation**2)).astype(np.float32)
    weights /= np.sum(weights)
    angle = np.deg2rad(degrees)[:, None]
    across = np.ceil(steps * np.cos(angle) - 0.5).astype(int)
    down = np.ceil(steps * np.sin(angle) - 0.5).astype(int)
    pixels = np.arange(size)
    result = np.zeros_like(images)
    for i, weight in enumerate(weights):
        rows = np.clip(pixels + down[:, i, None], 0, size - 1)[:, :, None]
        columns = np.clip(pixels + across[:, i, None], 0, size - 1)[:, None, :]
        result += weight * _at(images, rows, columns)
    return result


@functools.cache
def _magnifier(size: int, factor: float) -> np.ndarray:
    """Matrix `[row, row]` that cuts out the middle and stretches it back, linearly."""
    from scipy import ndimage

    kept = int(np.ceil(size / factor))
    top = (size - kept) // 2
    stretched = np.asarray(ndimage.zoom(np.eye(kept), (factor, 1), order=1))
    trim = (len(stretched) - size) // 2
    matrix = np.zeros((size, size), np.float32)
    matrix[:, top : top + kept] = stretched[trim : trim + size]
    return matrix


def _magnify(images, factors):
    """Sum of magnifications."""
    planes = np.ascontiguousarray(np.moveaxis(images, -1, 1))
    result = np.zeros_like(planes)
    for factor in factors:
        matrix = _magnifier(images.shape[1], float(factor))
        result += matrix @ (planes @ matrix.T)
    return np.moveaxis(result, 1, -1)


def _zoom_blur(images, factors, _):
    """Mean of the image and of its magnifications, of which the first is the image again."""
    return (images + _magnify(images, factors)) / (len(factors) + 1)


# Weather.


def _snow(images, settings, generator):
    """Flakes, magnified and driven, over a whitened image; once more turned by half a circle."""
    mean, deviation, factor, threshold, radius, length, kept = settings
    flakes = generator.normal(mean, deviation, (*images.shape[:3], 1)).astype(np.float32)
    flakes = _magnify(flakes, [factor])
    flakes = _bytes(np.where(flakes < threshold, 0, flakes)) / np.float32(255)
    flakes = _streak(flakes, radius, length, generator.uniform(-135, -45, len(images)))
    white = np.maximum(images, _grey(images) * 1.5 + 0.5)
    return kept * images + (1 - kept) * white + flakes + flakes[:, ::-1, ::-1]


def _grey(images):
    if images.shape[-1] == 1:
        return images
    return (images @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]


def _frost(images, settings, generator):
    """A mixture of the image and a piece of `crystals`, which stand in for photographs of frost."""
    kept, added = settings
    count, size = images.shape[:2]
    texture = crystals()
    top, left = generator.integers(len(texture), size=(2, count))
    rows = (top[:, None] + np.arange(size)) % len(texture)
    columns = (left[:, None] + np.arange(size)) % len(texture)
    pieces = texture[rows[:, :, None], columns[:, None]]
    return kept * images + added * (pieces if images.shape[-1] == 3 else _grey(pieces))


def _fog(images, settings, generator):
    """Clouds on top, and all darkened so that the brightest value stays what it was."""
    amount, decay = settings
    brightest = np.max(images, axis=(1, 2, 3), keepdims=True)
    size = images.shape[1]
    clouds = plasma(generator, len(images), 1 << (size - 1).bit_length(), decay)
    clouds = clouds[:, :size, :size, None].astype(np.float32)
    return (images + amount * clouds) * brightest / (brightest + amount)


def _brightness(images, amount, _):
    """More of value, in hue, saturation and value: all channels grow by one factor."""
    value = np.max(images, axis=-1, keepdims=True)
    brighter = np.minimum(value + amount, 1)
    return np.where(value > 0, images * brighter / np.where(value > 0, value, 1), brighter)


# Digital.


def _contrast(images, factor, _):
    means = np.mean(images, axis=(1, 2), keepdims=True)
    return (images - means) * factor + means


def _elastic_transform(images, settings, generator):
    """An affine map of three points that move at random, then smooth random displacements."""
    count, size = images.shape[:2]
    strength, smoothness, jitter = (size * part for part in settings)
    middle, reach = size // 2, size // 3
    signs = np.array([[1, 1], [1, -1], [-1, -1]])
    points = np.broadcast_to(middle + reach * signs, (count, 3, 2)).astype(float)
    moved = points + generator.uniform(-jitter, jitter, points.shape)
    # To where a pixel of the result comes from: points = [moved, 1] @ back.
    back = np.linalg.solve(np.concatenate([moved, np.ones((count, 3, 1))], axis=2), points)
    rows, columns = np.mgrid[:size, :size].astype(float)
    grid = np.stack([rows, columns, np.ones_like(rows)], axis=-1).reshape(-1, 3)
    source = (grid @ back).reshape(count, size, size, 2)
    images = _interpolate(images, source[..., 0], source[..., 1], "mirror")
    if strength == 0:
        return images
    noise = generator.uniform(-1, 1, (2, count, size, size)).astype(np.float32)
    down, across = (strength * _smooth(x, smoothness, "reflect", 3.0) for x in noise)
    return _interpolate(images, rows + down, columns + across, "reflect")


def _interpolate(images, rows, columns, mode):
    """Bilinear values at `[image, row, column]` places; beyond the edge by SciPy's `mode`."""
    size = images.shape[1]
    # Where the pattern of the image and its reflection repeats; "mirror" has the edge only once.
    period, last = (2 * size - 2, 2 * size - 2) if mode == "mirror" else (2 * size, 2 * size - 1)

    def inside(index):
        index = index % np.int32(period)
        return np.where(index < size, index, np.int32(last) - index)

    top, left = np.floor(rows).astype(np.int32), np.floor(columns).astype(np.int32)
    down, across = ((x % 1).astype(np.float32)[..., None] for x in (rows, columns))
    above, below = (
        _at(images, inside(row), inside(left)) * (1 - across)
        + _at(images, inside(row), inside(left + 1)) * across
        for row in (top, top + 1)
    )
    return above * (1 - down) + below * down


def _by_pillow(change: Callable[[Any, Any], Any], images: np.ndarray, setting: Any) -> np.ndarray:
    """One image after the other, as Pillow's."""
    from PIL import Image

    levels = _bytes(images)
    opened = (Image.fromarray(x[..., 0] if x.shape[-1] == 1 else x) for x in levels)
    changed = [np.asarray(change(image, setting)) for image in opened]
    return np.stack(changed).reshape(images.shape).astype(np.float32) / 255


def _pixelate(images, factor, _):
    """Shrink and enlarge by boxes."""

    def change(image, factor):
        size = image.size[0]
        small = max(1, int(size * factor))
        box = image.resize((small, small), 4)
        return box.resize((size, size), 4)

    return _by_pillow(change, images, factor)


def _jpeg_compression(images, quality, _):
    def change(image, quality):
        from PIL import Image

        stored = io.BytesIO()
        image.save(stored, "JPEG", quality=quality)
        return Image.open(stored)

    return _by_pillow(change, images, quality)


# Each with its settings for severities 1 to 5, as published for 32 pixels.
RECIPES: dict[str, tuple[Callable[..., np.ndarray], tuple]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (_defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (
        _glass_blur,
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (
        _zoom_blur,
        tuple(np.arange(1, stop, 0.01) for stop in (1.06, 1.11, 1.16, 1.21, 1.26)),
    ),
    "snow": (
        _snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": (_frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (_fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (
        _elastic_transform,
        # Strength, smoothness and jitter of the points, as parts of the side.
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (_jpeg_compression, (80, 65, 58, 50, 40)),
}
CORRUPTIONS = tuple(RECIPES)
