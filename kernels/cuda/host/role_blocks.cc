#include "kernels/cuda/host/role_blocks.h"

#include <algorithm>

#include "kernels/plan/legal.h"

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

/// `groups`: all but the poller.
Status deal_collective(const char* op, const CudaOptions& options, const GroupNeeds& needs,
                       std::uint32_t groups, RoleBlocks& blocks) {
  const auto count = [](bool wanted, std::uint32_t asked, std::uint32_t chosen) {
    return !wanted ? 0 : asked != 0 ? asked : std::clamp(chosen, 1u, kBlocksMax);
  };
  std::uint32_t rest = groups;
  const auto take = [&rest](std::uint32_t taken) {
    rest -= std::min(rest, taken);
    return taken;
  };
  blocks = RoleBlocks{};
  blocks.send = take(count(needs.send, options.send_groups, 1));
  blocks.receive = take(count(needs.receive, options.receive_groups, rest / 4));
  const std::uint32_t streams = take(count(needs.stream, options.stream_groups, rest / 2));
  blocks.reduce = needs.streams == Role::kReduce ? streams : 0;
  blocks.share = needs.streams == Role::kShare ? streams : 0;
  blocks.compute = count(true, options.compute_blocks.count() * kGroupsOfBlock, rest);
  const std::uint32_t all = blocks.send + blocks.receive + streams + blocks.compute;
  const std::uint32_t most = std::max({blocks.receive.count(), streams, blocks.compute.count()});
  if (all <= groups && most <= kBlocksMax) return {};
  return fail(
      ErrorCode::kLimitExceeded,
      "{}: {} warpgroups that send, {} that receive, {} that stream and {} that copy do not "
      "fit: this rank's share of the device has {} (and {} of one role); ask for fewer SMs, "
      "or let fewer ranks share the device",
      op, blocks.send, blocks.receive, streams, blocks.compute, groups, kBlocksMax);
}

}  // namespace

Status choose_blocks(const char* op, const CudaOptions& options, const GroupNeeds& needs,
                     std::uint32_t lane_count, std::uint32_t device_blocks, RoleBlocks& blocks,
                     FrameArguments& frame) {
  const std::uint32_t share = plan::blocks_of_share(device_blocks, options.ranks_per_device);
  const auto check_lanes = [&]() -> Status {
    if (blocks.send <= lane_count && blocks.send <= shm::kLanesMax) return {};
    return fail(ErrorCode::kInvalidArgument, "{}: {} send groups, but the session has {} lanes", op,
                blocks.send, lane_count);
  };
  if (!needs.multiplies) {
    frame.comm_blocks = std::min(share, kBlocksMax);
    frame.sharing_receivers = 0;
    MK_RETURN_IF_ERROR(deal_collective(
        op, options, needs,
        std::max(warpgroups_of(frame.comm_blocks), frame.pollers) - frame.pollers, blocks));
    return check_lanes();
  }
  const bool planned = needs.planned_blocks != 0;
  const auto count = [&](bool wanted, std::uint32_t asked, std::uint32_t of_whole,
                         std::uint32_t least = 0) {
    // (Half as many as the share has blocks, if that is less: the product needs some.)
    const std::uint32_t chosen =
        planned ? of_whole
                : std::max(div_up(of_whole, options.ranks_per_device), std::min(least, share / 2));
    return !wanted ? 0 : asked != 0 ? asked : chosen;
  };
  blocks = RoleBlocks{};
  const Warpgroups sends = count(needs.send, options.send_groups, 1);
  std::uint32_t receives = count(needs.receive, options.receive_groups, needs.receive_groups,
                                 needs.receivers_stream ? needs.stream_least : 0);
  std::uint32_t streams =
      count(needs.stream, options.stream_groups, needs.stream_groups, needs.stream_least);
  const Warpgroups besides = frame.pollers + sends;
  if (!planned) {
    const std::uint32_t product =
        options.compute_blocks != 0 ? options.compute_blocks.count() : share / 2;
    const std::uint32_t most = (share - std::min(share, product)) * kGroupsOfBlock;
    limit(most - std::min(most, besides.count()), receives, options.receive_groups != 0, streams,
          options.stream_groups != 0);
  }
  const bool fills = needs.stream && options.stream_groups == 0;
  const std::uint32_t least = planned && fills ? std::min(streams, 1u) : streams;
  frame.comm_blocks =
      std::max(needs.planned_blocks, div_up(besides + receives + least, kGroupsOfBlock));
  if (fills) streams = warpgroups_of(frame.comm_blocks) - besides - receives;
  frame.sharing_receivers = needs.stream && needs.receivers_stream ? receives : 0;
  const std::uint32_t rest = share > frame.comm_blocks ? share - frame.comm_blocks : 0;
  const ThreadBlocks computes = options.compute_blocks != 0
                                    ? options.compute_blocks
                                    : ThreadBlocks(std::min(rest, kBlocksMax));
  blocks.compute = computes.count();
  blocks.send = sends.count();
  blocks.receive = receives;
  blocks.reduce = needs.streams == Role::kReduce ? streams : 0;
  blocks.share = needs.streams == Role::kShare ? streams + frame.sharing_receivers : 0;
  if (blocks.compute < 1 || blocks.compute > kBlocksMax || frame.comm_blocks > kBlocksMax ||
      blocks.receive > kBlocksMax || computes + frame.comm_blocks > share) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} compute blocks and {} for communication do not fit: this device holds {} "
                "at a time, {} ranks share it, so at most {} each (and {} of one role)",
                op, blocks.compute, frame.comm_blocks, device_blocks, options.ranks_per_device,
                share, kBlocksMax);
  }
  return check_lanes();
}

