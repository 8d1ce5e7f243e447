# Tests of Python, by the functions of python/tests/CMakeLists.txt, which includes this.
cohort_python_test(ps "test_ps.Arrays;test_ps.Optimizers;test_ps.Embeddings")
cohort_python_test(ps_servers test_ps.Ranks)
cohort_python_test(ps_coordinator test_ps_coordinator.Scheduled)
cohort_python_test(ps_hybrid "test_ps_hybrid.Steps;test_ps_hybrid.WithoutMemory;test_ps_hybrid.Checkpoints;test_ps_hybrid.Dense")
cohort_python_test(ps_alike test_ps_hybrid.Alike)
cohort_python_test(ps_killed test_ps_hybrid.Killed.test_between_the_dense_step_and_the_clock)
cohort_python_test(ps_killed_others test_ps_hybrid.Killed)
cohort_slow(python.ps_killed_others)  # ps_killed has three of nine trainings in all
foreach(test ps_servers ps_coordinator ps_alike ps_killed ps_killed_others)
  set_property(TEST python.${test} APPEND PROPERTY ENVIRONMENT "COHORT_COMMAND=$<TARGET_FILE:cohort>")
endforeach()
# ps_servers and ps_kills_tests show what becomes of servers that die.
cohort_slow(python.ps_alike python.ps_killed)
set_tests_properties(python.ps PROPERTIES COST 60)
