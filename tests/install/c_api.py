"""Compiles the C and Fortran examples and a program of errors against an installed tree, by the one line of the docs, and runs
them alone, under `cohort run`, and under mpirun.

    c_api.py --prefix PREFIX --examples examples/12-c-and-fortran --data data/digits --work FOLDER [--cc cc]
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser()
parser.add_argument("--prefix", required=True)
parser.add_argument("--examples", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--cc", default="cc")
args, rest = parser.parse_known_args()
COHORT = f"{args.prefix}/bin/cohort"


def run(*command, status=0, **extra):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COHORT_")} | extra
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    text = done.stdout + done.stderr
    assert status is None or done.returncode == status, f"{command}: status {done.returncode}\n{text}"
    return text


def flags():
    return run(COHORT, "--cflags").split()


def mpirun(number, program, *words):
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return run("mpirun.openmpi", *as_root, "--oversubscribe", "-np", str(number), program, *words)


def accuracy(text, ranks):
    found = re.findall(rf"accuracy (\S+) on 359 digits, {ranks} ranks", text)
    assert len(found) == 1, text
    return float(found[0])


class Programs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.makedirs(args.work, exist_ok=True)

    def trains(self, program):
        for ranks in (1, 2, 4):
            out = run(COHORT, "run", "-np", str(ranks), "--prefix", "none", program, args.data)
            self.assertGreater(accuracy(out, ranks), 0.9)
        self.assertGreater(accuracy(run(program, args.data), 1), 0.9)
        if shutil.which("mpirun.openmpi"):
            self.assertGreater(accuracy(mpirun(2, program, args.data), 2), 0.9)

    def test_c(self):
        program = f"{args.work}/digits_c"
        run(args.cc, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-o", program,
            f"{args.examples}/digits.c", *flags(), "-lm")  # fmt: skip
        self.trains(program)

    @unittest.skipUnless(shutil.which("gfortran"), "no gfortran here: apt-get install gfortran")
    def test_fortran(self):
        program = f"{args.work}/digits_f"
        run("gfortran", "-O2", f"-J{args.work}", "-o", program, f"{args.prefix}/share/cohort/cohort.f90",
            f"{args.examples}/digits.f90", *flags())  # fmt: skip
        self.trains(program)

    def test_operations_and_errors(self):
        program = f"{args.work}/operations"
        run(args.cc, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-o", program,
            str(HERE / "c_api.c"), *flags())  # fmt: skip
        for ranks in (1, 2, 3):
            self.assertEqual(run(COHORT, "run", "-np", str(ranks), "--prefix", "none", program).count("all is well"), ranks)
        # The program's own channel: a pipe among processes that it has forked.
        self.assertEqual(run(program, "fork").count("all is well"), 2)

    @unittest.skipUnless(shutil.which("mpicc.openmpi") and shutil.which("mpirun.openmpi"), "no Open MPI here")
    def test_over_a_communicator_of_mpi(self):
        program = f"{args.work}/over_mpi"
        run("mpicc.openmpi", "-std=c99", "-Wall", "-Werror", "-DOVER_MPI", "-o", program, str(HERE / "c_api.c"), *flags())
        self.assertEqual(mpirun(3, program).count("all is well"), 3)

    def test_it_shows_nothing_else(self):
        library = next(pathlib.Path(args.prefix).glob("lib*/**/libcohort_c.so.1"))
        shown = run("nm", "-D", "--defined-only", str(library)).splitlines()
        names = {line.split()[-1] for line in shown if line.split()[-2] in "TDBW"}
        self.assertIn("cohort_init@@COHORT_C_1", names)
        self.assertEqual([name for name in names if not re.fullmatch(r"cohort_\w+@@COHORT_C_1", name)], [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *rest])
