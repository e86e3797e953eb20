#include "daemon/mkctl/top_screen.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

constexpr int kSparklineMin = 8;
constexpr int kSummaryColumn = 44;
constexpr std::size_t kFilterMax = 64;
constexpr std::size_t kTroublesMax = 3;

constexpr const char* kHelp[] = {
    "1 2 3, Tab  links, queues, jobs",
    "s, S        sort by the next, the previous column",
    "r           turn the order round",
    "/           show only rows with these words (Enter: done, Esc: all)",
    "up, down    scroll; also j, k, page up, page down",
    "p           pause",
    "q           quit",
};

bool continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

int width_of(const std::string& text) {
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), [](char c) { return !continuation(c); }));
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

std::string fit(const std::string& text, int width, bool right) {
  if (width <= 0) return "";
  const int has = width_of(text);
  const auto pad = static_cast<std::size_t>(std::max(0, width - has));
  if (has <= width) return right ? std::string(pad, ' ') + text : text + std::string(pad, ' ');
  std::string out;
  int shown = 0;
  for (const char c : text) {
    if (!continuation(c) && ++shown > width) break;
    out += c;
  }
  return out;
}

std::string sparkline(const History& history, int width) {
  static constexpr std::array<const char*, 9> kBars{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const auto cells = static_cast<std::size_t>(std::max(0, width));
  const std::size_t shown = std::min(cells, history.size());
  double most = 0;
  for (std::size_t i = history.size() - shown; i < history.size(); ++i) {
    most = std::max(most, history[i]);
  }
  std::string out(cells - shown, ' ');
  for (std::size_t i = history.size() - shown; i < history.size(); ++i) {
    // Whatever is not nothing can be seen.
    const double share = most > 0 ? history[i] / most : 0;
    const long level = share <= 0 ? 0 : std::clamp(std::lround(share * 8), 1L, 8L);
    out += kBars[static_cast<std::size_t>(level)];
  }
  return out;
}

bool TopScreen::press(int key) {
  if (typing_) {
    if (key == kKeyEnter || key == '\n') {
      typing_ = false;
    } else if (key == kKeyEscape) {
      typing_ = false;
      filter_.clear();
    } else if (key == kKeyBackspace || key == '\b') {
      if (!filter_.empty()) filter_.pop_back();
    } else if (key >= 0x20 && key < 0x7f && filter_.size() < kFilterMax) {
      filter_ += static_cast<char>(key);
    }
    scroll_ = 0;
    return true;
  }
  std::size_t& sort = sort_[static_cast<int>(view_)];
  const std::size_t columns = columns_of(view_).size();
  switch (key) {
    case 'q':
      return false;
    case '1':
    case '2':
    case '3':
      view_ = static_cast<TopView>(key - '1');
      scroll_ = 0;
      break;
    case '\t':
      view_ = static_cast<TopView>((static_cast<int>(view_) + 1) % kTopViews);
      scroll_ = 0;
      break;
    case 's':
      sort = (sort + 1) % columns;
      break;
    case 'S':
      sort = (sort + columns - 1) % columns;
      break;
    case 'r':
      ascending_ = !ascending_;
      break;
    case '/':
      typing_ = true;
      filter_.clear();
      break;
    case kKeyEscape:
      filter_.clear();
      help_ = false;
      break;
    case 'p':
      paused_ = !paused_;
      break;
    case '?':
    case 'h':
      help_ = !help_;
      break;
    case kKeyUp:
    case 'k':
      --scroll_;
      break;
    case kKeyDown:
    case 'j':
      ++scroll_;
      break;
    case kKeyPageUp:
      scroll_ -= page_;
      break;
    case kKeyPageDown:
      scroll_ += page_;
      break;
    default:
      break;
  }
  return true;
}

std::vector<TopRow> TopScreen::chosen(const TopModel& model) const {
  std::vector<TopRow> rows = model.rows(view_);
  const std::string wanted = lower(filter_);
  std::erase_if(rows, [&](const TopRow& row) {
    if (wanted.empty()) return false;
    std::string all;
    for (const TopCell& cell : row.cells) all += cell.text + " ";
    return lower(all).find(wanted) == std::string::npos;
  });
  const std::size_t column = sort_[static_cast<int>(view_)];
  std::ranges::stable_sort(rows, [&](const TopRow& a, const TopRow& b) {
    const TopCell& one = ascending_ ? a.cells[column] : b.cells[column];
    const TopCell& other = ascending_ ? b.cells[column] : a.cells[column];
    return one.number ? one.value < other.value : one.text < other.text;
  });
  return rows;
}

std::string TopScreen::table_header(const std::vector<std::size_t>& widths) const {
  std::string out;
  const auto& names = columns_of(view_);
  for (std::size_t i = 0; i < names.size(); ++i) {
    // The mark takes the place of the gap in front of the column.
    const bool sorted = i == sort_[static_cast<int>(view_)];
    out += i == 0 ? "" : " ";
    out += sorted ? (ascending_ ? "^" : "v") : " ";
    out += fit(names[i], static_cast<int>(widths[i]));
  }
  return out;
}

std::vector<std::string> TopScreen::lines(const TopModel& model, ScreenSize size) {
  const TopModel::Summary all = model.summary();
  std::vector<std::string> out;
  const int spark = std::clamp(size.columns - kSummaryColumn, 0, 120);
  out.push_back(fmt::format("mkctl top  {} of {} daemons, {} ranks of {} jobs, {} of {} links up{}",
                            all.answering, all.hosts, all.sessions, all.jobs, all.links_up,
                            all.links, paused_ ? "  PAUSED" : ""));
  out.push_back(
      fit(fmt::format("links     {:>12}/s", human_bytes(all.bytes_per_second)), kSummaryColumn) +
      sparkline(model.bytes_history(), spark));
  out.push_back(
      fit(fmt::format("commands  {:>12}/s", human_count(all.commands_per_second)), kSummaryColumn) +
      sparkline(model.commands_history(), spark));
  for (std::size_t i = 0; i < std::min(all.troubles.size(), kTroublesMax); ++i) {
    out.push_back("! " + printable(all.troubles[i]));
  }
  std::string tabs;
  for (const TopView view : {TopView::kLinks, TopView::kQueues, TopView::kJobs}) {
    // The key, then what it shows.
    const int key = static_cast<int>(view) + 1;
    tabs += view == view_ ? fmt::format("[{}] {}  ", key, name_of(view))
                          : fmt::format("{}:{}  ", key, name_of(view));
  }
  if (typing_ || !filter_.empty()) tabs += fmt::format(" /{}{}", filter_, typing_ ? "_" : "");
  out.push_back(tabs + (help_ ? "" : "  ? help"));
  if (help_) out.insert(out.end(), std::begin(kHelp), std::end(kHelp));

  const std::vector<TopRow> rows = chosen(model);
  std::vector<std::size_t> widths;
  for (const std::string& name : columns_of(view_)) widths.push_back(name.size());
  for (const TopRow& row : rows) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], static_cast<std::size_t>(width_of(row.cells[i].text)));
    }
  }
  out.push_back(table_header(widths));
  const int room = std::max(0, size.rows - static_cast<int>(out.size()));
  page_ = std::max(1, room - 1);
  scroll_ = std::clamp(scroll_, 0, std::max(0, static_cast<int>(rows.size()) - room));
  for (int i = 0; i < room && scroll_ + i < static_cast<int>(rows.size()); ++i) {
    const TopRow& row = rows[static_cast<std::size_t>(scroll_) + static_cast<std::size_t>(i)];
    std::string line;
    for (std::size_t c = 0; c < widths.size(); ++c) {
      line += c == 0 ? " " : "  ";
      line += fit(row.cells[c].text, static_cast<int>(widths[c]), row.cells[c].number);
    }
    const int left = size.columns - width_of(line) - 2;
    if (left >= kSparklineMin && row.history != nullptr) {
      line += "  " + sparkline(*row.history, left);
    }
    out.push_back(std::move(line));
  }
  if (rows.empty() && room > 0) {
    out.push_back(filter_.empty() ? fmt::format(" no {}", name_of(view_))
                                  : fmt::format(" no {} with \"{}\"", name_of(view_), filter_));
  }
  out.resize(std::min(out.size(), static_cast<std::size_t>(std::max(0, size.rows))));
  for (std::string& line : out) {
    line = fit(line, size.columns);
    line.erase(line.find_last_not_of(' ') + 1);
  }
  return out;
}

}  // namespace mk::mkctl
