/// \file
/// The operators, one line each: the one place where all of them are named. What is made from it:
/// the C ABI's table, the commands of mkrun and mkbench, and the tests that go through every
/// operator; of collectives also the builds' lists of files.
#pragma once

/// Calls X(id, name, Class) for each of the operators that multiply nothing. `id` names the
/// operator in files and code, `name` on command lines and in the C ABI, `Class` in the public C++
/// API. CMake reads these lines (deploy/cmake/operators.cmake).
#define MK_COLLECTIVES(X)                \
  X(all_gather, "all-gather", AllGather) \
  X(reduce_scatter, "reduce-scatter", ReduceScatter)

/// The same for each operator, in the order of the listings.
#define MK_OPERATORS(X)                    \
  X(ag_gemm, "ag-gemm", AllGatherGemm)     \
  X(gemm_rs, "gemm-rs", GemmReduceScatter) \
  X(gemm_ar, "gemm-ar", GemmAllReduce)     \
  X(moe, "moe", MoeDispatchGemm)           \
  X(combine, "combine", GemmCombine)       \
  X(ring, "ring", RingAttention)           \
  MK_COLLECTIVES(X)
