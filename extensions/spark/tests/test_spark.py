"""cohort.run and cohort.Distributor on a Spark cluster whose executors are separate processes without Cohort; the first job
sends it to them."""

import importlib.util
import io
import os
import pathlib
import re
import signal
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

import spark_support
from run_support import captured

import cohort
from cohort._launch import pickling as _pickling

MARK = "COHORT_TEST_MARK"
session = None
events = None


def setUpModule():
    global session, events
    spark_support.find()
    folder = tempfile.TemporaryDirectory(prefix="cohort-spark-test-")
    unittest.addModuleCleanup(folder.cleanup)
    events = pathlib.Path(folder.name)
    session = spark_support.start(
        "local-cluster[2,1,1024]", executors_have_cohort=False, spark_eventLog_enabled="true",
        spark_eventLog_dir=f"file://{events}", spark_eventLog_compress="false",
    )
    unittest.addModuleCleanup(spark_support.stop, session)
    # The executors do not have this file.
    _pickling.find_cloudpickle().register_pickle_by_value(sys.modules[__name__])


def place():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    return tuple(int(os.environ[name]) for name in names), cohort.__file__


def total(value):
    import array

    import cohort

    cohort.init()
    values = array.array("d", [value * (cohort.rank() + 1)])
    cohort.world().all_reduce(values)
    return values[0]


def with_horovod(a, b=0):
    import horovod

    print("said", flush=True)
    return os.environ["HOROVOD_RANK"], os.environ["HOROVOD_LOCAL_SIZE"], os.environ["GREETING"], horovod.__version__, a + b


def fail(rank, how):
    if int(os.environ["RANK"]) != rank:
        time.sleep(300)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError(f"rank {rank} knows why")


def sized(count):
    print("made", flush=True)
    return os.environ["RANK"].encode() * count


def wait_with_child(path):
    import subprocess

    subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path(f"{path}-{os.environ['RANK']}").touch()
    time.sleep(300)


def averages(rows, column):
    """Returns the averages of the column, by steps of 4 rows, and how many steps."""
    import array

    import cohort

    cohort.init()
    summed = array.array("d", [0.0, 0.0])
    steps = 0
    for table in rows.steps(4):
        mine = array.array("d", [float(sum(table.column(column).to_pylist())), table.num_rows])
        cohort.world().all_reduce(mine)
        summed[0] += mine[0]
        summed[1] += mine[1]
        steps += 1
    own = [value for batch in rows for value in batch.column(column).to_pylist()]
    assert len(own) == len(rows)
    assert summed[1] == rows.total
    return rows.counts, steps, summed[0] / summed[1] if summed[1] else None, rows.schema.names


def log_to_mlflow():
    import mlflow

    rank = int(os.environ["RANK"])
    with mlflow.start_run():
        mlflow.log_metric("rank", rank)
    if rank == 0:
        mlflow.log_param("trainer", "Distributor")
    return mlflow.active_run() is None, os.getcwd()


def processes(mark):
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in pathlib.Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            pass
    return found


