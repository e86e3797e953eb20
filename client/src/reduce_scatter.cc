#include "mkernel/reduce_scatter.h"

#include "client/src/collective_operator.h"
#include "kernels/ops/reduce_scatter/spec.h"

namespace mk {
namespace {

struct ReduceScatterKind {
  static constexpr std::string_view kName = "reduce-scatter";
  using Op = ReduceScatter;
  using Plan = kernels::ReduceScatterPlan;

  static Result<Plan> make_plan(const AttachOptions& options, const Op::Shape& shape,
                                const CollectiveShape& checked, const kernels::Tiling& tiling) {
    MK_ASSIGN_OR_RETURN(const kernels::Partials partials, checked_partials(kName, shape.partials));
    return Plan::make(options.nodes, options.local_size, checked.m_max, checked.n, checked.dtype,
                      tiling, partials);
  }
  static constexpr auto make_cpu = &kernels::make_reduce_scatter_cpu;
  static constexpr auto make_cuda = &kernels::make_reduce_scatter_cuda;
};
using ReduceScatterOperator = CollectiveOperator<ReduceScatterKind>;

}  // namespace

Result<ReduceScatter> ReduceScatter::create(Session& session, const Shape& shape,
                                            const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, ReduceScatterOperator::create(session, shape, tuning));
  return ReduceScatter(std::move(made));
}
Result<ReduceScatter> ReduceScatter::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}
Result<std::uint64_t> ReduceScatter::workspace_bytes(const Session& session, const Shape& shape,
                                                     const Tuning& tuning) {
  return ReduceScatterOperator::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> ReduceScatter::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}

}  // namespace mk
