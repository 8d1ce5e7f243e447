"""Process groups of the backend "cohort" under the launchers that people use. Starts its processes itself."""

import os
import shutil
import subprocess
import sys
import time
import unittest

from support_distributed import GOOD, SMALLEST, TORCH_2, Case, free_port


class Launchers(Case):
    ENV = SMALLEST + 'dist.init_process_group("cohort", timeout=PATIENCE)\n' + GOOD

    def test_cohort_run(self):
        self.two_are_good(os.environ.get("COHORT_COMMAND", "cohort"), "run", "-q", "-np", "2", "--timeout", "100", "--", sys.executable, self.script(self.ENV))

    def test_mpirun(self):
        # Nothing is exported; what is, is kept to.
        again = """
dist.init_process_group("cohort", timeout=PATIENCE)
dist.destroy_process_group()
assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
dist.init_process_group("cohort", timeout=PATIENCE)
"""
        for mpirun in shutil.which("mpirun.openmpi"), shutil.which("mpirun.mpich"):
            if mpirun is None:
                continue
            command = [mpirun, "-np", "2", sys.executable]
            rights = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
            with self.subTest(mpirun):
                self.two_are_good(*command, self.script(SMALLEST + again + GOOD), **rights)
                port = str(free_port())
                kept = self.ENV + f'assert os.environ["MASTER_PORT"] == "{port}"\n'
                self.two_are_good(*command, self.script(kept), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **rights)
                wrong = self.ENV.replace('"cohort",', '"cohort", rank=0, world_size=2,')
                status, output = self.run_it(*command, self.script(wrong), **rights)
                self.assertNotEqual(status, 0, output)
                self.assertIn("RANK is 0, as the program or the environment says, and the launcher says 1", output)

    def test_alone(self):
        script = SMALLEST + """
dist.init_process_group("cohort", timeout=PATIENCE)
check(1)
dist.destroy_process_group()
assert "RANK" not in os.environ
"""
        status, output = self.run_it(sys.executable, self.script(script))
        self.assertEqual(status, 0, output)
        self.assertEqual(output.count("it is a world of one"), 1, output)
        status, output = self.run_it(sys.executable, self.script(script), COHORT_ALONE="1")
        self.assertEqual((status, output), (0, ""))
        # If a variable says that there are more ranks, torch or Cohort says what is missing.
        for variables, words in (
            ({"MASTER_ADDR": "127.0.0.1"}, "environment variable RANK expected"),
            ({"RANK": "1"}, "RANK=1 is set and WORLD_SIZE is not"),
            ({"RANK": "1", "WORLD_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT"),
        ):
            status, output = self.run_it(sys.executable, self.script(script), **variables)
            self.assertNotEqual(status, 0, output)
            self.assertIn(words, output)
        # Other backends are as they were.
        status, output = self.run_it(sys.executable, self.script(script.replace('"cohort"', '"gloo"')))
        self.assertIn("environment variable RANK expected", output)

    def test_a_rank_that_ends_before_it_forms_its_world_ends_the_job(self):
        """The others may wait in torch's rendezvous, of any backend, or Cohort's."""
        for waits in 'dist.init_process_group("cohort")', 'dist.init_process_group("gloo")', "cohort.init()":
            with self.subTest(waits):
                script = self.script(f"{SMALLEST}\nos.environ['RANK'] == '0' or os._exit(0)\n{waits}\n")
                done = subprocess.run(
                    [os.environ.get("COHORT_COMMAND", "cohort"), "run", "-np", "2", "--no-logs", "--", sys.executable, script],
                    capture_output=True, text=True, timeout=100, check=False,
                )
                self.assertEqual(done.returncode, 124, done.stderr)
                self.assertIn("rank 1 had ended with 0 before it formed the world that rank 0 waits for", done.stderr)

    def test_torchrun_and_init_again(self):
        # The agent's store outlives the groups.
        again = """
for _ in range(3):
    dist.init_process_group("cohort", timeout=PATIENCE)
    check()
    group = dist.new_group([0, 1])
    dist.barrier(group)
    dist.destroy_process_group()
dist.init_process_group("cohort", timeout=PATIENCE)
"""
        if not TORCH_2:
            self.skipTest("1.13's own groups cannot be formed again in the agent's store")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        self.two_are_good(*launcher, self.script(SMALLEST + again + GOOD))

    def test_a_store_that_rank_0_is_just_closing(self):
        # Without an agent's store, rank 0 has a new one for each group: another rank may connect to the old one.
        port = free_port()
        serve = "import datetime, sys, time, torch.distributed as dist\n" + (
            f"store = dist.TCPStore('127.0.0.1', {port}, 2, True, datetime.timedelta(seconds=60), wait_for_workers=False)\n"
            "if len(sys.argv) > 1:\n    store.set('cohort/init/0/a key', 'what rank 0 says')\n"
            "print('serves', flush=True)\nsys.stdin.read()\n"
        )
        ask = (
            "from cohort._process import torchrun as _torchrun\nshare, _, _, _ = _torchrun.meeting(60)\n"
            "print('asks', flush=True)\nprint(share('a key', None, 60))\n"
        )
        environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

        def start(program, *words):
            process = subprocess.Popen([sys.executable, "-c", program, *words], env=environment, text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
            self.addCleanup(lambda: (process.kill(), process.communicate()))
            return process

        old = start(serve)
        self.assertEqual(old.stdout.readline(), "serves\n")
        rank = start(ask)
        self.assertEqual(rank.stdout.readline(), "asks\n")
        time.sleep(1)  # it waits for the key there, or does so below
        old.kill()
        old.communicate()
        start(serve, "again")
        self.assertEqual(rank.stdout.readline(), "what rank 0 says\n")

    def test_torchrun_starts_ranks_again(self):
        # The agent's store outlives the ranks, and what those of the first attempt have claimed in it.
        script = SMALLEST + """
dist.init_process_group("cohort", timeout=PATIENCE)
check()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(5)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.barrier()
""" + GOOD.replace('b"good', 'b"\\ngood')
        more = [] if TORCH_2 else ["-r", "1", "-t", "1"]
        for launcher in ["--standalone"], ["--master_port", str(free_port())]:
            with self.subTest(launcher):
                self.two_are_good(sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc_per_node", "2", "--max_restarts", "1",
                                  *more, self.script(script))

    def test_spawn(self):
        script = (
            SMALLEST
            + f"""
import torch.multiprocessing as mp

def main(rank, address):
    dist.init_process_group("cohort", init_method=address, rank=rank, world_size=2, timeout=PATIENCE)
    check()
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank) and os.environ["WORLD_SIZE"] == "2"
    dist.destroy_process_group()
    assert "RANK" not in os.environ
    os.write(1, b"\\ngood %d\\n" % rank)

if __name__ == "__main__":
    mp.spawn(main, ("tcp://127.0.0.1:{free_port()}",), nprocs=2)
"""
        )
        self.two_are_good(sys.executable, self.script(script))


if __name__ == "__main__":
    unittest.main()
