import argparse
import os

import torch.distributed as dist

from smallest_ddp import train

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)  # torch.distributed.launch gives it
parser.add_argument("--init_method", default="env://")
parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", -1)))
parser.add_argument("--world_size", type=int, default=int(os.environ.get("WORLD_SIZE", -1)))
args = parser.parse_args()

dist.init_process_group("nccl", init_method=args.init_method, rank=args.rank, world_size=args.world_size)
train(args.local_rank)
dist.destroy_process_group()
