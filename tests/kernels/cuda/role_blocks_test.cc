// How a rank's share of a GPU is dealt out to its roles. Host arithmetic: it needs no GPU.
#include "kernels/cuda/host/role_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cuda/host/planned.h"
#include "kernels/plan/accounted.h"
#include "kernels/plan/legal.h"

namespace mk::kernels {
namespace {

using cuda::choose_blocks;
using cuda::FrameArguments;
using cuda::GroupNeeds;
using cuda::kGroupsOfBlock;

constexpr std::uint32_t kDevice = 132;
constexpr std::uint32_t kLanes = 4;
constexpr std::uint32_t kReceive = 7;

World world_of(std::uint32_t nodes, std::uint32_t locals) {
  World world;
  world.nodes = nodes;
  world.locals = locals;
  return world;
}

/// Of an operator that sums, of a whole GPU.
GroupNeeds sum_needs(const World& world, std::uint32_t reduce, std::uint32_t receive = kReceive) {
  GroupNeeds needs;
  needs.stream = world.locals > 1;
  needs.send = needs.receive = world.nodes > 1;
  needs.stream_groups = reduce;
  needs.stream_least = world.nodes > 1 ? 12 : 0;
  needs.receive_groups = receive;
  return needs;
}

struct Chosen {
  Status status;
  RoleBlocks blocks;
  FrameArguments frame;
};
Chosen choose(const GroupNeeds& needs, const CudaOptions& options, std::uint32_t device = kDevice) {
  Chosen chosen;
  chosen.frame.pollers = 1;
  chosen.status = choose_blocks("op", options, needs, kLanes, device, chosen.blocks, chosen.frame);
  return chosen;
}
/// The same of what is possible.
Chosen chosen_of(const GroupNeeds& needs, const CudaOptions& options) {
  Chosen chosen = choose(needs, options);
  EXPECT_TRUE(chosen.status) << chosen.status.error().message;
  return chosen;
}
CudaOptions shared_by(std::uint32_t ranks) {
  CudaOptions options;
  options.ranks_per_device = ranks;
  return options;
}

// Nobody's groups are left out, blocks outside the compute blocks have no idle group where groups
// stream, and all ranks fit on the device.
TEST(RoleBlocks, EveryShareHoldsAllGroupsOfItsRoles) {
  for (std::uint32_t ranks = 1; ranks <= 16; ++ranks) {
    for (const std::uint32_t nodes : {1u, 2u, 4u}) {
      for (const std::uint32_t locals : {1u, 2u, 8u}) {
        for (const std::uint32_t groups : {1u, 12u, 36u, 144u}) {
          SCOPED_TRACE(testing::Message() << ranks << " ranks a device, " << nodes << " nodes of "
                                          << locals << ", " << groups << " groups");
          const Chosen chosen =
              chosen_of(sum_needs(world_of(nodes, locals), groups), shared_by(ranks));
          const RoleBlocks& blocks = chosen.blocks;
          EXPECT_EQ(blocks.send, nodes > 1 ? 1u : 0u);
          EXPECT_EQ(blocks.receive != 0, nodes > 1);
          EXPECT_EQ(blocks.reduce != 0, locals > 1);
          EXPECT_EQ(blocks.share, 0u);
          const std::uint32_t used = 1 + blocks.send + blocks.receive + blocks.reduce;
          const std::uint32_t room = chosen.frame.comm_blocks * kGroupsOfBlock;
          EXPECT_LE(used, room);
          EXPECT_LT(room - used, locals > 1 ? 1u : kGroupsOfBlock);
          EXPECT_GE(blocks.compute, 1u);
          // A copy within the GPU finds room beside ranks that share it.
          EXPECT_LE(all_blocks(chosen.frame, blocks) * ranks, ranks == 1 ? kDevice : kDevice - 1);
        }
      }
    }
  }
}

// A rail is as fast where ranks share a GPU: sums for it are not left to a sixteenth of the groups
// that a whole GPU has. Within a node they are: there is nothing to keep pace with.
TEST(RoleBlocks, SumsForTheNetworkKeepPaceWithARailWhateverTheShare) {
  for (std::uint32_t ranks = 1; ranks <= 16; ++ranks) {
    const std::uint32_t share = plan::blocks_of_share(kDevice, ranks);
    const Chosen over_nodes = chosen_of(sum_needs(world_of(2, 2), 12), shared_by(ranks));
    EXPECT_GE(over_nodes.blocks.reduce, share >= 24 ? 12u : share / 2) << ranks;
    EXPECT_GE(over_nodes.blocks.compute, share / 2) << ranks;
    const Chosen within_one = chosen_of(sum_needs(world_of(1, 4), 12), shared_by(ranks));
    EXPECT_LT(within_one.blocks.reduce, 12 / ranks + 1 + kGroupsOfBlock) << ranks;
  }
}

// Who receives shares before that: so few groups in all as are to share, and each has a place in
// the role. Ranks that share a GPU keep pace with their rails.
TEST(RoleBlocks, ReceiversShareFirst) {
  GroupNeeds needs;
  needs.streams = Role::kShare;
  needs.stream = needs.send = needs.receive = true;
  needs.receivers_stream = true;
  for (const std::uint32_t groups : {12u, 24u, 48u, 96u}) {
    needs.receive_groups = groups / 2;
    needs.stream_groups = groups - needs.receive_groups;
    for (const std::uint32_t least : {0u, 12u}) {
      needs.stream_least = least;
      for (std::uint32_t ranks = 1; ranks <= 8; ++ranks) {
        SCOPED_TRACE(testing::Message() << groups << " groups, " << ranks << " ranks a device");
        const Chosen chosen = chosen_of(needs, shared_by(ranks));
        const RoleBlocks& blocks = chosen.blocks;
        const std::uint32_t besides = blocks.share - blocks.receive;
        EXPECT_EQ(chosen.frame.sharing_receivers, warpgroups_of(blocks.receive));
        EXPECT_GE(besides, 1u);
        EXPECT_EQ(1 + blocks.send + blocks.receive + besides,
                  chosen.frame.comm_blocks * kGroupsOfBlock);
        EXPECT_GE(blocks.share, groups / ranks);
        EXPECT_GE(blocks.receive, std::min(least, plan::blocks_of_share(kDevice, ranks) / 2));
        if (least == 0) {
          EXPECT_LE(blocks.share, groups / ranks + 2 + kGroupsOfBlock);
        }
      }
    }
  }
  CudaOptions options;
  options.stream_groups = 5;
  options.receive_groups = 4;
  const Chosen asked = chosen_of(needs, options);
  EXPECT_EQ(asked.blocks.receive, 4u);
  EXPECT_EQ(asked.blocks.share, 5u + 4u);
  // With one rank in a node nobody receives, and all groups share.
  needs.receive = false;
  const Chosen alone = chosen_of(needs, {});
  EXPECT_EQ(alone.frame.sharing_receivers, 0u);
  EXPECT_GE(alone.blocks.share, needs.stream_groups);
}

// However many groups are wanted, the product has half of a share, or the blocks that the caller
// named. Every role that is needed has a group.
TEST(RoleBlocks, GroupsByDefaultLeaveTheProductItsBlocks) {
  for (const std::uint32_t device : {20u, 60u, 78u, 114u, 132u, 148u}) {
    for (const std::uint32_t compute : {0u, 5u, 16u}) {
      for (const auto& [reduce, receive] :
           {std::pair{192u, 96u}, std::pair{144u, 48u}, std::pair{24u, 7u}}) {
        SCOPED_TRACE(testing::Message() << device << " SMs, " << compute << " named, " << reduce
                                        << " and " << receive);
        CudaOptions options;
        options.compute_blocks = compute;
        const Chosen chosen = choose(sum_needs(world_of(2, 2), reduce, receive), options, device);
        ASSERT_TRUE(chosen.status) << chosen.status.error().message;
        EXPECT_GE(chosen.blocks.compute, compute != 0 ? compute : device / 2);
        EXPECT_GE(chosen.blocks.receive, 1u);
        EXPECT_GE(chosen.blocks.reduce, 1u);
        EXPECT_LE(all_blocks(chosen.frame, chosen.blocks), device);
      }
    }
  }
  // Those of a whole H100 are not touched.
  const Chosen whole = chosen_of(sum_needs(world_of(2, 2), 144, 48), {});
  EXPECT_EQ(whole.blocks.receive, 48u);
  EXPECT_GE(whole.blocks.reduce, 144u);
  // Of 148 SMs 128 are the product's by name, and 20 are left: 60 groups, poller and send among
  // them.
  CudaOptions most;
  most.compute_blocks = kBlocksMax;
  const Chosen left = choose(sum_needs(world_of(2, 2), 144, 48), most, 148);
  ASSERT_TRUE(left.status) << left.status.error().message;
  EXPECT_EQ(left.blocks.receive, 48u * 58 / 192);
  EXPECT_EQ(left.blocks.reduce, 58u - left.blocks.receive);
  // And one that is named, too, is left as it is.
  most.receive_groups = 30;
  const Chosen named = choose(sum_needs(world_of(2, 2), 144, 48), most, 148);
  ASSERT_TRUE(named.status) << named.status.error().message;
  EXPECT_EQ(named.blocks.receive, 30u);
  EXPECT_EQ(named.blocks.reduce, 28u);
}

// The planner's numbers are this rank's: whatever its share, nothing is scaled. The poller takes a
// place among those that stream rather than an SM.
TEST(RoleBlocks, PlannedNumbersAreTakenAsTheyAre) {
  for (std::uint32_t ranks = 1; ranks <= 2; ++ranks) {
    GroupNeeds needs = sum_needs(world_of(2, 2), 25, 6);
    needs.planned_blocks = 11;
    const Chosen over_nodes = chosen_of(needs, shared_by(ranks));
    EXPECT_EQ(over_nodes.frame.comm_blocks, 11u);
    EXPECT_EQ(over_nodes.blocks.reduce, 25u);
    EXPECT_EQ(over_nodes.blocks.receive, 6u);
    EXPECT_EQ(over_nodes.blocks.compute,
              std::min(plan::blocks_of_share(kDevice, ranks) - 11, kBlocksMax));
    GroupNeeds within = sum_needs(world_of(1, 4), 12);
    within.planned_blocks = 4;
    const Chosen polled = chosen_of(within, shared_by(ranks));
    EXPECT_EQ(polled.frame.comm_blocks, 4u);
    EXPECT_EQ(polled.blocks.reduce, 11u);
    within.stream_groups = 3;
    within.planned_blocks = 1;
    EXPECT_EQ(chosen_of(within, shared_by(ranks)).blocks.reduce, 2u);
  }
}

GroupNeeds collective_needs(const World& world, Role streams) {
  GroupNeeds needs;
  needs.multiplies = false;
  needs.streams = streams;
  needs.stream = streams == Role::kShare ? world.size() > 1 : world.locals > 1;
  needs.send = world.nodes > 1;
  needs.receive = world.nodes > 1 && (streams == Role::kReduce || world.locals > 1);
  return needs;
}

// A share that is not refused has groups for each role, and there is a group for each of
// them: a role with a group too few would wait for it until its deadline.
TEST(RoleBlocks, EveryGroupOfACollectiveIsThere) {
  std::uint32_t refused = 0;
  for (const Role streams : {Role::kShare, Role::kReduce}) {
    for (const auto& [nodes, locals] :
         {std::pair{1u, 1u}, {1u, 2u}, {1u, 8u}, {2u, 1u}, {4u, 8u}}) {
      const World world = world_of(nodes, locals);
      const GroupNeeds needs = collective_needs(world, streams);
      for (std::uint32_t device = 1; device <= 300; ++device) {
        for (const std::uint32_t ranks : {1u, 2u, 7u}) {
          SCOPED_TRACE(testing::Message() << nodes << " x " << locals << ", " << device
                                          << " SMs of " << ranks << " ranks");
          const Chosen chosen = choose(needs, shared_by(ranks), device);
          const std::uint32_t share = plan::blocks_of_share(device, ranks);
          if (!chosen.status) {
            EXPECT_EQ(chosen.status.error().code, ErrorCode::kLimitExceeded);
            EXPECT_LE(share, 1u) << chosen.status.error().message;
            ++refused;
            continue;
          }
          const RoleBlocks& blocks = chosen.blocks;
          EXPECT_EQ(blocks.send != 0, needs.send);
          EXPECT_EQ(blocks.receive != 0, needs.receive);
          EXPECT_EQ(blocks.share != 0, needs.stream && streams == Role::kShare);
          EXPECT_EQ(blocks.reduce != 0, needs.stream && streams == Role::kReduce);
          EXPECT_GE(blocks.compute, 1u);
          for (const std::uint32_t count : {blocks.receive.count(), blocks.share.count(),
                                            blocks.reduce.count(), blocks.compute.count()})
            EXPECT_LE(count, kBlocksMax);
          EXPECT_LE(chosen.frame.comm_blocks, std::min(share, kBlocksMax));
          EXPECT_LE(
              1 + blocks.send + blocks.receive + blocks.share + blocks.reduce + blocks.compute,
              chosen.frame.comm_blocks * kGroupsOfBlock);
        }
      }
    }
  }
  EXPECT_GT(refused, 0u);
}

TEST(RoleBlocks, ACollectiveTakesWhatTheCallerNames) {
  const GroupNeeds needs = collective_needs(world_of(2, 2), Role::kShare);
  CudaOptions options;
  options.send_groups = 2;
  options.receive_groups = 9;
  options.stream_groups = 12;
  options.compute_blocks = 5;
  const Chosen chosen = chosen_of(needs, options);
  EXPECT_EQ(chosen.blocks.send, 2u);
  EXPECT_EQ(chosen.blocks.receive, 9u);
  EXPECT_EQ(chosen.blocks.share, 12u);
  EXPECT_EQ(chosen.blocks.compute, 15u);
  // Ten blocks have 29 groups beside the poller.
  const Chosen wrong = choose(needs, options, 10);
  ASSERT_FALSE(wrong.status);
  EXPECT_EQ(wrong.status.error().code, ErrorCode::kLimitExceeded);
  EXPECT_NE(wrong.status.error().message.find("ask for fewer SMs"), std::string::npos)
      << wrong.status.error().message;
  options.send_groups = kLanes + 1;
  EXPECT_EQ(choose(needs, options).status.error().code, ErrorCode::kInvalidArgument);
}

TEST(RoleBlocks, WhatTheCallerAsksForIsTaken) {
  const GroupNeeds needs = sum_needs(world_of(2, 2), 12);
  CudaOptions options = shared_by(2);
  options.stream_groups = 5;
  options.receive_groups = 4;
  options.send_groups = 3;
  options.compute_blocks = 17;
  const Chosen chosen = chosen_of(needs, options);
  EXPECT_EQ(chosen.blocks.reduce, 5u);
  EXPECT_EQ(chosen.blocks.receive, 4u);
  EXPECT_EQ(chosen.blocks.send, 3u);
  EXPECT_EQ(chosen.blocks.compute, 17u);
  EXPECT_EQ(chosen.frame.comm_blocks, 5u);  // 13 groups with the poller
}

TEST(RoleBlocks, WhatDoesNotFitIsRefused) {
  const GroupNeeds needs = sum_needs(world_of(2, 2), 12);
  const auto refused = [&](const CudaOptions& options, ErrorCode code, std::uint32_t device) {
    const Chosen chosen = choose(needs, options, device);
    ASSERT_FALSE(chosen.status);
    EXPECT_EQ(chosen.status.error().code, code) << chosen.status.error().message;
  };
  CudaOptions options = shared_by(2);
  options.compute_blocks = 66;  // none is left for communication
  refused(options, ErrorCode::kLimitExceeded, kDevice);
  options.compute_blocks = 0;
  options.stream_groups = 198;
  refused(options, ErrorCode::kLimitExceeded, kDevice);
  refused(shared_by(8), ErrorCode::kLimitExceeded, 8);
  options.stream_groups = 0;
  options.send_groups = kLanes + 1;
  refused(options, ErrorCode::kInvalidArgument, kDevice);
}

/// With any number of blocks outside the compute blocks each group has one role, all groups have
/// some, and roles keep their shares.
TEST(RoleBlocks, AreDealtOutAnew) {
  for (const bool gathers : {false, true}) {
    for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}, {2u, 2u}}) {
      GroupNeeds needs = sum_needs(world_of(nodes, locals), 12);
      if (gathers) {
        needs.streams = Role::kShare;
        needs.stream = true;
        needs.receivers_stream = true;
      }
      const Chosen planned = chosen_of(needs, {});
      const cuda::CommShares shares{
          gathers ? cuda::groups_that_only_share(planned.frame, planned.blocks)
                  : warpgroups_of(planned.blocks.reduce),
          warpgroups_of(planned.blocks.receive)};
      // One role has 128 groups at most.
      const std::uint32_t most = shares.streams == 0 ? 43 : 100;
      for (std::uint32_t comm = 2; comm <= most; ++comm) {
        SCOPED_TRACE(testing::Message()
                     << gathers << " " << nodes << "x" << locals << ": " << comm);
        Chosen dealt = planned;
        // From another number of them.
        cuda::deal_blocks(kDevice, 70, shares, dealt.blocks, dealt.frame);
        cuda::deal_blocks(kDevice, comm, shares, dealt.blocks, dealt.frame);
        const RoleBlocks& blocks = dealt.blocks;
        EXPECT_EQ(dealt.frame.comm_blocks, comm);
        EXPECT_EQ(blocks.compute, std::min(kDevice - comm, kBlocksMax));
        EXPECT_EQ(blocks.send, planned.blocks.send);
        const std::uint32_t streams =
            gathers ? cuda::groups_that_only_share(dealt.frame, blocks).count()
                    : blocks.reduce.count();
        EXPECT_EQ(
            dealt.frame.pollers.count() + blocks.send.count() + blocks.receive.count() + streams,
            comm * kGroupsOfBlock);
        EXPECT_EQ(streams != 0, shares.streams != 0);
        EXPECT_EQ(blocks.receive != 0, planned.blocks.receive != 0);
        EXPECT_LE(blocks.receive, kBlocksMax);
        if (shares.streams != 0 && shares.receives != 0 && blocks.receive < kBlocksMax) {
          EXPECT_NEAR(blocks.receive * shares.streams, streams * shares.receives,
                      shares.streams + shares.receives);
        }
      }
      Chosen back = planned;
      cuda::deal_blocks(kDevice, 70, shares, back.blocks, back.frame);
      cuda::deal_blocks(kDevice, planned.frame.comm_blocks, shares, back.blocks, back.frame);
      EXPECT_EQ(back.blocks.receive, planned.blocks.receive);
      EXPECT_EQ(back.blocks.reduce, planned.blocks.reduce);
      EXPECT_EQ(back.blocks.share, planned.blocks.share);
      EXPECT_EQ(back.frame.sharing_receivers, planned.frame.sharing_receivers);
    }
  }
}

