"""Programs of torch's model parallelism, over any backend: what they compute is kept, for two backends to be compared.

usage: parallel_programs.py run BACKEND FOLDER [NAME...]   as a rank, with torch's variables or under `cohort run`
       parallel_programs.py compare FOLDER RANKS           what "cohort" gave with what "gloo" did; status 1 where they differ
"""

import datetime
import json
import os
import pathlib
import sys
import tempfile
import traceback
import unittest
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import cohort

SECONDS = 60
WIDTH = 16
PROGRAMS = {}
Skip = unittest.SkipTest


def program(ranks=2, torch=2):
    """Registers a program for at least so many ranks and this version of torch. It gives tensors, all of which are
    compared."""
    return lambda function: PROGRAMS.setdefault(function.__name__, (function, ranks, torch))[0]


def mesh_of(shape, names):
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


def batch(count=8, of=0, seed=3):
    """The inputs of rank `of`; targets."""
    generator = torch.Generator().manual_seed(seed + of)
    return torch.randn(count, WIDTH, generator=generator), torch.randint(0, 4, (count,), generator=generator)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state_of(net, gradients=False):
    found = [whole(one.grad if gradients else one.detach()) for one in net.parameters()]
    return [one.clone() for one in found]


def train(net, optimizer, steps=3, of=None, clip=None, first=0):
    """The norms of the gradients, where they are clipped."""
    norms = []
    for step in range(first, steps):
        inputs, labels = batch(of=dist.get_rank() if of is None else of, seed=10 * step)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        if clip:
            norms.append(whole(nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optimizer.step()
    return norms


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


# --- tensor parallelism ---


def parallelized(net, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


@program()
def tensor_parallel():
    net = parallelized(seeded(Net), mesh_of((dist.get_world_size(),), ("tp",)))
    train(net, adam(net), of=0)
    return state_of(net)


@program()
def vocabulary_parallel():
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = seeded(lambda: nn.Sequential(nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 8)))
    mesh = mesh_of((dist.get_world_size(),), ("tp",))
    parallelize_module(net, mesh, {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())})
    found = net(torch.arange(12))
    found.pow(2).sum().backward()
    return [found.detach(), *state_of(net, gradients=True)]


@program()
def sequence_parallel():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, inputs):
            return self.down(torch.relu(self.up(self.norm(inputs))))

    mesh = mesh_of((dist.get_world_size(),), ("tp",))
    net = seeded(Inner)
    parallelize_module(net, mesh, {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    })  # fmt: skip
    inputs = batch(16)[0].view(2, 8, WIDTH)
    found = net(distribute_tensor(inputs, mesh, [Shard(1)]))
    found.full_tensor().pow(2).sum().backward()
    return [whole(found.detach()), *state_of(net, gradients=True)]


