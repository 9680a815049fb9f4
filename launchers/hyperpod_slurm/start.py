"""Run a training script of this folder: ``start.py ASKED KIND SCRIPT [flags]``; ASKED is a signal that came already."""

import signal
import sys
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # until the batch job forwards it
sys.path[0] = str(Path(__file__).resolve().parents[2])

from smp_train.launch.script import main  # noqa: E402  # of this checkout, whatever is installed

sys.exit(main(sys.argv[2:], asked=sys.argv[1]))
