"""Ranks on the workers of a Spark cluster: `cohort.Distributor(local_mode=False)` and `cohort.run(on="spark")`.

`stage` is the driver's side: slots, one barrier job, its outcome. `task` runs in each task of that job, sent by value,
since executors may lack Cohort; `shipment` sends Cohort to them. Agents, started by the tasks, start the ranks."""
