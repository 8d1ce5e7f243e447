"""Hosts of a cluster in a box (tools/cluster-box) for what is measured between hosts. Needs root."""
import json
import os
import subprocess
import sys

from lib import groups

TOOL = os.path.join(os.path.dirname(groups.BENCH), "tools", "cluster-box")
# A frame of 1,514 bytes carries 1,448 of ours: Ethernet, IPv4 and TCP with timestamps take the rest.
PAYLOAD = 1448 / 1514


def tool(*words):
    return subprocess.run([sys.executable, TOOL, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          check=False, start_new_session=True)


def check():
    """Ends the command where this machine cannot have a box."""
    checked = tool("check")
    if checked.returncode:
        sys.exit(f"bench/compare: {checked.stderr.strip()}")


def layout_of(text):
    hosts, per_host = (int(word) for word in text.split("x"))
    if hosts < 2 or per_host < 1:
        raise ValueError
    return hosts, per_host


class Box:
    """`rate` in Mbit/s of each host's link, 0: not limited. `queue`: bytes that the switch keeps for a host, 0: 50 ms."""

    def __init__(self, hosts, rate, queue=0, congestion_control=None):
        self.name, self.hosts, self.rate = f"compare-{os.getpid()}", [f"h{i + 1}" for i in range(hosts)], rate
        limit = ["--rate", f"{rate}mbit"] if rate else []
        done = tool("up", "--name", self.name, "--hosts", str(hosts), "--queue", str(queue), *limit)
        if done.returncode:
            self.__exit__()
            raise groups.Failed(f"no box of {hosts} hosts: {done.stderr.strip()}")
        if congestion_control:
            self._choose(congestion_control)

    def _choose(self, congestion_control):
        """By routes: who is no user of the first network namespace may not choose every one by sysctl."""
        for host in self.hosts:
            for family, *route in (("-4", "10.77.0.0/24"), ("-6", "fd77::/64", "metric", "256")):
                words = ["ip", family, "route", "replace", *route, "dev", "eth0", "proto", "kernel", "congctl", congestion_control]
                done = subprocess.run(self.on(host, words), capture_output=True, text=True, check=False)
                if done.returncode:
                    self.__exit__()
                    raise groups.Failed(f"{host}, {' '.join(words)}: {done.stderr.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        tool("down", "--name", self.name)

    def on(self, host, command):
        return [sys.executable, TOOL, "exec", "--name", self.name, host, "--", *command]

    def address(self, host):
        said = subprocess.run(self.on(host, ["ip", "-json", "-4", "address", "show", "dev", "eth0"]), capture_output=True,
                              text=True, check=True).stdout
        return json.loads(said)[0]["addr_info"][0]["local"]

    def losses(self):
        """TCP segments sent again and retransmission time-outs of all hosts since the box is up."""
        found = {"TCPTimeouts": 0, "RetransSegs": 0}
        for host in self.hosts:
            said = subprocess.run(self.on(host, ["cat", "/proc/net/netstat", "/proc/net/snmp"]), capture_output=True, text=True,
                                  check=True).stdout.splitlines()
            for names, values in zip(said, said[1:]):
                for name, value in zip(names.split(), values.split()):
                    if name in found and value.isdigit():
                        found[name] += int(value)
        return found["RetransSegs"], found["TCPTimeouts"]
