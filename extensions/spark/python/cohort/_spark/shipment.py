"""Sends Cohort to executors that lack it: the driver's package and command in one file, which Spark copies to each."""

from __future__ import annotations

import glob
import os
import pathlib
import secrets
import sys
import tempfile
import zipfile

from cohort._launch import command as _command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# By application, because an executor that joins it later needs the file, too.
_sent: dict[str, str] = {}


def sent(context: Any) -> str | None:
    """Returns the name, in SparkFiles, of the file sent to this application's executors; None if none was sent."""
    return _sent.get(context.applicationId)


def send(context: Any) -> str:
    """Sends the file, which executors fetch with their next task. Returns its name in SparkFiles."""
    import cohort

    package = pathlib.Path(cohort.__file__ or "").absolute().parent
    command = pathlib.Path(_command.find())
    name = f"cohort-{secrets.token_hex(6)}.zip"
    # Spark serves the file from here, and removes this folder with the application.
    path = pathlib.Path(tempfile.mkdtemp(prefix="cohort-", dir=context._temp_dir), name)
    # Laid out as by `pip install`, because the command finds its libraries by its own path.
    modules = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    # Uncompressed: sending the file is faster than compressing it.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as files:
        for folder in (package, package.parent / "cohort.libs"):
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    files.write(file.resolve(), f"{modules}/{folder.name}/{file.relative_to(folder)}")
        files.write(command.resolve(), "bin/cohort")
        names = command.resolve().parent.parent / "share" / "cohort" / "as-horovod"
        # (In a build folder the package is a link, which glob follows.)
        for found in sorted(glob.glob(f"{names}/**/*.py", recursive=True)):
            files.write(os.path.realpath(found), f"share/cohort/as-horovod/{os.path.relpath(found, names)}")
    context.addFile(str(path))
    _sent[context.applicationId] = name
    return name
