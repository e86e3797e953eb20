#include "tests/daemon/fabric/ofi/soft_efa/network.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/daemon/fabric/ofi/soft_efa/soft_efa.h"

namespace mk::soft_efa {
namespace {

constexpr std::uint32_t kArrival = ~0u;
constexpr std::uint32_t kCompletion = ~0u - 1;

}  // namespace

void misuse(const char* what) {
  std::fprintf(stderr, "soft EFA: %s\n", what);
  std::abort();
}

const char* text_of(int status) {
  switch (static_cast<Status>(status)) {
    case Status::kOk:
      return "Success";
    case Status::kBadLocalKey:
      return "Local memory registration is invalid";
    case Status::kBadRemoteAddress:
      return "Remote memory registration is invalid";
    case Status::kBadQueuePair:
      return "Bad queue pair (QP) number";
    case Status::kMessageTooLong:
      return "Remote buffer too short";
    case Status::kUnresponsive:
      return "Unresponsive remote";
    case Status::kUnknownPeer:
      return "No valid address handle at remote side";
  }
  return "Unknown error";
}

Network& Network::get() {
  static Network network;
  return network;
}

void Network::reset() {
  version = FI_VERSION(1, 22);
  emulated_writes = messages_held = false;
  gpu_memory = true;
  refusals.clear();
  strangers = flushed_pieces = 0;
  for (const char* const name : {"rdmap0s6", "rdmap1s6"}) {
    const auto same = [name](const auto& device) { return device->name == name; };
    const auto known = std::find_if(devices.begin(), devices.end(), same);
    if (known != devices.end()) {
      (*known)->up = true;
      continue;
    }
    auto device = std::make_unique<Device>();
    device->name = name;
    device->gid[0] = 0xfe;
    device->gid[1] = 0x80;
    device->gid[15] = static_cast<std::uint8_t>(devices.size() + 1);
    devices.push_back(std::move(device));
  }
}

int Network::refusal(const std::string& function) {
  const auto found = refusals.find(function);
  if (found == refusals.end() || found->second.second == 0) return 0;
  --found->second.second;
  return -found->second.first;
}

Device* Network::device_of(const Address& address) {
  const auto same = [&](const auto& device) { return device->gid == address.gid; };
  const auto found = std::find_if(devices.begin(), devices.end(), same);
  return found == devices.end() ? nullptr : found->get();
}

ssize_t Network::post(std::unique_ptr<Operation> operation) {
  Endpoint& from = *operation->from;
  if (from.in_flight == kSendQueue || chance(16)) return -FI_EAGAIN;
  ++from.in_flight;
  if (operation->kind != Operation::Kind::kMessage) {
    const std::uint64_t pieces =
        std::clamp<std::uint64_t>(operation->bytes / kPiece, 1, kPiecesMax);
    for (std::uint32_t i = 0; i < pieces; ++i) operation->todo.push_back(i);
    std::shuffle(operation->todo.begin(), operation->todo.end(), random_);
  }
  operations_.push_back(std::move(operation));
  return 0;
}

void Network::run(unsigned steps) {
  while (steps-- > 0 && !operations_.empty()) {
    // Neighbours are more likely to be mixed than those far apart, but all may be.
    const std::size_t window =
        chance(4) ? operations_.size() : std::min<std::size_t>(operations_.size(), 12);
    const std::size_t which = random_() % window;
    if (!step(*operations_[which]) || !operations_[which]->todo.empty() ||
        !operations_[which]->landed)
      continue;
    operations_.erase(operations_.begin() + static_cast<std::ptrdiff_t>(which));
  }
}

bool Network::step(Operation& operation) {
  Device* const there = device_of(operation.to);
  const bool reached = operation.from->domain->device->up && there != nullptr && there->up;
  const auto found = endpoints.find(operation.to);
  if (operation.landed) {
    const std::uint32_t next = operation.todo.back();
    if (next == kArrival && reached && found != endpoints.end()) {
      const Endpoint& target = *found->second;
      Queue& queue = *target.queue;
      if (queue.entries.size() >= queue.size) return false;  // until it is read
      if (operation.data > UINT32_MAX) misuse("4 bytes of data go with a write");
      // What was not asked for is not told.
      const bool told = (target.capabilities & FI_SOURCE) != 0;
      queue.push(
          {nullptr, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, 0, nullptr, operation.data},
          told ? target.table->place_of(operation.from->address) : FI_ADDR_NOTAVAIL);
    }
    if (next == kCompletion) complete(operation, Status::kOk);
    operation.todo.pop_back();
    return true;
  }
  const bool message = operation.kind == Operation::Kind::kMessage;
  if (message && messages_held) return false;
  Status status = Status::kOk;
  if (!reached) {
    status = Status::kUnresponsive;
  } else if (found == endpoints.end()) {
    status = Status::kBadQueuePair;
  } else if (message) {
    if (!deliver_message(operation, *found->second, status)) return false;
  } else {
    status = move_piece(operation, *found->second, operation.todo.back());
    operation.todo.pop_back();
  }
  if (status != Status::kOk) {
    operation.todo.clear();
    operation.landed = true;
    complete(operation, status);
    return true;
  }
  if (!operation.todo.empty()) return true;
  operation.landed = true;
  operation.todo.push_back(kCompletion);
  if (operation.with_data) operation.todo.push_back(kArrival);
  std::shuffle(operation.todo.begin(), operation.todo.end(), random_);
  return true;
}

Region* Network::find(std::uint64_t key, const Domain* domain, std::uint64_t at,
                      std::uint64_t bytes, std::uint64_t access) {
  const auto found = regions.find(key);
  if (found == regions.end()) return nullptr;
  Region& region = *found->second;
  if (region.domain != domain || (region.access & access) != access || at < region.first ||
      at - region.first > region.bytes || bytes > region.bytes - (at - region.first))
    return nullptr;
  return &region;
}

void Region::settle() {
  for (const auto& [offset, piece] : posted)
    std::memcpy(memory + offset, piece.data(), piece.size());
  Network::get().flushed_pieces += posted.size();
  posted.clear();
}

Status Network::move_piece(Operation& operation, Endpoint& target, std::uint32_t piece) {
  const bool read = operation.kind == Operation::Kind::kRead;
  const std::vector<Address>& known = target.table->entries;
  if (std::find(known.begin(), known.end(), operation.from->address) == known.end()) {
    ++strangers;
    return Status::kUnknownPeer;
  }
  if (operation.bytes == 0) return Status::kOk;
  const std::uint64_t pieces = std::clamp<std::uint64_t>(operation.bytes / kPiece, 1, kPiecesMax);
  const std::uint64_t begin = operation.bytes * piece / pieces;
  const std::uint64_t bytes = operation.bytes * (piece + 1) / pieces - begin;
  Region* const there = find(operation.key, target.domain, operation.remote, operation.bytes,
                             read ? FI_REMOTE_READ : FI_REMOTE_WRITE);
  if (there == nullptr) return Status::kBadRemoteAddress;
  const std::uint64_t offset = operation.remote - there->first + begin;
  // A GPU's address says nothing here: what the descriptor stands for is read.
  std::byte* here = operation.local;
  if (operation.descriptor != nullptr) {
    auto* const source = static_cast<Region*>(operation.descriptor);
    if (!std::any_of(regions.begin(), regions.end(),
                     [source](const auto& one) { return one.second == source; }))
      return Status::kBadLocalKey;
    // What the device reads, it reads behind what it wrote.
    if (source->mapping != nullptr) source->settle();
    here = source->memory + (reinterpret_cast<std::uint64_t>(here) - source->first);
  }
  if (read) {
    there->settle();
    std::memcpy(here + begin, there->memory + offset, bytes);
  } else if (there->mapping != nullptr) {
    there->posted.push_back({offset, {here + begin, here + begin + bytes}});
  } else {
    std::memcpy(there->memory + offset, here + begin, bytes);
  }
  return Status::kOk;
}

bool Network::deliver_message(Operation& operation, Endpoint& target, Status& status) {
  if (target.receives.empty()) return false;  // not ready: the device tries again
  const Receive receive = target.receives.front();
  target.receives.pop_front();
  if (receive.bytes < operation.bytes) {
    status = Status::kMessageTooLong;
    return true;
  }
  std::memcpy(receive.buffer, operation.local, operation.bytes);
  target.queue->push({receive.context, FI_MSG | FI_RECV, operation.bytes, receive.buffer, 0});
  return true;
}

void Network::complete(Operation& operation, Status status) {
  --operation.from->in_flight;
  Queue& queue = *operation.from->queue;
  const std::uint64_t flags = operation.kind == Operation::Kind::kMessage ? FI_MSG | FI_SEND
                              : operation.kind == Operation::Kind::kRead  ? FI_RMA | FI_READ
                                                                          : FI_RMA | FI_WRITE;
  if (status == Status::kOk) {
    if (queue.entries.size() >= queue.size) misuse("a completion queue overruns");
    queue.push({operation.context, flags, operation.bytes, nullptr, 0});
    return;
  }
  fi_cq_err_entry error{};
  error.op_context = operation.context;
  error.flags = flags;
  error.err = status == Status::kUnresponsive ? FI_EHOSTUNREACH : FI_EIO;
  error.prov_errno = static_cast<int>(status);
  queue.errors.push_back(error);
}

void Network::forget(Endpoint& endpoint) {
  std::erase_if(operations_, [&](const auto& one) { return one->from == &endpoint; });
  endpoints.erase(endpoint.address);
}

// -- soft_efa.h -----------------------------------------------------------------------------------

namespace {

template <class Change>
auto with_network(Change&& change) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  return change(network);
}

}  // namespace

