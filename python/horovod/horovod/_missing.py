"""What a part of Horovod says that is not here."""

from __future__ import annotations


def missing(part: str, instead: str) -> ImportError:
    """The error for `import PART`."""
    return ImportError(f"{part} is not in the package `horovod` of Cohort -- {instead}", name=part)