@program()
def loss_parallel():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel import loss_parallel as parallel_loss

    mesh = mesh_of((dist.get_world_size(),), ("tp",))
    head = parallelize_module(seeded(lambda: nn.Linear(WIDTH, 12)), mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    inputs, labels = batch()
    with parallel_loss():
        loss = F.cross_entropy(head(inputs), labels)
        loss.backward()
    return [whole(loss.detach()), *state_of(head, gradients=True)]


@program()
def redistribute():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of((dist.get_world_size(),), ("x",))
    found = []
    for rows, columns in ((8, 12), (7, 5), (1, 3)):
        value = torch.arange(float(rows * columns)).view(rows, columns)
        by_rows = distribute_tensor(value, mesh, [Shard(0)])
        by_columns = by_rows.redistribute(mesh, [Shard(1)])
        assert torch.equal(by_columns.full_tensor(), value)
        found += [by_columns.to_local(), by_columns.redistribute(mesh, [Replicate()]).to_local()]
        for wanted in Shard(0), Shard(1), Replicate():
            found.append(DTensor.from_local(value * (dist.get_rank() + 1), mesh, [Partial()]).redistribute(mesh, [wanted]).to_local())
    return found


# --- pipelines ---


def pipeline(name, stages_of, dp=None, micro_batches=8):
    """Trains over all ranks, or over each column of a mesh (pp, dp). `stages_of(rank, ranks)`: which stages a rank has."""
    from torch.distributed import pipelining

    kind = getattr(pipelining, f"Schedule{name}", None)
    if kind is None:
        raise Skip(f"this torch ({torch.__version__}) has no Schedule{name}")
    group = dist.group.WORLD if dp is None else dp.get_group("pp")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = stages_of(rank, ranks)
    count = len(mine) * ranks
    inputs, labels = batch(16)
    layers = [seeded(Block, seed=stage) for stage in range(count)]  # every rank makes all, and keeps its own
    head = nn.Linear(WIDTH, 4) if count - 1 in mine else None
    if head is not None:
        layers[-1] = nn.Sequential(layers[-1], head)
    kept = [layers[stage] for stage in mine]
    if dp is not None:
        from torch.distributed.fsdp import fully_shard

        for layer in kept:
            fully_shard(layer, mesh=dp["dp"])
    stages = [pipelining.PipelineStage(layer, stage, count, torch.device("cpu"), group=group) for stage, layer in zip(mine, kept)]
    more = {"loss_fn": F.cross_entropy}
    schedule = kind(stages if len(mine) > 1 or "Interleaved" in name else stages[0], micro_batches, **more)
    optimizer = torch.optim.SGD([one for layer in kept for one in layer.parameters()], lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = []
        if 0 in mine:
            # With ZBV, the first rank has the last stage, too.
            schedule.step(inputs, **({"target": labels, "losses": losses} if count - 1 in mine else {}))
        elif count - 1 in mine:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        found += [loss.detach().clone() for loss in losses]
    for layer in kept:
        found += [*state_of(layer), *state_of(layer, gradients=True)]
    return found


def one_of(rank, ranks):
    return [rank]


def two_of(rank, ranks):
    return [rank, rank + ranks]


def v_of(rank, ranks):
    return [rank, 2 * ranks - 1 - rank]


for _name, _stages in {"GPipe": one_of, "1F1B": one_of, "Interleaved1F1B": two_of, "LoopedBFS": two_of,
                       "InterleavedZeroBubble": two_of, "ZBVZeroBubble": v_of, "DualPipeV": v_of}.items():  # fmt: skip
    PROGRAMS[f"pipeline_{_name}"] = (lambda name=_name, stages=_stages: pipeline(name, stages)), 2, 2


@program(ranks=4)
def pipeline_of_sharded_stages():
    size = dist.get_world_size()
    return pipeline("1F1B", one_of, dp=mesh_of((2, size // 2), ("pp", "dp")))


# --- sharded parameters ---


def sharded(shape, names, **options):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(shape, names)
    net = seeded(Net)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


@program()
def fsdp2():
    net = sharded((dist.get_world_size(),), ("dp",))
    norms = train(net, adam(net), clip=0.1)
    kept = sharded((dist.get_world_size(),), ("dp",), reshard_after_forward=False)
    train(kept, torch.optim.SGD(kept.parameters(), lr=0.1))
    return [*norms, *state_of(net), *state_of(kept), *state_of(kept, gradients=True)]


@program()
def fsdp2_in_bfloat16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    net = sharded((dist.get_world_size(),), ("dp",), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(net, adam(net))
    return state_of(net)


@program()
def fsdp2_accumulates():
    net = sharded((dist.get_world_size(),), ("dp",))
    for step in range(3):
        net.set_requires_gradient_sync(step == 2)
        inputs, labels = batch(of=dist.get_rank(), seed=step)
        F.cross_entropy(net(inputs), labels).backward()
    return state_of(net, gradients=True)


@program()
def fsdp2_in_memory_of_the_group():
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    net = seeded(lambda: nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, 2048), nn.Linear(2048, WIDTH)))))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if not hasattr(net, "set_allocate_memory_from_process_group_for_comm"):
        raise Skip(f"this torch ({torch.__version__}) does not ask a group for memory")
    group = dist.group.WORLD
    if dist.get_backend() != "cohort":  # which has none
        train(net, adam(net))
        return state_of(net)
    for layer in net:
        layer.set_allocate_memory_from_process_group_for_comm(True)
    with tempfile.TemporaryDirectory() as folder:
        record = cohort.track.RunRecord(os.path.join(folder, "run.jsonl"), world_size=dist.get_world_size())
        optimizer = adam(net)
        train(net, optimizer, steps=1)
        blocks = len(group._pool._blocks)
        record.observe(group.communicator)
        train(net, optimizer, steps=3, first=1)
        assert len(group._pool._blocks) == blocks, "blocks are not used again"
        record.write_communication()
        with open(record.file) as file:
            operations = json.loads(file.readlines()[-1])["operations"]
    if group.communicator.cross_size() == 1:
        for name in "all_gather", "reduce_scatter":
            assert operations[name]["zero_copy"] == operations[name]["count"] > 0, operations
    return state_of(net)


@program()
def hybrid_sharded():
    net = sharded((2, dist.get_world_size() // 2), ("replicas", "shards"))
    norms = train(net, adam(net), clip=0.1)
    return [*norms, *state_of(net)]


@program(ranks=4)
def tensor_parallel_and_sharded():
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, dist.get_world_size() // 2), ("dp", "tp"))
    net = parallelized(seeded(Net), mesh["tp"])
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    train(net, adam(net), of=dist.get_rank(mesh.get_group("dp")))
    return state_of(net)


@program()
def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(seeded(Net), device_id=torch.device("cpu"), use_orig_params=True)
    train(net, adam(net))
    with FullyShardedDataParallel.summon_full_params(net):
        return state_of(net)


@program(torch=1)
def zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    for view in False, True:
        net = DDP(seeded(Net))
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, parameters_as_bucket_view=view, lr=0.01)
        train(net, optimizer)
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            found += [entry["exp_avg_sq"] for entry in optimizer.state_dict()["state"].values()]
        found += state_of(net)
    return found


@program(torch=1)
def hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    def power(**options):
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, **options)

    local = post_localSGD_hook.PostLocalSGDState(None, subgroup=dist.new_group(), start_localSGD_iter=1)
    found = []
    for state, hook in (
        (power(), powerSGD_hook.powerSGD_hook),
        (power(use_error_feedback=False, warm_start=False), powerSGD_hook.powerSGD_hook),
        (local, post_localSGD_hook.post_localSGD_hook),
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ):
        net = DDP(seeded(Net))
        net.register_comm_hook(state, hook)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), steps=4)
        found += state_of(net)
    return found


