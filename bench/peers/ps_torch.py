"""A parameter server over torch's RPC, timed as ps_bench times Cohort's: the same options, the same figures.

Processes: the servers, with one thread each, and the workers.
"""
import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed.rpc as rpc

ROUNDS, FEW, UNDER_WAY = 7, 100, 4
STATE = {}


# ---- on a server ----

def make(rows, dim):
    STATE["table"] = torch.zeros(rows, dim)
    STATE["sums"] = torch.zeros(rows)


def pull(keys):
    return STATE["table"].index_select(0, keys)


def push(keys, gradients, lr=0.01, eps=1e-10):
    """Row-wise Adagrad."""
    sums = STATE["sums"]
    sums.index_add_(0, keys, gradients.square().mean(dim=1))
    scale = -lr / (sums.index_select(0, keys).sqrt() + eps)
    STATE["table"].index_add_(0, keys, gradients * scale.unsqueeze(1))


def make_dense(elements):
    STATE["dense"] = torch.zeros(elements)


def push_pull(gradients):
    return STATE["dense"].add_(gradients, alpha=-0.01)


def processor_seconds():
    return time.process_time()


# ---- on a worker ----

def rates(options, worker, meet):
    generator = torch.Generator().manual_seed(worker + 1)
    gradients = torch.full((options.batch, options.dim), 1e-3)

    def draw(count):
        return torch.randint(0, options.rows, (count,), generator=generator)

    def begin(what, keys):
        if what == "pull":
            return rpc.rpc_async("server0", pull, (keys,))
        return rpc.rpc_async("server0", push, (keys, gradients[: len(keys)]))

    share = options.seconds / ROUNDS / 4
    found = {name + what: [] for name in ("pull", "push") for what in ("", "_of_a_server_core", "_us")}
    for _ in range(ROUNDS):
        for what in ("pull", "push"):
            meet.wait()
            used, start, rows, under_way = rpc.rpc_sync("server0", processor_seconds), time.perf_counter(), 0, []
            while time.perf_counter() - start < share:
                under_way.append(begin(what, draw(options.batch)))
                rows += options.batch * options.workers
                if len(under_way) >= UNDER_WAY:
                    under_way.pop(0).wait()
            for one in under_way:
                one.wait()
            took = time.perf_counter() - start
            found[what].append(rows / took / 1e6)
            found[what + "_of_a_server_core"].append(rows / (rpc.rpc_sync("server0", processor_seconds) - used) / 1e6)
        for what in ("pull", "push"):
            meet.wait()
            start = time.perf_counter()
            while time.perf_counter() - start < share:
                keys = draw(min(FEW, options.batch))
                one = time.perf_counter()
                begin(what, keys).wait()
                found[what + "_us"].append((time.perf_counter() - one) * 1e6)
    figures = {name: statistics.median(values) for name, values in found.items()}
    for what in ("pull", "push"):
        figures[what + "_us_99"] = sorted(found[what + "_us"])[int(0.99 * (len(found[what + "_us"]) - 1))]
    return figures


def dense(options, worker, meet, over):
    slices = torch.full((options.dense,), 1e-3).chunk(options.servers)
    values = torch.empty(options.dense)
    parts = values.chunk(options.servers)
    times, start = [], time.perf_counter()
    while not over.value:
        meet.wait()
        one = time.perf_counter()
        answers = [rpc.rpc_async(f"server{i}", push_pull, (part,)) for i, part in enumerate(slices)]
        for part, answer in zip(parts, answers):
            part.copy_(answer.wait())
        meet.wait()
        times.append(time.perf_counter() - one)
        if worker == 0 and time.perf_counter() - start > options.seconds:
            over.value = 1
        meet.wait()
    return {"dense_ms": statistics.median(times[1:]) * 1e3 if times[1:] else 0}


def run(rank, options, store, meet, over, out):
    torch.set_num_threads(1)
    backend = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1 if rank < options.servers else 4, rpc_timeout=120,
                                              init_method=f"file://{store}",
                                              _transports=["uv"] if options.where == "tcp" else None)
    worker = rank - options.servers
    name = f"server{rank}" if worker < 0 else f"worker{worker}"
    rpc.init_rpc(name, rank=rank, world_size=options.servers + options.workers, rpc_backend_options=backend)
    if worker >= 0:
        if worker == 0:
            if options.dense:
                for i, part in enumerate(torch.empty(options.dense).chunk(options.servers)):
                    rpc.rpc_sync(f"server{i}", make_dense, (len(part),))
            else:
                rpc.rpc_sync("server0", make, (options.rows, options.dim))
        meet.wait()
        figures = dense(options, worker, meet, over) if options.dense else rates(options, worker, meet)
        if worker == 0:
            out.put(figures)
    rpc.shutdown()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", choices=["shared", "tcp"], default="shared")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--dense", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.dense:
        options.servers = 1
    context = multiprocessing.get_context("fork")
    meet, over, out = context.Barrier(options.workers), context.Value("i", 0), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, options, f"{folder}/store", meet, over, out), daemon=True)
                     for rank in range(options.servers + options.workers)]
        for process in processes:
            process.start()
        figures = out.get(timeout=150)
        for process in processes:
            process.join(timeout=20)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    sys.exit(main())
