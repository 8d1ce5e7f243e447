# Finds libtorch for Cohort's own build, and for find_package(cohort COMPONENTS torch), beside which it is installed.
#
#   cohort_find_torch(WHERE)    WHERE: auto, python, system, or the folder of TorchConfig.cmake
#
# "auto" is what Torch_DIR or CMAKE_PREFIX_PATH name, the PyTorch beside this package, the active Python's, or the
# system's (Debian's libtorch-dev). Sets COHORT_TORCH_DIR and COHORT_TORCH_VERSION and makes the target cohort_libtorch;
# or sets COHORT_NO_TORCH to the reason why not.
#
# TorchConfig.cmake is looked at, not included: with a libtorch for CUDA it fails on machines without the CUDA toolkit, of
# which C++ programs need nothing; and it takes headers and libraries from different libtorchs where the system has one.

function(cohort_find_torch where)
  set(COHORT_TORCH_DIR "" PARENT_SCOPE)
  set(COHORT_NO_TORCH "" PARENT_SCOPE)
  foreach(name dir include library glog_library)  # whatever the caller has by these names
    set(${name} ${name}-NOTFOUND)
  endforeach()
  set(places "")
  if(where STREQUAL "auto")
    set(places "${Torch_DIR}" "${Torch_ROOT}" "$ENV{Torch_DIR}" "$ENV{Torch_ROOT}" ${CMAKE_PREFIX_PATH}
               $ENV{CMAKE_PREFIX_PATH}
               ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../../torch)  # of site-packages/cohort/lib/cmake/cohort
    string(REPLACE ":" ";" places "${places}")
  elseif(where MATCHES "/")  # not a mere word: there is a folder python/ here
    set(places ${where})
  endif()
  find_path(dir TorchConfig.cmake NO_CACHE NO_DEFAULT_PATH PATHS ${places}
            PATH_SUFFIXES Torch share/cmake/Torch lib/cmake/Torch)
  if(NOT dir AND where MATCHES "^(auto|python)$")
    find_program(COHORT_PYTHON NAMES python3 DOC "the Python whose PyTorch is used")
    if(COHORT_PYTHON)  # which need not load it
      execute_process(
        COMMAND ${COHORT_PYTHON} -c "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
        OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      find_path(dir TorchConfig.cmake NO_CACHE NO_DEFAULT_PATH PATHS ${package} PATH_SUFFIXES share/cmake/Torch)
    endif()
  endif()
  if(NOT dir AND where MATCHES "^(auto|system)$")
    file(GLOB places /usr/lib/*/cmake/Torch /usr/lib*/cmake/Torch /usr/share/cmake/Torch)
    find_path(dir TorchConfig.cmake NO_CACHE NO_DEFAULT_PATH PATHS ${places})
  endif()
  if(NOT dir)
    set(COHORT_NO_TORCH "no libtorch was found (${where}): pip install torch in the active environment, apt-get install \
libtorch-dev, or set Torch_DIR to the folder of TorchConfig.cmake" PARENT_SCOPE)
    return()
  endif()

  get_filename_component(dir ${dir} REALPATH)
  # PREFIX/share/cmake/Torch, and Debian's PREFIX/lib/ARCHITECTURE/cmake/Torch
  find_path(include ATen/ATen.h NO_CACHE NO_DEFAULT_PATH PATHS ${dir}/../../../include ${dir}/../../../../include)
  find_library(library torch_cpu NO_CACHE NO_DEFAULT_PATH PATHS ${dir}/../../../lib ${dir}/../../../lib64 ${dir}/../..)
  file(STRINGS ${dir}/TorchConfigVersion.cmake version REGEX "PACKAGE_VERSION \"")
  string(REGEX MATCH "[0-9.]+" version "${version}")
  if(NOT include OR NOT library OR version VERSION_LESS 1.13)
    set(COHORT_NO_TORCH "${dir} belongs to no libtorch 1.13 or later with shared libraries" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS ${dir}/TorchConfig.cmake old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(old_abi AND (cohort_is_installed OR NOT CMAKE_CXX_FLAGS MATCHES "_GLIBCXX_USE_CXX11_ABI=0"))
    set(COHORT_NO_TORCH "libtorch ${version} of ${dir} has the C++ ABI from before 2011 (_GLIBCXX_USE_CXX11_ABI=0), as \
PyTorch's own wheels for x86-64 before 2.6: Cohort's libraries cannot be linked with it. Take torch 2.6 or later, the libtorch of \
pytorch.org that is called cxx11 ABI, or Debian's libtorch-dev" PARENT_SCOPE)
    return()
  endif()

  get_filename_component(folder ${library} DIRECTORY)
  get_filename_component(folder ${folder} REALPATH)
  get_filename_component(include ${include} REALPATH)
  if(NOT TARGET cohort_libtorch)
    add_library(cohort_libtorch INTERFACE)
    target_include_directories(cohort_libtorch SYSTEM INTERFACE ${include} ${include}/torch/csrc/api/include)
    # libtorch.so has no symbols, but needs the libraries of each device.
    target_link_libraries(cohort_libtorch INTERFACE "-Wl,--push-state,--no-as-needed,${folder}/libtorch.so,--pop-state"
                          ${folder}/libtorch_cpu.so ${folder}/libc10.so)
    file(GLOB devices ${folder}/libtorch_cuda.so ${folder}/libtorch_hip.so ${folder}/libtorch_xpu.so)
    if(devices)  # what these need, the loader finds in other packages of Python's, the linker does not
      target_link_options(cohort_libtorch INTERFACE -Wl,--allow-shlib-undefined)
    endif()
    file(STRINGS ${include}/c10/macros/cmake_macros.h glog REGEX "^#define C10_USE_GLOG")
    find_library(glog_library glog NO_CACHE)
    if(glog AND glog_library)  # Debian's logs by it, in headers
      target_link_libraries(cohort_libtorch INTERFACE ${glog_library})
    endif()
  endif()
  set(COHORT_TORCH_DIR ${dir} PARENT_SCOPE)
  set(COHORT_TORCH_VERSION ${version} PARENT_SCOPE)
endfunction()

# A program that links two libtorchs aborts before main. find_package(Torch) gives such a pair where a wheel's and the
# system's are there: it looks for libc10.so in the system's folders first.
function(cohort_refuse_another_libtorch)
  get_target_property(ours cohort_libtorch INTERFACE_LINK_LIBRARIES)
  list(FILTER ours INCLUDE REGEX "/libc10\\.so$")
  get_filename_component(folder ${ours} DIRECTORY)
  set(others ${C10_LIBRARY} ${TORCH_LIBRARY})
  foreach(target torch torch_cpu c10)
    if(TARGET ${target})
      get_target_property(location ${target} IMPORTED_LOCATION)
      list(APPEND others ${location})
    endif()
  endforeach()
  foreach(other IN LISTS others)
    if(NOT EXISTS "${other}")
      continue()
    endif()
    get_filename_component(real ${other} REALPATH)
    get_filename_component(place ${real} DIRECTORY)
    if(NOT place STREQUAL folder)
      message(FATAL_ERROR "find_package(Torch) takes ${other}, and cohort::torch ${ours}: a program that links both aborts \
before main. cohort::torch brings libtorch with its headers: leave out find_package(Torch) and TORCH_LIBRARIES. Or set \
C10_LIBRARY and Torch_DIR, which cohort follows, to one libtorch")
    endif()
  endforeach()
endfunction()
