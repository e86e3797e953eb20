// The all-gather of blobs: its bookkeeping alone, then over daemons.
#include "daemon/control/exchange.h"

#include <gmock/gmock.h>

#include "daemon/control/ranks.h"
#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using control::describe_ranks;
using control::ExchangeTable;
using control::kExchangeRoundsMax;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint64_t kFar = 1'000'000'000;

TEST(Ranks, AreFoldedByNode) {
  EXPECT_EQ(describe_ranks({}, 4), "none");
  EXPECT_EQ(describe_ranks(std::vector<std::uint32_t>{5}, 4), "rank 5 (node rank 1)");
  EXPECT_EQ(describe_ranks(std::vector<std::uint32_t>{0, 1, 3, 4, 5, 6, 7, 9}, 4),
            "ranks 0-1, 3 (node rank 0), ranks 4-7 (node rank 1), rank 9 (node rank 2)");
}

TEST(ExchangeTable, AnswersWhenAllAreIn) {
  ExchangeTable table(3, 2);
  ASSERT_TRUE(table.put_local(1, "t", bytes_of("one"), 71, kFar, 1));
  EXPECT_TRUE(table.take_due(0).empty());
  ASSERT_TRUE(table.put_remote(2, 0, "t", bytes_of("two")));
  EXPECT_TRUE(table.take_due(0).empty());
  ASSERT_TRUE(table.put_local(0, "t", bytes_of("zero"), 70, kFar, 1));
  const auto answers = table.take_due(0);
  ASSERT_EQ(answers.size(), 2u);
  for (const auto& answer : answers) {
    EXPECT_EQ(answer.request, 70 + answer.rank);
    ASSERT_TRUE(answer.outcome);
    EXPECT_EQ((*answer.outcome)->blobs,
              (std::vector{bytes_of("zero"), bytes_of("one"), bytes_of("two")}));
  }
  EXPECT_EQ(table.open_rounds(), 0u);
}

TEST(ExchangeTable, ATagThatDiffersFailsEveryRankOfTheRound) {
  ExchangeTable table(3, 3);
  ASSERT_TRUE(table.put_local(0, "a", {}, 1, kFar, 1));
  ASSERT_TRUE(table.put_local(1, "b", {}, 2, kFar, 1));
  auto answers = table.take_due(0);
  ASSERT_EQ(answers.size(), 2u);
  for (const auto& answer : answers) {
    ASSERT_FALSE(answer.outcome);
    EXPECT_EQ(answer.outcome.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(answer.outcome.error().message,
                AllOf(HasSubstr("rank 1 is at 'b' while rank 0 is at 'a'"),
                      HasSubstr("different releases of libmkclient, install the same one")));
  }
  ASSERT_TRUE(table.put_local(2, "a", {}, 3, kFar, 1));
  answers = table.take_due(0);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_FALSE(answers[0].outcome);
  EXPECT_EQ(table.open_rounds(), 0u);
  // The next round is a new chance.
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(table.put_local(rank, "c", {}, rank, kFar, 1));
  }
  answers = table.take_due(0);
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_TRUE(answers[0].outcome);
}

TEST(ExchangeTable, SaysWhomARankWaitsFor) {
  ExchangeTable table(4, 2);
  EXPECT_FALSE(table.awaited_by(1));
  ASSERT_TRUE(table.put_local(1, "t", {}, 1, kFar, 1));
  ASSERT_TRUE(table.awaited_by(1));
  EXPECT_EQ(table.awaited_by(1)->tag, "t");
  EXPECT_EQ(table.awaited_by(1)->rank, 0u);
  EXPECT_FALSE(table.awaited_by(0));
  ASSERT_TRUE(table.put_local(0, "t", {}, 2, kFar, 1));
  ASSERT_TRUE(table.put_remote(3, 0, "t", {}));
  EXPECT_EQ(table.awaited_by(1)->rank, 2u);
  ASSERT_TRUE(table.put_remote(2, 0, "t", {}));
  ASSERT_EQ(table.take_due(0).size(), 2u);
  EXPECT_FALSE(table.awaited_by(1));
}

