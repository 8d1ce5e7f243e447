"""A training step: cohort.nn, torch's DDP over "cohort", Cohort's DDP in C++, against torch's DDP over Gloo.

    bench/compare training --ranks 2,4 --models small,digits,resnet,mlp
    bench/compare training --rates 0,1000               half of the ranks on each of two hosts of a box; needs root
    bench/compare training --against OLD/build/release --models digits,mlp
    bench/compare training --ways checked,same --models mlp,layers --batch 32 --peers none

    small   64 -> 128 -> 64 -> 10, 17 thousand parameters, batch 16: the latency of a step
    digits  the network of examples/01-digits, 1.2 million parameters, batch 32
    resnet  ResNet-18 for images of 32 x 32, 11 million parameters in 62 tensors, random data, batch 8
    mlp     25 million parameters, batch 4: the bandwidth
    layers  25 million parameters in 300 small layers, batch 128

    nn       cohort.nn.DistributedDataParallel
    cohort   torch's DistributedDataParallel on the backend "cohort"
    c++      cohort::nn::DistributedDataParallel (peers/ddp_step.cpp): the same model mlp; started anew in each round
    checked  cohort.nn's with non_finite="raise"; "unchecked" in its row is nn
    same     a call of require_same_parameters

The rows of a way compare it with torch's DDP on Gloo, with gradient_as_bucket_view=True (view), and with the model
unwrapped (plain), whose `ahead` is the part of a step that is not communication; "exposed" is what a step takes longer
than that. All but c++ live in the same processes, and each round takes steps of each, so that what else the machine
does meets all alike. Times are of the slowest rank; "CPU ms" of all threads, the mean of the ranks. One thread for each
rank. Fails if sides have not trained alike. Needs torch 2.x or 1.13 with Gloo.
"""
import json
import os
import statistics
import sys
import tempfile

from lib import boxes, groups, records, worker

ROUNDS = 9
PEERS = ["gloo", "view"]
WARMUP = 3
# By model: samples per rank and step, and how many steps are timed at once.
MODELS = {"small": (16, 20), "digits": (32, 2), "resnet": (8, 1), "mlp": (4, 1), "layers": (128, 1)}
WAYS = ["nn", "cohort", "c++", "checked", "same"]


def options(parser):
    parser.add_argument("--ranks", type=records.list_of(int), default=[2, 4])
    parser.add_argument("--rates", type=records.list_of(int), help="between two hosts, in Mbit/s, 0: free [one host]")
    parser.add_argument("--models", type=records.list_of(str, list(MODELS)), default=["small", "digits", "resnet", "mlp"])
    parser.add_argument("--ways", type=records.list_of(str, WAYS), default=["nn", "cohort", "c++"])
    parser.add_argument("--batch", type=int, help="samples of a rank and step [the model's]")
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose torch is measured")


def group_of(options, build, side, ranks, sides, box):
    places = ["-np", str(ranks)] if box is None else ["-H", ",".join(f"{host}:{ranks // 2}" for host in box.hosts)]
    environment = {**groups.python_path(build), "GLIBC_TUNABLES": groups.KEEP_MEMORY}

    def commands(folder):
        command = groups.cohort_run(build, *places, "--run-dir", f"{folder}/job", "--", options.python,
                                    f"{groups.BENCH}/peers/steps.py", folder, ",".join(sides))
        return [command if box is None else box.on("h1", command)]
    return groups.Group(side, ranks, commands, {**environment, **({"GLOO_SOCKET_IFNAME": "eth0"} if box else {})})


def in_cpp(build, ranks, batch, recorder):
    """Milliseconds of a step, of one without communication, and of the processor."""
    with tempfile.TemporaryDirectory(prefix="cohort-step-") as folder:
        groups.run(groups.cohort_run(build, "-np", str(ranks), "--run-dir", f"{folder}/job", "--",
                                     groups.program(build, "ddp_step"), "--batches", str(batch), "--out", f"{folder}/out"),
                   {"GLIBC_TUNABLES": groups.KEEP_MEMORY}, 180)
        with open(os.path.join(folder, "out"), encoding="utf-8") as file:
            found = json.load(file)["batches"][0]
    if not found["replicas_equal"] or not found["last_loss"] < found["first_loss"]:
        recorder.fail(f"c++, {build}: replicas differ, or the loss does not fall: {found['first_loss']}, {found['last_loss']}")
    return {"ms": statistics.median(found["sync_ms"]), "plain": statistics.median(found["plain_ms"]),
            "cpu_ms": statistics.median(found["sync_cpu_ms"])}


