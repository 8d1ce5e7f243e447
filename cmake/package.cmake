# `cpack -G DEB` in a build folder of which `to_install` is built: a Debian package of what `cmake --install` installs.
set(CPACK_PACKAGE_NAME cohort)
set(CPACK_PACKAGE_VENDOR "The developers of Cohort")
set(CPACK_PACKAGE_CONTACT "The developers of Cohort <cohort@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
                                                WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # by dpkg-shlibdeps of dpkg-dev
# Packages for linking C++ programs if the core is static.
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "g++, cmake, libfmt-dev, libspdlog-dev, libhwy-dev, libssl-dev, nlohmann-json3-dev, \
zlib1g-dev, openssh-client, python3")
set(CPACK_DEBIAN_COMPRESSION_TYPE gzip)
include(CPack)
