"""The settings of a training run: flags, aliases, parsing and validation. Imports no torch.

`parse` reads a command line, SageMaker's environment and a configuration file; `validate` refuses settings that cannot
work before anything starts; `ineffective` lists settings of the user without effect.
"""

from smp_train.arguments.document import help_text, print_config
from smp_train.arguments.groups import Arguments
from smp_train.arguments.parse import Resolved, parse
from smp_train.arguments.validation import ineffective, refuse_natively, validate

__all__ = ["Arguments", "Resolved", "help_text", "ineffective", "parse", "print_config", "refuse_natively", "validate"]
