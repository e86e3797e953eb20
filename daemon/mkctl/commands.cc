#include "daemon/mkctl/commands.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "daemon/config/units.h"

namespace mk::mkctl {
namespace {

CLI::Validator valid_duration() {
  return CLI::Validator(
      [](std::string& text) {
        const auto parsed = daemon::parse_duration_ns(text);
        return parsed ? std::string() : parsed.error().message;
      },
      "TIME");
}

/// The first line of the help of a group of commands.
constexpr std::pair<std::string_view, std::string_view> kGroups[] = {
    {"session", "Ranks that are attached, and those that failed"},
    {"job", "Jobs with a rank here: list, show, end, share the network"},
    {"queue", "Command rings of the ranks"},
    {"link", "Links to other nodes"},
    {"config", "The daemon's configuration"},
    {"trace", "Recordings of what the proxies do"}};

/// One or two lines of each command that people may type as they are.
constexpr std::pair<std::string_view, std::string_view> kExamples[] = {
    {"status", "mkctl status\n  mkctl --hosts node1,node2 status"},
    {"version", "mkctl --hosts @nodes version"},
    {"session list", "mkctl session list"},
    {"job list", "mkctl job list\n  mkctl --json job list"},
    {"job show", "mkctl job show train"},
    {"job terminate", "mkctl job terminate train --reason 'the node is needed'"},
    {"job set", "mkctl job set train --weight 4 --rate 2GB/s\n  mkctl job set train --reset"},
    {"queue list", "mkctl queue list"},
    {"link list", "mkctl link list"},
    {"link show", "mkctl link show 3 --rail 0"},
    {"config show", "mkctl config show"},
    {"config diff", "mkctl config diff\n  mkctl config diff new.toml"},
    {"trace record", "mkctl trace record --seconds 2 -o trace.json"},
    {"drain", "mkctl drain --timeout 600s && systemctl restart mkerneld"},
    {"ready", "mkctl ready || echo 'takes no jobs'"},
    {"resume", "mkctl resume"},
    {"stats", "mkctl stats --interval 5s --count 12"},
    {"metrics", "mkctl metrics | grep mkernel_link_"},
    {"topology", "mkctl topology"},
    {"doctor", "mkctl doctor\n  mkctl doctor --config new.toml"},
    {"who-is-slow", "mkctl who-is-slow\n  mkctl --hosts node1,node2 who-is-slow --interval 10s"},
    {"bundle", "mkctl bundle -o support.tar.gz"},
    {"top", "mkctl --hosts node1,node2 top\n  mkctl --json top --count 10"},
    {"completion", "mkctl completion bash > /etc/bash_completion.d/mkctl"},
    {"schema", "mkctl schema > mkctl.schema.json"}};

template <std::size_t count>
std::string entry_of(const std::pair<std::string_view, std::string_view> (&table)[count],
                     std::string_view name) {
  for (const auto& [key, text] : table) {
    if (key == name) return std::string(text);
  }
  return {};
}

}  // namespace

Flag& Flag::required() {
  option_.required();
  return *this;
}

Flag& Flag::with_default() {
  option_.capture_default_str();
  return *this;
}

Flag& Flag::not_negative() {
  // CLI::NonNegativeNumber names the limit of double, with 309 digits.
  option_.check(CLI::Validator(
      [](std::string& text) {
        return std::strtod(text.c_str(), nullptr) >= 0 ? std::string{}
                                                       : std::string{"must be at least 0"};
      },
      "NONNEGATIVE"));
  return *this;
}

Flag& Flag::between(int least, int most) {
  option_.check(CLI::Range(least, most));
  return *this;
}

Flag& Flag::between(double least, double most) {
  option_.check(CLI::Range(least, most));
  return *this;
}

Flag& Flag::one_of(const std::vector<std::string>& words) {
  option_.check(CLI::IsMember(words));
  return *this;
}

Flag Command::option(const std::string& name, std::string& value, const std::string& help) {
  return Flag(*app_.add_option(name, value, help));
}

Flag Command::option(const std::string& name, double& value, const std::string& help) {
  return Flag(*app_.add_option(name, value, help));
}

Flag Command::option(const std::string& name, std::int64_t& value, const std::string& help) {
  return Flag(*app_.add_option(name, value, help));
}

Flag Command::option(const std::string& name, std::uint32_t& value, const std::string& help) {
  return Flag(*app_.add_option(name, value, help));
}

Flag Command::option(const std::string& name, Duration& value, const std::string& help) {
  return Flag(*app_.add_option(name, value.text, help)->check(valid_duration()));
}

Flag Command::flag(const std::string& name, bool& value, const std::string& help) {
  return Flag(*app_.add_flag(name, value, help));
}

Command Commands::place(const std::string& name, const std::string& summary) {
  const std::size_t space = name.find(' ');
  CLI::App* parent = &app_;
  if (space != name.npos) {
    const std::string group = name.substr(0, space);
    const auto there =
        app_.get_subcommands([&group](const CLI::App* app) { return app->get_name() == group; });
    parent = there.empty() ? nullptr : there.front();
    if (parent == nullptr) {
      parent = app_.add_subcommand(group, entry_of(kGroups, group));
      parent->footer(std::string(kExitStatuses));
      parent->require_subcommand(1);
      parent->fallthrough();
    }
  }
  CLI::App* command =
      parent->add_subcommand(space == name.npos ? name : name.substr(space + 1), summary);
  command->fallthrough();  // flags may follow the command
  command->footer(fmt::format("Example:\n  {}\n\n{}", entry_of(kExamples, name), kExitStatuses));
  apps_.push_back(command);
  return Command(*command);
}

Command Commands::add(const std::string& name, const std::string& summary, Run run) {
  commands_.push_back({name, std::move(run), nullptr});
  return place(name, summary);
}

Command Commands::add_offline(const std::string& name, const std::string& summary,
                              std::function<int()> run) {
  commands_.push_back({name, nullptr, std::move(run)});
  return place(name, summary);
}

const Commands::Chosen* Commands::chosen() const {
  for (std::size_t i = 0; i < apps_.size(); ++i) {
    if (apps_[i]->parsed()) return &commands_[i];
  }
  return nullptr;
}

std::string Commands::given(const std::string& flag) const {
  const CLI::Option* option = app_.get_option(flag);
  return option->empty() ? std::string() : option->as<std::string>();
}

std::chrono::nanoseconds Duration::value() const {
  return std::chrono::nanoseconds(
      static_cast<std::int64_t>(daemon::parse_duration_ns(text).value_or(0)));
}

}  // namespace mk::mkctl
