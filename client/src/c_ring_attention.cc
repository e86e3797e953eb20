/// \file
/// The C ABI's Ring Attention.

#include "client/src/c_api_support.h"
#include "mkernel/ring_attention.h"

struct mk_ring_attention {
  mk::RingAttention op;
};

using namespace mk::c_api;

namespace {

mk::RingAttention::Shape shape_of(const mk_ring_attention_shape& shape) {
  return {shape.seq_max,  shape.query_heads, shape.key_heads,
          shape.head_dim, shape.causal != 0, static_cast<mk::DataType>(shape.dtype)};
}

}  // namespace

extern "C" {

mk_status mk_ring_attention_create(mk_session* session, const mk_ring_attention_shape* shape,
                                   mk_ring_attention** out) {
  return create(session, shape, "mk_ring_attention_shape", out,
                [&](mk::Session& on, const mk::Tuning& tuning) {
                  return mk::RingAttention::create(on, shape_of(*shape),
                                                   mk::RingAttention::Tuning{tuning});
                });
}

mk_status mk_ring_attention_workspace_bytes(mk_session* session,
                                            const mk_ring_attention_shape* shape, uint64_t* bytes) {
  return workspace_bytes(session, shape, "mk_ring_attention_shape", bytes,
                         [&](const mk::Session& on, const mk::Tuning& tuning) {
                           return mk::RingAttention::workspace_bytes(
                               on, shape_of(*shape), mk::RingAttention::Tuning{tuning});
                         });
}

mk_status mk_ring_attention_launch(mk_ring_attention* op, const mk_ring_attention_tensors* tensors,
                                   uint64_t seq, uint32_t mode, mk_launch_stats* stats) {
  return launch(
      op, mode, stats, [&](auto& made, mk::LaunchMode wanted) -> mk::Result<mk::LaunchStats> {
        MK_RETURN_IF_ERROR(check_struct(tensors, "mk_ring_attention_tensors"));
        return made.launch({tensors->q, tensors->k, tensors->v, tensors->q_stride,
                            tensors->k_stride, tensors->v_stride, tensors->scale},
                           {tensors->out, tensors->out_stride, tensors->lse}, seq, wanted);
      });
}

void mk_ring_attention_destroy(mk_ring_attention* op) { delete op; }

void mk_sequence_rows_of_rank(uint64_t seq, uint32_t causal, uint32_t world, uint32_t rank,
                              uint64_t first[2], uint64_t count[2]) {
  const mk::SequenceRows rows = mk::sequence_rows_of_rank(seq, causal != 0, world, rank);
  for (int part = 0; part < 2; ++part) {
    first[part] = rows.parts[part].first;
    count[part] = rows.parts[part].count;
  }
}

}  // extern "C"
