"""Patterns for corruptions: clouds, and crystals of frost."""

import functools

import numpy as np

# Of the tile of frost, in pixels, the crystals on it, and the seed that places them.
SIDE, NUM_CRYSTALS, SEED = 256, 300, 0
# Width of the bright seams between crystals, and of the stripes on them, in pixels.
SEAM, STRIPE = 1.2, 3.0
# Ice is a little blue.
TINT = (0.88, 0.95, 1.0)


def plasma(generator: np.random.Generator, count: int, side: int, decay: float) -> np.ndarray:
    """Clouds `[image, row, column]` from 0 to 1, by midpoints that are displaced at random.

    Every round sets the middles of the squares and then of their edges to the mean of their four
    neighbours plus noise of a range that falls by `decay` squared. The pattern has no border.

    Args:
        generator: of the noise.
        count: number of images.
        side: of an image, a power of two.
        decay: the larger, the smoother.
    """
    clouds = np.zeros((count, side, side))
    # The range starts far above 1, so that the first corner, which is 0, does not stand out.
    step, reach = side, 100.0
    while step >= 2:
        half = step // 2
        noise = functools.partial(generator.uniform, -(reach**2), reach**2)
        corners = clouds[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        centers = (pairs + np.roll(pairs, -1, axis=2)) / 4 + noise(corners.shape)
        clouds[:, half::step, half::step] = centers
        beside = corners + np.roll(corners, -1, axis=2) + centers + np.roll(centers, 1, axis=1)
        clouds[:, ::step, half::step] = beside / 4 + noise(corners.shape)
        below = corners + np.roll(corners, -1, axis=1) + centers + np.roll(centers, 1, axis=2)
        clouds[:, half::step, ::step] = below / 4 + noise(corners.shape)
        step, reach = half, reach / decay
    clouds -= np.min(clouds, axis=(1, 2), keepdims=True)
    return clouds / np.max(clouds, axis=(1, 2), keepdims=True)


@functools.cache
def crystals() -> np.ndarray:
    """A tile of frost `[row, column, channel]` from 0 to 1, always the same, without a border.

    The nearest of random points decides to which crystal a pixel belongs. A crystal has its own
    brightness and stripes in its own direction; the seams between crystals are bright.
    """
    from scipy.spatial import KDTree

    generator = np.random.default_rng(SEED)
    points = generator.uniform(0, SIDE, (NUM_CRYSTALS, 2))
    pixels = np.moveaxis(np.indices((SIDE, SIDE), float), 0, -1)
    distances, nearest = KDTree(points, boxsize=SIDE).query(pixels, k=2)
    owner = np.asarray(nearest)[..., 0]
    level = generator.uniform(0.2, 0.6, NUM_CRYSTALS)[owner]
    angle = generator.uniform(0, np.pi, NUM_CRYSTALS)[owner]
    away = (pixels - points[owner] + SIDE / 2) % SIDE - SIDE / 2
    along = away[..., 0] * np.sin(angle) + away[..., 1] * np.cos(angle)
    stripes = 0.15 * np.cos(2 * np.pi * along / STRIPE)
    seams = 0.5 * np.exp(-(distances[..., 1] - distances[..., 0]) / SEAM)
    brightness = np.clip(level + stripes + seams, 0, 1)
    return (brightness[..., None] * np.asarray(TINT)).astype(np.float32)
