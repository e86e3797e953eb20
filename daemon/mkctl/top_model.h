/// \file
/// What `mkctl top` shows, without a terminal: samples of several daemons become tables with rates.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "daemon/mkctl/json.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::mkctl {

namespace v1 = ::mkernel::v1;

/// The last values of a rate, oldest first.
using History = std::deque<double>;
inline constexpr std::size_t kHistoryMax = 512;

struct TopCell {
  std::string text;
  double value = 0;     ///< to sort by, when `number`
  bool number = false;  ///< right-aligned
  bool whole = false;   ///< an integer: a count or an id
};

struct TopRow {
  std::vector<TopCell> cells;        ///< the first: its node, for people
  const History* history = nullptr;  ///< of the view's leading rate; lives until the next `add`
  std::uint32_t node = 0;
  std::string host{};  ///< as it was named
};

enum class TopView { kLinks, kQueues, kJobs };
inline constexpr int kTopViews = 3;
std::string_view name_of(TopView view);

/// The columns of a view; the sparkline comes after them.
const std::vector<std::string>& columns_of(TopView view);
/// The column that a view is sorted by at first, greatest first.
std::size_t first_sort_of(TopView view);

class TopModel {
 public:
  /// `hosts`: names of the daemons; with several, rows say whose they are.
  explicit TopModel(std::vector<std::string> hosts);

  /// The newest sample of a daemon.
  void add(std::size_t host, const v1::StatsSample& sample);
  /// A daemon does not answer: its rows go, and the reason is shown.
  void lose(std::size_t host, const std::string& reason);

  std::vector<TopRow> rows(TopView view) const;

  struct Summary {
    std::size_t hosts = 0, answering = 0;
    std::uint32_t sessions = 0, jobs = 0, links = 0, links_up = 0;
    double bytes_per_second = 0, commands_per_second = 0;
    std::vector<std::string>
        troubles;  ///< daemons that do not answer, links and peers that are down
  };
  Summary summary() const;
  const History& bytes_history() const { return bytes_; }
  const History& commands_history() const { return commands_; }

  /// The same for scripts: "links", "queues", "jobs", by the columns' names.
  Json json() const;

 private:
  struct Rates {
    double commands = 0, bytes = 0, completed = 0, stalls = 0;
  };
  struct Series {
    std::uint64_t commands = 0, bytes = 0, completed = 0, stalls = 0;  ///< of the last sample
    Rates rates;
    History history;
    std::uint64_t seen = 0;  ///< number of the sample that last had it
  };
  struct Host {
    std::string name;
    bool answers = false;
    std::string reason = "connecting";
    v1::StatsSample sample;
    std::map<std::string, Series> series;  ///< by what the row is of
    std::uint64_t samples = 0;
  };

  void update(Host& host, const std::string& key, double seconds, std::uint64_t commands,
              std::uint64_t bytes, std::uint64_t completed, std::uint64_t stalls);
  void link_rows(const Host& host, std::vector<TopRow>& rows) const;
  void queue_rows(const Host& host, std::vector<TopRow>& rows) const;
  void job_rows(const Host& host, std::vector<TopRow>& rows) const;
  std::string host_text(const Host& host) const;

  std::vector<Host> hosts_;
  History bytes_, commands_;
};

}  // namespace mk::mkctl
