"""Common parts of the fault-injection programs, which hit jobs and check the consequences: processes and their
marks, jobs with faults, and series of runs that a seed decides."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
