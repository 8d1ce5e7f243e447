# The two targets that users link, cohort::cohort and cohort::torch, and what `cmake --install` puts where. They are
# interfaces over the components' static libraries (exported as cohort::component_*, for these two alone); with
# COHORT_SHARED, cohort::cohort is the shared library of them all.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

list(TRANSFORM COHORT_CORE PREPEND cohort_ OUTPUT_VARIABLE core_components)
if(COHORT_SHARED)
  get_property(objects GLOBAL PROPERTY COHORT_CORE_OBJECTS)
  list(TRANSFORM objects REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")
  add_library(cohort_core SHARED ${objects})
  get_property(links GLOBAL PROPERTY COHORT_CORE_LINKS)
  target_link_libraries(cohort_core PRIVATE ${links} ${CMAKE_DL_LIBS})
  target_compile_features(cohort_core INTERFACE cxx_std_20)
  foreach(extension ${COHORT_EXTENSIONS})
    if(EXISTS ${PROJECT_SOURCE_DIR}/extensions/${extension}/include)
      target_include_directories(cohort_core INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/extensions/${extension}/include>)
    endif()
  endforeach()
  target_include_directories(cohort_core INTERFACE $<INSTALL_INTERFACE:include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  # The version is in the name: no other one can take its place.
  set_target_properties(cohort_core PROPERTIES OUTPUT_NAME cohort-${PROJECT_VERSION} INSTALL_RPATH "$ORIGIN")
  target_link_options(cohort_core PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map
                      -Wl,--exclude-libs,ALL -Wl,-Bsymbolic-functions -Wl,-z,relro,-z,now)
  set_property(TARGET cohort_core APPEND PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/exports.map)
  set(core_components)
else()
  add_library(cohort_core INTERFACE)
  target_link_libraries(cohort_core INTERFACE ${core_components})
endif()
add_library(cohort::cohort ALIAS cohort_core)
set_target_properties(cohort_core PROPERTIES EXPORT_NAME cohort)
if(TARGET cohort_torch)
  add_library(cohort::torch ALIAS cohort_torch)
  if(NOT PROJECT_IS_TOP_LEVEL)
    get_target_property(parts cohort_torch INTERFACE_LINK_LIBRARIES)
    set_target_properties(${parts} PROPERTIES EXCLUDE_FROM_ALL ON)  # for who links them
  endif()
endif()
if(NOT PROJECT_IS_TOP_LEVEL)  # a part of somebody else's build, who installs what is his
  return()
endif()

# `cmake --build BUILD --target to_install` builds what is installed; without it, nothing is (and not the half of it).
get_property(programs GLOBAL PROPERTY COHORT_PROGRAMS)
list(APPEND programs cohort)
set(to_install ${core_components} ${programs} cohort_c)
if(COHORT_SHARED)
  list(APPEND to_install cohort_core)
  set_property(TARGET ${programs} APPEND PROPERTY INSTALL_RPATH $ORIGIN/../${CMAKE_INSTALL_LIBDIR})
endif()
add_custom_target(to_install DEPENDS ${to_install})
list(TRANSFORM to_install REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE files_to_install)
install(CODE "
set(files \"${files_to_install}\")
foreach(file IN LISTS files)
  if(NOT EXISTS \${file})
    message(FATAL_ERROR \"\${file} is not built yet: tools/install builds and installs, or first: \"
                        \"cmake --build ${PROJECT_BINARY_DIR} --target to_install\")
  endif()
endforeach()")

install(TARGETS cohort_c LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES src/c_api/cohort.f90 DESTINATION ${CMAKE_INSTALL_DATADIR}/cohort)
install(TARGETS cohort_core ${core_components} EXPORT cohort-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/cohort
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cohort)
install(EXPORT cohort-targets NAMESPACE cohort:: DESTINATION ${package_dir})
install(DIRECTORY include/cohort DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
foreach(extension ${COHORT_EXTENSIONS})
  if(EXISTS ${PROJECT_SOURCE_DIR}/extensions/${extension}/include)
    install(DIRECTORY extensions/${extension}/include/cohort DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  endif()
endforeach()

# The torch layer, compiled by projects that link cohort::torch, and the headers that it needs besides Cohort's own.
set(torch_layer_dir ${CMAKE_INSTALL_DATADIR}/cohort/torch)
install(CODE "set(cohort_source \"${PROJECT_SOURCE_DIR}\")\nset(cohort_extensions \"${COHORT_EXTENSIONS}\")\nset(cohort_torch_layer \"${torch_layer_dir}\")")
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_torch_layer.cmake)
set(third_party_dir ${CMAKE_INSTALL_INCLUDEDIR}/cohort_third_party)
foreach(header fmt/format.h nlohmann/json.hpp tl/expected.hpp)
  get_filename_component(library ${header} DIRECTORY)
  find_path(COHORT_HEADERS_${library} ${header} REQUIRED)
  install(DIRECTORY ${COHORT_HEADERS_${library}}/${library} DESTINATION ${third_party_dir})
endforeach()
install(FILES cmake/third_party_licenses.txt DESTINATION ${third_party_dir} RENAME LICENSES)

install(TARGETS ${programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
# Made by the command, which knows the options of all.
set(emulator "")
if(CMAKE_CROSSCOMPILING)  # It starts the programs beside it, too.
  set(emulator "env COHORT_SYSROOT=${CMAKE_SYSROOT} ${PROJECT_SOURCE_DIR}/tools/release/under-qemu")
endif()
install(CODE "
set(root \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\")
set(command ${emulator} \"$<TARGET_FILE:cohort>\")
set(bash bash-completion/completions/cohort)
set(zsh zsh/site-functions/_cohort)
foreach(shell bash zsh)
  set(file \"\${root}/${CMAKE_INSTALL_DATADIR}/\${\${shell}}\")
  get_filename_component(folder \"\${file}\" DIRECTORY)
  file(MAKE_DIRECTORY \"\${folder}\")
  execute_process(COMMAND \${command} completion \${shell} OUTPUT_FILE \"\${file}\" COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND \${command} help --manual \"\${root}/${CMAKE_INSTALL_MANDIR}/man1\" COMMAND_ERROR_IS_FATAL ANY)")
install(DIRECTORY programs/cohort/submit DESTINATION ${CMAKE_INSTALL_DATADIR}/cohort FILES_MATCHING PATTERN *.sh)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/cohort)
install(FILES cmake/third_party_licenses.txt DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/cohort RENAME THIRD_PARTY_LICENSES.txt)

configure_package_config_file(cmake/cohortConfig.cmake.in ${PROJECT_BINARY_DIR}/package/cohortConfig.cmake
                              INSTALL_DESTINATION ${package_dir} PATH_VARS torch_layer_dir third_party_dir
                              NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/cohortConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/cohortConfig.cmake ${PROJECT_BINARY_DIR}/package/cohortConfigVersion.cmake
        cmake/find_torch.cmake DESTINATION ${package_dir})
