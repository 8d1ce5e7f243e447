"""Collectives between hosts of a cluster in a box, their links shaped or free: against Open MPI, MPICH and Gloo. Needs root.

    bench/compare hosts --layouts 2x1,2x2,2x4,4x1 --rates 1000,0 --sizes 8,1K,64K,1M,16M --peers openmpi,gloo
    bench/compare hosts --against OLD/build/release --layouts 2x1,2x2,4x1 --rates 0 --sizes 8,1K,64K,1M,16M
    bench/compare hosts --layouts 16x1 --rates 200 --queue 262144 --collectives gather --sizes 1M,16M --peers none
    bench/compare hosts --ours cohort,cohort/plain,cohort/encrypted,cohort/int8,cohort/mpi --peers none

A layout is HOSTS x RANKS PER HOST; a rate is in Mbit/s for each host's link, 0 is what the machine gives. All hosts are
on this machine, so that its cores are shared by all ranks. Each library is started once per layout and sleeps while it
is not asked. `bound` is what the links allow: of an all_reduce n/R at 2 hosts and 2 (H-1)/H n/R beyond, of a
reduce_scatter, and of what only moves, (H-1)/H n/R; its `ahead` is the share of the bound that we reach. The first of
--ours is "Cohort" in the table and the others are columns: narrower on the wire, encrypted, without tags (plain), and our
transport over Open MPI, whose plug-in has to be there (`cohort build-mpi`). Results are compared in full, once, but for
those of formats that round.

--queue limits what the switch keeps for a host, and adds the TCP segments sent again and the retransmission time-outs of
all hosts in a round. It is meant for one library; `--congestion-control cubic` where the machine has another one.

--cpu adds what the processor did for it, in seconds for each GB (10^9 bytes) that the algorithm with the fewest bytes
sends between hosts: user and system time of all ranks and threads. Waiting by spinning or yielding counts, too.
"""
import shutil

from cases.collectives import Libraries
from lib import boxes, groups, records

ROUNDS = 9
BOUNDED = ["all_reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"]
PEERS = ["openmpi", "gloo", "mpich"]
OURS = ["cohort", *(f"cohort/{name}" for name in ("bfloat16", "int8", "int4")), "cohort/encrypted", "cohort/plain", "cohort/mpi"]
WAYS = {"encrypted": ["--env", "COHORT_ENCRYPT=1"], "plain": ["--env", "COHORT_INTEGRITY=0"]}


def options(parser):
    parser.add_argument("--layouts", type=records.list_of(boxes.layout_of), default=[(2, 1), (2, 2), (2, 4), (4, 1)])
    parser.add_argument("--rates", type=records.list_of(int), default=[1000])
    parser.add_argument("--sizes", type=records.list_of(records.size_of), default=[8, 1024, 65536, 1 << 20, 16 << 20])
    parser.add_argument("--collectives", type=records.list_of(str), default=["all_reduce"])
    parser.add_argument("--ours", type=records.list_of(str, OURS), default=["cohort"])
    parser.add_argument("--queue", type=int, default=0, help="bytes that the switch keeps for a host, beyond which it drops [50 ms]; "
                        "with it, segments sent again and time-outs are measured, too")
    parser.add_argument("--congestion-control", help="the kernel's on all hosts [the machine's]")
    parser.add_argument("--cpu", action="store_true", help="also seconds of the processor for each GB between hosts")
    parser.add_argument("--slice", type=float, default=0.1, help="seconds that one library gets in a round, if 3 calls fit")


def available(name, build):
    library = name.split("/")[0]
    if library in ("openmpi", "mpich") and not shutil.which(f"mpirun.{library}"):
        return False
    return groups.program(build, f"{library}_peer") is not None


