"""cohort.run: functions on ranks, what comes back, what goes wrong."""

import array
import os
import signal
import sys
import threading
import time
import unittest
import unittest.mock

import cohort
import cohort.track
from cohort._launch import command as _command, functions as _functions
from run_support import Folder, captured

changed_here = "by the import"


def place(*args, **kwargs):
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, kwargs


def total(value):
    cohort.init()
    values = array.array("d", [value * (cohort.rank() + 1)])
    cohort.world().all_reduce(values)
    cohort.shutdown()
    return values[0]


def where():
    return {
        "variable": os.environ.get("COHORT_TEST_VARIABLE"),
        "more": os.environ.get("COHORT_TEST_MORE"),
        "folder": os.getcwd(),
        "arguments": len(sys.argv),
        "changed": changed_here,
        "path": sys.path,
        "main": sys.modules["__main__"].__file__,
    }


def double(x):
    return 2 * x


def start_children():
    import multiprocessing

    # A child that is not forked imports its parent's main program again, which must not make another rank of it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(double, [1, 2])


def speak():
    print("out of", os.environ["RANK"], flush=True)
    print("err of", os.environ["RANK"], file=sys.stderr, flush=True)


def log_values():
    for step in range(3):
        cohort.track.log(step, loss=1.0 / (step + 1))


class Unloadable(Exception):
    """Pickles, and cannot be made again from its args."""

    def __init__(self, one, two):
        super().__init__(one)


class Known(ValueError):
    def __init__(self, text, number=0):
        super().__init__(text)
        self.number = number


def fail(how, rank=1):
    if int(os.environ["RANK"]) != rank:
        time.sleep(300)
    if how == "known":
        raise Known("the reason", 7)
    if how == "unloadable":
        raise Unloadable("the reason", 2)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(7)
    if how == "vanish":
        os._exit(9)
    if how == "result":
        return threading.Lock()
    if how == "interrupt":
        raise KeyboardInterrupt


def leave_quietly():
    if os.environ["RANK"] == "1":
        os._exit(0)


def fail_while_others_wait():
    cohort.init()
    if cohort.rank() == 1:
        raise Known("first")
    cohort.world().barrier()


