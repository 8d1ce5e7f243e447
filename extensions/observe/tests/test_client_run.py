"""The program by which `cohort export` feeds MLflow (extensions/observe/export/client_run.py), with a client of MLflow's that has its
moods: what it loses, refuses and answers too late. test_mlflow has the real one.
"""

import importlib.util
import itertools
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "export/client_run.py"


class MlflowException(Exception):
    STATUS = {"RESOURCE_DOES_NOT_EXIST": 404, "INVALID_PARAMETER_VALUE": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}

    def __init__(self, text, error_code="INTERNAL_ERROR"):
        super().__init__(text)
        self.error_code = error_code

    def get_http_status_code(self):
        return self.STATUS.get(self.error_code, 500)


class Store:
    """MLflow's memory: points are a set, parameters never change."""

    def __init__(self):
        self.experiments, self.runs, self.artifacts = {}, {}, {}
        self.calls, self.received, self.trouble = 0, 0, lambda call: None
        self.artifact_uri = "mlflow-artifacts:/1/run/artifacts"


class MlflowClient:
    store = None

    def __init__(self, uri):
        self.uri = uri

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.store.calls += 1
            trouble = self.store.trouble(name)
            if trouble is not None and trouble != "lost":
                raise trouble
            answer = getattr(self, "_" + name)(*arguments, **named)
            if trouble == "lost":  # the request was carried out, and nobody knows
                raise MlflowException("lost")
            return answer

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _get_experiment_by_name(self, name):
        return self.store.experiments.get(name)

    def _create_experiment(self, name):
        self.store.experiments[name] = types.SimpleNamespace(experiment_id="7", lifecycle_stage="active")
        return "7"

    def _run(self, run_id):
        if run_id not in self.store.runs:
            raise MlflowException("no such run", "RESOURCE_DOES_NOT_EXIST")
        return self.store.runs[run_id]

    def _get_run(self, run_id):
        self._run(run_id)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id, experiment_id="7", artifact_uri=self.store.artifact_uri))

    def _create_run(self, experiment, start_time, tags, run_name):
        run_id = f"run{len(self.store.runs)}"
        self.store.runs[run_id] = types.SimpleNamespace(
            name=run_name, start=start_time, tags=dict(tags), parameters={}, points=set(), status="RUNNING", end=0
        )
        return self._get_run(run_id)

    def _search_runs(self, experiments, filter_string, max_results):
        return [
            self._get_run(run_id) for run_id, run in self.store.runs.items()
            if any(filter_string == f"tags.`{name}` = '{value}'" for name, value in run.tags.items())
        ]  # fmt: skip

    def _log_batch(self, run_id, metrics, params, tags):
        run = self._run(run_id)
        if len(metrics) > 1000 or len(params) > 100 or len(tags) > 100:
            raise MlflowException("too many", "BAD_REQUEST")
        for one in params:
            if run.parameters.get(one.key, one.value) != one.value:
                raise MlflowException("Changing param values is not allowed", "INVALID_PARAMETER_VALUE")
        run.parameters.update({one.key: one.value for one in params})
        run.tags.update({one.key: one.value for one in tags})
        self.store.received += len(metrics)
        run.points.update((one.key, one.step, one.timestamp, str(one.value)) for one in metrics)

    def _update_run(self, run_id, status):
        self._run(run_id).status = status

    def _set_terminated(self, run_id, status, end_time):
        run = self._run(run_id)
        run.status, run.end = status, end_time

    def _log_artifact(self, run_id, path):
        self.store.artifacts[os.path.basename(path)] = pathlib.Path(path).read_text()

    def _log_text(self, run_id, text, name):
        self.store.artifacts[name] = text


def entity(*names):
    return lambda *values: types.SimpleNamespace(**dict(zip(names, values)))


