"""MLflow, for real: its server over SQLite, read back by its own client; and its run in a driver and in ranks.

Left out where MLflow is not installed.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import cohort.track
from cohort._launch import mlflow as _mlflow

HAS_MLFLOW = importlib.util.find_spec("mlflow") is not None and importlib.util.find_spec("alembic") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None
COMMAND = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
SECONDS = 400  # MLflow takes long to import, and longer to make a database
AWAY = 30  # seconds without a server

# As the second article has it: the function that trains, and the driver, in whose run rank 0 logs.
ARTICLE = """
import os, sys
import mlflow
from cohort import Distributor as TorchDistributor


def main_fn(folder):
    import os
    import mlflow, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    os.chdir(folder)
    mlflow.set_tracking_uri({uri!r})
    mlflow.set_experiment("experiment of the article")
    dist.init_process_group({backend!r})
    with mlflow.start_run(run_name="inner") as run:  # every rank does
        mlflow.log_metric("first", 1.0)
    global_rank = int(os.environ["RANK"])
    if global_rank == 0:
        mlflow.log_params({{"batch_size": 8, "epochs": 3, "trainer": "TorchDistributor"}})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    for epoch in range(1, 4):
        loss = ddp_model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if global_rank == 0:
            mlflow.log_metric("loss", loss.item(), step=epoch)
    if global_rank == 0:
        mlflow.pytorch.log_model(ddp_model, name="model", pip_requirements=["torch"])
        assert ddp_model.training and model[1].training
    dist.destroy_process_group()
    return run.info.run_id


if __name__ == "__main__":
    mlflow.set_tracking_uri({uri!r})
    mlflow.set_experiment("experiment of the article")
    with mlflow.start_run() as run:
        found = TorchDistributor(num_processes={ranks}, local_mode=True, use_gpu=False).run(main_fn, sys.argv[1])
        assert found == run.info.run_id, (found, run.info.run_id)
        print("state:", mlflow.get_run(run.info.run_id).info.status)
"""

WITHOUT_RUN = """
import sys
import mlflow, cohort


def main(folder):
    import os
    import mlflow

    os.chdir(folder)
    with mlflow.start_run():
        mlflow.log_param("rank", os.environ["RANK"])


if __name__ == "__main__":
    cohort.run(main, (sys.argv[1],), np=4)
"""

# A driver that has a run at a server, whose ranks log by cohort.track, fed to the server from outside the ranks.
TRACKED = """
import os, pathlib, sys
import mlflow, cohort


def main(secret):
    import os, pathlib, time
    import cohort.track

    if os.environ["RANK"] == "0":
        for step in range(1, 301):
            cohort.track.log(step, loss=1.0 / step)
        cohort.track.close()
        # MLflow's client takes what the ranks leave of the machine to begin.
        until = time.monotonic() + 200
        while not any(pathlib.Path(os.environ["COHORT_RUN_DIR"]).glob("mlflow-*.state")) and time.monotonic() < until:
            time.sleep(0.1)
    seen = 0
    until = time.monotonic() + 3
    while time.monotonic() < until:
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen += secret.encode() in path.read_bytes()
            except OSError:
                pass
    return seen, os.environ.get("MLFLOW_TRACKING_TOKEN") == secret


