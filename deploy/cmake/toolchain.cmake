# Language level, compiler cache, linker, sanitizers. Nothing here is specific to one folder.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
include(GNUInstallDirs)

# The include root is the repository: #include "shm/ring.h".
include_directories("${PROJECT_SOURCE_DIR}")

find_package(Threads REQUIRED)

# ccache: precompiled headers need to be told that a changed mtime or macro order is no change. NOHASHDIR lets the
# build folders of one checkout share results.
find_program(MK_CCACHE ccache)
if(MK_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(launcher "${CMAKE_COMMAND}" -E env CCACHE_NOHASHDIR=1
               "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime" "${MK_CCACHE}")
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
  mk_feature(ccache ON "${MK_CCACHE}")
else()
  mk_feature(ccache OFF "not found: every build compiles everything")
endif()

# mold links in a tenth of GNU ld's time; lld is nearly as quick.
find_program(MK_MOLD NAMES mold)
find_program(MK_LLD NAMES ld.lld)
if(MK_MOLD)
  add_link_options($<HOST_LINK:-fuse-ld=mold>)
  mk_feature(linker ON "mold")
elseif(MK_LLD)
  add_link_options($<HOST_LINK:-fuse-ld=lld>)
  mk_feature(linker ON "lld")
else()
  mk_feature(linker ON "the compiler's own (mold and lld not found: links are slower)")
endif()

# Test time-outs are given for a plain build; sanitizers make everything slower.
# MK_TEST_PATIENCE is for what tests themselves wait for.
set(MK_TEST_TIMEOUT_SCALE 1)
set(MK_TEST_PATIENCE 1)
if(MK_SANITIZE)
  if(NOT MK_SANITIZE MATCHES "^(address|undefined|thread)(,(address|undefined|thread))*$")
    message(FATAL_ERROR "MK_SANITIZE is '${MK_SANITIZE}': it takes address, undefined, thread, or several with commas.")
  endif()
  # Never recover: a finding ends the process, so no test passes over one.
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${MK_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>
                      $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${MK_SANITIZE})
  add_compile_definitions(MK_SANITIZED=1)
  set(MK_TEST_TIMEOUT_SCALE 4)
  set(MK_TEST_PATIENCE 2)
  mk_feature(sanitizers ON "${MK_SANITIZE}")
else()
  mk_feature(sanitizers OFF "presets asan and tsan turn them on")
endif()

# mk_hot(<target>): its code runs millions of times. Sanitized builds optimise nothing else, because that is what takes them long
# to compile. Such a target uses no precompiled header.
function(mk_hot target)
  if(MK_SANITIZE)
    target_compile_options(${target} PRIVATE -O2)
  endif()
endfunction()

# Builds for development compile several sources of a target as one (CMAKE_UNITY_BUILD in their presets), which takes two fifths
# of the time (engine, mkctl and two tests, sanitized, on two cores: 94 s instead of 222). mk_apart(<target> [<source>...]): these, or all, are
# compiled by themselves there, too: names of theirs, in unnamed namespaces, are others' as well.
function(mk_apart target)
  if(ARGN)
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  else()
    set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  endif()
endfunction()

# CUDA, when there is an nvcc of 13.0 or later. Folders declare .cu sources under if(MK_HAVE_CUDA). ptxas' report (registers,
# spills) is kept beside each object as <object>.ptxas.
set(MK_HAVE_CUDA OFF)
if(MK_CUDA STREQUAL "OFF")
  mk_feature(cuda OFF "MK_CUDA=OFF")
else()
  find_program(MK_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  # AUTO takes what builds the kernels for certain. Before 12.0 nvcc knows no C++20; between, ON tries.
  set(nvcc_trouble "no nvcc in PATH, $CUDA_HOME/bin or /usr/local/cuda/bin")
  if(MK_NVCC)
    execute_process(COMMAND "${MK_NVCC}" --version OUTPUT_VARIABLE nvcc_says ERROR_VARIABLE nvcc_says)
    set(nvcc_version 0)
    if(nvcc_says MATCHES "release ([0-9]+[.][0-9]+)")
      set(nvcc_version ${CMAKE_MATCH_1})
    endif()
    set(nvcc_trouble "")
    if(nvcc_version VERSION_LESS 12.0 OR (nvcc_version VERSION_LESS 13.0 AND MK_CUDA STREQUAL "AUTO"))
      set(nvcc_trouble "${MK_NVCC} is of CUDA ${nvcc_version}, and 13.0 or later is needed")
    endif()
  endif()
  if(nvcc_trouble STREQUAL "")
    set(CMAKE_CUDA_COMPILER "${MK_NVCC}")
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)  # -gencode arch=compute_90a,code=sm_90a
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc 12 and later take C++20
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_COMPILER_LAUNCHER bash "${PROJECT_SOURCE_DIR}/deploy/cmake/ptxas_report.sh" ${CMAKE_CXX_COMPILER_LAUNCHER})
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v;-lineinfo>")
    find_package(CUDAToolkit REQUIRED)
    set(MK_HAVE_CUDA ON)
    mk_feature(cuda ON "nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${MK_NVCC}), sm_90a")
  elseif(MK_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MK_CUDA=ON, but ${nvcc_trouble}. "
                        "Install the CUDA toolkit 13.0 (deploy/cuda-wheels.sh), or configure with -DMK_CUDA=AUTO.")
  else()
    mk_feature(cuda OFF "${nvcc_trouble}")
  endif()
endif()

# Installed programs find our library beside them; what is built on Debian 12 can be carried in one folder.
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}" "$ORIGIN")

# Which lines the tests run, of the folders that call mk_count_lines() in their first line (clang's source-based coverage).
# Each process adds what it ran to a file of its program on its way out; tests/check_coverage.py reads them all.
if(MK_COVERAGE)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "MK_COVERAGE=ON counts with clang: configure with -DCMAKE_CXX_COMPILER=clang++-14, or take the preset asan.")
  endif()
  set(MK_COVERAGE_FLAG "-fprofile-instr-generate=${PROJECT_BINARY_DIR}/coverage/%4m.profraw")
  add_link_options(${MK_COVERAGE_FLAG})
  mk_feature(coverage ON "shm, daemon, client")
else()
  mk_feature(coverage OFF "MK_COVERAGE=OFF")
endif()

macro(mk_count_lines)
  if(MK_COVERAGE)
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:${MK_COVERAGE_FLAG}> $<$<COMPILE_LANGUAGE:C,CXX>:-fcoverage-mapping>)
  endif()
endmacro()
