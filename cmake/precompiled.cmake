# Headers that nearly every file includes, compiled once for each kind of target: half of a build's time otherwise.
# Files include what they use all the same: the clang preset builds without these.
#
#   cohort_precompiled(TARGET KIND)    KIND: components, tests, torch or torch_tests
#
# g++ takes a precompiled header only into a target of the same -fPIC or -fPIE, optimisation and definitions.

set(cohort_common_headers <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint> <cstring>
    <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view> <thread> <utility> <variant>
    <vector> <fmt/format.h>)

function(cohort_precompiled target kind)
  set(holder cohort_headers_of_${kind})
  if(NOT TARGET ${holder})
    set(empty ${PROJECT_BINARY_DIR}/precompiled/empty.cpp)
    file(CONFIGURE OUTPUT ${empty} CONTENT "int main() {}\n")
    if(kind MATCHES "tests")
      add_executable(${holder} EXCLUDE_FROM_ALL ${empty})
      cohort_optimise_tests(${holder})
      target_link_libraries(${holder} PRIVATE GTest::gtest)
    else()
      add_library(${holder} OBJECT EXCLUDE_FROM_ALL ${empty})
    endif()
    cohort_settings(${holder})
    target_include_directories(${holder} PRIVATE ${PROJECT_SOURCE_DIR}/include)
    set(headers ${cohort_common_headers})
    if(kind MATCHES "torch")
      target_link_libraries(${holder} PRIVATE cohort_libtorch)
      target_compile_definitions(${holder} PRIVATE FMT_HEADER_ONLY=1)
      set(headers <cohort/torch/torch_api.h> ${headers})
      set_target_properties(${holder} PROPERTIES JOB_POOL_COMPILE torch_pool)
    endif()
    if(kind MATCHES "tests")
      list(APPEND headers <gtest/gtest.h>)
    endif()
    target_link_libraries(${holder} PRIVATE fmt::fmt Threads::Threads)
    target_precompile_headers(${holder} PRIVATE ${headers})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${holder})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC bug 105329 once more: it tells these false alarms of std::string where the headers are precompiled.
    target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
  endif()
endfunction()
