"""An HTML report of a run, made from its directory alone: `python -m optax_smile.report DIRECTORY`.

Example:
    The script that samples stores its predictions beside the draws::

        prediction = optax_smile.predict(..., targets=labels, per="draw")
        optax_smile.report.store("run", "test", prediction, targets=labels, images=images)

    Then `python -m optax_smile.report run` writes `run/report.html`.
"""

from optax_smile.report._page import write
from optax_smile.report._predictions import store

__all__ = ["store", "write"]
