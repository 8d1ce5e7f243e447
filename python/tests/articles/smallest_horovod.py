import torch
import horovod.torch as hvd

hvd.init()
print("rank {} of {}, local rank {} of {}".format(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()))
total = hvd.allreduce(torch.ones(4), op=hvd.Sum)
assert total.tolist() == [hvd.size()] * 4
