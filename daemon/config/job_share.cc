#include "daemon/config/config.h"

namespace mk::daemon {
namespace {

/// Whether `text` matches `pattern` (* and ?), without recursion.
bool matches(std::string_view pattern, std::string_view text) {
  std::size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t]) && pattern[p] != '*') {
      ++p, ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace

JobShare job_share(const std::vector<JobConfig>& jobs, std::string_view job) {
  for (const JobConfig& entry : jobs) {
    if (matches(entry.pattern, job)) return entry.share;
  }
  return {};
}

}  // namespace mk::daemon
