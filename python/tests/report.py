"""Runs unittest modules, or classes and tests of them, as `python -m unittest -v` does.

usage: python -m report MODULE...

If COHORT_TEST_REPORT names a file, rank 0 writes its cases there in the form of GoogleTest's JSON, which
tools/run-tests counts.
"""

import json
import os
import sys
import time
import unittest

import tiers

class Result(unittest.TextTestResult):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cases = {}

    def startTest(self, test):
        self.cases[test.id()] = {"classname": "", "name": test.id(), "result": "COMPLETED", "began": time.monotonic()}
        super().startTest(test)

    def stopTest(self, test):
        case = self.cases[test.id()]
        case["time"] = f"{time.monotonic() - case.pop('began'):.3f}s"
        super().stopTest(test)

    def addSkip(self, test, reason):
        # A class or module that skips has no case of its own.
        self.cases.setdefault(test.id(), {"classname": "", "name": test.id(), "time": "0s"})["result"] = "SKIPPED"
        super().addSkip(test, reason)


def main():
    program = unittest.main(
        module=None,
        argv=["report", "-v", *sys.argv[1:]],
        testLoader=tiers.Loader(),
        testRunner=unittest.TextTestRunner(verbosity=2, resultclass=Result),
        exit=False,
    )
    result = program.result
    path = os.environ.get("COHORT_TEST_REPORT")
    if path and os.environ.get("RANK", "0") == "0":
        cases = list(result.cases.values())
        for test, text in result.errors + result.failures:
            failed = {"classname": "", "name": test.id(), "result": "COMPLETED", "time": "0s"}
            case = result.cases.get(test.id(), failed)
            case["failures"] = [{"failure": text}]
            if case is failed:
                cases.append(failed)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            json.dump({"testsuites": [{"name": "python", "testsuite": cases}]}, file)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
