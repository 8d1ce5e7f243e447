"""Tests guarantees that harnesses rely on: a run with a problem fails the series, leftovers are found, state files
work."""

import contextlib
import io
import os
import pathlib
import random
import tempfile
import time
import unittest

from soak import job, processes, series


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class Jobs(Folder):
    def start(self, script):
        return job.Job(["sh", "-c", script], self.folder)

    def test_what_leaves_its_session_is_found_and_ended(self):
        with self.start("echo out; echo err >&2; setsid sleep 1000 & sleep 0.2; exit 7") as one:
            self.assertEqual(one.wait(time.monotonic() + 20), 7)
            self.assertEqual((one.said(), one.complaints()), ("out\n", "err\n"))
            left, seconds = processes.wait_for_nothing(one.place.processes, 0.3)
            self.assertEqual(list(left.values()), ["sleep 1000"])
            self.assertGreaterEqual(seconds, 0.3)
        self.assertEqual(one.place.processes(), {})

    def test_strikes_what_it_is_told_to_and_nothing_else(self):
        with self.start("sleep 1000; exit 3") as one:
            deadline = time.monotonic() + 20
            self.assertTrue(one.until(lambda: one.strike("^sleep", random.Random(1)), deadline))
            self.assertEqual(one.wait(deadline), 3)
            self.assertFalse(one.strike("^sleep", random.Random(1)))

    def test_a_deadline_ends_a_wait(self):
        with self.start("sleep 1000") as one:
            self.assertIsNone(one.wait(time.monotonic()))
            self.assertIsNone(one.until(lambda: False, time.monotonic() + 0.05))
        self.assertFalse(one.running())


class Runs(Folder):
    def series(self, one, *words, group=1):
        options = series.parser("x", "", count=4, jobs=2).parse_args(["--state", str(self.folder / "state"), *words])
        options.folder = self.folder / "runs"
        options.folder.mkdir(exist_ok=True)
        made = series.Series(options, "x", plan=lambda number: number, one=one, group=group)
        self.done = []
        with contextlib.redirect_stdout(io.StringIO()) as said:
            made.run()
            status = made.report()
        self.assertEqual(os.listdir(options.folder), [])
        return status, said.getvalue()

    def one(self, number, folder):
        self.done.append(number)
        (folder / str(number)).touch()
        return {"inside": len(os.listdir(folder))}

    def bad(self, number, folder):
        if number == 1:
            raise ValueError("no folder")
        return {**self.one(number, folder), "problems": ["two is not"] if number == 2 else []}

    def test_a_problem_fails_the_series_and_is_kept(self):
        status, said = self.series(self.bad, "--keep", str(self.folder / "kept"))
        self.assertEqual(status, 1)
        self.assertRegex(said, r"(?s)ValueError: no folder.*again: tools/x --seed 1 --only 1")
        self.assertRegex(said, r"two is not\n  again: tools/x --seed 1 --only 2")
        self.assertIn("2 not as they should be: [1, 2]", said)
        self.assertEqual(len(os.listdir(self.folder / "kept")), 2)

    def test_goes_on_where_it_was(self):
        self.assertEqual(self.series(self.one, "--count", "2")[0], 0)
        with open(self.folder / "state", "a") as state:
            state.write('{"key": "torn')
        self.assertEqual(self.series(self.one)[0], 0)
        self.assertEqual(sorted(self.done), [2, 3])
        self.series(self.one, "--seed", "2")
        self.assertEqual(sorted(self.done), [0, 1, 2, 3])

    def test_a_group_shares_a_folder_until_a_problem(self):
        self.assertIn("(10 inside)", self.series(self.one, group=4)[1])
        self.assertIn("(3 inside)", self.series(self.bad, "--seed", "2", group=4)[1])


if __name__ == "__main__":
    unittest.main()
