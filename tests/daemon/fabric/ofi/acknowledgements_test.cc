// Which writes are known to have arrived, by the answers to a few of them.
#include "daemon/fabric/ofi/acknowledgements.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace mk::fabric::ofi {
namespace {

std::vector<std::uint32_t> taken(Acknowledgements& acknowledgements) {
  std::vector<std::uint32_t> all;
  acknowledgements.take_acknowledged([&](std::uint32_t write) {
    all.push_back(write);
    return true;
  });
  return all;
}

/// Sends one, asking when it is due; whether it asked.
bool send(Acknowledgements& acknowledgements, std::uint32_t write) {
  const bool asks = acknowledgements.due();
  acknowledgements.sent(write, asks);
  return asks;
}

TEST(AcknowledgementsTest, TheFirstAsksAndThenEveryFourth) {
  Acknowledgements acknowledgements(16);
  std::vector<bool> asked;
  for (std::uint32_t write = 0; write < 9; ++write) asked.push_back(send(acknowledgements, write));
  EXPECT_EQ(asked, (std::vector<bool>{true, false, false, false, true, false, false, false, true}));
}

TEST(AcknowledgementsTest, WhenNobodyAsksAnyMoreTheNextOneDoes) {
  Acknowledgements acknowledgements(16);
  EXPECT_TRUE(send(acknowledgements, 0));
  EXPECT_FALSE(send(acknowledgements, 1));
  acknowledgements.acknowledge(1);
  EXPECT_TRUE(send(acknowledgements, 2));
}

TEST(AcknowledgementsTest, AnAnswerStandsForAllThatWereSentBefore) {
  Acknowledgements acknowledgements(16);
  for (std::uint32_t write = 20; write < 26; ++write) send(acknowledgements, write);
  EXPECT_TRUE(taken(acknowledgements).empty());
  acknowledgements.acknowledge(5);  // of the fifth, which asked
  EXPECT_EQ(taken(acknowledgements), (std::vector<std::uint32_t>{20, 21, 22, 23, 24}));
  EXPECT_TRUE(acknowledgements.outstanding());
}

TEST(AcknowledgementsTest, AnOlderAnswerThatComesLaterTakesNothingBack) {
  Acknowledgements acknowledgements(16);
  for (std::uint32_t write = 0; write < 5; ++write) send(acknowledgements, write);
  acknowledgements.acknowledge(5);
  acknowledgements.acknowledge(1);
  EXPECT_EQ(taken(acknowledgements).size(), 5u);
  EXPECT_FALSE(acknowledgements.outstanding());
}

TEST(AcknowledgementsTest, TheRestWaitsOnlyWhereNobodyAsks) {
  Acknowledgements acknowledgements(16);
  EXPECT_FALSE(acknowledgements.rest_waits());
  send(acknowledgements, 0);
  send(acknowledgements, 1);
  EXPECT_FALSE(acknowledgements.rest_waits());
  acknowledgements.acknowledge(1);
  EXPECT_EQ(taken(acknowledgements), std::vector<std::uint32_t>{0});
  EXPECT_TRUE(acknowledgements.rest_waits());
  const std::uint64_t end = acknowledgements.ask_for_rest();
  EXPECT_FALSE(acknowledgements.rest_waits());
  send(acknowledgements, 2);  // not what was asked for
  acknowledgements.acknowledge(end);
  EXPECT_EQ(taken(acknowledgements), std::vector<std::uint32_t>{1});
  EXPECT_TRUE(acknowledgements.rest_waits());
}

TEST(AcknowledgementsTest, OneThatIsNotTakenComesAgainAndHoldsUpThoseAfterIt) {
  Acknowledgements acknowledgements(16);
  for (std::uint32_t write = 0; write < 5; ++write) send(acknowledgements, write);
  acknowledgements.acknowledge(5);
  std::vector<std::uint32_t> seen;
  acknowledgements.take_acknowledged([&](std::uint32_t write) {
    seen.push_back(write);
    return write < 2;
  });
  EXPECT_EQ(seen, (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(taken(acknowledgements), (std::vector<std::uint32_t>{2, 3, 4}));
}

TEST(AcknowledgementsTest, AnEndedLinkHasNothingOutstanding) {
  Acknowledgements acknowledgements(16);
  send(acknowledgements, 0);
  acknowledgements.forget();
  EXPECT_FALSE(acknowledgements.outstanding());
  EXPECT_FALSE(acknowledgements.rest_waits());
  EXPECT_TRUE(taken(acknowledgements).empty());
}

/// Whatever the order of answers: writes are taken once, in the order in which they were sent, none
/// before an answer that stands for it, and all in the end.
class AnyOrder : public testing::TestWithParam<std::uint32_t> {};

TEST_P(AnyOrder, OfSendsAnswersAndRests) {
  std::mt19937 random(GetParam());
  const auto depth = static_cast<std::uint32_t>(1 + random() % 12);
  Acknowledgements acknowledgements(depth);
  std::vector<std::uint64_t> asked;  // the ends of answers to come
  std::uint64_t sent = 0, took = 0, answered = 0;
  const auto answer = [&] {
    const std::size_t which = random() % asked.size();
    answered = std::max(answered, asked[which]);
    acknowledgements.acknowledge(asked[which]);
    asked.erase(asked.begin() + static_cast<std::ptrdiff_t>(which));
  };
  const auto take = [&] {
    acknowledgements.take_acknowledged([&](std::uint32_t write) {
      EXPECT_EQ(write, took % 1000);
      EXPECT_LT(took, answered);
      if (random() % 4 == 0) return false;
      ++took;
      return true;
    });
  };
  for (int step = 0; step < 400; ++step) {
    switch (random() % 4) {
      case 0:
      case 1:
        if (sent - took == depth) break;
        if (const bool asks = acknowledgements.due(); true) {
          EXPECT_TRUE(asks || !asked.empty());
          EXPECT_EQ(acknowledgements.sent(static_cast<std::uint32_t>(sent % 1000), asks), sent);
          ++sent;
          if (asks) asked.push_back(sent);
        }
        break;
      case 2:
        if (!asked.empty()) answer();
        break;
      default:
        take();
    }
    EXPECT_EQ(acknowledgements.outstanding(), took != sent);
    EXPECT_EQ(acknowledgements.rest_waits(), answered < sent && asked.empty());
    if (acknowledgements.rest_waits() && random() % 2 == 0) {
      asked.push_back(acknowledgements.ask_for_rest());
      EXPECT_EQ(asked.back(), sent);
    }
  }
  if (acknowledgements.rest_waits()) asked.push_back(acknowledgements.ask_for_rest());
  while (acknowledgements.outstanding()) {
    while (!asked.empty()) answer();
    take();
    if (acknowledgements.rest_waits()) asked.push_back(acknowledgements.ask_for_rest());
  }
  EXPECT_EQ(took, sent);
}

INSTANTIATE_TEST_SUITE_P(Seeds, AnyOrder, testing::Range(0u, 200u));

}  // namespace
}  // namespace mk::fabric::ofi
