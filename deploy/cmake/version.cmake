# The version of what is built, in deploy/version of the build folder: mk_version.h for the two sources that tell it, and version.txt
# for packages and wheels. It is looked up at every build (revision.cmake), since a commit configures nothing anew.
set(MK_REVISION AUTO CACHE STRING "What follows the version's number: AUTO (date and commit, but at its tag), OFF (nothing), or a text")
set(MK_VERSION_FOLDER ${PROJECT_BINARY_DIR}/deploy/version)
set(mk_version_command ${CMAKE_COMMAND} -DMK_REVISION=${MK_REVISION} -DMK_HEADER=${MK_VERSION_FOLDER}/mk_version.h
    -DMK_TEXT=${MK_VERSION_FOLDER}/version.txt -P ${PROJECT_SOURCE_DIR}/deploy/cmake/revision.cmake)
execute_process(COMMAND ${mk_version_command} COMMAND_ERROR_IS_FATAL ANY)
if(MK_REVISION STREQUAL "AUTO")
  add_custom_target(mk_version ALL COMMAND ${mk_version_command} VERBATIM COMMENT "Looking up the version"
    BYPRODUCTS ${MK_VERSION_FOLDER}/mk_version.h ${MK_VERSION_FOLDER}/version.txt)
else()
  add_custom_target(mk_version)
endif()

# mk_tells_version(<target> <source>): that source of the target may include "mk_version.h".
function(mk_tells_version target source)
  add_dependencies(${target} mk_version)
  set_property(SOURCE ${source} APPEND PROPERTY INCLUDE_DIRECTORIES ${MK_VERSION_FOLDER})
  set_property(SOURCE ${source} APPEND PROPERTY OBJECT_DEPENDS ${MK_VERSION_FOLDER}/mk_version.h)
  set_property(SOURCE ${source} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
endfunction()
