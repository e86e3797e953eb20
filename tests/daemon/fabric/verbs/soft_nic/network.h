/// \file
/// The software NICs' devices, the objects made of them, and the network between them. One lock for
/// all of it: nothing here is meant to be quick.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace mk::soft_nic {

using Clock = std::chrono::steady_clock;

// The program holds pointers to what these are made of.

struct Device : ibv_device {
  bool up = true;
  bool failed = false;
  bool gone = false;  ///< nobody finds it
  std::uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  std::uint64_t guid = 0;
  std::uint16_t lid = 0;
  std::vector<std::uint16_t> pkeys;
  std::vector<ibv_gid_entry> gids;
};

/// A file that is readable while there is something in a queue.
template <class T>
struct Notices {
  int fd = -1;
  std::deque<T> queue;
  Notices();
  ~Notices();
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;
  void push(const T& item);
  template <class Which>
  void remove(Which which);
  bool take(T& item);  ///< false, and errno is EAGAIN: nothing there
};

struct Context : verbs_context {
  Device* owner = nullptr;
  bool failed = false;  ///< for ever, whatever becomes of the device
  Notices<ibv_async_event> events;
};
struct Region : ibv_mr {
  std::uint64_t first = 0;  ///< what peers call its first byte
  unsigned allowed = 0;
  std::byte* bytes = nullptr;
  bool mapped = false;  ///< of a file, by us
};
struct Channel : ibv_comp_channel {
  Notices<ibv_cq*> ready;
};
struct Completion {
  ibv_wc entry{};
  std::uint32_t requests = 0;  ///< of the send queue, that it stands for
};
struct CompletionQueue : ibv_cq {
  std::deque<Completion> entries;
  std::atomic<std::size_t> count{0};
  bool armed = false;
};
struct Receive {
  std::uint64_t id = 0;
  std::vector<ibv_sge> pieces;
};
struct SharedReceives : ibv_srq {
  std::deque<Receive> receives;
  std::size_t most = 0;
};
struct Path : ibv_ah {
  ibv_ah_attr attributes{};
};

struct Request {
  std::uint64_t id = 0;
  ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
  bool signaled = false;
  bool is_inline = false;
  std::vector<std::byte> inline_bytes;
  std::vector<ibv_sge> pieces;
  std::uint64_t remote = 0;
  std::uint32_t remote_key = 0;
  __be32 immediate = 0;
  ibv_ah_attr path{};  ///< datagrams
  std::uint32_t to_queue = 0;
  std::uint32_t to_key = 0;
};

struct QueuePair : ibv_qp_ex {
  Device* owner = nullptr;
  ibv_qp_cap room{};
  ibv_qp_attr attributes{};
  std::deque<Request> requests;
  std::vector<Request> building;
  std::deque<Receive> receives;
  std::uint32_t taken = 0;  ///< of the send queue, until a completion that stands for it is polled
  std::uint32_t unasked = 0;  ///< ended without one
  std::uint32_t tries = 0;    ///< of the first request
  Clock::time_point not_before{};
  int events_open = 0;  ///< taken and not acknowledged by the program

  ibv_qp& qp() { return qp_base; }
};

inline QueuePair& of(ibv_qp_ex* qp) { return *static_cast<QueuePair*>(qp); }
inline QueuePair& of(ibv_qp* qp) {
  return of(reinterpret_cast<ibv_qp_ex*>(qp));  // qp_base is its first
}
inline Context& of(ibv_context* context) {
  auto* const bytes = reinterpret_cast<std::byte*>(context) - offsetof(verbs_context, context);
  return *static_cast<Context*>(reinterpret_cast<verbs_context*>(bytes));
}

/// Whether what was made of this context has ended with it.
inline bool dead(ibv_context* context) { return of(context).failed; }

class Network {
 public:
  static Network& get();

  std::mutex mutex;
  // All below: under the mutex.
  std::map<std::string, Device> devices;
  std::set<Context*> contexts;
  std::map<const ibv_context*, std::size_t> made;  ///< objects of each, that it must not end before
  std::map<std::uint32_t, Region*> regions;        ///< by key
  std::map<std::uint32_t, QueuePair*> queues;
  std::map<std::string, std::pair<int, int>> refusals;  ///< function -> error, times
  unsigned datagrams_lost_percent = 0;
  bool held = false;
  bool extended = true;
  std::size_t objects = 0;
  std::uint32_t next_key = 0x1000;
  std::uint32_t next_queue = 0x11;

  void reset();
  /// 0, or the error that the test wants of this call.
  int refusal(const std::string& function);
  int post(QueuePair& queue, std::vector<Request>& requests);
  /// `silently`: what it held never comes back.
  void to_error(QueuePair& queue, bool silently = false);
  /// As it was made.
  void to_reset(QueuePair& queue);
  /// Ends it; waits until the program has acknowledged the events it took of it, as libibverbs
  /// does.
  void forget(QueuePair& queue, std::unique_lock<std::mutex>& lock);
  void acknowledged(QueuePair& queue);
  void event(Context& context, const ibv_async_event& event);
  void port_event(Device& device, ibv_event_type type);
  void queue_event(QueuePair& queue, ibv_event_type type);
  /// There may be something to do.
  void wake() { changed_.notify_all(); }

 private:
  Network();
  ~Network();
  void run();
  /// One request of that queue, if it can be done now; false: nothing done, and `due` is when to
  /// try.
  bool step(QueuePair& queue, Clock::time_point& due);
  bool step_connected(QueuePair& queue, Clock::time_point& due);
  void step_datagram(QueuePair& queue);
  QueuePair* peer_of(const QueuePair& queue) const;
  /// Drops what the program has not polled of the queue's completions.
  void drop_completions(const QueuePair& queue);
  Device* device_at(const ibv_ah_attr& path);
  bool take_receive(QueuePair& queue, Receive& receive);
  /// The bytes of a request here, or null: a key that does not allow it.
  std::byte* local(const QueuePair& queue, const ibv_sge& piece, unsigned wanted) const;
  std::byte* find(std::uint32_t key, const ibv_pd* domain, std::uint64_t at, std::uint64_t bytes,
                  unsigned wanted) const;
  void end(QueuePair& queue, ibv_wc_status status);
  void retry(QueuePair& queue, Clock::duration pause, std::uint32_t most, ibv_wc_status failure,
             Clock::time_point& due);
  void complete(ibv_cq* cq, const Completion& completion);

  std::condition_variable changed_;
  std::minstd_rand random_{1};
  bool stop_ = false;
  std::thread thread_;
};

/// What soft_nic.h calls set_ip, without the event.
void give_ip(Device& device, std::uint32_t slot, std::uint32_t ip);

/// Whether an event is one of a queue pair.
bool is_of_queue(ibv_event_type type);

/// Ends the process: the program did what no NIC would forgive.
[[noreturn]] void misuse(const char* what);

}  // namespace mk::soft_nic
