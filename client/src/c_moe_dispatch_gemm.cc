/// \file
/// The C ABI's MoE Dispatch + GEMM.

#include "client/src/c_api_support.h"
#include "mkernel/moe_dispatch_gemm.h"

struct mk_moe_dispatch {
  mk::MoeDispatchGemm op;
};

// A caller reads the rows where they are.
static_assert(sizeof(mk_moe_row) == sizeof(mk::MoeRow));

using namespace mk::c_api;

namespace {

mk::MoeDispatchGemm::Shape shape_of(const mk_moe_dispatch_shape& shape) {
  mk::MoeDispatchGemm::Shape wanted;
  wanted.tokens_max = shape.tokens_max;
  wanted.hidden = shape.hidden;
  wanted.features = shape.features;
  wanted.experts = shape.experts;
  wanted.top_k = shape.top_k;
  wanted.rows_max = shape.rows_max;
  wanted.dtype = static_cast<mk::DataType>(shape.dtype);
  wanted.b_layout = static_cast<mk::BLayout>(shape.b_layout);
  return wanted;
}

}  // namespace

extern "C" {

mk_status mk_moe_dispatch_create(mk_session* session, const mk_moe_dispatch_shape* shape,
                                 mk_moe_dispatch** out) {
  return create(session, shape, "mk_moe_dispatch_shape", out,
                [&](mk::Session& on, const mk::Tuning& tuning) {
                  return mk::MoeDispatchGemm::create(on, shape_of(*shape), tuning);
                });
}

mk_status mk_moe_dispatch_workspace_bytes(mk_session* session, const mk_moe_dispatch_shape* shape,
                                          uint64_t* bytes) {
  return workspace_bytes(session, shape, "mk_moe_dispatch_shape", bytes,
                         [&](const mk::Session& on, const mk::Tuning& tuning) {
                           return mk::MoeDispatchGemm::workspace_bytes(on, shape_of(*shape),
                                                                       tuning);
                         });
}

mk_status mk_moe_dispatch_launch(mk_moe_dispatch* op, const mk_moe_dispatch_input* input, void* y,
                                 uint64_t capacity, uint32_t mode, mk_launch_stats* stats) {
  return launch(
      op, mode, stats, [&](auto& made, mk::LaunchMode wanted) -> mk::Result<mk::LaunchStats> {
        MK_RETURN_IF_ERROR(check_struct(input, "mk_moe_dispatch_input"));
        return made.launch(
            {input->tokens, input->ids, input->weights, input->count, input->expert_weights},
            {y, capacity}, wanted);
      });
}

const mk_moe_row* mk_moe_dispatch_rows(const mk_moe_dispatch* op, uint64_t* count) {
  const auto rows = op != nullptr ? op->op.rows() : std::span<const mk::MoeRow>{};
  if (count != nullptr) *count = rows.size();
  return reinterpret_cast<const mk_moe_row*>(rows.data());
}

const uint32_t* mk_moe_dispatch_expert_offsets(const mk_moe_dispatch* op, uint32_t* first_expert,
                                               uint32_t* experts) {
  if (first_expert != nullptr) *first_expert = op != nullptr ? op->op.first_expert() : 0;
  if (experts != nullptr) *experts = op != nullptr ? op->op.expert_count() : 0;
  return op != nullptr ? op->op.expert_offsets().data() : nullptr;
}

void mk_moe_dispatch_destroy(mk_moe_dispatch* op) { delete op; }

}  // extern "C"
