#include "shm/host/protocol.h"

#include <bit>
#include <concepts>
#include <cstring>
#include <type_traits>

#include "shm/host/text.h"

namespace mk::shm {

namespace {

static_assert(std::endian::native == std::endian::little, "messages are written as memory lies");

/// Appends fields. Text for users is cut to its limit; any other excess is the caller's to check,
/// and refused by the receiver.
class Writer {
 public:
  template <class T>
  requires std::integral<T> || std::is_enum_v<T>
  void number(T value) { raw(&value, sizeof value); }
  void text(std::string_view value) {
    bytes(std::as_bytes(std::span(clip_utf8(value, kMessageTextBytesMax))));
  }
  void name(std::string_view value, std::size_t) { bytes(std::as_bytes(std::span(value))); }
  /// The last fields of an Attach; left out where they say nothing.
  void attach_tail(const Attach& m) {
    const bool place = !m.gpu.empty() || m.rail != kAnyRail;
    if (!m.secret.empty() || place) name(m.secret, kJobSecretBytesMax);
    if (!place) return;
    name(m.gpu, kPciAddressBytesMax);
    number(m.rail);
  }
  void blob(std::span<const std::byte> value) { bytes(value); }
  void blobs(const std::vector<std::vector<std::byte>>& values) {
    number(static_cast<std::uint32_t>(values.size()));
    for (const auto& value : values) bytes(value);
  }
  void peers(const std::vector<Retire::PeerBuffer>& values) {
    number(static_cast<std::uint32_t>(values.size()));
    for (const auto& value : values) {
      number(value.rank);
      number(value.handle);
    }
  }

  std::vector<std::byte> out;

 private:
  void bytes(std::span<const std::byte> value) {
    number(static_cast<std::uint32_t>(value.size()));
    raw(value.data(), value.size());
  }
  void raw(const void* data, std::size_t size) {
    if (size == 0) return;
    out.resize(out.size() + size);
    std::memcpy(out.data() + out.size() - size, data, size);
  }
};

/// Takes fields off the front; once something is wrong, `problem` says what and nothing more is
/// read.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> payload) : left(payload) {}

  template <class T>
  requires std::integral<T> || std::is_enum_v<T>
  void number(T& value) {
    const auto from = take(sizeof value);
    if (problem == nullptr) std::memcpy(&value, from.data(), sizeof value);
  }
  void text(std::string& value) { name(value, kMessageTextBytesMax); }
  void name(std::string& value, std::size_t bytes_max) {
    const auto from = bytes(bytes_max);
    value.assign(reinterpret_cast<const char*>(from.data()), from.size());
  }
  void attach_tail(Attach& m) {
    m.secret.clear();
    m.gpu.clear();
    m.rail = kAnyRail;
    if (problem != nullptr || left.empty()) return;
    name(m.secret, kJobSecretBytesMax);
    const bool place = !left.empty();
    if (problem == nullptr && place) {
      name(m.gpu, kPciAddressBytesMax);
      number(m.rail);
    }
    // There is one way to say that something is not there.
    const bool says = place ? !m.gpu.empty() || m.rail != kAnyRail : !m.secret.empty();
    if (problem == nullptr && !says) problem = "its last field is empty";
  }
  void blob(std::vector<std::byte>& value) {
    const auto from = bytes(kExchangeBlobBytesMax);
    value.assign(from.begin(), from.end());
  }
  void blobs(std::vector<std::vector<std::byte>>& values) {
    std::uint32_t count = 0;
    number(count);
    if (count > kWorldMax) problem = "more blobs than a job has ranks";
    while (problem == nullptr && values.size() < count) blob(values.emplace_back());
  }
  void peers(std::vector<Retire::PeerBuffer>& values) {
    std::uint32_t count = 0;
    number(count);
    if (count > kWorldMax) problem = "more peers than a job has ranks";
    while (problem == nullptr && values.size() < count) {
      auto& value = values.emplace_back();
      number(value.rank);
      number(value.handle);
    }
  }

  std::span<const std::byte> left;
  const char* problem = nullptr;

