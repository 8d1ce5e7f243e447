"""Plans of the random jobs of faults.py: how each is started, where, and the faults it gets when. Pure."""

import collections
import random
import re

HOSTS = ("h1", "h2", "h3")
ROUNDS = 12
STOPPED = 4  # --stopped-timeout
SHELL = ("sleep 1000", "(setsid sleep 1000 &); trap '' TERM; while :; do sleep 1; done", "yes", "sleep 0.4; exit 7",
         "[ $RANK = 1 ] && exit 9; sleep 1000")
LAYOUTS = {"ssh": ("h1:2,h2:2", "h2,h3:2", "h1:1,h2:2", "h1,h2,h3"), "slurm": ("h1:2,h2:2", "h2:1,h3:1"),
           "mpirun": ("h1:2,h2:2", "h2,h3:2"), "srun": ("h1:2,h2:2", "h2:1,h3:1"), "mpiexec": ("h1:2,h2:2",)}
WEIGHTS = {"ssh": 6, "slurm": 2, "mpirun": 2, "srun": 1, "mpiexec": 1}

Harm = collections.namedtuple("Harm", "weight launchers pattern place words limit survived", defaults=(None, "host", "", 15, False))
OURS = ("ssh", "slurm", "mpirun")
ALL = tuple(LAYOUTS)
#: place: "host" or "launcher"; words: what the job has to say, where it fails; limit: seconds until its end
HARMS = {
    "rank": Harm(4, ALL, "PROGRAM", "any", r"SIGKILL|lost rank|killed by signal|signal 9|Killed|KILLED"),
    "agent": Harm(3, OURS, "agent --invited", "host", r"the (agent|guard) of HOST|HOST"),
    "ssh": Harm(2, ("ssh",), "^ssh ", "launcher", "ssh"),
    "sshd": Harm(2, ("ssh",), r"^sshd: [a-z]+@", "host", "HOST|ssh"),
    "step": Harm(2, ("slurm",), r"^srun |slurmstepd: \[", "any", r"h\d|srun|slurm"),
    "orted": Harm(1, ("mpirun",), r"^mpirun|orted", "any", r"h\d|mpirun"),
    "launcher": Harm(3, OURS, r"^[^ ]*cohort run", "launcher"),
    "slurmd": Harm(1, ("slurm", "srun"), r"^/usr/sbin/slurmd", "host", survived=True),
    "cut": Harm(4, OURS, words="HOST|not reach|silent", limit=45),
    "mute-to": Harm(2, OURS, words="HOST", limit=45),
    "mute-from": Harm(2, OURS, words="HOST", limit=45),
    "home": Harm(1, OURS, words="h[123]", limit=45),
    "blink": Harm(3, ALL, survived=True),
    "freeze": Harm(2, OURS, words="HOST", limit=60),
    "nap": Harm(2, ALL, survived=True),
    "hang": Harm(2, OURS, words="HOST", limit=60),
    "down": Harm(3, OURS, words="HOST|ssh|srun|mpirun", limit=45),
    "slow": Harm(1, ALL, survived=True),
}
#: of these the host has to be named by itself, and soon
NAMED = ("cut", "hang", "down")


def possible(harms, launchers):
    """Names of the faults that a job of one of the launchers can get."""
    return [name for name in HARMS if name in harms and set(HARMS[name].launchers) & set(launchers)]


class Plan:
    """Plan of job `number` of a seed. A pure function of the two and of the faults and launchers to choose from."""

    def __init__(self, seed, number, harms, launchers=ALL):
        draw = random.Random(f"{seed} {number}")
        names = possible(harms, launchers)
        launchers = [name for name in ALL if name in launchers and any(name in HARMS[harm].launchers for harm in names)]
        self.number = number
        self.launcher = draw.choices(launchers, [WEIGHTS[name] for name in launchers])[0]
        self.layout = draw.choice(LAYOUTS[self.launcher])
        names = [name for name in names if self.launcher in HARMS[name].launchers]
        self.harms = draw.choices(names, [HARMS[name].weight for name in names], k=1)
        self.shell = draw.choice(SHELL) if self.launcher in OURS and draw.random() < 0.25 else None
        self.restarts = 1 if self.launcher in OURS and not self.shell and draw.random() < 0.25 else 0
        self.moment = draw.uniform(0, 1.1)  # in durations of an undisturbed job
        self.host = draw.choice([name for name in re.findall(r"h\d", self.layout) if name != "h1"])
        self.random = draw

    @property
    def ranks(self):
        return sum(int((entry.split(":") + ["1"])[1]) for entry in self.layout.split(","))

    def __str__(self):
        return (f"{self.launcher} {self.layout} `{self.shell or 'peer'}`{' restarts' if self.restarts else ''}: "
                f"{'+'.join(self.harms)} {self.host} at {self.moment:.2f}")


def words_of(launcher, layout, options, program, restarts=0):
    """The command that starts it on h1."""
    hosts = dict((entry.split(":") + ["1"])[:2] for entry in layout.split(","))
    nodes = ",".join(hosts)
    per = max(int(count) for count in hosts.values())
    ours = [options.cohort, "run", "--no-logs", "--grace", "0.5", "--stopped-timeout", str(STOPPED), "--max-restarts", str(restarts)]
    total = sum(int(count) for count in hosts.values())
    return {
        "ssh": [*ours, "-H", layout, *program],
        "mpirun": [*ours, "-H", layout, "--starter", "mpirun", *program],
        "slurm": ["salloc", "-Q", "-N", str(len(hosts)), f"--nodelist={nodes}", *ours, "--per-node", str(per), *program],
        "srun": ["srun", "-Q", f"--nodelist={nodes}", "-N", str(len(hosts)), f"--ntasks-per-node={per}", "-n",
                 str(per * len(hosts)), "--overcommit", *program],
        "mpiexec": ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "-np", str(total), "-H", layout, *program],
    }[launcher]
