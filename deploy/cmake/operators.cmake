# The operators that kernels/ops/registry.h names. MK_OPERATOR_CLASSES: the public classes of all. MK_COLLECTIVES: the ids of
# those that multiply nothing, whose files each folder's CMakeLists.txt finds by them.
set(MK_OPERATOR_CLASSES)
set(MK_COLLECTIVES)
set_property(DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${PROJECT_SOURCE_DIR}/kernels/ops/registry.h")
file(READ "${PROJECT_SOURCE_DIR}/kernels/ops/registry.h" registry)
string(REGEX MATCHALL "#define MK_[A-Z]+|X\\([a-z_]+, \"[a-z-]+\", [A-Za-z]+\\)" entries "${registry}")
foreach(entry IN LISTS entries)
  if(entry MATCHES "#define (MK_[A-Z]+)")
    set(list ${CMAKE_MATCH_1})
  elseif(entry MATCHES "X\\(([a-z_]+), \"[a-z-]+\", ([A-Za-z]+)\\)")
    list(APPEND MK_OPERATOR_CLASSES ${CMAKE_MATCH_2})
    if(list STREQUAL "MK_COLLECTIVES")
      list(APPEND MK_COLLECTIVES ${CMAKE_MATCH_1})
    endif()
  endif()
endforeach()
