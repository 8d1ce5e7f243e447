#!/usr/bin/env python3
"""with_tensorflow.py VERSION COMMAND...: runs a command with a TensorFlow on PYTHONPATH; ends with 77, after a line with the
reason, if there is none. VERSION: "any": this Python's own, else one of those that tools/setup --for all puts below
build/tensorflow; "2.16": that version."""

import importlib.util
import os
import pathlib
import sys

BELOW = pathlib.Path(__file__).resolve().parents[3] / "build" / "tensorflow"
VERSIONS = ("2.21", "2.16")


def main(version, *command):
    wanted = VERSIONS if version == "any" else (version,)
    if version != "any" or importlib.util.find_spec("tensorflow") is None:
        folder = next((BELOW / one for one in wanted if (BELOW / one / "tensorflow").is_dir()), None)
        if folder is None:
            print(f"skipped: no TensorFlow {version} -- tools/setup --for all installs it into {BELOW}")
            return 77
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    # Makes TensorFlow log only errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
