// How a rank's share of a GPU is dealt out to its roles. Host arithmetic: it needs no GPU.
#include "kernels/cuda/role_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace mk::kernels {
namespace {

using cuda::choose_blocks;
using cuda::FrameArguments;
using cuda::gpus_of_node;
using cuda::GroupNeeds;
using cuda::kGroupsOfBlock;
using cuda::sum_needs;
using cuda::SumGroups;
using cuda::sums_over_nodes;

constexpr std::uint32_t kDevice = 132;
constexpr std::uint32_t kLanes = 4;
constexpr std::uint32_t kReceive = cuda::kFewReceiveGroups;

World world_of(std::uint32_t nodes, std::uint32_t locals) {
  World world;
  world.nodes = nodes;
  world.locals = locals;
  return world;
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
              chosen_of(sum_needs(world_of(nodes, locals), {groups, kReceive}), shared_by(ranks));
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
          EXPECT_LE((blocks.compute + chosen.frame.comm_blocks) * ranks, kDevice);
        }
      }
    }
  }
}

// A rail is as fast where ranks share a GPU: sums for it are not left to a sixteenth of the groups
// that a whole GPU has. Within a node they are: there is nothing to keep pace with.
TEST(RoleBlocks, SumsForTheNetworkKeepPaceWithARailWhateverTheShare) {
  for (std::uint32_t ranks = 1; ranks <= 16; ++ranks) {
    const std::uint32_t share = kDevice / ranks;
    const Chosen over_nodes =
        chosen_of(sum_needs(world_of(2, 2), {12, kReceive}), shared_by(ranks));
    EXPECT_GE(over_nodes.blocks.reduce, share >= 24 ? 12u : share / 2) << ranks;
    EXPECT_GE(over_nodes.blocks.compute, share / 2) << ranks;
    const Chosen within_one =
        chosen_of(sum_needs(world_of(1, 4), {12, kReceive}), shared_by(ranks));
    EXPECT_LT(within_one.blocks.reduce, 12 / ranks + 1 + kGroupsOfBlock) << ranks;
  }
}

// As many compute blocks as there may be; and on the SMs that are left, one at least, groups.
TEST(RoleBlocks, FewGroupsAreThoseOfTheSmsThatTheProductCannotHave) {
  GroupNeeds needs;
  needs.streams = Role::kShare;
  needs.stream = true;
  needs.stream_groups = 48;
  needs.few_groups = true;
  for (std::uint32_t ranks = 1; ranks <= 16; ++ranks) {
    const Chosen chosen = chosen_of(needs, shared_by(ranks));
    const std::uint32_t share = kDevice / ranks;
    const std::uint32_t besides = ranks == 1 ? kDevice - kBlocksMax : 1;
    EXPECT_EQ(chosen.frame.comm_blocks, besides);
    EXPECT_EQ(chosen.blocks.compute, std::min(share - 1, kBlocksMax));
    EXPECT_EQ(chosen.blocks.share, besides * kGroupsOfBlock - 1);
  }
  CudaOptions options;
  options.stream_groups = 5;
  options.compute_blocks = 17;
  const Chosen asked = chosen_of(needs, options);
  EXPECT_EQ(asked.frame.comm_blocks, 2u);
  EXPECT_EQ(asked.blocks.share, 5u);
  // Whoever has nobody to share with has nobody who shares.
  needs.stream = false;
  EXPECT_EQ(chosen_of(needs, {}).blocks.share, 0u);
}

