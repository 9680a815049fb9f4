"""What each process executes where the platform starts it: SageMaker's toolkit, or torchrun on Kubernetes."""

import os
import sys
from contextlib import suppress

from smp_train import cli
from smp_train.errors import ConfigError
from smp_train.launch.flags import complete


def main() -> int:
    """Train with the flags given, resuming from this run's own checkpoints as soon as there are any."""
    words = sys.argv[1:]
    with suppress(ConfigError):  # which the training says, once per node
        words, _ = complete(words, os.environ)
    return cli.main(["train", *words])


if __name__ == "__main__":
    sys.exit(main())
