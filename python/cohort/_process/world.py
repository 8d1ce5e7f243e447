"""This process's default world: `init` forms it, `shutdown` leaves it, the process's end leaves every world.

Any thread may call. On a thread of `run_on_threads` the default world is that thread's; while such threads run, other
threads of the process have no default world, since it would be ambiguous. A forked child may ask for its parent's rank;
`shutdown` there forgets the parent's world without touching it.
"""

from __future__ import annotations

import atexit
import binascii
import contextlib
import os
import sys
import threading

from cohort import _core
from cohort._process import last_words as _last_words
from cohort._core import Communicator
from cohort.errors import InvalidArgument, Unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs milliseconds to import
    import datetime
    from typing import Callable, Iterator, Optional, Union

    Seconds = Union[float, datetime.timedelta]

_lock = threading.RLock()
_world: Communicator | None = None
_own = threading.local()  # the `world` of each thread that is a rank
_running = 0  # calls of run_on_threads
# Called before the default world ends; each function stops what uses the world in the background.
before_shutdown: list[Callable[[], None]] = []

# Grace period, when a process ends normally, for operations that nobody waited for.
_GRACE_AT_EXIT = 5.0


def new_world(init_method: str = "", *, rank: int = -1, world_size: int = -1, secret_file: str = "",
              group_name: str = "world", program: str = "", init_timeout: Seconds | None = None,
              timeout: Seconds | None = None, transport: str = "", alone: bool = False, trust_network: bool = False,
              share: Callable[[str, Optional[str], float], str] | None = None,
              share_name: str = "") -> Communicator:  # fmt: skip
    """Forms a world separate from the default one: meets the other ranks and returns the Communicator.

    init_method   where to meet. "": COHORT_INIT, else the launcher's environment (`cohort run`, torchrun, mpirun, srun
                  and others: docs/reference/launchers.md), else a world of one. "env://": RANK, WORLD_SIZE,
                  MASTER_ADDR and MASTER_PORT.
                  "tcp://HOST:PORT": rank 0 listens there. "file:///PATH": a fresh file that all ranks can lock.
                  "unix://NAME": one user's processes on one host, at a name that nobody else uses
    rank, world_size  required by tcp://, file:// and unix:// (or ?rank=R&world_size=N in the address)
    secret_file   a file with mode 0600 that holds the job's secret, for worlds without `cohort run`; default:
                  COHORT_SECRET_FILE. Without a secret only processes of the same user on the same host are admitted
    group_name    several worlds of one process meet under different names
    program       what this rank runs: ranks with different values are refused. Default: COHORT_PROGRAM, else the
                  script with its size and checksum. Programs that are meant to differ give a common text
    init_timeout  seconds for all ranks to appear; default: 300
    timeout       deadline, in seconds, of operations without one of their own; default: COHORT_TIMEOUT, else 1800
    transport     what carries bytes between hosts: "tcp", or "mpi" for ranks that mpirun or srun has started (it needs
                  the plug-in of `cohort build-mpi`); default: COHORT_TRANSPORT, else tcp
    alone         form a world of one rank on purpose, also under a launcher of more
    trust_network  let ranks on several hosts meet at an address without a secret, so that anyone who reaches it may be one.
                  Also COHORT_TRUST_NETWORK=1. Rank 0 warns of that
    share         instead of an init_method, with rank and world_size: a function share(key, mine, seconds) over a channel
                  of the program's own (a key-value store, MPI) that gives every rank rank 0's text. Called once, maybe
                  on another thread: rank 0 passes a text, the others None, and all return that text within `seconds`.
                  The text holds a fresh secret, too, unless the ranks have one, so anyone who reads it can be a rank
    share_name    the channel's name, for messages

    Raises InvalidArgument when sources contradict each other, Mismatch when ranks differ in what they run (program,
    version of torch if it is loaded, build of Cohort), Timeout when ranks do not appear, Unavailable when there is no
    secret and one is needed, PeerLost when a rank dies meanwhile. In an elastic job (`cohort run --min-np`) the job
    assigns rank and size, the remaining ranks form the next world when a rank dies meanwhile, and Aborted means that
    the job has removed this process.
    """
    _refuse_child_that_imports_main()
    _last_words.tell_stacks()
    if share is None and init_method in ("", "env://") and rank < 0 and not alone:
        if _core.rendezvous_method(-1, -1) == "torch's store":
            from cohort._process import torchrun as _torchrun

            share, share_name, rank, world_size = _torchrun.meeting(init_timeout)
            init_method = ""
    return _core.init(init_method, rank, world_size, os.fspath(secret_file), group_name, program or _own_program(),
                      init_timeout, timeout, transport, alone, trust_network, share, share_name)  # fmt: skip


def _refuse_child_that_imports_main() -> None:
    """Raises in a multiprocessing child (spawn, forkserver), which runs the script again to find functions and is no rank."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        raise Unavailable(
            "init: this process is no rank: multiprocessing has started it (a worker of a DataLoader, or a pool), and it "
            "imports the script to find its functions -- put what the script does under `if __name__ == \"__main__\":`, "
            "or start workers by fork (DataLoader's multiprocessing_context=\"fork\")"
        )


def _own_program() -> str:
    """Identifies what the ranks of a job have in common: the script, by its name and content."""
    if os.environ.get("COHORT_PROGRAM"):
        return ""  # the variable is used instead
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None:  # interactive, `python -c`, a notebook
        return "python, without a script"
    try:
        with open(path, "rb") as script:
            content = script.read()
    except OSError:  # inside an archive, or gone
        return os.path.basename(path)
    return f"{os.path.basename(path)} ({len(content)} bytes, crc {binascii.crc32(content):08x})"


@contextlib.contextmanager
def threads_run() -> Iterator[None]:
    """Marks, while the context lasts, that threads are ranks."""
    global _running
    with _lock:
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1


@contextlib.contextmanager
def thread_is_rank(world: Communicator) -> Iterator[None]:
    """Makes this thread a rank of `world`, which is the thread's default world while the context lasts."""
    _own.world = world
    try:
        yield
    finally:
        del _own.world


