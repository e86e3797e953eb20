#include "daemon/mkctl/fleet.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include "daemon/mkctl/table.h"
#include "shm/files/standard_output.h"

namespace mk::mkctl {

Fleet::Fleet(std::vector<Target> targets, std::string command, bool json)
    : command_(std::move(command)), json_(json) {
  for (Target& target : targets) daemons_.push_back(std::make_unique<Daemon>(std::move(target)));
}

std::vector<Answer> Fleet::collect(const std::function<Answer(Daemon&)>& ask) {
  std::vector<Answer> answers(daemons_.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i; (i = next++) < daemons_.size();) answers[i] = ask(*daemons_[i]);
  };
  std::vector<std::thread> helpers;
  for (std::size_t i = 1; i < std::min(kParallelMax, daemons_.size()); ++i) {
    helpers.emplace_back(work);
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return answers;
}

int Fleet::print(const Answer& answer) const {
  if (!answer.error.empty()) fmt::print(stderr, "mkctl: {}\n", printable(answer.error));
  if (json_ && !answer.json.is_null()) print_out("{}\n", text_of(envelope(answer.json), 2));
  if (!json_) print_out(answer.text);
  return answer.code;
}

int Fleet::each(const std::function<Answer(Daemon&)>& ask) {
  const std::vector<Answer> answers = collect(ask);
  if (!several()) return print(answers.front());
  int code = kExitOk;
  Json hosts = Json::array();
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const Answer& answer = answers[i];
    const std::string& name = daemons_[i]->name();
    code = std::max(code, answer.code);
    if (json_) {
      hosts.push_back({{"host", name},
                       {"exit_status", answer.code},
                       {"error", answer.error},
                       {"answer", answer.json}});
      continue;
    }
    print_out("{}== {} ==\n{}", i == 0 ? "" : "\n", printable(name), answer.text);
    if (answer.error.empty()) continue;
    flush_output();
    fmt::print(stderr, "mkctl: {}: {}\n", printable(name), printable(answer.error));
  }
  if (json_) print_out("{}\n", text_of(envelope({{"hosts", hosts}}), 2));
  return code;
}

}  // namespace mk::mkctl
