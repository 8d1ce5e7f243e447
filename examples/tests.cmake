# Each example does what its page says: tools/check-docs runs the page's commands and compares what they print.
#   example_test(FOLDER LABELS...)
function(example_test folder)
  list(JOIN ARGN "-" labels)
  add_test(NAME examples.${folder}
           COMMAND ${PROJECT_SOURCE_DIR}/tools/check-docs --example --prefix ${PROJECT_BINARY_DIR}
                   ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/README.md)
  get_filename_component(python ${COHORT_PYTHON} DIRECTORY)
  set_tests_properties(examples.${folder} PROPERTIES LABELS ${labels}-of:examples TIMEOUT 1800
    ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python;PYTHONDONTWRITEBYTECODE=1;OMP_NUM_THREADS=1"
    ENVIRONMENT_MODIFICATION "PATH=path_list_prepend:${python}" SKIP_REGULAR_EXPRESSION "0 blocks checked")
endfunction()

example_test(04-collectives e2e)
example_test(05-hosts cluster)
set_tests_properties(examples.05-hosts PROPERTIES RESOURCE_LOCK cluster_box)
example_test(02-digits-python e2e torch)
example_test(03-horovod e2e torch)
example_test(06-checkpoints e2e torch)
cohort_torch_tests(clicks)
example_test(10-parameter-server e2e torch)
# With this Python's torch, and the Keras that tools/setup --for all puts below build/; else it is left out.
example_test(09-keras e2e torch)
set_property(TEST examples.09-keras APPEND PROPERTY ENVIRONMENT KERAS_BACKEND=torch)
set_property(TEST examples.09-keras APPEND PROPERTY ENVIRONMENT_MODIFICATION
             "PYTHONPATH=path_list_append:${PROJECT_SOURCE_DIR}/build/keras")
if(TARGET gpt)
  cohort_torch_tests(gpt)
  example_test(11-gpt e2e torch)
endif()
if(TARGET digits)
  cohort_torch_tests(digits)
  example_test(01-digits e2e torch)
endif()
if(TARGET ppo)
  cohort_torch_tests(ppo gaussians)
  example_test(13-ppo e2e torch)
  example_test(14-gaussians e2e torch)
endif()
# A minute each and more; the tests of their frameworks, checkpoints and servers show the same by default.
foreach(folder 03-horovod 06-checkpoints 09-keras 10-parameter-server 11-gpt)
  if(TEST examples.${folder})
    cohort_slow(examples.${folder})
  endif()
endforeach()
