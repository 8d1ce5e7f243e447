"""Training that survives failures and changes of hosts: states that can be saved, restored and sent, and `run`.

`run` forms a new world of the processes that are left and goes on from the last commit. Starting processes anew is
the launcher's part.
"""

from cohort._horovod.elastic_run import run
from cohort._horovod.elastic_state import ObjectState, State
from cohort._horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from cohort.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from cohort.torch.elastic.sampler import ElasticSampler
from cohort.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
