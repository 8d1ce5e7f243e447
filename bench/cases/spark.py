"""A function on two executors of Spark: until its result is there, and until its exception is, next to TorchDistributor.

    bench/compare spark --rounds 7

One warm session on `local-cluster[2,1,1024]`, the functions in turns: "trivial" returns its rank; "torch" sums a tensor over
the backend "cohort" (TorchDistributor: "gloo", from which alone it takes functions); "raise" fails on rank 1, measured from
the raise to the exception on the driver. Seconds. TorchDistributor takes part in --torch-rounds of the rounds. Needs Java,
and pyspark in the active Python or where COHORT_TEST_SPARK names it (tools/setup --for all: build/spark/VERSION).
"""
import contextlib
import io
import os
import sys
import time

from lib import groups, records

ROUNDS = 7
PEERS = ["torchdistributor"]


def options(parser):
    parser.add_argument("--torch-rounds", type=int, default=2, help="of TorchDistributor, which takes half a minute [2]")


def trivial():
    return int(os.environ["RANK"])


def with_torch(backend):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    values = torch.ones(4)
    dist.all_reduce(values)
    dist.destroy_process_group()
    return values[0].item()


def fail(file):
    if os.environ["RANK"] == "1":
        with open(file, "w", encoding="ascii") as said:
            said.write(repr(time.time()))
        raise ValueError("boom on one")
    time.sleep(60)


def timed(function):
    begun = time.time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        function()
    return time.time() - begun


def until_told(run, file):
    """From the raise on rank 1 to the exception here, and whether its text was in it."""
    try:
        timed(lambda: run(fail, file))
    except Exception as error:
        with open(file, encoding="ascii") as said:
            return time.time() - float(said.read()), "boom on one" in str(error)
    raise groups.Failed("the function did not fail")


def measure(options, recorder):
    sys.path.insert(0, os.path.join(os.path.abspath(options.build), "python"))
    sys.path[:0] = [os.path.join(os.path.dirname(groups.BENCH), folder) for folder in ("python/tests", "extensions/spark/tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.join(os.path.abspath(options.build), "python"),
                                                os.environ.get("PYTHONPATH", "")])
    import spark_support

    session = spark_support.start("local-cluster[2,1,1024]")
    import cohort
    from cohort._launch import pickling as _pickling

    import pyspark.cloudpickle  # TorchDistributor's, which is another

    for pickler in (_pickling.find_cloudpickle(), pyspark.cloudpickle):
        pickler.register_pickle_by_value(sys.modules[__name__])
    distributor = cohort.Distributor(2, local_mode=False, use_gpu=False)
    file = f"/tmp/cohort-bench-{os.getpid()}"
    try:
        for number in range(-1, options.rounds):
            for what in records.rotated(["trivial", "torch", "raise"], number):
                values = {}
                if what == "raise":
                    values["cohort"], told = until_told(distributor.run, file)
                    if not told:
                        raise groups.Failed("cohort: the exception is not the rank's")
                elif what == "trivial":
                    values["cohort"] = timed(lambda: cohort.run(trivial, np=2, on="spark"))
                else:
                    values["cohort"] = timed(lambda: distributor.run(with_torch, "cohort"))
                if "torchdistributor" in options.peers and 0 <= number < options.torch_rounds:
                    from pyspark.ml.torch.distributor import TorchDistributor

                    theirs = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
                    if what == "raise":
                        values["torchdistributor"], _ = until_told(theirs.run, file)
                    else:
                        values["torchdistributor"] = timed(
                            lambda: theirs.run(*((trivial,) if what == "trivial" else (with_torch, "gloo"))))
                if number >= 0:
                    recorder.add(number, {"function": what}, "s", values)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
        spark_support.stop(session)
