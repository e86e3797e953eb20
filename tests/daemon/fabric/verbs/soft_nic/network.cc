#include "tests/daemon/fabric/verbs/soft_nic/network.h"

#include <endian.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace mk::soft_nic {
namespace {

constexpr std::size_t kRouteBytes = 40;  ///< before a received datagram
constexpr std::size_t kStepsAtOnce = 64;
constexpr std::uint32_t kNotReadyForEver = 7;
/// The specification's unit of acknowledge time-outs: 4.096 µs times a power of two.
Clock::duration ack_time(std::uint8_t code) {
  return std::chrono::nanoseconds(std::uint64_t{4096} << code);
}

ibv_gid_entry gid_entry(std::uint32_t index, std::uint32_t type, const std::uint8_t (&raw)[16]) {
  ibv_gid_entry entry{};
  std::memcpy(entry.gid.raw, raw, sizeof raw);
  entry.gid_index = index;
  entry.port_num = 1;
  entry.gid_type = type;
  return entry;
}

Device make_device(const char* name, std::uint8_t number, std::uint8_t link_layer) {
  Device device;
  std::snprintf(device.name, sizeof device.name, "%s", name);
  device.node_type = IBV_NODE_CA;
  device.transport_type = IBV_TRANSPORT_IB;
  device.link_layer = link_layer;
  device.guid = 0x0200'00ff'fe00'0000 + number;
  device.pkeys = {0xffff, 0x8007};
  const std::uint8_t raw[16] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, number};
  if (link_layer == IBV_LINK_LAYER_INFINIBAND) {
    device.lid = number;
    device.gids = {gid_entry(0, IBV_GID_TYPE_IB, raw)};
    return device;
  }
  device.gids = {gid_entry(0, IBV_GID_TYPE_ROCE_V1, raw), gid_entry(1, IBV_GID_TYPE_ROCE_V2, raw)};
  give_ip(device, 0, 0x0a4d0000u + number);
  return device;
}

}  // namespace

void give_ip(Device& device, std::uint32_t slot, std::uint32_t ip) {
  const std::uint32_t index = 2 + 2 * slot;
  std::erase_if(device.gids, [index](const ibv_gid_entry& entry) {
    return entry.gid_index == index || entry.gid_index == index + 1;
  });
  if (ip == 0) return;
  const auto byte = [ip](unsigned shift) { return static_cast<std::uint8_t>(ip >> shift); };
  const std::uint8_t raw[16] = {0, 0, 0,    0,    0,        0,        0,       0,
                                0, 0, 0xff, 0xff, byte(24), byte(16), byte(8), byte(0)};
  device.gids.push_back(gid_entry(index, IBV_GID_TYPE_ROCE_V1, raw));
  device.gids.push_back(gid_entry(index + 1, IBV_GID_TYPE_ROCE_V2, raw));
}

void misuse(const char* what) {
  std::fprintf(stderr, "soft NIC: %s\n", what);
  std::_Exit(3);  // no destructors: this thread may hold the lock
}

bool is_of_queue(ibv_event_type type) {
  return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR ||
         type == IBV_EVENT_QP_ACCESS_ERR;
}

