"""Tests what decides on a comparison's table and on what is measured again, with records made up here."""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from cases import collectives
from lib import mpi_wheels, records


def entry(number, size, cores="near", **values):
    cell = {"collective": "all_reduce", "type": "float32", "bytes": size, "state": "hot", "ranks": 2, "memory": "heap", "cores": cores}
    return {"round": number, "cell": cell, "unit": "us", "rate": False, "values": values}


def options(*words):
    parser = argparse.ArgumentParser()
    collectives.options(parser)
    found = parser.parse_args(words)
    found.sizes = found.sizes or collectives.SIZES
    return found


class Table(unittest.TestCase):
    def test_worst_cells_first_each_against_its_best_peer(self):
        found = [entry(number, 8, cohort=1, openmpi5=4, gloo=30 + number) for number in range(3)]
        found += [entry(number, 1024, cohort=10, openmpi5=20, gloo=5 + number) for number in range(3)]
        found += [entry(0, 64, cohort=7)]
        rows = [(entries[0]["cell"]["bytes"], best, within) for entries, best, within in records.worst_first(found)]
        self.assertEqual(rows, [(1024, "gloo", [0.5, 0.6, 0.7]), (8, "openmpi5", [4, 4, 4]), (64, None, [])])

    def test_rounds_in_which_the_cores_moved_do_not_count(self):
        found = [entry(0, 8, cohort=2, gloo=4), entry(1, 8, cores="moved", cohort=2, gloo=1)]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            records.print_worst_first(found)
        self.assertIn("| 2.00 (2.00-2.00) | Gloo | 4 | 2 | us | 1 |", said.getvalue())
        self.assertIn("in 0 a peer is faster", said.getvalue())
        self.assertIn("1 measurements in which the cores' distance changed", said.getvalue())


class Resuming(unittest.TestCase):
    def test_a_file_goes_on_after_its_last_whole_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "found.jsonl")
            with open(path, "w", encoding="utf-8") as file:
                file.write(json.dumps({"event": "header"}) + "\n" + json.dumps(entry(0, 8, cohort=1)) + "\n" + '{"round": 1, "ce')
            recorder = records.Recorder(path, resume=True)
            done = collectives.measured(recorder.records)
            cells = collectives.cells_of(options("--collectives", "all_reduce", "--types", "float32", "--sizes", "8,64"), 2)
            again = [(number, cell["bytes"]) for cell in cells for number in range(2)
                     if (number, collectives.key_of(cell, 2)) not in done]
            self.assertEqual(again, [(1, 8), (0, 64), (1, 64)])
            new = entry(1, 8, cohort=2)
            recorder.add(new["round"], new["cell"], new["unit"], new["values"])
            recorder.file.close()
            self.assertEqual(records.read(path), [entry(0, 8, cohort=1), new])

    def test_without_resume_a_file_begins_anew(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "found.jsonl")
            for _ in range(2):
                recorder = records.Recorder(path)
                recorder.add(0, {}, "us", {"cohort": 1})
                recorder.file.close()
            self.assertEqual(len(records.read(path)), 1)


class Cells(unittest.TestCase):
    def test_the_default_is_all_on_two_ranks_and_all_reduce_in_all_types_on_four(self):
        two, four = (collectives.cells_of(options(), ranks) for ranks in (2, 4))
        sizes = len(collectives.SIZES)
        self.assertEqual(len(two), 9 * sizes + 3 * sizes + 1)
        self.assertEqual({cell["type"] for cell in two if cell["collective"] != "all_reduce"}, {"float32"})
        self.assertEqual(len(four), 4 * sizes)
        self.assertEqual({cell["collective"] for cell in four}, {"all_reduce"})

    def test_full_has_every_type_and_one_barrier(self):
        cells = collectives.cells_of(options("--full"), 8)
        self.assertEqual(len(cells), 9 * 4 * len(collectives.SIZES) + 1)
        self.assertEqual(len({collectives.key_of(cell, 8) for cell in cells}), len(cells))


class Wheels(unittest.TestCase):
    def test_without_network_it_says_what_is_missing(self):
        def run(command, **_):
            if "install" in command:
                raise subprocess.CalledProcessError(1, command, output=b"first\nno matching distribution\n")
        with tempfile.TemporaryDirectory() as build, mock.patch("subprocess.run", run):
            said = mpi_wheels.prepare(build, "mpich5", lambda text: None)
        for words in ("mpich==5.0.2 is not there", "pip install", "no matching distribution", "network"):
            self.assertIn(words, said)


if __name__ == "__main__":
    unittest.main()
