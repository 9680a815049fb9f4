"""The program of each process where the platform starts it: SageMaker's toolkit, or torchrun on Kubernetes."""

import os
import sys

from smp_train import cli
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch.flags import complete


def main() -> int:
    """Train with the given flags, resuming from this run's own checkpoints as soon as there are any."""
    words = sys.argv[1:]
    try:
        words, _ = complete(words, os.environ, in_s3=True)
    except ConfigError:
        pass  # training reports it, once per node
    except SmpTrainError as problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"smp-train: error: {problem}", file=sys.stderr)
        return problem.exit_code
    return cli.main(["train", *words])


if __name__ == "__main__":
    sys.exit(main())
