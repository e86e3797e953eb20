/// \file
/// Wrong arguments of an operator class `Op` whose Shape is {m_max, n, k, ...} and whose launch is
/// (a, b, c, m): in a world of one rank, where all of these compute C = A B.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/client/embedded_ranks.h"

namespace mk {

/// Each is refused with kInvalidArgument, and the operator then works as if nothing had been.
template <class Op>
void expect_wrong_gemm_arguments_change_nothing() {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {0, 8, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {8, 0, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {8, 8, 0}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            Op::create(*session, {8, 8, 8, static_cast<DataType>(9)}).error().code);
  auto op = Op::create(*session, {8, 8, 8});
  ASSERT_TRUE(op) << op.error().message;
  const std::vector<std::uint16_t> ones(64, 0x3f80);
  std::vector<std::uint16_t> c(64, 0xffff);
  const auto refused = [&](const void* a, const void* b, void* out, std::uint64_t m) {
    EXPECT_EQ(ErrorCode::kInvalidArgument, op->launch(a, b, out, m).error().code);
  };
  refused(ones.data(), ones.data(), c.data(), 9);
  refused(ones.data(), ones.data(), c.data(), 0);
  refused(nullptr, ones.data(), c.data(), 8);
  refused(ones.data(), nullptr, c.data(), 8);
  refused(ones.data(), ones.data(), nullptr, 8);
  ASSERT_TRUE(op->launch(ones.data(), ones.data(), c.data(), 8));
  for (const std::uint16_t element : c) EXPECT_EQ(0x4100, element);  // 8.0
}

}  // namespace mk
