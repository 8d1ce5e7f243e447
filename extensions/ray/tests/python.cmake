# Tests of Python, by the functions of python/tests/CMakeLists.txt, which includes this.
cohort_python_test(ray test_ray)
cohort_slow(python.ray)  # a Ray with processes of its own
set_tests_properties(python.ray PROPERTIES LABELS "python-hosts;slow" TIMEOUT 900 RUN_SERIAL ON)
