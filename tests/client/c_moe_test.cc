/// \file
/// MoE Dispatch+GEMM and GEMM+Combine through the C ABI.

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "tests/client/c_calls.h"

namespace mk {
namespace {

std::uint16_t bf16(float value) { return tools::from_float(DataType::kBf16, value); }

/// Two tokens, hidden and features of 8.
template <class Shape>
Shape small_shape(std::uint32_t experts, std::uint32_t top_k) {
  auto shape = sized<Shape>();
  shape.tokens_max = 2;
  shape.hidden = shape.features = 8;
  shape.experts = experts;
  shape.top_k = top_k;
  shape.dtype = MK_BF16;
  return shape;
}
/// Expert e of three multiplies by e + 1 (times the unit matrix).
Elements multiplying_experts() {
  Elements weights(3 * 64, 0);
  for (std::uint32_t expert = 0; expert < 3; ++expert) {
    for (std::uint32_t i = 0; i < 8; ++i)
      weights[expert * 64 + i * 9] = bf16(static_cast<float>(expert + 1));
  }
  return weights;
}
/// Both tokens' experts, and the rows that these then have.
constexpr std::int32_t kIds[] = {2, 0, 2, -1};
constexpr mk_moe_row kRows[] = {{0, 0, 1, 0.5f}, {0, 0, 0, 0.25f}, {0, 1, 0, 0.75f}};

mk_moe_arguments moe_arguments(const Elements& tokens, const std::int32_t* ids,
                               const float* routing, const Elements& weights, Elements& y) {
  auto arguments = sized<mk_moe_arguments>();
  arguments.tokens = tokens.data();
  arguments.ids = ids;
  arguments.weights = routing;
  arguments.count = 2;
  arguments.expert_weights = weights.data();
  arguments.y = y.data();
  arguments.capacity = y.size() / 8;
  return arguments;
}

TEST(CApiCombine, SumsTheRowsOfEveryToken) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  auto shape = small_shape<mk_combine_shape>(3, 2);
  shape.partials = MK_PARTIALS_F32;
  mk_op* const op = create(session, "combine", &shape);

  const Elements y(3 * 8, bf16(1)), weights = multiplying_experts(), residual(16, bf16(10));
  Elements out(16, 0xffff);
  const std::uint32_t offsets[] = {0, 1, 1, 3};
  auto arguments = sized<mk_combine_arguments>();
  arguments.y = y.data();
  arguments.rows = kRows;
  arguments.row_count = 3;
  arguments.expert_offsets = offsets;
  arguments.expert_offset_count = 4;
  arguments.expert_weights = weights.data();
  arguments.ids = kIds;
  arguments.count = 2;
  arguments.residual = residual.data();
  arguments.out = out.data();
  ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
  for (std::uint32_t i = 0; i < 16; ++i)
    EXPECT_EQ(i < 8 ? 11.25f : 12.25f, tools::bf16_to_float(out[i])) << i;

  std::uint64_t count = 9;
  ASSERT_EQ(0, mk_op_query(op, MK_FIRST_EXPERT, nullptr, &count)) << mk_last_error();
  EXPECT_EQ(0u, count);
  expect_refused(mk_op_query(op, MK_ROWS, nullptr, &count), ErrorCode::kUnsupported, {"combine"});
  expect_refused(mk_op_launch_on(op, nullptr, &arguments, MK_FUSED), ErrorCode::kInvalidArgument,
                 {"combine"});
  arguments.rows = nullptr;
  expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                 {"rows"});
  arguments.row_count = 0;  // as after a moe launch that had no room
  expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kLimitExceeded,
                 {"3 rows"});
  arguments.expert_offsets = nullptr;
  expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                 {"expert_offsets"});
  leave(session, op);
}

TEST(CApiMoe, SendsTokensToTheirExperts) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  auto shape = small_shape<mk_moe_shape>(3, 2);
  mk_op* const op = create(session, "moe", &shape);

  // Tokens of ones and of twos.
  Elements tokens(8, bf16(1)), y(4 * 8, 0xffff);
  tokens.resize(16, bf16(2));
  const Elements weights = multiplying_experts();
  const float routing[] = {0.25f, 0.5f, 0.75f, 1.0f};
  auto arguments = moe_arguments(tokens, kIds, routing, weights, y);
  ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();

  void* data = nullptr;
  std::uint64_t count = 0;
  ASSERT_EQ(0, mk_op_query(op, MK_ROWS, &data, &count)) << mk_last_error();
  const auto* const rows = static_cast<const mk_moe_row*>(data);
  ASSERT_EQ(3u, count);
  const float values[] = {1, 3, 6};
  for (std::uint32_t row = 0; row < 3; ++row) {
    EXPECT_EQ(kRows[row].rank, rows[row].rank);
    EXPECT_EQ(kRows[row].token, rows[row].token);
    EXPECT_EQ(kRows[row].slot, rows[row].slot);
    EXPECT_EQ(kRows[row].weight, rows[row].weight);
    for (std::uint32_t i = 0; i < 8; ++i)
      EXPECT_EQ(values[row], tools::bf16_to_float(y[row * 8 + i]));
  }
  ASSERT_EQ(0, mk_op_query(op, MK_EXPERT_OFFSETS, &data, &count)) << mk_last_error();
  const auto* const offsets = static_cast<const std::uint32_t*>(data);
  EXPECT_EQ((std::vector<std::uint32_t>{0, 1, 1, 3}),
            std::vector<std::uint32_t>(offsets, offsets + count));
  ASSERT_EQ(0, mk_op_query(op, MK_FIRST_EXPERT, nullptr, &count)) << mk_last_error();
  EXPECT_EQ(0u, count);
  arguments.capacity = 2;
  expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kLimitExceeded, {"3"});
  expect_refused(mk_op_launch_on(op, nullptr, &arguments, MK_FUSED), ErrorCode::kInvalidArgument,
                 {"moe", "CPU"});
  EXPECT_EQ(0, mk_op_status(op)) << mk_last_error();
  leave(session, op);
}

// A caller from before the bias hands over a shorter shape, and may have anything behind it.
TEST(CApiMoe, AddsTheBiasThatTheShapeAsksFor) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  auto shape = small_shape<mk_moe_shape>(2, 1);
  shape.unused = 99;
  shape.bias = 1;
  // Weights are zero: expert e gives its bias, 3 e + the column.
  const Elements tokens(16, bf16(1)), weights(2 * 64, 0);
  Elements bias, y(2 * 8, 0xffff);
  for (std::uint32_t i = 0; i < 16; ++i)
    bias.push_back(bf16(static_cast<float>(i / 8 * 3 + i % 8)));
  const std::int32_t ids[] = {1, 0};
  const float routing[] = {1, 1};
  auto arguments = moe_arguments(tokens, ids, routing, weights, y);
  arguments.bias = bias.data();
  mk_op* op = create(session, "moe", &shape);
  ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
  EXPECT_EQ(bias, y);
  arguments.bias = nullptr;
  expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                 {"bias is null"});
  mk_op_destroy(op);

  shape.struct_bytes = offsetof(mk_moe_shape, bias);
  op = create(session, "moe", &shape);
  ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
  EXPECT_EQ(Elements(16, 0), y);
  arguments.bias = bias.data();
  expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                 {"was made without"});
  leave(session, op);
}

}  // namespace
}  // namespace mk
