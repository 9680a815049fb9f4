"""SageMaker's entry script: its toolkit starts this on every process, hyperparameters as flags."""

import sys

from smp_train.launch.entry import main

if __name__ == "__main__":
    sys.exit(main())
