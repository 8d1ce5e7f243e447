"""Predicts who clicks on what: a hybrid model, whose embeddings are on parameter servers and the rest on every rank.

    cohort run -np 2 --servers 2 examples/10-parameter-server/clicks.py
    cohort run -np 2 --servers 2 examples/10-parameter-server/clicks.py --async
    cohort run -np 2 examples/10-parameter-server/clicks.py --local         # the same with the embeddings on every rank

The clicks are made here: each user and each item is of one of four kinds, unknown to the model, and users like items
of their own kind. So the best AUC that any model can have is known.
"""

import argparse
import time

import cohort
from cohort import ps

KINDS, WIDTH = 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=1024, help="clicks per step, over all ranks")
    parser.add_argument("--server-memory", type=int, default=8, help="MiB that a server may take")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="no rank waits for another's rows")
    parser.add_argument("--bounded", type=int, default=0, help="ranks may be so many steps apart")
    parser.add_argument("--local", action="store_true", help="without servers")
    options = parser.parse_args()
    if cohort.role() == "server":
        ps.serve(memory=options.server_memory << 20)
    else:
        train(options)


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as F
    from cohort.nn import DistributedDataParallel
    from cohort.ps.torch import Embedding, HybridOptimizer

    class Model(torch.nn.Module):
        def __init__(self, users: torch.nn.Module, items: torch.nn.Module) -> None:
            super().__init__()
            self.users, self.items = users, items
            self.dense = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

        def forward(self, user, item, hour):
            alike = (self.users(user) * self.items(item)).sum(1)
            return alike + self.dense(torch.stack([hour.sin(), hour.cos()], 1)).squeeze(1)

    def clicks(count: int, seed: int):
        random = torch.Generator().manual_seed(seed)
        user = torch.randint(options.users, (count,), generator=random)
        item = torch.randint(options.items, (count,), generator=random)
        hour = torch.rand(count, generator=random) * 6.2832
        likely = torch.sigmoid(3.0 * (user % KINDS == item % KINDS) - 1.5 + 0.5 * hour.sin())
        return user, item, hour, torch.rand(count, generator=random) < likely, likely

    def auc(score: torch.Tensor, clicked: torch.Tensor) -> float:
        ranks = score.double().argsort().argsort().double() + 1
        ones, zeros = int(clicked.sum()), int((~clicked).sum())
        return float((ranks[clicked].sum() - ones * (ones + 1) / 2) / (ones * zeros))

    cohort.init()
    rank, size = cohort.rank(), cohort.size()
    torch.manual_seed(1)
    if options.local:
        users, items = torch.nn.Embedding(options.users, WIDTH), torch.nn.Embedding(options.items, WIDTH)
        for rows in (users, items):
            torch.nn.init.normal_(rows.weight, 0, 0.03)
        tables = torch.optim.Adagrad([users.weight, items.weight], lr=0.05)
    else:
        client = ps.connect()
        rule = ps.Async() if options.asynchronous else ps.Bounded(options.bounded) if options.bounded else ps.Sync()
        users, items = (
            Embedding(
                client.table(name, WIDTH, optimizer=ps.Adagrad(lr=0.05), initializer=ps.normal(0, 0.03), consistency=rule)
            )
            for name in ("users", "items")
        )
    net = Model(users, items)
    model = DistributedDataParallel(net)  # the embeddings of servers are no parameters
    dense = torch.optim.Adam(net.dense.parameters(), lr=0.01)
    optimizers = [dense, tables] if options.local else [HybridOptimizer(dense, tables=[users, items])]

    begin = time.perf_counter()
    for step in range(options.steps):
        user, item, hour, clicked, _ = clicks(options.batch_size // size, step * size + rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(user, item, hour), clicked.float())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    seconds = time.perf_counter() - begin
    cohort.world().barrier()
    if rank == 0:
        user, item, hour, clicked, likely = clicks(50_000, 2**40)
        with torch.no_grad():
            found = auc(net(user, item, hour), clicked)
        print(f"AUC {found:.4f}, at best {auc(likely, clicked):.4f}; {options.steps * options.batch_size / seconds:.0f} clicks/s")
        if not options.local:
            stats = [table.stats() for table in client.tables]
            held = sum(one["bytes"] for one in stats) / 2**20
            print(f"{sum(one['rows'] for one in stats)} rows of {held:.1f} MiB on {len(stats[0]['rows_of_servers'])} servers")
    if not options.local:
        client.leave()


if __name__ == "__main__":
    main()
