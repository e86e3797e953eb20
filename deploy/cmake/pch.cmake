# mk_use_grpc_pch(<target>): gRPC's and protobuf's headers, compiled once for all targets that ask.
#
# One precompiled header serves them all, so all are compiled with -fPIC, executables too (they would get -fPIE,
# which GCC refuses to mix with it).
function(mk_use_grpc_pch target)
  if(NOT TARGET mk_grpc_pch)
    file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/grpc_pch.cc" CONTENT "// Holds the precompiled header.\n")
    add_library(mk_grpc_pch OBJECT "${PROJECT_BINARY_DIR}/grpc_pch.cc")
    target_link_libraries(mk_grpc_pch PRIVATE mk::grpc mk::protobuf Threads::Threads)
    target_precompile_headers(mk_grpc_pch PRIVATE <grpcpp/grpcpp.h> <google/protobuf/message.h>
                              <google/protobuf/util/json_util.h> <memory> <string> <vector>)
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM mk_grpc_pch)
endfunction()