/// Ring Attention, MoE Dispatch and GEMM+Combine on any small GPU that ranks share, with every
/// number of blocks outside the compute blocks.
TEST(RoleBlocks, AreDealtOutAnewWhereRolesFollowEachOther) {
  std::uint32_t dealt_out = 0;
  for (const plan::Op op : {plan::Op::kRing, plan::Op::kMoe, plan::Op::kCombine}) {
    for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {2u, 1u}, {2u, 2u}, {3u, 2u}}) {
      for (std::uint32_t device = 2; device <= 40; ++device) {
        for (std::uint32_t ranks = 1; ranks <= 3; ++ranks) {
          SCOPED_TRACE(testing::Message() << static_cast<int>(op) << ": " << nodes << "x" << locals
                                          << ", " << device << " SMs of " << ranks << " ranks");
          plan::Problem problem;
          problem.op = op;
          problem.nodes = nodes;
          problem.locals = locals;
          problem.ranks_per_device = ranks;
          const GroupNeeds needs =
              cuda::accounted_needs(problem, plan::accounted_groups(op, nodes, locals));
          EXPECT_EQ(needs.watchers, op == plan::Op::kRing ? nodes : 0);
          const Chosen planned = choose(needs, shared_by(ranks), device);
          if (!planned.status) continue;
          const cuda::CommShares shares =
              cuda::shares_of(needs.watchers, planned.blocks, planned.frame);
          if (shares.streams == 0) continue;  // the operator refuses it
          const ThreadBlocks all = plan::blocks_of_share(device, ranks);
          const cuda::CommTargets targets =
              cuda::targets_of(all, shares, planned.blocks, planned.frame);
          EXPECT_LT(targets.most, all.count()) << "the product needs a block";
          for (std::uint32_t comm = targets.least; comm <= targets.most; ++comm) {
            Chosen dealt = planned;
            cuda::deal_blocks(all, targets.most, shares, dealt.blocks, dealt.frame);
            cuda::deal_blocks(all, comm, shares, dealt.blocks, dealt.frame);
            const RoleBlocks& blocks = dealt.blocks;
            const std::uint32_t streams =
                op == plan::Op::kCombine
                    ? blocks.reduce.count()
                    : cuda::groups_that_only_share(dealt.frame, blocks).count();
            ASSERT_EQ(1 + blocks.send + blocks.receive + streams, comm * kGroupsOfBlock)
                << comm << ": each group has a role, and only one";
            ASSERT_GT(streams, needs.watchers) << comm;
            ASSERT_EQ(blocks.send, planned.blocks.send);
            ASSERT_EQ(blocks.receive != 0, planned.blocks.receive != 0);
            ASSERT_EQ(dealt.frame.sharing_receivers,
                      op == plan::Op::kRing ? warpgroups_of(blocks.receive) : Warpgroups(0));
            ASSERT_GE(blocks.compute, 1u);
            ASSERT_EQ(all_blocks(dealt.frame, blocks),
                      std::min(all, ThreadBlocks(comm + kBlocksMax)));
            ++dealt_out;
          }
          if (targets.least > targets.most) continue;
          // It begins with named numbers.
          const std::uint32_t first = targets.of(shares, needs.watchers + 1, 1);
          EXPECT_EQ(first, targets.least);
          EXPECT_LE(targets.of(shares, 1, 1), std::max(targets.least, first));
          EXPECT_EQ(targets.of(shares, 3000, 3000), targets.most);
          if (planned.frame.comm_blocks >= targets.least &&
              planned.frame.comm_blocks <= targets.most) {
            EXPECT_EQ(targets.of(shares, 0, 0), planned.frame.comm_blocks.count());
            Chosen same = planned;
            cuda::deal_blocks(all, targets.most, shares, same.blocks, same.frame);
            cuda::deal_blocks(all, planned.frame.comm_blocks, shares, same.blocks, same.frame);
            EXPECT_EQ(same.blocks.receive, planned.blocks.receive);
            EXPECT_EQ(same.blocks.share, planned.blocks.share);
            EXPECT_EQ(same.blocks.reduce, planned.blocks.reduce);
            EXPECT_EQ(same.blocks.compute, planned.blocks.compute);
          }
        }
      }
    }
  }
  EXPECT_GT(dealt_out, 1000u);
}

}  // namespace
}  // namespace mk::kernels
