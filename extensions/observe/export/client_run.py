"""Writes the record of a run to MLflow, TensorBoard or Weights & Biases by their own clients, for `cohort export --to`.

Reads JSON from stdin: a line with the destination, then lines of the record in chunks that end with an empty line. Answers the
first line and each chunk with "ok", with "more" (values wait for the next chunk, which may be empty), or with an error, after
which it ends. An error that begins with "failed: " already says what to do.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import socket
import sys
import time


class Failed(Exception):
    """Its text says what to do."""


def say(text):
    print(f"cohort: {text}", file=sys.stderr, flush=True)


def text_of(value):
    return value if isinstance(value, str) else json.dumps(value)


def digest(text):
    return hashlib.sha256(text).hexdigest()[:16]


def first_line(record):
    with open(record, "rb") as file:
        return file.readline()


def parameters_of(fields):
    return {name.removeprefix("parameters/"): value for name, value in fields.items() if name.startswith("parameters/")}


class Client:
    """Each line has `end` (the offset of the next line) and `time`. It also has `start` (the fields of an event `start`), or
    `step`, `rank` and `values`."""

    def take(self, line):
        raise NotImplementedError

    def go_back(self, step, wall_time):
        """Called if the followed run goes on from an earlier step."""

    def flush(self):
        """Returns whether there is more to send, with the next chunk."""
        return False

    def finish(self, state, curves):
        raise NotImplementedError


class TensorBoard(Client):
    """Writes the run's scalars into a folder, those of rank R into its rankR. Only this command makes files of these names."""

    SUFFIX = ".cohort"

    def __init__(self, to):
        self.folder, self.writers, self.made = to["folder"], {}, 0
        earlier = []
        for folder in (self.folder, *glob.glob(f"{glob.escape(self.folder)}/rank[0-9]*")):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                if name.endswith(self.SUFFIX) and "tfevents" in name:
                    earlier.append(os.path.join(folder, name))
                elif "tfevents" in name:
                    raise Failed(
                        f"exporting to TensorBoard failed -- {folder} -- there is {name}, which is not this command's, and both "
                        "would be one run -- give another folder"
                    )
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter

            self.open_file = lambda path: RecordWriter(open(path, "xb"))
        except ImportError as error:
            try:
                from tensorboardX.proto import event_pb2
                from tensorboardX.record_writer import RecordWriter
            except ImportError:
                raise error from None
            self.open_file = RecordWriter
        self.event = event_pb2
        for file in earlier:
            os.remove(file)
        self.writer(None)

    def writer(self, rank):
        if rank not in self.writers:
            folder = self.folder if rank is None else os.path.join(self.folder, f"rank{rank}")
            os.makedirs(folder, exist_ok=True)
            # The name is new, and sorts after the names of earlier files.
            name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{self.made:06}{self.SUFFIX}"
            self.made += 1
            self.writers[rank] = self.open_file(os.path.join(folder, name))
            self.write(rank, wall_time=time.time(), file_version="brain.Event:2")
        return self.writers[rank]

    def write(self, rank, values=(), **fields):
        event = self.event.Event(**fields)
        for tag, value in values:
            event.summary.value.add(tag=tag, simple_value=value)
        self.writer(rank).write(event.SerializeToString())

    def take(self, line):
        if "values" in line:
            self.write(line.get("rank"), line["values"].items(), wall_time=line["time"], step=line["step"])

    def go_back(self, step, wall_time):
        # Begins new files with a mark, so that readers drop the points of later steps in earlier files.
        ranks = list(self.writers)
        self.close()
        for rank in ranks:
            restart = self.event.SessionLog(status=self.event.SessionLog.START)
            self.write(rank, wall_time=wall_time, step=step + 1, session_log=restart)

    def flush(self):
        for writer in self.writers.values():
            writer.flush()
        return False

    def close(self):
        for writer in self.writers.values():
            writer.close()
        self.writers.clear()

    def finish(self, state, curves):
        self.close()


