"""Output of `cohort export --to`, read by its consumers: TensorBoard, both readers of prometheus_client, csv.

Tests whose reader is not installed are left out, and say so.
"""

import array
import csv
import http.server
import importlib.util
import json
import math
import os
import pathlib
import queue
import random
import shutil
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import urllib.error
import urllib.request
import xml.etree.ElementTree

import cohort
import cohort.track

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None
try:
    import prometheus_client.openmetrics.parser
    import prometheus_client.parser
except ImportError:
    prometheus_client = None

try:
    from wandb.proto import wandb_internal_pb2
except ImportError:
    wandb_internal_pb2 = None

COMMAND = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
SECONDS = 60

WRITER = """
import random, sys, time
import cohort.track
record = cohort.track.RunRecord(sys.argv[1], program="writer", world_size=2)
first = int(sys.argv[2])
if first > 1:
    record.write("resume", step=first - 1)
step = first
while True:
    cohort.track.log(step, loss=1.0 / step, rate=step * 0.5)
    cohort.track.log(step, own=step, other=-step)
    if step % 10 == 0:
        cohort.track.flush()
        time.sleep(0.001)
    step += 1
"""


WITH_RECORD = """
import os, cohort.track
record = cohort.track.RunRecord(os.environ["COHORT_RUN_DIR"] + "/run.jsonl", program="p", parameters={"epochs": 2})
record.write("step", step=1, epoch=1, train_loss=0.5)
record.write("end", step=2)
"""


def float32(value):
    return array.array("f", [value])[0]


