// A folder that goes away with its content.
#pragma once

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace mk::daemon {

/// How long tests wait for what must come.
inline constexpr auto kPatience = std::chrono::seconds(60);

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = "/tmp/mk-service-XXXXXX";
    if (!::mkdtemp(pattern.data())) std::abort();
    path_ = pattern;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

}  // namespace mk::daemon
