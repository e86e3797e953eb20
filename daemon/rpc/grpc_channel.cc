#include "daemon/rpc/grpc_channel.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string_view>

namespace mk::daemon {
namespace {

Result<std::string> read_pem(const std::string& path, const std::string& what) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail_errno(errno, "cannot open {} {}", what, path);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (text.find("-----BEGIN") == std::string::npos) {
    return fail(ErrorCode::kInvalidArgument, "{} {} is not a PEM file", what, path);
  }
  return text;
}

}  // namespace

Result<TlsTexts> read_tls(const std::string& cert, const std::string& key, const std::string& ca,
                          const std::string& section) {
  TlsTexts texts;
  if (cert.empty() && key.empty() && ca.empty()) return texts;
  MK_ASSIGN_OR_RETURN(texts.cert, read_pem(cert, section + ".cert"));
  MK_ASSIGN_OR_RETURN(texts.key, read_pem(key, section + ".key"));
  MK_ASSIGN_OR_RETURN(texts.ca, read_pem(ca, section + ".ca"));
  texts.cert_path = cert;
  texts.key_path = key;
  texts.ca_path = ca;
  return texts;
}

std::string grpc_target(const Address& address) {
  return address.unix_socket ? "unix:" + address.path : "dns:///" + address.text();
}

std::shared_ptr<grpc::Channel> open_channel(const Address& address, const ChannelOptions& options) {
  grpc::ChannelArguments arguments;
  const auto ms = [](std::chrono::milliseconds time) { return static_cast<int>(time.count()); };
  arguments.SetMaxReceiveMessageSize(kGrpcMessageBytesMax);
  arguments.SetMaxSendMessageSize(kGrpcMessageBytesMax);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kGrpcStreamWindowBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // The caller paces its calls itself; gRPC's own pause must not be the longer one.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, ms(options.reconnect_min));
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, ms(options.reconnect_min));
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, ms(options.connect_timeout));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options.keepalive_time.count() > 0) {
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, ms(options.keepalive_time));
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ms(options.keepalive_timeout));
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (options.tls.enabled() && !address.unix_socket) {
    credentials = grpc::SslCredentials({options.tls.ca, options.tls.key, options.tls.cert});
    if (!options.tls_name.empty()) arguments.SetSslTargetNameOverride(options.tls_name);
  }
  return grpc::CreateCustomChannel(grpc_target(address), credentials, arguments);
}

std::vector<std::string> certificate_names(const grpc::AuthContext& context) {
  std::vector<std::string> names;
  if (!context.IsPeerAuthenticated()) return names;
  for (const char* property : {GRPC_X509_SAN_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    for (const grpc::string_ref& name : context.FindPropertyValues(property)) {
      names.emplace_back(name.data(), name.size());
    }
  }
  return names;
}

bool names_match(const std::vector<std::string>& names, const std::string& wanted) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    if (name == wanted) return true;
    if (!name.starts_with("*.")) return false;
    const std::size_t dot = wanted.find('.');
    return dot != 0 && dot != std::string::npos &&
           std::string_view(wanted).substr(dot) == std::string_view(name).substr(1);
  });
}

}  // namespace mk::daemon
