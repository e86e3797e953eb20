#include "daemon/tls/own_files.h"

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