// Over nodes all of them pass on what comes, but for poller and send; so all of them share first.
TEST(RoleBlocks, FewGroupsShareAndReceiveOverNodes) {
  GroupNeeds needs;
  needs.streams = Role::kShare;
  needs.stream = needs.send = needs.receive = needs.receivers_stream = needs.few_groups = true;
  needs.stream_groups = needs.receive_groups = needs.stream_least = 24;
  for (std::uint32_t ranks = 1; ranks <= 16; ++ranks) {
    SCOPED_TRACE(ranks);
    const Chosen chosen = chosen_of(needs, shared_by(ranks));
    const RoleBlocks& blocks = chosen.blocks;
    const std::uint32_t besides = ranks == 1 ? kDevice - kBlocksMax : 1;
    EXPECT_EQ(chosen.frame.comm_blocks, besides);
    EXPECT_EQ(blocks.send, 1u);
    EXPECT_EQ(blocks.receive, besides * kGroupsOfBlock - 2);
    EXPECT_EQ(chosen.frame.sharing_receivers, blocks.receive);
    EXPECT_EQ(blocks.share, blocks.receive);
    EXPECT_EQ(cuda::groups_that_only_share(chosen.frame, blocks), 0u);
  }
  // By the caller's wish some only share.
  CudaOptions options;
  options.stream_groups = 4;
  options.receive_groups = 3;
  const Chosen asked = chosen_of(needs, options);
  EXPECT_EQ(asked.blocks.receive, 3u);
  EXPECT_EQ(cuda::groups_that_only_share(asked.frame, asked.blocks), 4u);
  EXPECT_EQ(asked.frame.comm_blocks, 3u);
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
        EXPECT_EQ(chosen.frame.sharing_receivers, blocks.receive);
        EXPECT_GE(besides, 1u);
        EXPECT_EQ(1 + blocks.send + blocks.receive + besides,
                  chosen.frame.comm_blocks * kGroupsOfBlock);
        EXPECT_GE(blocks.share, groups / ranks);
        EXPECT_GE(blocks.receive, std::min(least, kDevice / ranks / 2));
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

TEST(RoleBlocks, ANodesGpusCountWhereEachRankHasOne) {
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (std::uint32_t ranks = 1; ranks <= locals; ++ranks) {
      for (std::uint32_t nodes = 1; nodes <= 2; ++nodes)
        EXPECT_EQ(gpus_of_node(world_of(nodes, locals), shared_by(ranks)),
                  ranks == 1 ? locals : 1u);
    }
  }
}

