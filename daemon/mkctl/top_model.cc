#include "daemon/mkctl/top_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

TopCell text(const std::string& words) { return {printable(words), 0, false}; }
TopCell count(std::uint64_t value) {
  return {std::to_string(value), static_cast<double>(value), true, true};
}
TopCell rate(double value) { return {human_count(value), value, true}; }
TopCell bytes(double value) { return {human_bytes(value), value, true}; }
TopCell duration(std::uint64_t ns) {
  return {ns == 0 ? "-" : human_duration(ns), static_cast<double>(ns), true};
}
TopCell age(std::uint64_t ns) { return {human_age(ns), static_cast<double>(ns), true}; }

void push(History& history, double value) {
  history.push_back(value);
  if (history.size() > kHistoryMax) history.pop_front();
}

std::string link_key(const v1::Link& link) {
  return fmt::format("l{}.{}.{}", link.rail(), link.peer(), link.peer_rail());
}
std::string queue_key(const v1::Queue& queue) {
  return fmt::format("q{}.{}", queue.session_id(), queue.lane());
}
std::string job_key(const v1::Job& job) { return "j" + job.job(); }

}  // namespace

std::string_view name_of(TopView view) {
  switch (view) {
    case TopView::kLinks:
      return "links";
    case TopView::kQueues:
      return "queues";
    case TopView::kJobs:
      return "jobs";
  }
  return "";
}

const std::vector<std::string>& columns_of(TopView view) {
  static const std::vector<std::string> kLinks{"NODE",        "RAIL",    "PEER",     "STATE",
                                               "SINCE",       "BYTES/s", "WRITES/s", "BATCH",
                                               "OUTSTANDING", "STALLED", "ERRORS"};
  static const std::vector<std::string> kQueues{"NODE",     "JOB",        "RANK",    "LANE",
                                                "DEPTH",    "COMMANDS/s", "BYTES/s", "STALLS/s",
                                                "POST p99", "DONE p99"};
  static const std::vector<std::string> kJobs{"NODE",    "JOB",        "STATE",   "AGE",
                                              "RANKS",   "COMMANDS/s", "BYTES/s", "DEPTH",
                                              "PENDING", "STALLS/s",   "HELD UP"};
  return view == TopView::kLinks ? kLinks : view == TopView::kQueues ? kQueues : kJobs;
}

std::size_t first_sort_of(TopView view) {
  const auto& columns = columns_of(view);
  const char* wanted = view == TopView::kLinks ? "BYTES/s" : "COMMANDS/s";
  return static_cast<std::size_t>(std::ranges::find(columns, wanted) - columns.begin());
}

TopModel::TopModel(std::vector<std::string> hosts) {
  for (std::string& name : hosts) hosts_.push_back(Host{.name = std::move(name)});
}

void TopModel::update(Host& host, const std::string& key, double seconds, std::uint64_t commands,
                      std::uint64_t bytes_now, std::uint64_t completed, std::uint64_t stalls) {
  const auto entry = host.series.try_emplace(key);
  const bool fresh = entry.second;
  Series& series = entry.first->second;
  // What a session that ended took along makes a count fall: no rate then.
  const auto per_second = [&](std::uint64_t now, std::uint64_t before) {
    return fresh || seconds <= 0 || now < before ? 0 : static_cast<double>(now - before) / seconds;
  };
  series.rates = {per_second(commands, series.commands), per_second(bytes_now, series.bytes),
                  per_second(completed, series.completed), per_second(stalls, series.stalls)};
  series.commands = commands;
  series.bytes = bytes_now;
  series.completed = completed;
  series.stalls = stalls;
  series.seen = host.samples;
  push(series.history, key.front() == 'l' ? series.rates.bytes : series.rates.commands);
}

void TopModel::add(std::size_t index, const v1::StatsSample& sample) {
  Host& host = hosts_[index];
  const bool first = !host.answers;
  ++host.samples;
  const double seconds = first ? 0 : 1e-9 * static_cast<double>(sample.elapsed_ns());
  host.answers = true;
  host.sample = sample;
  for (const v1::Link& link : sample.links()) {
    update(host, link_key(link), seconds, link.messages(), link.bytes(), link.completed(),
           link.post_retries());
  }
  for (const v1::Queue& queue : sample.queues()) {
    update(host, queue_key(queue), seconds, queue.commands(), queue.bytes(), queue.completed(),
           queue.credit_stalls());
  }
  for (const v1::Job& job : sample.jobs()) {
    update(host, job_key(job), seconds, job.commands(), job.bytes(), job.completed(),
           job.credit_stalls());
  }
  std::erase_if(host.series, [&](const auto& one) { return one.second.seen != host.samples; });
  const Summary now = summary();
  push(bytes_, now.bytes_per_second);
  push(commands_, now.commands_per_second);
}

void TopModel::lose(std::size_t index, const std::string& reason) {
  Host& host = hosts_[index];
  host.answers = false;
  host.reason = reason;
  host.sample.Clear();
  host.series.clear();
}

std::string TopModel::host_text(const Host& host) const {
  return hosts_.size() == 1 ? std::to_string(host.sample.node())
                            : fmt::format("{} {}", host.sample.node(), host.name);
}

