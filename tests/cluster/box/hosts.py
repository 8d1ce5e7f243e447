"""Hosts: a network, a UTS and a mount namespace each, on a bridge in a namespace of its own, and their links."""

import fcntl
import json
import os
import pathlib
import pwd
import re
import shutil

from .system import NETNS, ROOT, BoxError, end_all, process_start, run

MOST_HOSTS = 20
PLAIN_ID = 7077  # of a user that only boxes have


class Box:
    """The folder of a box and the names of what belongs to it."""

    def __init__(self, name):
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
            raise BoxError(f"{name!r} is no name for a box -- wanted: up to 31 of a-z, 0-9 and '-'")
        self.name = name
        self.folder = ROOT / name
        self.switch = f"cb-{name}"
        self._lock = None

    # Parts of the box.

    def facts(self):
        try:
            return json.loads((self.folder / "box.json").read_text())
        except OSError:
            raise BoxError(f"there is no box {self.name} -- bring it up: tools/cluster-box up --name {self.name}") from None

    def hosts(self):
        return [f"h{number}" for number in range(1, self.facts()["hosts"] + 1)]

    def namespace(self, host):
        return f"{self.switch}-{host}"

    def namespaces(self):
        """Files of all network namespaces of this name, also of a box that is only half there."""
        try:
            names = os.listdir(NETNS)
        except OSError:
            return []
        ours = re.compile(re.escape(self.switch) + r"(-h\d+)?")
        return [NETNS / name for name in sorted(names) if ours.fullmatch(name)]

    def families(self):
        return (6,) if self.facts().get("ipv6_only") else (4, 6)

    def address(self, host, family=None):
        """The usual one, or of a family."""
        family = family or self.families()[0]
        number = int(host[1:])
        return f"10.77.0.{number}" if family == 4 else f"fd77::{number}"

    def check_host(self, host):
        if host not in self.hosts():
            raise BoxError(f"box {self.name} has no host {host} -- it has {', '.join(self.hosts())}")

    # One at a time per name.

    def lock(self):
        ROOT.mkdir(mode=0o755, exist_ok=True)
        self._lock = open(ROOT / f"{self.name}.lock", "w", encoding="ascii")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BoxError(f"box {self.name} is being brought up or down by another process") from None

    def unlock(self):
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Up and down.

    def exists(self):
        return self.folder.exists() or bool(self.namespaces())

    def up(self, hosts, rate, queue=0, owner=None, ipv6_only=False, user="root"):
        """The network. `queue`: as of `shape`. `owner`: the process without which nobody wants the box. `user`: who works
        there."""
        self.folder.mkdir(mode=0o755)
        for part in ("ns", "inside"):
            (self.folder / part).mkdir()
        facts = {"name": self.name, "hosts": hosts, "rate": rate, "owner": owner, "ipv6_only": ipv6_only, "user": user,
                 "owner_start": process_start(owner) if owner else None}
        (self.folder / "box.json").write_text(json.dumps(facts) + "\n")
        names = "".join(f"{self.address(h, f)} {h}\n" for h in self.hosts() for f in self.families())
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n" + names)
        write_accounts(self.folder, user)
        # Files of namespaces are mounts, and those of mount namespaces want a private place.
        run("mount", "--bind", self.folder / "ns", self.folder / "ns")
        run("mount", "--make-private", self.folder / "ns")
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "set", "lo", "up")
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        run("ip", "-n", self.switch, "addr", "add", "10.77.0.254/24", "dev", "br0")  # the way in from outside
        run("ip", "-n", self.switch, "-6", "addr", "add", "fd77::fe/64", "dev", "br0", "nodad")
        for host in self.hosts():
            self._add_host(host)
        if rate:
            for host in self.hosts():
                self.shape(host, rate, queue)

    def _add_host(self, host):
        space = self.namespace(host)
        port = f"p{host[1:]}"
        run("ip", "netns", "add", space)
        run("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        with_ipv4 = 4 in self.families()
        if with_ipv4:
            run("ip", "-n", space, "addr", "add", self.address(host, 4) + "/24", "dev", "eth0")
        run("ip", "-n", space, "-6", "addr", "add", self.address(host, 6) + "/64", "dev", "eth0", "nodad")
        # The second network, which leads nowhere and has one address on all hosts, as docker's bridge.
        run("ip", "-n", space, "link", "add", "docker0", "type", "bridge")
        if with_ipv4:
            run("ip", "-n", space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        run("ip", "-n", space, "link", "set", "docker0", "up")
        files = {kind: self.folder / "ns" / f"{kind}-{host}" for kind in ("uts", "mnt")}
        for file in files.values():
            file.touch()
        # Its own names, its own shared memory; everything else is shared, as a home on NFS.
        run_in_new_namespaces(
            space, files,
            f"hostname {host}; mount --bind {self.folder}/hosts /etc/hosts; "
            f"for file in passwd group; do mount --bind {self.folder}/$file /etc/$file; done; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; "
            f"mount -t tmpfs -o mode=755 tmpfs {self.folder}/inside; echo {host} > {self.folder}/inside/host")  # fmt: skip

    def down(self):
        """Ends everything, also what a killed `up` or `run` has left."""
        spaces = self.namespaces()
        end_all(spaces)
        folder = self.folder / "ns"
        if folder.exists():
            for mount in reversed(mounts_below(folder)):
                run("umount", "-l", mount)
        for space in spaces:
            run("ip", "netns", "del", space.name)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    # Inside.

    def enter(self, host, as_user=False):
        """Words before a command that is to run on the host, in this folder. (`ip netns exec` would hide the cgroups.)"""
        namespaces = self.folder / "ns"
        if as_user:
            account = account_of(self.facts()["user"])
            return [*self.enter(host), "setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups",
                    "env", f"HOME={self.folder}/home_{host}", f"USER={account.pw_name}", f"LOGNAME={account.pw_name}"]
        return ["nsenter", f"--net={NETNS / self.namespace(host)}", f"--uts={namespaces}/uts-{host}",
                f"--mount={namespaces}/mnt-{host}", f"--wdns={os.getcwd()}", "--"]

    def shape(self, host, rate, queue=0):
        """Limits what goes to and from the host; "none": no limit. `queue`: bytes that the switch keeps for the host before
        it drops what comes; 0: what 50 ms bring."""
        self.check_host(host)
        for space, device in ((self.switch, f"p{host[1:]}"), (self.namespace(host), "eth0")):
            kept = ("limit", str(queue)) if queue and space == self.switch else ("latency", "50ms")
            if rate == "none":
                run("tc", "-n", space, "qdisc", "del", "dev", device, "root", check=False)
            else:
                # A whole packet of 64 KiB, else the system divides it, which takes more of a core than a fast link allows.
                burst = "32kb" if rate_in_mbit(rate) <= 1000 else "128kb"
                run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", burst,
                    *kept)

    def cut(self, host):
        """Unplugs the cable: no notification, packets are lost."""
        self.check_host(host)
        run("ip", "-n", self.switch, "link", "set", f"p{host[1:]}", "nomaster")

    def mute(self, host, what):
        """One direction is gone: what goes "to" the host, or comes "from" it, is lost on the way."""
        self.check_host(host)
        number = host[1:]
        bridge, inner, outer = f"br{number}", f"u{number}", f"v{number}"
        # A second bridge before the host's port, so that either direction is some device's outgoing one.
        run("ip", "-n", self.switch, "link", "add", bridge, "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        run("ip", "-n", self.switch, "link", "add", inner, "type", "veth", "peer", "name", outer)
        run("tc", "-n", self.switch, "qdisc", "add", "dev", inner if what == "from" else outer, "root", "pfifo", "limit", "0")
        for device, master in ((bridge, None), (inner, bridge), (outer, "br0"), (f"p{number}", bridge)):
            run("ip", "-n", self.switch, "link", "set", device, *(("master", master) if master else ()), "up")

    def heal(self, host):
        self.check_host(host)
        number = host[1:]
        run("ip", "-n", self.switch, "link", "set", f"p{number}", "master", "br0")
        for device in (f"u{number}", f"br{number}"):
            run("ip", "-n", self.switch, "link", "del", device, check=False)  # of `mute`, if there is one

    def is_cut(self, host):
        return "master br0 " not in run("ip", "-n", self.switch, "-o", "link", "show", f"p{host[1:]}")


def run_in_new_namespaces(space, files, script):
    """A script of sh. A file can be of no mount namespace with a lower number than that of who mounts it, and Linux 6.18
    numbers them by the CPU on which they are made: within a container some CPUs may be of no use."""
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        try:
            return run("taskset", "-c", cpu, "nsenter", f"--net={NETNS / space}", "unshare", f"--uts={files['uts']}",
                       f"--mount={files['mnt']}", "--propagation", "slave", "sh", "-ec", script)  # fmt: skip
        except BoxError as error:
            if "Invalid argument" not in str(error) or cpu == cpus[-1]:
                raise


def rate_in_mbit(rate):
    """Converts tc's notation for a rate, such as 100mbit or 1gbit, to Mbit/s; 0 for others."""
    number, unit = re.fullmatch(r"([\d.]+)([a-z]*)", rate.lower()).groups()
    return float(number) * {"mbit": 1, "gbit": 1000}.get(unit, 0)


def account_of(user):
    """The machine's account of that name, or one that only boxes have."""
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return pwd.struct_passwd((user, "*", PLAIN_ID, PLAIN_ID, "of a cluster in a box", "/", "/bin/bash"))


def write_accounts(folder, user):
    """/etc/passwd and /etc/group of the hosts: this machine's, and the user if it has none of that name."""
    account = account_of(user)
    for name, line in (("passwd", ":".join(map(str, account))), ("group", f"{user}:x:{account.pw_gid}:")):
        text = pathlib.Path("/etc", name).read_text()
        if not re.search(f"^{re.escape(user)}:", text, re.M):
            text += line + "\n"
        (folder / name).write_text(text)


def mounts_below(folder):
    """Mount points at and below a folder, as the kernel lists them."""
    places = [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place == str(folder) or place.startswith(f"{folder}/")]


def all_boxes():
    """Returns every box of which anything exists."""
    names = set()
    if ROOT.exists():
        names.update(entry.name for entry in ROOT.iterdir() if entry.is_dir())
    if NETNS.exists():
        for entry in os.listdir(NETNS):
            found = re.fullmatch(r"cb-([a-z0-9-]+?)(-h\d+)?", entry)
            if found:
                names.add(found.group(1))
    return [Box(name) for name in sorted(names)]


def clear_orphans():
    """Brings down the boxes whose `run` was killed."""
    for box in all_boxes():
        try:
            facts = box.facts()
            if not facts["owner"] or process_start(facts["owner"]) == facts["owner_start"]:
                continue
            box.lock()
        except (BoxError, ValueError, KeyError):
            continue
        try:
            box.down()
        finally:
            box.unlock()
            pathlib.Path(ROOT / f"{box.name}.lock").unlink(missing_ok=True)