class Wandb(Client):
    """wandb keeps values until its server has them. The record gives the run's id, so that a later export continues the run."""

    def __init__(self, to):
        import wandb

        self.wandb, self.to, self.run, self.late, self.first = wandb, to, None, 0, ""

    def open(self, config):
        to = self.to
        init = {name: to[name] for name in ("project", "entity", "group") if to[name]}
        if not os.environ.get("WANDB_DIR"):
            init["dir"] = os.path.dirname(to["record"])
        self.run = self.wandb.init(
            id=to["run"] or f"cohort-{digest(first_line(to['record']))}",
            name=to["name"] or config.get("job", ""),
            config=config,
            resume="allow",
            settings=self.wandb.Settings(silent=True, console="off"),
            **init,
        )
        say(f"wandb has the run at {self.run.url or self.run.dir}")

    def take(self, line):
        fields = line.get("start", {})
        config = {name: fields[name] for name in ("program", "world_size", "host", "job") if name in fields}
        config.update(parameters_of(fields))
        if self.run is None:
            self.open(config)
        elif config:
            self.run.config.update(config, allow_val_change=True)
        if "values" in line:
            own = f"/rank{line['rank']}" if "rank" in line else ""
            self.log(line["step"], {name + own: value for name, value in line["values"].items()})

    def log(self, step, values):
        if step >= max(self.run.step, self.run.starting_step):
            self.run.log(values, step=step)
        elif step >= self.run.starting_step:  # (a continued run already has earlier steps)
            self.late += len(values)
            self.first = self.first or f"{next(iter(values))} of step {step} after step {self.run.step}"

    def finish(self, state, curves):
        if self.run is None:
            return
        if state not in ("FINISHED", "FAILED"):  # the run will continue, or was killed
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if state == "FINISHED" else 1)
        if self.late:
            values = f"{self.late} value{'s'[: self.late != 1]}"
            say(f"wandb is done, without {values} that came late, first {self.first}; it takes no step before its last one")


