# usage: cmake -DBUILD_DIR=... -DPREFIX=... -P install_and_move.cmake
file(REMOVE_RECURSE ${PREFIX} ${PREFIX}.first)
get_filename_component(source ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
execute_process(COMMAND ${source}/tools/install --build ${BUILD_DIR} --prefix ${PREFIX}.first COMMAND_ERROR_IS_FATAL ANY)

# A build that lacks something installs nothing.
set(library ${BUILD_DIR}/src/train/libcohort_train.a)
file(RENAME ${library} ${library}.aside)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${PREFIX}.half
                ERROR_VARIABLE refused RESULT_VARIABLE status OUTPUT_QUIET)
file(RENAME ${library}.aside ${library})
string(REGEX REPLACE "[ \n]+" " " refused "${refused}")  # CMake breaks lines where the build folder's name lets it.
if(status EQUAL 0 OR NOT refused MATCHES "libcohort_train.a is not built yet: tools/install" OR EXISTS ${PREFIX}.half)
  message(SEND_ERROR "a half build was installed, or not refused with a word: ${refused}")
endif()

file(RENAME ${PREFIX}.first ${PREFIX})

# No file may name the folder it was built in or first installed to.
file(GLOB_RECURSE texts ${PREFIX}/*.cmake ${PREFIX}/*.h)
foreach(text ${texts})
  file(READ ${text} content)
  foreach(folder ${BUILD_DIR} ${PREFIX}.first)
    string(FIND "${content}" "${folder}" found)
    if(NOT found EQUAL -1)
      message(SEND_ERROR "${text} names ${folder}")
    endif()
  endforeach()
endforeach()
foreach(file bin/cohort bin/cohort-doctor bin/cohort-bench include/cohort/cohort.h share/doc/cohort/LICENSE
             share/doc/cohort/THIRD_PARTY_LICENSES.txt
             share/bash-completion/completions/cohort share/zsh/site-functions/_cohort
             share/man/man1/cohort.1 share/man/man1/cohort-run.1
             share/man/man1/cohort-runs.1)
  if(NOT EXISTS ${PREFIX}/${file})
    message(SEND_ERROR "${file} is not installed")
  endif()
endforeach()
execute_process(COMMAND ${PREFIX}/bin/cohort --version COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PREFIX}/bin/cohort --prefix OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE)
execute_process(COMMAND ${BUILD_DIR}/bin/cohort --prefix ERROR_VARIABLE refused RESULT_VARIABLE status OUTPUT_QUIET)
if(NOT prefix STREQUAL PREFIX OR NOT status EQUAL 1 OR NOT refused MATCHES "is not installed")
  message(SEND_ERROR "cohort --prefix: '${prefix}'; from the build folder: ${status}, ${refused}")
endif()
execute_process(COMMAND ${PREFIX}/bin/cohort trace --help COMMAND_ERROR_IS_FATAL ANY)
file(READ ${PREFIX}/share/bash-completion/completions/cohort completion)
if(NOT completion MATCHES "--openmetrics")
  message(SEND_ERROR "the completion does not know the options of `cohort export`")
endif()
