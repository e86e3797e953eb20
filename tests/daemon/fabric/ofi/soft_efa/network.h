/// \file
/// The software EFA's objects, and the network between their endpoints. One lock for all of it:
/// nothing here is meant to be quick.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace mk::soft_efa {

inline constexpr std::size_t kSendQueue = 256;
inline constexpr std::size_t kReceiveQueue = 256;
inline constexpr std::size_t kMessageMax = 8192;
inline constexpr std::size_t kPiece = 4096;
inline constexpr std::size_t kPiecesMax = 48;

/// What a device reports of an operation (EFA's own numbers).
enum class Status : int {
  kOk = 0,
  kBadLocalKey = 5,
  kBadRemoteAddress = 7,
  kBadQueuePair = 9,
  kMessageTooLong = 11,
  kUnresponsive = 13,
  kUnknownPeer = 14,
};
const char* text_of(int status);

/// As EFA's: device, queue pair, and a number that tells a queue pair from its successor.
struct Address {
  std::array<std::uint8_t, 16> gid{};
  std::uint16_t queue = 0;
  std::uint16_t reserved = 0;
  std::uint32_t connection = 0;
  std::uint64_t reserved2 = 0;
  bool operator==(const Address&) const = default;
};
static_assert(sizeof(Address) == 32);

struct Device {
  std::string name;
  std::array<std::uint8_t, 16> gid{};
  bool up = true;
};

// The program holds pointers to what these are made of.

struct Fabric : fid_fabric {
  std::uint32_t version = 0;  ///< of the API that was asked for
  std::size_t users = 0;
};
struct Domain : fid_domain {
  Fabric* of = nullptr;
  Device* device = nullptr;
  std::uint64_t capabilities = 0;
  bool descriptors = false;
  std::size_t users = 0;
};
struct Table : fid_av {
  Domain* domain = nullptr;
  std::vector<Address> entries;  ///< that of a removed one: all zeros
  fi_addr_t place_of(const Address& address) const {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i] == address) return i;
    }
    return FI_ADDR_NOTAVAIL;
  }
  std::size_t users = 0;
};
struct Queue : fid_cq {
  Domain* domain = nullptr;
  std::size_t size = 0;
  std::deque<fi_cq_data_entry> entries;
  std::deque<fi_addr_t> sources;  ///< of the entries
  void push(const fi_cq_data_entry& entry, fi_addr_t source = FI_ADDR_NOTAVAIL) {
    entries.push_back(entry);
    sources.push_back(source);
  }
  std::deque<fi_cq_err_entry> errors;
  std::size_t users = 0;
};
struct Region : fid_mr {
  Domain* domain = nullptr;
  std::uint64_t first = 0;  ///< what its first byte is called, here and on the wire
  std::uint64_t bytes = 0;
  std::byte* memory = nullptr;
  std::uint64_t access = 0;
  void* mapping = nullptr;  ///< of a dmabuf, by us
  std::size_t mapping_bytes = 0;
  /// Of a dmabuf: what is on its way to the GPU.
  std::vector<std::pair<std::uint64_t, std::vector<std::byte>>> posted;
  void settle();
};
struct Receive {
  void* buffer = nullptr;
  std::size_t bytes = 0;
  void* context = nullptr;
};
struct Endpoint : fid_ep {
  Domain* domain = nullptr;
  Table* table = nullptr;
  Queue* queue = nullptr;
  std::uint64_t capabilities = 0;
  Address address;
  bool enabled = false;
  bool cuda_forbidden = false;
  bool shared_memory_forbidden = false;
  std::deque<Receive> receives;
  std::size_t in_flight = 0;
};

struct Operation {
  enum class Kind : std::uint8_t { kWrite, kRead, kMessage };
  Kind kind = Kind::kWrite;
  Endpoint* from = nullptr;
  Address to;
  void* context = nullptr;
  std::byte* local = nullptr;
  std::uint64_t bytes = 0;
  void* descriptor = nullptr;
  std::uint64_t remote = 0;
  std::uint64_t key = 0;
  bool with_data = false;
  std::uint64_t data = 0;
  /// What is still to be done, in random order: numbers of pieces; then kArrival and kCompletion.
  std::vector<std::uint32_t> todo;
  bool landed = false;  ///< the last piece is there
};

class Network {
 public:
  static Network& get();

  std::mutex mutex;
  // All below: under the mutex.
  std::vector<std::unique_ptr<Device>> devices;
  std::map<Address, Endpoint*, bool (*)(const Address&, const Address&)> endpoints{
      [](const Address& a, const Address& b) { return std::memcmp(&a, &b, sizeof a) < 0; }};
  std::map<std::uint64_t, Region*> regions;  ///< by key
  std::set<const Table*> tables;
  std::map<std::string, std::pair<int, int>> refusals;  ///< function -> error, times
  std::uint32_t version = FI_VERSION(1, 22);
  bool emulated_writes = false;
  bool gpu_memory = true;
  bool messages_held = false;
  std::size_t objects = 0;
  std::size_t strangers = 0;
  std::size_t flushed_pieces = 0;
  std::uint64_t next_key = 0x1000;
  std::uint16_t next_queue = 1;
  std::uint32_t next_connection = 0x5eed;

  void reset();
  /// 0, or the error (negative) that the test wants of this call.
  int refusal(const std::string& function);
  bool chance(unsigned one_in) { return random_() % one_in == 0; }
  /// Takes an operation; its source must stay until its completion.
  ssize_t post(std::unique_ptr<Operation> operation);
  /// Moves on whatever comes first by chance.
  void run(unsigned steps);
  /// All of it is forgotten.
  void forget(Endpoint& endpoint);
  Device* device_of(const Address& address);

 private:
  Network() { reset(); }
  /// False: it can't get on now.
  bool step(Operation& operation);
  /// The bytes of a region, or null: no such, or not allowed.
  Region* find(std::uint64_t key, const Domain* domain, std::uint64_t at, std::uint64_t bytes,
               std::uint64_t access);
  Status move_piece(Operation& operation, Endpoint& target, std::uint32_t piece);
  bool deliver_message(Operation& operation, Endpoint& target, Status& status);
  void complete(Operation& operation, Status status);

  std::vector<std::unique_ptr<Operation>> operations_;
  std::minstd_rand random_{7};
};

/// Ends the process: the program did what no provider would forgive.
[[noreturn]] void misuse(const char* what);

/// Makes an object of the provider; `users` of what it is made of grows.
template <class T>
T* make(Network& network, std::size_t fclass, void* context, fi_ops* ops) {
  auto* const made = new T;
  made->fid.fclass = fclass;
  made->fid.context = context;
  made->fid.ops = ops;
  ++network.objects;
  return made;
}

int close_endpoint(fid* object);
int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** made, void* context);
int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** made, void* context);
int close_fabric(fid* object);

}  // namespace mk::soft_efa
