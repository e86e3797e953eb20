/// \file
/// This rank's keys and values in the caller's memory, and the packed rows that the gather makes of
/// them (KeyPacking). Compiles for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gather/copy_job.h"
#include "kernels/ops/ring/geometry.h"

namespace mk::kernels {

/// A tensor of [batch, row, head, head_dim] elements, the last dimension contiguous. Strides are in
/// bytes.
struct HeadTensor {
  const std::byte* base = nullptr;
  std::uint64_t batch_stride = 0;
  std::uint64_t row_stride = 0;
  std::uint64_t head_stride = 0;

  MK_HOST_DEVICE const std::byte* head(std::uint32_t batch, std::uint32_t head) const {
    return base + batch * batch_stride + head * head_stride;
  }
};

/// What gather/roles.h takes for a source of packed rows.
struct KeySource {
  HeadTensor keys;
  HeadTensor values;
  std::uint32_t rows = 0;      ///< packed rows in all
  std::uint32_t sequence = 0;  ///< this rank's rows of the sequence
  std::uint32_t heads = 0;     ///< key heads
  std::uint32_t head_bytes = 0;
  KeyPacking packing = KeyPacking::kRows;
  std::uint32_t together = 1;  ///< RingAttentionGeometry::heads_together

  /// Of a launch in which this rank has `sequence` rows of each sequence. With KeyPacking::kRows
  /// the heads of a row of either tensor follow each other without gaps.
  MK_HOST_DEVICE static KeySource of(const RingAttentionGeometry& plan, const HeadTensor& keys,
                                     const HeadTensor& values, std::uint32_t sequence) {
    return {keys,
            values,
            plan.gathered_rows(sequence),
            sequence,
            plan.key_heads,
            plan.head_bytes(),
            plan.packing,
            plan.heads_together};
  }

  /// As GatherSource::copy_packed. `kSeveral` false: no heads are together.
  template <bool kSeveral = true, class Copy>
  MK_HOST_DEVICE void copy_packed(std::uint64_t begin, std::uint64_t end, CopyJob& job,
                                  Copy&& copy) const {
    // Runs follow each other that are a source of the gather's own kind each.
    const bool of_rows = packing == KeyPacking::kRows;
    const std::uint32_t row_bytes = (of_rows ? 2 * heads : together) * head_bytes;
    const std::uint64_t run_bytes = std::uint64_t{sequence} * row_bytes;
    while (begin < end) {
      const auto number = static_cast<std::uint32_t>(begin / run_bytes);
      const std::uint64_t from = begin - number * run_bytes;
      const std::uint64_t left = run_bytes - from;
      const std::uint64_t bytes = left < end - begin ? left : end - begin;
      CopyJob piece = job;
      const bool apart = !of_rows && together != 1 && tensor_of(number).head_stride != head_bytes;
      if (kSeveral && apart) {
        copy_heads(number, from, from + bytes, piece, copy);
      } else {
        run(number).copy_packed(from, from + bytes, piece, copy);
      }
      job.move_targets(static_cast<std::int64_t>(bytes));
      begin += bytes;
    }
  }

 private:
  MK_HOST_DEVICE const HeadTensor& tensor_of(std::uint32_t run) const {
    return run % 2 == 0 ? keys : values;
  }
  /// The beginning of a run of heads.
  MK_HOST_DEVICE const std::byte* heads_of(std::uint32_t run) const {
    const std::uint32_t pair = run / 2 * together;
    return tensor_of(run).head(pair / heads, pair % heads);
  }
  /// Bytes [begin, end) of a run of heads that are together, but lie apart in the caller's memory.
  template <class Copy>
  MK_HOST_DEVICE void copy_heads(std::uint32_t run, std::uint64_t begin, std::uint64_t end,
                                 CopyJob& job, Copy&& copy) const {
    const HeadTensor& tensor = tensor_of(run);
    const std::uint64_t row_bytes = std::uint64_t{together} * head_bytes;
    while (begin < end) {
      const std::uint64_t row = begin / row_bytes;
      const auto head = static_cast<std::uint32_t>(begin % row_bytes / head_bytes);
      const auto from = static_cast<std::uint32_t>(begin % head_bytes);
      const std::uint64_t whole = begin % row_bytes == 0 ? (end - begin) / row_bytes : 0;
      const std::uint64_t left = end - begin < head_bytes - from ? end - begin : head_bytes - from;
      job.rows = whole != 0 ? static_cast<std::uint32_t>(whole) : 1;
      job.row_bytes = whole != 0 ? head_bytes : static_cast<std::uint32_t>(left);
      job.source_stride = tensor.row_stride;
      job.target_stride = row_bytes;
      // All heads of whole rows, one after the other; else the rest of one head's row.
      const std::uint32_t count = whole != 0 ? together : 1;
      for (std::uint32_t i = 0; i < count; ++i) {
        job.source =
            heads_of(run) + (head + i) * tensor.head_stride + row * tensor.row_stride + from;
        copy(job);
        job.move_targets(whole != 0 ? static_cast<std::int64_t>(head_bytes) : 0);
      }
      const std::uint64_t done = whole != 0 ? whole * row_bytes : left;
      job.move_targets(static_cast<std::int64_t>(whole != 0 ? done - row_bytes : done));
      begin += done;
    }
  }
  /// A batch; or the keys, or the values, of heads that are together.
  MK_HOST_DEVICE GatherSource run(std::uint32_t number) const {
    if (packing == KeyPacking::kRows) {
      const std::uint32_t bytes = heads * head_bytes;
      GatherSource both = GatherSource::of(keys.head(number, 0), keys.row_stride, bytes, sequence);
      both.add(values.head(number, 0), values.row_stride, bytes);
      return both;
    }
    return GatherSource::of(heads_of(number), tensor_of(number).row_stride, together * head_bytes,
                            sequence);
  }
};

}  // namespace mk::kernels
