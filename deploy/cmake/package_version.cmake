# Read by cpack: the packages have the version of what was built. Those of an earlier build go, as people install by pattern.
file(STRINGS "${CPACK_MKERNEL_VERSION_FILE}" CPACK_PACKAGE_VERSION LIMIT_COUNT 1)
set(exact "(= ${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
set(CPACK_DEBIAN_LIBMKCLIENT-DEV_PACKAGE_DEPENDS "libmkclient1 ${exact}, libexpected-dev")
set(CPACK_DEBIAN_MKERNEL-TOOLS_PACKAGE_DEPENDS "libmkclient1 ${exact}, libdnnl2, mkerneld ${exact}")
file(GLOB earlier "${CPACK_PACKAGE_DIRECTORY}/*.deb")
if(earlier)
  file(REMOVE ${earlier})
endif()
