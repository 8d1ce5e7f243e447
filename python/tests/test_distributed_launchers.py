"""Process groups of the backend "cohort" under the launchers that people use. Starts its processes itself."""

import os
import subprocess
import sys
import unittest

from support_distributed import GOOD, SMALLEST, TORCH_2, Case, free_port


class Launchers(Case):
    ENV = SMALLEST + 'dist.init_process_group("cohort", timeout=PATIENCE)\n' + GOOD

    def test_cohort_run(self):
        self.two_are_good(os.environ.get("COHORT_COMMAND", "cohort"), "run", "-q", "-np", "2", "--timeout", "100", "--", sys.executable, self.script(self.ENV))

    def test_a_rank_that_ends_before_it_joins_ends_the_job(self):
        """Whatever the others wait in: torch's rendezvous, of any backend, or Cohort's."""
        for waits in 'dist.init_process_group("cohort")', 'dist.init_process_group("gloo")', "cohort.init()":
            with self.subTest(waits):
                script = self.script(f"{SMALLEST}\nos.environ['RANK'] == '0' or os._exit(0)\n{waits}\n")
                done = subprocess.run(
                    [os.environ.get("COHORT_COMMAND", "cohort"), "run", "-np", "2", "--no-logs", "--", sys.executable, script],
                    capture_output=True, text=True, timeout=100, check=False,
                )
                self.assertEqual(done.returncode, 124, done.stderr)
                self.assertIn("rank 1 had ended with 0 before it joined the world that rank 0 waits for", done.stderr)

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