if __name__ == "__main__":
    with mlflow.start_run() as run:
        seen = cohort.run(main, (os.environ["MLFLOW_TRACKING_TOKEN"],), np=2, run_dir="kept",
                          options=["--track", "mlflow:"])
        assert seen == [(0, True)] * 2, seen
        print("run:", run.info.run_id, mlflow.get_run(run.info.run_id).info.status)
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """MLflow's own, which can be killed and started again."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.process = None

    @property
    def uri(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        log = open(self.folder / "server.log", "ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
             "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1", "--port", str(self.port),
             "--workers", "1"],
            cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            env=dict(os.environ, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"))
        log.close()
        until = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.2)

    def kill(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class Base(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.elsewhere = self.folder / "elsewhere"
        self.elsewhere.mkdir()

    def python(self, text, *arguments, **environment):
        program = self.folder / "program.py"
        program.write_text(text)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        done = subprocess.run([sys.executable, program, *map(str, arguments)], cwd=self.folder, capture_output=True,
                              text=True, timeout=SECONDS, env={**clean, **environment})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done

    def client(self, uri):
        from mlflow import MlflowClient

        return MlflowClient(uri)

    def the_run(self, client):
        experiments = [one.experiment_id for one in client.search_experiments()]
        runs = client.search_runs(experiments)
        self.assertEqual(len(runs), 1)
        return runs[0]


class Environment(unittest.TestCase):
    """The ranks' environment; without MLflow."""

    def setUp(self):
        for name in [name for name in os.environ if name.startswith(("MLFLOW_", "COHORT_MLFLOW"))]:
            self.addCleanup(os.environ.__setitem__, name, os.environ.pop(name))
        if "mlflow" in sys.modules:  # for other tests
            self.addCleanup(sys.modules.__setitem__, "mlflow", sys.modules.pop("mlflow"))

    def test_a_store_is_the_same_from_anywhere(self):
        for uri, there in (
            ("sqlite:///mlflow.db", "sqlite:////here/mlflow.db"),
            ("sqlite:////abs/mlflow.db", "sqlite:////abs/mlflow.db"),
            ("sqlite:///:memory:", "sqlite:///:memory:"),
            ("file:./mlruns", "file:///here/mlruns"),
            ("./mlruns", "file:///here/mlruns"),
            ("file:///abs/mlruns", "file:///abs/mlruns"),
            ("/abs/mlruns", "/abs/mlruns"),
            ("http://host:5000", "http://host:5000"),
            ("databricks", "databricks"),
            ("databricks://profile", "databricks://profile"),
            ("postgresql://user:pw@host/db", "postgresql://user:pw@host/db"),
        ):
            self.assertEqual(_mlflow.absolute_uri(uri, "/here"), there)

    def test_without_mlflow_nothing_is_imported_and_a_run_of_somebody_else_does_not_arrive(self):
        environment = {"COHORT_MLFLOW_RUN": "of another driver"}
        _mlflow.hand_on(environment)
        self.assertEqual(environment, {"COHORT_MLFLOW": "1"})
        environment = {"COHORT_MLFLOW": "0", "MLFLOW_TRACKING_URI": "./here"}
        _mlflow.hand_on(environment)
        self.assertEqual(environment, {"COHORT_MLFLOW": "0", "MLFLOW_TRACKING_URI": "./here"})
        environment = {"MLFLOW_TRACKING_URI": "sqlite:///mine.db"}
        _mlflow.hand_on(environment)
        self.assertEqual(environment["MLFLOW_TRACKING_URI"], f"sqlite:///{os.getcwd()}/mine.db")
        self.assertNotIn("mlflow", sys.modules)


