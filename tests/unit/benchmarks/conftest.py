"""Makes the scripts in benchmarks/ importable, as they are when one of them runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
