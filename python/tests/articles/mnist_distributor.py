import sys

from cohort import Distributor
from mnist import test
from mnist_ddp import main_fn

if __name__ == "__main__":
    log_dir = sys.argv[1]
    loss = Distributor(num_processes=2, local_mode=True, use_gpu=False).run(main_fn, log_dir)
    print("returned loss {:.4f}".format(loss))
    test(log_dir, 3)
