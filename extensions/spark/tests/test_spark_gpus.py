"""cohort.Distributor on a standalone Spark cluster of two executors on this host whose GPUs are fake, with Spark's
own encryption on; executors have Cohort."""

import os
import pathlib
import sys
import tempfile
import unittest
import warnings

import spark_support
from run_support import captured

import cohort
from cohort._launch import pickling as _pickling

ENCRYPTED = {"spark_authenticate": "true", "spark_authenticate_secret": "tests", "spark_network_crypto_enabled": "true"}


def seen():
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "COHORT_ENCRYPT")
    return tuple(os.environ.get(name) for name in names)


class Gpus(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        spark_support.find()
        folder = tempfile.TemporaryDirectory(prefix="cohort-spark-test-")
        cls.addClassCleanup(folder.cleanup)
        # Executors may not have this file.
        _pickling.find_cloudpickle().register_pickle_by_value(sys.modules[__name__])
        path = pathlib.Path(folder.name)
        settings = "-Dspark.authenticate=true -Dspark.authenticate.secret=tests -Dspark.network.crypto.enabled=true"
        cls.cluster = spark_support.Standalone(
            [("127.0.0.1", [])], path, gpus=4, cores=4, environment={"SPARK_DAEMON_JAVA_OPTS": settings}
        )
        cls.addClassCleanup(cls.cluster.end)

    def session(self, gpus, **settings):
        session = spark_support.start(
            self.cluster.url, spark_executor_cores="2", spark_task_resource_gpu_amount=str(gpus),
            spark_executor_resource_gpu_amount="2", spark_cores_max="4", **ENCRYPTED, **settings,
        )
        self.addCleanup(session.stop)
        return session

    def test_a_task_for_each_gpu(self):
        self.session(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            four = cohort.Distributor(4, local_mode=False, use_gpu=True)
        with captured():
            ranks = cohort.run(seen, np=4, on="spark", start_timeout=200)
            self.assertEqual(sorted(four.run(seen)[3].split(",")), ["0", "1", "2", "3"])
        self.assertEqual([rank[:3] for rank in ranks], [(str(i), str(i), "4") for i in range(4)])
        self.assertEqual({rank[3] for rank in ranks}, {ranks[0][3]})  # each rank sees all GPUs
        self.assertEqual(sorted(ranks[0][3].split(",")), ["0", "1", "2", "3"])
        self.assertEqual({rank[4] for rank in ranks}, {"1"})

    def test_a_task_of_several_gpus_is_several_ranks(self):
        self.session(2)
        with captured():
            ranks = cohort.run(seen, np=3, on="spark", start_timeout=200)
        self.assertEqual([rank[:3] for rank in ranks], [(str(i), str(i), "3") for i in range(3)])
        self.assertEqual({len(rank[3].split(",")) for rank in ranks}, {4})
        with captured():
            hidden = cohort.Distributor(2, local_mode=False, use_gpu=False)
            self.assertEqual(hidden.run(seen)[3], "")

    def test_a_share_of_a_gpu_is_a_rank(self):
        self.session(0.5)
        with captured():
            ranks = cohort.run(seen, np=4, on="spark", start_timeout=200)
        self.assertEqual([rank[1] for rank in ranks], ["0", "1", "2", "3"])
        self.assertEqual(len({rank[3] for rank in ranks}), 1)


if __name__ == "__main__":
    unittest.main()
