# Tests of Python, by the functions of python/tests/CMakeLists.txt, which includes this.
# A Spark each, with JVMs: nothing smaller has its tasks, slots and cancellations.
foreach(test spark spark_gpus spark_article)
  cohort_python_test(${test} test_${test})
  cohort_slow(python.${test})
  set_tests_properties(python.${test} PROPERTIES LABELS "python-hosts;slow" TIMEOUT 900 RUN_SERIAL ON)
endforeach()
