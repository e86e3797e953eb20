#include <prometheus/text_serializer.h>
#include <pthread.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <list>
#include <sstream>
#include <thread>
#include <utility>

#include "daemon/metrics/metrics.h"
#include "shm/host/result.h"

namespace mk::daemon {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;
using Response = http::response<http::string_body>;

constexpr std::uint32_t kRequestBytesMax = 8192;
constexpr auto kPatience = std::chrono::seconds(2);  ///< for one request and its answer
/// At once. One more takes the place of the oldest.
constexpr std::size_t kConnectionsMax = 32;
constexpr auto kAcceptPause = std::chrono::milliseconds(200);  ///< when no descriptor is left

Response answer(http::status status, std::string body) {
  Response response(status, 11);
  response.set(http::field::content_type, "text/plain; version=0.0.4; charset=utf-8");
  response.content_length(body.size());
  response.keep_alive(false);
  response.body() = std::move(body);
  return response;
}

/// One request and its answer. The deadline is one for both, and no byte moves it.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Answer = std::function<Response(const http::request<http::empty_body>&)>;

  /// `answer` outlives this.
  Connection(tcp::socket socket, const Answer& answer)
      : stream_(std::move(socket)), answer_(answer) {
    parser_.header_limit(kRequestBytesMax);
    parser_.body_limit(0);
  }

  void start() {
    stream_.expires_after(kPatience);
    http::async_read(
        stream_, buffer_, parser_,
        [self = shared_from_this()](error_code error, std::size_t) { self->reply(error); });
  }
  void cut() { stream_.close(); }

 private:
  void reply(error_code error) {
    const error_code any =
        http::error::bad_method;  // of those that say what is wrong with a request
    if (error == http::error::end_of_stream || (error && error.category() != any.category())) {
      return;  // the peer is gone, or its time is up
    }
    response_ =
        error ? answer(http::status::bad_request, "GET /metrics\n") : answer_(parser_.get());
    http::async_write(stream_, response_, [self = shared_from_this()](error_code, std::size_t) {
      error_code ignored;
      self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    });
  }

  boost::beast::tcp_stream stream_;
  boost::beast::flat_buffer buffer_{kRequestBytesMax};
  http::request_parser<http::empty_body> parser_;
  Response response_;
  const Answer& answer_;
};

Result<tcp::endpoint> resolve(asio::io_context& io, const Address& address) {
  error_code error;
  const auto found = tcp::resolver(io).resolve(address.host, std::to_string(address.port),
                                               tcp::resolver::passive, error);
  if (error) return fail(ErrorCode::kInvalidArgument, "{}", error.message());
  return found.begin()->endpoint();
}

Status open(tcp::acceptor& acceptor, const tcp::endpoint& at) {
  error_code error;
  acceptor.open(at.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(at, error);
  if (!error) acceptor.listen(kConnectionsMax, error);
  if (error) return fail_errno(error.value(), "socket");
  return {};
}

}  // namespace

/// One thread serves all connections, so that a silent one holds up nobody.
class MetricsEndpoint::Impl {
 public:
  explicit Impl(std::function<MetricsSample()> sample) : sample_(std::move(sample)) {}
  ~Impl() {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  Status start(const Address& address) {
    MK_ASSIGN_OR_RETURN(const tcp::endpoint at, resolve(io_, address));
    MK_RETURN_IF_ERROR(open(acceptor_, at));
    address_ = address;
    error_code error;
    address_.port = acceptor_.local_endpoint(error).port();
    accept();
    thread_ = std::thread([this] { run(); });
    return {};
  }
  const Address& address() const { return address_; }

 private:
  void run() {
    ::pthread_setname_np(::pthread_self(), "mk-metrics");
    while (!io_.stopped()) {
      try {
        io_.run();
      } catch (const std::exception&) {
        // No memory for this scrape; its connection is gone, and there may be some for the next.
      }
    }
  }

  void accept() {
    acceptor_.async_accept([this](error_code error, tcp::socket socket) {
      if (!error) {
        admit(std::move(socket));
        accept();
        return;
      }
      pause_.expires_after(kAcceptPause);
      pause_.async_wait([this](error_code) { accept(); });
    });
  }

  void admit(tcp::socket socket) {
    std::erase_if(connections_, [](const auto& weak) { return weak.expired(); });
    if (connections_.size() >= kConnectionsMax) {
      if (const auto oldest = connections_.front().lock()) oldest->cut();
      connections_.pop_front();
    }
    const auto connection = std::make_shared<Connection>(std::move(socket), answer_);
    connections_.push_back(connection);
    connection->start();
  }

  Response reply_to(const http::request<http::empty_body>& request) const {
    if (request.method() != http::verb::get && request.method() != http::verb::head) {
      return answer(http::status::method_not_allowed, "GET /metrics\n");
    }
    const auto target = request.target();
    if (target.substr(0, target.find('?')) != "/metrics") {
      return answer(http::status::not_found, "GET /metrics\n");
    }
    std::ostringstream body;
    prometheus::TextSerializer().Serialize(body, to_families(sample_()));
    Response response = answer(http::status::ok, body.str());
    if (request.method() == http::verb::head) response.body().clear();  // but not its length
    return response;
  }

  const std::function<MetricsSample()> sample_;
  const Connection::Answer answer_ = [this](const auto& request) { return reply_to(request); };
  Address address_;
  asio::io_context io_{1};
  tcp::acceptor acceptor_{io_};
  asio::steady_timer pause_{io_};
  std::list<std::weak_ptr<Connection>> connections_;  ///< the oldest first
  std::thread thread_;
};

Result<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::listen(
    const Address& address, std::function<MetricsSample()> sample) {
  auto impl = std::make_unique<Impl>(std::move(sample));
  if (const Status started = impl->start(address); !started) {
    return fail(ErrorCode::kUnavailable, "cannot serve metrics on {} (metrics.listen): {}",
                address.text(), started.error().message);
  }
  return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(std::move(impl)));
}

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsEndpoint::~MetricsEndpoint() = default;
const Address& MetricsEndpoint::address() const { return impl_->address(); }

}  // namespace mk::daemon
