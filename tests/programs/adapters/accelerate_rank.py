"""What programs that ``accelerate launch`` starts have in common. Import it first: it finds the modules of the tests."""

import os
import sys
import warnings
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "adapters")]
warnings.filterwarnings("ignore")
rank = int(os.environ["RANK"])


def say(*words):
    """A line of this rank, in one piece."""
    os.write(1, (" ".join(map(str, ("RANK", rank, *words))) + "\n").encode())
