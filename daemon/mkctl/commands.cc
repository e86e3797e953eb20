#include "daemon/mkctl/commands.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string>

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
      parent = app_.add_subcommand(group, "About " + group + "s");
      parent->require_subcommand(1);
      parent->fallthrough();
    }
  }
  CLI::App* command =
      parent->add_subcommand(space == name.npos ? name : name.substr(space + 1), summary);
  command->fallthrough();  // flags may follow the command
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