TEST(ExchangeTable, ATimeoutListsWhoIsMissing) {
  ExchangeTable table(4, 2);
  ASSERT_TRUE(table.put_local(0, "t", {}, 1, 100, 33));
  ASSERT_TRUE(table.put_remote(2, 0, "t", {}));
  EXPECT_TRUE(table.take_due(99).empty());
  const auto answers = table.take_due(100);
  ASSERT_EQ(answers.size(), 1u);
  ASSERT_FALSE(answers[0].outcome);
  EXPECT_EQ(answers[0].outcome.error().code, ErrorCode::kTimeout);
  EXPECT_THAT(answers[0].outcome.error().message,
              HasSubstr("exchange 't' (number 0): not all ranks came within 33 ms; missing: rank 1 "
                        "(node rank 0), rank 3 (node rank 1)"));
  // Its blob still counts for the others.
  ASSERT_TRUE(table.put_local(1, "t", {}, 2, kFar, 1));
  ASSERT_TRUE(table.put_remote(3, 0, "t", {}));
  EXPECT_EQ(table.take_due(200).size(), 1u);
  EXPECT_EQ(table.open_rounds(), 0u);
}

TEST(ExchangeTable, IsBounded) {
  ExchangeTable table(2, 1);
  // A rank that gives up again and again runs into a wall.
  for (std::uint64_t round = 0; round < kExchangeRoundsMax; ++round) {
    ASSERT_TRUE(table.put_local(0, "t", {}, round, 0, 1));
    ASSERT_EQ(table.take_due(1).size(), 1u);
  }
  const auto more = table.put_local(0, "t", {}, 99, 0, 1);
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().code, ErrorCode::kLimitExceeded);
  EXPECT_EQ(table.open_rounds(), kExchangeRoundsMax);
  // So does a remote one, further out.
  std::uint64_t round = 0;
  ExchangeTable other(2, 1);
  while (other.put_remote(1, round, "t", {})) ++round;
  EXPECT_EQ(other.open_rounds(), round);
  EXPECT_LE(round, 2 * kExchangeRoundsMax + 1);
}

TEST(ExchangeTable, RefusesWhatIsOutOfOrderOrTooLong) {
  ExchangeTable table(2, 1);
  EXPECT_EQ(table.put_remote(1, 1, "t", {}).error().code, ErrorCode::kProtocol);
  ASSERT_TRUE(table.put_remote(1, 0, "t", {}));
  EXPECT_EQ(table.put_remote(1, 0, "t", {}).error().code, ErrorCode::kProtocol);
  ASSERT_TRUE(table.put_local(0, "t", {}, 1, kFar, 1));
  EXPECT_FALSE(table.take_due(0).empty());
  ASSERT_TRUE(table.put_local(0, "u", {}, 2, kFar, 1));
  const auto second = table.put_local(0, "v", {}, 3, kFar, 1);
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr("still waits for its exchange 'u'"));
  const std::size_t limit = ExchangeTable::blob_bytes_max(2);
  EXPECT_EQ(limit, shm::kExchangeBlobBytesMax);
  EXPECT_EQ(table.put_remote(1, 1, "u", ExchangeTable::Blob(limit + 1)).error().code,
            ErrorCode::kProtocol);
}

TEST(ExchangeTable, EveryWorldsReplyFitsAMessage) {
  for (std::uint32_t world = 1; world <= shm::kWorldMax; ++world) {
    const std::size_t reply = 4 + std::size_t{world} * (4 + ExchangeTable::blob_bytes_max(world));
    ASSERT_LE(reply, shm::kMessageBytesMax) << world;
    ASSERT_GE(ExchangeTable::blob_bytes_max(world), world <= 1024 ? 4091u : 507u) << world;
  }
}

