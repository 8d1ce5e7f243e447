"""Not here; importing it says what there is."""

from horovod._missing import missing

raise missing("horovod.mxnet", "MXNet has been retired by its makers, and is left out; horovod.torch is there")
