"""The hosts' sshd: Debian's, by key only, with keys of the box's own."""

import array
import os
import pathlib
import socket
import subprocess

from .hosts import account_of
from .system import NETNS, BoxError, run, wait_until


def set_up(box, user, tool):
    """Keys, configuration, and an sshd on every host. `tool`: the command that is the way in from outside."""
    account = account_of(user)
    folder = box.folder
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"box {box.name}", "-f", folder / "key")
    (folder / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())
    os.chmod(folder / "authorized_keys", 0o644)
    os.chown(folder / "key", account.pw_uid, account.pw_gid)
    pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    known = ""
    addresses = {host: [box.address(host, family) for family in box.families()] for host in box.hosts()}
    for host in box.hosts():
        key = folder / f"host_key_{host}"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host, "-f", key)
        words = " ".join((folder / f"host_key_{host}.pub").read_text().split()[:2])
        known += f"{','.join([host, *addresses[host]])} {words}\n"
        home = folder / f"home_{host}"  # this machine's own start-up files of shells do not count
        home.mkdir(mode=0o755)
        os.chown(home, account.pw_uid, account.pw_gid)
        (folder / f"sshd_config_{host}").write_text(SSHD.format(folder=folder, host=host))
    (folder / "known_hosts").write_text(known)
    text = ""
    for host in box.hosts():
        text += f"Host {' '.join([host, *addresses[host]])}\n  HostName {addresses[host][0]}\n\n"
    text += SSH.format(folder=folder, tool=tool, box=box.name, hosts=" ".join(box.hosts()), user=user)
    (folder / "ssh_config").write_text(text)
    for host in box.hosts():
        start(box, host)


def start(box, host):
    """Also after it has been killed."""
    box.check_host(host)
    run(*box.enter(host), "/usr/sbin/sshd", "-f", box.folder / f"sshd_config_{host}", "-E",
        box.folder / f"sshd_{host}.log")
    wait_until(lambda: None if _answers(box, host) else "it does not listen", f"sshd of {host}")


def _answers(box, host):
    done = subprocess.run([*box.enter(host), "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/22 && read -t 5 -u 3 line"],
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def proxy(box, address, port):
    """For ssh's ProxyCommand outside the box: connects inside the network and hands the socket over (stdout)."""
    with open(NETNS / box.switch, "rb") as namespace:
        os.setns(namespace.fileno(), 0x40000000) if hasattr(os, "setns") else _setns(namespace.fileno())
    with socket.create_connection((address, int(port)), timeout=10) as connection:
        with socket.socket(fileno=os.dup(1)) as way:
            descriptors = array.array("i", [connection.fileno()])
            way.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])


def _setns(descriptor):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0x40000000) != 0:
        raise BoxError(f"cannot enter the box: {os.strerror(ctypes.get_errno())}")


SSHD = """\
Port 22
HostKey {folder}/host_key_{host}
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd_{host}.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 200
MaxSessions 100
PrintMotd no
UseDNS no
SetEnv HOME={folder}/home_{host}
"""

# Outside, the way in is the switch's namespace: `proxy`.
SSH = """\
Match host "*" exec "test ! -e {folder}/inside/host"
  ProxyCommand {tool} proxy --name {box} %h %p
  ProxyUseFdpass yes

Host *
  User {user}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  PreferredAuthentications publickey
  ConnectTimeout 10
"""