def descendants(words):
    """Returns the processes of this test's Spark whose command line contains these words."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = pathlib.Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words not in text:
                continue
            pid = int(entry)
            while pid > 1:
                if pid == os.getpid():
                    found.append(int(entry))
                    break
                pid = int(pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    return sorted(found)


class Spark(unittest.TestCase):
    def eventually(self, condition, what, seconds):
        end = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), end, f"not within {seconds} s: {what}")
            time.sleep(0.02)

    def test_ranks_know_their_places_and_meet(self):
        with captured():
            places = cohort.run(place, np=2, on="spark")
            self.assertEqual(cohort.run(total, (2.0,), np="auto", on="spark"), [6.0, 6.0])
        self.assertEqual([one for one, _ in places], [(0, 0, 2, 2, 0, 1), (1, 1, 2, 2, 0, 1)])
        for _, file in places:
            self.assertNotEqual(file, cohort.__file__)  # the executors use the copy that was sent

    def test_results_of_any_size_come_from_all_ranks(self):
        with captured() as (out, _):
            results = cohort.run(sized, (20_000_000,), np=2, on="spark")
        self.assertEqual([result == str(rank).encode() * 20_000_000 for rank, result in enumerate(results)], [True, True])
        self.assertEqual(sorted(line.split(" | ")[1] for line in out.getvalue().splitlines()), ["made", "made"])

    def test_horovods_function(self):
        with unittest.mock.patch.object(sys, "path", [*sys.path, str(spark_support.ROOT / "extensions" / "horovod" / "package")]):
            import horovod.spark
        out, err = io.StringIO(), io.StringIO()
        results = horovod.spark.run(
            with_horovod, args=(1,), kwargs={"b": 2}, num_proc=2, env={"GREETING": "hello"}, stdout=out, stderr=err, verbose=0,
        )
        self.assertEqual(results, [(str(rank), "2", "hello", horovod.__version__, 3) for rank in range(2)])
        self.assertEqual(out.getvalue().count("said"), 2)
        with self.assertRaisesRegex(ValueError, "executable"):
            horovod.spark.run(with_horovod, args=(1,), executable="/usr/bin/python3")

    def test_the_exception_of_the_rank_is_raised(self):
        two = cohort.Distributor(2, local_mode=False, use_gpu=False)
        with captured(), self.assertRaisesRegex(LookupError, "rank 1 knows why") as raised:
            two.run(fail, 1, "raised")
        cause = raised.exception.__cause__
        self.assertEqual((cause.rank, cause.host), (1, "127.0.0.1"))
        self.assertIn("raise LookupError", cause.traceback)
        with captured(), self.assertRaisesRegex(cohort.RankFailed, "rank 0 of 2 .* SIGKILL") as raised:
            two.run(fail, 0, "killed")
        self.assertEqual(raised.exception.rank, 0)

    def test_too_few_slots_are_told_with_the_settings(self):
        begun = time.monotonic()
        with captured(), self.assertRaisesRegex(
            cohort.Unavailable, "3 processes need 3 tasks at a time, and Spark has 2 slots .*spark.executor.instances"
        ):
            cohort.run(place, np=3, on="spark")
        self.assertLess(time.monotonic() - begun, 15)

    def test_scripts_run_though_executors_do_not_have_them(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "train.py")
            # As on the executors' hosts, the file is missing when the ranks run.
            script.write_text("import os, sys; print('script', sys.argv[1:], os.environ['RANK'], __name__)\n")
            source = script.read_bytes()
            with captured() as (out, _):
                cohort.Distributor(2, local_mode=False, use_gpu=False).run(str(script), "--lr", 0.1)
            script.unlink()
            from cohort._launch.rank_call import run_script

            with captured() as (again, _):
                cohort.run(run_script, (str(script), source, ["--lr", "0.1"]), np=2, on="spark")
        for text in (out.getvalue(), again.getvalue()):
            self.assertEqual(
                sorted(line.split(" | ")[1] for line in text.splitlines()),
                [f"script ['--lr', '0.1'] {rank} __main__" for rank in range(2)],
            )

    def test_partitions_of_a_dataframe(self):
        two = cohort.Distributor(2, local_mode=False, use_gpu=False)
        ids = session.range(0, 11, 1, 2)
        for frame, counts, steps, mean in (
            (ids, (5, 6), 2, 5.0),
            (ids.filter("id > 7"), (0, 3), 1, 9.0),
            (ids.filter("id > 100"), (0, 0), 0, None),
        ):
            with captured():
                self.assertEqual(two.run_on_dataframe(averages, frame, "id"), (counts, steps, mean, ["id"]))
        with captured():
            counts, _, mean, _ = two.run_on_dataframe(averages, session.range(0, 20, 1, 5), column="id")
        self.assertEqual((sum(counts), mean), (20, 9.5))
        with self.assertRaisesRegex(ValueError, "local_mode=False"):
            cohort.Distributor(2, use_gpu=False).run_on_dataframe(averages, ids, "id")

    @unittest.skipUnless(importlib.util.find_spec("mlflow"), "MLflow is not installed")
    def test_rank_0_logs_into_the_drivers_run(self):
        import mlflow

        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ), captured() as (_, err):
            before = os.getcwd()
            self.addCleanup(os.chdir, before)
            os.chdir(folder)
            mlflow.set_tracking_uri("sqlite:///runs.db")  # below the driver's folder, which is not the executors'
            self.addCleanup(mlflow.set_tracking_uri, None)
            mlflow.set_experiment("on executors")
            with mlflow.start_run() as run:
                results = cohort.run(log_to_mlflow, np=2, on="spark")
                status = mlflow.get_run(run.info.run_id).info.status
            found = mlflow.search_runs(search_all_experiments=True, output_format="list")
            os.chdir(before)
        self.assertEqual(status, "RUNNING", err.getvalue())
        self.assertEqual([one.info.run_id for one in found], [run.info.run_id])
        self.assertEqual((found[0].data.metrics, found[0].data.params), ({"rank": 0.0}, {"trainer": "Distributor"}))
        self.assertNotIn(folder, [where for _, where in results])

    def test_nothing_of_a_job_stays_in_the_worker_or_is_shown(self):
        from cohort._spark import stage

        sent = []
        plain = stage.Stage._with_own_address

        def keeping(self, invitation):
            sent.append(invitation)
            return plain(self, invitation)

        inherited = list(os.environ)  # variables of the cluster that this process has started

        def look(batches):
            import pyarrow

            prefixes = ("COHORT", "RANK", "MASTER_", "LOCAL_RANK")
            names = [name for name in os.environ if name.startswith(prefixes) and name not in inherited]
            yield pyarrow.RecordBatch.from_pydict({"name": names})

        def seen():
            text = b""
            for entry in filter(str.isdigit, os.listdir("/proc")):
                for file in ("cmdline", "environ"):
                    try:
                        text += pathlib.Path("/proc", entry, file).read_bytes()
                    except OSError:
                        pass
            return text

        with unittest.mock.patch.object(stage.Stage, "_with_own_address", keeping), captured():
            shown = cohort.run(seen, np=2, on="spark", env={"COHORT_TEST_OTHER": "1"})
        self.assertEqual(session.range(0, 2, 1, 2).mapInArrow(look, "name string").collect(), [])
        secret = sent[0].split()[1].encode()
        self.assertEqual(len(secret), 64)
        for text in shown:
            self.assertIn(b"COHORT_TEST_OTHER", text)
            self.assertNotIn(secret, text)
        logs = [file.read_bytes() for file in events.rglob("*") if file.is_file()]
        self.assertTrue(logs and any(b"mapInArrow" in log or b"MapInArrow" in log for log in logs))
        for log in logs:
            self.assertNotIn(secret, log)

    def struck(self, strike, expected, seconds=5.0):
        """Runs a job, calls `strike` when all ranks run, and checks the exception and that no process is left."""
        with tempfile.TemporaryDirectory() as folder:
            there = [pathlib.Path(f"{folder}/up-{rank}") for rank in range(2)]
            at = []

            def later():
                self.eventually(lambda: all(path.exists() for path in there), "ranks run", 90)
                at.append(time.monotonic())
                strike()

            thread = threading.Thread(target=later)
            thread.start()
            try:
                with captured(), self.assertRaises(expected) as raised:
                    cohort.run(wait_with_child, (f"{folder}/up",), np=2, on="spark", env={MARK: folder}, timeout=200)
            finally:
                thread.join(100)
            self.assertLess(time.monotonic() - at[0], seconds)
            self.eventually(lambda: not processes(folder), "nothing is left", 2)
        return str(raised.exception)

    def test_cancelled(self):
        text = self.struck(session.sparkContext.cancelAllJobs, cohort.RankFailed)
        self.assertRegex(text, "(?i)the Spark job has failed: .*cancelled")

    def test_interrupted(self):
        self.struck(lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt)

    def test_an_agent_is_killed(self):
        text = self.struck(lambda: os.kill(descendants("cohort agent --invited")[-1], signal.SIGKILL), cohort.RankFailed)
        self.assertRegex(text, "agent|guard")

    def test_a_python_worker_is_killed(self):
        def strike():
            agent = descendants("cohort agent --invited")[0]
            while b"agent" in pathlib.Path("/proc", str(agent), "cmdline").read_bytes():
                agent = int(pathlib.Path("/proc", str(agent), "stat").read_text().rpartition(")")[2].split()[1])
            os.kill(agent, signal.SIGKILL)

        self.assertRegex(self.struck(strike, cohort.RankFailed), "(?i)python worker|agent|way to")

    def test_zz_an_executor_is_killed(self):
        """The last test, because it takes a while until another executor replaces this one."""
        text = self.struck(
            lambda: os.kill(descendants("CoarseGrainedExecutorBackend")[0], signal.SIGKILL), cohort.RankFailed, 15.0
        )
        self.assertRegex(text, "(?i)executor|agent")


class KilledDriver(unittest.TestCase):
    PROGRAM = """\
