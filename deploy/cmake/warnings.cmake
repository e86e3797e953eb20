# Every target links mk_warnings; generated code is exempt by mk_exempt_generated(target).
add_library(mk_warnings INTERFACE)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(cxx_warnings
      -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-qual -Wvla
      -Wduplicated-cond -Wlogical-op -Wformat=2 -Wmissing-declarations -Wextra-semi
      -Wno-missing-field-initializers)  # {.field = value} leaves the rest at their defaults, on purpose
else()
  # GCC's warnings are the ones that are kept at zero; clang's version of them asks for other casts and other silences.
  set(cxx_warnings -w)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # At -O2 and above GCC 12 sees overlapping, huge and out-of-bounds copies in libstdc++'s own "text" + std::string (its bugs 105651, 105329).
  list(APPEND cxx_warnings -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
endif()
set(c_warnings -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes)
if(MK_WERROR)
  list(APPEND cxx_warnings -Werror)
  list(APPEND c_warnings -Werror)
endif()
if(MK_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC sees uninitialised reads in its own instrumentation; -Wtsan speaks of fences, which stay visible.
  list(APPEND cxx_warnings -Wno-maybe-uninitialized -Wno-error=tsan)
endif()
target_compile_options(mk_warnings INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${cxx_warnings}>"
  "$<$<COMPILE_LANGUAGE:C>:${c_warnings}>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter>")
if(MK_WERROR)
  target_compile_options(mk_warnings INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
link_libraries(mk_warnings)

function(mk_exempt_generated target)
  target_compile_options(${target} PRIVATE -w)
endfunction()
