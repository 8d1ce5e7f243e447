"""cohort.run and cohort.Distributor over several hosts: what travels, when no folder does. Every host is this machine (the
starter "local"), but its ranks have no word of the driver but what the job's connections bring."""

import array
import os
import pathlib
import signal
import threading
import time
import unittest

import cohort
from run_support import Folder, captured

LOCAL = ("--starter", "local")


def place():
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"]), os.environ["COHORT_HOST"]


def total(value):
    cohort.init()
    values = array.array("d", [value * (cohort.rank() + 1)])
    cohort.world().all_reduce(values)
    return values[0]


def sized(data, times):
    return data[:1] * times


def fail(rank, how):
    if int(os.environ["RANK"]) != rank:
        time.sleep(300)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError(f"rank {rank} knows why")


def cannot_be_sent():
    return threading.Lock()


def devices():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def spoil(folder, rank):
    """Puts a folder in the place of the result of `rank`."""
    (target,) = pathlib.Path(folder).glob("cohort-run-*")
    (target / "from-ranks" / str(rank)).mkdir(parents=True, exist_ok=True)


def folders():
    """Returns those of the driver's temporary files that a rank could be told of."""
    return [word for word in pathlib.Path("/proc/self/cmdline").read_bytes().decode().split("\0") if "cohort-run-" in word]


class Hosts(Folder):
    def run_on(self, fn, *args, hosts="a:1,b:2", options=LOCAL, **more):
        with captured() as (out, err):
            results = cohort.run(fn, args=args, hosts=hosts, options=options, **more)
        self.said = out.getvalue() + err.getvalue()
        return results

    def test_ranks_know_their_hosts_and_the_results_come_by_rank(self):
        expected = [(0, 0, 0, "a"), (1, 0, 1, "b"), (2, 1, 1, "b")]
        for hosts in ("a:1,b:2", ["a:1", "b:2"], {"a": 1, "b": 2}):
            with self.subTest(hosts=hosts):
                self.assertEqual(self.run_on(place, hosts=hosts), expected)
        hostfile = self.folder / "hosts"
        hostfile.write_text("a slots=1  # the first\nb slots=2\n")
        self.assertEqual(self.run_on(place, hosts=None, hostfile=hostfile), expected)

    def test_one_world(self):
        self.assertEqual(self.run_on(total, 2.0), [12.0] * 3)

    def test_nothing_is_read_from_a_folder_of_the_driver_s(self):
        self.assertEqual(self.run_on(folders), [[]] * 3)

    def test_arguments_and_results_larger_than_a_piece(self):
        size = (20 << 20) + 3
        results = self.run_on(sized, b"x" * size, size, hosts="a,b")
        self.assertEqual([(len(one), set(one)) for one in results], [(size, {ord("x")})] * 2)

    def test_an_exception(self):
        with self.assertRaisesRegex(LookupError, "rank 1 knows why") as caught:
            self.run_on(fail, 1, "raised")
        cause = caught.exception.__cause__
        self.assertIsInstance(cause, cohort.RankFailed)
        self.assertEqual((cause.rank, cause.host), (1, "b"))
        self.assertIn("fail", cause.traceback)

    def test_a_rank_that_is_killed(self):
        with self.assertRaises(cohort.RankFailed) as caught:
            self.run_on(fail, 2, "killed")
        self.assertEqual((caught.exception.rank, caught.exception.host), (2, "b"))

    def test_a_result_that_cannot_be_sent(self):
        with self.assertRaisesRegex(cohort.RankFailed, "cannot be sent back"):
            self.run_on(cannot_be_sent)

    def test_a_result_that_is_lost_on_its_way_is_no_fault_of_the_function_s(self):
        with self.assertRaisesRegex(cohort.RankFailed, "not all of it arrives.*of rank 1: .*from-ranks/1") as caught:
            self.run_on(spoil, str(self.temporary), 1)
        self.assertEqual(caught.exception.status, 1)
        self.assertNotIn("returned nothing", str(caught.exception))

    def test_hosts_that_only_the_ranks_environment_names(self):
        environment = {"COHORT_RUN_HOSTS": "a:1,b:1", "COHORT_RUN_STARTER": "local"}
        self.assertEqual(self.run_on(folders, hosts=None, options=(), env=environment), [[]] * 2)

    def test_options_without_hosts(self):
        self.assertEqual(self.run_on(total, 1.0, hosts=None, options=("--bind", "none"), np=2), [3.0] * 2)

    def test_wrong_hosts(self):
        for hosts, hostfile, words in (("a", "b", "both given"), ("", None, "at least one"), ([], None, "at least one")):
            with self.subTest(hosts=hosts), self.assertRaisesRegex(cohort.InvalidArgument, words):
                cohort.run(place, hosts=hosts, hostfile=hostfile)
        with captured(), self.assertRaises(cohort.Error):
            cohort.run(place, hosts="a:none", options=LOCAL)

    def test_distributor(self):
        os.environ["COHORT_RUN_STARTER"] = "local"
        self.addCleanup(os.environ.pop, "COHORT_RUN_STARTER")
        with captured() as (out, _):
            distributor = cohort.Distributor(3, use_gpu=False, hosts="a:1,b:2")
            self.assertEqual(distributor.run(total, 2.0), 12.0)
            self.assertEqual(distributor.run(devices), "")
            self.assertIsNone(distributor.run(self.script("import os, sys; print('here', os.environ['RANK'], sys.argv[1:])"), 7))
        for rank in range(3):
            self.assertIn(f"here {rank} ['7']", out.getvalue())
        with captured(), self.assertRaisesRegex(LookupError, "rank 2 knows why"):
            distributor.run(fail, 2, "raised")


if __name__ == "__main__":
    unittest.main()
