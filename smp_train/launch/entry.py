"""The program of each process on SageMaker, where a toolkit starts it, and on Kubernetes, where torchrun does."""

import os
import sys
from contextlib import suppress

from smp_train import cli
from smp_train.errors import ConfigError
from smp_train.launch.flags import complete


def main() -> int:
    """Train with the given flags; the run resumes from its checkpoints when the platform starts it again."""
    arguments = sys.argv[1:]
    with suppress(ConfigError):  # the training reports the error, once per node
        arguments, _ = complete(arguments, os.environ)
    return cli.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main())
