"""Warnings that point at the user's line."""

import sys
import warnings

PASSED = {"optax_smile", "jax", "keras", "optax"}  # Frames of these packages are skipped.


def warn(message: str):
    """Warn at the line outside of this package that led here."""
    frame, level, level_of_user = sys._getframe(), 1, 1
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in PASSED:
            level_of_user = level + 1
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level_of_user)
