# Helpers that every CMakeLists.txt of a component uses.
#
#   cohort_component(comm SOURCES a.cpp b.cpp DEPENDS base sys PUBLIC_LINK fmt::fmt PRIVATE_LINK OpenSSL::SSL)
#     the static library cohort_comm of src/comm; with COHORT_SHARED, if users' programs need it, a part of the shared
#     library of all such components (cmake/install.cmake), which cohort_comm then stands for
#   cohort_test(comm_tests SOURCES a_test.cpp DEPENDS comm [LINK ...] [LABELS unit] [TIMEOUT 600] [RUN_SERIAL])
#     a GoogleTest program; each TEST becomes one ctest test unless WHOLE is given
#
# Labels: unit (ranks are threads, or none), multiproc, e2e, install, fuzz, style, large (tools/test-large), cluster, python; torch
# for whatever needs libtorch (`ninja torch-tests` builds what `ctest -L torch` runs: ./check does only that against the
# second libtorch); and slow for what only ./check --all runs.

include(GoogleTest)
include(cmake/precompiled.cmake)

if(COHORT_BUILD_TESTS)
  add_custom_target(torch-tests)
endif()

# For tests that are not made by cohort_test: `ninja torch-tests` shall build these targets.
function(cohort_torch_tests)
  add_dependencies(torch-tests ${ARGN})
endfunction()

# cohort_slow(TESTS...), which add_test made: only ./check --all runs them.
function(cohort_slow)
  foreach(test ${ARGN})
    get_property(labels TEST ${test} PROPERTY LABELS)
    set_property(TEST ${test} PROPERTY LABELS "${labels}-slow")
  endforeach()
endfunction()

function(cohort_settings target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE ${COHORT_WARNINGS} -iquote ${PROJECT_SOURCE_DIR}/src)
endfunction()

# What tests compute themselves is little: they need not be optimised as what they test is.
function(cohort_optimise_tests target)
  target_compile_options(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O1>)
endfunction()

# Users' programs link these. launch/ and those of programs/ are the command's.
set(COHORT_CORE base net rendezvous telemetry comm train ps)

function(cohort_component name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PUBLIC_LINK;PRIVATE_LINK" ${ARGN})
  set(target cohort_${name})
  set_property(GLOBAL APPEND PROPERTY COHORT_COMPONENTS ${target})
  if(COHORT_SHARED AND name IN_LIST COHORT_CORE)
    add_library(${target} INTERFACE)
    target_link_libraries(${target} INTERFACE cohort_core ${ARG_PUBLIC_LINK})
    set(target ${target}_objects)
    add_library(${target} OBJECT ${ARG_SOURCES})
    cohort_settings(${target})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include)
    target_link_libraries(${target} PRIVATE ${ARG_PUBLIC_LINK} ${ARG_PRIVATE_LINK} fmt::fmt Threads::Threads)
    cohort_precompiled(${target} components)
    set_property(GLOBAL APPEND PROPERTY COHORT_CORE_LINKS ${ARG_PUBLIC_LINK} ${ARG_PRIVATE_LINK})
    return()
  endif()
  add_library(${target} STATIC ${ARG_SOURCES})
  cohort_settings(${target})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                              $<INSTALL_INTERFACE:include>)
  if("torch" IN_LIST ARG_DEPENDS)
    message(FATAL_ERROR "component ${name}: no component may depend on torch/, so that the command never links libtorch")
  endif()
  set(components ${ARG_DEPENDS})
  list(TRANSFORM components PREPEND cohort_)
  target_link_libraries(${target} PUBLIC ${components} ${ARG_PUBLIC_LINK} PRIVATE ${ARG_PRIVATE_LINK})
  if("cohort_libtorch" IN_LIST ARG_PUBLIC_LINK)
    if(NOT CMAKE_UNITY_BUILD)  # of one or two units, which would not win back what libtorch's header costs
      cohort_precompiled(${target} torch)
    endif()
  else()
    cohort_precompiled(${target} components)
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME component_${name})
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
  set(CMAKE_UNITY_BUILD OFF)  # many tests are compiled after an edit of one
  add_executable(${name} ${ARG_SOURCES})
  cohort_settings(${name})
  set(components ${ARG_DEPENDS})
  list(TRANSFORM components PREPEND cohort_)
  target_link_libraries(${name} PRIVATE ${components} ${ARG_LINK} GTest::gtest_main)
  cohort_optimise_tests(${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)  # for what takes seconds: a busy machine may be ten times slower
  endif()
  if(COHORT_SANITIZE MATCHES thread)  # ten times as slow
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if("torch" IN_LIST ARG_DEPENDS)
    set_target_properties(${name} PROPERTIES JOB_POOL_COMPILE torch_pool)
    cohort_precompiled(${name} torch_tests)
  else()
    cohort_precompiled(${name} tests)
  endif()
  if("torch" IN_LIST ARG_LABELS)
    cohort_torch_tests(${name})
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
    gtest_discover_tests(${name} PROPERTIES ${properties} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 600)
  endif()
endfunction()
