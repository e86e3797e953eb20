/// \file
/// Unlike operators of a rank on a GPU, which share a workspace, for tests of their turns. (CPUs:
/// tests/client/unlike_operators.h.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

#include "mkernel/mkernel.h"
#include "tests/gpu/client_ranks.h"

namespace mk {

/// An operator with its tensors, whatever it computes.
class UnlikeOperator {
 public:
  /// Collective: Work::op's. `slow`: with as few SMs as can be.
  static Result<UnlikeOperator> create(Session& session, const Work& work, bool slow = false);

  /// Fresh inputs of all ranks, and NaN into the output.
  void draw(std::uint64_t launch, cudaStream_t stream) { draw_(launch, stream); }
  Status launch(cudaStream_t stream) const { return launch_(stream); }
  /// Waits for the stream.
  Status finish(cudaStream_t stream) const { return finish_(stream); }
  Status status() const { return status_(); }
  std::int64_t bad(cudaStream_t stream) const { return bad_(stream); }
  const std::string& name() const { return name_; }

 private:
  template <class Tensors, class Create>
  static Result<UnlikeOperator> made_of(Session& session, const Work& work, Create&& create);

  std::string name_;
  std::function<void(std::uint64_t, cudaStream_t)> draw_;
  std::function<Status(cudaStream_t)> launch_, finish_;
  std::function<Status()> status_;
  std::function<std::int64_t(cudaStream_t)> bad_;
};

/// Work::op "unlike": two operators in turn, for a second and more; the last rank is longer at one.
/// Answers the first error, or nothing.
std::string launch_unlike(Session& session, const Work& work);

}  // namespace mk