template <class T>
Notices<T>::Notices() : fd(::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {}
template <class T>
Notices<T>::~Notices() {
  ::close(fd);
}
template <class T>
void Notices<T>::push(const T& item) {
  queue.push_back(item);
  const std::uint64_t one = 1;
  if (::write(fd, &one, sizeof one) != sizeof one) misuse("an eventfd takes no count");
}
template <class T>
bool Notices<T>::take(T& item) {
  std::uint64_t one = 0;
  if (queue.empty()) {
    errno = EAGAIN;
    return false;
  }
  if (::read(fd, &one, sizeof one) != sizeof one) misuse("an eventfd gives no count");
  item = queue.front();
  queue.pop_front();
  return true;
}
template <class T>
template <class Which>
void Notices<T>::remove(Which which) {
  for (std::size_t gone = std::erase_if(queue, which); gone > 0; --gone) {
    std::uint64_t one = 0;
    if (::read(fd, &one, sizeof one) != sizeof one) misuse("an eventfd gives no count");
  }
}
template struct Notices<ibv_async_event>;
template struct Notices<ibv_cq*>;

Network& Network::get() {
  static Network network;
  return network;
}

Network::Network() {
  reset();
  thread_ = std::thread([this] { run(); });
}

Network::~Network() {
  {
    const std::lock_guard lock(mutex);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void Network::reset() {
  if (objects != 0) misuse("reset while there are objects");
  made.clear();
  devices.clear();
  devices.emplace("soft0", make_device("soft0", 1, IBV_LINK_LAYER_ETHERNET));
  devices.emplace("soft1", make_device("soft1", 2, IBV_LINK_LAYER_ETHERNET));
  devices.emplace("softib0", make_device("softib0", 3, IBV_LINK_LAYER_INFINIBAND));
  devices.emplace("softib1", make_device("softib1", 4, IBV_LINK_LAYER_INFINIBAND));
  refusals.clear();
  datagrams_lost_percent = 0;
  held = false;
  extended = true;
}

int Network::refusal(const std::string& function) {
  const auto found = refusals.find(function);
  if (found == refusals.end() || found->second.second == 0) return 0;
  --found->second.second;
  return found->second.first;
}

// -- the NICs' thread -----------------------------------------------------------------------------

void Network::run() {
  std::unique_lock lock(mutex);
  while (!stop_) {
    Clock::time_point due = Clock::now() + std::chrono::seconds(1);
    std::size_t steps = 0;
    // Queue pairs in an order of their own, as on several NICs; one's requests in theirs.
    std::vector<std::uint32_t> order;
    for (const auto& [number, queue] : queues) {
      if (!queue->requests.empty()) order.push_back(number);
    }
    std::shuffle(order.begin(), order.end(), random_);
    for (const std::uint32_t number : order) {
      for (std::size_t i = 0; i < 8 && steps < kStepsAtOnce; ++i) {
        const auto found = queues.find(number);
        if (found == queues.end() || !step(*found->second, due)) break;
        ++steps;
      }
    }
    if (steps == 0) {
      changed_.wait_until(lock, due);
      continue;
    }
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
}

bool Network::step(QueuePair& queue, Clock::time_point& due) {
  if (queue.requests.empty() || held || queue.qp().state != IBV_QPS_RTS) return false;
  if (queue.qp().qp_type == IBV_QPT_UD) {
    step_datagram(queue);
    return true;
  }
  if (queue.not_before > Clock::now()) {
    due = std::min(due, queue.not_before);
    return false;
  }
  return step_connected(queue, due);
}

namespace {

/// The key that a queue pair speaks with; 0: none, where the table has nothing at its place.
std::uint16_t key_of(const QueuePair& queue) {
  const auto& keys = queue.owner->pkeys;
  const std::size_t index = queue.attributes.pkey_index;
  return index < keys.size() ? keys[index] : std::uint16_t{0};
}

/// Of one partition, and not both limited members of it.
bool share_partition(const QueuePair& a, const QueuePair& b) {
  constexpr unsigned kFull = 0x8000;
  const unsigned one = key_of(a), other = key_of(b);
  return (one & ~kFull) != 0 && (one & ~kFull) == (other & ~kFull) && ((one | other) & kFull) != 0;
}

}  // namespace

Device* Network::device_at(const ibv_ah_attr& path) {
  for (auto& [name, device] : devices) {
    if (!device.up || device.failed) continue;
    if (path.is_global == 0) {
      if (device.lid != 0 && device.lid == path.dlid) return &device;
      continue;
    }
    for (const ibv_gid_entry& entry : device.gids) {
      if (std::memcmp(entry.gid.raw, path.grh.dgid.raw, sizeof entry.gid.raw) == 0) return &device;
    }
  }
  return nullptr;
}

QueuePair* Network::peer_of(const QueuePair& queue) const {
  const auto found = queues.find(queue.attributes.dest_qp_num);
  if (found == queues.end()) return nullptr;
  QueuePair& peer = *found->second;
  const bool listens = peer.qp().qp_type == IBV_QPT_RC &&
                       (peer.qp().state == IBV_QPS_RTR || peer.qp().state == IBV_QPS_RTS);
  // A receiver that expects other packets takes these for old or lost ones.
  const bool knows = peer.attributes.dest_qp_num == queue.qp_base.qp_num &&
                     peer.attributes.rq_psn == queue.attributes.sq_psn;
  return listens && knows && share_partition(queue, peer) ? &peer : nullptr;
}

bool Network::take_receive(QueuePair& queue, Receive& receive) {
  auto& receives = queue.qp().srq != nullptr
                       ? static_cast<SharedReceives*>(queue.qp().srq)->receives
                       : queue.receives;
  if (receives.empty()) return false;
  receive = std::move(receives.front());
  receives.pop_front();
  return true;
}

std::byte* Network::find(std::uint32_t key, const ibv_pd* domain, std::uint64_t at,
                         std::uint64_t bytes, unsigned wanted) const {
  const auto found = regions.find(key);
  if (found == regions.end()) return nullptr;
  const Region& region = *found->second;
  if (region.pd != domain || (region.allowed & wanted) != wanted || at < region.first ||
      at - region.first > region.length || bytes > region.length - (at - region.first))
    return nullptr;
  return region.bytes + (at - region.first);
}

std::byte* Network::local(const QueuePair& queue, const ibv_sge& piece, unsigned wanted) const {
  return find(piece.lkey, queue.qp_base.pd, piece.addr, piece.length, wanted);
}

void Network::retry(QueuePair& queue, Clock::duration pause, std::uint32_t most,
                    ibv_wc_status failure, Clock::time_point& due) {
  if (queue.tries++ >= most) {
    end(queue, failure);
    return;
  }
  queue.not_before = Clock::now() + pause;
  due = std::min(due, queue.not_before);
}

bool Network::step_connected(QueuePair& queue, Clock::time_point& due) {
  Request& request = queue.requests.front();
  Device* const device = device_at(queue.attributes.ah_attr);
  QueuePair* const peer = peer_of(queue);
  if (!queue.owner->up || device == nullptr || peer == nullptr || peer->owner != device) {
    retry(queue, ack_time(queue.attributes.timeout), queue.attributes.retry_cnt,
          IBV_WC_RETRY_EXC_ERR, due);
    return false;
  }
  const bool read = request.opcode == IBV_WR_RDMA_READ;
  const std::uint64_t bytes = request.is_inline        ? request.inline_bytes.size()
                              : request.pieces.empty() ? 0
                                                       : request.pieces.front().length;
  std::byte* here = request.inline_bytes.data();
  if (!request.is_inline && bytes > 0) {
    here = local(queue, request.pieces.front(), read ? IBV_ACCESS_LOCAL_WRITE : 0);
    if (here == nullptr) {
      end(queue, IBV_WC_LOC_PROT_ERR);
      return true;
    }
  }
  std::byte* there = nullptr;
  if (bytes > 0) {
    const unsigned wanted = read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    if ((peer->attributes.qp_access_flags & wanted) != 0)
      there = find(request.remote_key, peer->qp().pd, request.remote, bytes, wanted);
    if (there == nullptr) {
      end(queue, IBV_WC_REM_ACCESS_ERR);
      to_error(*peer);
      queue_event(*peer, IBV_EVENT_QP_ACCESS_ERR);
      return true;
    }
  }
  if (request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
    Receive receive;
    if (!take_receive(*peer, receive)) {
      const std::uint32_t most = queue.attributes.rnr_retry;
      retry(queue, std::chrono::microseconds(640), most == kNotReadyForEver ? ~0u : most,
            IBV_WC_RNR_RETRY_EXC_ERR, due);
      return false;
    }
    if (bytes > 0) std::memcpy(there, here, bytes);
    Completion arrival;
    arrival.entry.wr_id = receive.id;
    arrival.entry.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    arrival.entry.byte_len = static_cast<std::uint32_t>(bytes);
    arrival.entry.imm_data = request.immediate;
    arrival.entry.wc_flags = IBV_WC_WITH_IMM;
    arrival.entry.qp_num = peer->qp().qp_num;
    complete(peer->qp().recv_cq, arrival);
  } else if (read) {
    std::memcpy(here, there, bytes);
  } else if (bytes == 4 && request.remote % 4 == 0) {
    // Somebody looks at it while it is written: what was written before is to be seen then.
    std::uint32_t word = 0;
    std::memcpy(&word, here, sizeof word);
    __atomic_store_n(reinterpret_cast<std::uint32_t*>(there), word, __ATOMIC_RELEASE);
  } else if (bytes > 0) {
    std::memcpy(there, here, bytes);
  }
  end(queue, IBV_WC_SUCCESS);
  return true;
}

void Network::step_datagram(QueuePair& queue) {
  const Request& request = queue.requests.front();
  const ibv_sge& piece = request.pieces.front();
  const std::byte* const from = local(queue, piece, 0);
  if (from == nullptr) return end(queue, IBV_WC_LOC_PROT_ERR);
  const auto found = queues.find(request.to_queue);
  // A port that is down lets them out, into nothing.
  const bool lost = !queue.owner->up || random_() % 100 < datagrams_lost_percent;
  if (!lost && found != queues.end()) {
    QueuePair& to = *found->second;
    Receive receive;
    if (to.qp().qp_type == IBV_QPT_UD && to.qp().state >= IBV_QPS_RTR &&
        to.qp().state <= IBV_QPS_RTS && to.owner == device_at(request.path) &&
        to.attributes.qkey == request.to_key && share_partition(queue, to) &&
        take_receive(to, receive)) {
      const ibv_sge& room = receive.pieces.front();
      Completion arrival;
      arrival.entry.wr_id = receive.id;
      arrival.entry.opcode = IBV_WC_RECV;
      arrival.entry.qp_num = to.qp().qp_num;
      arrival.entry.src_qp = queue.qp().qp_num;
      arrival.entry.wc_flags = IBV_WC_GRH;
      std::byte* const target = local(to, room, IBV_ACCESS_LOCAL_WRITE);
      if (target == nullptr || room.length < kRouteBytes + piece.length) {
        arrival.entry.status = IBV_WC_LOC_LEN_ERR;
      } else {
        std::memset(target, 0, kRouteBytes);
        std::memcpy(target + kRouteBytes, from, piece.length);
        arrival.entry.byte_len = static_cast<std::uint32_t>(kRouteBytes + piece.length);
      }
      complete(to.qp().recv_cq, arrival);
    }
  }
  end(queue, IBV_WC_SUCCESS);
}

// -- ends -----------------------------------------------------------------------------------------

void Network::end(QueuePair& queue, ibv_wc_status status) {
  const Request request = std::move(queue.requests.front());
  queue.requests.pop_front();
  queue.tries = 0;
  ++queue.unasked;
  if (request.signaled || status != IBV_WC_SUCCESS) {
    Completion completion;
    completion.entry.wr_id = request.id;
    completion.entry.status = status;
    completion.entry.opcode = request.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ
                              : request.opcode == IBV_WR_SEND    ? IBV_WC_SEND
                                                                 : IBV_WC_RDMA_WRITE;
    completion.entry.qp_num = queue.qp().qp_num;
    completion.requests = std::exchange(queue.unasked, 0);
    complete(queue.qp().send_cq, completion);
  }
  if (status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR) to_error(queue);
}

void Network::to_error(QueuePair& queue, bool silently) {
  queue.qp().state = IBV_QPS_ERR;
  if (silently) {
    queue.requests.clear();
    queue.receives.clear();
  }
  while (!queue.requests.empty()) end(queue, IBV_WC_WR_FLUSH_ERR);
  for (const Receive& receive : queue.receives) {
    Completion flushed;
    flushed.entry.wr_id = receive.id;
    flushed.entry.status = IBV_WC_WR_FLUSH_ERR;
    flushed.entry.qp_num = queue.qp().qp_num;
    complete(queue.qp().recv_cq, flushed);
  }
  queue.receives.clear();
}

void Network::drop_completions(const QueuePair& queue) {
  for (ibv_cq* const cq : {queue.qp_base.send_cq, queue.qp_base.recv_cq}) {
    auto& completions = *static_cast<CompletionQueue*>(cq);
    std::erase_if(completions.entries, [&](const Completion& completion) {
      return completion.entry.qp_num == queue.qp_base.qp_num;
    });
    completions.count.store(completions.entries.size(), std::memory_order_release);
  }
}

void Network::to_reset(QueuePair& queue) {
  queue.qp().state = IBV_QPS_RESET;
  queue.requests.clear();
  queue.receives.clear();
  queue.taken = queue.unasked = queue.tries = 0;
  drop_completions(queue);
}

void Network::complete(ibv_cq* cq, const Completion& completion) {
  auto& queue = *static_cast<CompletionQueue*>(cq);
  if (queue.entries.size() == static_cast<std::size_t>(cq->cqe))
    misuse("a completion queue overruns");
  queue.entries.push_back(completion);
  queue.count.store(queue.entries.size(), std::memory_order_release);
  if (cq->channel != nullptr && std::exchange(queue.armed, false))
    static_cast<Channel*>(cq->channel)->ready.push(cq);
}

int Network::post(QueuePair& queue, std::vector<Request>& requests) {
  if (dead(queue.qp().context)) return EIO;
  if (queue.qp().state != IBV_QPS_RTS && queue.qp().state != IBV_QPS_ERR) return EINVAL;
  if (queue.taken + requests.size() > queue.room.max_send_wr) return ENOMEM;
  queue.taken += static_cast<std::uint32_t>(requests.size());
  for (Request& request : requests) queue.requests.push_back(std::move(request));
  requests.clear();
  if (queue.qp().state == IBV_QPS_ERR) to_error(queue);
  wake();
  return 0;
}

void Network::forget(QueuePair& queue, std::unique_lock<std::mutex>& lock) {
  of(queue.qp().context).events.remove([&](const ibv_async_event& event) {
    return is_of_queue(event.event_type) && event.element.qp == &queue.qp();
  });
  changed_.wait(lock, [&] { return queue.events_open == 0; });
  queues.erase(queue.qp().qp_num);
  drop_completions(queue);
}

// -- events ---------------------------------------------------------------------------------------

void Network::acknowledged(QueuePair& queue) {
  --queue.events_open;
  wake();
}

void Network::event(Context& context, const ibv_async_event& event) { context.events.push(event); }

void Network::port_event(Device& device, ibv_event_type type) {
  for (Context* const context : contexts) {
    if (context->owner != &device) continue;
    ibv_async_event happened{};
    happened.event_type = type;
    happened.element.port_num = 1;
    event(*context, happened);
  }
}

void Network::queue_event(QueuePair& queue, ibv_event_type type) {
  for (Context* const context : contexts) {
    if (&context->context != queue.qp().context) continue;
    ibv_async_event happened{};
    happened.event_type = type;
    happened.element.qp = &queue.qp();
    event(*context, happened);
  }
}

}  // namespace mk::soft_nic
