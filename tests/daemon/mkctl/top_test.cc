// What `mkctl top` shows, and what its keys change; without a terminal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/mkctl/terminal.h"
#include "daemon/mkctl/top_screen.h"

namespace mk::mkctl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

int width(const std::string& text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

/// Links to `peers` peers, of which peer p has sent `second` times p MB.
v1::StatsSample sample(std::uint64_t second, std::uint32_t peers = 3, std::uint64_t elapsed_s = 1) {
  v1::StatsSample out;
  out.set_unix_time_ns((second + 1) * 1'000'000'000);
  out.set_elapsed_ns(second == 0 ? 0 : elapsed_s * 1'000'000'000);
  out.set_node(7);
  out.set_sessions(2);
  for (std::uint32_t p = 1; p <= peers; ++p) {
    v1::Link& link = *out.add_links();
    link.set_peer(p);
    link.set_state(p == 2 ? "error" : "up");
    link.set_bytes(second * p * 1'000'000);
    link.set_messages(second * p);
    link.set_batches(second);
  }
  v1::Queue& queue = *out.add_queues();
  queue.set_job("train");
  queue.set_commands(second * 500);
  v1::Job& job = *out.add_jobs();
  job.set_job("train");
  job.set_state("up");
  job.set_commands(second * 500);
  return out;
}

TopModel model_after(std::uint64_t seconds, std::uint32_t peers = 3) {
  TopModel model({"a"});
  for (std::uint64_t s = 0; s <= seconds; ++s) model.add(0, sample(s, peers));
  return model;
}

std::string all(TopScreen& screen, const TopModel& model, ScreenSize size = {30, 160}) {
  std::string text;
  for (const std::string& line : screen.lines(model, size)) text += line + "\n";
  return text;
}
void type(TopScreen& screen, const std::string& keys) {
  for (const char key : keys) EXPECT_TRUE(screen.press(key));
}

TEST(TopModel, RatesComeFromTwoSamples) {
  TopModel model({"a"});
  model.add(0, sample(0));
  EXPECT_EQ(model.summary().bytes_per_second, 0);
  model.add(0, sample(1));
  EXPECT_EQ(model.summary().bytes_per_second, 6e6);
  EXPECT_EQ(model.summary().commands_per_second, 500);
  EXPECT_EQ(model.summary().links, 3u);
  EXPECT_EQ(model.summary().links_up, 2u);
  EXPECT_THAT(model.summary().troubles, ElementsAre(HasSubstr("to node 2 is in error")));
  model.add(0, sample(3, 3, 2));  // one sample was left out: still a rate per second
  EXPECT_EQ(model.summary().bytes_per_second, 6e6);
}

TEST(TopModel, WhatRestartsFromZeroHasNoRate) {
  TopModel model = model_after(5);
  model.add(0, sample(1));
  EXPECT_EQ(model.summary().bytes_per_second, 0);
}

TEST(TopModel, ADaemonThatIsGoneTakesItsRowsAlong) {
  TopModel model({"a", "b"});
  model.add(0, sample(0));
  model.add(1, sample(0));
  EXPECT_EQ(model.rows(TopView::kLinks).size(), 6u);
  model.lose(1, "no answer");
  EXPECT_EQ(model.rows(TopView::kLinks).size(), 3u);
  EXPECT_EQ(model.summary().answering, 1u);
  EXPECT_THAT(model.summary().troubles, testing::Contains("b: no answer"));
  model.add(1, sample(9));  // back, and no rate from before
  EXPECT_EQ(model.summary().bytes_per_second, 0);
}

TEST(TopModel, IsJsonToo) {
  const Json json = model_after(2).json();
  EXPECT_EQ(json["links"].size(), 3u);
  // Ids and counts are integers, rates are not.
  for (const char* key : {"node", "rail", "peer", "outstanding", "errors"}) {
    EXPECT_TRUE(json["links"][0][key].is_number_integer()) << key << ": " << json["links"][0][key];
  }
  EXPECT_EQ(json["links"][0]["node"], 7);
  EXPECT_TRUE(json["links"][0]["host"].is_string());
  EXPECT_TRUE(json["links"][0]["bytes_per_second"].is_number_float());
  EXPECT_EQ(json["links"][2]["bytes_per_second"], 3e6);
  EXPECT_EQ(json["links"][1]["state"], "error");
  EXPECT_EQ(json["queues"][0]["commands_per_second"], 500);
  EXPECT_EQ(json["jobs"][0]["job"], "train");
}

TEST(TopScreen, ShowsTheBusiestFirstAndTurnsRound) {
  TopScreen screen;
  const TopModel model = model_after(3);
  std::string text = all(screen, model);
  EXPECT_THAT(text, HasSubstr("[1] links"));
  EXPECT_LT(text.find("3.00 MB"), text.find("2.00 MB"));
  EXPECT_LT(text.find("2.00 MB"), text.find("1.00 MB"));
  type(screen, "r");
  text = all(screen, model);
  EXPECT_GT(text.find("3.00 MB"), text.find("2.00 MB"));
}

TEST(TopScreen, SortsByTheColumnThatIsMarked) {
  TopScreen screen;
  const TopModel model = model_after(3);
  for (std::size_t i = 0; i < columns_of(TopView::kLinks).size(); ++i) {
    const std::size_t column =
        (first_sort_of(TopView::kLinks) + i) % columns_of(TopView::kLinks).size();
    EXPECT_THAT(all(screen, model), HasSubstr("v" + columns_of(TopView::kLinks)[column]));
    type(screen, "s");
  }
  type(screen, "S");
  type(screen, "s");
  EXPECT_THAT(all(screen, model), HasSubstr("vBYTES/s"));
}

TEST(TopScreen, ChangesTheView) {
  TopScreen screen;
  const TopModel model = model_after(3);
  type(screen, "2");
  EXPECT_THAT(all(screen, model), HasSubstr("[2] queues"));
  EXPECT_THAT(all(screen, model), HasSubstr("LANE"));
  type(screen, "\t");
  EXPECT_THAT(all(screen, model), HasSubstr("[3] jobs"));
  EXPECT_THAT(all(screen, model), HasSubstr("train"));
  type(screen, "\t");
  EXPECT_THAT(all(screen, model), HasSubstr("[1] links"));
}

TEST(TopScreen, FiltersWhatIsTyped) {
  TopScreen screen;
  const TopModel model = model_after(3);
  type(screen, "/ERR");
  EXPECT_THAT(all(screen, model), HasSubstr("/ERR_"));
  EXPECT_THAT(all(screen, model), Not(HasSubstr("3.00 MB")));
  EXPECT_THAT(all(screen, model), HasSubstr("2.00 MB"));
  type(screen, "q");  // a letter here, not the end
  EXPECT_THAT(all(screen, model), HasSubstr("no links with \"ERRq\""));
  type(screen, "\x7f\r");
  EXPECT_THAT(all(screen, model), HasSubstr("2.00 MB"));
  EXPECT_TRUE(screen.press(kKeyEscape));
  EXPECT_THAT(all(screen, model), HasSubstr("3.00 MB"));
  EXPECT_FALSE(screen.press('q'));
}

TEST(TopScreen, ScrollsThroughAllRowsAndNoFurther) {
  TopScreen screen;
  const TopModel model = model_after(1, 50);
  const ScreenSize size{16, 100};
  std::set<std::string> seen;
  const auto look = [&] {
    for (const std::string& line : screen.lines(model, size)) seen.insert(line);
  };
  look();
  for (int i = 0; i < 100; ++i) {
    screen.press(kKeyDown);
    look();
  }
  const auto last = screen.lines(model, size);
  screen.press(kKeyPageDown);
  EXPECT_EQ(screen.lines(model, size), last);
  for (int p = 1; p <= 50; ++p) {
    const std::string peer = "  " + std::to_string(p) + "  ";
    EXPECT_TRUE(std::ranges::any_of(seen, [&](const auto& line) {
      return line.starts_with(" 7") && line.find(peer) != line.npos;
    })) << p;
  }
  for (int i = 0; i < 20; ++i) screen.press(kKeyPageUp);
  EXPECT_THAT(all(screen, model, size), HasSubstr("50.0 MB"));
}

/// Any size, any keys: never a line too many or too wide.
TEST(TopScreen, FitsEverySize) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const TopModel model = model_after(300, 40);
  TopScreen screen;
  const int keys[] = {'1',    '2',      '3',        '\t',         's',       'S', 'r',
                      '/',    'a',      '\r',       'p',          '?',       'j', 'k',
                      kKeyUp, kKeyDown, kKeyPageUp, kKeyPageDown, kKeyEscape};
  for (int i = 0; i < 500; ++i) {
    screen.press(keys[random() % std::size(keys)]);
    const ScreenSize size{static_cast<int>(random() % 60), static_cast<int>(random() % 250)};
    const auto lines = screen.lines(model, size);
    ASSERT_LE(lines.size(), static_cast<std::size_t>(size.rows)) << "seed " << seed;
    for (const std::string& line : lines) ASSERT_LE(width(line), size.columns) << "seed " << seed;
  }
}

TEST(Sparkline, IsScaledToItsGreatest) {
  EXPECT_EQ(sparkline({}, 4), "    ");
  EXPECT_EQ(sparkline({0, 1, 4, 8}, 4), " \xe2\x96\x81\xe2\x96\x84\xe2\x96\x88");
  EXPECT_EQ(sparkline({8, 4}, 4), "  \xe2\x96\x88\xe2\x96\x84");
  EXPECT_EQ(sparkline({1000, 0, 0.001}, 2), " \xe2\x96\x88");  // the newest ones
  EXPECT_EQ(sparkline({1, 2, 3}, 0), "");
}

TEST(Fit, CutsAndPadsCharactersNotBytes) {
  EXPECT_EQ(fit("abc", 5), "abc  ");
  EXPECT_EQ(fit("abc", 5, true), "  abc");
  EXPECT_EQ(fit("\xc3\xa9\xc3\xa9\xc3\xa9", 2), "\xc3\xa9\xc3\xa9");
  EXPECT_EQ(fit("abc", 0), "");
}

TEST(Keys, OfATerminal) {
  const auto keys = [](std::string bytes, bool end) { return parse_keys(bytes, end); };
  EXPECT_THAT(keys("a\x1b[A\x1b[6~q", false), ElementsAre('a', kKeyUp, kKeyPageDown, 'q'));
  EXPECT_THAT(keys("\x1bOB", false), ElementsAre(kKeyDown));
  EXPECT_THAT(keys("\x1b", false), ElementsAre());
  EXPECT_THAT(keys("\x1b", true), ElementsAre(kKeyEscape));
  EXPECT_THAT(keys("\x1b[1;5Cx", false), ElementsAre('x'));  // no key of ours
  EXPECT_THAT(keys("\x1bx", false), ElementsAre(kKeyEscape, 'x'));
  std::string rest = "\x1b[";
  EXPECT_THAT(parse_keys(rest, false), ElementsAre());
  rest += "B";
  EXPECT_THAT(parse_keys(rest, false), ElementsAre(kKeyDown));
  EXPECT_EQ(rest, "");
}

}  // namespace
}  // namespace mk::mkctl
