"""Serves an MLflow store for `cohort export --to mlflow:URI`, by MLflow's own client: the part of a server's REST interface
that the sink uses, on loopback. Reads a token from stdin, and refuses clients that do not present that token.

usage: python3 mlflow_store.py URI     prints its port, or the reason why there is none
"""

import hmac
import http.server
import json
import logging
import os
import sys
import tempfile
import threading
import urllib.parse


def of_run(run):
    return {"info": {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "artifact_uri": run.info.artifact_uri}}


def of_experiment(experiment):
    if experiment is None:
        return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "there is none of this name"}
    return 200, {"experiment": {"experiment_id": experiment.experiment_id, "lifecycle_stage": experiment.lifecycle_stage}}


def of_request(client, what, asked):
    """Returns (status, answer) as MLflow's server would."""
    from mlflow.entities import Metric, Param, RunTag

    if what == "experiments/get":
        return of_experiment(client.get_experiment(asked["experiment_id"]))
    if what == "experiments/get-by-name":
        return of_experiment(client.get_experiment_by_name(asked["experiment_name"]))
    if what == "experiments/create":
        return 200, {"experiment_id": client.create_experiment(asked["name"])}
    if what == "runs/get":
        return 200, {"run": of_run(client.get_run(asked["run_id"]))}
    if what == "runs/create":
        tags = {one["key"]: one["value"] for one in asked["tags"]}
        return 200, {"run": of_run(client.create_run(asked["experiment_id"], asked["start_time"], tags, asked["run_name"]))}
    if what == "runs/search":
        return 200, {"runs": [of_run(run) for run in client.search_runs(asked["experiment_ids"], asked["filter"], max_results=1)]}
    if what == "runs/update" and "end_time" in asked:
        client.set_terminated(asked["run_id"], asked["status"], asked["end_time"])
    elif what == "runs/update":
        client.update_run(asked["run_id"], asked["status"])
    elif what == "runs/log-batch":
        metrics = [Metric(one["key"], float(one["value"]), one["timestamp"], one["step"]) for one in asked.get("metrics", [])]
        params = [Param(one["key"], one["value"]) for one in asked.get("params", [])]
        tags = [RunTag(one["key"], one["value"]) for one in asked.get("tags", [])]
        client.log_batch(asked["run_id"], metrics, params, tags)
    else:
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": what}
    return 200, {}


def handler(client, token):
    from mlflow.exceptions import MlflowException

    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # an answer is one packet

        def answer(self):
            if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
                self.close_connection = True
                return self.say(401, {})
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            where = urllib.parse.urlsplit(self.path)
            what = urllib.parse.unquote(where.path)
            try:
                with lock:
                    if self.command == "PUT":
                        *_, run, name = what.split("/")
                        with tempfile.TemporaryDirectory() as folder:
                            with open(os.path.join(folder, name), "wb") as file:
                                file.write(content)
                            client.log_artifact(run, file.name)
                        return self.say(200, {})
                    asked = json.loads(content) if self.command == "POST" else dict(urllib.parse.parse_qsl(where.query))
                    return self.say(*of_request(client, what.removeprefix("/api/2.0/mlflow/"), asked))
            except MlflowException as error:
                return self.say(error.get_http_status_code(), json.loads(error.serialize_as_json()))
            except Exception as error:
                return self.say(500, {"error_code": "INTERNAL_ERROR", "message": f"{type(error).__name__}: {error}"})

        do_GET = do_POST = do_PUT = answer

        def say(self, status, body):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format, *args):
            pass

    return Handler


def main():
    token = sys.stdin.readline().strip()
    logging.disable(logging.INFO)  # a new database logs 50 migrations
    try:
        from mlflow import MlflowClient

        client = MlflowClient(sys.argv[1])
        client.search_experiments(max_results=1)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(client, token))
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        sys.exit(1)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
