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
    """`rate` in Mbit/s of each host's link, 0: not limited."""

    def __init__(self, hosts, rate):
        self.name, self.hosts, self.rate = f"compare-{os.getpid()}", [f"h{i + 1}" for i in range(hosts)], rate
        limit = ["--rate", f"{rate}mbit"] if rate else []
        done = tool("up", "--name", self.name, "--hosts", str(hosts), *limit)
        if done.returncode:
            self.__exit__()
            raise groups.Failed(f"no box of {hosts} hosts: {done.stderr.strip()}")

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
