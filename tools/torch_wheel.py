"""Installs a CPU wheel of PyTorch with the pip of the Python that runs this, if pip can offer one.

usage: torch_wheel.py torch==VERSION [REQUIREMENT...]

Asks pip first what it would install, and refuses CUDA packages and huge downloads. On refusal or failure prints the reason on
one line of stdout and exits 1; with 2 where pip has said nothing and downloaded nothing for a while, which another time may
be otherwise. pip's own output goes to stderr.
"""

import json
import pathlib
import re
import selectors
import subprocess
import sys
import tempfile
import time

MAX_DOWNLOAD_MB = 500  # one CPU wheel has 200 MB, one CUDA wheel 900 MB
SILENT_SECONDS = 120  # without a word, a byte of a download or a file that is unpacked
UNASKED = ("nvidia-", "cuda-", "triton", "pytorch-triton")


class Refused(Exception):
    pass


class Silent(Refused):
    pass


def activity(process):
    """A number that grows while a process reads, writes or computes: its bytes of input and output, and its clock ticks."""
    try:
        counts = pathlib.Path(f"/proc/{process}/io").read_text().split()
        ticks = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(counts[1]) + int(counts[3]) + int(ticks[11]) + int(ticks[12])


def lines_of(child):
    """Yields what a process prints, line by line. Raises Silent where it prints nothing and does nothing for SILENT_SECONDS."""
    selector = selectors.DefaultSelector()
    selector.register(child.stdout, selectors.EVENT_READ)
    rest, last, since = b"", -1, time.monotonic()
    while True:
        if selector.select(1):
            more = child.stdout.read1(65536)
            if not more:
                break
            *lines, rest = (rest + more).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            since = time.monotonic()
        elif (now := activity(child.pid)) > last + 100:  # a wait alone costs some ticks, too
            last, since = now, time.monotonic()
        elif time.monotonic() - since > SILENT_SECONDS:
            raise Silent(f"pip was stopped after {SILENT_SECONDS} s in which nothing came")
    if rest:
        yield rest.decode(errors="replace")


def pip(arguments):
    """Runs pip, and stops it when it starts a huge download."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--retries", "1", "--no-compile"]
    child = subprocess.Popen(command + ["--only-binary", ":all:"] + arguments, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    error = ""
    try:
        for line in lines_of(child):
            print(line, file=sys.stderr)
            huge = re.search(r"Downloading (\S+) \(([\d.]+) (MB|GB)\)", line)
            if huge and float(huge[2]) * (1000 if huge[3] == "GB" else 1) > MAX_DOWNLOAD_MB:
                raise Refused(f"pip would download {huge[1].rsplit('/', 1)[-1]} ({huge[2]} {huge[3]})")
            if line.startswith("ERROR:"):
                error = line.removeprefix("ERROR:").strip()
        child.wait()
    finally:
        child.kill()
        child.wait()
    if child.returncode != 0:
        raise Refused(error or f"pip failed with status {child.returncode}")


def main():
    requirements = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        pip(["--dry-run", "--report", str(report), *requirements])
        names = [item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]]
    unasked = [name for name in names if name.startswith(UNASKED)]
    if unasked:
        raise Refused(f"pip offers only the CUDA build, which brings {len(unasked)} CUDA packages ({unasked[0]}, ...)")
    pip(requirements)


if __name__ == "__main__":
    try:
        main()
    except Refused as reason:
        print(reason)
        sys.exit(2 if isinstance(reason, Silent) else 1)