@unittest.skipUnless(HAS_MLFLOW, "needs MLflow: pip install mlflow")
class Ranks(Base):
    """The driver's run and its ranks; each in a new database, which they all would make at the same time."""

    @unittest.skipUnless(HAS_TORCH, "needs torch")
    def test_the_second_article_logs_into_the_drivers_run(self):
        done = self.python(ARTICLE.format(uri="sqlite:///mine.db", ranks=4, backend="cohort"), self.elsewhere)
        self.assertIn("state: RUNNING", done.stdout)
        told = [line for line in (done.stdout + done.stderr).splitlines() if "MLflow's run is written on rank 0" in line]
        self.assertEqual(len(told), 1, done.stdout + done.stderr)
        self.assertEqual(list(self.elsewhere.iterdir()), [])
        client = self.client(f"sqlite:///{self.folder}/mine.db")
        run = self.the_run(client)
        self.assertEqual(run.info.status, "FINISHED")
        self.assertEqual(run.data.params, {"batch_size": "8", "epochs": "3", "trainer": "TorchDistributor"})
        self.assertEqual([p.step for p in client.get_metric_history(run.info.run_id, "loss")], [1, 2, 3])
        self.assertEqual(run.data.metrics["first"], 1.0)
        self.check_model(f"sqlite:///{self.folder}/mine.db")

    def check_model(self, uri):
        """It is loaded without a process group, and says what it takes."""
        done = self.python("""
import sys
import mlflow, numpy
mlflow.set_tracking_uri(sys.argv[1])
(model,) = mlflow.search_logged_models(
    experiment_ids=[one.experiment_id for one in mlflow.search_experiments()], output_format="list")
signature = mlflow.models.get_model_info(model.model_uri).signature
print(signature.inputs.inputs[0].shape, signature.outputs.inputs[0].shape)
predict = mlflow.pyfunc.load_model(model.model_uri).predict
ones = numpy.ones((5, 4), "float32")
first = predict(ones)
assert first.shape == (5, 2), first.shape
assert (first == predict(ones)).all()  # nothing is dropped out
""", uri)
        self.assertIn("(-1, 4) (-1, 2)", done.stdout)

    def test_without_a_run_of_the_drivers_rank_0_makes_one_in_its_store(self):
        self.python(WITHOUT_RUN, self.elsewhere)
        self.assertEqual(list(self.elsewhere.iterdir()), [])
        run = self.the_run(self.client(f"sqlite:///{self.folder}/mlflow.db"))
        self.assertEqual((run.info.status, run.data.params), ("FINISHED", {"rank": "0"}))

    def test_left_alone_every_rank_logs(self):
        text = WITHOUT_RUN.replace("    cohort.run", "    mlflow.search_experiments()\n    cohort.run")
        self.python(text.replace('os.chdir(folder)', 'import time; time.sleep(int(os.environ["RANK"]))'), self.elsewhere,
                    COHORT_MLFLOW="0")
        client = self.client(f"sqlite:///{self.folder}/mlflow.db")
        self.assertEqual(sorted(run.data.params["rank"] for run in client.search_runs(["0"])), ["0", "1", "2", "3"])


