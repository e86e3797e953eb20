#include "daemon/service/admin_listen.h"

#include <grp.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "daemon/service/process.h"

namespace mk::daemon {
namespace {

Result<gid_t> group_id(const std::string& name) {
  std::vector<char> text(16'384);
  group entry{};
  group* found = nullptr;
  const int error = ::getgrnam_r(name.c_str(), &entry, text.data(), text.size(), &found);
  if (error != 0) return fail_errno(error, "admin.group: cannot look up group '{}'", name);
  if (found == nullptr) {
    return fail(ErrorCode::kNotFound, "admin.group: this machine has no group '{}'", name);
  }
  return entry.gr_gid;
}

}  // namespace

Result<std::optional<gid_t>> admin_group(const Config& config) {
  if (config.admin.group.empty()) return std::nullopt;
  return group_id(config.admin.group);
}

Result<GrpcListenOptions> admin_options(const Config& config, ConnectionBook& book,
                                        Logger& logger) {
  GrpcListenOptions at_admin;
  at_admin.address = {.unix_socket = true, .path = admin_socket_path(config)};
  at_admin.mode = config.admin.mode;
  at_admin.book = &book;
  at_admin.logger = &logger;
  const std::size_t files = open_files_max();
  if (files != 0) {  // a process that may have few files keeps most for its clients
    at_admin.tcp.connections = std::clamp<std::size_t>(files / 8, 32, at_admin.tcp.connections);
    at_admin.tcp.unproved = std::min(at_admin.tcp.unproved, at_admin.tcp.connections / 2);
  }
  MK_ASSIGN_OR_RETURN(at_admin.group, admin_group(config));
  return at_admin;
}

void make_admin_folder(const Config& config) {
  if (config.admin.socket != "auto") return;
  // It may be another one than the client socket's, which somebody has made.
  std::error_code there_or_seen_when_listening;
  std::filesystem::create_directory(std::filesystem::path(admin_socket_path(config)).parent_path(),
                                    there_or_seen_when_listening);
}

}  // namespace mk::daemon