def wandb_records(folder):
    """Yields the newest offline run's records below `folder`: pieces of LevelDB's log, with wandb's messages."""
    data = max(folder.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime).read_bytes()
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def scalars(folder):
    """(step, value) of each tag, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(s.step, s.value) for s in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def logged(record, up_to=None):
    """The same, from the whole lines of a record, without steps that were repeated later."""
    found = {}
    for line in record.read_bytes().split(b"\n")[:-1]:
        event = json.loads(line)
        if event["event"] == "resume":
            found = {tag: [p for p in points if p[0] <= event["step"]] for tag, points in found.items()}
        if event["event"] == "metric":
            for tag, value in event["values"].items():
                found.setdefault(tag, []).append((event["step"], float32(float(value))))
    return found


class Exports(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.record = self.folder / "run.jsonl"

    def export(self, *words):
        done = subprocess.run([COMMAND, "export", *map(str, words)], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def write(self):
        record = cohort.track.RunRecord(self.record, program="digits \"x\"\\", world_size=2, parameters={"lr": 0.1})
        for step in range(1, 6):
            record.write("step", step=step, epoch=step / 5, train_loss=1.0 / step, lr=0.1, note="n")
            cohort.track.log(step, **{"val/loss": 2.0 / step, "odd\n,\"name": -step, "bad": math.inf if step == 2 else math.nan})
        cohort.track.close()
        record.write("epoch", step=5, epoch=1, test_loss=0.25, test_accuracy=0.75, checkpoint="/tmp/c")
        return record


@unittest.skipIf(COMMAND is None, "needs the command: COHORT_COMMAND")
class Files(Exports):
    @unittest.skipIf(prometheus_client is None, "needs prometheus_client: pip install prometheus_client")
    def test_prometheus_reads_both_formats(self):
        record = self.write()
        record.step(3, 96, 0.5, 0.125)
        record.write_communication()
        with open(self.record, "a") as file:
            file.write(json.dumps({"event": "communication", "time": 3.0, "samples": 4, "operations": {"all_reduce": {"count": 7, "bytes": 1e12, "waited_seconds": 0.5}}}) + "\n")
        (self.folder / "warnings.jsonl").write_text('{"event":"warning","time":2.0,"kind":"late_rank","text":"t"}\n' * 2 + '{"event":"warn')
        for options, parser in (
            ([], prometheus_client.parser),
            (["--openmetrics"], prometheus_client.openmetrics.parser),
        ):
            file = self.folder / "run.prom"
            self.export(self.folder, "--to", f"prometheus:{file}", *options)
            found = {}
            kinds = {}
            for family in parser.text_string_to_metric_families(file.read_text()):
                kinds[family.name] = family.type
                for sample in family.samples:
                    labels = dict(sample.labels)
                    self.assertEqual(labels.pop("job"), "digits \"x\"\\")
                    self.assertTrue(labels.pop("host"))
                    found[(sample.name, *sorted(labels.items()))] = sample.value
            self.assertEqual(found[("cohort_up",)], 0)
            self.assertEqual(found[("cohort_step",)], 5)
            self.assertEqual(found[("cohort_world_size",)], 2)
            self.assertEqual(found[("cohort_samples_total",)], 100)
            self.assertEqual(found[("cohort_warnings_total", ("kind", "late_rank"))], 2)
            self.assertEqual(found[("cohort_loss",)], 0.2)
            self.assertEqual(found[("cohort_learning_rate",)], 0.1)
            self.assertEqual(found[("cohort_step_seconds_sum",)], 0.5)
            self.assertEqual(found[("cohort_last_checkpoint_step",)], 5)
            self.assertEqual(found[("cohort_bytes_total", ("op", "all_reduce"))], 1e12)
            self.assertEqual(found[("cohort_metric", ("name", "val/loss"))], 0.4)
            self.assertEqual(found[("cohort_metric", ("name", "odd\n,\"name"))], -5)
            self.assertTrue(math.isnan(found[("cohort_metric", ("name", "bad"))]))
            self.assertEqual(kinds["cohort_samples"], "counter")
            self.assertEqual([f.name for f in self.folder.glob("*.prom*")], ["run.prom"])

    @unittest.skipIf(prometheus_client is None, "needs prometheus_client: pip install prometheus_client")
    def test_prometheus_scrapes_a_port_while_the_run_goes_on(self):
        record = self.write()
        token = self.folder / "token"
        token.touch(0o600)
        token.write_text("0123456789abcdef" * 4 + "\n")
        served = subprocess.Popen([COMMAND, "export", self.folder, "--to", "prometheus::0", "--token-file", token],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(served.wait)
        self.addCleanup(served.kill)
        address = served.stderr.readline().split()[-1]
        self.assertRegex(address, r"^http://127.0.0.1:\d+/metrics$")

        def scrape(**headers):
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token.read_text().strip()}", **headers})
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.headers["Content-Type"], answer.read().decode()

        def values(text, parser):
            return {sample.name: sample.value for family in parser.text_string_to_metric_families(text) for sample in family.samples}

        record.write("step", step=77, train_loss=0.125)
        until = time.monotonic() + SECONDS
        while values(scrape()[1], prometheus_client.parser).get("cohort_step") != 77:
            self.assertLess(time.monotonic(), until)
            time.sleep(0.02)
        kind, text = scrape()
        self.assertEqual(kind, "text/plain; version=0.0.4; charset=utf-8")
        self.assertEqual(values(text, prometheus_client.parser)["cohort_up"], 1)
        kind, text = scrape(Accept="application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2")
        self.assertEqual(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        self.assertEqual(values(text, prometheus_client.openmetrics.parser)["cohort_loss"], 0.125)
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address, timeout=SECONDS)
        self.assertEqual(refused.exception.code, 401)
        refused.exception.close()
        record.write("end", step=77)
        _, told = served.communicate(timeout=SECONDS)
        self.assertEqual(served.returncode, 0, told)

    @unittest.skipIf(shutil.which("openssl") is None, "needs openssl, for a certificate")
    def test_kubeflow_is_told_how_far_a_run_is(self):
        certificate = self.folder / "ca.crt"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", self.folder / "key", "-out", certificate],
                       check=True, capture_output=True, timeout=SECONDS)
        posts = queue.Queue()

        class Trainer(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                posts.put((self.path, self.headers["Authorization"], body["trainerStatus"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Trainer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, self.folder / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        token = self.folder / "token"
        token.write_text("first\n")
        variables = {"KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{server.server_port}/apis/x/status",
                     "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate), "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token)}
        record = cohort.track.RunRecord(self.record, program="p", world_size=2, parameters={"epochs": 4})
        record.write("step", step=10, epoch=1, train_loss=0.5)
        follower = subprocess.Popen([COMMAND, "export", self.folder, "--to", "kubeflow", "--follow"],
                                    env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(follower.stdout.close)
        self.addCleanup(follower.wait)
        self.addCleanup(follower.kill)
        path, shown, status = posts.get(timeout=SECONDS)
        self.assertEqual((path, shown, status["progressPercentage"]), ("/apis/x/status", "Bearer first", 25))
        self.assertIn({"name": "train_loss", "value": "0.5"}, status["metrics"])
        token.write_text("second")
        record.write("end", step=40)
        told = follower.communicate(timeout=SECONDS)[0]
        self.assertEqual(follower.returncode, 0, told)
        _, shown, status = posts.get(timeout=SECONDS)
        while not posts.empty():
            _, shown, status = posts.get()
        self.assertEqual((shown, status["progressPercentage"], status["estimatedRemainingSeconds"]), ("Bearer second", 100, 0))

        # `cohort run` exports by itself; a program without a record has nothing to export.
        for program, last in ((WITH_RECORD, 100), ("pass", None)):
            run_folder = self.folder / f"run{last}"
            done = subprocess.run([COMMAND, "run", "-np", "1", "--quiet", "--run-dir", run_folder, sys.executable, "-c", program],
                                  env={**os.environ, **variables}, capture_output=True, text=True, timeout=SECONDS)
            self.assertEqual(done.returncode, 0)
            self.assertNotRegex(done.stderr, "ended with|is not told")  # (on a busy machine, it says that it waits for it)
            told = [posts.get()[2]["progressPercentage"] for _ in range(posts.qsize())]
            self.assertEqual(told[-1:], [last] if last else [])

        # A server that is not trusted, and one that is not there, are reported once, and do no harm.
        for other in ({"KUBEFLOW_TRAINER_SERVER_CA_CERT": ""}, {"KUBEFLOW_TRAINER_SERVER_URL": "https://localhost:1/x"}):
            done = subprocess.run([COMMAND, "export", self.folder, "--to", "kubeflow"], env={**os.environ, **variables, **other},
                                  capture_output=True, text=True, timeout=SECONDS)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("Kubeflow is not told"), 1, done.stderr)
        self.assertTrue(posts.empty())

    def test_csv_is_read_back(self):
        self.write()
        self.export(self.record, "--to", f"csv:{self.folder}/out.csv")
        with open(self.folder / "out.csv", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
        self.assertEqual([float(r["value"]) for r in rows if r["name"] == "train_loss"], [1.0 / s for s in range(1, 6)])
        self.assertEqual([(int(r["step"]), float(r["value"])) for r in rows if r["name"] == "odd\n,\"name"], [(s, -s) for s in range(1, 6)])
        self.assertTrue(all(r["rank"] == "" and float(r["time"]) > 1.7e9 for r in rows))

    def test_runs_are_compared(self):
        for name, rate in (("slow", 0.1), ("fast", 0.2)):
            record = cohort.track.RunRecord(self.folder / name / "run.jsonl", program="<p>", world_size=2)
            for step in range(1, 11):
                record.write("step", step=step, epoch=step / 10, train_loss=1 - rate * step / 3)
            record.write("epoch", step=10, epoch=1, test_accuracy=rate * 4)
            del record
        os.symlink("fast", self.folder / "latest")
        done = subprocess.run([COMMAND, "plot", "slow", "latest"], cwd=self.folder, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [line.split() for line in done.stdout.splitlines()]
        self.assertEqual(rows[1][:4], ["train_loss", "slow", "1", "0.6667"])
        self.assertEqual(rows[2][:5], ["fast", "1", "0.3333", "-50.0", "%"])
        self.assertEqual(rows[4][:6], ["fast", "1", "80.00", "%", "+40.00", "points"])
        self.assertEqual(rows[-1], ["compare.svg"])
        picture = xml.etree.ElementTree.parse(self.folder / "compare.svg").getroot()
        texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
        for text in ("slow (2 processes)", "fast (2 processes)", "train_loss", "test_accuracy", "epoch"):
            self.assertIn(text, texts)
        lines = list(picture.iter("{http://www.w3.org/2000/svg}polyline"))
        self.assertEqual(len({line.get("stroke") for line in lines}), 2)
        refused = subprocess.run([COMMAND, "plot", "slow", "--over", "miles"], cwd=self.folder, capture_output=True, text=True, timeout=SECONDS)
        self.assertNotEqual(refused.returncode, 0)
        self.assertFalse((self.folder / "slow" / "curves.svg").exists())

    def test_what_is_wrong_is_said(self):
        for words, told in (
            (["nowhere", "--to", "csv:x"], "nowhere"),
            ([self.folder, "--to", "comet:x"], "tensorboard:DIR"),
            ([self.folder, "out.pt", "--to", "csv:x"], "give one"),
            ([self.folder, "--to", "prometheus:0.0.0.0:0"], "give a token"),
            ([self.folder, "--to", "prometheus:0.0.0.0:0", "--token-file", self.folder / "none"], "none"),
            ([self.folder], "TO is required"),
            ([self.folder, "out.pt", "--follow"], "--to is missing"),
        ):
            done = subprocess.run([COMMAND, "export", *map(str, words)], capture_output=True, text=True, timeout=SECONDS)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(told, done.stderr)


@unittest.skipIf(COMMAND is None, "needs the command: COHORT_COMMAND")
@unittest.skipIf(EventAccumulator is None, "needs TensorBoard: pip install tensorboard")
class TensorBoard(Exports):
    def test_tensorboard_reads_every_point(self):
        self.write()
        with open(self.record, "a") as file:
            for rank in (0, 1):
                file.write(json.dumps({"event": "metric", "time": 3.0, "step": 5, "rank": rank, "values": {"ms": rank + 0.5}}) + "\n")
        self.export(self.folder, "--to", f"tensorboard:{self.folder}/tb")
        found = scalars(self.folder / "tb")
        self.assertEqual(found["train_loss"], [(s, float32(1.0 / s)) for s in range(1, 6)])
        self.assertEqual(found["val/loss"], [(s, float32(2.0 / s)) for s in range(1, 6)])
        self.assertEqual(found["odd\n,\"name"], [(s, -s) for s in range(1, 6)])
        self.assertEqual(found["test_accuracy"], [(5, 0.75)])
        self.assertEqual(found["bad"][1], (2, math.inf))
        self.assertTrue(all(math.isnan(v) for s, v in found["bad"] if s != 2))
        self.assertNotIn("note", found)
        self.assertEqual(scalars(self.folder / "tb" / "rank1")["ms"], [(5, 1.5)])

    def test_a_folder_is_replaced_and_a_foreign_one_refused(self):
        self.write()
        for _ in range(2):
            self.export(self.folder, "--to", f"tensorboard:{self.folder}/tb")
            self.assertEqual(len(list((self.folder / "tb").iterdir())), 1)
        (self.folder / "tb/events.out.tfevents.1.host").write_text("somebody's")
        with self.assertRaisesRegex(AssertionError, "there is events.out.tfevents.1.host, which is not this command's"):
            self.export(self.folder, "--to", f"tensorboard:{self.folder}/tb")
        self.assertEqual(len(list((self.folder / "tb").iterdir())), 2)

    @unittest.skipIf(importlib.util.find_spec("tensorboardX") is None, "needs tensorboardX: pip install tensorboardX")
    def test_without_tensorboard_its_smaller_sister_writes(self):
        self.write()
        (self.folder / "tensorboard.py").write_text("raise ImportError('not here')")
        with unittest.mock.patch.dict(os.environ, PYTHONPATH=str(self.folder)):
            self.export(self.folder, "--to", f"tensorboard:{self.folder}/tb")
        self.assertEqual(scalars(self.folder / "tb")["val/loss"], [(s, float32(2.0 / s)) for s in range(1, 6)])
        self.assertEqual(scalars(self.folder / "tb")["odd\n,\"name"], [(s, -s) for s in range(1, 6)])

    def test_tensorboard_follows_writers_that_are_killed(self):
        rng = random.Random(7)
        follower = subprocess.Popen(
            [COMMAND, "export", str(self.record), "--to", f"tensorboard:{self.folder}/tb", "--follow"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(follower.stdout.close)
        self.addCleanup(follower.wait)
        self.addCleanup(follower.kill)
        first = 1
        for _ in range(5):
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(self.record), str(first)])
            try:
                before = self.record.stat().st_size if self.record.exists() else 0
                until = time.monotonic() + SECONDS
                while not self.record.exists() or self.record.stat().st_size < before + 20000:
                    self.assertIsNone(writer.poll())
                    self.assertLess(time.monotonic(), until)
                    time.sleep(0.01)
                time.sleep(rng.random() * 0.3)
            finally:
                writer.kill()
                writer.wait()
            if (self.folder / "tb").exists():
                scalars(self.folder / "tb")  # a reader meanwhile
            first = max(1, logged(self.record)["loss"][-1][0] - 20)
        time.sleep(0.6)  # the last lines are seen
        follower.terminate()
        said = follower.communicate(timeout=SECONDS)[0]
        self.assertEqual(follower.returncode, 0, said)
        expected = logged(self.record)
        self.assertGreater(len(expected["loss"]), 100)
        self.assertEqual(scalars(self.folder / "tb"), expected)
        # After the run, the same is exported into one clean file.
        self.export(self.record, "--to", f"tensorboard:{self.folder}/tb2")
        self.assertEqual(scalars(self.folder / "tb2"), expected)
        self.assertEqual(len(list((self.folder / "tb2").iterdir())), 1)


if __name__ == "__main__":
    unittest.main()


@unittest.skipIf(wandb_internal_pb2 is None, "this Python has no wandb (tools/setup --for all)")
class Wandb(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="wandb-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}

    def read(self):
        """(the run, its configuration, its values by step, its last values, its exit status, whether it may go on)"""
        run, history, summary, status, preempting = None, {}, {}, None, False

        def items(all_of):
            return {item.key or "/".join(item.nested_key): json.loads(item.value_json, parse_constant=str) for item in all_of}

        for record in wandb_records(self.folder):
            what = record.WhichOneof("record_type")
            if what == "run":
                run = record.run
            elif what == "history":
                values = items(record.history.item)
                history[record.history.step.num] = {k: v for k, v in values.items() if not k.startswith("_")}
            elif what == "summary":
                summary.update(items(record.summary.update))
            elif what == "exit":
                status = record.exit.exit_code
            elif what == "preempting":
                preempting = True
        return run, items(run.config.update), history, summary, status, preempting

    def export(self, where="wandb:digits?name=first", status=0):
        done = subprocess.run(
            [COMMAND, "export", "run.jsonl", "--to", where],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=5 * SECONDS,
        )  # fmt: skip
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_values_config_summary_and_state_are_there(self):
        lines = [
            {"event": "start", "time": 1, "program": "p", "world_size": 2, "parameters": {"lr": 0.5, "name": "a b"}},
            {"event": "step", "time": 2, "step": 1, "epoch": 0.5, "train_loss": 4.0},
            {"event": "metric", "time": 2, "step": 1, "values": {"acc": 0.25, "bad": "NaN"}},
            {"event": "metric", "time": 2, "step": 2, "values": {"own": 7}, "rank": 1},
            {"event": "step", "time": 3, "step": 3, "epoch": 1, "train_loss": 9.0},
            {"event": "resume", "time": 4, "step": 1, "epoch": 0.5},
            {"event": "step", "time": 5, "step": 3, "epoch": 1, "train_loss": 1.5},
            {"event": "end", "time": 6, "step": 3},
        ]
        (self.folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.assertIn("wandb has the run at", self.export())
        run, config, history, summary, status, preempting = self.read()
        self.assertEqual((run.project, run.display_name, status, preempting), ("digits", "first", 0, False))
        self.assertRegex(run.run_id, "^cohort-[0-9a-f]{16}$")
        self.assertLessEqual({"lr": 0.5, "name": "a b", "world_size": 2}.items(), config.items())
        self.assertEqual(history[1], {"epoch": 0.5, "train_loss": 4.0, "acc": 0.25, "bad": "NaN"})
        self.assertEqual(history[3], {"epoch": 1, "train_loss": 1.5})
        self.assertNotIn(2, history, "that step was done again")
        self.assertEqual(summary["train_loss"], 1.5)
        # A run without an end may go on under the same id.
        (self.folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
        self.export()
        again, _, history, _, status, preempting = self.read()
        self.assertEqual((again.run_id, status, preempting), (run.run_id, 1, True))
        self.assertEqual(history[2], {"own/rank1": 7})
        self.assertIn("is no option of it", self.export("wandb:p?mode=offline", status=2))

    def test_values_of_steps_before_the_last_are_counted(self):
        steps = ((1, {"a": 1}), (5, {"a": 5}), (3, {"valid": 3, "b": 3}), (4, {"b": 4}), (6, {"a": 6}))
        lines = [{"event": "start", "time": 1}] + [
            {"event": "metric", "time": 2, "step": step, "values": values} for step, values in steps
        ]
        lines.append({"event": "end", "time": 3, "step": 6})
        (self.folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.assertIn("without 3 values that came late, first valid of step 3 after step 5", self.export())
        self.assertEqual(sorted(self.read()[2]), [1, 5, 6])

    def test_beside_a_job_that_fails(self):
        program = self.folder / "train.py"
        # wandb's client has only the processor time that the ranks leave.
        program.write_text(
            WITH_RECORD.split('record.write("end"')[0]
            + "import glob, time\nuntil = time.time() + 200\n"
            + "while not glob.glob(os.environ['COHORT_RUN_DIR'] + '/wandb/offline-run-*/*.wandb') and time.time() < until:\n"
            + "    time.sleep(0.1)\nraise SystemExit(3)\n"
        )
        done = subprocess.run(
            [COMMAND, "run", "-q", "-np", "1", "--run-dir", str(self.folder), "--track", "wandb:", sys.executable, str(program)],
            env=self.environment, capture_output=True, text=True, timeout=5 * SECONDS,
        )  # fmt: skip
        self.assertEqual(done.returncode, 3, done.stderr)
        run, config, history, _, status, preempting = self.read()
        if status is None:  # it had 30 s, but too little processor time, so this exports the rest
            self.assertIn(f"cohort export {self.folder} --to 'wandb:'", done.stderr)
            self.export("wandb:")
            again, config, history, _, status, preempting = self.read()
            self.assertEqual(again.run_id, run.run_id)
        self.assertEqual((status, preempting, config["epochs"]), (1, False, 2))
        self.assertEqual(history[1]["train_loss"], 0.5)

    def test_a_client_that_is_not_there_is_named(self):
        (self.folder / "run.jsonl").write_text('{"event":"start","time":1}\n')
        (self.folder / "python3").write_text("#!/bin/sh\necho ModuleNotFoundError: wandb\n")
        (self.folder / "python3").chmod(0o755)
        self.environment["PATH"] = f"{self.folder}:{os.environ['PATH']}"
        said = self.export(status=1)
        self.assertIn("ModuleNotFoundError: wandb", said)
        self.assertIn("pip install wandb", said)
