"""What a part of Horovod says that is not here."""

from __future__ import annotations


def missing(part: str, instead: str) -> ImportError:
    """The error for `import PART`."""
    return ImportError(f"{part} is not in the package `horovod` of Cohort -- {instead}", name=part)


def not_yet(part: str) -> ImportError:
    """The error for a framework that Cohort does not speak yet."""
    return missing(
        part,
        "of Horovod's frameworks it has PyTorch's (horovod.torch) and TensorFlow's (horovod.tensorflow) so far; take it from PYTHONPATH (run without "
        "--as-horovod) or uninstall cohort-horovod to use Horovod's own",
    )