void TopModel::link_rows(const Host& host, std::vector<TopRow>& rows) const {
  for (const v1::Link& link : host.sample.links()) {
    const Series& series = host.series.at(link_key(link));
    const double batch = link.batches() == 0 ? 0
                                             : static_cast<double>(link.messages()) /
                                                   static_cast<double>(link.batches());
    rows.push_back({{text(host_text(host)),
                     count(link.rail()),
                     count(link.peer()),
                     text(link.state()),
                     age(link.state_for_ns()),
                     bytes(series.rates.bytes),
                     rate(series.rates.commands),
                     {fmt::format("{:.1f}", batch), batch, true},
                     count(link.outstanding()),
                     duration(link.stalled_for_ns()),
                     count(link.errors())},
                    &series.history});
  }
}

void TopModel::queue_rows(const Host& host, std::vector<TopRow>& rows) const {
  for (const v1::Queue& queue : host.sample.queues()) {
    const Series& series = host.series.at(queue_key(queue));
    rows.push_back(
        {{text(host_text(host)), text(queue.job()), count(queue.rank()), count(queue.lane()),
          count(queue.depth()), rate(series.rates.commands), bytes(series.rates.bytes),
          rate(series.rates.stalls), duration(queue.commit_to_post().p99_ns()),
          duration(queue.post_to_completion().p99_ns())},
         &series.history});
  }
}

void TopModel::job_rows(const Host& host, std::vector<TopRow>& rows) const {
  for (const v1::Job& job : host.sample.jobs()) {
    const Series& series = host.series.at(job_key(job));
    rows.push_back({{text(host_text(host)),
                     text(job.job()),
                     text(job.state()),
                     age(job.age_ns()),
                     {fmt::format("{}/{}", job.sessions(), job.local_size()),
                      static_cast<double>(job.sessions()), true, true},
                     rate(series.rates.commands),
                     bytes(series.rates.bytes),
                     count(job.depth()),
                     count(job.commands() - std::min(job.commands(), job.completed())),
                     rate(series.rates.stalls),
                     text(job.held_up())},
                    &series.history});
  }
}

std::vector<TopRow> TopModel::rows(TopView view) const {
  std::vector<TopRow> rows;
  for (const Host& host : hosts_) {
    const std::size_t first = rows.size();
    if (view == TopView::kLinks) link_rows(host, rows);
    if (view == TopView::kQueues) queue_rows(host, rows);
    if (view == TopView::kJobs) job_rows(host, rows);
    for (std::size_t i = first; i < rows.size(); ++i) {
      rows[i].node = host.sample.node();
      rows[i].host = host.name;
    }
  }
  return rows;
}

TopModel::Summary TopModel::summary() const {
  Summary all;
  std::map<std::string, int> jobs;
  for (const Host& host : hosts_) {
    ++all.hosts;
    if (!host.answers) {
      all.troubles.push_back(fmt::format("{}: {}", host.name, host.reason));
      continue;
    }
    ++all.answering;
    all.sessions += host.sample.sessions();
    for (const v1::Job& job : host.sample.jobs()) ++jobs[job.job()];
    for (const v1::Link& link : host.sample.links()) {
      ++all.links;
      all.links_up += link.state() == "up" ? 1 : 0;
      all.bytes_per_second += host.series.at(link_key(link)).rates.bytes;
      if (link.state() != "error") continue;
      all.troubles.push_back(fmt::format("node {}: the link of rail {} to node {} is in error: {}",
                                         host.sample.node(), link.rail(), link.peer(),
                                         link.reason()));
    }
    for (const v1::Queue& queue : host.sample.queues()) {
      all.commands_per_second += host.series.at(queue_key(queue)).rates.commands;
    }
    for (const v1::PeerStatus& peer : host.sample.peers()) {
      if (peer.state() == v1::PeerStatus::STATE_UP) continue;
      all.troubles.push_back(
          fmt::format("node {}: node {} is not connected", host.sample.node(), peer.node()));
    }
    if (host.sample.draining()) {
      all.troubles.push_back(fmt::format("node {} is drained", host.sample.node()));
    }
  }
  all.jobs = static_cast<std::uint32_t>(jobs.size());
  return all;
}

Json TopModel::json() const {
  const Summary all = summary();
  Json out = {{"hosts", all.hosts},
              {"answering", all.answering},
              {"sessions", all.sessions},
              {"bytes_per_second", all.bytes_per_second},
              {"commands_per_second", all.commands_per_second},
              {"troubles", all.troubles}};
  for (const TopView view : {TopView::kLinks, TopView::kQueues, TopView::kJobs}) {
    Json list = Json::array();
    for (const TopRow& row : rows(view)) {
      Json one = {{"node", row.node}, {"host", row.host}};
      for (std::size_t i = 1; i < row.cells.size(); ++i) {
        std::string name = columns_of(view)[i];
        for (char& c : name) c = c == ' ' ? '_' : static_cast<char>(std::tolower(c));
        if (const auto slash = name.find("/s"); slash != name.npos) {
          name.replace(slash, 2, "_per_second");
        }
        const TopCell& cell = row.cells[i];
        one[name] = cell.whole    ? Json(static_cast<std::uint64_t>(cell.value))
                    : cell.number ? Json(cell.value)
                                  : Json(cell.text);
      }
      list.push_back(std::move(one));
    }
    out[std::string(name_of(view))] = std::move(list);
  }
  return out;
}

}  // namespace mk::mkctl
