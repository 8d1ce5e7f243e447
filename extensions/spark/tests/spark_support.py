"""A Spark for tests: the one that COHORT_TEST_SPARK names (a folder with the package pyspark, as made by `pip install
--target`), or this Python's, or the one in build/spark (tools/setup --for all). Its JVM starts once per process and ends
with it. A missing part is reported, and the tests are skipped."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def _folder():
    named = os.environ.get("COHORT_TEST_SPARK")
    if named:
        return pathlib.Path(named)
    built = sorted((ROOT / "build" / "spark").glob("4.*"))
    return built[-1] if built else None


def without_cohort(path):
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry and not (pathlib.Path(entry) / "cohort").is_dir())


def find():
    """Puts pyspark on the path of this process. Raises SkipTest if there is no pyspark or no Java."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise unittest.SkipTest("Spark needs Java 17: Debian's openjdk-17-jre-headless")
    folder = _folder()
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise unittest.SkipTest(f"{error}: tools/setup --for all puts it into build/spark") from error
    return folder


def _path(folder, executors_have_cohort=True, path=None):
    path = os.environ.get("PYTHONPATH", "") if path is None else path
    if not executors_have_cohort:
        path = without_cohort(path)
    entries = [str(folder)] if folder is not None and str(folder) not in path.split(os.pathsep) else []
    return os.pathsep.join([*entries, *filter(None, [path])])


def start(master, executors_have_cohort=True, host="127.0.0.1", **settings):
    """Returns a session whose driver is reached as `host`. Settings have _ instead of dots: spark_task_cpus=1."""
    folder = find()
    os.environ["PYTHONPATH"] = _path(folder, executors_have_cohort)
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP=host)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for name, value in {
        "spark_driver_host": host,
        "spark_driver_memory": "512m",
        "spark_executor_memory": "512m",
        "spark_ui_enabled": "false",
        "spark_ui_showConsoleProgress": "false",
        "spark_local_dir": tempfile.gettempdir(),
        **settings,
    }.items():
        builder = builder.config(name.replace("_", "."), str(value))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def stop(session):
    from pyspark import SparkContext

    session.stop()
    gateway = SparkContext._gateway
    if gateway is not None:  # another session of this process would have this one's environment
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        SparkContext._gateway = SparkContext._jvm = None


class Standalone:
    """A standalone cluster: a master and workers, each with fake GPUs. `on`: (host, prefix of commands that run there)."""

    def __init__(self, workers, folder, gpus=0, cores=2, environment=None, master=("127.0.0.1", [])):
        self._processes = []
        self._folder = pathlib.Path(folder)
        self._environment = {**os.environ, **(environment or {})}
        self._environment["PYTHONPATH"] = _path(find(), path=self._environment.get("PYTHONPATH", ""))
        import pyspark

        home = pathlib.Path(pyspark.__file__).parent
        self._class = [str(home / "bin" / "spark-class")]
        self._environment["SPARK_HOME"] = str(home)
        settings = self._folder / "worker.conf"
        lines = ["spark.worker.cleanup.enabled true"]
        if gpus:
            script = self._folder / "gpus"
            names = ",".join(f'"{i}"' for i in range(gpus))
            script.write_text(f"#!/bin/sh\necho '{{\"name\": \"gpu\", \"addresses\": [{names}]}}'\n")
            script.chmod(0o755)
            lines += [f"spark.worker.resource.gpu.amount {gpus}", f"spark.worker.resource.gpu.discoveryScript {script}"]
        settings.write_text("\n".join(lines) + "\n")
        host, words = master
        log = self._start(words, "master", "org.apache.spark.deploy.master.Master", "--host", host, "--port", "0", "--webui-port", "0")
        self.url = self._wait_for(log, "spark://")
        for i, (host, words) in enumerate(workers):
            log = self._start(
                words, f"worker-{i}", "org.apache.spark.deploy.worker.Worker", "--host", host, "--cores", str(cores),
                "--memory", "2G", "--webui-port", "0", "--properties-file", str(settings),
                "--work-dir", str(self._folder / f"work-{i}"), self.url,
            )
            self._wait_for(log, "Successfully registered with master")

    def _start(self, words, name, *command):
        log = self._folder / f"{name}.log"
        environment = dict(self._environment, SPARK_DAEMON_MEMORY="256m")
        with open(log, "wb") as file:
            self._processes.append(
                subprocess.Popen(
                    [*words, *self._class, *command], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )
            )
        return log

    def _wait_for(self, log, word):
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            for line in log.read_text(errors="replace").splitlines():
                if word in line:
                    return line[line.index(word):].split()[0].rstrip(".,")
            if self._processes[-1].poll() is not None:
                break
            time.sleep(0.05)
        text = log.read_text(errors="replace")[-2000:]
        self.end()
        raise AssertionError(f"{log.name} does not say {word}: {text}")

    def end(self):
        for process in reversed(self._processes):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