 private:
  std::span<const std::byte> bytes(std::size_t bytes_max) {
    std::uint32_t size = 0;
    number(size);
    if (problem == nullptr && size > bytes_max) problem = "a string or blob is too long";
    return take(size);
  }
  std::span<const std::byte> take(std::size_t size) {
    if (problem == nullptr && size > left.size()) problem = "it is cut short";
    if (problem != nullptr) return {};
    const auto front = left.first(size);
    left = left.subspan(size);
    return front;
  }
};

/// `M` is the message `T`, const when written and not when read.
template <class M, class T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

// The fields of every message in the order of their bytes. This list is the only one: writing and
// reading walk it.

template <class V, Is<ErrorReply> M>
void visit(V& v, M& m) {
  v.number(m.code);
  v.text(m.message);
}

template <class V, Is<Hello> M>
void visit(V& v, M& m) {
  v.number(m.abi_major);
  v.number(m.abi_minor);
  v.name(m.client_version, kNameBytesMax);
}

template <class V, Is<HelloReply> M>
void visit(V& v, M& m) {
  v.number(m.abi_major);
  v.number(m.abi_minor);
  v.number(m.generation);
  v.name(m.daemon_version, kNameBytesMax);
}

template <class V, Is<Attach> M>
void visit(V& v, M& m) {
  v.name(m.job, kJobNameBytesMax);
  v.number(m.rank);
  v.number(m.world);
  v.number(m.node_rank);
  v.number(m.nodes);
  v.number(m.local_rank);
  v.number(m.local_size);
  v.number(m.lane_count);
  v.number(m.slot_count_log2);
  v.number(m.flag_count);
  v.number(m.timeout_ms);
  v.attach_tail(m);
}

template <class V, Is<AttachReply> M>
void visit(V& v, M& m) {
  v.number(m.session_id);
  v.number(m.session_slot);
  v.number(m.segment_bytes);
  v.name(m.fabric, kNameBytesMax);
}

template <class V, Is<RegisterBuffer> M>
void visit(V& v, M& m) {
  v.number(m.bytes);
  v.name(m.name, kNameBytesMax);
}

template <class V, Is<RegisterDeviceBuffer> M>
void visit(V& v, M& m) {
  v.number(m.bytes);
  v.name(m.name, kNameBytesMax);
  v.blob(m.key);
}

template <class V, Is<RegisterDmabuf> M>
void visit(V& v, M& m) {
  visit(v, m.buffer);
  v.number(m.offset);
}

template <class V, class M>
requires Is<M, RegisterBufferReply> || Is<M, DeregisterBuffer>
void visit(V& v, M& m) { v.number(m.handle); }

template <class V, Is<Retire> M>
void visit(V& v, M& m) {
  v.number(m.handle);
  v.number(m.flag_base);
  v.peers(m.peers);
}

template <class V, Is<AllocFlags> M>
void visit(V& v, M& m) {
  v.number(m.count);
}

template <class V, Is<AllocFlagsReply> M>
void visit(V& v, M& m) {
  v.number(m.base);
}

template <class V, Is<Exchange> M>
void visit(V& v, M& m) {
  v.name(m.tag, kNameBytesMax);
  v.blob(m.blob);
  v.number(m.timeout_ms);
}

template <class V, Is<ExchangeReply> M>
void visit(V& v, M& m) {
  v.blobs(m.blobs);
}

template <class V, Is<OpenPeerBuffer> M>
void visit(V& v, M& m) {
  v.number(m.local_rank);
  v.number(m.handle);
}

template <class V, Is<OpenPeerBufferReply> M>
void visit(V& v, M& m) {
  v.number(m.bytes);
}

template <class V, Is<SessionFailed> M>
void visit(V& v, M& m) {
  v.number(m.code);
  v.text(m.message);
}

template <class V, class M>
requires Is<M, JobUp> || Is<M, LaunchBegins> || Is<M, Detach> || Is<M, Done>
void visit(V&, M&) {}

}  // namespace

template <class Message>
std::vector<std::byte> encode_message(const Message& message) {
  Writer writer;
  visit(writer, message);
  return std::move(writer.out);
}

template <class Message>
Result<Message> decode_message(std::span<const std::byte> payload) {
  Message message;
  Reader reader(payload);
  visit(reader, message);
  if (reader.problem == nullptr && !reader.left.empty()) reader.problem = "bytes are left over";
  if (reader.problem != nullptr) {
    return fail(ErrorCode::kProtocol, "malformed {} message of {} bytes: {}",
                message_type_name(static_cast<std::uint16_t>(Message::kType)), payload.size(),
                reader.problem);
  }
  return message;
}

#define MK_MESSAGE(Message)                                       \
  template std::vector<std::byte> encode_message(const Message&); \
  template Result<Message> decode_message(std::span<const std::byte>);
MK_MESSAGE(ErrorReply)
MK_MESSAGE(Hello)
MK_MESSAGE(HelloReply)
MK_MESSAGE(Attach)
MK_MESSAGE(AttachReply)
MK_MESSAGE(JobUp)
MK_MESSAGE(RegisterBuffer)
MK_MESSAGE(RegisterBufferReply)
MK_MESSAGE(RegisterDeviceBuffer)
MK_MESSAGE(RegisterDmabuf)
MK_MESSAGE(DeregisterBuffer)
MK_MESSAGE(Retire)
MK_MESSAGE(AllocFlags)
MK_MESSAGE(AllocFlagsReply)
MK_MESSAGE(Exchange)
MK_MESSAGE(ExchangeReply)
MK_MESSAGE(OpenPeerBuffer)
MK_MESSAGE(OpenPeerBufferReply)
MK_MESSAGE(LaunchBegins)
MK_MESSAGE(Detach)
MK_MESSAGE(Done)
MK_MESSAGE(SessionFailed)
#undef MK_MESSAGE

std::string message_type_name(std::uint16_t type) {
  switch (static_cast<MessageType>(type)) {
    case MessageType::kError:
      return "error";
    case MessageType::kHello:
      return "hello";
    case MessageType::kHelloReply:
      return "hello-reply";
    case MessageType::kAttach:
      return "attach";
    case MessageType::kAttachReply:
      return "attach-reply";
    case MessageType::kJobUp:
      return "job-up";
    case MessageType::kRegisterBuffer:
      return "register-buffer";
    case MessageType::kRegisterBufferReply:
      return "register-buffer-reply";
    case MessageType::kDeregisterBuffer:
      return "deregister-buffer";
    case MessageType::kAllocFlags:
      return "alloc-flags";
    case MessageType::kAllocFlagsReply:
      return "alloc-flags-reply";
    case MessageType::kExchange:
      return "exchange";
    case MessageType::kExchangeReply:
      return "exchange-reply";
    case MessageType::kOpenPeerBuffer:
      return "open-peer-buffer";
    case MessageType::kOpenPeerBufferReply:
      return "open-peer-buffer-reply";
    case MessageType::kDetach:
      return "detach";
    case MessageType::kDone:
      return "done";
    case MessageType::kSessionFailed:
      return "session-failed";
    case MessageType::kRegisterDeviceBuffer:
      return "register-device-buffer";
    case MessageType::kRegisterDmabuf:
      return "register-dmabuf";
    case MessageType::kRetire:
      return "retire";
    case MessageType::kLaunchBegins:
      return "launch-begins";
  }
  return fmt::format("unknown({})", type);
}

}  // namespace mk::shm
