import sys

from pyspark.ml.torch.distributor import TorchDistributor
from mnist import test
from mnist_ddp import main_fn

if __name__ == "__main__":
    log_dir = sys.argv[1]
    output = TorchDistributor(num_processes=4, local_mode=False, use_gpu=True).run(main_fn, log_dir)
    print("output {!r}".format(output))
    test(log_dir, 3)