@program(torch=1)
def model_averaging():
    """torch's own local steps: post_localSGD_hook with its optimizer, and averages of averages."""
    import torch.distributed.algorithms.model_averaging.averagers as averagers
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    size = dist.get_world_size()
    found = []
    for averager in (
        averagers.PeriodicModelAverager(period=2, warmup_steps=1),
        HierarchicalModelAverager(OrderedDict([(2, 2), (4, size)] if size > 2 else [(2, size)]), warmup_steps=1),
    ):
        net = DDP(seeded(Net))
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
        net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
        train(net, optimizer, steps=7)
        found += state_of(net)
    return found


# --- checkpoints ---


@program()
def checkpoints():
    import shutil

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rank, size = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(dir=os.environ.get("SHARED_FOLDER")) if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)

    def state(net, optimizer):
        model, moments = get_state_dict(net, optimizer)
        return {"net": model, "optimizer": moments}

    def load(net, at, **how):
        optimizer = adam(net)
        wanted = state(net, optimizer)
        dcp.load(wanted, checkpoint_id=f"{folder[0]}/{at}", **how)
        set_state_dict(net, optimizer, model_state_dict=wanted["net"], optim_state_dict=wanted["optimizer"])
        return [*state_of(net), *(whole(entry["exp_avg"]) for entry in optimizer.state.values())]

    try:
        net = sharded((size,), ("dp",))
        optimizer = adam(net)
        train(net, optimizer)
        dcp.save(state(net, optimizer), checkpoint_id=f"{folder[0]}/sharded")
        dcp.async_save(state(net, optimizer), checkpoint_id=f"{folder[0]}/later").result()
        first = [*state_of(net), *(whole(entry["exp_avg"]) for entry in optimizer.state.values())]
        found = [first]
        for at in "sharded", "later":
            again = sharded((size,), ("dp",))
            found.append(load(again, at))
        # By other layouts: replicas of shards, and half of the ranks.
        found.append(load(sharded((2, size // 2), ("replicas", "shards")), "sharded"))
        half = dist.new_group(list(range(size // 2)))
        if rank < size // 2:
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.DeviceMesh.from_group(half, "cpu")
            found.append(load(fully_shard(seeded(Net, seed=5), mesh=mesh), "sharded", process_group=half))
        for one in found[1:]:
            for a, b in zip(first, one):
                assert torch.equal(a, b)
        return first
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])


# --- functional collectives ---


@program()
def functional_collectives():
    import torch.distributed._functional_collectives as functional

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine = batch(2 * size, of=rank)[0]
    found = []
    # To rank r go r + 1 rows, from each.
    rows = batch(size * (size + 1) // 2, of=rank)[0]
    found.append(functional.all_to_all_single(rows, [rank + 1] * size, [r + 1 for r in range(size)], group))
    found += functional.all_gather_into_tensor_coalesced([mine, mine[:2] * 2], group)
    found += functional.reduce_scatter_tensor_coalesced([mine, mine * 2], "sum", [0, 0], group)
    found += functional.all_reduce_coalesced([mine, mine[:1]], "avg" if dist.get_backend() == "cohort" else "sum", group)
    if dist.get_backend() != "cohort":  # Gloo has no average
        found[-2:] = [one / size for one in found[-2:]]
    found.append(functional.all_gather_tensor(mine, 1, group))
    found.append(functional.reduce_scatter_tensor(mine.t().contiguous(), "sum", 1, group))
    if hasattr(functional, "permute_tensor"):
        found.append(functional.permute_tensor(mine.flatten(), [(r + 1) % size for r in range(size)], group))
    for call in (
        lambda one: functional.all_gather_tensor_autograd(one, 0, group),
        lambda one: functional.reduce_scatter_tensor_autograd(one, "sum", 0, group),
        lambda one: functional.all_to_all_single_autograd(one, None, None, group),
    ):
        leaf = mine.clone().requires_grad_()
        out = call(leaf)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        found += [out.detach(), leaf.grad]
    return [one + 0 for one in found]  # out of the wrapper that waits


@program()
def differentiable_collectives():
    from torch.distributed.nn import functional

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = batch(size, of=rank)[0]
    found = []
    calls = [
        lambda one: functional.all_reduce(one),
        lambda one: torch.stack(functional.all_gather(one)),
        lambda one: functional.broadcast(one, 0),
        lambda one: functional.reduce_scatter(torch.empty(WIDTH), list(one.unbind())),
        lambda one: functional.all_to_all_single(torch.empty_like(one), one),
        lambda one: torch.stack(functional.all_to_all(list(torch.empty_like(one).unbind()), list(one.unbind()))),
    ]
    for call in calls:
        leaf = mine.clone().requires_grad_()
        out = call(leaf)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        found += [out.detach(), leaf.grad]
    return found


# --- running and comparing ---


def run(backend, folder, names=()):
    """Leaves {name: tensors, or why there are none} of this rank in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=SECONDS))
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for name in names or PROGRAMS:
        function, ranks, version = PROGRAMS[name]
        try:
            if size < ranks:
                raise Skip(f"for {ranks} ranks or more")
            if int(torch.__version__.split(".")[0]) < version:
                raise Skip(f"torch {torch.__version__} does not have it, or cannot import it under Python 3.11")
            results[name] = [tensor.detach().clone() for tensor in function()]
        except (Skip, ImportError) as error:
            results[name] = f"skipped: {error}"
        except Exception:
            results[name] = traceback.format_exc()
            break  # the ranks may no longer be at the same place
    torch.save(results, pathlib.Path(folder, f"{backend}-{rank}.pt"))
    dist.destroy_process_group()


def compare(folder, size):
    """Returns the differences, in words, and {name: why} of what was skipped. A sum of two does not depend on the
    order, and a pipeline adds nothing up over ranks: those are equal to the bit."""
    differing, skipped, compared = [], {}, 0
    for rank in range(size):
        ours, theirs = (torch.load(pathlib.Path(folder, f"{backend}-{rank}.pt")) for backend in ("cohort", "gloo"))
        for name in theirs.keys() | ours.keys():
            one, other = ours.get(name, "not reached"), theirs.get(name, "not reached")
            if isinstance(one, str) or isinstance(other, str):
                if one == other and one.startswith("skipped"):
                    skipped[name] = one
                else:
                    differing.append(f"rank {rank}, {name}: {one if isinstance(one, str) else 'gloo: ' + str(other)}")
                continue
            exact = size == 2 or (name.startswith("pipeline") and "sharded" not in name)
            half = name in ("hooks", "fsdp2_in_bfloat16")
            compared += 1
            for number, (a, b) in enumerate(zip(one, other)):
                same = torch.equal(a, b) if exact else torch.allclose(a, b, *((1e-2, 1e-2) if half else (1e-4, 1e-5)))
                if a.dtype != b.dtype or not same:
                    differing.append(f"rank {rank}, {name}, tensor {number}: by {(a - b).abs().max():g} of {b.abs().max():g}")
            if len(one) != len(other):
                differing.append(f"rank {rank}, {name}: {len(one)} tensors and {len(other)}")
    return differing, skipped, compared


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        differing, skipped, compared = compare(sys.argv[2], int(sys.argv[3]))
        print(*differing, *skipped.values(), f"compared {compared}", sep="\n")
        sys.exit(bool(differing))
