"""How process groups of the backend "cohort" end: aborts, deaths, ranks that do not come. Starts its processes itself."""

import signal
import time
import unittest

from support import SECONDS, World
from support_distributed import SMALLEST, Case


if __name__ == "__main__":
    unittest.main()