CommShares shares_of(Warpgroups watchers, const RoleBlocks& blocks, const FrameArguments& frame) {
  const Warpgroups streams =
      blocks.reduce != 0 ? warpgroups_of(blocks.reduce) : groups_that_only_share(frame, blocks);
  return {streams - std::min(streams, watchers), warpgroups_of(blocks.receive), watchers};
}

CommTargets targets_of(ThreadBlocks all, const CommShares& shares, const RoleBlocks& blocks,
                       const FrameArguments& frame) {
  CommTargets targets;
  if (shares.streams == 0 && shares.receives == 0) return targets;
  targets.besides = (frame.pollers + warpgroups_of(blocks.send) + shares.watchers).count();
  const std::uint32_t roles = (shares.streams != 0 ? 1 : 0) + (shares.receives != 0 ? 1 : 0);
  targets.least = div_up(targets.besides + roles, kGroupsOfBlock);
  targets.most = std::min(all.count() - 1, kBlocksMax);
  // A role has so many groups at most; those that stream are not bounded.
  if (shares.streams == 0)
    targets.most = std::min(targets.most, (targets.besides + kBlocksMax) / kGroupsOfBlock);
  return targets;
}

std::uint32_t CommTargets::of(const CommShares& shares, Warpgroups streams,
                              Warpgroups receives) const {
  const auto named = [](Warpgroups planned, Warpgroups wanted) {
    return planned == 0 || wanted == 0 ? planned.count() : wanted.count();
  };
  const Warpgroups others = streams > shares.watchers ? streams - shares.watchers : Warpgroups(1);
  const std::uint32_t first =
      named(shares.streams, streams == 0 ? streams : others) + named(shares.receives, receives);
  return std::clamp(div_up(besides + first, kGroupsOfBlock), least, most);
}

void deal_blocks(ThreadBlocks all, ThreadBlocks comm, const CommShares& shares, RoleBlocks& blocks,
                 FrameArguments& frame) {
  const std::uint32_t groups =
      (warpgroups_of(comm) - frame.pollers - warpgroups_of(blocks.send) - shares.watchers).count();
  const std::uint32_t streams = shares.streams.count();
  const std::uint32_t receives = shares.receives.count();
  std::uint32_t to_receive = 0;
  if (receives != 0) {
    const std::uint32_t most = groups - (streams != 0 ? 1 : 0);
    const auto part =
        static_cast<std::uint32_t>(std::uint64_t{groups} * receives / (streams + receives));
    to_receive = std::clamp(part, 1u, std::min(most, kBlocksMax));
  }
  const std::uint32_t to_stream = streams != 0 ? groups - to_receive + shares.watchers.count() : 0;
  frame.comm_blocks = comm;
  if (frame.sharing_receivers != 0) frame.sharing_receivers = to_receive;
  blocks.receive = to_receive;
  if (blocks.reduce != 0) blocks.reduce = to_stream;
  if (blocks.share != 0) blocks.share = to_stream + frame.sharing_receivers.count();
  blocks.compute = std::min(all.count() - comm.count(), kBlocksMax);
}

}  // namespace mk::kernels::cuda
