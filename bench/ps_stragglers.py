#!/usr/bin/env python3
"""The cost of a slow worker to a parameter server's others, by consistency. Workers are threads that sleep as their work.

    python3 bench/ps_stragglers.py [--workers 8] [--seconds 10] [--rounds 3] [--step 0.02]

always   one worker takes five times as long for each step
bursts   every so many steps (--every, 8) another worker takes five times as long, for one step: it falls four behind

Printed: steps per second of a worker that is not slow itself, as a share of what it is when nobody is slow. (Of a worker in
bursts, the time that its own slow steps take longer is left out.) And the oldest that was read, in clocks.
"""

import argparse
import os
import statistics
import threading
import time

import numpy

from cohort import ps

RULES = {
    "Sync": ps.Sync(),
    "Bounded(4)": ps.Bounded(4),
    "Async": ps.Async(),
}
SLOW = 5


def speed(options, rule, trouble, name):
    """Steps per second of workers that are not slow, median; and the oldest pull."""
    servers = [ps.Server(f"@{name}-{number}") for number in range(2)]
    rates, oldest = {}, []
    begin = threading.Barrier(options.workers)

    def work(worker):
        with ps.connect([server.endpoint for server in servers], worker, options.workers) as client:
            table = client.table("t", 16, optimizer=ps.Sgd(lr=0.01), consistency=rule)
            keys = numpy.random.default_rng(worker).integers(0, 1000, 100)
            gradients = numpy.ones((100, 16), numpy.float32)
            begin.wait()
            start, steps, own = time.monotonic(), 0, 0.0
            while time.monotonic() - start < options.seconds:
                table.pull(keys)
                slow = trouble == "always" and worker == 0
                slow |= trouble == "bursts" and steps % (options.every * options.workers) == options.every * worker + 1
                time.sleep(options.step * (SLOW if slow else 1))
                own += options.step * (SLOW - 1) if slow else 0
                table.push(keys, gradients)
                client.clock()
                steps += 1
            if not (trouble == "always" and worker == 0):
                rates[worker] = steps / (time.monotonic() - start - own)
            oldest.append(max(table.stats()["staleness"]))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.close()
    return statistics.median(rates.values()), max(oldest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10, help="of each of the nine runs of a round")
    parser.add_argument("--rounds", type=int, default=3, help="shares are taken within a round; medians (least to most)")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--every", type=int, default=8, help="steps from one burst to the next")
    options = parser.parse_args()
    found = {name: [] for name in RULES}
    for round_number in range(options.rounds):
        for number, (name, rule) in enumerate(RULES.items()):
            place = f"stragglers-{os.getpid()}-{round_number}-{number}"
            alone, _ = speed(options, rule, "none", f"{place}-none")
            always, old_always = speed(options, rule, "always", f"{place}-always")
            bursts, old_bursts = speed(options, rule, "bursts", f"{place}-bursts")
            found[name].append((alone, always / alone, bursts / alone, old_always, old_bursts))
    print("| | steps/s when nobody is slow | one always slow | bursts in turn | oldest pull: always, bursts |")
    print("|---|---|---|---|---|")
    for name, rounds in found.items():
        alone, always, bursts, old_always, old_bursts = (list(column) for column in zip(*rounds))
        shares = (f"{statistics.median(one):.0%} ({min(one):.0%} to {max(one):.0%})" for one in (always, bursts))
        print(f"| `{name}` | {statistics.median(alone):.1f} | {' | '.join(shares)} | {max(old_always)}, {max(old_bursts)} |")


if __name__ == "__main__":
    main()
