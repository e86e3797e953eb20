// Nothing secret is left, and nothing else is touched.
#include "daemon/config/secrets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/config/config.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Secrets, NamedValuesGoInEveryNotation) {
  const std::pair<const char*, const char*> cases[] = {
      {"job_secret = \"hunter2\"\n", "job_secret = \"(secret)\"\n"},
      {"password='hunter2'", "password='(secret)'"},
      {"token: hunter2, next: 1", "token: (secret), next: 1"},
      {"{\"api-token\": \"hun\\\"ter2\", \"b\": 1}", "{\"api-token\": \"(secret)\", \"b\": 1}"},
      {"PASSWORD=hunter2 mkerneld", "PASSWORD=(secret) mkerneld"},
      {"secret = \"\"\"\nhunter2\n\"\"\"\nx = 1", "secret = \"(secret)\"\nx = 1"},
      {"password = \"hunter2", "password = \"(secret)\""},
      {"etcd = \"https://root:hunter2@node:2379/x\"",
       "etcd = \"https://root:(secret)@node:2379/x\""},
      {"-----BEGIN EC PRIVATE KEY-----\nhunter2\n-----END EC PRIVATE KEY-----\nx", "(secret)\nx"},
      {"a -----BEGIN PRIVATE KEY-----\nhunter2", "a (secret)"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(without_secrets(text), expected);
}

TEST(Secrets, WhatIsNoneStays) {
  for (const char* text : {
           "secret = \"\"",
           "secret_file = \"/etc/mkernel/secret\"",
           "secret = \"/etc/mkernel/secret\"",
           "key = \"/etc/mkernel/key.pem\"",
           "the secret is out",
           "secrets = 3",
           "token",
           "token =",
           "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----",
           "listen = \"unix:/run/x\" # http://node:80/a@b",
           "",
       }) {
    EXPECT_EQ(without_secrets(text), text);
  }
}

TEST(Secrets, TheConfigurationStaysWhatItIs) {
  const std::string text = print_config(Config{});
  EXPECT_EQ(without_secrets(text), text);
}

/// Between whatever text, in whatever place: the word does not come out.
TEST(Secrets, SurroundingsDoNotMatter) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const std::string_view pieces[] = {"a",  "=",    "\n", "\"",          "'",     " ",
                                     "{",  "}",    ",",  "secret",      "-----", "://",
                                     "\\", "path", ":",  "-----BEGIN ", "user:", "@"};
  for (int round = 0; round < 20'000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i) text += pieces[random() % std::size(pieces)];
    const std::string whole = text + "\npassword = \"hunter2\"\n" + text;
    EXPECT_THAT(without_secrets(whole), Not(HasSubstr("hunter2"))) << whole << "\nseed " << seed;
  }
}

}  // namespace
}  // namespace mk::daemon
