# Finds libtorch: COHORT_TORCH is "auto" (the active Python's PyTorch, else Debian's libtorch-dev), "python",
# "system", "off", or a folder with TorchConfig.cmake. Sets COHORT_TORCH_FOUND and says which one it is.

set(COHORT_TORCH_FOUND FALSE)
if(COHORT_TORCH STREQUAL "off")
  return()
endif()

set(torch_dir "")
if(COHORT_TORCH STREQUAL "auto" OR COHORT_TORCH STREQUAL "python")
  find_program(COHORT_PYTHON NAMES python3 DOC "the Python whose PyTorch is used")
  if(COHORT_PYTHON)
    execute_process(
      COMMAND ${COHORT_PYTHON} -c "import torch, os; print(os.path.join(torch.utils.cmake_prefix_path, 'Torch'))"
      OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT torch_dir AND COHORT_TORCH STREQUAL "python")
    message(FATAL_ERROR "COHORT_TORCH=python, but '${COHORT_PYTHON}' cannot import torch. "
                        "Try COHORT_TORCH=system with Debian's libtorch-dev, or COHORT_TORCH=off.")
  endif()
endif()
if(NOT torch_dir AND (COHORT_TORCH STREQUAL "auto" OR COHORT_TORCH STREQUAL "system"))
  file(GLOB torch_dir /usr/lib/*/cmake/Torch)
endif()
# Not a mere word: there is a folder python/ here.
if(COHORT_TORCH MATCHES "/" AND IS_DIRECTORY "${COHORT_TORCH}")
  set(torch_dir "${COHORT_TORCH}")
endif()
if(NOT torch_dir)
  if(COHORT_TORCH STREQUAL "auto")
    message(STATUS "Cohort: no libtorch found; building without it (COHORT_TORCH=off)")
    return()
  endif()
  message(FATAL_ERROR "COHORT_TORCH=${COHORT_TORCH}: no libtorch there")
endif()

list(GET torch_dir 0 Torch_DIR)
# A wheel built with MKL or CUDA names libraries that a CPU program does not need; it prints warnings we cannot act on.
set(CMAKE_MESSAGE_LOG_LEVEL_SAVED "${CMAKE_MESSAGE_LOG_LEVEL}")
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
# TorchConfig.cmake looks for Caffe2 and for its libraries in the system's folders first: a wheel's headers would be
# combined with Debian's libtorch. Its own prefix has to come before those, and what an earlier configuration found, go.
get_filename_component(torch_prefix ${Torch_DIR}/../../.. ABSOLUTE)
list(PREPEND CMAKE_PREFIX_PATH ${torch_prefix})
if(NOT TORCH_LIBRARY MATCHES "^${torch_prefix}/" OR NOT Caffe2_DIR MATCHES "^${torch_prefix}/")
  unset(TORCH_LIBRARY CACHE)
  unset(c10_LIBRARY CACHE)
  unset(Caffe2_DIR CACHE)
endif()
find_package(Torch REQUIRED CONFIG)
list(POP_FRONT CMAKE_PREFIX_PATH)
set(CMAKE_MESSAGE_LOG_LEVEL "${CMAKE_MESSAGE_LOG_LEVEL_SAVED}")

# torch's own flags (an ABI switch, -std) are not wanted in components without torch: keep them on one target.
add_library(cohort_libtorch INTERFACE)
target_link_libraries(cohort_libtorch INTERFACE ${TORCH_LIBRARIES})
target_include_directories(cohort_libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
separate_arguments(torch_flags NATIVE_COMMAND "${TORCH_CXX_FLAGS}")
target_compile_options(cohort_libtorch INTERFACE ${torch_flags})
# A wheel's headers bring an fmt of their own, which shadows Debian's and does not match its library.
target_compile_definitions(cohort_libtorch INTERFACE $<BUILD_INTERFACE:FMT_HEADER_ONLY=1>)
set(COHORT_TORCH_FOUND TRUE)
set(COHORT_TORCH_DIR ${Torch_DIR})
message(STATUS "Cohort: libtorch ${Torch_VERSION} from ${Torch_DIR}")
