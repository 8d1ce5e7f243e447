# The two targets that users link, cohort::cohort and cohort::torch, and what `cmake --install` puts where. They are
# interfaces over the components' static libraries (exported as cohort::component_*, for these two alone).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

get_property(components GLOBAL PROPERTY COHORT_COMPONENTS)
set(core_components ${components})
# launch/ and programs/ are the command's; torch/ is the second target's.
list(REMOVE_ITEM core_components cohort_launch cohort_doctor cohort_export cohort_trace cohort_watch cohort_torch)

# `cmake --build BUILD --target to_install` builds what is installed; without it, nothing is (and not the half of it).
set(programs cohort cohort-bench cohort-doctor cohort-export cohort-trace cohort-watch)
set(to_install ${core_components} ${programs})
if(TARGET cohort_torch)
  list(APPEND to_install cohort_torch)
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

add_library(cohort_core INTERFACE)
add_library(cohort::cohort ALIAS cohort_core)
set_target_properties(cohort_core PROPERTIES EXPORT_NAME cohort)
target_link_libraries(cohort_core INTERFACE ${core_components})
install(TARGETS cohort_core ${core_components} EXPORT cohort-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/cohort)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cohort)
install(EXPORT cohort-targets NAMESPACE cohort:: DESTINATION ${package_dir})
install(DIRECTORY include/cohort DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        PATTERN torch EXCLUDE PATTERN torch.h EXCLUDE)

if(TARGET cohort_torch)
  add_library(cohort_with_torch INTERFACE)
  add_library(cohort::torch ALIAS cohort_with_torch)
  set_target_properties(cohort_with_torch PROPERTIES EXPORT_NAME torch)
  target_link_libraries(cohort_with_torch INTERFACE cohort_torch cohort_core)
  install(TARGETS cohort_with_torch cohort_torch EXPORT cohort-torch-targets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/cohort)
  install(EXPORT cohort-torch-targets NAMESPACE cohort:: DESTINATION ${package_dir})
  install(DIRECTORY include/cohort/torch DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cohort)
  install(FILES include/cohort/torch.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cohort)
  set(COHORT_BUILT_WITH_TORCH ${Torch_VERSION})
endif()

install(TARGETS ${programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
# Made by what has been installed, which knows the options of all commands.
install(CODE "
set(completions \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}/bash-completion/completions\")
file(MAKE_DIRECTORY \${completions})
execute_process(COMMAND \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/cohort\" completion bash
                OUTPUT_FILE \${completions}/cohort COMMAND_ERROR_IS_FATAL ANY)")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/cohort)

configure_package_config_file(cmake/cohortConfig.cmake.in ${PROJECT_BINARY_DIR}/package/cohortConfig.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/cohortConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/cohortConfig.cmake ${PROJECT_BINARY_DIR}/package/cohortConfigVersion.cmake
        DESTINATION ${package_dir})