def commands_of(box, per_host, name, build):
    """For groups.Group: the command lines of a library's ranks over the box."""
    places = ",".join(f"{host}:{per_host}" for host in box.hosts)
    ranks = per_host * len(box.hosts)
    library, _, way = name.partition("/")
    binary = groups.program(build, f"{library}_peer")

    def commands(folder):
        if library in ("openmpi", "mpich") or way == "mpi":
            start = groups.mpi_command(build, "openmpi" if way else library, max(ranks, groups.usable_cores() + 1))
            ours = ["-x", "COHORT_TRANSPORT=mpi", "-x", "XDG_DATA_HOME"] if way else []
            hosts = ["-hosts" if library == "mpich" else "-H", places]
            return [box.on("h1", start + ours + hosts + ["-np", str(ranks), binary, folder])]
        if library == "cohort":
            last = [way] if way and way not in WAYS else []
            return [box.on("h1", groups.cohort_run(build, *WAYS.get(way, []), "-H", places, "--", binary, folder, *last))]
        return [box.on(box.hosts[rank // per_host], [binary, folder, str(rank), str(ranks),
                                                     box.address(box.hosts[rank // per_host])]) for rank in range(ranks)]
    return commands


def bytes_between(hosts, collective, size):
    """Bytes that all hosts together have to send at least; None if unknown here or next to nothing."""
    if collective not in ("all_reduce", "reduce_scatter") or size < 65536:
        return None
    return (hosts - 1) * size * (2 if collective == "all_reduce" else 1)


def bound_us(box, collective, size):
    """The time that the links allow; None without limited links."""
    if not box.rate or collective not in BOUNDED or size < 65536:
        return None
    hosts = len(box.hosts)
    moved = (hosts - 1) / hosts * size
    if collective == "all_reduce":
        moved = size if hosts == 2 else 2 * moved
    return moved / (box.rate / 8 * boxes.PAYLOAD)


def measure_box(options, box, per_host, recorder):
    libraries = Libraries(recorder, options.slice, 3, lambda cell: 2000)
    # The first of ours is what all others are compared with.
    sides = {"cohort": (options.ours[0], options.build),
             **{way: (way, options.build) for way in options.ours[1:]},
             **({"against": (options.ours[0], options.against)} if options.against else {}),
             **{peer: (peer, options.build) for peer in options.peers}}
    try:
        for side, (name, build) in sides.items():
            if available(name, build):
                libraries.start(side, per_host * len(box.hosts), commands_of(box, per_host, name, build))
            else:
                recorder.progress(f"{name} is not there and left out: bench/README.md says what it needs")
        for collective in options.collectives:
            for size in options.sizes:
                cell = {"collective": collective, "type": "float32", "bytes": size, "state": "hot"}
                libraries.calibrate(cell, ["heap"])
                for number in range(options.rounds):
                    before = box.losses() if options.queue else None
                    values = {side: us for (side, _), us in libraries.round_of(cell, number).items()}
                    if "cohort" not in values:
                        continue
                    row = {"layout": f"{len(box.hosts)}x{per_host}", "Mbit/s": box.rate or "free", **cell}
                    recorder.add(number, row, "us", {**values, "bound": bound_us(box, collective, size)})
                    if before:
                        for unit, begin, end in zip(("segments again", "time-outs"), before, box.losses()):
                            recorder.add(number, row, unit, {"cohort": end - begin})
                    moved = bytes_between(len(box.hosts), collective, size)
                    if options.cpu and moved:
                        recorder.add(number, row, "CPU s/GB", {side: us * 1e3 / moved
                                                               for (side, _), us in libraries.cpu_us.items()})
                recorder.progress(f"{len(box.hosts)}x{per_host}, {box.rate or 'free'}: {collective} of {size}")
    finally:
        libraries.stop()


def measure(options, recorder):
    boxes.check()
    for build in options.builds.values():
        groups.needed(build, "cohort", "cohort_peer")
    for hosts, per_host in options.layouts:
        for rate in options.rates:
            with boxes.Box(hosts, rate, options.queue, options.congestion_control) as box:
                measure_box(options, box, per_host, recorder)
