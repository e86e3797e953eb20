/// \file
/// One link of the ofi fabric: an endpoint of libfabric that only sends, to one peer.
///
/// Its own, so that giving the link up ends everything that libfabric still has of it. With a
/// shared endpoint, writes to a peer that hangs would go on reading their sources for as long as
/// the connection lives.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "daemon/fabric/link_table.h"
#include "daemon/fabric/ofi/acknowledgements.h"
#include "daemon/fabric/ofi/domain.h"
#include "daemon/fabric/ofi/introduction.h"

namespace mk::fabric::ofi {

class OfiLocalRegion final : public LocalRegion {
 public:
  OfiLocalRegion(std::shared_ptr<const Domain> domain, Fid<fid_mr> region,
                 const MemoryDescriptor& memory, const Token& endpoint)
      : domain_(std::move(domain)),
        region_(std::move(region)),
        memory_(memory),
        endpoint_(endpoint) {}
  ~OfiLocalRegion() override {
    domain_->gate().change([this] { region_.reset(); });
  }
  Bytes key() const override;
  const MemoryDescriptor& memory() const { return memory_; }
  void* descriptor() const {
    return domain_->local_descriptors() ? ::fi_mr_desc(region_.get()) : nullptr;
  }
  std::uint64_t wire_key() const { return ::fi_mr_key(region_.get()); }
  std::uint64_t wire_base() const { return domain_->wire_base(memory_.address); }

 private:
  std::shared_ptr<const Domain> domain_;
  Fid<fid_mr> region_;
  MemoryDescriptor memory_;
  Token endpoint_;
};

class OfiRemoteRegion final : public RemoteRegion {
 public:
  explicit OfiRemoteRegion(const Key& key) : key_(key) {}
  const Key& key() const { return key_; }

 private:
  Key key_;
};

class Link : public LinkBase {
 public:
  struct Limits {
    std::uint64_t connect_ns;  ///< until the peer has answered anything
    std::uint64_t write_ns;    ///< without any progress
  };
  /// How the provider is to be used; see Domain.
  struct Manner {
    bool notify_apart = false;
    std::size_t inject_bytes = 0;
    bool completes_early = false;
    bool tags_writes = false;
  };
  /// `zeros`: eight registered bytes, the source of flag-only writes. `introduction`: null where
  /// the peer need not know this endpoint; `own`: the receiving endpoint beside it.
  Link(Port port, fi_addr_t peer, const Address& address, std::string peer_name,
       const OfiLocalRegion& zeros, const Manner& manner, std::uint32_t depth, const Limits& limits,
       std::unique_ptr<Introduction> introduction, const Token& own);

  // -- proxy thread --
  std::size_t post(std::span<const Write> writes, std::uint64_t now_ns);
  /// Moves on what waits, takes completions, watches the limits.
  void progress(std::uint64_t now_ns);
  std::size_t report(std::span<Event> events);
  /// Ends the link: libfabric lets go of all memory, and what is outstanding fails.
  void close(const std::string& reason);
  bool down() const { return down_; }
  bool empty() const { return free_.size() == operations_.size(); }
  bool busy() const {
    return in_flight_ > 0 || acknowledgements_.outstanding() || waiting_head_ != waiting_tail_ ||
           (!introduced() && !down_);
  }
  bool down_reported = false;

  // -- control thread --
  const Token& peer_endpoint() const { return address_.endpoint; }
  const std::string& peer_name() const { return peer_name_; }
  std::string reason() const;

 private:
  struct Operation;
  /// What libfabric gets as context: it may write into the first member until the completion.
  struct Context {
    fi_context2 scratch;
    Operation* operation;
  };
  struct Operation {
    Context data;
    Context notify;
    Write write;
    std::uint32_t outstanding = 0;  ///< completions to come
    bool in_use = false;
    bool data_posted = false;  ///< its data went, its notification has not
    bool asks = false;         ///< to be acknowledged by the peer
    std::uint64_t number = 0;  ///< Acknowledgements::sent
  };
  struct Done {
    std::uint64_t cookie;
    ErrorCode code;
    Operation* operation;
  };

  /// 0 when the operation is libfabric's, -FI_EAGAIN when it must wait, else an error.
  long submit(Operation& operation, bool more);
  /// The same of an empty write that the peer acknowledges.
  long submit_empty(Context& context);
  /// The same of one that goes before all else, where nothing else tells how long a connection
  /// takes and how long the data: once.
  long knock();
  void close_refused(long rc);
  long submit_write(const void* source, std::size_t bytes, void* descriptor, std::uint64_t target,
                    std::uint64_t key, const Operation& operation, Context& context,
                    std::uint64_t flags);
  bool introduced() const { return introduction_ == nullptr || introduction_->done(); }
  /// Moves the handshake on; whether writes may go.
  bool introduce(std::uint64_t now_ns);
  void retry_waiting();
  void take_completions(std::uint64_t now_ns);
  void note_sent(Operation& operation);
  void finish_acknowledged();
  /// By an empty write, of whatever no write under way asks for.
  void ask_for_rest();
  void finish(Operation& operation, ErrorCode code);
  std::string read_error();

  const std::unique_ptr<Introduction> introduction_;  ///< goes after the port
  const Token own_;
  Port port_;
  const fi_addr_t peer_;
  const Address address_;
  const std::string peer_name_;
  const OfiLocalRegion& zeros_;
  const Manner manner_;
  const Limits limits_;

  // Rings of `depth` entries and free-running counters; nothing is allocated after construction.
  std::vector<Operation> operations_;
  std::vector<Operation*> free_;
  std::vector<Operation*> waiting_;
  std::size_t waiting_head_ = 0;
  std::size_t waiting_tail_ = 0;
  std::vector<Done> done_;
  std::size_t done_head_ = 0;
  std::size_t done_tail_ = 0;
  Acknowledgements acknowledgements_;  ///< used where Manner::completes_early
  Context knock_;
  bool knocked_;
  Context ask_;  ///< of `ask_for_rest`, one at a time
  std::uint64_t ask_end_ = 0;
  std::uint32_t in_flight_ = 0;
  std::uint64_t progress_ns_ = 0;  ///< when the link last got on, or began to be busy
  bool ever_completed_ = false;
  bool down_ = false;
  mutable std::mutex reason_mutex_;
  std::string reason_;
};

}  // namespace mk::fabric::ofi
