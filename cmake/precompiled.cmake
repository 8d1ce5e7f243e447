# Headers that nearly every file includes, compiled once for each kind of target: half of a build's time otherwise.
# Files include what they use all the same: the clang preset builds without these.
#
#   cohort_compile_as(TARGET KIND)
#     hot     what a step of training, a sum or a row of a table waits for: the build type's own optimisation
#     cold    what runs once, or waits for processes, files and people: -Og, which compiles in half the time
#     tests   -Og, with GoogleTest
#     torch   what includes libtorch, tests too: -O1, since what runs there is libtorch
#
# g++ takes a precompiled header only into a target of the same -fPIC or -fPIE, optimisation and definitions; so programs
# are compiled with -fPIC, as libraries are. Levels other than the build type's own are those of Release alone.

set(cohort_common_headers <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint> <cstring>
    <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view> <thread> <utility> <variant>
    <vector> <fmt/format.h>)
find_path(COHORT_GTEST_HEADERS gtest/gtest.h)
mark_as_advanced(COHORT_GTEST_HEADERS)

set(cohort_level_of_cold -Og)
set(cohort_level_of_tests -Og)
set(cohort_level_of_torch -O1)

foreach(kind hot cold tests torch)
  if((kind STREQUAL "tests" AND NOT COHORT_BUILD_TESTS) OR (kind STREQUAL "torch" AND NOT COHORT_TORCH_FOUND))
    continue()
  endif()
  set(holder cohort_headers_of_${kind})
  set(empty ${PROJECT_BINARY_DIR}/precompiled/empty.cpp)
  file(CONFIGURE OUTPUT ${empty} CONTENT "int main() {}\n")
  add_library(${holder} OBJECT EXCLUDE_FROM_ALL ${empty})
  cohort_settings(${holder})
  target_include_directories(${holder} PRIVATE ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(${holder} PRIVATE $<$<CONFIG:Release>:${cohort_level_of_${kind}}>)
  set(headers ${cohort_common_headers})
  if(kind STREQUAL "torch")
    target_link_libraries(${holder} PRIVATE cohort_libtorch)
    target_compile_definitions(${holder} PRIVATE FMT_HEADER_ONLY=1)
    set(headers <cohort/torch/torch_api.h> ${headers})
    set_target_properties(${holder} PROPERTIES JOB_POOL_COMPILE torch_pool)
  endif()
  if(kind MATCHES "tests|torch" AND COHORT_GTEST_HEADERS)
    list(APPEND headers <gtest/gtest.h>)
    target_compile_definitions(${holder} PRIVATE GTEST_HAS_PTHREAD=1)
  endif()
  target_link_libraries(${holder} PRIVATE fmt::fmt Threads::Threads)
  target_precompile_headers(${holder} PRIVATE ${headers})
endforeach()

function(cohort_compile_as target kind)
  set(holder cohort_headers_of_${kind})
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:${cohort_level_of_${kind}}>)
  if(kind STREQUAL "torch")
    set_target_properties(${target} PROPERTIES JOB_POOL_COMPILE torch_pool)
    target_compile_definitions(${target} PRIVATE FMT_HEADER_ONLY=1)
  endif()
  if(kind MATCHES "tests|torch" AND COHORT_GTEST_HEADERS)  # as the precompiled header has it
    target_compile_definitions(${target} PRIVATE GTEST_HAS_PTHREAD=1)
  endif()
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(${target} PRIVATE fmt::fmt Threads::Threads)
  target_precompile_headers(${target} REUSE_FROM ${holder})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC bug 105329 once more: it tells these false alarms of std::string where the headers are precompiled.
    target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND kind MATCHES "cold|tests")
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)  # of -Og, as its manual says
  endif()
endfunction()
