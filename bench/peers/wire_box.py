"""Hosts of a cluster in a box for bench/compare_wire, and how each library's ranks are started over them. Needs root."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import driver

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "cluster-box"
# A frame of 1,514 bytes carries 1,448 of ours: Ethernet, IPv4 and TCP with timestamps take the rest.
PAYLOAD = 1448 / 1514


def tool(*words):
    return subprocess.run([sys.executable, str(TOOL), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def why_not():
    checked = tool("check")
    return checked.stderr.strip() if checked.returncode else ""


class WireBox:
    """`rate` in Mbit/s of each host's link, 0: not limited."""

    def __init__(self, hosts, rate):
        self.name, self.hosts, self.rate = f"wire-{os.getpid()}", [f"h{i + 1}" for i in range(hosts)], rate
        limit = ["--rate", f"{rate}mbit"] if rate else []
        done = tool("up", "--name", self.name, "--hosts", str(hosts), *limit)
        if done.returncode:
            sys.exit(f"compare_wire: no box of {hosts} hosts: {done.stderr.strip()}")

    def down(self):
        tool("down", "--name", self.name)

    def on(self, host, command):
        return [sys.executable, str(TOOL), "exec", "--name", self.name, host, "--", *command]

    def address(self, host):
        return subprocess.run(self.on(host, ["ip", "-json", "-4", "address", "show", "dev", "eth0"]), capture_output=True,
                              text=True, check=True).stdout

    def commands(self, per_host):
        """For driver.Group: the first words of every library's command lines."""
        places = ",".join(f"{host}:{per_host}" for host in self.hosts)

        def of(name, build, ranks, folder):
            library = name.split("/")[0]
            binary = driver.program(build, f"{library}_peer")
            if binary is None:
                return None
            if name == "cohort/mpi":
                words = driver.mpi_command(build, "openmpi", max(ranks, driver.usable_cores() + 1), folder)
                if words is None:
                    return None
                return [self.on("h1", words[0][:-4] + ["-x", "COHORT_TRANSPORT=mpi", "-x", "XDG_DATA_HOME", "-H", places, "-np",
                                                       str(ranks), binary, folder])]
            if library == "cohort":
                cohort = os.path.join(os.path.abspath(build), "bin", "cohort")
                ways = {"encrypted": ["--env", "COHORT_ENCRYPT=1"], "plain": ["--env", "COHORT_INTEGRITY=0"]}
                way = name.split("/")[-1]
                how, last = (ways[way], []) if way in ways else ([], name.split("/")[1:])
                return [self.on("h1", [cohort, "run", "-q", *how, "-H", places, "--", binary, folder, *last])]
            if library in ("openmpi", "mpich"):
                start = driver.mpi_command(build, library, max(ranks, driver.usable_cores() + 1), folder)
                if start is None:
                    return None
                words = start[0][:-4]  # without -np N PROGRAM FOLDER
                hosts = ["-H", places] if library == "openmpi" else ["-hosts", places]
                return [self.on("h1", words + hosts + ["-np", str(ranks), binary, folder])]
            commands = []
            for rank in range(ranks):
                host = self.hosts[rank // per_host]
                address = json.loads(self.address(host))[0]["addr_info"][0]["local"]
                commands.append(self.on(host, [binary, folder, str(rank), str(ranks), address]))
            return commands

        return of

    def bound_us(self, collective, size):
        """What the links allow for an all_reduce or a reduce_scatter of so many bytes; None where they are not limited."""
        if not self.rate or collective not in ("all_reduce", "reduce_scatter"):
            return None
        hosts = len(self.hosts)
        moved = (hosts - 1) / hosts * size
        if collective == "all_reduce":
            moved = size if hosts == 2 else 2 * moved
        return moved / (self.rate / 8 * PAYLOAD)


def available(name, build):
    library = name.split("/")[0]
    if library in ("openmpi", "mpich") and not shutil.which(f"mpirun.{library}"):
        return False
    return driver.program(build, f"{library}_peer") is not None