def rows_of(way, number, cell, found, options, recorder):
    """`found`: (build's side, side of the step) -> {"ms", "cpu_ms"}."""
    def row(unit, of):
        values = {side: of(found[side, way]) for side in options.builds if (side, way) in found}
        if "cohort" not in values:
            return
        if way == "checked":
            values["unchecked"] = of(found["cohort", "nn"])
        elif way != "same":
            values.update({peer: of(found["cohort", peer]) for peer in options.peers})
            if unit == "ms":
                values["plain"] = plain
        recorder.add(number, {**cell, "way": way}, unit, values)

    plain = found.get(("cohort", way), {}).get("plain") or found.get(("cohort", "plain"), {}).get("ms")
    row("ms", lambda one: one["ms"])
    if way not in ("checked", "same"):
        row("exposed ms", lambda one: one["ms"] - (one.get("plain") or plain))
    row("CPU ms", lambda one: one["cpu_ms"])


def measure_model(options, model, teams, turns, cell, recorder):
    batch, repeat = options.batch or MODELS[model][0], MODELS[model][1]
    cell = {"model": model, "batch": batch, **cell}
    for team in teams.values():
        parameters = team.ask("model", model, batch)[0]["parameters"]
    recorder.progress(f"{model}, {parameters / 1e6:.2f} million parameters, {cell}")
    for number in range(-WARMUP, options.rounds):
        found = {}
        for side, step in records.rotated(turns, number):
            answers = teams[side].ask("step", step, repeat)
            found[side, step] = {"ms": groups.slowest(answers, "ms"), "cpu_ms": worker.mean(answers, "cpu_ms")}
        if number < 0:
            continue
        if "c++" in options.ways and model == "mlp" and cell["links"] == "one host":
            for side in records.rotated(options.builds, number):
                found[side, "c++"] = in_cpp(options.builds[side], cell["ranks"], batch, recorder)
        for way in options.ways:
            rows_of(way, number, cell, found, options, recorder)
    for side, team in teams.items():
        for differing in team.ask("equal")[0]["differ"]:
            recorder.fail(f"{model} after training: {side}'s {differing} differs")


def measure_ranks(options, ranks, box, recorder):
    ours = [way for way in ("nn", "cohort", "checked") if way in options.ways
            or (way == "nn" and {"checked", "same"} & set(options.ways))]
    sides = {side: ours + (options.peers + ["plain"] if side == "cohort" else []) for side in options.builds}
    turns = [(side, step) for side in sides for step in sides[side] + ["same"] * ("same" in options.ways)]
    teams = {}
    try:
        for side, build in options.builds.items():
            teams[side] = group_of(options, build, side, ranks, sides[side], box)
        for model in options.models:
            links = "one host" if box is None else f"2 hosts, {box.rate or 'free'}"
            measure_model(options, model, teams, turns, {"ranks": ranks, "links": links}, recorder)
    finally:
        for team in teams.values():
            team.stop()


def measure(options, recorder):
    for build in options.builds.values():
        groups.needed(build, "cohort", *(["ddp_step"] if "c++" in options.ways and "mlp" in options.models else []))
    if not groups.has_torch(options.python):
        sys.exit(f"bench/compare training: {options.python} has no torch.distributed -- give --python one that has")
    if options.rates is not None:
        boxes.check()
    for rate in [None] if options.rates is None else options.rates:
        for ranks in options.ranks:
            if rate is None:
                measure_ranks(options, ranks, None, recorder)
            else:
                with boxes.Box(2, rate) as box:
                    measure_ranks(options, ranks, box, recorder)
