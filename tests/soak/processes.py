"""Facts about processes from /proc: whose they are, where they listen. A process that is gone has none."""

import contextlib
import os
import pathlib
import re
import signal
import time


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(pid, name):
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def command_of(pid):
    return read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def stat_of(pid):
    """Fields of /proc/PID/stat after the name: state, parent, ...; empty if the process is gone."""
    return read(pid, "stat").rpartition(b")")[2].decode().split()


def alive(pid):
    """False for a zombie: the process that has to wait for it may be slow."""
    return stat_of(pid)[:1] not in ([], ["Z"], ["X"])


def parent_of(pid):
    return int((stat_of(pid) + [0, 0])[1])


def age_of(pid):
    """Seconds since it began; 0 if it has gone."""
    stat = stat_of(pid)
    return float(read("", "uptime").split()[0]) - int(stat[19]) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def cpu_of(pid):
    """Processor seconds that it has used."""
    stat = stat_of(pid)
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def marked(mark):
    """{pid: command line} of those with this in their environment. A zombie has none."""
    return {pid: command_of(pid) for pid in pids() if mark.encode() in read(pid, "environ")}


def descendants(ancestor):
    children = {}
    for pid in pids():
        children.setdefault(parent_of(pid), []).append(pid)
    found, look = [], [ancestor]
    while look:
        look = [child for one in look for child in children.get(one, [])]
        found += look
    return found


def listening(tables):
    """{inode: port} of the sockets that listen, of the text of /proc/net/tcp and tcp6."""
    fields = [line.split() for line in tables.splitlines()]
    return {each[9]: int(each[1].rpartition(":")[2], 16) for each in fields if len(each) > 9 and each[3] == "0A"}


def listening_here():
    return listening(read("self", "net/tcp").decode() + read("self", "net/tcp6").decode())


def listeners_of(pid):
    """TCP ports at which a process listens."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            inodes.update(re.findall(r"^socket:\[(\d+)\]", os.readlink(entry.path)))
    return [port for inode, port in listening_here().items() if inode in inodes]


def send(pids, number=signal.SIGKILL):
    """Sends a signal; returns the processes that were there to get it."""
    reached = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def wait_for_nothing(find, seconds, every=0.02):
    """Waits until `find` finds nothing: what it still does when the time is over, and the seconds that it took."""
    since = time.monotonic()
    while (left := find()) and time.monotonic() - since < seconds:
        time.sleep(every)
    return left, time.monotonic() - since
