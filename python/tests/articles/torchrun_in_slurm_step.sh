#!/bin/bash
torchrun --nproc_per_node=2 --nnodes="$SLURM_JOB_NUM_NODES" --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d \
  --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" smallest_ddp.py
