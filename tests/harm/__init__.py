"""What the programs share that let jobs come to harm and look at what becomes of them: processes and their marks, jobs
that are struck, and series of runs that a seed decides."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
