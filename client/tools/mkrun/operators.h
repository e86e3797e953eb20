/// \file
/// What `mkrun` needs to know of an operator: which tensors it takes, what shapes fit, and what a
/// rank does in a launch. Each is in a file of its own kind.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/executor_matrices.h"
#include "client/tools/mkrun/job.h"
#include "client/tools/mkrun/tensors.h"
#include "client/tools/numeric/comparison.h"
#include "client/tools/partition_choice.h"
#include "kernels/ops/registry.h"
#include "mkernel/session.h"
#include "mkernel/types.h"

namespace mk::tools {

/// One input: `--name FILE:TENSOR`.
struct InputSpec {
  const char* name;
  const char* help;
  std::uint32_t dimensions;
  bool whole_numbers = false;  ///< I32 or I64; else BF16, F16 or F32
  bool optional = false;
};

/// Something the operator can be told by a flag.
struct FlagSpec {
  const char* name;
  const char* help;
  bool JobOptions::*value;
};

/// Numbers that the operator takes: `--name 3,0,5`.
struct NumbersSpec {
  const char* name;
  const char* help;
  std::vector<std::uint32_t> JobOptions::*value;
};

/// Something the operator can be told by one of several words; the first is the default.
struct ChoiceSpec {
  const char* name;
  const char* help;
  std::vector<std::string> words;
  std::string JobOptions::*value;
};

/// A rank's tensors where its executor wants them, launch after launch.
class WorkTensors {
 public:
  explicit WorkTensors(const Job& job) : on_gpu_(job.executor == "cuda") {}
  /// What comes in, and what goes out with what it is before. On CPUs it stays where it is.
  template <class Element>
  Result<void*> put(std::size_t place, const std::vector<Element>& elements) {
    if (!matrices_) {
      MK_ASSIGN_OR_RETURN(matrices_, ExecutorMatrices::create(on_gpu_));
    }
    MK_RETURN_IF_ERROR(matrices_->put(place, std::as_bytes(std::span(elements))));
    return matrices_->at(place);
  }
  template <class Element>
  Status get(std::size_t place, std::vector<Element>& elements) const {
    return matrices_->get(place, std::as_writable_bytes(std::span(elements)));
  }
  /// What an operator has there, after a `put`.
  template <class Element>
  Result<std::vector<Element>> copy_of(std::span<const Element> there) const {
    std::vector<Element> here(there.size());
    MK_RETURN_IF_ERROR(matrices_->get_from(there.data(), std::as_writable_bytes(std::span(here))));
    return here;
  }

 private:
  bool on_gpu_;
  std::optional<ExecutorMatrices> matrices_;
};

/// A rank's part of a job: launch after launch, in order.
class RankWork {
 public:
  virtual ~RankWork() = default;
  /// Rows [first, first + rows) of the whole.
  virtual Result<LaunchStats> launch(std::uint64_t first, std::uint64_t rows) = 0;
  /// What of the last launch's result this rank is to write.
  virtual Status write(SafetensorsPart& out) = 0;
  /// The same, against float64.
  virtual Comparison check() = 0;
  /// Ranks have the same result where this is the same, of a launch that is checked; 0: not known.
  virtual std::uint64_t copy_hash() const { return 0; }
};

class JobOperator {
 public:
  virtual ~JobOperator() = default;
  virtual const char* name() const = 0;
  virtual const char* help() const = 0;
  virtual std::vector<InputSpec> inputs() const = 0;
  virtual std::vector<FlagSpec> flags() const = 0;
  virtual std::vector<NumbersSpec> numbers() const { return {}; }
  virtual std::vector<ChoiceSpec> choices() const { return {}; }
  /// Checks the shapes; sets job.rows and job.out_shape, and rows_per_launch where it is not the
  /// user's to choose.
  virtual Status plan(const Tensors& tensors, Job& job) const = 0;
  /// `job` and `tensors` outlive the work.
  virtual Result<std::unique_ptr<RankWork>> start(Session& session, const Job& job,
                                                  std::uint32_t rank,
                                                  const Tensors& tensors) const = 0;
};

/// In the order of `mkrun --help`.
const std::vector<const JobOperator*>& job_operators();
/// Null: there is none.
const JobOperator* find_job_operator(const std::string& name);

// GEMM+Combine takes what MoE Dispatch has made of tokens: its command is the layer of both.
#define MK_OPERATOR(id, name, Class) const JobOperator& id##_operator();
MK_OPERATORS(MK_OPERATOR)
#undef MK_OPERATOR

// --- For the operators ---

inline DataType type_of(const Job& job) {
  return job.dtype == "f16" ? DataType::kF16 : DataType::kBf16;
}
inline Partials partials_of(const Job& job) {
  return job.partials == "f32" ? Partials::kF32 : Partials::kElement;
}
inline ChoiceSpec partials_choice() {
  return {
      "partials", "in which type partial sums travel", {"element", "f32"}, &JobOptions::partials};
}
inline std::span<const std::byte> raw(const Elements& elements) {
  return std::as_bytes(std::span(elements));
}
template <class Tuning>
Tuning tuning_of(const Job& job) {
  Tuning tuning;
  tuning.wait_timeout = std::chrono::milliseconds{job.timeout_ms};
  tuning.executor = job.executor == "cuda" ? Executor::kCuda : Executor::kCpu;
  tuning.count_nonfinite = tuning.executor == Executor::kCpu;  // which GPUs do not
  PartitionChoice::apply(job.partition, tuning);
  return tuning;
}

}  // namespace mk::tools
