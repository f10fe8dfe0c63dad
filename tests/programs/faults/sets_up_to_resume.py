"""Sets up FOLDER to resume from it: prints the error and its errno."""

import sys

from safe_ckpt import set_up_directory
from safe_ckpt.errors import SafeCheckpointError

try:
    set_up_directory(sys.argv[1], mode="resume", timeout_s=5)
except SafeCheckpointError as error:
    print(type(error).__name__, error.errno)