// 5.2 TFLOP/s an SM and 50 GB/s a rail, or what the caller says. 144 and 48 groups, with poller and
// send, have 65 of 128 SMs, 96 and 48 have 49; an element of C takes the other 63 or 79 SMs
// 2 k / 5.2e12 / SMs seconds, and the network sent / 50e9, of which it may be half.
TEST(RoleBlocks, SumsOverNodesTakeTheSmsThatTheProductCanSpare) {
  constexpr SumGroups kOtherwise{24, 7};
  constexpr double kSent = 1;  // byte an element: 20 ps
  const auto groups = [&](std::uint32_t locals, std::uint32_t k, const CudaOptions& options) {
    return sums_over_nodes(world_of(2, locals), options, k, kSent, kOtherwise);
  };
  struct Case {
    std::uint32_t k, reduce, receive;
  };
  for (const std::uint32_t locals : {2u, 4u, 8u}) {
    for (const Case& one : {Case{8, 144, 48}, Case{1638, 144, 48}, Case{1639, 96, 48},
                            Case{2054, 96, 48}, Case{2055, 24, 7}, Case{100'000, 24, 7}}) {
      const SumGroups chosen = groups(locals, one.k, {});
      EXPECT_EQ(chosen.reduce, one.reduce) << locals << " ranks to a node, k " << one.k;
      EXPECT_EQ(chosen.receive, one.receive) << locals << " ranks to a node, k " << one.k;
      // Of ranks that share a GPU it has not been measured.
      EXPECT_EQ(groups(locals, one.k, shared_by(2)).reduce, kOtherwise.reduce);
      EXPECT_EQ(groups(locals, one.k, shared_by(2)).receive, kOtherwise.receive);
    }
  }
  // One rank to a node only receives, and has 128 - 9 SMs left.
  EXPECT_EQ(groups(1, 3094, {}).receive, 24u);
  EXPECT_EQ(groups(1, 3095, {}).receive, 7u);
  CudaOptions fast;
  fast.rates.network_bytes_per_s = 100e9;
  EXPECT_EQ(groups(2, 819, fast).reduce, 144u);
  EXPECT_EQ(groups(2, 820, fast).reduce, 96u);
  EXPECT_EQ(groups(2, 1028, fast).reduce, 24u);
}

TEST(RoleBlocks, SumsOverNodesGoByTheGpusRateAndLeaveNamedBlocksAlone) {
  constexpr SumGroups kOtherwise{24, 7};
  CudaOptions slow;
  slow.rates.flops_per_s = 64e12;  // of all 128 SMs: 63 of them take 2 k / 31.5e12 an element
  EXPECT_EQ(sums_over_nodes(world_of(2, 2), slow, 157, 1, kOtherwise).reduce, 144u);
  EXPECT_EQ(sums_over_nodes(world_of(2, 2), slow, 158, 1, kOtherwise).reduce, 96u);
  CudaOptions named;
  named.compute_blocks = 100;
  EXPECT_EQ(sums_over_nodes(world_of(2, 2), named, 8, 1, kOtherwise).reduce, kOtherwise.reduce);
}

// However many groups are wanted, the product has half of a share, or the blocks that the caller
// named; every role that is needed has a group.
TEST(RoleBlocks, GroupsByDefaultLeaveTheProductItsBlocks) {
  for (const std::uint32_t device : {20u, 60u, 78u, 114u, 132u, 148u}) {
    for (const std::uint32_t compute : {0u, 5u, 16u}) {
      for (const SumGroups& groups : {SumGroups{192, 96}, SumGroups{144, 48}, SumGroups{24, 7}}) {
        SCOPED_TRACE(testing::Message() << device << " SMs, " << compute << " named, "
                                        << groups.reduce << " and " << groups.receive);
        CudaOptions options;
        options.compute_blocks = compute;
        const Chosen chosen = choose(sum_needs(world_of(2, 2), groups), options, device);
        ASSERT_TRUE(chosen.status) << chosen.status.error().message;
        EXPECT_GE(chosen.blocks.compute, compute != 0 ? compute : device / 2);
        EXPECT_GE(chosen.blocks.receive, 1u);
        EXPECT_GE(chosen.blocks.reduce, 1u);
        EXPECT_LE(chosen.blocks.compute + chosen.frame.comm_blocks, device);
      }
    }
  }
  // Those of a whole H100 are not touched.
  const Chosen whole = chosen_of(sum_needs(world_of(2, 2), {144, 48}), {});
  EXPECT_EQ(whole.blocks.receive, 48u);
  EXPECT_GE(whole.blocks.reduce, 144u);
  // Of 148 SMs 128 are the product's by name, and 20 are left: 60 groups, poller and send among
  // them.
  CudaOptions most;
  most.compute_blocks = kBlocksMax;
  const Chosen left = choose(sum_needs(world_of(2, 2), {144, 48}), most, 148);
  ASSERT_TRUE(left.status) << left.status.error().message;
  EXPECT_EQ(left.blocks.receive, 48u * 58 / 192);
  EXPECT_EQ(left.blocks.reduce, 58u - left.blocks.receive);
  // And one that is named, too, is left as it is.
  most.receive_groups = 30;
  const Chosen named = choose(sum_needs(world_of(2, 2), {144, 48}), most, 148);
  ASSERT_TRUE(named.status) << named.status.error().message;
  EXPECT_EQ(named.blocks.receive, 30u);
  EXPECT_EQ(named.blocks.reduce, 28u);
}

TEST(RoleBlocks, WhatTheCallerAsksForIsTaken) {
  const GroupNeeds needs = sum_needs(world_of(2, 2), {12, kReceive});
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
  const GroupNeeds needs = sum_needs(world_of(2, 2), {12, kReceive});
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

}  // namespace
}  // namespace mk::kernels
