"""MPI as the transport between the hosts of a box: the same bits as over TCP, and a named end."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

import boxes

COHORT = os.environ.get("COHORT_COMMAND", "")
PEER = os.environ.get("COHORT_HOSTS_PEER", "")
LINE = re.compile(r"rank (\d) of (\d), local (\d) of (\d), host (\d) of (\d): ([0-9a-f]{16})")


class Mpi(boxes.InBox):
    needs = ("COHORT_HOSTS_PEER",)
    wanted = ("mpi", "--slurm", "--hosts", "2")

    @classmethod
    def setUpClass(cls):
        for compiler in ("mpicc.openmpi", "mpicc.mpich"):
            if not shutil.which(compiler):
                raise unittest.SkipTest(f"{compiler} is not installed")
        super().setUpClass()
        # The homes of a box are this machine's, as on a cluster.
        cls.data = tempfile.mkdtemp(prefix="cohort-mpi-")
        cls.addClassCleanup(shutil.rmtree, cls.data, ignore_errors=True)
        built = subprocess.run([COHORT, "build-mpi"], env=dict(os.environ, XDG_DATA_HOME=cls.data), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False)
        if built.returncode != 0 or built.stdout.count(": for ") != 2:
            raise AssertionError(built.stdout)

    def program(self, *words, transport="mpi", **variables):
        variables = {"COHORT_TRANSPORT": transport, "XDG_DATA_HOME": self.data, "COHORT_LOG": "info", **variables}
        return ["env", *(f"{name}={value}" for name, value in variables.items()), PEER, *words]

    OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "-np", "4", "-H", "h1:2,h2:2")
    MPICH = ("mpiexec.mpich", "-np", "4", "-hosts", "h1:2,h2:2")
    SLURM = ("srun", "--mpi=pmi2", "--nodelist=h1,h2", "-N", "2", "--ntasks-per-node=2", "-n", "4")

    def ranks(self, done):
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        found = sorted(LINE.findall(done.stdout))
        self.assertEqual(len(found), 4, done.stdout + done.stderr)
        return found

    def plugin(self, family):
        return str(next(pathlib.Path(self.data, "cohort", "mpi").glob(f"cohort-mpi-{family}-*.so")))

    def test_the_same_bits_as_over_tcp(self):
        first = self.ranks(self.box.run("h1", *self.MPICH, *self.program(transport="tcp"), timeout=100))
        # srun does not say which MPI is meant.
        ways = {"Open MPI": (self.OPEN_MPI, {}), "MPICH": (self.MPICH, {}),
                "MPICH under srun": (self.SLURM, {"COHORT_MPI_PLUGIN": self.plugin("mpich")})}
        if pathlib.Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/mpi_pmix.so").exists():
            ways["Open MPI under srun"] = (("srun", "--mpi=pmix", *self.SLURM[2:]), {"COHORT_MPI_PLUGIN": self.plugin("openmpi")})
        for way, (launcher, variables) in ways.items():
            with self.subTest(way):
                done = self.box.run("h1", *launcher, *self.program(**variables), timeout=100)
                self.assertEqual(self.ranks(done), first)
                self.assertIn(f"between hosts over MPI ({way.split(' under')[0]}", done.stdout + done.stderr)

    def test_srun_does_not_say_which_mpi(self):
        done = self.box.run("h1", *self.SLURM, *self.program(), timeout=100)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("there are plug-ins for several MPIs", done.stderr)
        self.assertIn("COHORT_MPI_PLUGIN", done.stderr)

    def test_an_mpi_that_srun_does_not_start_is_refused(self):
        """Each process would be a job of its own."""
        done = self.box.run("h1", "srun", "--mpi=none", *self.SLURM[2:],
                            *self.program(COHORT_MPI_PLUGIN=self.plugin("mpich")), timeout=100)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("are not processes of one start of mpirun or srun", done.stderr)

    def peers(self, host):
        return list(self.box.processes(host, rf"^{re.escape(PEER)} 100 *$"))

    def job(self, *launcher, program=None):
        """A job that goes on, and the text that it has printed so far."""
        job = self.box.start("h1", *launcher, *(program or self.program("100")))
        said = []

        def read(stream):
            for line in stream:
                said.append(line)

        readers = [threading.Thread(target=read, args=(stream,)) for stream in (job.stdout, job.stderr)]
        for reader in readers:
            reader.start()

        def end():
            for host in ("h1", "h2"):
                for pid in self.peers(host):
                    os.kill(pid, signal.SIGKILL)
            job.terminate()
            try:
                job.wait(timeout=20)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
            for reader in readers:
                reader.join()
            job.stdout.close()
            job.stderr.close()

        self.addCleanup(end)
        limit = time.monotonic() + 40
        while not any("between hosts over MPI" in line for line in said) and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(1)
        return job, said

    def expect_said(self, said, pattern, within):
        limit = time.monotonic() + within
        while time.monotonic() < limit:
            if re.search(pattern, "".join(said)):
                return
            time.sleep(0.1)
        self.fail("".join(said))

    def test_a_killed_rank_is_named_by_those_on_the_other_host(self):
        program = self.program("100", COHORT_MPI_PLUGIN=self.plugin("mpich"))
        _, said = self.job(*self.SLURM[:1], "--kill-on-bad-exit=0", *self.SLURM[1:], program=program)
        os.kill(self.peers("h2")[0], signal.SIGKILL)
        self.expect_said(said, r"failed -- rank 0 \(h1\).* lost rank [23] \(h2, pid \d+\)", 40)

    def test_mpirun_ends_the_others_of_a_killed_rank(self):
        for launcher in (self.OPEN_MPI, self.MPICH):
            with self.subTest(launcher[0]):
                job, said = self.job(*launcher)
                os.kill(self.peers("h2")[0], signal.SIGKILL)
                self.assertNotEqual(job.wait(timeout=40), 0, "".join(said))

    def test_a_host_whose_cable_is_cut_is_named(self):
        _, said = self.job(*self.MPICH)
        self.box.act("cut", "h2")
        self.addCleanup(self.box.act, "heal", "h2")
        self.expect_said(said, r"lost rank [23] \(h2, pid \d+\).*has not answered for 3 s", 40)


if __name__ == "__main__":
    unittest.main()
