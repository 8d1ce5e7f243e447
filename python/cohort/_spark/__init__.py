"""Ranks on the workers of a Spark cluster: `cohort.Distributor(local_mode=False)` and `cohort.run(on="spark")`.

`stage` is the driver's side: slots, one barrier job, its outcome. `task` runs in each of its tasks, sent by value
because Cohort may not be there; `shipment` sends Cohort there. Ranks are started by agents that the tasks start."""
