"""Programs that other launchers than ours start over the hosts of a box, with no address and no port given."""

import os
import pathlib
import re
import tempfile
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
WORKER = os.environ.get("COHORT_INIT_WORKER", "")
PACKAGE = os.environ.get("COHORT_PYTHON_PACKAGE", "")

SUM = """
import array, cohort
cohort.init()
world = cohort.world()
numbers = array.array("d", [world.rank() + 1.0])
world.all_reduce(numbers)
print(f"rank {world.rank()} of {world.size()} on {world.cross_size()} hosts: {numbers[0]}", flush=True)
"""


THREADS = """
import array, cohort

def total(world):
    numbers = array.array("d", [world.rank() + 1.0])
    world.all_reduce(numbers)
    return f"rank {world.rank()} of {world.size()}, local {world.local_rank()}, host {world.cross_rank()}: {numbers[0]}"

cohort.init()
for said in cohort.run_on_threads(total, 2, across=cohort.world()):
    print(said, flush=True)
"""


class Launchers(boxes.InBox):
    needs = ("COHORT_INIT_WORKER",)
    wanted = ("who", "--slurm", "--hosts", "2")

    def expect_world(self, ranks, times, *command):
        done = self.box.run("h1", *command, timeout=90)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        formed = re.findall(r"^formed rank=(\d+) size=(\d+) local=\S+ cross=\d/2 ", done.stdout, re.M)
        self.assertEqual(sorted(formed), sorted([(str(rank), str(ranks)) for rank in range(ranks)] * times),
                         done.stdout + done.stderr)
        self.assertNotIn("cohort warning", done.stderr)

    def test_slurm_through_munge(self):
        self.expect_world(4, 2, "srun", "-N2", "-n4", "--overcommit", WORKER, "times=2")

    def test_slurm_by_a_list_of_hosts(self):
        """Rank 0 is on the host that Slurm counts as the second."""
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            hosts = pathlib.Path(folder, "hosts")
            hosts.write_text("h2\nh1\n")
            self.expect_world(2, 1, "env", f"SLURM_HOSTFILE={hosts}", "srun", "-m", "arbitrary", "-N2", "-n2", WORKER)

    def test_slurm_with_torchs_variables(self):
        """As scripts export them; none of this is needed, and no port is opened for it."""
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            script = pathlib.Path(folder, "main.sh")
            script.write_text("export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=h1 "
                              f"MASTER_PORT=29500\nexec {WORKER} times=2 $*\n")
            self.expect_world(4, 2, "srun", "-N2", "-n4", "--overcommit", "sh", script)
            self.expect_world(4, 2, "srun", "-N2", "-n4", "--overcommit", "sh", script, "init=env://")

    def ranks_by_hand(self, *variables):
        """One on each host."""
        started = [self.box.start(host, "env", f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=h1", "MASTER_PORT=29501", *variables, WORKER)
                   for rank, host in enumerate(("h1", "h2"))]
        said = [process.communicate(timeout=60) for process in started]
        return [(process.returncode, out + err) for process, (out, err) in zip(started, said)]

    def test_by_hand_needs_a_secret_or_a_word(self):
        other = self.ranks_by_hand("COHORT_LOG=warn")[1]
        self.assertEqual(other[0], 3, other)
        for way_out in "`cohort secret FILE`", "COHORT_TRUST_NETWORK=1":
            self.assertIn(way_out, other[1])
        ended = self.ranks_by_hand("COHORT_TRUST_NETWORK=1")
        for rank, (status, said) in enumerate(ended):
            self.assertEqual(status, 0, ended)
            self.assertIn(f"formed rank={rank} size=2 local=0/1 cross={rank}/2", said)
        self.assertIn("the network is trusted", ended[0][1])

    def test_a_secret_that_one_host_lacks_is_told_on_both(self):
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            secret = pathlib.Path(folder, "secret")
            secret.write_text("0" * 64 + "\n")
            secret.chmod(0o600)
            place = ("WORLD_SIZE=2", "MASTER_ADDR=h1", "MASTER_PORT=29502")
            first = self.box.start("h1", "env", "RANK=0", *place, f"COHORT_SECRET_FILE={secret}", WORKER, "init_timeout_ms=8000")
            second = self.box.start("h2", "env", "RANK=1", *place, WORKER)
            there, here = ("".join(process.communicate(timeout=60)) for process in (second, first))
            self.assertIn("COHORT_SECRET_FILE", there)
            self.assertRegex(here, "refused a connection: .*it brings no secret -- give all ranks one secret")

    def test_slurm_through_pmi(self):
        self.expect_world(4, 2, "srun", "--mpi=pmi2", "-N2", "-n4", "--overcommit", WORKER, "times=2")

    def test_slurm_through_pmix(self):
        if not pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/mpi_pmix.so").exists():
            self.skipTest("this Slurm has no plug-in for PMIx")
        self.expect_world(4, 2, "srun", "--mpi=pmix", "-N2", "-n4", "--overcommit", WORKER, "times=2")

    # One task on the first node, two on the second.
    HETEROGENEOUS = ("-N1", "-n1", ":", "-N1", "-n2")
    UNEVEN = [("0", "0/1", "0/2"), ("1", "0/2", "1/2"), ("2", "1/2", "0/1")]

    def expect_uneven(self, done):
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        formed = re.findall(r"^formed rank=(\d) size=3 local=(\S+) cross=(\S+) ", done.stdout, re.M)
        self.assertEqual(sorted(formed), self.UNEVEN, done.stdout + done.stderr)
        self.assertNotIn("cohort warning", done.stderr)

    def test_a_heterogeneous_step_of_slurm(self):
        for mpi in ("none", "pmi2"):
            with self.subTest(mpi):
                self.expect_uneven(self.box.run("h1", "srun", f"--mpi={mpi}", *self.HETEROGENEOUS, WORKER, timeout=90))

    def test_cohort_run_in_a_heterogeneous_job(self):
        if not COHORT:
            self.skipTest("COHORT_COMMAND is not set")
        ours = (COHORT, "run", "-q", "--no-logs", "--prefix", "none", WORKER)
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            self.expect_uneven(self.box.run("h1", "salloc", "-Q", *self.HETEROGENEOUS, *ours, timeout=90, cwd=folder))
            script, out = pathlib.Path(folder, "job.sh"), pathlib.Path(folder, "out")
            script.write_text("#!/bin/sh\n#SBATCH -N1 -n1\n#SBATCH hetjob\n#SBATCH -N1 -n2\n" + " ".join(ours) + "\n")
            done = self.box.run("h1", "sbatch", "-W", "-o", out, script, timeout=90, cwd=folder)
            done.stdout, done.stderr = out.read_text(), done.stdout + done.stderr
            self.expect_uneven(done)

    def test_mpich(self):
        self.expect_world(4, 2, "mpirun.mpich", "-hosts", "h1,h2", "-np", "4", WORKER, "times=2")

    def test_open_mpi(self):
        self.expect_world(4, 2, "mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "-H", "h1:2,h2:2", "-np", "4",
                          WORKER, "times=2")

    def test_a_file_that_all_hosts_share(self):
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            self.expect_world(2, 1, "env", f"COHORT_INIT=file://{folder}/meeting", "srun", "-N2", "-n2", WORKER)

    def test_one_task_for_each_host_whose_ranks_are_threads(self):
        done = self.box.run("h1", "srun", "-N2", "-n2", WORKER, "threads=2", timeout=90)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ranks = re.findall(r"^thread rank=(\d) size=4 local=(\d)/2 cross=(\d)/2 sum=right ", done.stdout, re.M)
        self.assertEqual(sorted(ranks), [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")], done.stdout)

    def test_one_task_for_each_host_with_threads_in_python(self):
        self.need_python()
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            program = pathlib.Path(folder, "threads.py")
            program.write_text(THREADS)
            for launcher in ["srun", "-N2", "-n2"], [COHORT, "run", "-q", "--no-logs", "--prefix", "none", "-H", "h1:1,h2:1"]:
                done = self.box.run("h1", "env", f"PYTHONPATH={PACKAGE}", *launcher, "python3", program, timeout=90, cwd=folder)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual(sorted(done.stdout.splitlines()),
                                 [f"rank {rank} of 4, local {rank % 2}, host {rank // 2}: 10.0" for rank in range(4)])

    def need_python(self):
        if not list(pathlib.Path(PACKAGE, "cohort").glob("_core.*.so")):
            self.skipTest("the Python package is not built")

    def test_python(self):
        self.need_python()
        with tempfile.TemporaryDirectory(prefix="cohort-who-") as folder:
            program = pathlib.Path(folder, "sum.py")
            program.write_text(SUM)
            done = self.box.run("h1", "env", f"PYTHONPATH={PACKAGE}", "srun", "-N2", "-n2", "python3", program, timeout=90)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            for rank in range(2):
                self.assertIn(f"rank {rank} of 2 on 2 hosts: 3.0", done.stdout)


if __name__ == "__main__":
    unittest.main()
