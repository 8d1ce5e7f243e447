"""The package `horovod`, over Cohort: programs that say `import horovod.torch as hvd` run as they are.

It has `horovod.{torch,tensorflow,keras,spark,ray}`, `horovod.run`, the exceptions and small utilities of
`horovod.common`, and the command `horovodrun`. Other parts (MXNet, `horovod.data`) say when imported that they are not
here.
"""

from __future__ import annotations

from horovod import _names  # noqa: F401 -- finds the modules that have no file here

# The release whose API this is; "+cohort" is a local version, which compares as newer than the release itself.
__version__ = "0.28.1+cohort"


def __getattr__(name: str) -> object:
    # Imported late, because it needs the modules that start processes, which no rank needs.
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
