#!/bin/bash
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks=@ntasks@
#SBATCH --ntasks-per-node=@ntasks_per_node@
#SBATCH --cpus-per-task=@cpus_per_task@
#SBATCH --gpus-per-node=@gpus_per_node@
#SBATCH --time=@time@
#SBATCH --partition=@partition@
#SBATCH --account=@account@
#SBATCH --output=@output@
#SBATCH --open-mode=append
#SBATCH --signal=@signal@
#SBATCH --requeue
#SBATCH @sbatch@
cd @folder@ || exit 1
# Before the end of its time, and when it is preempted, the job is asked to save; 75 says that it has, and wants to go on.
trap 'kill -USR1 $job' USR1
trap 'kill -TERM $job' TERM
@command@ &
job=$!
wait $job
while kill -0 $job 2>/dev/null; do wait $job; done
wait $job
status=$?
trap - USR1 TERM
# Somebody who cancels it does not want it back, though it has saved.
[ $status -eq 75 ] && case $(scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null) in *JobState=CANCELLED*) exit 75 ;; esac
[ $status -eq 75 ] && scontrol requeue "$SLURM_JOB_ID" && exit
exit $status
