#!/usr/bin/env python3
"""Times operations of cohort.tensorflow within a tf.function, and TensorFlow's MultiWorkerMirroredStrategy (its ring,
over gRPC), in turns, in the same processes:

    cohort run -np 2 -- python bench/hvd_tensorflow.py [--steps N] [--no-peer]
    python bench/hvd_tensorflow.py                      # a world of one: what 60 gradients of 4 KB cost beside doing nothing

Medians in microseconds, of the call as a whole; the slowest rank's.
"""

import argparse
import json
import os
import socket
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import cohort.tensorflow as hvd
from cohort.tensorflow._gradients import reduce_gradients

SIZES = ((4, 300), (256 << 10, 200), (4 << 20, 100), (64 << 20, 20))  # bytes, calls


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_peer():
    """TensorFlow's strategy over the same ranks, by its ring."""
    workers = [f"127.0.0.1:{port}" for port in hvd.allgather_object(free_port())]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": hvd.rank()}}
    )
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)


def peer_step(strategy):
    def reduce(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x + 1.0)

    return tf.function(lambda x: strategy.run(reduce, args=(x,)))


def medians(steps, calls):
    """Median time of each function, called in turns; the slowest rank's, in microseconds."""
    taken = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(calls):
        for name, step in steps.items():
            hvd.barrier()
            began = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - began)
    own = {name: statistics.median(times) * 1e6 for name, times in taken.items()}
    return {name: max(each[name] for each in hvd.allgather_object(own)) for name in own}


def gradients(count=60, elements=1024):
    """60 gradients of 4 KB: computed alone, and reduced as well."""
    variables = [tf.Variable(tf.ones([elements])) for _ in range(count)]
    names = [f"gradient.{i}" for i in range(count)]

    def compute(x):
        return [v * x for v in variables]

    nothing = tf.function(lambda x: [g + 1.0 for g in compute(x)])
    reduced = tf.function(lambda x: [g + 1.0 for g in reduce_gradients(compute(x), names)])
    x = tf.constant(2.0)
    return {"nothing": lambda: nothing(x), "reduced": lambda: reduced(x)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, default=1.0, help="times the usual number of calls")
    parser.add_argument("--no-peer", action="store_true")
    asked = parser.parse_args()
    hvd.init()
    strategy = make_peer() if hvd.size() > 1 and not asked.no_peer else None
    lines = []
    seen = medians(gradients(), int(300 * asked.steps))
    lines.append(f"60 x 4 KiB: nothing {seen['nothing']:.0f} us, reduced {seen['reduced']:.0f} us")
    if hvd.size() > 1:
        peer = None if strategy is None else peer_step(strategy)
        for size, calls in SIZES:
            x = tf.ones([size // 4])
            empty = tf.function(lambda x: x + 1.0)
            ours = tf.function(lambda x: hvd.allreduce(x + 1.0, op=hvd.Sum, name="bench"))
            steps = {"call": lambda: empty(x), "cohort": lambda: ours(x)}
            if peer is not None:
                steps["mwms"] = lambda: peer(x)
            seen = medians(steps, max(5, int(calls * asked.steps)))
            lines.append(f"{size:>9} B: " + ", ".join(f"{name} {taken:.0f} us" for name, taken in seen.items()))
    if hvd.rank() == 0:
        print(f"TensorFlow {tf.__version__}, {hvd.size()} ranks")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
