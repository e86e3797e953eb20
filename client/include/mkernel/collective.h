/// \file
/// The base of operators that multiply nothing: AllGather and ReduceScatter.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk {

/// An operator that multiplies nothing: `input` to `output`, as its class says. Both are row-major
/// without gaps, share no memory, and are of one element type. On a GPU both begin at multiples of
/// 16 bytes. AllGather's rows are there a multiple of 16 bytes, ReduceScatter's of 8 elements.
///
/// A class also says, for tools,
///
///     static constexpr const char* kSummary;   // what it does, in a line
///     static constexpr bool kSums;             // a row of an output is a sum of the rows that
///                                              // ranks bring for it, not a copy of the only one
///     static constexpr RowRange input_rows(m, world, rank);   // of the whole: what a rank brings
///     static constexpr RowRange output_rows(m, world, rank);  // and gets
class MK_EXPORT Collective {
 public:
  /// Collective, same `m` (rows of the whole, from 1 to the shape's m_max) on all ranks. Blocks
  /// until the output is complete and this rank's part for the others is done. A pointer may be
  /// null where the rank has no rows of that kind. LaunchMode::kUnfused: the steps of a launch
  /// follow each other, the baseline. After an error the operator is broken and says so at every
  /// call; a wrong argument changes nothing.
  Result<LaunchStats> launch(const void* input, void* output, std::uint64_t m,
                             LaunchOptions options = {});
  /// Executor::kCuda: puts a launch on the stream and returns at once; see
  /// GemmAllReduce::launch_on, `status` and `finish` there.
  Status launch_on(CudaStream stream, const void* input, void* output, std::uint64_t m,
                   LaunchOptions options = {});
  Status status() const;
  Result<LaunchStats> finish(CudaStream stream);

  /// Whether later launches keep what their threads did when; costs a little time.
  void set_trace(bool on);
  /// Of the last launch; empty unless traced.
  std::vector<TraceSpan> trace() const;

  class Impl;  ///< the library's

 protected:
  explicit Collective(std::unique_ptr<Impl> impl);
  Collective(Collective&&) noexcept;
  Collective& operator=(Collective&&) noexcept;
  ~Collective();

  std::unique_ptr<Impl> impl_;
};

}  // namespace mk
