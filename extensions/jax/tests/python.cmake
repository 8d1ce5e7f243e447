# Tests of Python, by the functions of python/tests/CMakeLists.txt, which includes this.
cohort_python_test(jax_2 "test_jax;test_hvd_shared.Jax" RANKS 2)
cohort_python_test(jax_4 "test_jax;test_hvd_shared.Jax" RANKS 4)
set_tests_properties(python.jax_2 PROPERTIES LABELS python-hosts)  # torch has no part in it
cohort_python_test(jax_life test_jax_life)
cohort_slow(python.jax_life)  # a JAX in two processes for each end: nothing smaller dies and exits
set_property(TEST python.jax_life APPEND PROPERTY ENVIRONMENT "COHORT_COMMAND=$<TARGET_FILE:cohort>")
cohort_python_test(jax_interface test_jax_interface)
