/// \file
/// The operators, one line each: the one place where all of them are named. What is made from it:
/// the C ABI's table, the commands of mkrun and mkbench, and the tests that go through every
/// operator.
#pragma once

/// Calls X(id, name, Class) for each, in the order of the listings. `id` names the operator in
/// files and code, `name` on command lines and in the C ABI, `Class` in the public C++ API.
#define MK_OPERATORS(X)                    \
  X(ag_gemm, "ag-gemm", AllGatherGemm)     \
  X(gemm_rs, "gemm-rs", GemmReduceScatter) \
  X(gemm_ar, "gemm-ar", GemmAllReduce)     \
  X(moe, "moe", MoeDispatchGemm)           \
  X(combine, "combine", GemmCombine)       \
  X(ring, "ring", RingAttention)           \
  X(all_gather, "all-gather", AllGather)
