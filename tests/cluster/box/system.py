"""Access to the system for the box: commands that say what failed, files, processes of a namespace."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

ROOT = pathlib.Path("/run/cohort-box")
NETNS = pathlib.Path("/run/netns")


class BoxError(Exception):
    """A text for the user."""


def run(*words, check=True, timeout=30, **options):
    """Runs a command without input; its output as text. Raises BoxError with what it said."""
    options.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=timeout, check=False, **options)
    if check and done.returncode != 0:
        raise BoxError(f"{' '.join(str(w) for w in words)} -- status {done.returncode}: {done.stdout.strip()}")
    return done.stdout


#: Package that has a command.
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux",
            "/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
SLURM_PACKAGES = {"/usr/sbin/munged": "munge", "/usr/sbin/slurmctld": "slurmctld", "/usr/sbin/slurmd": "slurmd",
                  "srun": "slurm-client"}


def missing_packages(slurm):
    """Debian packages that the box needs and that are not here."""
    wanted = dict(PACKAGES, **(SLURM_PACKAGES if slurm else {}))
    return sorted({package for command, package in wanted.items() if shutil.which(command) is None})


def processes_in(net_namespace):
    """Processes whose network namespace is that of the given file, or whose name of it is."""
    try:
        wanted = os.stat(net_namespace)
    except OSError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            have = os.stat(f"/proc/{entry}/ns/net")
        except OSError:
            continue
        if (have.st_dev, have.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(int(entry))
    return found


def end_all(namespaces, seconds=10):
    """Kills every process in the namespaces until there is none. Processes left after the time are an error."""
    limit = time.monotonic() + seconds
    while True:
        left = [pid for namespace in namespaces for pid in processes_in(namespace) if pid != os.getpid()]
        if not left:
            return
        if time.monotonic() > limit:
            raise BoxError(f"processes {left} do not end")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def process_start(pid):
    """Tells two processes of one pid apart; None if there is none."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def wait_until(ready, what, seconds=15):
    limit = time.monotonic() + seconds
    while True:
        reason = ready()
        if not reason:
            return
        if time.monotonic() > limit:
            raise BoxError(f"{what} -- not after {seconds} s -- {reason}")
        time.sleep(0.03)
