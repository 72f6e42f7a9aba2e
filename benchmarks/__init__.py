"""Scripts that measure the library; they also use the networks and data sets of `examples/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
