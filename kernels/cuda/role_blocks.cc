#include "kernels/cuda/role_blocks.h"

#include <algorithm>
#include <span>

#include "kernels/cuda/gpu_rates.h"

namespace mk::kernels::cuda {
namespace {

/// Takes what is more than `most` from both numbers, in proportion, as far as they are not `named`;
/// one stays of each.
void limit(std::uint32_t most, std::uint32_t& one, bool one_named, std::uint32_t& other,
           bool other_named) {
  const std::uint32_t both = one + other;
  if (both <= most) return;
  const auto without = [most](std::uint32_t rest) {
    return std::max(1u, most - std::min(most, rest));
  };
  if (!one_named && one != 0)
    one = std::min(one, other_named ? without(other) : std::max(1u, one * most / both));
  if (!other_named && other != 0) other = std::min(other, without(one));
}

}  // namespace

GroupNeeds sum_needs(const World& world, const SumGroups& groups) {
  GroupNeeds needs;
  needs.streams = Role::kReduce;
  needs.stream = world.locals > 1;
  needs.send = needs.receive = world.nodes > 1;
  needs.stream_groups = groups.reduce;
  needs.stream_least = world.nodes > 1 ? kGroupsOfRail : 0;
  needs.receive_groups = groups.receive;
  return needs;
}

// As measured with one, two and four ranks to a node (kernels/cuda/decisions/sums_over_nodes.md).
SumGroups sums_over_nodes(const World& world, const CudaOptions& options, std::uint32_t k,
                          double sent_bytes, const SumGroups& otherwise) {
  constexpr SumGroups kOfSeveral[] = {{144, 48}, {96, 48}};
  constexpr SumGroups kOfOne[] = {{0, 24}};  // to a node: nobody reduces there
  // Of the network's time: one of twice the speed, that nobody has told of, does no harm then.
  constexpr double kPart = 0.5;
  if (options.ranks_per_device != 1 || options.compute_blocks != 0) return otherwise;
  const MachineRates whole = gpu_rates(options.rates, kBlocksMax);
  const auto fits = [&](const SumGroups& groups) {
    constexpr std::uint32_t kPollerAndSend = 2;
    const std::uint32_t taken =
        div_up(kPollerAndSend + groups.reduce + groups.receive, kGroupsOfBlock);
    MachineRates left = whole;
    left.flops_per_s *= static_cast<double>(kBlocksMax - taken) / kBlocksMax;
    return !product_outlasts_network(k, kPart * sent_bytes, left);
  };
  const std::span<const SumGroups> tried =
      world.locals > 1 ? std::span<const SumGroups>(kOfSeveral) : std::span(kOfOne);
  const auto found = std::find_if(tried.begin(), tried.end(), fits);
  return found != tried.end() ? *found : otherwise;
}

Status choose_blocks(const char* op, const CudaOptions& options, const GroupNeeds& needs,
                     std::uint32_t lane_count, std::uint32_t device_blocks, RoleBlocks& blocks,
                     FrameArguments& frame) {
  const std::uint32_t share = device_blocks / options.ranks_per_device;
  const auto count = [&](bool wanted, std::uint32_t asked, std::uint32_t of_whole,
                         std::uint32_t least = 0) {
    // (Half as many as the share has blocks, if that is less: the product needs some.)
    const std::uint32_t chosen =
        std::max(div_up(of_whole, options.ranks_per_device), std::min(least, share / 2));
    return !wanted ? 0 : asked != 0 ? asked : chosen;
  };
  blocks = RoleBlocks{};
  blocks.send = count(needs.send, options.send_groups, 1);
  // The groups of a block or more, whichever they are; the fewest possible are filled up below.
  const std::uint32_t over = share > kBlocksMax ? share - kBlocksMax : 1;
  const bool few = needs.stream && needs.few_groups;
  blocks.receive = count(needs.receive, options.receive_groups, few ? 1 : needs.receive_groups,
                         needs.receivers_stream && !few ? needs.stream_least : 0);
  std::uint32_t streams =
      count(needs.stream, options.stream_groups,
            few ? (needs.receive ? 0 : 1) : needs.stream_groups, few ? 0 : needs.stream_least);
  const std::uint32_t product = options.compute_blocks != 0 ? options.compute_blocks : share / 2;
  const std::uint32_t most = (share - std::min(share, product)) * kGroupsOfBlock;
  const std::uint32_t besides = frame.pollers + blocks.send;
  limit(most - std::min(most, besides), blocks.receive, options.receive_groups != 0, streams,
        options.stream_groups != 0);
  frame.comm_blocks =
      div_up(frame.pollers + blocks.send + blocks.receive + streams, kGroupsOfBlock);
  if (few && options.stream_groups == 0 && options.receive_groups == 0)
    frame.comm_blocks = std::max(frame.comm_blocks, over);
  if (needs.stream && options.stream_groups == 0) {
    const std::uint32_t room = frame.comm_blocks * kGroupsOfBlock - frame.pollers - blocks.send;
    if (few && needs.receive && options.receive_groups == 0) blocks.receive = room;
    streams = room - blocks.receive;
  }
  frame.sharing_receivers = needs.stream && needs.receivers_stream ? blocks.receive : 0;
  const std::uint32_t rest = share > frame.comm_blocks ? share - frame.comm_blocks : 0;
  blocks.compute =
      options.compute_blocks != 0 ? options.compute_blocks : std::min(rest, kBlocksMax);
  blocks.reduce = needs.streams == Role::kReduce ? streams : 0;
  blocks.share = needs.streams == Role::kShare ? streams + frame.sharing_receivers : 0;
  if (blocks.compute < 1 || blocks.compute > kBlocksMax || frame.comm_blocks > kBlocksMax ||
      blocks.receive > kBlocksMax || blocks.compute + frame.comm_blocks > share) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} compute blocks and {} for communication do not fit: this device holds {} "
                "at a time, {} ranks share it, so at most {} each (and {} of one role)",
                op, blocks.compute, frame.comm_blocks, device_blocks, options.ranks_per_device,
                share, kBlocksMax);
  }
  if (blocks.send > lane_count || blocks.send > shm::kLanesMax) {
    return fail(ErrorCode::kInvalidArgument, "{}: {} send groups, but the session has {} lanes", op,
                blocks.send, lane_count);
  }
  return {};
}

}  // namespace mk::kernels::cuda
