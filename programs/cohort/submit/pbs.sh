#!/bin/bash
#PBS -N @name@
#PBS -l select=@select@
#PBS -l walltime=@walltime@
#PBS -q @partition@
#PBS -A @account@
#PBS -j oe
exec >>@output@ 2>&1
@exports@
cd @folder@ || exit 1
# At the end of its time PBS sends SIGTERM, which asks the job to save. Status 75 says that it has: submit it again.
trap 'kill -USR1 $job' USR1
trap 'kill -TERM $job' TERM
# A host stands in this file once for each of its ranks.
@command_with@ --hostfile "$PBS_NODEFILE" -- @program@ &
job=$!
wait $job
while kill -0 $job 2>/dev/null; do wait $job; done
wait $job
exit $?
