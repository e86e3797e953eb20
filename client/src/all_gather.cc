#include "mkernel/all_gather.h"

#include "client/src/collective_operator.h"
#include "kernels/ops/all_gather/spec.h"

namespace mk {
namespace {

struct AllGatherKind {
  static constexpr std::string_view kName = "all-gather";
  using Op = AllGather;
  using Plan = kernels::AllGatherPlan;

  static Result<Plan> make_plan(const AttachOptions& options, const Op::Shape&,
                                const CollectiveShape& checked, const kernels::Tiling& tiling) {
    return Plan::make(options.nodes, options.local_size, checked.m_max, checked.n, checked.dtype,
                      tiling);
  }
  static constexpr auto make_cpu = &kernels::make_all_gather_cpu;
  static constexpr auto make_cuda = &kernels::make_all_gather_cuda;
};
using AllGatherOperator = CollectiveOperator<AllGatherKind>;

}  // namespace

Result<AllGather> AllGather::create(Session& session, const Shape& shape, const Tuning& tuning) {
  MK_ASSIGN_OR_RETURN(auto made, AllGatherOperator::create(session, shape, tuning));
  return AllGather(std::move(made));
}
Result<AllGather> AllGather::create(Session& session, const Shape& shape) {
  return create(session, shape, {});
}
Result<std::uint64_t> AllGather::workspace_bytes(const Session& session, const Shape& shape,
                                                 const Tuning& tuning) {
  return AllGatherOperator::workspace_bytes(session, shape, tuning);
}
Result<std::uint64_t> AllGather::workspace_bytes(const Session& session, const Shape& shape) {
  return workspace_bytes(session, shape, {});
}
void* AllGather::input() const { return impl_->input(); }

}  // namespace mk
