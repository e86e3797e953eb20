/// \file
/// One simulated rank: a client that speaks the real protocol and writes real commands into real
/// rings. It does what an operator's blocks do: in every launch it sends chunks to each rail peer
/// into the bank of that epoch, waits for theirs, checks every byte, and releases the bank.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/host/buffer_file.h"
#include "shm/host/protocol.h"
#include "shm/host/segment.h"
#include "tests/sim/node.h"

namespace mk::sim {

/// What all ranks of a job agree on.
struct JobPlan {
  std::string name;
  std::uint32_t uid = 1000;
  std::vector<NodeId> nodes;  ///< by node rank
  std::uint32_t local_size = 1;
  std::uint32_t lanes = 1, slot_count_log2 = 4, flag_count = 128;
  std::uint32_t banks = 2, chunks = 1, chunk_bytes = 64;
  std::uint32_t stages = 4;  ///< chunks of the staging that sends go from, reused in turn
  std::uint32_t launches = 4;
  std::uint64_t think_ns_max = 100 * kMicrosecond;  ///< between launches, and before an answer
  bool farewell = false;                            ///< a last exchange before they detach

  std::uint32_t world() const { return static_cast<std::uint32_t>(nodes.size()) * local_size; }
  std::uint32_t peers() const { return static_cast<std::uint32_t>(nodes.size()) - 1; }
  /// Arrival flags of a rank: of every chunk of every bank, and one for each peer's releases.
  std::uint32_t flag_words() const { return peers() * (banks * chunks + 1); }
  /// Bytes a rank receives from one peer in one epoch.
  std::uint64_t share() const { return std::uint64_t{chunks} * chunk_bytes; }
};

/// How a rank behaves, and from which of its actions on.
enum class Manner {
  kProper,
  kDies,             ///< the process is gone, its socket closes
  kWritesGarbage,    ///< a command that no client may write
  kTakesBufferBack,  ///< deregisters memory that its peers write to
  kLeaves,           ///< detaches while the others go on
  kGoesOn,           ///< launches once more, long after the others have left
};

struct RankPlan {
  Manner manner = Manner::kProper;
  std::uint32_t at_action = 0;
};

class Rank;

/// One run of a job: its ranks from the first connect to the last hang-up.
struct JobRun {
  const JobPlan* plan = nullptr;
  std::uint64_t number = 0;  ///< of all runs of the cluster
  std::vector<std::shared_ptr<Rank>> ranks;
  std::uint32_t left = 0;               ///< ranks that are not over
  std::string excuse;                   ///< why it may fail; empty: it may not
  bool tainted = false;                 ///< a rank of it has written what no operator writes
  std::optional<std::uint32_t> leaver;  ///< a rank that has left in order while the others go on

  void forgive(const std::string& why) {
    if (excuse.empty()) excuse = why;
  }
};

/// What the ranks tell the cluster.
class RankWatch {
 public:
  virtual ~RankWatch() = default;
  virtual std::shared_ptr<Node> node(NodeId id) = 0;  ///< null: its daemon is down
  /// The rank's process is gone; `failure` is empty when it got all it wanted.
  virtual void on_over(JobRun& run, const Rank& rank, const std::string& failure) = 0;
  /// Its memory file, so that what lands there is checked; null: it is gone.
  virtual void on_file(FileId file, Rank* rank) = 0;
};

class Rank final : public ClientEnd, public std::enable_shared_from_this<Rank> {
 public:
  Rank(World& world, RankWatch& watch, JobRun& run, std::uint32_t rank, const RankPlan& behaviour);
  ~Rank() override;

  void start();
  /// Proxies have worked, or the network has written: looks at flags and counters.
  void look();
  /// Checks what the network has just put into its memory.
  void on_data(const Landing& landing);

  NodeId node() const { return job_.nodes[node_rank_]; }
  std::uint32_t rank() const { return rank_; }
  bool over() const { return stage_ == Stage::kOver; }
  std::uint64_t over_at_ns() const { return over_at_ns_; }
  /// It is there, or was not long ago.
  bool lately() const;
  std::string describe() const;

  // ClientEnd
  void on_frame(shm::Frame frame) override;
  void on_closed() override;

 private:
  enum class Stage {
    kHello,
    kAttach,
    kSend,
    kReceive,
    kFlags,
    kSetup,
    kRun,
    kFarewell,
    kDetach,
    kOver
  };
  static const char* name(Stage stage);

