"""The same as test_tensorflow_sessions in a process that has switched TensorFlow 2 off, as programs of version 1 do: without
eager mode, with that version's loops, branches and variables."""

import unittest

import tensorflow as tf

tf.compat.v1.disable_v2_behavior()

from test_tensorflow_sessions import ByPython, Sessions, setUpModule, tearDownModule  # noqa: E402, F401 -- unittest calls them

if __name__ == "__main__":
    unittest.main()