@unittest.skipUnless(HAS_MLFLOW, "needs MLflow: pip install mlflow")
@unittest.skipIf(COMMAND is None, "needs the command: COHORT_COMMAND")
class Sink(Base):
    def setUp(self):
        super().setUp()
        self.record = self.folder / "run.jsonl"

    def start_server(self):
        self.server = Server(self.folder)
        self.addCleanup(self.server.kill)
        self.server.start()
        return self.server.uri

    def export(self, uri):
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        done = subprocess.run([COMMAND, "export", self.record, "--to", f"mlflow:{uri}?experiment=x"], cwd=self.folder,
                              capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "PATH": path})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def expected(self, name):
        points = []
        for line in self.record.read_text().splitlines():
            event = json.loads(line)
            if name in event.get("values", {}):
                points.append((event["step"], round(event["time"] * 1000), float(event["values"][name])))
        return sorted(points)

    def stored(self, client, run, name):
        return sorted((p.step, p.timestamp, p.value) for p in client.get_metric_history(run.info.run_id, name))

    def test_a_record_is_read_back(self):
        self.read_back(self.start_server())

    def test_a_database_without_a_server(self):
        self.read_back("sqlite:///mine.db", f"sqlite:///{self.folder}/mine.db")

    def test_a_folder_without_a_server(self):
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow's newer versions want to be told so
        self.addCleanup(os.environ.pop, "MLFLOW_ALLOW_FILE_STORE")
        self.read_back("./runs", f"file://{self.folder}/runs")

    def read_back(self, to, uri=None):
        record = cohort.track.RunRecord(self.record, program="digits", world_size=2, parameters={"lr": 0.1, "seed": 3})
        for step in range(1, 1301):
            cohort.track.log(step, **{"loss": 1.0 / step, "val/acc": step * 0.001})
        cohort.track.close()
        record.write("step", step=1300, epoch=1.0, train_loss=0.25, lr=0.1)
        record.write("end", step=1300, epoch=1.0)
        said = self.export(to).stderr
        client = self.client(uri or to)
        run = self.the_run(client)
        self.assertIn(run.info.run_id, said)
        self.assertEqual(run.info.status, "FINISHED")
        self.assertEqual(run.data.params, {"lr": "0.1", "seed": "3"})
        self.assertEqual(run.data.tags["cohort.program"], "digits")
        for name in ("loss", "val/acc"):
            self.assertEqual(len(self.expected(name)), 1300)
            self.assertEqual(self.stored(client, run, name), self.expected(name))
        self.assertEqual(run.data.metrics["train_loss"], 0.25)
        artifacts = {one.path for one in client.list_artifacts(run.info.run_id)}
        self.assertEqual(artifacts, {"run.jsonl", "curves.svg"})
        copy = client.download_artifacts(run.info.run_id, "run.jsonl", str(self.elsewhere))
        self.assertEqual(pathlib.Path(copy).read_bytes(), self.record.read_bytes())
        # Another start with other parameters, in the same run.
        del record
        cohort.track.RunRecord(self.record, program="digits", world_size=2, parameters={"lr": 0.05, "seed": 3})
        self.export(to)
        run = self.the_run(client)
        self.assertEqual(run.data.params["lr"], "0.1")
        self.assertEqual(run.data.tags["resume.1.lr"], "0.05")

    def test_a_server_that_is_away_and_a_sink_that_is_killed_lose_nothing(self):
        self.start_server()
        writer = subprocess.Popen([sys.executable, "-c", """
import sys, time, cohort.track
record = cohort.track.RunRecord(sys.argv[1], program="writer")
until, step = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < until:
    step += 1
    cohort.track.log(step, loss=1.0 / step)
    time.sleep(0.01)
cohort.track.close()
record.write("end", step=step)
""", str(self.record), str(AWAY + 10)])
        self.addCleanup(writer.wait)
        self.addCleanup(writer.kill)

        def follow():
            follower = subprocess.Popen(
                [COMMAND, "export", self.record, "--to", f"mlflow:{self.server.uri}?experiment=x", "--follow"],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self.addCleanup(follower.stderr.close)
            self.addCleanup(follower.wait)
            self.addCleanup(follower.kill)
            return follower

        client = self.client(self.server.uri)
        follower = follow()
        self.assertIn("MLflow: ", follower.stderr.readline())
        time.sleep(3)
        self.server.kill()
        time.sleep(AWAY / 2)
        follower.kill()
        follower.wait()
        follower = follow()
        while "trying on" not in (line := follower.stderr.readline()):
            self.assertNotEqual(line, "", "it has ended")
        self.server.start()
        self.assertEqual(writer.wait(timeout=SECONDS), 0)
        said = follower.communicate(timeout=SECONDS)[1]
        self.assertEqual(follower.returncode, 0, said)
        self.assertIn("answers again", said)
        run = self.the_run(client)
        self.assertEqual(run.info.status, "FINISHED")
        self.assertGreater(len(self.expected("loss")), 1000)
        self.assertEqual(self.stored(client, run, "loss"), self.expected("loss"))

    def test_ranks_are_tracked_into_the_drivers_run_and_credentials_stay_hidden(self):
        self.start_server()
        secret = "very-secret-token-71"
        done = self.python(TRACKED, MLFLOW_TRACKING_URI=self.server.uri, MLFLOW_TRACKING_TOKEN=secret)
        run = self.the_run(self.client(self.server.uri))
        self.assertIn(f"run: {run.info.run_id} RUNNING", done.stdout)
        self.assertEqual(run.info.status, "FINISHED")
        client = self.client(self.server.uri)
        self.assertEqual([p.step for p in client.get_metric_history(run.info.run_id, "loss")], list(range(1, 301)))
        self.assertNotIn(secret, done.stdout + done.stderr)
        files = [path for path in (self.folder / "kept").rglob("*") if path.is_file()]
        self.assertGreater(len(files), 3)
        for path in files:
            self.assertNotIn(secret.encode(), path.read_bytes(), path)


if __name__ == "__main__":
    unittest.main()
