"""The steps of tools/gpu/gpu-day: what is run, how long it may take, and what of its output is looked at."""

import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TOOLS = pathlib.Path(__file__).resolve().parent
# Cases of comm_gpu_tests that do not need the fake libraries.
TESTS = ("GroupsAndSingles*", "MessagesAreDone*", "ResultsAreLookedAt*", "MixedWorlds*", "AHangingStream*")
KEPT_LINES = 80  # of a step's output, from its end
# Python's tests with 2 ranks and tensors of "cuda".
PYTHON_TESTS = ("nn", "torch", "torch_training", "distributed", "checkpoint")
PYTHON_TEST_FOLDERS = ("python/tests", "extensions/horovod/tests")
PATIENCE = 5.0  # seconds, with what was asked to end
NAMED_WITHIN = 1.0  # seconds from a rank's end to the error that names it (docs/reference/gpu.md)


class Failed(Exception):
    pass


def without_repetition(lines):
    """Removes repeated lines of the ranks' logs about NCCL."""
    return [line for i, line in enumerate(lines) if "cohort info: " not in line or line not in lines[:i]]


class Day:
    """Runs steps one after the other and writes of each as it ends."""

    def __init__(self, arguments):
        self.build = arguments.build.resolve()
        self.fake = arguments.fake
        self.only = arguments.only
        self.end = time.monotonic() + 60 * arguments.minutes
        self.longest = arguments.step_seconds
        self.rows = []
        self.gpus = 0
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-day-")  # jobs leave their logs where they run
        paths = [str(self.build / "fake")] if self.fake else []
        if "LD_LIBRARY_PATH" in os.environ:
            paths.append(os.environ["LD_LIBRARY_PATH"])
        paths.append(str(self.build / "lib"))
        self.environment = dict(
            os.environ,
            LD_LIBRARY_PATH=":".join(paths),
            PYTHONPATH=str(self.build / "python"),
            PYTHONDONTWRITEBYTECODE="1",
            COHORT_LOG="warn,comm=info",  # whether NCCL is used, and why not
        )
        if self.fake:
            tensors = self.build / "fake" / "libfake_cuda_tensors.so"
            self.environment["COHORT_FAKE_CUDA_TENSORS"] = str(tensors)

    def run(self, words, limit, environment=None):
        """The output of a program that ends well, within so many seconds; else Failed, which has it as well."""
        limit = min(limit, self.longest, self.end - time.monotonic())
        process = subprocess.Popen(
            [str(word) for word in words],
            env=dict(self.environment, **(environment or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=self.folder.name,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # The command ends its ranks when it is asked to; whatever does not follow is killed.
            output = ""
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    output, _ = process.communicate(timeout=PATIENCE)
                    break
            raise Failed(f"it took longer than {limit:.0f} s\n{output}") from None
        if process.returncode != 0:
            raise Failed(f"exit status {process.returncode}\n{output}")
        return output

    def cohort(self, *words):
        return [self.build / "bin" / "cohort", *words]

    def job(self, ranks, *words):
        return self.cohort("run", "--standalone", "-q", "-np", ranks, "--", *words)

    def step(self, name, body, *arguments):
        if self.only and not re.search(self.only, name):
            return None
        begun, result, text = time.monotonic(), "passed", ""
        if begun + 5 > self.end:
            result = "left out: no time was left"
        else:
            try:
                text = body(*arguments) or ""
            except (Failed, OSError, ValueError, KeyError) as error:
                why, _, text = str(error).partition("\n")
                result = "failed: " + (why or type(error).__name__)
        self.rows.append((name, result, time.monotonic() - begun))
        print(f"\n## {name}\n\n{result}, {self.rows[-1][2]:.1f} s", flush=True)
        if text.strip():
            lines = without_repetition(text.rstrip().splitlines())
            cut = [f"... ({len(lines) - KEPT_LINES} lines before)"] if len(lines) > KEPT_LINES else []
            print("\n```text", *cut, *lines[-KEPT_LINES:], "```", sep="\n", flush=True)
        return text

    def summary(self):
        print("\n## Summary\n\n| step | result | seconds |\n|---|---|---|")
        for name, result, seconds in self.rows:
            print(f"| {name} | {result} | {seconds:.1f} |")
        failed = [name for name, result, _ in self.rows if result != "passed"]
        print(
            "\nFailed:\n\n" + "\n".join(f"- {name}" for name in failed) if failed else "\nNothing failed.", flush=True
        )
        return 1 if failed else 0


def versions(day):
    lines = [f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores"]
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=index,name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,mig.mode.current"
        lines += [day.run(["nvidia-smi", query, "--format=csv"], 30), day.run(["nvidia-smi", "topo", "-m"], 30)]
    else:
        lines.append("there is no nvidia-smi")
    if day.fake:
        return "\n".join(lines)
    script = (
        "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'sees', torch.cuda.device_count())"
    )
    try:
        lines.append(day.run([sys.executable, "-c", script], 60))
    except Failed as error:
        lines.append(f"no torch: {str(error).strip().splitlines()[-1]}")
    return "\n".join(lines)


def check_build(day):
    text = day.run(day.cohort("doctor", "--build"), 60)
    found = re.search(r"^ *cuda +CUDA .*, (\d+) GPU", text, re.MULTILINE)
    if not found or found[1] == "0":
        raise Failed("no GPU can be used\n" + text)
    day.gpus = int(found[1])
    return text


# Ranks share the first GPU, by NCCL where it can. Streams of ranks that are threads are more than the driver's usual 8
# queues; where two share one, a kernel that waits for another rank's may stand before it.
SHARING = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    "FAKE_CUDA_GPUS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


@contextlib.contextmanager
def at_the_same_time(day):
    """Kernels of ranks that share a GPU run at the same time while it lives, where the driver has its service for that
    (MPS); else they take turns, which NCCL's, that wait for each other, do slowly."""
    control = shutil.which("nvidia-cuda-mps-control")
    if day.fake or not control or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield  # there is no need for it, or no way, or somebody has begun it
        return
    folder = pathlib.Path(day.folder.name) / "mps"
    folder.mkdir()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    quiet = {"env": dict(os.environ, **own), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 20}
    started = subprocess.run([control, "-d"], stdin=subprocess.DEVNULL, **quiet, check=False).returncode
    print(f"\nRanks that share a GPU: {control} -d ended with {started}.", flush=True)
    SHARING.update(own)
    try:
        yield
    finally:
        for name in own:
            del SHARING[name]
        subprocess.run([control], input=b"quit\n", **quiet, check=False)


def layouts(day, all_ranks):
    """(words, ranks, environment) of each number of ranks, with a GPU each and on one."""
    for ranks in all_ranks:
        if ranks <= day.gpus:
            yield f"{ranks} rank{'s' if ranks > 1 else ''}, a GPU each", ranks, {}
        if ranks > 1:
            yield f"{ranks} ranks on one GPU", ranks, SHARING


PAIRS = "*OnThreads*/1:*OnThreads*/3"  # of trials: those on 2 and on 4 ranks


def trials(day, environment, filters=None):
    own = dict(environment, COHORT_TEST_WORLD="local", COHORT_TEST_DEVICE="cuda")
    if not day.fake:
        own["COHORT_GPU_SUMS"] = "exact"  # the real NCCL has bits of its own
    # Each of more ranks makes NCCL take memory of the GPU for all the others.
    filters = filters or (PAIRS if day.fake else "Ranks/OnThreads*")
    return day.run([day.build / "bin" / "comm_tests", f"--gtest_filter={filters}"], 150, own)


def gpu_tests(day):
    filters = ":".join(f"OnGpus.{name}" for name in TESTS)
    return day.run([day.build / "bin" / "comm_gpu_tests", f"--gtest_filter={filters}"], 90, {"COHORT_NCCL": "off"})


def python_tests(day, environment):
    """The suite runs them over what pretends."""
    folders = [str(TOOLS.parents[1] / folder) for folder in PYTHON_TEST_FOLDERS]
    own = dict(environment, PYTHONPATH=":".join([day.environment["PYTHONPATH"], *folders]))
    own["OMP_NUM_THREADS"] = "1"
    names = [f"test_{name}_on_gpus" for name in PYTHON_TESTS]
    failed, told = [], []
    for name in names:
        try:
            text = day.run(day.job(2, sys.executable, "-m", "unittest", name), 120, own)
            told += [f"{name}: {line}" for line in re.findall(r"(?:Ran|OK).*", text)]
        except Failed as error:
            failed.append(name)
            lines = re.findall(r"^it took .*|.*(?:(?:FAIL|ERROR): |Error\b|tests/test_|Ran \d).*", str(error), re.MULTILINE)
            told += [f"{name}: {line[:300]}" for line in lines[:40]]
    if failed:
        raise Failed(", ".join(failed) + "\n" + "\n".join(told))
    return "\n".join(told)


def peer(day, ranks, environment, *words):
    return day.run(day.job(ranks, day.build / "bin" / "gpu_peer", *words), 90, environment)


def harm(day, ranks, environment, what):
    """Time from the fault to the error of each rank that lives on, and the error."""
    try:
        text = peer(day, ranks, environment, what)
    except Failed as failed:
        text = str(failed)  # a job of which a rank was killed fails
    aborted = what.startswith("abort")
    told = [json.loads(line[line.index("{") :]) for line in text.splitlines() if re.search(r'\{"(harm|at)":', line)]
    at = [one["harm"] for one in told if "harm" in one]
    errors = [one for one in told if "error" in one]
    if len(at) != 1 or len(errors) != (ranks if aborted else ranks - 1):
        raise Failed("not all ranks have told how they ended\n" + text)
    lines = [line for line in text.splitlines() if "cohort info: " in line and " > " not in line]
    for one in sorted(errors, key=lambda one: one["rank"]):
        lines.append(f"rank {one['rank']}: {one['error']} after {one['at'] - at[0]:.3f} s: {one.get('text', '')}")
    wanted = "Aborted" if aborted else "PeerLost"
    late = max(one["at"] for one in errors) - at[0]
    limit = NAMED_WITHIN * (5 if day.fake else 1)  # tests run on busy machines
    if late > limit or any(one["error"] != wanted for one in errors):
        raise Failed(f"{wanted} on all ranks within {limit:g} s was to be seen\n" + "\n".join(lines))
    return "\n".join(lines)


def training_words(day, way):
    return [sys.executable, TOOLS / "gpu_day_training.py", way, *(["--fake"] if day.fake else [])]


def training(day, way):
    losses, lines = [], []
    for name, ranks, environment in layouts(day, (1, 2)):
        text = day.run(day.job(ranks, *training_words(day, way)), 120, environment)
        told = json.loads(re.search(r'\{"first".*\}', text)[0])
        losses.append(told["last"])
        lines.append(f"{name}: loss {told['first']:.6f} to {told['last']:.6f}, {told['how']}")
        if not told["last"] < told["first"] / 2:
            raise Failed("the loss does not fall\n" + "\n".join(lines))
    if max(losses) - min(losses) > 1e-3 * told["first"]:
        raise Failed("the last losses differ\n" + "\n".join(lines))
    return "\n".join(lines)


def arrays(day, ranks, environment):
    """JAX takes most of the GPU's memory for itself unless it is told not to."""
    own = dict(environment, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    text = day.run(day.job(ranks, *training_words(day, "arrays")), 120, own)
    return json.loads(re.search(r'\{"how".*\}', text)[0])["how"]


def training_times(day, ranks, environment):
    text = day.run(day.job(ranks, *training_words(day, "times")), 200, environment)
    lines = []
    for told in map(json.loads, re.findall(r'\{"ranks".*\}', text)):
        for way, found in told["ways"].items():
            if isinstance(found, list):
                found = f"{found[0]:.3f} ms, until the host has given it to the GPU {found[1]:.3f} ms"
            elif not isinstance(found, str):
                found = f"{found:.3f} ms"
            lines.append(f"{told['model']}, {way}: {found}")
    return "\n".join(lines)


def bench(day, ranks, environment, sums, *words):
    """Measurements of `cohort bench`, and its log lines."""
    options = ["-np", ranks, "--device", "cuda", "--gpu-sums", sums, "-q"]
    with tempfile.TemporaryDirectory() as folder:
        rows = pathlib.Path(folder) / "rows.json"
        said = day.run(day.cohort("bench", *words, *options, "--json", rows), 100, environment)
        events = [json.loads(line) for line in rows.read_text().splitlines()]
    world = next(event for event in events if event["event"] == "world")
    lines = [line for line in said.splitlines() if "cohort info: " in line]
    lines.append(f"{world['ranks']} ranks, different GPUs: {world['gpus']}; {world['cuda']}, {world['gpu_sums']} sums")
    return [event for event in events if event["event"] == "row"], lines


def all_types(day, ranks, environment):
    """Sums that are exact in any order: none may be wrong, which is an exit status."""
    words = [
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "-d",
        "all",
        "-o",
        "all",
        "--sizes",
        "1000",
        "-n",
        "1",
        "-w",
        "0",
    ]
    rows, lines = bench(day, ranks, environment, "fast", *words)
    return "\n".join([*lines, f"{len(rows)} rows of {len({row['type'] for row in rows})} types: no element is wrong"])


def times(day, ranks, environment, sums, *words):
    """The columns of nccl-tests: in place where that was measured."""
    sizes, calls = ("8K", "2") if day.fake else ("64K,16M,256M", "10")
    which = ["all"] if sums == "fast" else ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"]
    rows, lines = bench(day, ranks, environment, sums, *which, "--sizes", sizes, "-n", calls, "-w", "2", *words)
    columns = "{:17} {:>10} {:>9} {:>8} {:>6} {:>10} {:>8} {:>8} {:>6}"
    lines.append(columns.format("", "size", "count", "type", "redop", "time (us)", "algbw", "busbw", "#wrong"))
    for row in rows:
        side = row.get("in_place") or row["out_of_place"]
        rates = [f"{side['time_us']:.1f}", f"{side['algbw_GBps']:.2f}", f"{side['busbw_GBps']:.2f}", side["wrong"]]
        lines.append(columns.format(row["collective"], row["bytes"], row["count"], row["type"], row["op"], *rates))
    return "\n".join(lines)


def try_all(day):
    day.step("versions", versions, day)
    day.step("cohort doctor --build", check_build, day)
    day.step("cohort doctor", lambda: day.run(day.cohort("doctor"), 90))
    if day.gpus == 0:
        day.gpus = 1
    day.step("tests over GPUs", gpu_tests, day)
    day.step("all trials, by way of the host's memory", trials, day, {"COHORT_NCCL": "off"})
    in_pieces = {"COHORT_NCCL": "off", "COHORT_TEST_PIECE_BYTES": "16384"}
    day.step("trials by way of the host's memory in pieces", trials, day, in_pieces, PAIRS)
    day.step("all trials on one GPU, by NCCL where it can", trials, day, SHARING)
    bytes_folded = str((1 if day.fake else 4096) << 16)
    day.step("kernels that fold: bits and GB/s", peer, day, 1, {}, "folds", bytes_folded)
    with at_the_same_time(day):
        try_sums_and_training(day)
    for name, ranks, environment in layouts(day, (2,)):
        day.step(f"abort while hanging: {name}", harm, day, ranks, environment, "abort")
    for name, ranks, environment in layouts(day, (2, 4)):
        day.step(f"from kill to named error: {name}", harm, day, ranks, environment, "kill")
    for name, ranks, environment in layouts(day, (2,)):
        for what in ("abort", "kill"):
            day.step(f"{what} while nobody waits: {name}", harm, day, ranks, environment, f"{what}-unawaited")


def try_sums_and_training(day):
    bytes_of_sums = str((1 if day.fake else 64) << 20)
    for name, ranks, environment in layouts(day, (2, 4)):
        day.step(f"bits of sums: {name}", peer, day, ranks, environment, "bits", bytes_of_sums)
    for name, ranks, environment in layouts(day, (2, 4)):
        day.step(f"fast sums of all types: {name}", all_types, day, ranks, environment)
    for name, ranks, environment in layouts(day, (2,)):
        day.step(f"the host's time of a sum: {name}", peer, day, ranks, environment, "calls")
    for way in ("world", "nn", "horovod", "distributed"):
        day.step(f"training: {way}", training, day, way)
    if not day.fake:
        day.step("Python's tests on one GPU, by NCCL where it can", python_tests, day, SHARING)
        day.step("Python's tests, by way of the host's memory", python_tests, day, {"COHORT_NCCL": "off"})
    for name, ranks, environment in layouts(day, (2,)):
        if not day.fake:
            day.step(f"arrays of CuPy and JAX: {name}", arrays, day, ranks, environment)
        day.step(f"training, times: {name}", training_times, day, ranks, environment)
    bytes_staged = str((4 if day.fake else 256) << 20)
    for name, ranks, environment in layouts(day, (1, 2)):
        day.step(f"staging: {name}", peer, day, ranks, dict(environment, COHORT_NCCL="off"), "staging", bytes_staged)
    for name, ranks, environment in layouts(day, (1, 2, 4)):
        for sums in ("fast", "exact"):
            day.step(f"cohort bench, {sums} sums: {name}", times, day, ranks, environment, sums)
        if "one GPU" in name:  # of one process: their kernels run at the same time
            for sums in ("fast", "exact"):
                day.step(f"cohort bench, {sums} sums: {name}, threads", times, day, ranks, environment, sums, "--threads")
