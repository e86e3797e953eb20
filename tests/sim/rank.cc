#include "tests/sim/rank.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "shm/layout.h"

namespace mk::sim {

namespace {

/// How long an answer may take. Longer than any pause the simulator makes, and for exchanges than
/// their own time-out.
constexpr std::uint64_t kAnswerNs = 10 * kSecond;
constexpr std::uint32_t kExchangeMs = 20'000;
constexpr std::uint32_t kRendezvousMs = 15'000;
constexpr std::uint64_t kExchangeNs = kExchangeMs * kMillisecond + kAnswerNs;
constexpr std::uint64_t kWithdrawNs = 30 * kSecond + kAnswerNs;

struct SetupBlob {
  std::uint32_t rank, flag_base, handle;
  std::uint64_t run;
};

}  // namespace

Rank::Rank(World& world, RankWatch& watch, JobRun& run, std::uint32_t rank,
           const RankPlan& behaviour)
    : world_(world),
      watch_(watch),
      run_(run),
      job_(*run.plan),
      rank_(rank),
      node_rank_(rank / job_.local_size),
      local_rank_(rank % job_.local_size),
      behaviour_(behaviour),
      known_(job_.world()),
      released_(job_.peers(), 0),
      told_(job_.peers(), 0),
      staging_(job_.stages) {}

Rank::~Rank() = default;

std::string Rank::describe() const {
  return fmt::format("rank {} of job '{}' (run {}, node {}, {})", rank_, job_.name, run_.number,
                     node(), name(stage_));
}

const char* Rank::name(Stage stage) {
  static constexpr const char* kNames[] = {"hello",     "attach", "first buffer", "second buffer",
                                           "flags",     "setup",  "launches",     "farewell",
                                           "detaching", "over"};
  return kNames[static_cast<int>(stage)];
}

void Rank::violate(const std::string& what) {
  world_.violate(fmt::format("{}: {}", describe(), what));
}

void Rank::start() { connect(); }

void Rank::connect() {
  daemon_ = watch_.node(node());
  if (daemon_ == nullptr) {
    world_.at(world_.now() + 50 * kMillisecond, shared_from_this(),
              [](Rank& rank) { rank.connect(); });
    return;
  }
  client_ =
      daemon_->connect({static_cast<pid_t>(1000 + 64 * run_.number + rank_), job_.uid, job_.uid},
                       shared_from_this());
  next_request();
}

/// Asks for what its stage needs.
void Rank::next_request() {
  if (act()) return;
  switch (stage_) {
    case Stage::kHello:
      return ask(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "sim"}, kAnswerNs);
    case Stage::kAttach: {
      shm::Attach attach;
      attach.job = job_.name;
      attach.rank = rank_;
      attach.world = job_.world();
      attach.node_rank = node_rank_;
      attach.nodes = static_cast<std::uint32_t>(job_.nodes.size());
      attach.local_rank = local_rank_;
      attach.local_size = job_.local_size;
      attach.lane_count = job_.lanes;
      attach.slot_count_log2 = job_.slot_count_log2;
      attach.flag_count = job_.flag_count;
      attach.timeout_ms = kRendezvousMs;
      return ask(attach, kAnswerNs);
    }
    case Stage::kSend:
    case Stage::kReceive: {
      const std::uint64_t bytes = stage_ == Stage::kSend ? staging_bytes() : buffer_bytes();
      auto file = new_buffer(bytes);
      if (!file) return fail(file.error().message);
      auto& kept = stage_ == Stage::kSend ? send_ : receive_;
      kept.emplace(std::move(*file));
      const FileId id = file_of(kept->fd());
      if (stage_ == Stage::kReceive) receive_file_ = id;
      watch_.on_file(id, this);
      return ask(shm::RegisterBuffer{bytes, name(stage_)}, kAnswerNs, kept->fd());
    }
    case Stage::kFlags:
      return ask(shm::AllocFlags{job_.flag_words()}, kAnswerNs);
    case Stage::kSetup: {
      const SetupBlob blob{rank_, flag_base_, receive_handle_, run_.number};
      const auto* bytes = reinterpret_cast<const std::byte*>(&blob);
      return ask(shm::Exchange{"setup", {bytes, bytes + sizeof blob}, kExchangeMs}, kExchangeNs);
    }
    case Stage::kRun:
      return poke(world_.random.scaled(100, job_.think_ns_max));
    case Stage::kFarewell:
      if (!job_.farewell) {
        stage_ = Stage::kDetach;
        return next_request();
      }
      return ask(shm::Exchange{"farewell", {}, kExchangeMs}, kExchangeNs);
    case Stage::kDetach:
      return ask(shm::Detach{}, kAnswerNs);
    case Stage::kOver:
      return;
  }
}

