"""Compares the step time that `cohort bench plan` predicts for other wire formats with the measured one. Needs root.

    bench/compare plan --models digits,layers,25M --rates 100,1000

Two hosts with a rank each. "digits" is the program of examples/01-digits (1.2 million parameters), "layers" and "25M" are
the plain loops of `cohort bench training`, with 1.8 and 25 million. In each round the plan is made from a run with float32
on the wire, and the formats are run after it; a row has the plan's milliseconds (cohort) and what was measured. Fails where
the medians differ by more than --within.
"""
import json
import os
import statistics
import subprocess
import tempfile

from lib import boxes, groups, records

ROUNDS = 3
PEERS = []
MODELS = ["digits", "layers", "25M"]
LAYERS = {"layers": ("784,1000,1000,10", "100"), "25M": ("784,4096,4096,1024,10", "16")}
FORMATS = ["bfloat16", "int8", "int4"]


def options(parser):
    parser.add_argument("--models", type=records.list_of(str, MODELS), default=MODELS)
    parser.add_argument("--rates", type=records.list_of(int), default=[100, 1000], help="Mbit/s, 0: free")
    parser.add_argument("--formats", type=records.list_of(str, FORMATS), default=FORMATS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--within", type=float, default=0.15)


def rows_of(box, build, *words):
    with tempfile.TemporaryDirectory(prefix="cohort-plan-") as folder:
        path = os.path.join(folder, "rows")
        command = [os.path.join(build, "bin", "cohort"), "bench", words[0], "-H", "h1:1,h2:1", "--json", path, *words[1:]]
        done = subprocess.run(box.on("h1", command), capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise groups.Failed(done.stdout + done.stderr)
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def work(options, build, model, form):
    if model == "digits":
        return ["--batch", "64", "--", groups.program(build, "digits"), "--batch-per-process", "64", "--threads", "1",
                "--epochs", "1", "--wire-format", form]
    layers, batch = LAYERS[model]
    return ["--layers", layers, "--batch", batch, "--seconds", str(options.seconds), "--wire-format", form]


def measure(options, recorder):
    boxes.check()
    build = options.builds["cohort"]
    groups.needed(build, "cohort", *(["digits"] if "digits" in options.models else []))
    for rate in options.rates:
        with boxes.Box(2, rate) as box:
            for model in options.models:
                found = {form: [] for form in options.formats}
                for number in range(options.rounds):
                    said = {row["text"].split()[0]: row["step_s"] for row in rows_of(box, build, "plan", *work(options, build, model, "none"))
                            if row["event"] == "change"}
                    for form in options.formats:
                        row = rows_of(box, build, "training", "--processes", "2", "--hosts", "2", "--repetitions", "1",
                                      *work(options, build, model, form))[0]
                        values = {"cohort": 1e3 * said[form], "measured": 1e3 * row["seconds"] / row["steps"]}
                        recorder.add(number, {"model": model, "rate": rate or "free", "format": form}, "ms", values)
                        found[form].append(values)
                for form, values in found.items():
                    plan, real = (statistics.median(one[side] for one in values) for side in ("cohort", "measured"))
                    if abs(plan / real - 1) > options.within:
                        recorder.fail(f"{model}, {rate} Mbit/s, {form}: the plan says {plan:.1f} ms, measured are {real:.1f}")
