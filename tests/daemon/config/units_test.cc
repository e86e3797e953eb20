// Quantities and addresses: what people write, and that printing is the inverse of parsing.
#include "daemon/config/units.h"

#include <gtest/gtest.h>

#include <random>

#include "daemon/config/address.h"

namespace mk::daemon {
namespace {

TEST(Units, DurationsThatPeopleWrite) {
  EXPECT_EQ(*parse_duration_ns("5us"), 5'000u);
  EXPECT_EQ(*parse_duration_ns("5 us"), 5'000u);
  EXPECT_EQ(*parse_duration_ns("1.5ms"), 1'500'000u);
  EXPECT_EQ(*parse_duration_ns("0"), 0u);
  EXPECT_EQ(*parse_duration_ns("0.4ns"), 0u);
  EXPECT_EQ(*parse_duration_ns("86400s"), 86'400'000'000'000u);
}

TEST(Units, DurationsThatAreRefused) {
  for (const char* text : {"", "5", "us", "-1us", "5 minutes", "5us5", "nan s", "inf s", "1e99s",
                           "86401s", "0x10us", "-0"}) {
    const auto result = parse_duration_ns(text);
    ASSERT_FALSE(result) << text;
    EXPECT_NE(result.error().message.find("ns, us, ms or s"), std::string::npos);
  }
}

TEST(Units, Bandwidths) {
  EXPECT_EQ(*parse_bandwidth("2GB/s"), 2e9);
  EXPECT_EQ(*parse_bandwidth("400Gbit/s"), 50e9);
  EXPECT_EQ(*parse_bandwidth("0.5 MB/s"), 5e5);
  EXPECT_EQ(*parse_bandwidth("unlimited"), 0);
  EXPECT_EQ(*parse_bandwidth("0"), 0);
  for (const char* text : {"", "2", "2GB", "2 gb/s", "-2GB/s", "fast", "1e300GB/s"}) {
    EXPECT_FALSE(parse_bandwidth(text)) << text;
  }
}

TEST(Units, Sizes) {
  EXPECT_EQ(*parse_size_bytes("16GiB"), 16ull << 30);
  EXPECT_EQ(*parse_size_bytes("64KB"), 64'000u);
  EXPECT_EQ(*parse_size_bytes("unlimited"), 0u);
  for (const char* text : {"", "16", "16G", "-1B", "2048TiB"}) {
    EXPECT_FALSE(parse_size_bytes(text)) << text;
  }
}

TEST(Units, PrintingIsTheInverseOfParsing) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t value = random() >> (24 + random() % 40);
    if (value <= 86'400'000'000'000) {
      EXPECT_EQ(*parse_duration_ns(format_duration(value)), value) << format_duration(value);
    }
    EXPECT_EQ(*parse_size_bytes(format_size(value)), value) << format_size(value);
    const auto bandwidth = static_cast<double>(value);
    EXPECT_EQ(*parse_bandwidth(format_bandwidth(bandwidth)), bandwidth);
  }
  EXPECT_EQ(format_duration(2'500'000), "2500us");
  EXPECT_EQ(format_size(3u << 20), "3MiB");
  EXPECT_EQ(format_bandwidth(50e9), "50GB/s");
}

TEST(AddressText, ParsesAndPrints) {
  for (const char* text : {"127.0.0.1:7171", "localhost:1", "[::1]:65535", "node1.cluster:80",
                           "unix:/run/x.sock", "0.0.0.0:7171"}) {
    const auto address = parse_address(text, false);
    ASSERT_TRUE(address) << text << ": " << address.error().message;
    EXPECT_EQ(address->text(), text);
  }
  EXPECT_EQ(parse_address("unix:///run/x", false)->text(), "unix:/run/x");
  EXPECT_EQ(parse_address("127.0.0.1:0", true)->port, 0);
}

TEST(AddressText, KnowsWhatStaysOnThisMachine) {
  for (const char* text : {"127.0.0.1:1", "127.3.2.1:1", "localhost:1", "[::1]:1", "unix:/x"}) {
    EXPECT_TRUE(parse_address(text, false)->local()) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example:1",
                           "127.example:1", "127.0.0.1.example:1", "127.0.0.256:1"}) {
    EXPECT_FALSE(parse_address(text, false)->local()) << text;
  }
}

TEST(AddressText, RefusesWhatIsNone) {
  for (const std::string text :
       {"", ":", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:80x", "a b:80",
        "::1:80", "[::1]", "http://host:80", "unix:relative", "unix:"}) {
    EXPECT_FALSE(parse_address(text, false)) << text;
  }
  EXPECT_FALSE(parse_address("unix:/" + std::string(107, 'x'), false));
  EXPECT_TRUE(parse_address("unix:/" + std::string(106, 'x'), false));
}

}  // namespace
}  // namespace mk::daemon