@unittest.skipUnless(PROGRAM.exists(), "needs the repository")
class Mlflow(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.record = pathlib.Path(folder.name) / "run.jsonl"
        modules = {
            "mlflow": types.SimpleNamespace(MlflowClient=MlflowClient),
            "mlflow.entities": types.SimpleNamespace(
                Metric=entity("key", "value", "timestamp", "step"), Param=entity("key", "value"), RunTag=entity("key", "value")
            ),
            "mlflow.exceptions": types.SimpleNamespace(MlflowException=MlflowException),
        }
        self.store = MlflowClient.store = Store()
        spec = importlib.util.spec_from_file_location("client_run", PROGRAM)
        self.program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.program)
        self.said, self.waits, self.now, self.on_wait = [], 0, 0.0, lambda: None
        self.program.say = self.said.append
        for patch in (
            mock.patch.dict(sys.modules, modules),
            mock.patch.dict(os.environ),
            mock.patch.object(self.program.time, "sleep", self.sleep),
            mock.patch.object(self.program.time, "monotonic", lambda: self.now),
            mock.patch.object(self.program.logging, "disable"),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def sleep(self, seconds):
        self.waits += 1
        self.now += seconds
        self.on_wait()

    def append(self, **line):
        with open(self.record, "a") as file:
            file.write(json.dumps(line) + "\n")

    def append_steps(self, first, last):
        for step in range(first, last + 1):
            self.append(time=1000 + step + 0.25, step=step, values={"loss": step * 0.5})

    def start(self, rate=0.5):
        self.append(time=1000.5, start={"program": "digits", "world_size": 2, "job": "digits-1", "parameters/lr": rate, "parameters/seed": 1})

    def client(self, **to):
        place = {"uri": "http://h:5000", "user": "", "password": "", "experiment": "x", "experiment_id": "", "run": "", "name": ""}
        return self.program.Mlflow({**place, "record": str(self.record), "patience": 900, **to})

    def export(self, state="FINISHED", **to):
        """Sends lines like `cohort export`: each says at which offset the next one begins."""
        client, end = self.client(**to), 0
        try:
            for text in self.record.read_bytes().splitlines(keepends=True):
                end += len(text)
                client.take({**json.loads(text), "end": end})
                if end % 7 == 0:
                    client.flush()
            client.finish(state, "<svg>")
        finally:
            if client.fd is not None:
                os.close(client.fd)

    def refusal(self, **to):
        with self.assertRaises(self.program.Failed) as refused:
            self.export(**to)
        return str(refused.exception)

    def test_a_record_is_a_run(self):
        self.start()
        self.append_steps(1, 2500)
        self.append(time=9.5, step=7, rank=3, values={"a b!/../ms": float("nan"), "i/nf": float("-inf")})
        self.append(time=5000)
        self.export(name="mine")
        (run,) = self.store.runs.values()
        self.assertEqual((run.name, run.start, run.status, run.end), ("mine", 1000500, "FINISHED", 5000000))
        self.assertEqual(run.parameters, {"lr": "0.5", "seed": "1"})
        self.assertEqual((run.tags["cohort.program"], run.tags["cohort.world_size"]), ("digits", "2"))
        self.assertEqual(len(run.points), 2502)
        self.assertLessEqual({("loss", 2500, 3500250, "1250.0"), ("a b_/__/ms/rank3", 7, 9500, "nan"), ("i/nf/rank3", 7, 9500, "-inf")}, run.points)
        self.assertEqual(self.store.artifacts, {"run.jsonl": self.record.read_text(), "curves.svg": "<svg>"})
        self.assertEqual(self.said, ["MLflow: http://h:5000/#/experiments/7/runs/run0"])
        # A second export has nothing to do. Another record in the same place is another run.
        received = self.store.received
        self.export(name="mine")
        self.assertEqual((self.store.received, len(self.store.runs)), (received, 1))
        self.record.unlink()
        self.start(0.125)
        self.export(name="mine")
        self.assertEqual(len(self.store.runs), 2)

    def test_a_server_in_trouble_loses_nothing_and_makes_nothing_twice(self):
        self.start()
        self.append_steps(1, 3500)
        moods = itertools.cycle(["lost", OSError("refused"), MlflowException("busy"), None])
        self.store.trouble = lambda call: next(moods)
        self.export()
        (run,) = self.store.runs.values()
        self.assertEqual((len(run.points), run.status), (3500, "FINISHED"))
        self.assertGreater(self.store.received, 3500)
        self.assertIn("MLflow at http://h:5000: refused; trying on, the record keeps what there is", self.said)
        self.assertIn("MLflow at http://h:5000 answers again", self.said)

    def test_what_was_sent_before_a_kill_is_not_sent_again(self):
        self.start()
        self.append_steps(1, 2500)
        self.store.trouble = lambda call: MlflowException("busy") if self.store.received >= 2000 else None
        self.assertIn("busy", self.refusal())
        self.assertGreaterEqual(self.now, 900)
        self.store.trouble = lambda call: None
        self.append_steps(2501, 2600)
        self.export()
        (run,) = self.store.runs.values()
        self.assertEqual(len(run.points), 2600)
        self.assertEqual(self.store.received, 2600)

    def test_a_run_is_found_by_whoever_was_killed_before_it_was_known(self):
        self.start()
        self.store.trouble = lambda call: "lost" if call == "create_run" else None
        self.assertIn("lost", self.refusal(patience=0))
        self.export()
        self.assertEqual(len(self.store.runs), 1)

    def test_parameters_that_change_are_tags(self):
        self.start()
        self.append_steps(1, 3)
        self.start(0.25)
        self.export(state="KILLED")
        (run,) = self.store.runs.values()
        self.assertEqual((run.parameters["lr"], run.tags["resume.1.lr"], run.status), ("0.5", "0.25", "KILLED"))
        self.assertNotIn("resume.1.seed", run.tags)
        self.append_steps(4, 4)  # the run goes on
        self.export(state="RUNNING")
        self.assertEqual((run.status, len(run.points)), ("RUNNING", 4))
        self.export(state="FAILED")
        self.assertEqual((run.status, len(self.store.runs)), ("FAILED", 1))

    def test_a_run_of_somebody_else_is_written_into_and_not_ended(self):
        theirs = types.SimpleNamespace(tags={}, parameters={"lr": "7"}, points=set(), status="RUNNING", end=0)
        self.store.runs["theirs"] = theirs
        self.start()
        self.append_steps(1, 5)
        self.export(run="theirs")
        self.assertEqual((len(self.store.runs), theirs.status, len(theirs.points)), (1, "RUNNING", 5))
        self.assertEqual((theirs.parameters, theirs.tags["cohort.parameter.lr"]), ({"lr": "7", "seed": "1"}, "0.5"))
        self.assertIn("no such run", self.refusal(run="nobody's"))

    def test_artifacts_that_are_refused_come_with_another_export(self):
        self.start()
        self.store.trouble = lambda call: MlflowException("no room") if call == "log_artifact" else None
        self.export()
        self.assertEqual((self.store.runs["run0"].status, self.store.artifacts, self.waits), ("FINISHED", {}, 2))
        self.assertIn("MLflow does not take the record as an artifact", self.said[-1])
        self.store.trouble = lambda call: None
        self.export()
        self.assertEqual((len(self.store.artifacts), len(self.store.runs)), (2, 1))

    def test_artifacts_in_a_folder_of_the_servers_stay_out(self):
        self.start()
        self.store.artifact_uri = "/srv/mlruns/7/run0/artifacts"
        self.export()
        self.assertEqual(self.store.artifacts, {})
        self.assertIn("not among the artifacts", self.said[-1])

    def test_two_at_the_same_time_are_refused(self):
        self.start()
        first = self.client()
        first.take({"end": 1, "time": 1})
        self.assertIn("another process is doing the same", self.refusal())
        self.export(name="elsewhere")
        os.close(first.fd)

    def test_refusals_say_what_to_do(self):
        self.start()
        for error, advice in (
            (MlflowException("Invalid Host header - possible DNS rebinding attack detected", "PERMISSION_DENIED"), "--allowed-hosts"),
            (MlflowException("no", "UNAUTHENTICATED"), "MLFLOW_TRACKING_TOKEN"),
            (MlflowException("SSLError: CERTIFICATE_VERIFY_FAILED"), "MLFLOW_TRACKING_SERVER_CERT_PATH"),
        ):
            self.store.trouble = lambda call, error=error: error
            self.assertIn(advice, self.refusal())
        self.assertEqual(self.waits, 0)
        self.store.trouble = lambda call: None
        self.store.experiments["x"] = types.SimpleNamespace(experiment_id="7", lifecycle_stage="deleted")
        self.assertIn("mlflow experiments restore -x 7", self.refusal())

    def test_an_address_that_never_answers_is_given_up_early_and_shows_no_password(self):
        self.start()
        self.store.trouble = lambda call: OSError("refused")
        refusal = self.refusal(user="me", password="secret")
        self.assertGreaterEqual(self.now, 60)
        self.assertLess(self.now, 100)
        self.assertNotIn("secret", refusal + " ".join(self.said))
        self.assertEqual(os.environ["MLFLOW_TRACKING_PASSWORD"], "secret")

    def test_names_are_paths_that_mlflow_accepts(self):
        for name, key in (("a//b", "a/b"), ("/", "_"), ("../x", "__/x"), ("ä(%)", "ä___"), ("a/./b", "a/_/b"), ("loss.val-1 : x", "loss.val-1 : x")):
            self.assertEqual(self.program.Mlflow.key(name), key)
        self.assertEqual(self.program.Mlflow.key("a" * 249 + "/bc"), "a" * 249)


if __name__ == "__main__":
    unittest.main()