template <class Message>
void Rank::ask(const Message& message, std::uint64_t limit_ns, int fd) {
  shm::Frame frame;
  frame.type = static_cast<std::uint16_t>(Message::kType);
  frame.request = ++request_;
  frame.payload = shm::encode_message(message);
  if (fd >= 0) frame.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  const bool aside = stage_ == Stage::kRun;
  (aside ? scratch_request_ : waits_for_) = request_;
  world_.trace(
      [&] { return fmt::format("{} asks {}", describe(), shm::message_type_name(frame.type)); });
  daemon_->send(client_, std::move(frame));
  world_.at(world_.now() + limit_ns, shared_from_this(), [asked = request_](Rank& rank) {
    if (rank.over() || (rank.waits_for_ != asked && rank.scratch_request_ != asked)) return;
    rank.violate(fmt::format("request {} was never answered", asked));
  });
}

void Rank::on_frame(shm::Frame frame) {
  if (over()) return;
  using T = shm::MessageType;
  const auto type = static_cast<T>(frame.type);
  world_.trace(
      [&] { return fmt::format("{} gets {}", describe(), shm::message_type_name(frame.type)); });
  // An answer may have crossed the end; what counts then is that the daemon closes.
  if (type == T::kJobUp || !failure_.empty() || stage_ == Stage::kDetach) return;
  if (type == T::kSessionFailed) {
    const auto failed = shm::decode_message<shm::SessionFailed>(frame.payload);
    return fail(failed ? failed->message : "an unreadable SessionFailed");
  }
  if (frame.request == scratch_request_ && scratch_request_ != 0) {
    scratch_request_ = 0;
    if (type == T::kError) {
      const auto error = shm::decode_message<shm::ErrorReply>(frame.payload);
      return fail(error ? error->message : "an unreadable error");
    }
    if (type == T::kRegisterBufferReply) {
      const auto reply = shm::decode_message<shm::RegisterBufferReply>(frame.payload);
      scratch_handle_ = reply ? reply->handle : shm::kNoHandle;
    }
    return poke(world_.random.scaled(100, job_.think_ns_max));
  }
  if (frame.request != waits_for_) {
    return violate(
        fmt::format("an answer to request {}, and it waits for {}", frame.request, waits_for_));
  }
  waits_for_ = 0;
  if (type == T::kError) {
    const auto error = shm::decode_message<shm::ErrorReply>(frame.payload);
    return fail(error ? error->message : "an unreadable error");
  }
  on_reply(frame);
  if (over() || !failure_.empty()) return;
  stage_ = static_cast<Stage>(static_cast<int>(stage_) + 1);
  world_.at(world_.now() + world_.random.scaled(100, job_.think_ns_max), shared_from_this(),
            [stage = stage_](Rank& rank) {
              if (rank.stage_ == stage && rank.failure_.empty()) rank.next_request();
            });
}

void Rank::on_reply(shm::Frame& frame) {
  if (act()) return;
  switch (stage_) {
    case Stage::kAttach:
      return attached(frame);
    case Stage::kSend:
    case Stage::kReceive: {
      const auto reply = shm::decode_message<shm::RegisterBufferReply>(frame.payload);
      if (!reply) return violate(reply.error().message);
      (stage_ == Stage::kSend ? send_handle_ : receive_handle_) = reply->handle;
      return;
    }
    case Stage::kFlags: {
      const auto reply = shm::decode_message<shm::AllocFlagsReply>(frame.payload);
      if (!reply) return violate(reply.error().message);
      flag_base_ = reply->base;
      shadow_.assign(segment_->shape().flag_count, 0);
      return;
    }
    case Stage::kSetup: {
      const auto reply = shm::decode_message<shm::ExchangeReply>(frame.payload);
      if (!reply) return violate(reply.error().message);
      return on_setup(*reply);
    }
    default:
      return;
  }
}

void Rank::attached(shm::Frame& frame) {
  if (frame.fds.size() != 1) return violate("an attach reply without the session's memory");
  auto segment = shm::Segment::map(std::move(frame.fds.front()));
  if (!segment) return violate(segment.error().message);
  segment_.emplace(std::move(*segment));
  watch_.on_file(file_of(segment_->fd()), this);
  for (std::uint32_t lane = 0; lane < job_.lanes; ++lane) {
    lanes_.push_back({.ring = segment_->ring(lane)});
  }
}

