/// \file
/// How a receiving endpoint gets to know each endpoint that will write to it before it does. The
/// sending endpoint tells its address in a message (`Introduction`), the receiving one puts it into
/// its address table and answers (`Reception`). No write goes out before that answer.
///
/// For providers whose devices take remote writes from known endpoints only; see README.md, "EFA".
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "daemon/fabric/ofi/domain.h"
#include "daemon/fabric/ofi/sender_tags.h"

namespace mk::fabric::ofi {

/// Which sending endpoint of a peer. One that comes after another of the same name replaces it.
struct SenderName {
  Token endpoint{};        ///< the receiving endpoint beside it
  std::uint32_t slot = 0;  ///< its link's place there
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes the comparison's own 0 for a pointer
  auto operator<=>(const SenderName&) const = default;
};

struct Greeting {
  static constexpr std::uint64_t kMagic = 0x32'69'68'69'66'6b'6d'6d;  // "mmkfihi2"
  std::uint64_t magic = kMagic;
  Token to{};  ///< of the receiving endpoint: the sender was given its address
  SenderName from;
  std::uint32_t tag = 0;  ///< that the sender's node was told: whose its writes are
  std::uint32_t name_bytes = 0;
  char name[256] = {};
};
struct Answer {
  static constexpr std::uint64_t kMagic = 0x31'6b'6f'69'66'6b'6d'6d;  // "mmkfiok1"
  std::uint64_t magic = kMagic;
  SenderName to;
};

/// The sending endpoint's side, for one link.
class Introduction {
 public:
  /// Control thread. `port` leads to `peer`, whose address `to` is; it is closed before this goes.
  static Result<std::unique_ptr<Introduction>> prepare(const Domain& domain, const Port& port,
                                                       fi_addr_t peer, const Address& to);

  // -- proxy thread --
  /// Sends the greeting once there is room: 0, -FI_EAGAIN, or libfabric's error.
  long progress(const SenderName& from);
  /// Whether a completion with that context is one of this exchange.
  bool completed(const void* context);
  /// Whether the peer has taken the address.
  bool done() const { return done_; }

 private:
  struct Messages {
    fi_context2 sending{};
    fi_context2 receiving{};
    Greeting greeting;
    Answer answer{.magic = 0};
  };
  Introduction() = default;

  fid_ep* endpoint_ = nullptr;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  std::unique_ptr<Messages> messages_ = std::make_unique<Messages>();
  Fid<fid_mr> region_;
  bool receiving_ = false;
  bool sent_ = false;
  bool done_ = false;
};

/// The receiving endpoint's side, for all that introduce themselves. Proxy thread, but for `open`.
class Reception {
 public:
  /// `port` is closed before this goes; `tags` are this endpoint's, and outlive it.
  static Result<std::unique_ptr<Reception>> open(const Domain& domain, const Port& port,
                                                 const Token& own, const SenderTags& tags);

  /// Whose endpoint has that place in the address table; nobody's that introduced itself: nullopt.
  std::optional<PeerNumber> peer(fi_addr_t source) const {
    const auto found = peers_.find(source);
    return found == peers_.end() ? std::nullopt : std::optional(found->second);
  }

  /// A completion of `port`, or one that failed. Whether it is one of an exchange: then what is to
  /// be done is done.
  bool completed(const void* context);
  bool failed(const void* context);
  /// Tries again what there was no room for.
  void progress();

 private:
  /// Greetings that are received or answered at once.
  static constexpr std::size_t kSlots = 32;
  /// What the address table holds. Past it, of the peer with the most, the one that came first is
  /// forgotten: those of a daemon that has ended are replaced by nobody, and no peer pushes another
  /// out.
  static constexpr std::size_t kSendersMax = 8192;
  enum class State : std::uint8_t { kToReceive, kReceiving, kToAnswer, kAnswering };
  struct Slot {
    fi_context2 context{};
    Greeting greeting;
    Answer answer;
    State state = State::kToReceive;
    fi_addr_t sender = FI_ADDR_UNSPEC;
  };
  struct Sender {
    fi_addr_t address = FI_ADDR_UNSPEC;
    std::uint64_t number = 0;  ///< grows
  };

  using Senders = std::map<std::pair<PeerNumber, SenderName>, Sender>;

  Reception(const Port& port, const Token& own, const SenderTags& tags)
      : endpoint_(port.endpoint.get()), addresses_(port.addresses.get()), own_(own), tags_(tags) {}
  Slot* find(const void* context);
  /// Whether the greeting in it is to be answered.
  bool take(Slot& slot);
  void advance(Slot& slot);
  void forget(Senders::iterator which);
  Senders::iterator one_too_many();

  fid_ep* const endpoint_;
  fid_av* const addresses_;
  const Token own_;
  const SenderTags& tags_;
  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  Fid<fid_mr> region_;
  std::size_t waiting_ = 0;  ///< slots that `progress` has to do with
  Senders senders_;
  std::unordered_map<fi_addr_t, PeerNumber> peers_;
  std::uint64_t next_number_ = 0;
};

}  // namespace mk::fabric::ofi
