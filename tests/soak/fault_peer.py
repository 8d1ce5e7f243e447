"""As fault_peer.cpp, in Python: the same arguments, files and faults."""

import array
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import cohort

SHARD = 200_000
STEPS_PER_SAVE = 4

folder, steps = sys.argv[1], int(sys.argv[2])
hit, kind, place, when, argument = (
    (int(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]), sys.argv[7]) if len(sys.argv) == 8 else (-1, "", "", 0, "")
)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def limit(what, value):
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value, hard))


def take_memory():
    taken = []
    while True:
        taken.append(b"x" * (4 << 20))


def strike():
    with open(f"{folder}/struck.{rank}", "w") as note:
        print(time.monotonic_ns(), file=note)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kind == "exit":
        sys.exit(int(argument))
    elif kind in ("throw", "error"):
        raise RuntimeError("injected fault") if kind == "throw" else cohort.Io("injected fault")
    elif kind == "abort":
        os.abort()
    elif kind in ("kill", "term", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[kind])
    elif kind == "segv":
        import ctypes

        ctypes.string_at(0)
    elif kind == "memory":
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (32 << 20))
        take_memory()
    elif kind == "grab":
        take_memory()
    elif kind == "filesize":
        limit(resource.RLIMIT_FSIZE, 4096)
        save(f"{folder}/saves", -1)
    elif kind == "disk":
        for number in range(1000):
            save(argument, number)
    elif kind == "files":
        limit(resource.RLIMIT_NOFILE, 3)
    elif kind == "close":
        os.closerange(3, 1 << 16)
    elif kind == "mute":
        os.closerange(0, 3)


def strike_if(at, step=0):
    if (rank, place, when) == (hit, at, step):
        strike()


def save(where, number, in_the_midst=None):
    """Appears as a whole: without a name until it is complete."""
    path = f"{where}/shard-{rank}-{number}"
    try:
        fd = os.open(where, os.O_TMPFILE | os.O_WRONLY, 0o644)
        with os.fdopen(fd, "wb", buffering=0) as file:
            write(file, SHARD // 2)
            if in_the_midst is not None:
                in_the_midst()
            write(file, SHARD // 2)
            os.fsync(fd)
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)  # linkat alone follows
    except OSError as error:
        raise OSError(error.errno, f"saving {path}: {error.strerror}") from error


def write(file, count):
    data = memoryview(b"x" * count)
    while data:
        data = data[file.write(data) :]


def train_step(world, step):
    count = (1, 700, 40_000)[step % 3]
    values = array.array("f", [rank + step]) * count
    world.all_reduce(values)
    total = float(size * (size - 1) // 2 + size * step)
    if values.count(total) != count:
        os._exit(98)
    if size == 1:
        return
    out, back = array.array("i", [step]) * 100, array.array("i", [0]) * 100
    sent = world.send(out, (rank + 1) % size, async_op=True)
    world.recv(back, (rank - 1) % size)
    sent.wait()
    if out != back:
        os._exit(98)


pathlib.Path(f"{folder}/began.{rank}").touch()
strike_if("start")
if (rank, place) == (hit, "meeting"):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(os.path.exists(f"{folder}/began.{r}") for r in range(size)):
        time.sleep(0.01)
    time.sleep(0.05)
    strike()
cohort.init()
if rank % 2 == 1:
    script = 'setsid env -i sh -c \'trap "" TERM INT; exec /bin/sleep 1000\' >/dev/null 2>&1 </dev/null &'
    subprocess.run(["sh", "-c", script])
with open(f"{folder}/pid.{rank}.new", "w") as note:
    print(os.getpid(), os.environ.get("COHORT_STORE", ""), os.environ.get("COHORT_JOB_ID", ""), file=note)
os.rename(f"{folder}/pid.{rank}.new", f"{folder}/pid.{rank}")
for step in range(steps):
    strike_if("step", step)
    train_step(cohort.world(), step)
    if step % STEPS_PER_SAVE == 0:
        save(f"{folder}/saves", step, in_the_midst=lambda: strike_if("save", step))
        cohort.world().barrier()
        pathlib.Path(f"{folder}/saves/shard-{rank}-{step - STEPS_PER_SAVE}").unlink(missing_ok=True)
cohort.shutdown()
if (rank, place) == (hit, "exit"):
    strike()
