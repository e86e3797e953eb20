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

  /// Of a launch in which this rank has `sequence` rows of each sequence. With KeyPacking::kRows
  /// the heads of a row of either tensor follow each other without gaps.
  MK_HOST_DEVICE static KeySource of(const RingAttentionGeometry& plan, const HeadTensor& keys,
                                     const HeadTensor& values, std::uint32_t sequence) {
    return {keys,        values,         plan.gathered_rows(sequence),
            sequence,    plan.key_heads, plan.head_bytes(),
            plan.packing};
  }

  /// As GatherSource::copy_packed.
  template <class Copy>
  MK_HOST_DEVICE void copy_packed(std::uint64_t begin, std::uint64_t end, CopyJob& job,
                                  Copy&& copy) const {
    // Runs follow each other that are a source of the gather's own kind each.
    const bool of_rows = packing == KeyPacking::kRows;
    const std::uint32_t row_bytes = of_rows ? 2 * heads * head_bytes : head_bytes;
    const std::uint64_t run_bytes = std::uint64_t{sequence} * row_bytes;
    while (begin < end) {
      const auto number = static_cast<std::uint32_t>(begin / run_bytes);
      const std::uint64_t from = begin - number * run_bytes;
      const std::uint64_t left = run_bytes - from;
      const std::uint64_t bytes = left < end - begin ? left : end - begin;
      CopyJob piece = job;
      run(number).copy_packed(from, from + bytes, piece, copy);
      job.move_targets(static_cast<std::int64_t>(bytes));
      begin += bytes;
    }
  }

 private:
  /// A batch; or a head's keys, or its values.
  MK_HOST_DEVICE GatherSource run(std::uint32_t number) const {
    if (packing == KeyPacking::kRows) {
      const std::uint32_t bytes = heads * head_bytes;
      GatherSource both = GatherSource::of(keys.head(number, 0), keys.row_stride, bytes, sequence);
      both.add(values.head(number, 0), values.row_stride, bytes);
      return both;
    }
    const std::uint32_t pair = number / 2;
    const HeadTensor& tensor = number % 2 == 0 ? keys : values;
    return GatherSource::of(tensor.head(pair / heads, pair % heads), tensor.row_stride, head_bytes,
                            sequence);
  }
};

}  // namespace mk::kernels
