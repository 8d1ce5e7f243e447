"""Not here; importing it says what there is."""

from horovod._missing import missing

raise missing("horovod.spark", "cohort.Distributor(num_processes=N).run(fn) runs a training function on this host")
