"""A server without a program: cohort run -np 2 --servers 2 --server-program "python3 -m cohort.ps" train.py"""

from __future__ import annotations

import argparse

from cohort import ps
from cohort.errors import InvalidArgument
from cohort.ps._checks import size


def _bytes(text: str) -> int:
    try:
        return size("serve", "memory", text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m cohort.ps", description="A parameter server of `cohort run --servers N`.")
    parser.add_argument("--endpoint", default="", help="HOST:PORT (port 0: any), or @NAME on this host [where the job's processes reach this host]")
    parser.add_argument("--memory", type=_bytes, default=0, help="bytes that it may take, as 6G or 500M [nine tenths of what is free]")
    parser.add_argument("--patience", type=float, default=3.0, help="seconds until a worker without connection is lost [%(default)s]")
    parser.add_argument("--journal", default="", help="a file of all changes, with which it can be started again, or a folder for those of all servers [none]")
    parser.add_argument("--replicas", type=int, choices=(0, 1), help="other servers that have a copy of its rows [1 where the job goes on when a server dies and there is no journal, else 0]")
    options = parser.parse_args()
    ps.serve(options.endpoint, **{name: value for name, value in vars(options).items() if name != "endpoint"})


if __name__ == "__main__":
    main()
