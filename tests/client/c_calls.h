/// \file
/// For tests of the C ABI: its structs, sessions on embedded nodes, what a refusal looks like.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "mkernel/mkernel.h"
#include "mkernel/mkernel_c.h"
#include "tests/client/embedded_ranks.h"

namespace mk {

using Elements = std::vector<std::uint16_t>;

/// All zero but its size.
template <class Struct>
Struct sized() {
  Struct made;
  std::memset(&made, 0, sizeof(made));
  made.struct_bytes = sizeof(made);
  return made;
}

/// A session that the test has to detach with `leave`.
inline mk_session* attach(const EmbeddedCluster& cluster, std::uint32_t locals,
                          std::uint32_t rank) {
  mk_session* const session = attach_through_c(place(cluster, locals, rank, "c"));
  EXPECT_NE(nullptr, session) << mk_last_error();
  return session;
}
inline void leave(mk_session* session, mk_op* op = nullptr) {
  mk_op_destroy(op);
  EXPECT_EQ(0, mk_session_barrier(session, 0)) << mk_last_error();
  EXPECT_EQ(0, mk_session_detach(session)) << mk_last_error();
}
inline mk_op* create(mk_session* session, const char* name, const void* shape) {
  mk_op* op = nullptr;
  EXPECT_EQ(0, mk_op_create(session, name, shape, &op)) << mk_last_error();
  return op;
}
inline mk_gemm_shape square_shape(std::uint64_t size) {
  auto shape = sized<mk_gemm_shape>();
  shape.m_max = shape.n = shape.k = size;
  shape.dtype = MK_BF16;
  return shape;
}
inline mk_gemm_arguments gemm_arguments(const void* a, const void* b, void* c, std::uint64_t m) {
  auto arguments = sized<mk_gemm_arguments>();
  arguments.a = a;
  arguments.b = b;
  arguments.c = c;
  arguments.m = m;
  return arguments;
}
/// That a call failed with that code, and with a sentence that has all of these in it.
inline void expect_refused(mk_status status, ErrorCode code,
                           const std::vector<std::string>& words) {
  EXPECT_STREQ(error_code_name(code), mk_status_name(status)) << mk_last_error();
  for (const std::string& word : words)
    EXPECT_NE(std::string::npos, std::string(mk_last_error()).find(word)) << mk_last_error();
}

}  // namespace mk