class Mlflow(Client):
    """The record is the queue. A file beside it says what MLflow has, so that nothing is lost if the server does not answer or
    this process is killed. A point sent twice is stored once. A run that existed before is ended by its owner."""

    POINTS, PAIRS = 1000, 100  # MLflow's limits for one request
    INTERVAL = 2  # seconds between two batches that are not full
    PAGE = 4096
    INTENT = "cohort.export"  # tag to find a run with, if its creation was not answered

    def __init__(self, to):
        self.to, self.uri, self.answered, self.away = to, to["uri"], False, False
        for name in ("user", "password"):  # of an address from the environment, which is shown without them
            if to[name]:
                os.environ.setdefault({"user": "MLFLOW_TRACKING_USERNAME", "password": "MLFLOW_TRACKING_PASSWORD"}[name], to[name])
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # since `ask` tries again, and says so
        os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.disable(logging.INFO)  # a new database logs 50 migrations
        import mlflow
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        self.Metric, self.Param, self.RunTag, self.Exception = Metric, Param, RunTag, MlflowException
        self.client = mlflow.MlflowClient(self.uri)
        self.fd, self.kept, self.batch, self.keys = None, {}, [], {}
        self.starts, self.end, self.time, self.sent = 0, 0, 0, -math.inf
        self.own = not to["run"]
        if self.own:
            self.experiment = self.ask("finding the experiment of MLflow", self.find_experiment)
        else:
            self.experiment = self.ask(f"finding the run {to['run']} of MLflow", self.client.get_run, to["run"]).info.experiment_id

    def ask(self, what, call, *arguments, tries=math.inf):
        """Calls until the server answers. Throws Failed if the server refuses, or when the time or the tries are over."""
        begin, pause, failures = time.monotonic(), 0.5, 0
        while True:
            try:
                answer = call(*arguments)
            except Failed:
                raise
            except Exception as error:
                failures += 1
                why, temporary = self.reason(error)
                # An address that has never answered is more often wrong than temporarily unreachable.
                over = time.monotonic() - begin >= self.to["patience"] / (1 if self.answered else 15)
                if not temporary or over or failures >= tries:
                    raise Failed(f"{what} failed -- {self.uri} -- {why}") from error
                if failures == 2 and not self.away:
                    self.away = True
                    say(f"MLflow at {self.uri}: {why}; trying on, the record keeps what there is")
                time.sleep(pause)
                pause = min(2 * pause, 15)
            else:
                self.answered = True
                if self.away:
                    self.away = False
                    say(f"MLflow at {self.uri} answers again")
                return answer

    def reason(self, error):
        """Returns why a call failed, and whether trying again may help."""
        here = (PermissionError, FileNotFoundError, NotADirectoryError)  # errors of a store in a folder
        away = isinstance(error, OSError) and not isinstance(error, here)
        status = error.get_http_status_code() if isinstance(error, self.Exception) else 500 if away else 0
        text = str(error) or type(error).__name__
        if "Invalid Host header" in text:
            advice = "start the server with --allowed-hosts NAME, where NAME is the host of this address, or use its IP address"
        elif "CERTIFICATE_VERIFY_FAILED" in text:
            advice = "MLFLOW_TRACKING_SERVER_CERT_PATH names a file of trusted certificates; MLFLOW_TRACKING_INSECURE_TLS=true trusts any"
        elif status in (401, 403):
            advice = "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, are for its credentials"
        elif status >= 500 or status in (408, 429):
            while error.__context__ is not None:  # finds the system's reason for a request without an answer
                error = error.__context__
            return str(error) or type(error).__name__, True
        else:
            return text, False
        return f"{text} -- {advice}", False

    def find_experiment(self):
        name = self.to["experiment"]
        if self.to["experiment_id"]:
            return self.client.get_experiment(self.to["experiment_id"]).experiment_id
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return self.client.create_experiment(name)
            except self.Exception as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self.client.get_experiment_by_name(name)  # another client has created it meanwhile
        if found.lifecycle_stage == "deleted":
            raise Failed(
                f"finding the experiment '{name}' of MLflow failed -- {self.uri} -- it was deleted -- restore it (mlflow "
                f"experiments restore -x {found.experiment_id}), or give another one"
            )
        return found.experiment_id

    # ---- What MLflow has ----

    def open_state(self):
        """Opens and locks the file with the position up to which MLflow has the record. One process at a time has the file."""
        record, where = self.to["record"], [self.to[name] for name in ("uri", "experiment", "experiment_id", "run", "name")]
        to = json.dumps(where)
        self.state = os.path.join(os.path.dirname(record), f"mlflow-{digest(to.encode())[:8]}.state")
        self.fd = os.open(self.state, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"exporting to MLflow failed -- {self.state} -- another process is doing the same for this record") from None
        self.kept = {"to": to, "record": digest(first_line(record)), "run": "", "intent": "", "offset": 0, "ended": False, "artifacts": False}
        found = {}
        with contextlib.suppress(ValueError):
            found = json.loads(os.pread(self.fd, self.PAGE, 0))
        if (
            isinstance(found, dict)
            and all(type(found.get(name)) is type(value) for name, value in self.kept.items())
            and (found["to"], found["record"]) == (self.kept["to"], self.kept["record"])
            and found["offset"] <= os.path.getsize(record)
        ):
            self.kept = found

    def keep(self, **changed):
        # Writes in place, since the lock is on this file, and within a page, so that a kill leaves no torn write.
        self.kept.update(changed)
        text = json.dumps(self.kept).encode()
        if len(text) >= self.PAGE:
            raise Failed("exporting to MLflow failed -- its address and the experiment's name are too long")
        os.pwrite(self.fd, text.ljust(self.PAGE - 1) + b"\n", 0)

    def open(self, line):
        self.open_state()
        if not self.own:
            self.keep(run=self.to["run"])
        elif self.kept["run"]:
            named = f"{self.kept['run']} of MLflow, which {self.state} names (without that file the record goes into a new run)"
            self.ask(f"finding the run {named}", self.client.get_run, self.kept["run"])
        else:
            if not self.kept["intent"]:
                self.keep(intent=os.urandom(12).hex())
            self.keep(run=self.ask("making a run of MLflow", self.make_run, line))
        self.end = self.kept["offset"]
        where = f"run {self.kept['run']} of experiment {self.experiment} in {self.uri}"
        if self.uri.startswith("http"):
            where = f"{self.uri}/#/experiments/{self.experiment}/runs/{self.kept['run']}"
        say(f"MLflow: {where}")

    def make_run(self, line):
        found = self.client.search_runs([self.experiment], f"tags.`{self.INTENT}` = '{self.kept['intent']}'", max_results=1)
        if found:
            return found[0].info.run_id
        name = self.to["name"] or line.get("start", {}).get("job") or os.path.basename(os.path.dirname(self.to["record"]))
        tags = {self.INTENT: self.kept["intent"], "mlflow.runName": name}
        if os.environ.get("USER"):
            tags["mlflow.user"] = os.environ["USER"]
        return self.client.create_run(self.experiment, round(line.get("time", 0) * 1000), tags, name).info.run_id

    # ---- Sending ----

    @staticmethod
    def key(name):
        """Returns a name that MLflow accepts: a path of certain characters, without parts that are empty or only dots."""
        parts = [re.sub(r"[^\w\-. :]", "_", part) if part.strip(".") else "_" * len(part) for part in name.split("/") if part]
        whole = "/".join(parts) or "_"
        return whole if len(whole) <= 250 else whole[:250].rstrip("/.")

    def take(self, line):
        if self.fd is None:
            self.open(line)
        is_new = line["end"] > self.kept["offset"]
        self.time = round(line["time"] * 1000) if "time" in line else self.time
        if is_new and self.kept["ended"]:  # the run was resumed, or had not ended at the last export
            if self.own:
                self.ask("setting the state of a run of MLflow", self.client.update_run, self.kept["run"], "RUNNING")
            self.keep(ended=False)
        if "start" in line:
            self.start(line["start"], is_new)
        if not is_new:
            return
        own = f"/rank{line['rank']}" if "rank" in line else ""
        for name, value in line.get("values", {}).items():
            if len(self.batch) == self.POINTS:
                self.send()
            if (key := self.keys.get(name + own)) is None:
                key = self.keys[name + own] = self.key(name + own)
            self.batch.append(self.Metric(key, float(value), self.time, line["step"]))
        self.end = line["end"]

    def start(self, fields, is_new):
        parameters = {self.key(name): text_of(value)[:6000] for name, value in parameters_of(fields).items()}
        self.starts += 1
        if self.starts == 1:
            self.parameters = parameters
            tags = {f"cohort.{name}": text_of(fields[name]) for name in ("program", "host", "job", "world_size") if fields.get(name)}
        else:  # a parameter of MLflow never changes
            tags = {f"resume.{self.starts - 1}.{name}": value for name, value in parameters.items() if self.parameters.get(name) != value}
            parameters = {}
        if is_new:
            self.set_tags(tags)
            self.set_parameters(list(parameters.items()))

    def set_tags(self, tags):
        pairs = [self.RunTag(name[:250], value[:5000]) for name, value in tags.items()]
        for begin in range(0, len(pairs), self.PAIRS):
            self.log("setting tags of a run of MLflow", tags=pairs[begin : begin + self.PAIRS])

    def set_parameters(self, pairs):
        for begin in range(0, len(pairs), self.PAIRS):
            some = pairs[begin : begin + self.PAIRS]
            try:
                self.log("setting parameters of a run of MLflow", params=[self.Param(*pair) for pair in some])
            except Failed as error:
                if getattr(error.__cause__, "error_code", "") != "INVALID_PARAMETER_VALUE":
                    raise
                if len(some) > 1:
                    for pair in some:
                        self.set_parameters([pair])
                else:  # another client has set it in this run: its value stays, ours becomes a tag
                    self.set_tags({f"cohort.parameter.{some[0][0]}": some[0][1]})

    def log(self, what, metrics=(), params=(), tags=()):
        self.ask(what, self.client.log_batch, self.kept["run"], metrics, params, tags)

    def send(self):
        if self.batch:
            self.log("sending metrics to MLflow", metrics=self.batch)
        self.batch = []
        self.keep(offset=max(self.kept["offset"], self.end))
        self.sent = time.monotonic()

    def flush(self):
        waits = self.fd is not None and self.end > self.kept["offset"]
        if waits and time.monotonic() - self.sent >= self.INTERVAL:
            self.send()
            waits = False
        return waits

    def finish(self, state, curves):
        if self.fd is None:
            return
        if self.end > self.kept["offset"]:
            self.send()
        if state == "RUNNING":
            return
        if not self.kept["ended"]:
            if self.own:
                self.ask("ending a run of MLflow", self.client.set_terminated, self.kept["run"], state, self.time)
            self.keep(ended=True, artifacts=False)
        if not self.kept["artifacts"] and self.send_artifacts(curves):
            self.keep(artifacts=True)

    def send_artifacts(self, curves):
        """Returns False if another export has to send them."""
        run = self.kept["run"]
        where = self.ask("finding a run of MLflow", self.client.get_run, run).info.artifact_uri
        if self.uri.startswith("http") and (where.startswith(("file:", "/")) or ":" not in where):
            say(f"the record is not among the artifacts of MLflow's run: they are at {where}, a path of the server's host")
            return True
        try:  # three times: files often lie on another server, which may refuse what this one accepts
            self.ask("sending an artifact", self.client.log_artifact, run, self.to["record"], tries=3)
            if curves:
                self.ask("sending an artifact", self.client.log_text, run, curves, "curves.svg", tries=3)
        except Failed as error:
            say(f"MLflow does not take the record as an artifact of the run, whose values and state it has: {error}")
            return False
        return True


CLIENTS = {"mlflow": Mlflow, "tensorboard": TensorBoard, "wandb": Wandb}


def serve(lines, answer):
    to = json.loads(next(lines))
    client = CLIENTS[to["client"]](to)
    answer("ok")
    chunk = []
    for text in lines:
        if text != b"\n":
            chunk.append(text)  # reads the whole chunk first, so that the writer never waits for a server
            continue
        for line in map(json.loads, chunk):
            if "finish" in line:
                client.finish(line["finish"], line["curves"])
            elif "back" in line:
                client.go_back(line["back"], line["time"])
            else:
                client.take(line)
        chunk.clear()
        answer("more" if client.flush() else "ok")


def main():
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that other output is not read as an answer
    try:
        serve(iter(sys.stdin.buffer), lambda text: out.write(text + "\n"))
    except BaseException as error:
        kind = "failed" if isinstance(error, Failed) else type(error).__name__
        out.write(f"{kind}: {error}".replace("\n", " ") + "\n")
    os._exit(1)  # without ending the run of wandb: the parent process has ended


if __name__ == "__main__":
    main()
