# `cmake --build build --target package`: Debian packages, one per component of install.cmake.
#
# Configure with the preset `package` (prefix /usr, release, no rpath): packages of other builds carry other paths.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")  # each has its own
set(CPACK_PACKAGE_VENDOR "The mkernel authors")
# Nobody answers there yet: whoever publishes packages gives an address of theirs.
set(CPACK_PACKAGE_CONTACT "The mkernel authors <mkernel@localhost.localdomain>" CACHE STRING "Maintainer of the packages")
# Version, and dependencies on this very version: what was built by then says it.
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/deploy/cmake/package_version.cmake)
set(CPACK_MKERNEL_VERSION_FILE ${MK_VERSION_FOLDER}/version.txt)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_COMPONENTS_ALL mkerneld libmkclient1 libmkclient-dev mkernel-tools)
set(CPACK_STRIP_FILES ON)
set(CPACK_SET_DESTDIR ON)  # /etc does not lie below the prefix
set(CPACK_INSTALL_PREFIX ${CMAKE_INSTALL_PREFIX})
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)

# Library dependencies come from dpkg-shlibdeps; libmkclient1 is ours and not yet known to it.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/client)
set(mk_debian ${PROJECT_SOURCE_DIR}/deploy/debian)
set(mk_debian_made ${PROJECT_BINARY_DIR}/deploy/debian)

# mk_package(<component> <section> <summary> <text of the description>)
macro(mk_package component section summary text)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${component})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${summary}\n${text}")
  # Every package says under which licence it is, and what changed.
  install(FILES ${mk_debian}/copyright ${mk_debian_made}/changelog.Debian.gz
          DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/${component} COMPONENT ${component})
endmacro()

mk_package(mkerneld net "communication daemon for fused multi-node GPU kernels"
"mkerneld owns a node's NICs, queue pairs and polling threads. The ranks of
training jobs attach to it over a Unix socket and write commands straight into
rings that it polls; it moves their data to the other nodes.

This package has the daemon, its systemd units, its configuration, and mkctl,
which shows what it does.")
set(CPACK_DEBIAN_MKERNELD_PACKAGE_DEPENDS
    "systemd | systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles")
set(CPACK_DEBIAN_MKERNELD_PACKAGE_SUGGESTS "mkernel-tools, prometheus")
set(CPACK_DEBIAN_MKERNELD_PACKAGE_CONTROL_EXTRA
    "${mk_debian}/conffiles;${mk_debian}/postinst;${mk_debian}/prerm;${mk_debian}/postrm")

mk_package(libmkclient1 libs "client library of the mkernel communication daemon"
"Training jobs link libmkclient: it attaches to this node's mkerneld, shares
buffers with it, and runs fused operators in which computation and the
exchange over the network overlap tile by tile.

It needs libc alone; oneDNN (libdnnl2) is opened when an operator is to run on
the CPU.")
set(CPACK_DEBIAN_LIBMKCLIENT1_PACKAGE_RECOMMENDS "libdnnl2")
set(CPACK_DEBIAN_LIBMKCLIENT1_PACKAGE_CONTROL_EXTRA
    "${mk_debian}/triggers;${mk_debian_made}/shlibs;${mk_debian_made}/symbols")

mk_package(libmkclient-dev libdevel "client library of the mkernel communication daemon (development)"
"Training jobs link libmkclient: it attaches to this node's mkerneld, shares
buffers with it, and runs fused operators.

This package has the headers, the CMake package and the pkg-config file.")
set(CPACK_DEBIAN_LIBMKCLIENT-DEV_PACKAGE_SHLIBDEPS OFF)

mk_package(mkernel-tools utils "try and measure fused multi-node GPU kernels"
"mkrun runs an operator on tensors of your own files; mkbench measures the
fused operators against their unfused forms. Both start nodes and ranks on
this machine or join a cluster, and check every element.")

file(CONFIGURE OUTPUT ${mk_debian_made}/shlibs CONTENT "libmkclient 1 libmkclient1 (>= ${PROJECT_VERSION})\n")
configure_file(${mk_debian}/libmkclient1.symbols ${mk_debian_made}/symbols COPYONLY)
configure_file(${mk_debian}/changelog ${mk_debian_made}/changelog COPYONLY)
execute_process(COMMAND gzip -9nc ${mk_debian_made}/changelog OUTPUT_FILE ${mk_debian_made}/changelog.Debian.gz)
include(CPack)
