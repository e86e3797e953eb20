/// \file
/// mkerneld's configuration: a TOML file, then the command line's overrides, then the checks that
/// need all of it. Default values are those of this struct; deploy/mkerneld.toml.example explains
/// every key and is tested to parse to exactly them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/config/address.h"
#include "daemon/fabric/verbs_options.h"
#include "daemon/proxy/share.h"
#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk::daemon {

enum class LogFormat { kAuto, kText, kJson, kJournald };

struct PeerConfig {
  std::uint32_t id = 0;
  Address address;
  std::string name{};  ///< that its certificate is made out to; empty: the address's host
};

/// Jobs whose name matches `pattern` (* and ?) have `share`; the first match counts.
struct JobConfig {
  std::string pattern;
  JobShare share;
};

inline constexpr std::uint32_t kJobWeightMax = 1000;
inline constexpr std::uint32_t kRailsMax = shm::kLocalRanksMax;
/// As many as the machine asks for: topology::rail_count.
inline constexpr std::uint32_t kRailsAuto = 0;

/// Of proxy.sleep_max. An idle rail thread sleeps eight times that, while peers that connect to it
/// wait for two seconds.
inline constexpr std::uint64_t kSleepMostNs = 20'000'000;

struct Config {
  std::uint32_t node_id = 0;
  Address listen{.host = "127.0.0.1", .port = 7171};
  bool insecure = false;  ///< allow beyond this machine without TLS
  std::vector<PeerConfig> peers;

  /// How the other daemons are found beside those of `peers`.
  struct {
    std::string kind = "static";                ///< "static": not; "dns", "etcd"
    std::uint64_t interval_ns = 2'000'000'000;  ///< between looks
    std::optional<Address> advertise;           ///< what the others call; nothing: `listen`
    /// With TLS, what the certificate of the node that is found is made out to, "{node}" being its
    /// id; empty: see node_name_of.
    std::string node_name;
    struct {
      std::string name;    ///< see parse_dns_question
      std::string server;  ///< empty: those of /etc/resolv.conf
    } dns;
    struct {
      std::vector<std::string> endpoints{"127.0.0.1:2379"};
      std::string prefix = "/mkernel/nodes/";
      std::uint64_t ttl_ns = 10'000'000'000;
      std::string cert, key, ca;  ///< PEM files; all or none
    } etcd;
  } discovery;

  struct {
    std::string path = "/run/mkernel/mkerneld.sock";  ///< '@name': abstract
    std::uint32_t mode = 0666;
  } socket;

  struct {
    std::string name = "auto";  ///< see topology::resolve_fabric
    std::uint32_t rails = kRailsAuto;
    struct {
      double bandwidth_bytes_per_second = 0;  ///< per link; 0: unlimited
      std::uint64_t latency_ns = 0;
    } loopback;
    struct {
      std::string provider = "tcp";
      std::vector<std::string> bind;  ///< by rail, in turn; empty: by rule
    } ofi;
    mk::fabric::VerbsOptions verbs;
  } fabric;

  struct {
    std::vector<std::int64_t> cpus;  ///< by rail, -1: not pinned; empty: none is
    std::uint64_t batch_window_ns = 2'000;
    std::optional<std::uint64_t> spin_ns;  ///< none: "auto", by the CPUs there are
    std::uint64_t sleep_max_ns = 500'000;
  } proxy;

  struct {
    std::uint32_t sessions = shm::kSessionsMax;
    std::uint32_t outstanding = 256;  ///< per session
    // Of host memory and of what is counted: none: "auto", see client_limits; 0: unlimited.
    std::optional<std::uint64_t> registered_bytes;  ///< per session
    std::optional<std::uint32_t> user_sessions, user_buffers, user_rings;
    std::optional<std::uint64_t> user_registered_bytes, all_registered_bytes;
    std::optional<std::uint64_t> user_descriptors, descriptors;
    std::uint32_t user_connections = 32;   ///< that have not attached, per user
    std::uint64_t drain_ns = 500'000'000;  ///< how long SIGTERM waits for sessions to end
    std::uint64_t ended_jobs_ns = 3'600'000'000'000;  ///< how long their totals are kept
  } limits;

  /// The Admin service's own socket, for users and tools of this machine.
  struct {
    std::string socket = "auto";  ///< "": none. See admin_socket_path
    std::uint32_t mode = 0660;
    std::string group;  ///< the file's; its members may change things. Empty: as created, nobody
    std::vector<std::string> writers;  ///< names of certificates that may change things
  } admin;

  std::vector<JobConfig> jobs;
  /// Rails of GPUs, by PCI address: they come before what is nearest.
  std::map<std::string, std::uint32_t> gpu_rails;

  struct {
    std::optional<Address> listen;  ///< on a loopback interface; nothing: no metrics
  } metrics;

  struct {
    std::string level = "info";
    LogFormat format = LogFormat::kAuto;
  } log;

  struct {
    std::string cert, key, ca;  ///< PEM files; all or none
    bool enabled() const { return !cert.empty(); }
  } tls;
};

/// What the command line overrides; empty: not given.
struct ConfigOverrides {
  std::optional<std::string> node_id, listen, advertise, socket, fabric, rails, link_bandwidth,
      link_latency, log_level, log_format;
  bool insecure = false;
  std::vector<std::string> peers;  ///< "ID=ADDR"; replace the file's peer of that id, or add one
};

/// Reads `toml`, applies `overrides`, checks. All mistakes are reported at once, one per line of
/// the error's message (kInvalidArgument): "file:line:column: key: what is wrong and what is
/// allowed", or "--flag: ..." for overrides.
Result<Config> parse_config(std::string_view toml, const std::string& file_name,
                            const ConfigOverrides& overrides);
/// The same, from a file; kNotFound or kSystem when it can't be read. An empty path is an empty
/// file.
Result<Config> load_config(const std::string& path, const ConfigOverrides& overrides);

/// The whole configuration as TOML that parses to the same.
std::string print_config(const Config& config);

/// The share of a job by `jobs`; the default when nothing matches.
JobShare job_share(const std::vector<JobConfig>& jobs, std::string_view job);

/// Where the Admin service's socket is; empty: there is none. "auto" is in /run/mkernel-admin for a
/// socket.path in /run/mkernel, which containers of jobs mount; for another, socket.path with
/// "-admin" before its ending, and nothing for an abstract name or one that would become too long.
std::string admin_socket_path(const Config& config);

}  // namespace mk::daemon
