"""Not here; importing it says what there is."""

from horovod._missing import missing

raise missing("horovod.ray", "cohort.run(fn, np=N) runs a training function on this host")
