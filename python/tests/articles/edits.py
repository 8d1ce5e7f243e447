"""Edits of the articles' programs for Cohort's name and a machine without a GPU; unedited they are what readers
type."""

import pathlib

ARTICLES = pathlib.Path(__file__).resolve().parent

# Text that is there, and its replacement.
EDITS = [
    ('"nccl"', '"cohort"'),
    # The backend's entry point belongs to an installed package, and to torch 2.5.
    ("import torch.distributed as dist", "import cohort, torch.distributed as dist"),
    ("from pyspark.ml.torch.distributor import TorchDistributor", "from cohort import Distributor as TorchDistributor"),
    ("use_gpu=True", "use_gpu=False"),
    # Not on Spark's workers, but on hosts that ssh reaches.
    ("local_mode=False", 'hosts="h1:2,h2:2"'),
    ("device_ids=[local_rank]", "device_ids=None"),
    (", output_device=local_rank", ""),
    ("torch.cuda.set_device(local_rank)", ""),
    ("torch.cuda.set_device(hvd.local_rank())", ""),
    (".cuda(local_rank)", ""),
    (".cuda()", ""),
    (".to(local_rank)", ""),
    ("train_one_epoch(ddp_model, local_rank,", 'train_one_epoch(ddp_model, "cpu",'),
    ("torch.cuda.device_count()", "2"),
    # torch.distributed.launch spells it so since torch 2.
    ('"--local_rank"', '"--local_rank", "--local-rank"'),
    # MNIST is fetched from the network.
    ('tf.keras.datasets.mnist.load_data(path="mnist-%d.npz" % hvd.rank())', '__import__("bars").load()'),
    # Open MPI has to be told of packages that are not installed.
    ("-x PATH ", "-x PATH -x PYTHONPATH "),
]


def put_into(folder, on_spark=False):
    """Writes the edited programs and scripts. An edit that finds nothing to do is an error: the list says what is needed.
    `on_spark`: the cluster of the program is one of Spark's, as the article has it."""
    texts = {path: path.read_text() for path in ARTICLES.iterdir()
             if path.suffix in (".py", ".sh", ".sbatch") and path != pathlib.Path(__file__).resolve()}
    for old, new in EDITS:
        if not any(old in text for text in texts.values()):
            raise AssertionError(f"no program has {old!r}, which is to become {new!r}")
        if on_spark and old == "local_mode=False":
            continue
        texts = {path: text.replace(old, new) for path, text in texts.items()}
    for path, text in texts.items():
        there = pathlib.Path(folder, path.name)
        there.write_text(text)
        there.chmod(path.stat().st_mode)