class Results(Folder):
    def test_what_was_logged_is_kept(self):
        before = os.getcwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, before)
        with captured() as (_, err):
            cohort.run(log_values, np=1, quiet=True)
        (record,) = self.folder.glob("runs/cohort-run-*/run.jsonl")
        self.assertEqual(record.read_text().count('"loss"'), 3)
        self.assertIn(f"cohort plot runs/{record.parent.name}", err.getvalue())

    def test_one_of_each_rank_in_order(self):
        self.assertEqual(
            cohort.run(place, (1, "a"), {"b": [2]}, np=3, quiet=True),
            [(rank, 3, (1, "a"), {"b": [2]}) for rank in range(3)],
        )

    def test_the_ranks_form_a_world(self):
        self.assertEqual(cohort.run(total, args=[2], np=2, quiet=True), [6.0, 6.0])

    def test_a_module_that_is_missing_is_told_of_the_python_that_misses_it(self):
        outcome = {"where": "load", "error": "ModuleNotFoundError: x", "traceback": "", "python": "/other/python"}
        for path, words in (([], "its host's sys.path, not this"), (_functions._search_path(None), "this process's sys.path;")):
            error = _functions._rank_exception(0, 2, None, {**outcome, "path": path}, 1)
            self.assertIn("it runs /other/python with " + words, str(error))

    def test_auto_is_the_number_of_usable_cores(self):
        self.assertEqual(len(cohort.run(place, quiet=True)), len(os.sched_getaffinity(0)))

    def test_ranks_are_fresh_and_have_what_the_driver_has(self):
        global changed_here
        changed_here = "by the test"
        sys.path.insert(0, str(self.folder))
        try:
            with unittest.mock.patch.dict(os.environ, COHORT_TEST_VARIABLE="from the driver"):
                (seen,) = cohort.run(where, np=1, env={"COHORT_TEST_MORE": "x=y"}, quiet=True)
        finally:
            sys.path.remove(str(self.folder))
        self.assertEqual(seen["variable"], "from the driver")
        self.assertEqual(seen["more"], "x=y")
        self.assertEqual(seen["folder"], os.getcwd())
        self.assertEqual(seen["arguments"], 1)
        self.assertEqual(seen["changed"], "by the import", "a forked process would have the test's")
        self.assertIn(str(self.folder), seen["path"])
        self.assertFalse(os.path.exists(os.path.dirname(seen["main"])), "the private folder is left")

    def test_ranks_may_start_processes_of_their_own(self):
        self.assertEqual(cohort.run(start_children, np=1, quiet=True), [[2, 4]])

    def test_output_comes_with_its_rank_to_sys_stdout_of_now(self):
        with captured() as (out, err):
            cohort.run(speak, np=2)
        for rank in range(2):
            self.assertRegex(out.getvalue(), rf"(?m)^\S+:{rank} \| out of {rank}$")
            self.assertRegex(err.getvalue(), rf"(?m)^\S+:{rank} \| err of {rank}$")
        self.assertRegex(err.getvalue(), r"(?m)^cohort: 2 processes on 1 host .*$")

    def test_output_as_it_is(self):
        with captured() as (out, err):
            cohort.run(speak, np=1, prefix="none", quiet=True)
        self.assertEqual((out.getvalue(), err.getvalue()), ("out of 0\n", "err of 0\n"))

    def test_kept_output(self):
        kept = self.folder / "kept"
        with captured():
            cohort.run(speak, np=2, run_dir=kept)
        self.assertEqual((kept / "logs" / "rank-1.out").read_text(), "out of 1\n")
        self.assertTrue((kept / "job.json").exists())

    def test_two_at_once(self):
        found = {}

        def one(key):
            found[key] = cohort.run(place, (key,), np=2, quiet=True)

        threads = [threading.Thread(target=one, args=(key,)) for key in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {key: [(rank, 2, (key,), {}) for rank in range(2)] for key in range(2)})


