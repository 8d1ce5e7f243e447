"""Chooses the cases: all of them by hand; under tools/run-tests COHORT_TESTS says `quick` or `slow`."""

import os
import unittest


def slow(test):
    """Leaves a case, or all of a class, to `./check --all`: it takes more than five seconds, and a shorter one shows the same."""
    test.slow = True
    return test


class Loader(unittest.TestLoader):
    def getTestCaseNames(self, testCaseClass):
        names = super().getTestCaseNames(testCaseClass)
        asked = os.environ.get("COHORT_TESTS")
        if asked not in ("quick", "slow"):
            return names
        of_class = getattr(testCaseClass, "slow", False)
        return [
            name for name in names if (of_class or hasattr(getattr(testCaseClass, name), "slow")) == (asked == "slow")
        ]
