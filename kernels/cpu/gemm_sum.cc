#include "kernels/cpu/gemm_sum.h"

#include "kernels/comm/plan_tools.h"

namespace mk::kernels {

std::vector<RoleThread> gemm_sum_threads(const RoleBlocks& blocks, const World& world,
                                         std::optional<Role> after_compute) {
  std::vector<RoleThread> threads;
  add_role(threads, Role::kCompute, blocks.compute, after_compute);
  if (world.locals > 1) add_role(threads, Role::kReduce, blocks.reduce);
  if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
  if (world.nodes > 1) add_role(threads, Role::kReceive, blocks.receive);
  return threads;
}

Status check_gemm_launch(std::string_view op, const GemmMatrices& matrices, std::uint32_t m,
                         const SumGeometry& geometry, std::uint32_t k, BLayout b_layout) {
  const Shape& max = geometry.max;
  const std::uint32_t c_side = geometry.result_columns();
  if (m < 1 || m > max.m) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: m = {} is not in 1 to {}, which the operator was made for", op, m, max.m);
  }
  if (matrices.a == nullptr || matrices.b == nullptr) {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is null", op,
                matrices.a == nullptr ? "a" : "b");
  }
  const std::uint32_t b_side = b_layout == BLayout::kKN ? max.n : k;
  if (matrices.lda < k || matrices.ldb < b_side ||
      (matrices.c != nullptr && matrices.ldc < c_side)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: leading dimensions a {}, b {}, c {} are too small; at least {}, {}, {}", op,
                matrices.lda, matrices.ldb, matrices.ldc, k, b_side, c_side);
  }
  return check_bias(op, geometry.epilogue, matrices.bias);
}

}  // namespace mk::kernels