void Rank::on_setup(const shm::ExchangeReply& reply) {
  if (reply.blobs.size() != job_.world()) return violate("an exchange of another world");
  for (std::uint32_t rank = 0; rank < job_.world(); ++rank) {
    SetupBlob blob{};
    if (reply.blobs[rank].size() == sizeof blob) {
      std::memcpy(&blob, reply.blobs[rank].data(), sizeof blob);
    }
    const Rank& sender = *run_.ranks[rank];
    if (blob.rank != rank || blob.run != run_.number || blob.flag_base != sender.flag_base_ ||
        blob.handle != sender.receive_handle_) {
      return violate(fmt::format("the exchange brought what rank {} did not say", rank));
    }
    known_[rank] = {static_cast<std::uint16_t>(blob.handle), blob.flag_base};
  }
}

Result<shm::BufferFile> Rank::new_buffer(std::uint64_t bytes) {
  return shm::BufferFile::create("sim", bytes);
}

void Rank::on_closed() {
  if (over()) return;
  daemon_.reset();
  const bool expected = stage_ == Stage::kDetach && failure_.empty();
  exit(expected ? "" : failure_.empty() ? "the daemon closed the connection" : failure_);
}

void Rank::fail(const std::string& why) {
  if (over() || !failure_.empty()) return;
  failure_ = why;
  waits_for_ = 0;
  scratch_request_ = 0;
  world_.trace([&] { return fmt::format("{} fails: {}", describe(), why); });
  world_.at(world_.now() + world_.random.scaled(kMicrosecond, 50 * kMillisecond),
            shared_from_this(), [](Rank& rank) {
              if (rank.over()) return;
              if (rank.segment_ && rank.world_.random.chance(500'000)) {
                rank.stage_ = Stage::kDetach;
                rank.ask(shm::Detach{}, kAnswerNs);
              } else {
                rank.exit(rank.failure_);
              }
            });
}

void Rank::exit(const std::string& failure) {
  if (over()) return;
  world_.trace([&] { return fmt::format("{} ends: {}", describe(), failure); });
  stage_ = Stage::kOver;
  over_at_ns_ = world_.now();
  if (daemon_ != nullptr) daemon_->hang_up(client_);
  daemon_.reset();
  for (const auto* file : {&send_, &receive_, &scratch_}) {
    if (*file) watch_.on_file(file_of((*file)->fd()), nullptr);
  }
  if (segment_) watch_.on_file(file_of(segment_->fd()), nullptr);
  lanes_.clear();
  segment_.reset();
  send_.reset();
  receive_.reset();
  scratch_.reset();
  watch_.on_over(run_, *this, failure);
}

bool Rank::act() {
  if (behaviour_.manner == Manner::kProper || misbehaved_) return false;
  if (behaviour_.manner == Manner::kGoesOn && (launching_ || epoch_ != job_.launches)) return false;
  if (++actions_ < behaviour_.at_action && behaviour_.manner != Manner::kGoesOn) return false;
  // Rings and buffers can only be misused by who has them.
  if (behaviour_.manner != Manner::kDies && stage_ != Stage::kRun) return false;
  misbehaved_ = true;
  misbehave();
  return true;
}

void Rank::misbehave() {
  world_.trace([&] { return fmt::format("{} misbehaves", describe()); });
  switch (behaviour_.manner) {
    case Manner::kProper:
      return;
    case Manner::kDies:
      return exit("it died");
    case Manner::kWritesGarbage:
      run_.tainted = true;
      return push_garbage();
    case Manner::kTakesBufferBack:
      run_.tainted = true;
      if (scratch_request_ == 0) ask(shm::DeregisterBuffer{receive_handle_}, kWithdrawNs);
      return poke(kMicrosecond);
    case Manner::kGoesOn:
      extra_launches_ = 1;
      resumes_at_ns_ = world_.now() + 12 * kSecond;
      return poke(12 * kSecond);
    case Manner::kLeaves:
      run_.leaver = rank_;
      stage_ = Stage::kDetach;
      scratch_request_ = 0;
      return next_request();
  }
}

void Rank::use_scratch() {
  if (scratch_request_ != 0) return;
  if (scratch_handle_ == shm::kNoHandle) {
    auto file = new_buffer(4096);
    if (!file) return fail(file.error().message);
    scratch_.emplace(std::move(*file));
    ask(shm::RegisterBuffer{4096, "scratch"}, kAnswerNs, scratch_->fd());
  } else {
    ask(shm::DeregisterBuffer{std::exchange(scratch_handle_, shm::kNoHandle)}, kWithdrawNs);
  }
}

}  // namespace mk::sim