import os, sys, time
import spark_support
import cohort

def wait(path):
    open(f"{path}-{os.environ['RANK']}", "w").close()
    time.sleep(300)

spark_support.start("local[2]")
cohort.run(wait, (sys.argv[1],), np=2, on="spark")
"""

    def left(self, mark, words):
        found = []
        for pid in processes(mark):
            try:
                if re.search(words, pathlib.Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()):
                    found.append(pid)
            except OSError:
                pass
        return found

    def test_leaves_nothing(self):
        import subprocess

        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "driver.py")
            program.write_text(self.PROGRAM)
            environment = {**os.environ, MARK: folder}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            driver = subprocess.Popen(
                [sys.executable, str(program), f"{folder}/up"], env=environment, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )
            try:
                end = time.monotonic() + 300
                while not all(pathlib.Path(f"{folder}/up-{rank}").exists() for rank in range(2)):
                    self.assertLess(time.monotonic(), end)
                    self.assertIsNone(driver.poll())
                    time.sleep(0.05)
                driver.kill()
                driver.wait(10)
                # First Cohort's processes. The JVM notices at the end of its stdin, and its shutdown takes time: its Python
                # workers wait for that.
                for ours, seconds in (("cohort agent|rank_call", 2), ("", 20)):
                    end = time.monotonic() + seconds
                    while self.left(folder, ours) and time.monotonic() < end:
                        time.sleep(0.05)
                    self.assertEqual(self.left(folder, ours), [])
            finally:
                for pid in processes(folder):
                    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    unittest.main()
