"""The digits on two hosts of a box: steps per second as a function on Spark's executors, and as one over ssh. Needs root.

    bench/compare spark_hosts --rounds 5

A standalone cluster, a worker on each host; one driver on the first, with a warm session, calls `cohort.run(train, np=2,
on="spark")` and `cohort.run(train, np=2, hosts="h1:1,h2:1")` in turns. Each trains the digits (DDP over the backend "cohort",
32 images a rank) and times what is behind the first epoch.
"""
import json
import os
import re
import sys
import tempfile

from lib import boxes, groups

ROUNDS = 5
PEERS = []
PROGRAM = r"""
import json, os, pathlib, sys, time

DATA = sys.argv[3] if len(sys.argv) > 3 else ""


def train(data, epochs):
    import numpy, torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    def read(name):
        raw = pathlib.Path(data, name).read_bytes()
        shape = numpy.frombuffer(raw, ">i4", count=raw[3], offset=4)
        return numpy.frombuffer(raw, numpy.uint8, offset=4 + 4 * raw[3]).reshape(shape)

    def part(name):
        images = torch.from_numpy(read(name + "-images-idx3-ubyte") / numpy.float32(255)).unsqueeze(1)
        return images, torch.from_numpy(read(name + "-labels-idx1-ubyte").astype(numpy.int64))

    dist.init_process_group("cohort")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
                              torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = part("train")
    steps = 0
    for epoch in range(epochs):
        if epoch == 1:
            dist.barrier()
            begun, steps = time.perf_counter(), 0
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))[rank::size]
        for chosen in order[: len(labels) // size // 32 * 32].split(32):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            steps += 1
    dist.barrier()
    rate = steps / (time.perf_counter() - begun)
    images, labels = part("t10k")
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
    dist.destroy_process_group()
    return rate, accuracy


if __name__ == "__main__":
    import spark_support
    import cohort

    session = spark_support.start(sys.argv[1], host="h1", spark_executor_cores="1", spark_cores_max="2")
    ways = [("cohort", {"on": "spark"}), ("ssh", {"hosts": "h1:1,h2:1"})]
    for number in range(-1, int(sys.argv[2])):
        values = {}
        for side, where in ways if number % 2 else reversed(ways):
            values[side] = cohort.run(train, (DATA, 9), np=2, quiet=True, env={"OMP_NUM_THREADS": "1"}, **where)[0]
        print("ROUND", number, json.dumps(values), flush=True)
    session.stop()
"""


def options(parser):
    parser.add_argument("--limit", type=float, default=900, help="seconds for all [900]")


def measure(options, recorder):
    boxes.check()
    root = os.path.dirname(groups.BENCH)
    tests = [os.path.join(root, folder) for folder in ("python/tests", "extensions/spark/tests")]
    sys.path[:0] = tests
    import spark_support

    path = os.pathsep.join([os.path.join(os.path.abspath(options.build), "python"), *tests])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with boxes.Box(2, 0) as box, tempfile.TemporaryDirectory(prefix="cohort-spark-hosts-") as folder:
        program = os.path.join(folder, "driver.py")
        with open(program, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        cluster = spark_support.Standalone([(host, box.on(host, [])) for host in box.hosts], folder, cores=1,
                                           environment=environment, master=("h1", box.on("h1", [])))
        try:
            words = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, program, cluster.url,
                     str(options.rounds), os.path.join(root, "data", "digits")]
            said = groups.run(box.on("h1", words), limit=options.limit, cwd=folder)
        finally:
            cluster.end()
    for number, values in re.findall(r"ROUND (\d+) (.*)", said):
        found = json.loads(values)
        recorder.add(int(number), {"figure": "steps/s"}, "1/s", {side: one[0] for side, one in found.items()}, rate=True)
        recorder.add(int(number), {"figure": "accuracy"}, "", {side: one[1] for side, one in found.items()}, rate=True)