class Failures(Folder):
    def failure(self, kind, how, np=2):
        with captured() as (_, err), self.assertRaises(kind) as raised:
            cohort.run(fail, (how,), np=np)
        self.words = err.getvalue()
        return raised.exception

    def test_the_ranks_own_exception(self):
        error = self.failure(Known, "known")
        self.assertEqual((str(error), error.number), ("the reason", 7))
        cause = error.__cause__
        self.assertIsInstance(cause, cohort.RankFailed)
        self.assertEqual(cause.rank, 1)
        self.assertTrue(cause.host)
        self.assertIn("raise Known(", cause.traceback)
        self.assertNotIn("rank_call", cause.traceback)
        self.assertIn("rank 1 of 2", str(cause))
        self.assertRegex(self.words, r"(?m)^\S+:1 \| .*Known: the reason$")

    def test_a_server_that_fails_is_named(self):
        for program, why in ((["--server-program", "false"], "server 0 "), ([], "has no function to call")):
            with captured(), self.assertRaises(cohort.RankFailed) as raised:
                cohort.run(time.sleep, (60,), np=1, options=["--servers", "1", *program])
            self.assertIn(why, str(raised.exception))
            self.assertIsNone(raised.exception.rank)

    def test_words_that_are_no_options_are_no_program_either(self):
        for options, why in ((["ls"], "'ls' is no option of `cohort run`"), (["--", "ls"], "options alone are wanted")):
            with captured(), self.assertRaisesRegex(cohort.InvalidArgument, why):
                cohort.run(os.getpid, np=1, options=options)

    def test_an_exception_that_cannot_be_made_again(self):
        error = self.failure(cohort.RankFailed, "unloadable")
        self.assertEqual(error.rank, 1)
        self.assertIn("Unloadable: the reason", str(error))
        self.assertIn("raise Unloadable(", error.traceback)

    def test_a_rank_that_is_killed(self):
        error = self.failure(cohort.RankFailed, "killed")
        self.assertEqual((error.rank, error.status, error.traceback), (1, 137, None))
        self.assertIn("killed by SIGKILL", str(error))

    def test_a_rank_that_exits(self):
        error = self.failure(cohort.RankFailed, "exit")
        self.assertEqual((error.rank, error.status), (1, 7))
        self.assertIn("SystemExit: 7", str(error))
        error = self.failure(cohort.RankFailed, "vanish")
        self.assertEqual((error.rank, error.status), (1, 9))

    def test_an_interrupt_on_a_rank_is_not_one_here(self):
        error = self.failure(cohort.RankFailed, "interrupt")
        self.assertEqual((error.rank, error.status), (1, 130))

    def test_a_rank_without_a_result(self):
        with captured(), self.assertRaisesRegex(cohort.RankFailed, "rank 1 of 2 ended well and returned nothing"):
            cohort.run(leave_quietly, np=2)

    def test_a_result_that_cannot_be_sent(self):
        error = self.failure(cohort.RankFailed, "result")
        self.assertEqual(error.rank, 1)
        self.assertRegex(str(error), "the result of rank 1 of 2 .* cannot be sent back -- TypeError: cannot pickle")

    def test_the_first_one_and_not_those_that_missed_it(self):
        with captured(), self.assertRaises(Known) as raised:
            cohort.run(fail_while_others_wait, np=2)
        self.assertEqual(raised.exception.__cause__.rank, 1)

    def test_the_time_is_over(self):
        with captured(), self.assertRaisesRegex(cohort.Timeout, "time limit of 1.5 s is over"):
            cohort.run(fail, ("never", 9), np=2, timeout=1.5)

    def test_wrong_arguments(self):
        for wrong in (0, -1, "many", 1.5):
            with self.assertRaisesRegex(cohort.InvalidArgument, "np is"):
                cohort.run(place, np=wrong)
        with self.assertRaisesRegex(ValueError, "cannot be called"):
            cohort.run("place", np=1)
        with self.assertRaisesRegex(ValueError, "prefix"):
            cohort.run(place, np=1, prefix="long")
        with self.assertRaisesRegex(ValueError, "timeout"):
            cohort.run(place, np=1, timeout=0)
        with self.assertRaisesRegex(cohort.InvalidArgument, "options is the text '--bind core' -- a list of words"):
            cohort.run(place, np=1, options="--bind core")
        for wrong, why in ((dict(args="ab"), "args is 'ab' -- a tuple"), (dict(args=5), "args is 5"), (dict(kwargs={1: 2}), "by their names")):
            with self.assertRaisesRegex(cohort.InvalidArgument, why):
                cohort.run(place, np=1, **wrong)
        with self.assertRaisesRegex(cohort.InvalidArgument, "argument 1 of place cannot be sent to the ranks -- TypeError"):
            cohort.run(place, (1, threading.Lock()), np=1)
        with self.assertRaisesRegex(cohort.InvalidArgument, "argument 'key' of place"):
            cohort.run(place, kwargs={"key": threading.Lock()}, np=1)

    def test_nothing_to_start_with(self):
        with unittest.mock.patch.multiple(_command, _beside_package=lambda: [], _elsewhere=lambda: [self.folder / "cohort"]):
            with self.assertRaisesRegex(cohort.Unavailable, "there is no command `cohort` of this package's version"):
                cohort.run(place, np=1)
        with captured(), self.assertRaisesRegex(cohort.Unavailable, "no/such/python"):
            cohort.run(place, np=1, executable="/no/such/python")


if __name__ == "__main__":
    unittest.main()
