#!/bin/bash
#flux: --job-name=@name@
#flux: --nodes=@nodes@
#flux: --nslots=@slots@
#flux: --cores-per-slot=@cpus_per_task@
#flux: --gpus-per-slot=@gpus_per_slot@
#flux: --time-limit=@seconds@s
#flux: --queue=@partition@
#flux: --bank=@account@
exec >>@output@ 2>&1
cd @folder@ || exit 1
# SIGTERM asks the job to save. Status 75 says that it has: submit it again.
trap 'kill -USR1 $job' USR1
trap 'kill -TERM $job' TERM
@command_with@ --per-node @slots_per_node@ -H "$(flux hostlist -e -d , local)" -- @program@ &
job=$!
wait $job
while kill -0 $job 2>/dev/null; do wait $job; done
wait $job
exit $?
