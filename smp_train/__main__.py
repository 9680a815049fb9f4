"""``python -m smp_train`` is ``smp-train``."""

import sys

from smp_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
