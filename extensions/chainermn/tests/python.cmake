# Tests of Python, by the functions of python/tests/CMakeLists.txt, which includes this.
set(chainermn_tests "test_chainermn_communicator;test_chainermn_functions;test_chainermn_training")
cohort_python_test(chainermn_1 "${chainermn_tests}" RANKS 1)
cohort_python_test(chainermn_2 "${chainermn_tests}" RANKS 2)
cohort_python_test(chainermn_4 "${chainermn_tests}" RANKS 4)
cohort_python_test(chainermn_on_2 "${chainermn_tests}" RANKS 4 HOSTS 2)
cohort_python_test(chainermn_on_3_1 test_chainermn_communicator RANKS 4 HOSTS 3,1)
cohort_python_test(chainermn_digits test_chainermn_digits)
# Once: 17 processes that train; what differs between versions of torch is in the tests above.
set_tests_properties(python.chainermn_digits PROPERTIES LABELS python-hosts TIMEOUT 600)
set_property(TEST python.chainermn_digits APPEND PROPERTY ENVIRONMENT "COHORT_COMMAND=$<TARGET_FILE:cohort>")
cohort_slow(python.chainermn_digits)
