"""A real Slurm over the hosts: munge, slurmctld on h1, a slurmd on every host, two fake GPUs each."""

import os
import stat

from .system import run, wait_until


def set_up(box):
    folder = box.folder / "slurm"
    folder.mkdir(mode=0o755)
    hosts = box.hosts()
    # munge asks that its folders are root's (or munge's) alone, and that its socket's folder is open to all.
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    os.chmod(key, 0o400)
    run(*box.enter("h1"), "/usr/sbin/munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        "--num-threads=10")  # as Slurm advises: all hosts' daemons, and ranks that srun starts, ask this one
    nodes = "".join(f"NodeName={h} NodeAddr={box.address(h)} NodeHostname={h} CPUs=8 RealMemory=1000 Gres=gpu:2\n"
                    for h in hosts)
    for host in hosts:
        (folder / f"state_{host}").mkdir(mode=0o755)
        (folder / f"tmp_{host}").mkdir(mode=0o1777)  # srun --mpi=pmix makes folders there, of one name on all hosts
    (folder / "state_ctld").mkdir(mode=0o755)
    text = CONF.format(folder=folder, name=box.name, address=box.address("h1"), nodes=nodes, last=len(hosts))
    if 4 not in box.families():
        text += "CommunicationParameters=EnableIPv6,DisableIPv4\n"
    (folder / "slurm.conf").write_text(text)
    for gpu in range(2):
        os.mknod(folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # Slurm wants a device: a second /dev/null
    (folder / "gres.conf").write_text(f"Name=gpu Flags=nvidia_gpu_env File={folder}/gpu[0-1]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\n")
    environment = environment_of(box)
    run(*box.enter("h1"), "/usr/sbin/slurmctld", "-c", env=environment)
    for host in hosts:
        start(box, host)
    wait_until_idle(box)


def environment_of(box):
    return dict(os.environ, SLURM_CONF=str(box.folder / "slurm" / "slurm.conf"))


def start(box, host):
    """Its slurmd, also after it has been killed."""
    box.check_host(host)
    run(*box.enter(host), "/usr/sbin/slurmd", "-c", "-N", host, env=environment_of(box))


def wait_until_idle(box, seconds=30):
    environment = environment_of(box)
    hosts = box.hosts()

    def idle():
        states = run(*box.enter("h1"), "sinfo", "-h", "-o", "%T %D", check=False, env=environment)
        return None if states.split() == ["idle", str(len(hosts))] else states

    wait_until(idle, "Slurm's nodes", seconds)


CONF = """\
ClusterName={name}
SlurmctldHost=h1({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
StateSaveLocation={folder}/state_ctld
SlurmdSpoolDir={folder}/state_%n
TmpFS={folder}/tmp_%n
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
InactiveLimit=0
GresTypes=gpu
{nodes}PartitionName=main Nodes=h[1-{last}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:8
"""
