/// \file
/// The tensor maps of a launch, of one window of heads.
#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/ops/ring/sm90.h"

namespace mk::kernels {
namespace {

cuda::HeadsTensor heads_of(const RingAttentionGeometry& plan, const cuda::AttentionTensor& tensor,
                           std::uint32_t heads, std::uint32_t rows) {
  cuda::HeadsTensor shape;
  shape.batch = plan.batch;
  shape.rows = rows;
  shape.heads = heads;
  shape.head_dim = plan.head_dim;
  shape.batch_stride = tensor.batch_stride;
  shape.row_stride = tensor.row_stride;
  shape.head_stride = tensor.head_stride;
  return shape;
}

}  // namespace

/// Rows that follow each other are copied without maps.
Status RingAttentionCuda::make_row_maps(const RingAttentionGeometry& plan,
                                        const RingAttentionDeviceTensors& tensors,
                                        std::uint32_t rows) {
  cuda::PackedRowMaps& maps = arguments_.rows;
  const std::int64_t dim = plan.head_dim;
  maps.there =
      plan.heads_together == 1 && (tensors.k.row_stride != dim || tensors.v.row_stride != dim);
  if (!maps.there) return {};
  const auto type = cuda::cuda_type(plan_.dtype);
  const int box_rows = cuda::kPackedBoxBytes / static_cast<int>(plan.head_bytes());
  MK_ASSIGN_OR_RETURN(
      maps.k, cuda::make_head_rows_map("rows of K", type, tensors.k.data,
                                       heads_of(plan, tensors.k, plan.key_heads, rows), box_rows));
  MK_ASSIGN_OR_RETURN(
      maps.v, cuda::make_head_rows_map("rows of V", type, tensors.v.data,
                                       heads_of(plan, tensors.v, plan.key_heads, rows), box_rows));
  return {};
}

Status RingAttentionCuda::make_maps(const RingAttentionGeometry& plan,
                                    const RingAttentionDeviceTensors& tensors, std::uint32_t rows) {
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto map_of = [&](const char* name, const cuda::AttentionTensor& tensor,
                          std::uint32_t heads, int box_rows) {
    return cuda::make_heads_map(name, type, tensor.data, heads_of(plan, tensor, heads, rows),
                                box_rows);
  };
  MK_ASSIGN_OR_RETURN(arguments_.q,
                      map_of("Q", tensors.q, plan.query_heads, kernel_->query_box_rows));
  MK_ASSIGN_OR_RETURN(arguments_.k, map_of("K", tensors.k, plan.key_heads, kernel_->tile_keys));
  MK_ASSIGN_OR_RETURN(arguments_.v, map_of("V", tensors.v, plan.key_heads, kernel_->tile_keys));
  if (world().size() == 1) {
    arguments_.gathered = arguments_.k;  // nothing is loaded by it
    return {};
  }
  MK_RETURN_IF_ERROR(make_row_maps(plan, tensors, rows));
  const GatherGeometry& gather = plan_.gather;
  cuda::HeadsTensor slots;
  const std::int64_t count = std::int64_t{gather.banks} * world().size();
  const auto apart = static_cast<std::int64_t>(gather.layout.slot_bytes / kElementBytes);
  slots.rows = gather.rows_max / plan_.heads_together;
  slots.head_dim = plan_.head_dim;
  slots.row_stride = std::int64_t{plan_.heads_together} * slots.head_dim;
  if (plan_.sequences_max != 0) {
    // By head, as the kernel has no register for a batch.
    slots.heads = count;
    slots.head_stride = apart;
  } else {
    slots.batch = count;
    slots.batch_stride = apart;
    slots.heads = plan_.heads_together;
    slots.head_stride = slots.head_dim;
  }
  const std::byte* const first = arguments_.launch.context.workspaces[world().local] +
                                 gather.layout.slots + kGatherHeaderBytes;
  MK_ASSIGN_OR_RETURN(arguments_.gathered, cuda::make_heads_map("gathered keys", type, first, slots,
                                                                kernel_->tile_keys));
  return {};
}

}  // namespace mk::kernels
