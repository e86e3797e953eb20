# mk_use_grpc_pch(<target> [<flag>...]): gRPC's and protobuf's headers, compiled once for all targets that ask with the same flags.
# mk_use_gtest_pch(<target> [<flag>...]): GoogleTest's, for every test (mk_add_test asks), which gets the flags. It halves the time
# that most of them take to compile, three times over: plain and under two sets of sanitizers.
#
# One precompiled header serves all its targets, so all are compiled with -fPIC, executables too (they would get -fPIE,
# which GCC refuses to mix with it).
function(mk_use_grpc_pch target)
  string(MAKE_C_IDENTIFIER "mk_grpc_pch${ARGN}" holder)
  mk_use_pch(${target} ${holder} LIBS mk::grpc mk::protobuf FLAGS ${ARGN}
             HEADERS <grpcpp/grpcpp.h> <google/protobuf/message.h> <google/protobuf/util/json_util.h> <memory> <string>
                     <vector>)
endfunction()

function(mk_use_gtest_pch target)
  string(MAKE_C_IDENTIFIER "mk_gtest_pch${ARGN}" holder)
  mk_use_pch(${target} ${holder} LIBS mk::gtest HEADERS <gmock/gmock.h> <gtest/gtest.h> FLAGS ${ARGN})
endfunction()

function(mk_use_pch target holder)
  cmake_parse_arguments(arg "" "" "LIBS;HEADERS;FLAGS" ${ARGN})
  if(NOT TARGET ${holder})
    file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${holder}.cc" CONTENT "// Holds the precompiled header.\n")
    add_library(${holder} OBJECT "${PROJECT_BINARY_DIR}/${holder}.cc")
    target_link_libraries(${holder} PRIVATE ${arg_LIBS} Threads::Threads)
    target_precompile_headers(${holder} PRIVATE ${arg_HEADERS})
    target_compile_options(${holder} PRIVATE ${arg_FLAGS})
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-fPIC>)
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${arg_FLAGS}>)
  target_precompile_headers(${target} REUSE_FROM ${holder})
endfunction()
