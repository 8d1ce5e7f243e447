# Helpers that every room's CMakeLists.txt uses.
#
#   cohort_room(comm SOURCES a.cpp b.cpp DEPENDS base sys PUBLIC_LINK fmt::fmt PRIVATE_LINK OpenSSL::SSL)
#     the static library cohort_comm of src/comm
#   cohort_test(comm_tests SOURCES a_test.cpp DEPENDS comm [LINK ...] [LABELS unit] [TIMEOUT 60] [RUN_SERIAL])
#     a GoogleTest program; each TEST becomes one ctest test unless WHOLE is given
#   cohort_fuzz(fuzz_idx SOURCES idx.cpp DEPENDS formats [SEEDS idx] [LINK ...])
#     a libFuzzer program; ctest runs it for seconds, starting from the files of fuzz/seeds/idx (clang preset only)
#
# Labels: unit (ranks are threads, or none), multiproc, e2e, install, fuzz, house, large (tools/test-large), cluster, python; and torch
# for whatever needs libtorch. `ninja torch-tests` builds what `ctest -L torch` runs: ./check does only that against the
# second libtorch.

include(GoogleTest)

if(COHORT_BUILD_TESTS)
  add_custom_target(torch-tests)
endif()

# For tests that are not made by cohort_test: `ninja torch-tests` shall build these targets.
function(cohort_torch_tests)
  add_dependencies(torch-tests ${ARGN})
endfunction()

function(cohort_settings target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE ${COHORT_WARNINGS} -iquote ${PROJECT_SOURCE_DIR}/src)
endfunction()

function(cohort_room name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PUBLIC_LINK;PRIVATE_LINK" ${ARGN})
  set(target cohort_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  cohort_settings(${target})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                              $<INSTALL_INTERFACE:include>)
  if("torch" IN_LIST ARG_DEPENDS)
    message(FATAL_ERROR "room ${name}: no room may depend on torch/, so that the command never links libtorch")
  endif()
  # An installed Cohort does not name the build machine's libtorch: cohortConfig.cmake makes cohort::libtorch.
  list(TRANSFORM ARG_PUBLIC_LINK REPLACE "^cohort_libtorch$"
       "$<BUILD_INTERFACE:cohort_libtorch>;$<INSTALL_INTERFACE:cohort::libtorch>")
  set(rooms ${ARG_DEPENDS})
  list(TRANSFORM rooms PREPEND cohort_)
  target_link_libraries(${target} PUBLIC ${rooms} ${ARG_PUBLIC_LINK} PRIVATE ${ARG_PRIVATE_LINK})
  set_target_properties(${target} PROPERTIES EXPORT_NAME room_${name})
  set_property(GLOBAL APPEND PROPERTY COHORT_ROOMS ${target})
endfunction()

function(cohort_test name)
  cmake_parse_arguments(ARG "WHOLE;RUN_SERIAL" "TIMEOUT" "SOURCES;DEPENDS;LINK;LABELS" ${ARGN})
  if(NOT COHORT_BUILD_TESTS)
    return()
  endif()
  if(NOT ARG_SOURCES)
    message(AUTHOR_WARNING "${name} has no sources")
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  cohort_settings(${name})
  set(rooms ${ARG_DEPENDS})
  list(TRANSFORM rooms PREPEND cohort_)
  target_link_libraries(${name} PRIVATE ${rooms} ${ARG_LINK} GTest::gtest_main)
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 60)
  endif()
  if(COHORT_SANITIZE MATCHES thread)  # ten times as slow
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if("torch" IN_LIST ARG_LABELS)
    cohort_torch_tests(${name})
    set_target_properties(${name} PROPERTIES JOB_POOL_COMPILE torch_pool)
  endif()
  # gtest_discover_tests cannot pass on a list. `ctest -L` searches for a part of a label, so unit-torch is both.
  list(JOIN ARG_LABELS "-" labels)
  set(properties TIMEOUT ${ARG_TIMEOUT} LABELS ${labels})
  if(ARG_RUN_SERIAL)
    list(APPEND properties RUN_SERIAL ON)
  endif()
  if(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES ${properties})
  else()
    gtest_discover_tests(${name} PROPERTIES ${properties} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120)
  endif()
endfunction()

function(cohort_fuzz name)
  cmake_parse_arguments(ARG "" "SEEDS" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  cohort_settings(${name})
  set(rooms ${ARG_DEPENDS})
  list(TRANSFORM rooms PREPEND cohort_)
  target_link_libraries(${name} PRIVATE ${rooms} ${ARG_LINK})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  # What it finds worth keeping goes to the build folder; the seeds are only read.
  set(found ${CMAKE_CURRENT_BINARY_DIR}/${name}.found)
  file(MAKE_DIRECTORY ${found})
  set(seeds)
  if(ARG_SEEDS)
    set(seeds ${PROJECT_SOURCE_DIR}/fuzz/seeds/${ARG_SEEDS})
  endif()
  add_test(NAME fuzz.${name}
           COMMAND ${name} -max_total_time=5 -timeout=5 -rss_limit_mb=2048 -print_final_stats=1
                   -artifact_prefix=${found}/ ${found} ${seeds})
  set_tests_properties(fuzz.${name} PROPERTIES LABELS fuzz TIMEOUT 60)
endfunction()
