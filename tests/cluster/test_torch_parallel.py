"""torch's model parallelism on two hosts of a box, over "cohort" and over "gloo": python/tests/parallel_programs.py."""

import pathlib
import unittest

from python_case import COHORT, PACKAGE, PythonCase

PROGRAMS = pathlib.Path(__file__).resolve().parents[2] / "python" / "tests" / "parallel_programs.py"


class OfThisPython(PythonCase):
    by_user = False
    files = {PROGRAMS.name: PROGRAMS.read_text()}

    def test_both_give_the_same(self):
        environment = [f"PYTHONPATH={PACKAGE}", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0",
                       f"SHARED_FOLDER={self.folder}"]
        program = [self.python, str(self.folder / PROGRAMS.name)]
        ours = self.box.run("h1", "env", *environment, COHORT, "run", "-q", "--no-logs", "--no-python", "-np", "4", "-H", "h1:2,h2:2",
                            *program, "run", "cohort", str(self.folder), timeout=240, cwd=self.folder)
        self.assertEqual(ours.returncode, 0, ours.stdout + ours.stderr)
        theirs = self.box.run_all([(f"h{1 + rank // 2}", ["env", *environment, f"RANK={rank}", "WORLD_SIZE=4", "MASTER_ADDR=h1",
                                                          "MASTER_PORT=29431", *program, "run", "gloo", str(self.folder)])
                                   for rank in range(4)], cwd=self.folder, timeout=240)
        self.assertEqual([status for status, _ in theirs], [0] * 4, theirs)
        compared = self.box.run("h1", "env", *environment, *program, "compare", str(self.folder), "4", timeout=60, cwd=self.folder)
        self.assertEqual(compared.returncode, 0, compared.stdout + compared.stderr)
        print(compared.stdout)


if __name__ == "__main__":
    unittest.main()
