"""ChainerMN's names for PyTorch over Cohort: `import cohort.chainermn as chainermn`.

    comm = chainermn.create_communicator("naive")
    optimizer = chainermn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm).setup(model)
    train = chainermn.scatter_dataset(train if comm.rank == 0 else None, comm, shuffle=True)
    for images, labels in torch.utils.data.DataLoader(train, batch_size=32, shuffle=True):
        optimizer.update(lambda: loss_of(model(images), labels))

Arrays are NumPy's and torch's, in host memory; models and optimizers are torch's. Differences from ChainerMN are listed
in docs/coming-from/chainermn.md. Needs torch.
"""

from __future__ import annotations

from cohort import __version__
from cohort.chainermn import communicators, datasets, extensions, functions, iterators, links, optimizers
from cohort.chainermn.communicators import CommunicatorBase, create_communicator
from cohort.chainermn.datasets import DataSizeError, create_empty_dataset, scatter_dataset, scatter_index
from cohort.chainermn.extensions import create_multi_node_checkpointer, create_multi_node_evaluator
from cohort.chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator
from cohort.chainermn.links import MultiNodeBatchNormalization, MultiNodeChainList, create_mnbn_model
from cohort.chainermn.optimizers import create_multi_node_optimizer

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeBatchNormalization",
    "MultiNodeChainList",
    "__version__",
    "communicators",
    "create_communicator",
    "create_empty_dataset",
    "create_mnbn_model",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_iterator",
    "create_multi_node_optimizer",
    "create_synchronized_iterator",
    "datasets",
    "extensions",
    "functions",
    "iterators",
    "links",
    "optimizers",
    "scatter_dataset",
    "scatter_index",
]