  // rank.cc: the protocol
  void connect();
  void next_request();
  template <class Message>
  void ask(const Message& message, std::uint64_t limit_ns, int fd = -1);
  void on_reply(shm::Frame& frame);
  void on_setup(const shm::ExchangeReply& reply);
  void attached(shm::Frame& frame);
  Result<shm::BufferFile> new_buffer(std::uint64_t bytes);
  /// It has met an error: ends the process a little later.
  void fail(const std::string& why);
  /// The process ends here and now.
  void exit(const std::string& failure);
  /// One more thing done; true: it is time to misbehave, and that was it.
  bool act();
  void misbehave();
  void violate(const std::string& what);

  // rank_launch.cc: the launches
  void poke(std::uint64_t delay_ns);
  void run_on();
  void begin_launch();
  bool send_chunks();
  bool receive_chunks();
  void end_launch();
  bool push(const shm::Command& command);
  void push_garbage();
  bool waits_for_a_leaver() const;
  void use_scratch();
  void check_flags();
  bool check_payload(std::uint32_t peer, std::uint32_t chunk, std::uint32_t epoch);

  // Where things lie.
  std::uint32_t peer_rank(std::uint32_t peer) const;  ///< the peer-th rail peer
  std::uint32_t index_at(std::uint32_t peer) const;   ///< which peer this rank is there
  std::uint64_t slot_offset(std::uint32_t peer, std::uint32_t epoch, std::uint32_t chunk) const {
    return (std::uint64_t{peer} * job_.banks + epoch % job_.banks) * job_.share() +
           std::uint64_t{chunk} * job_.chunk_bytes;
  }
  std::uint64_t staging_bytes() const { return std::uint64_t{job_.stages} * job_.chunk_bytes; }
  std::uint64_t buffer_bytes() const {
    return std::uint64_t{job_.peers()} * job_.banks * job_.share();
  }
  /// Banks have flags of their own, as everywhere in kernels/: on an unordered network the next
  /// epoch may arrive first. Releases need none: a later one says all that an earlier one says.
  std::uint32_t arrival_index(std::uint32_t peer, std::uint32_t epoch, std::uint32_t chunk) const {
    return (peer * job_.banks + epoch % job_.banks) * job_.chunks + chunk;
  }
  std::uint32_t release_index(std::uint32_t peer) const {
    return job_.peers() * job_.banks * job_.chunks + peer;
  }
  std::uint32_t flag(std::uint32_t index) const;

  World& world_;
  RankWatch& watch_;
  JobRun& run_;
  const JobPlan& job_;
  const std::uint32_t rank_, node_rank_, local_rank_;
  const RankPlan behaviour_;
  std::uint32_t actions_ = 0;
  bool misbehaved_ = false;

  Stage stage_ = Stage::kHello;
  std::uint64_t over_at_ns_ = 0;
  std::string failure_;
  std::shared_ptr<Node> daemon_;
  ClientId client_ = 0;
  std::uint64_t request_ = 0;    ///< the last one asked
  std::uint64_t waits_for_ = 0;  ///< the request whose answer takes it on; 0: none
  std::uint64_t scratch_request_ = 0;

  std::optional<shm::Segment> segment_;
  std::optional<shm::BufferFile> send_, receive_, scratch_;
  FileId receive_file_ = 0;
  std::uint16_t send_handle_ = 0, receive_handle_ = 0, scratch_handle_ = 0;
  std::uint32_t flag_base_ = 0;
  struct Known {
    std::uint16_t handle = 0;
    std::uint32_t flag_base = 0;
  };
  std::vector<Known> known_;  ///< by rank: what the setup said
  std::vector<shm::RingProducer> lanes_;
  std::vector<std::uint32_t> shadow_;  ///< the flags as last seen

  std::uint64_t next_poll_ns_ = 0;
  std::uint32_t epoch_ = 0;  ///< of the launch that is under way or was the last
  bool launching_ = false;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> unsent_;  ///< peer and chunk
  std::vector<std::uint32_t> released_;  ///< by peer: the last epoch whose bank it may overwrite
  std::vector<std::uint32_t> told_;      ///< by peer: the last release that was sent
  /// Which command sends from a place of the staging: until it is completed, the place is taken.
  struct Place {
    std::uint32_t lane = 0;
    std::uint64_t until = 0;  ///< commands of the lane
  };
  std::vector<Place> staging_;
  std::uint64_t next_stage_ = 0;
  std::uint64_t resumes_at_ns_ = 0;  ///< kGoesOn
  std::uint32_t extra_launches_ = 0;
};

}  // namespace mk::sim
