#include "mkernel/all_gather.h"

#include "client/src/collective_operator.h"
#include "kernels/ops/all_gather/spec.h"

namespace mk {
namespace {

struct AllGatherKind {
  static constexpr std::string_view kName = "all-gather";
  using Shape = AllGather::Shape;
  using Plan = kernels::AllGatherPlan;

  static Result<Plan> make_plan(const AttachOptions& options, const Shape& shape,
                                const kernels::Tiling& tiling) {
    MK_RETURN_IF_ERROR(check_dimension(kName, "m_max", shape.m_max));
    MK_RETURN_IF_ERROR(check_dimension(kName, "n", shape.n));
    MK_ASSIGN_OR_RETURN(const kernels::DType dtype, checked_any_dtype(kName, shape.dtype));
    return Plan::make(options.nodes, options.local_size, static_cast<std::uint32_t>(shape.m_max),
                      static_cast<std::uint32_t>(shape.n), dtype, tiling);
  }
  static constexpr auto make_cpu = &kernels::make_all_gather_cpu;
  static CollectiveRows rows(const AttachOptions& options, std::uint64_t m) {
    return {rows_of_rank(m, options.world, options.rank).count, m};
  }
};
using Operator = CollectiveOperator<AllGatherKind>;

}  // namespace

Result<AllGather> AllGather::create(Session& session, const Shape& shape, const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, Operator::create(session, shape, tuning));
  return AllGather(std::move(made));
}
Result<AllGather> AllGather::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}
Result<std::uint64_t> AllGather::workspace_bytes(const Session& session, const Shape& shape,
                                                 const Tuning& tuning) {
  return Operator::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> AllGather::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}
void* AllGather::input() const { return impl_->input(); }

}  // namespace mk