void reset() {
  with_network([](Network& network) { network.reset(); });
}
void set_version(std::uint32_t major, std::uint32_t minor) {
  with_network([=](Network& network) { network.version = FI_VERSION(major, minor); });
}
void set_emulated_writes(bool emulated) {
  with_network([=](Network& network) { network.emulated_writes = emulated; });
}
void set_gpu_memory(bool reachable) {
  with_network([=](Network& network) { network.gpu_memory = reachable; });
}
void set_up(const std::string& name, bool up) {
  with_network([&](Network& network) {
    for (const auto& device : network.devices) {
      if (device->name == name) device->up = up;
    }
  });
}
void hold_messages(bool held) {
  with_network([=](Network& network) { network.messages_held = held; });
}
void refuse(const std::string& function, int error, int times) {
  with_network([&](Network& network) { network.refusals[function] = {error, times}; });
}
std::size_t strangers() {
  return with_network([](Network& network) { return network.strangers; });
}
std::size_t flushed_pieces() {
  return with_network([](Network& network) { return network.flushed_pieces; });
}
std::size_t addresses() {
  return with_network([](Network& network) {
    std::size_t count = 0;
    for (const Table* const table : network.tables) {
      count += static_cast<std::size_t>(
          std::count_if(table->entries.begin(), table->entries.end(),
                        [](const Address& address) { return address != Address{}; }));
    }
    return count;
  });
}
std::size_t live_objects() {
  return with_network([](Network& network) { return network.objects; });
}

}  // namespace mk::soft_efa
