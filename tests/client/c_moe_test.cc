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

TEST(CApiCombine, SumsTheRowsOfEveryToken) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  auto shape = sized<mk_combine_shape>();
  shape.tokens_max = 2;
  shape.hidden = shape.features = 8;
  shape.experts = 3;
  shape.top_k = 2;
  shape.dtype = MK_BF16;
  shape.partials = MK_PARTIALS_F32;
  mk_op* const op = create(session, "combine", &shape);

  // Rows of ones; expert e multiplies by e + 1 (times the unit matrix).
  const Elements y(3 * 8, tools::from_float(DataType::kBf16, 1));
  Elements weights(3 * 64, 0), out(16, 0xffff);
  const Elements residual(16, tools::from_float(DataType::kBf16, 10));
  for (std::uint32_t expert = 0; expert < 3; ++expert) {
    for (std::uint32_t i = 0; i < 8; ++i)
      weights[expert * 64 + i * 9] =
          tools::from_float(DataType::kBf16, static_cast<float>(expert + 1));
  }
  const mk_moe_row rows[] = {{0, 0, 1, 0.5f}, {0, 0, 0, 0.25f}, {0, 1, 0, 0.75f}};
  const std::uint32_t offsets[] = {0, 1, 1, 3};
  const std::int32_t ids[] = {2, 0, 2, -1};
  auto arguments = sized<mk_combine_arguments>();
  arguments.y = y.data();
  arguments.rows = rows;
  arguments.row_count = 3;
  arguments.expert_offsets = offsets;
  arguments.expert_offset_count = 4;
  arguments.expert_weights = weights.data();
  arguments.ids = ids;
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
  auto shape = sized<mk_moe_shape>();
  shape.tokens_max = 2;
  shape.hidden = shape.features = 8;
  shape.experts = 3;
  shape.top_k = 2;
  shape.dtype = MK_BF16;
  mk_op* const op = create(session, "moe", &shape);

  // Tokens of ones and of twos; expert e multiplies by e + 1 (times the unit matrix).
  Elements tokens(16), weights(3 * 64, 0), y(4 * 8, 0xffff);
  for (std::uint32_t i = 0; i < 16; ++i)
    tokens[i] = tools::from_float(DataType::kBf16, i < 8 ? 1.0f : 2.0f);
  for (std::uint32_t expert = 0; expert < 3; ++expert) {
    for (std::uint32_t i = 0; i < 8; ++i)
      weights[expert * 64 + i * 9] =
          tools::from_float(DataType::kBf16, static_cast<float>(expert + 1));
  }
  const std::int32_t ids[] = {2, 0, 2, -1};
  const float routing[] = {0.25f, 0.5f, 0.75f, 1.0f};
  auto arguments = sized<mk_moe_arguments>();
  arguments.tokens = tokens.data();
  arguments.ids = ids;
  arguments.weights = routing;
  arguments.count = 2;
  arguments.expert_weights = weights.data();
  arguments.y = y.data();
  arguments.capacity = 4;
  ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();

  void* data = nullptr;
  std::uint64_t count = 0;
  ASSERT_EQ(0, mk_op_query(op, MK_ROWS, &data, &count)) << mk_last_error();
  const auto* const rows = static_cast<const mk_moe_row*>(data);
  ASSERT_EQ(3u, count);
  const mk_moe_row expected[] = {{0, 0, 1, 0.5f}, {0, 0, 0, 0.25f}, {0, 1, 0, 0.75f}};
  const float values[] = {1, 3, 6};
  for (std::uint32_t row = 0; row < 3; ++row) {
    EXPECT_EQ(expected[row].rank, rows[row].rank);
    EXPECT_EQ(expected[row].token, rows[row].token);
    EXPECT_EQ(expected[row].slot, rows[row].slot);
    EXPECT_EQ(expected[row].weight, rows[row].weight);
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
  auto shape = sized<mk_moe_shape>();
  shape.tokens_max = 2;
  shape.hidden = shape.features = 8;
  shape.experts = 2;
  shape.top_k = 1;
  shape.dtype = MK_BF16;
  shape.unused = 99;
  shape.bias = 1;
  const auto bf16 = [](float value) { return tools::from_float(DataType::kBf16, value); };
  // Weights are zero: expert e gives its bias, 3 e + the column.
  const Elements tokens(16, bf16(1)), weights(2 * 64, 0);
  Elements bias, y(2 * 8, 0xffff);
  for (std::uint32_t i = 0; i < 16; ++i)
    bias.push_back(bf16(static_cast<float>(i / 8 * 3 + i % 8)));
  const std::int32_t ids[] = {1, 0};
  const float routing[] = {1, 1};
  auto arguments = sized<mk_moe_arguments>();
  arguments.tokens = tokens.data();
  arguments.ids = ids;
  arguments.weights = routing;
  arguments.count = 2;
  arguments.expert_weights = weights.data();
  arguments.y = y.data();
  arguments.capacity = 2;
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
