"""`python -m cohort`: the command `cohort` of this package.

`--prefix` prints the folder with include/, lib/ and share/ for C++ programs, `--cmake-dir` the folder of cohortConfig.cmake:
    cmake -B build -Dcohort_DIR=$(python -m cohort --cmake-dir)
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from cohort._launch import command as _command


def main(words: list[str]) -> None:
    """Replaces this process by the command, or prints a folder. Raises SystemExit if either is missing."""
    command = _command.find()
    if words != ["--cmake-dir"]:
        os.execv(command, [command, *words])
    asked = subprocess.run([command, "--prefix"], stdout=subprocess.PIPE, text=True)
    if asked.returncode:
        raise SystemExit(asked.returncode)  # the command has printed the reason
    prefix = pathlib.Path(asked.stdout.rstrip("\n"))
    print(next(prefix.glob("lib*/**/cmake/cohort/cohortConfig.cmake")).parent)


if __name__ == "__main__":
    main(sys.argv[1:])
