#include "kernels/comm/turn_text.h"

#include <fmt/format.h>

#include "kernels/comm/launch_record.h"
#include "kernels/comm/wait_text.h"
#include "shm/flag.h"

namespace mk::kernels {
namespace {

const char* name_of(const WorkspaceTurn& turn, std::uint32_t sharer) {
  return sharer < kSharersMax && turn.names[sharer] != nullptr ? turn.names[sharer] : "an operator";
}

/// True: the local rank has begun a launch of the operator, and has not ended it.
bool in_launch(const WorkspaceTurn& turn, std::uint32_t sharer, std::uint32_t local) {
  const World& world = turn.context.world;
  const WorkspaceHead head{world.locals};
  const std::byte* const words = turn.context.workspaces[world.local] + turn.words_at[sharer];
  const std::uint32_t ended = shm::load_acquire(turn.finished(sharer, local));
  const auto* const record =
      reinterpret_cast<const LaunchRecord*>(words + head.record(ended + 1, local));
  return shm::load_acquire(&record->epoch) == ended + 1;
}

}  // namespace

std::string text_of_other_launches(const WorkspaceTurn& turn, std::uint32_t sharer) {
  const World& world = turn.context.world;
  std::string text;
  const auto add = [&](std::uint32_t rank, std::uint32_t other) {
    text += fmt::format("{}rank {} is in a launch of {}", text.empty() ? "; " : ", ", rank,
                        name_of(turn, other));
  };
  for (std::uint32_t other = 0; other < kSharersMax && turn.names[other] != nullptr; ++other) {
    if (other == sharer) continue;
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (local != world.local && in_launch(turn, other, local))
        add(world.node * world.locals + local, other);
    }
    if (other % kTurnFlags == sharer % kTurnFlags) continue;
    for (std::uint32_t node = 0; node < world.nodes; ++node) {
      if (node == world.node) continue;
      const std::uint32_t seen =
          shm::load_acquire(turn.context.arrival_flags + WorkspaceTurn::flag(node, other));
      // A turn that this rank has not taken, or that it has given to its own operator.
      if (seen != 0 && shm::epoch_reached(seen, turn.number)) add(world.rail_peer(node), other);
    }
  }
  if (!text.empty()) text += " (all ranks must launch their operators in one order)";
  return text;
}

Error describe_turn(const WorkspaceTurn& turn, const Launch& launch, std::string_view op) {
  const World& world = launch.context.world;
  const std::uint32_t before = turn.before - 1;
  const std::byte* const words = turn.context.workspaces[world.local] + turn.words_at[before];
  Error error = describe(
      *launch.control.record, op, launch.epoch, world,
      shm::load_acquire(reinterpret_cast<const std::uint32_t*>(words + WorkspaceHead::failed())));
  error.message +=
      fmt::format("; it waited for its turn in the workspace after {}{}", name_of(turn, before),
                  text_of_other_launches(turn, launch.context.shared->sharer));
  return error;
}

Error describe_shared_failure(const WorkspaceTurn& turn, std::uint32_t failed,
                              std::string_view op) {
  return {ErrorCode::kAborted,
          fmt::format("{}: {} failed, in whose workspace it launches, and other ranks may still "
                      "write there; create the operators of the session anew",
                      op, name_of(turn, failed))};
}

}  // namespace mk::kernels
