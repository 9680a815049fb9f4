"""Holds a run half-way, for a test: its checkpoint of step 10 is committed once the file $RIG_HOLD is gone.

First on PYTHONPATH, so that every process of the run has it. Until then the run cannot save again, hence not go far.
"""

import os
import sys
import time
from typing import Any


def hold(event: str, arguments: tuple[Any, ...]) -> None:
    file = os.environ.get("RIG_HOLD", "")
    if event == "os.rename" and str(arguments[1]).endswith("-10steps/COMMITTED") and os.path.exists(file):
        with open(f"{file}-here", "w"):
            pass
        while os.path.exists(file):
            time.sleep(0.02)


sys.addaudithook(hold)
