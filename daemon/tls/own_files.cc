#include "daemon/tls/own_files.h"

#include <fmt/format.h>

#include "daemon/config/discovery_section.h"

namespace mk::daemon {

TlsFiles tls_files(const Config& config) {
  TlsFiles files{"tls", config.tls.cert, config.tls.key, config.tls.ca};
  const std::string name = node_name_of(config, config.node_id);
  if (!name.empty() && config.discovery.kind != "static") {
    files.names = {name};
  } else if (config.discovery.advertise && !config.discovery.advertise->unix_socket) {
    files.names = {config.discovery.advertise->host};
  }
  return files;
}

std::string name_doubt(const Config& config, std::int64_t now) {
  const Address& listen = config.listen;
  TlsFiles files = tls_files(config);
  const bool everywhere = listen.host == "0.0.0.0" || listen.host == "::";
  if (!config.tls.enabled() || !files.names.empty() || listen.unix_socket || everywhere) return {};
  files.names = {listen.host};
  for (const TlsFault& fault : look_at(files, now).faults) {
    if (fault.kind != TlsFault::Kind::kName) continue;
    return fmt::format(
        "{} (listen): the other nodes' [[peer]] must know this node by a name of the certificate",
        fault.text);
  }
  return {};
}

std::vector<std::string> certificate_faults(const Config& config, std::int64_t now) {
  std::vector<std::string> texts;
  const auto add = [&](const TlsFiles& files) {
    if (files.cert.empty()) return;
    for (const TlsFault& fault : look_at(files, now).faults) texts.push_back(fault.text);
  };
  add(tls_files(config));
  const auto& etcd = config.discovery.etcd;
  add({"discovery.etcd", etcd.cert, etcd.key, etcd.ca, {}, false});
  return texts;
}

}  // namespace mk::daemon
