#include "daemon/mkctl/commands.h"

#include "daemon/config/units.h"

namespace mk::mkctl {

CLI::App& Commands::place(const std::string& name, const std::string& summary) {
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
  return *command;
}

CLI::App& Commands::add(const std::string& name, const std::string& summary, Run run) {
  commands_.push_back({name, std::move(run), nullptr});
  return place(name, summary);
}

CLI::App& Commands::add_offline(const std::string& name, const std::string& summary,
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

std::chrono::nanoseconds Duration::value() const {
  return std::chrono::nanoseconds(
      static_cast<std::int64_t>(daemon::parse_duration_ns(text).value_or(0)));
}

CLI::Validator Duration::valid() {
  return CLI::Validator(
      [](std::string& text) {
        const auto parsed = daemon::parse_duration_ns(text);
        return parsed ? std::string() : parsed.error().message;
      },
      "TIME");
}

}  // namespace mk::mkctl