TEST(Exchange, WhatWouldNotFitTheReplyIsRefusedAtTheRequest) {
  TestCluster cluster(8);
  TestNode& node = cluster.node(0);
  const ClientId client = node.attach(rank_of("job", 8, 16, 0));
  const std::vector<std::byte> blob(shm::kExchangeBlobBytesMax);  // times 128 ranks: 8 MiB
  const auto request = node.send(client, shm::Exchange{"big", blob, 60'000});
  const auto refused = node.take(client, shm::MessageType::kError);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->request, request);
  EXPECT_EQ(shm::decode_message<shm::ErrorReply>(refused->payload)->code,
            ErrorCode::kLimitExceeded);
  EXPECT_FALSE(node.take<shm::SessionFailed>(client));
  node.send(client, shm::AllocFlags{1});
  EXPECT_TRUE(node.take<shm::AllocFlagsReply>(client));  // and it goes on
}

TEST(Exchange, OverDaemons) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 2);
  for (int round = 0; round < 20; ++round) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t rank = (i + static_cast<std::uint32_t>(round)) % 4;
      EXPECT_FALSE(job.take<shm::ExchangeReply>(rank));
      job.send(rank, shm::Exchange{"tag", bytes_of(fmt::format("{}-{}", round, rank)), 1000});
      if (round % 2 == 0) cluster.settle();
    }
    cluster.settle();
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      const auto reply = job.take<shm::ExchangeReply>(rank);
      ASSERT_TRUE(reply) << round;
      for (std::uint32_t from = 0; from < 4; ++from) {
        EXPECT_EQ(reply->blobs.at(from), bytes_of(fmt::format("{}-{}", round, from)));
      }
    }
  }
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST(Exchange, BeforeTheJobIsUpWaitsForIt) {
  TestCluster cluster(2);
  JobRun job(cluster, "job", 2, 1);
  job.attach(0);
  job.send(0, shm::Exchange{"t", bytes_of("a"), 60'000});
  job.attach(1);
  job.send(1, shm::Exchange{"t", bytes_of("b"), 60'000});
  cluster.settle();
  EXPECT_FALSE(job.take<shm::ExchangeReply>(0));
  cluster.connect_all();
  cluster.settle();
  cluster.wait(100);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const auto reply = job.take<shm::ExchangeReply>(rank);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->blobs, (std::vector{bytes_of("a"), bytes_of("b")}));
  }
}

TEST(Exchange, TimeoutsAndTagsOverDaemons) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 2);
  job.send(0, shm::Exchange{"t", {}, 500});
  job.send(3, shm::Exchange{"t", {}, 5'000});
  cluster.settle();
  cluster.wait(600);
  const auto error = job.take<shm::ErrorReply>(0);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ErrorCode::kTimeout);
  EXPECT_THAT(error->message, HasSubstr("missing: rank 1 (node rank 0), rank 2 (node rank 1)"));
  EXPECT_FALSE(job.take<shm::ErrorReply>(3));
  // A rank out of step is told, and so is everybody who waits.
  job.send(1, shm::Exchange{"other", {}, 5'000});
  cluster.settle();
  for (const std::uint32_t rank : {1u, 3u}) {
    const auto mismatch = job.take<shm::ErrorReply>(rank);
    ASSERT_TRUE(mismatch) << rank;
    EXPECT_EQ(mismatch->code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(mismatch->message, HasSubstr("rank 1 is at 'other'"));
  }
  job.send(2, shm::Exchange{"t", {}, 5'000});
  cluster.settle();
  EXPECT_EQ(job.take<shm::ErrorReply>(2)->code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(cluster.broken, testing::IsEmpty());
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST(Exchange, ALostRankEndsTheWait) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  job.send(0, shm::Exchange{"t", {}, 60'000});
  cluster.settle();
  job.hang_up(1);
  cluster.settle();
  const auto error = job.take<shm::ErrorReply>(0);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ErrorCode::kPeerLost);
  job.hang_up_all();
  cluster.expect_nothing_left();
}

}  // namespace
}  // namespace mk::daemon::test
