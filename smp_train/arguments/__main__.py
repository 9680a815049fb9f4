"""``python -m smp_train.arguments`` prints the reference table of all flags, ``docs/flags.md``."""

from smp_train.arguments.document import markdown

if __name__ == "__main__":
    print(markdown(), end="")
