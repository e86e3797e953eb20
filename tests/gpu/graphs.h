/// \file
/// Launches of all ranks in a CUDA graph each, and their replay.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "shm/host/result.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// Ends the process on anything unexpected but a refused launch.
class Graphs {
 public:
  Graphs() = default;
  ~Graphs() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  /// One graph more: what `launch()` puts on a stream of the current device. Answers what that did.
  template <class Launch>
  Status capture(cudaStream_t stream, Launch&& launch) {
    cudaGraph_t graph = nullptr;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    const Status launched = launch();
    require(cudaStreamEndCapture(stream, &graph), "capture");
    if (!launched) return launched;
    require(cudaGraphInstantiate(&graphs_.emplace_back(), graph, 0), "instantiate");
    require(cudaGraphUpload(graphs_.back(), stream), "upload");
    require(cudaStreamSynchronize(stream), "upload");
    require(cudaGraphDestroy(graph), "graph");
    return launched;
  }
  void replay(std::size_t graph, cudaStream_t stream) const {
    require(cudaGraphLaunch(graphs_[graph], stream), "replay");
  }
  /// `launch(rank)` of each rank. Answers the first error.
  template <class Ranks, class Launch>
  Status capture_all(const Ranks& ranks, Launch&& launch) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      ranks.make_current(r);
      if (const Status status = capture(ranks.stream(r), [&] { return launch(r); }); !status)
        return status;
    }
    return {};
  }
  template <class Ranks>
  void replay_all(const Ranks& ranks) const {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      ranks.make_current(r);
      replay(r, ranks.stream(r));
    }
  }

 private:
  std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace mk::test
