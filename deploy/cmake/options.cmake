# The switches a person may set. AUTO means: on when what it needs is there, and the summary says which.
set(MK_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (when nvcc is found), ON, OFF")
set(MK_CUDA_KERNELS "" CACHE STRING "Which of them: all; few; bf16, for machines without a GPU. Empty: all in a release build, few in others")
set(MK_VERBS AUTO CACHE STRING "Build the verbs fabric: AUTO (when libibverbs is found), ON, OFF")
set(MK_OFI AUTO CACHE STRING "Build the libfabric fabric: AUTO (when libfabric is found), ON, OFF")
option(MK_TESTS "Build the tests" ON)
option(MK_BENCH "Build the micro-benchmarks (Google Benchmark); mkbench is always built" ON)
option(MK_COVERAGE "Count which lines of shm, daemon and client the tests run (clang only)" OFF)
option(MK_WERROR "Treat warnings as errors" ON)
set(MK_TEST_FLAGS "" CACHE STRING "What is added for the tests' own code, but for that which runs millions of times")
set(MK_SANITIZE "" CACHE STRING "Sanitizers, comma separated: address, undefined, thread")

foreach(option MK_CUDA MK_VERBS MK_OFI)
  set_property(CACHE ${option} PROPERTY STRINGS AUTO ON OFF)
  if(NOT ${option} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${option} is '${${option}}': it takes AUTO, ON or OFF.")
  endif()
endforeach()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

# mk_feature(NAME <ON|OFF> <why>): one row of the summary at the end of configure.
set_property(GLOBAL PROPERTY mk_features "")
function(mk_feature name state why)
  set_property(GLOBAL APPEND PROPERTY mk_features "${name}|${state}|${why}")
endfunction()
