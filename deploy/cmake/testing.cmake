# mk_add_test(<name> SOURCES <file>... [LIBS <target>...] [LABELS <label>...] [TIMEOUT <s>] [ARGS <arg>...] [NO_MAIN] [HOT])
#   One GoogleTest binary, one ctest entry. tests/runner counts the single cases from the XML that each binary
#   writes, so there is no discovery step. TIMEOUT is for a plain build (default 120 s); sanitizer presets scale it.
#   HOT: mk_hot() of its own code, and no MK_TEST_FLAGS. Nor do tests for GPUs have them: time there is dearer.
# mk_add_script_test(<name> COMMAND <command>... [LABELS <label>...] [TIMEOUT <s>])
#   Any command; counts as one case, passed when it exits 0 and skipped when it exits 77.
#
# Labels that decide which stage runs a test are listed in tests/README.md.
enable_testing()
set(MK_TEST_RESULTS "${PROJECT_BINARY_DIR}/test-results")

# Debian's gRPC, libfabric and oneDNN are not instrumented: without ignore_noninstrumented_modules, TSan reports
# their insides, since it cannot see their own synchronisation.
set(mk_test_environment
    "ASAN_OPTIONS=abort_on_error=0:detect_stack_use_after_return=1:strict_string_checks=1"
    "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0"
    "UBSAN_OPTIONS=print_stacktrace=1"
    "MK_TEST_PATIENCE=${MK_TEST_PATIENCE}"
    "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp:ignore_noninstrumented_modules=1:history_size=4:second_deadlock_stack=1")

function(mk_test_properties name labels timeout)
  if(NOT timeout)
    set(timeout 120)
  endif()
  # What may take longest begins first: nothing long is left to run alone at the end.
  set_tests_properties(${name} PROPERTIES COST ${timeout})
  math(EXPR timeout "${timeout} * ${MK_TEST_TIMEOUT_SCALE}")
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout} SKIP_RETURN_CODE 77
                       ENVIRONMENT "${mk_test_environment}")
endfunction()

function(mk_add_test name)
  cmake_parse_arguments(arg "NO_MAIN;HOT" "TIMEOUT" "SOURCES;LIBS;LABELS;ARGS" ${ARGN})
  if(NOT MK_TESTS)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  if(arg_NO_MAIN)
    target_link_libraries(${name} PRIVATE ${arg_LIBS} mk::gtest GTest::gmock Threads::Threads)
  else()
    target_link_libraries(${name} PRIVATE ${arg_LIBS} mk::gmock_main Threads::Threads)
  endif()
  if(arg_HOT AND MK_SANITIZE)
    mk_hot(${name})
  elseif(NOT "${arg_SOURCES}" MATCHES "\\.(c|cu)(;|$)")
    set(flags "${MK_TEST_FLAGS}")
    if(arg_HOT OR "${arg_LABELS}" MATCHES "(^|;)(cuda|gpu)(;|$)")
      set(flags)
    endif()
    mk_use_gtest_pch(${name} ${flags})
  endif()
  # What a sanitizer's stage leaves out, its build need not make.
  if((MK_SANITIZE MATCHES "thread" AND "notsan" IN_LIST arg_LABELS) OR
     (MK_SANITIZE MATCHES "address" AND "noasan" IN_LIST arg_LABELS))
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  add_test(NAME ${name} COMMAND ${name} ${arg_ARGS} --gtest_output=xml:${MK_TEST_RESULTS}/${name}.xml)
  mk_test_properties(${name} "${arg_LABELS}" "${arg_TIMEOUT}")
endfunction()

function(mk_add_script_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "COMMAND;LABELS" ${ARGN})
  if(NOT MK_TESTS)
    return()
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  mk_test_properties(${name} "${arg_LABELS}" "${arg_TIMEOUT}")
endfunction()
