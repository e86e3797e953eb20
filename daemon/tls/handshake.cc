#include "daemon/tls/handshake.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include "daemon/tls/openssl.h"

namespace mk::daemon {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Waits until `fd` is ready for `events`; false when the time is over.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  pollfd waiting{fd, events, 0};
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::max<long>(left.count(), 0)));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

Result<UniqueFd> connect_socket(const sockaddr* address, socklen_t bytes, milliseconds patience) {
  UniqueFd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return fail_errno(errno, "no socket");
  if (::connect(fd.get(), address, bytes) == 0) return fd;
  if (errno != EINPROGRESS) return fail(ErrorCode::kUnavailable, "{}", errno_text(errno));
  if (!wait_for(fd.get(), POLLOUT, Clock::now() + patience)) {
    return fail(ErrorCode::kTimeout, "no answer within {} s",
                static_cast<double>(patience.count()) / 1e3);
  }
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return fail(ErrorCode::kUnavailable, "{}", errno_text(error));
  return fd;
}

/// What the check of the other side's certificate has against its chain. The handshake goes on, so
/// that the other side says what it thinks of ours.
struct PeerChain {
  std::string trouble;
  static int index() {
    static const int at = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
    return at;
  }
};

int note_peer_chain(int good, X509_STORE_CTX* context) {
  if (good == 1) return 1;
  const auto* ssl =
      static_cast<SSL*>(X509_STORE_CTX_get_ex_data(context, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto& chain = *static_cast<PeerChain*>(SSL_get_ex_data(ssl, PeerChain::index()));
  const int error = X509_STORE_CTX_get_error(context);
  const bool own_dates =
      X509_STORE_CTX_get_error_depth(context) == 0 &&
      (error == X509_V_ERR_CERT_HAS_EXPIRED || error == X509_V_ERR_CERT_NOT_YET_VALID);
  if (own_dates || !chain.trouble.empty()) return 1;  // its dates are looked at for themselves
  chain.trouble = X509_verify_cert_error_string(error);
  if (const X509* const at = X509_STORE_CTX_get_current_cert(context)) {
    chain.trouble += fmt::format("; its issuer is {}", text_of(X509_get_issuer_name(at)));
  }
  return 1;
}

Result<OwnedContext> make_context(const TlsContents& contents) {
  OwnedContext context(SSL_CTX_new(TLS_client_method()));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, note_peer_chain);
  X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(context.get()), X509_V_FLAG_PARTIAL_CHAIN);
  static constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context.get(), kHttp2, sizeof kHttp2);
  const auto certificates = certificates_of(contents.cert.text);
  const OwnedKey key = key_of(contents.key.text);
  const auto trusted = certificates_of(contents.ca.text);
  bool good = !certificates.empty() && key && !trusted.empty() &&
              SSL_CTX_use_certificate(context.get(), certificates.front().get()) == 1 &&
              SSL_CTX_use_PrivateKey(context.get(), key.get()) == 1;
  for (std::size_t i = 1; good && i < certificates.size(); ++i)
    good = SSL_CTX_add1_chain_cert(context.get(), certificates[i].get()) == 1;
  for (const OwnedX509& one : trusted)
    good = good && X509_STORE_add_cert(SSL_CTX_get_cert_store(context.get()), one.get()) == 1;
  if (!good)
    return fail(ErrorCode::kInvalidArgument, "this node's own TLS files: {}", openssl_error());
  return context;
}

/// One step (connecting, reading), repeated while it waits for the network. Its result, or 0 when
/// the time is over; `error` is SSL_get_error's.
template <class Step>
int run(SSL* ssl, int fd, Clock::time_point deadline, int& error, Step step) {
  while (true) {
    ERR_clear_error();
    const int result = step();
    error = SSL_get_error(ssl, result);
    const short events = error == SSL_ERROR_WANT_READ    ? POLLIN
                         : error == SSL_ERROR_WANT_WRITE ? POLLOUT
                                                         : 0;
    if (result > 0 || events == 0) return result;
    if (!wait_for(fd, events, deadline)) return 0;
  }
}

