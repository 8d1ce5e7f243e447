"""`cohort run --tf-config`: TF_CONFIG for programs of tf.distribute, with ports that their ranks can have."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from keras_support import MISSING, STRATEGY, environment, place_of

# Each rank prints its TF_CONFIG, and binds its port.
TELL = """
import json, os, socket
config = json.loads(os.environ["TF_CONFIG"])
own = config["cluster"]["worker"][config["task"]["index"]]
with socket.create_server(("", int(own.rsplit(":", 1)[1]))):
    # In one write: who is killed between a line and its end leaves the next one's behind it.
    print(json.dumps([int(os.environ["RANK"]), config]) + "\\n", end="", flush=True)
"""


class Case(unittest.TestCase):
    def run_job(self, text, *options, seconds=120, **environment):
        command = os.environ.get("COHORT_COMMAND") or shutil.which("cohort")
        with tempfile.TemporaryDirectory(prefix="cohort-tf-test-") as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(text)
            return subprocess.run(
                [command, "run", "-q", "--prefix", "none", *options, "--", sys.executable, program],
                cwd=folder,
                env={**{k: v for k, v in os.environ.items() if k != "TF_CONFIG"}, **environment},
                capture_output=True,
                text=True,
                timeout=seconds,
            )


class Ports(Case):
    def told(self, *options, **environment):
        """Checks that the TF_CONFIGs of all ranks describe one cluster, and returns its workers."""
        done = self.run_job(TELL, *options, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        told = dict(json.loads(line) for line in done.stdout.splitlines() if line)
        workers = told[0]["cluster"]["worker"]
        self.assertEqual(len(set(workers)), len(told))
        for rank, config in told.items():
            self.assertEqual(config, {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        return workers

    def test_each_rank_has_a_port(self):
        self.assertEqual(len(self.told("-np", "3", "--tf-config")), 3)

    def test_several_hosts(self):
        workers = self.told("-H", "a:2,b:1", "--starter", "local", "--tf-config")
        self.assertEqual(len(workers), 3)
        self.assertTrue(all(not one.startswith(("a:", "b:")) for one in workers), workers)

    def test_as_variable_and_in_a_file(self):
        self.assertEqual(len(self.told("-np", "2", COHORT_RUN_TF_CONFIG="1")), 2)
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write("[run]\ntf-config = true\nnp = 2\n")
            file.flush()
            self.assertEqual(len(self.told("--config", file.name)), 2)

    def test_ranks_that_are_started_again_keep_their_ports(self):
        done = self.run_job(
            TELL + 'if os.environ["COHORT_RESTART"] == "0" and os.environ["RANK"] == "1":\n    os._exit(3)\n'
            'elif os.environ["COHORT_RESTART"] == "0":\n    import time; time.sleep(60)\n',
            "-np", "2", "--tf-config", "--max-restarts", "1",
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        told = [json.loads(line)[1]["cluster"]["worker"] for line in done.stdout.splitlines() if line]
        self.assertGreaterEqual(len(told), 3)
        self.assertTrue(all(one == told[0] for one in told), told)

    def test_another_cluster_is_refused(self):
        other = json.dumps(
            {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "worker", "index": 1}}
        )
        done = self.run_job(TELL, "-np", "2", "--tf-config", TF_CONFIG=other, COHORT_ALONE="1")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("TF_CONFIG is set already, to task worker 1 of a cluster of 3", done.stderr)
        nonsense = self.run_job(TELL, "-np", "2", "--tf-config", "--env", "TF_CONFIG={")
        self.assertIn("TF_CONFIG is set already", nonsense.stderr)
        self.assertEqual(self.run_job(TELL, "-np", "2", "--tf-config", TF_CONFIG="{}").returncode, 0)

    def test_a_dry_run_tells(self):
        done = self.run_job("", "-np", "2", "--tf-config", "--dry-run")
        self.assertRegex(done.stdout, r"TF_CONFIG=\(chosen at the start\)")
        self.assertNotIn("TF_CONFIG", self.run_job("", "-np", "2", "--dry-run").stdout)


# The chief's functions run on two workers; the variables are on two servers.
SERVED = """
import os, sys
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    slope, offset = tf.Variable(0.0), tf.Variable(0.0)
    clock = [tf.Variable(0), tf.Variable(0)]
@tf.function
def step():
    x = tf.random.stateless_uniform([32], [1, clock[0].assign_add(1, read_value=True)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((slope * x + offset - (3 * x + 1)) ** 2)
    for variable, gradient in zip((slope, offset), tape.gradient(loss, (slope, offset))):
        variable.assign_sub(0.3 * gradient)
    return loss
losses = [coordinator.schedule(step) for _ in range(60)]
coordinator.join()
first, last = losses[0].fetch(), losses[-1].fetch()
places = sorted({one.device.split("/task:")[1].split("/")[0] for one in (slope, offset)})
print("TRAINED", bool(last < 0.1 * first), len(places), "variables on", places, flush=True)
"""


class Strategy(Case):
    def test_multi_worker_mirrored_strategy(self):
        if place_of("tf_keras") is None:
            self.skipTest(MISSING.format("tf_keras"))
        done = self.run_job(STRATEGY, "-np", "2", "--tf-config", seconds=280, **environment("tf_keras", with_cohort=False))
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("TRAINED"))
        self.assertEqual([line[:5] for line in lines], [["TRAINED", str(rank), "2", "1", "True"] for rank in range(2)])
        self.assertEqual(lines[0][5], lines[1][5])

    def test_parameter_server_strategy(self):
        if place_of("tf_keras") is None:
            self.skipTest(MISSING.format("tf_keras"))
        done = self.run_job(SERVED, "-np", "3", "--servers", "2", "--tf-config", "--timeout", "250", seconds=280,
                            **environment("tf_keras", with_cohort=False))  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"TRAINED True 2 variables on \['0', '1'\]")


if __name__ == "__main__":
    unittest.main()
