#include "kernels/cuda/host/launch_turn.h"

#include <algorithm>

#include "kernels/comm/workspace_turn.h"

namespace mk::kernels::cuda {
namespace {

/// The capture that the stream's work goes into; 0: none.
std::uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture);
  return error == cudaSuccess && status == cudaStreamCaptureStatusActive ? capture : 0;
}

}  // namespace

cudaError_t LaunchTurn::start(const RankContext& context, const Launch& launch,
                              const FrameArguments& frame) {
  if (context.shared == nullptr) return cudaSuccess;
  share_ = *context.shared;
  TurnGate& gate = arguments_.gate;
  gate.memory = share_.turn->context;
  gate.memory.rail_peers = reinterpret_cast<const RailPeer*>(
      gate.memory.workspaces[context.world.local] + WorkspaceTurn::kPeersAt);
  gate.words_at = share_.at;
  gate.sharer = share_.sharer;
  gate.control = launch.control;
  // No poller runs yet.
  gate.control.session_abort = frame.host.aborts[0];
  gate.control.process_abort = frame.host.aborts[1];
  arguments_.launches = frame.host.launches;
  return prepare_turn();
}

cudaError_t LaunchTurn::put_on(cudaStream_t stream) {
  if (share_.turn == nullptr) return cudaSuccess;
  WorkspaceTurn& turn = *share_.turn;
  const std::uint64_t capture = capture_of(stream);
  // A graph may run between any two launches, but not between two that follow each other in one.
  const bool same =
      turn.last == share_.sharer + 1 && turn.capture == capture && (capture != 0 || !turn.captured);
  // A rank that is alone has its stream's order.
  if (!same && arguments_.gate.memory.world.size() > 1) {
    cudaGetLastError();  // the launch answers the thread's last error, whose ever it is
    const cudaError_t error = launch_turn(arguments_, stream);
    if (error != cudaSuccess) {
      turn.last = 0;  // whoever is next takes a turn: one too many waits for nobody
      return error;
    }
  }
  turn.last = share_.sharer + 1;
  turn.capture = capture;
  if (capture != 0) turn.captured = turn.in_graph[share_.sharer] = true;
  return cudaSuccess;
}

void LaunchTurn::note_put() const {
  if (share_.turn != nullptr) ++share_.turn->queued[share_.sharer];
}

void LaunchTurn::explain(const WaitRecord& record, Error& error) const {
  const FlagKind kind = record.site.kind;
  if (share_.turn == nullptr || record.site.role != Role::kCollect) return;
  if (kind != FlagKind::kFinished && kind != FlagKind::kRelease) return;
  const WorkspaceTurn& turn = *share_.turn;
  for (std::uint32_t other = 0; other < kSharersMax && turn.names[other] != nullptr; ++other) {
    if (TurnGate::note_of(turn.words_at[other]) != record.site.index[1]) continue;
    error.message +=
        fmt::format("; it waited for its turn in the workspace after {}", turn.names[other]);
    return;
  }
}

}  // namespace mk::kernels::cuda
