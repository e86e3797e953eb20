// mkctl as a program, against a real mkerneld.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/service/raw_client.h"

namespace mk::daemon {

struct Answer {
  int code;
  std::string out, err;
};

class Mkctl : public testing::Test {
 protected:
  Answer run(std::vector<std::string> arguments,
             const std::vector<std::string>& environment = {"MKCTL_ADDRESS", "MKERNELD_CONFIG"}) {
    arguments.insert(arguments.begin(), MK_MKCTL);
    Program program(folder, arguments, environment);
    const int code = program.wait();
    return {code, program.out(), program.err()};
  }
  Answer ask(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--address", address, "--timeout", "30s"});
    return run(std::move(arguments));
  }
  nlohmann::json ask_json(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const Answer answer = ask(std::move(arguments));
    EXPECT_EQ(answer.code, 0) << answer.err;
    return nlohmann::json::parse(answer.out, nullptr, false);
  }
  TempFolder folder;
  const std::string address = "unix:" + (folder / "peer");
};

class WithDaemon : public Mkctl {
 protected:
  void start(std::vector<std::string> more = {}) {
    std::vector<std::string> command{MK_MKERNELD, "--listen",      address,
                                     "--socket",  folder / "sock", "--fabric",
                                     "null",      "--ready-file",  folder / "ready"};
    command.insert(command.end(), more.begin(), more.end());
    daemon = std::make_unique<Program>(folder, command);
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(folder / "ready"); }))
        << daemon->err();
  }
  std::unique_ptr<Program> daemon;
};

}  // namespace mk::daemon
