"""Installs a CPU wheel of PyTorch with the pip of the Python that runs this, if pip can offer one.

usage: torch_wheel.py torch==VERSION [REQUIREMENT...]

Asks pip first what it would install, and refuses CUDA packages and huge downloads. On refusal or failure
prints the reason on one line of stdout and exits 1. pip's own output goes to stderr.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

MAX_DOWNLOAD_MB = 500  # one CPU wheel has 200 MB, one CUDA wheel 900 MB
LOOK_SECONDS = 300
INSTALL_SECONDS = 1800
UNASKED = ("nvidia-", "cuda-", "triton", "pytorch-triton")


class Refused(Exception):
    pass


def pip(arguments, seconds):
    """Runs pip, stops it when it starts a huge download, and returns the last line that says what went wrong."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--retries", "1"]
    child = subprocess.Popen(command + ["--only-binary", ":all:"] + arguments, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    error = ""
    try:
        for line in child.stdout:
            sys.stderr.write(line)
            huge = re.search(r"Downloading (\S+) \(([\d.]+) (MB|GB)\)", line)
            if huge and float(huge[2]) * (1000 if huge[3] == "GB" else 1) > MAX_DOWNLOAD_MB:
                raise Refused(f"pip would download {huge[1].rsplit('/', 1)[-1]} ({huge[2]} {huge[3]})")
            if line.startswith("ERROR:"):
                error = line.removeprefix("ERROR:").strip()
        child.wait()
        if not timer.is_alive():
            raise Refused(f"pip was stopped after {seconds} s")
    finally:
        timer.cancel()
        child.kill()
        child.wait()
    if child.returncode != 0:
        raise Refused(error or f"pip failed with status {child.returncode}")


def main():
    requirements = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        pip(["--dry-run", "--report", str(report), *requirements], LOOK_SECONDS)
        names = [item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]]
    unasked = [name for name in names if name.startswith(UNASKED)]
    if unasked:
        raise Refused(f"pip offers only the CUDA build, which brings {len(unasked)} CUDA packages ({unasked[0]}, ...)")
    pip(requirements, INSTALL_SECONDS)


if __name__ == "__main__":
    try:
        main()
    except Refused as reason:
        print(reason)
        sys.exit(1)