def rank_thread() -> Communicator | None:
    """Returns the world of this thread; None if it is not a thread of `run_on_threads`."""
    own: Communicator | None = getattr(_own, "world", None)
    return own


def _world_of_thread() -> Communicator | None:
    """Like `rank_thread`, but raises InvalidArgument on another thread while such threads run."""
    own = rank_thread()
    if own is None and _running:
        raise InvalidArgument(
            f"the thread '{threading.current_thread().name}' is no rank, and threads of run_on_threads are ranks of this process "
            "now, so there is no default world here -- give this thread the Communicator of the rank that it works for, and "
            "what takes `comm` that"
        )
    return own


def refuse_on_threads(what: str) -> None:
    """Raises InvalidArgument on a thread that is a rank; for functions that support only processes."""
    if rank_thread() is not None:
        raise InvalidArgument(
            f"{what}: this thread is a rank of run_on_threads, and Horovod's interface has one rank for each process -- use "
            "cohort.rank(), cohort.world() and cohort.nn.DistributedDataParallel here, or start the ranks as processes"
        )


def init(init_method: str = "", **options: object) -> Communicator:
    """Forms this process's default world, with the arguments of `new_world`, and returns it. If there is one already,
    as on a thread of `run_on_threads`, returns that.

    Raises InvalidArgument if there is one and arguments are given, since they could have no effect.
    """
    global _world
    with _lock:
        if is_initialized():
            if init_method or options:
                raise InvalidArgument(
                    f"init: this process is rank {rank()} of {size()} already, and the arguments given would have no "
                    "effect -- call cohort.shutdown() before, or cohort.new_world(...) for another world"
                )
            return world()
        if rank_thread() is not None:
            raise InvalidArgument(
                "init: this thread has left the world of run_on_threads that it was a rank of, and gets no other"
            )
        _world = new_world(init_method, **options)  # type: ignore[arg-type]
        return _world


init.__wrapped__ = new_world  # type: ignore[attr-defined]  # help() shows its arguments


def shutdown() -> None:
    """Leaves the default world as soon as its unfinished operations have ended; a KeyboardInterrupt aborts those.

    Does nothing if there is none. `init` may be called again, any number of times. On a thread of `run_on_threads`
    `shutdown` leaves that thread's world.
    """
    global _world
    own = rank_thread()
    if own is not None:
        if not own.has_left:
            own.leave(reason=f"rank {own.rank()} has shut down")
        return
    with _lock:
        if _world is not None:
            for end in before_shutdown:
                end()
        leaving, _world = _world, None
        if leaving is not None:
            leaving.leave(reason=f"rank {leaving.rank()} has shut down")


def is_initialized() -> bool:
    """True if there is a default world, also in a forked child, where it is the parent's. Raises InvalidArgument, as
    `world` does, on a thread that is no rank while threads of `run_on_threads` run."""
    own = _world_of_thread()
    world = own if own is not None else _world
    return world is not None and not world.has_left


def world() -> Communicator:
    """Returns the default world; on a thread of `run_on_threads`, that thread's world. Raises InvalidArgument (a
    ValueError) before `init`, after `shutdown`, and, while threads are ranks, on a thread that is no rank."""
    own = _world_of_thread()
    world = own if own is not None else _world
    if world is None or world.has_left:
        raise InvalidArgument("this process belongs to no world -- call cohort.init() first")
    return world


def rank() -> int:
    """This process's (or thread's) number in the default world, from 0."""
    return world().rank()


def size() -> int:
    """The number of processes in the default world."""
    return world().size()


def local_rank() -> int:
    """This process's number among those of its host. In an elastic job of `cohort run` this is LOCAL_RANK, which a
    process keeps while others leave and join, so the number may be local_size() or more, and 0 may be missing."""
    return world().local_rank()


def local_size() -> int:
    """The number of processes on this host."""
    return world().local_size()


def cross_rank() -> int:
    """This host's number, among hosts that have this local rank."""
    return world().cross_rank()


def cross_size() -> int:
    """The number of hosts that have this local rank."""
    return world().cross_size()


once_left: list[Callable[[], None]] = []  # called at the end of the process, after all worlds are left


def _at_exit() -> None:
    _last_words.tell_at_exit()
    # After an exception the other ranks learn immediately why this rank will not finish its operations.
    failure = getattr(sys, "last_value", None)
    reason = "the program has ended before its operations had"
    if failure is not None:
        reason = f"the program has failed: {type(failure).__name__}"
        with contextlib.suppress(Exception):  # formatting another package's exception may raise, since Py4J's asks a JVM
            reason += f": {failure}"
    try:
        _core.leave_all(grace=_GRACE_AT_EXIT, reason=reason, failed=failure is not None)
    except KeyboardInterrupt:
        pass
    for function in once_left:
        function()


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; that thread does not exist here and could not release it.
    global _lock, _running
    _lock = threading.RLock()
    if rank_thread() is None:
        _running = 0  # the threads that are ranks are the parent's


atexit.register(_at_exit)
_last_words.watch_exceptions()
os.register_at_fork(after_in_child=_after_fork)
