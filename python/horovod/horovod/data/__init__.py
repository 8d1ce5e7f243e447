"""Not here; importing it says what there is."""

from horovod._missing import missing

raise missing("horovod.data", "torch.utils.data.DataLoader loads in the background with num_workers=N")
