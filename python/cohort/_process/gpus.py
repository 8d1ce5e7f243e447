"""Finds the NVIDIA GPUs that a program on this host may use. Does so without CUDA, because a CUDA context in the driver
process would take memory."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS_FOR_SMI = 20.0


def of_host() -> int:
    """Returns the number of GPUs of this host, from nvidia-smi, else from device files."""
    command = shutil.which("nvidia-smi")
    if command is not None:
        try:
            listed = subprocess.run(
                [command, "-L"], capture_output=True, text=True, timeout=_SECONDS_FOR_SMI, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            pass
        else:
            return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE)) if listed.returncode == 0 else 0
    return sum(re.fullmatch(r"/dev/nvidia\d+", path) is not None for path in glob.glob("/dev/nvidia*"))


def usable(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs that this process may use, as named in CUDA_VISIBLE_DEVICES; in CUDA's order."""
    count = of_host()
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return [str(i) for i in range(count)]
    names = []
    for name in (part.strip() for part in chosen.split(",")):
        # CUDA takes the list up to the first entry that names no device.
        if not re.fullmatch(r"\d+|(GPU|MIG)-.*", name) or (name.isdigit() and int(name) >= count):
            break
        names.append(name)
    return names
