import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from smallest_ddp import train


def main_worker(gpu, ngpus_per_node, args):
    # The rank of a node becomes the rank of each of its processes.
    rank = args.rank * ngpus_per_node + gpu
    dist.init_process_group(args.dist_backend, init_method=args.dist_url, rank=rank, world_size=args.world_size)
    train(gpu)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=1)  # nodes
    parser.add_argument("--rank", type=int, default=0)  # of this node
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
    parser.add_argument("--dist-backend", default="nccl")
    parser.add_argument("--multiprocessing-distributed", action="store_true", required=True)
    args = parser.parse_args()
    ngpus_per_node = torch.cuda.device_count()
    args.world_size = ngpus_per_node * args.world_size
    mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