/// What the other side, or our own library, says when a handshake ends badly. `judged`: the other
/// side had our certificate by then.
std::string refusal(const TlsFiles& own, int error, bool judged) {
  const int reason = ERR_GET_REASON(ERR_peek_last_error());
  const std::string text = openssl_error();
  const std::string ours = fmt::format("{}.cert {}", own.section, own.cert);
  if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
    return "it does not answer in the TLS handshake";
  }
  if (error != SSL_ERROR_SSL) {
    return "it closes the connection in the TLS handshake: check cert and key of [tls] there";
  }
  switch (reason) {
    case SSL_R_UNEXPECTED_EOF_WHILE_READING:
      // gRPC's servers close without an alert.
      if (!judged) break;
      return fmt::format(
          "it closes the connection once it has seen {} of this node: it refuses that, and "
          "`mkctl status` there says why",
          ours);
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
      return fmt::format("it refuses {} of this node, which it holds for expired", ours);
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
      return fmt::format(
          "it refuses {} of this node, whose CA it does not know: tls.ca there must hold that CA",
          ours);
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
      return "it speaks no TLS: its configuration lacks [tls]";
    default:
      break;
  }
  return fmt::format("the TLS handshake with {} of this node fails: {}", ours, text);
}

}  // namespace

Result<UniqueFd> connect_to(const Address& address, milliseconds patience) {
  if (address.unix_socket) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    if (address.path.size() >= sizeof name.sun_path)
      return fail(ErrorCode::kInvalidArgument, "its path is too long");
    std::memcpy(name.sun_path, address.path.data(), address.path.size());
    if (!address.path.empty() && address.path.front() == '@') name.sun_path[0] = '\0';
    return connect_socket(
        reinterpret_cast<const sockaddr*>(&name),
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.path.size()), patience);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return fail(ErrorCode::kNotFound, "its name is not known here: {}", ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, ::freeaddrinfo);
  Result<UniqueFd> last = fail(ErrorCode::kNotFound, "its name has no address");
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    last = connect_socket(one->ai_addr, one->ai_addrlen, patience);
    if (last) break;
  }
  return last;
}

Status try_handshake(const TlsFiles& own, const TlsContents& contents, const UniqueFd& connected,
                     const std::string& name, milliseconds patience) {
  MK_ASSIGN_OR_RETURN(const OwnedContext context, make_context(contents));
  const int fd = connected.get();
  const auto deadline = Clock::now() + patience;
  PeerChain chain;
  const OwnedSsl ssl(SSL_new(context.get()));
  SSL_set_ex_data(ssl.get(), PeerChain::index(), &chain);
  SSL_set_fd(ssl.get(), fd);
  SSL_set_tlsext_host_name(ssl.get(), name.c_str());
  std::vector<std::string> faults;
  const auto add = [&faults](std::string text) {
    if (!text.empty()) faults.push_back(std::move(text));
  };
  int error = 0;
  bool fine = run(ssl.get(), fd, deadline, error, [&] { return SSL_connect(ssl.get()); }) == 1;
  const bool judged = fine;
  if (fine) {
    // A server of TLS 1.3 looks at our certificate after that; then it greets, or says why not.
    char greeting[64];
    fine = run(ssl.get(), fd, deadline, error,
               [&] { return SSL_read(ssl.get(), greeting, sizeof greeting); }) > 0;
  }
  const std::string refused = fine ? "" : refusal(own, error, judged);
  if (X509* const certificate = SSL_get0_peer_certificate(ssl.get())) {
    if (!chain.trouble.empty()) {
      add(fmt::format("its certificate is not signed by {}.ca {} of this node ({})", own.section,
                      own.ca, chain.trouble));
    }
    add(fault_of(*certificate, "its certificate", name, unix_now()));
  }
  add(refused);
  if (faults.empty()) return {};
  return fail(ErrorCode::kPermission, "{}", fmt::join(faults, "; "));
}

}  // namespace mk::daemon
