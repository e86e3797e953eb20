/// \file
/// One gRPC stream to a peer, seen from either end, without any of its meaning: reads and writes
/// one message at a time and reports to its owner. Private to the transport.
///
/// gRPC runs the reports on its own threads, never within a call made here. So the owner may call
/// with its mutex held and take the same mutex in the reports.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "daemon/control/peer_transport.h"
#include "daemon/rpc/grpc_channel.h"
#include "proto/mkernel/v1/peer.grpc.pb.h"

namespace mk::daemon {

namespace v1 = ::mkernel::v1;

class PeerStream;

class PeerStreamOwner {
 public:
  virtual ~PeerStreamOwner() = default;
  /// `incoming` holds a message when `ok`; otherwise the other side sends no more.
  virtual void on_read(PeerStream& stream, bool ok) = 0;
  virtual void on_written(PeerStream& stream, bool ok) = 0;
  /// The last report: the owner deletes the stream in it. It must not wait for later. The stream
  /// keeps its channel alive, and gRPC 1.51 crashes when the last channel of the process goes on
  /// one of its own threads. `status` is the peer's word when we called.
  virtual void on_done(PeerStream& stream, const grpc::Status& status) = 0;
};

/// Everything here is guarded by the owner's mutex.
class PeerStream {
 public:
  virtual ~PeerStream() = default;

  virtual void start_read() = 0;   ///< into `incoming`
  virtual void start_write() = 0;  ///< of queue.front()
  /// The end, once a write under way is done: the calling side says that it sends no more, the
  /// called side sends `status`. Nothing is written afterwards.
  virtual void finish(const grpc::Status& status) = 0;
  /// To be called by the owner when a write is done: does what `finish` had to put off.
  virtual void after_write() = 0;
  virtual void cancel() = 0;  ///< the end, at once and without a word
  /// The peer has ended the stream: nothing is written any more, on_done follows.
  virtual void end_of_reads() = 0;
  /// The called side: whether the stream broke, rather than being closed in order.
  virtual bool broken() const { return false; }
  /// The called side: where the call came from, as gRPC writes it ("ipv4:10.0.0.2:34567").
  virtual std::string remote() const { return {}; }
  /// The called side, over TLS: the names in the caller's certificate.
  virtual std::optional<std::vector<std::string>> certificate_names() const { return {}; }

  v1::PeerMessage incoming;
  std::deque<v1::PeerMessage> queue;  ///< front: being written when `writing`
  std::size_t queue_bytes = 0;
  bool writing = false;
  bool calling = false;          ///< we called
  bool greeted = false;          ///< the peer's Hello was accepted
  bool ended = false;            ///< one direction is over: on_done will say why, or never comes
  std::int64_t ended_ns = 0;     ///< steady clock, when `ended`
  bool paused = false;           ///< no read is under way: the sink has enough to do
  bool detached = false;         ///< no longer its peer's stream: winding down
  NodeId node = 0;               ///< valid when `calling` or `greeted`
  std::uint64_t generation = 0;  ///< of the peer, when `greeted`
  std::int64_t since_ns = 0;  ///< steady clock: when it began, then was greeted, then was detached
};

/// The calling side.
class CallingStream final : public PeerStream,
                            public grpc::ClientBidiReactor<v1::PeerMessage, v1::PeerMessage> {
 public:
  CallingStream(v1::Peer::Stub& stub, PeerStreamOwner& owner) : owner_(owner) {
    calling = true;
    stub.async()->Connect(&context_, this);
    AddHold();  // writes start from outside of the reactions, until the end
  }

  void start_read() override { StartRead(&incoming); }
  void start_write() override { StartWrite(&queue.front()); }
  void finish(const grpc::Status&) override {
    if (!held_) return;
    if (writing) {
      half_close_wanted_ = true;
    } else {
      StartWritesDone();
    }
    release();
  }
  void after_write() override {
    if (half_close_wanted_) StartWritesDone();
    half_close_wanted_ = false;
  }
  void cancel() override {
    context_.TryCancel();
    release();
  }
  void end_of_reads() override { release(); }

 private:
  void OnReadDone(bool ok) override { owner_.on_read(*this, ok); }
  void OnWriteDone(bool ok) override { owner_.on_written(*this, ok); }
  void OnDone(const grpc::Status& status) override { owner_.on_done(*this, status); }
  void release() {
    if (held_) RemoveHold();
    held_ = false;
  }

  PeerStreamOwner& owner_;
  grpc::ClientContext context_;
  bool held_ = true;
  bool half_close_wanted_ = false;
};

/// The called side.
class CalledStream final : public PeerStream,
                           public grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerMessage> {
 public:
  CalledStream(grpc::CallbackServerContext& context, PeerStreamOwner& owner)
      : owner_(owner), context_(context) {}

  void start_read() override { StartRead(&incoming); }
  void start_write() override { StartWrite(&queue.front()); }
  void finish(const grpc::Status& status) override {
    if (finished_) return;
    finished_ = true;
    if (writing) {
      put_off_ = status;
    } else {
      Finish(status);
    }
  }
  void after_write() override {
    if (finished_) Finish(put_off_);
  }
  void cancel() override {
    context_.TryCancel();
    finish(grpc::Status::CANCELLED);
  }
  void end_of_reads() override {}
  bool broken() const override { return context_.IsCancelled(); }
  std::string remote() const override { return context_.peer(); }
  std::optional<std::vector<std::string>> certificate_names() const override {
    const auto context = context_.auth_context();
    if (!context->IsPeerAuthenticated()) return {};
    return daemon::certificate_names(*context);
  }

 private:
  void OnReadDone(bool ok) override { owner_.on_read(*this, ok); }
  void OnWriteDone(bool ok) override { owner_.on_written(*this, ok); }
  void OnDone() override { owner_.on_done(*this, grpc::Status::OK); }

  PeerStreamOwner& owner_;
  grpc::CallbackServerContext& context_;
  grpc::Status put_off_;
  bool finished_ = false;
};

}  // namespace mk::daemon
