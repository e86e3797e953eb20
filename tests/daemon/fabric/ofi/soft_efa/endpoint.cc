// Endpoints: their options, their addresses, and giving them work.
#include <rdma/fi_ext.h>

#include <utility>

#include "tests/daemon/fabric/ofi/soft_efa/network.h"

namespace mk::soft_efa {
namespace {

// As in the headers of later versions than the one that this may be built with.
constexpr int kCudaApiPermitted = 10;
constexpr int kSharedMemoryPermitted = 11;
constexpr int kEmulatedWrite = FI_OPT_EFA_RNR_RETRY + 2;

Endpoint& as_endpoint(fid* object) { return *reinterpret_cast<Endpoint*>(object); }

int bind(fid* object, fid* other, std::uint64_t) {
  const std::lock_guard lock(Network::get().mutex);
  Endpoint& endpoint = as_endpoint(object);
  if (endpoint.enabled) misuse("an endpoint is bound after it was enabled");
  if (other->fclass == FI_CLASS_AV) {
    endpoint.table = reinterpret_cast<Table*>(other);
    ++endpoint.table->users;
  } else if (other->fclass == FI_CLASS_CQ) {
    endpoint.queue = reinterpret_cast<Queue*>(other);
    ++endpoint.queue->users;
  } else {
    return -FI_EINVAL;
  }
  return 0;
}

int control(fid* object, int command, void*) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal("fi_enable")) return error;
  Endpoint& endpoint = as_endpoint(object);
  if (command != FI_ENABLE) return -FI_ENOSYS;
  if (endpoint.table == nullptr || endpoint.queue == nullptr) return -FI_ENOAV;
  if (FI_VERSION_GE(network.version, FI_VERSION(1, 18))) {
    if (!endpoint.cuda_forbidden) misuse("an endpoint is enabled that may call CUDA");
    if (!endpoint.shared_memory_forbidden)
      misuse("an endpoint is enabled that may go around the device, through shared memory");
  }
  endpoint.enabled = true;
  endpoint.address.gid = endpoint.domain->device->gid;
  endpoint.address.queue = network.next_queue++;
  endpoint.address.connection = network.next_connection++ * 2654435761u;
  network.endpoints[endpoint.address] = &endpoint;
  return 0;
}

int get_option(fid* object, int level, int option, void* value, std::size_t* bytes) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (level != FI_OPT_ENDPOINT || option != kEmulatedWrite ||
      FI_VERSION_LT(network.version, FI_VERSION(1, 18)))
    return -FI_ENOPROTOOPT;
  if (*bytes < sizeof(bool)) return -FI_ETOOSMALL;
  if (!as_endpoint(object).enabled) misuse("what an endpoint emulates is asked before it knows");
  *static_cast<bool*>(value) = network.emulated_writes;
  *bytes = sizeof(bool);
  return 0;
}

int set_option(fid* object, int level, int option, const void* value, std::size_t bytes) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  Endpoint& endpoint = as_endpoint(object);
  if (endpoint.enabled) return -FI_EINVAL;
  if (level != FI_OPT_ENDPOINT || bytes != sizeof(bool)) return -FI_EINVAL;
  const bool permitted = *static_cast<const bool*>(value);
  if (option == kCudaApiPermitted) {
    endpoint.cuda_forbidden = !permitted;
    return network.gpu_memory ? 0 : -FI_EINVAL;  // no CUDA here
  }
  if (option != kSharedMemoryPermitted) return -FI_ENOPROTOOPT;
  endpoint.shared_memory_forbidden = !permitted;
  return 0;
}

int get_name(fid* object, void* address, std::size_t* bytes) {
  const std::lock_guard lock(Network::get().mutex);
  if (!as_endpoint(object).enabled) return -FI_EOPBADSTATE;
  const std::size_t room = std::exchange(*bytes, sizeof(Address));
  if (room < sizeof(Address)) return -FI_ETOOSMALL;
  std::memcpy(address, &as_endpoint(object).address, sizeof(Address));
  return 0;
}

/// Whether `descriptor` is one of registered memory around [local, local + bytes) for that use.
void check_source(const Network& network, const Endpoint& endpoint, const void* local,
                  std::uint64_t bytes, const void* descriptor, std::uint64_t access) {
  if (!endpoint.domain->descriptors || bytes == 0) return;
  const auto first = reinterpret_cast<std::uint64_t>(local);
  for (const auto& [key, region] : network.regions) {
    if (region == descriptor && region->domain == endpoint.domain &&
        (region->access & access) == access && first >= region->first &&
        first + bytes <= region->first + region->bytes)
      return;
  }
  misuse("a descriptor does not cover its memory, or not for that use");
}

/// Where an address that the program names is; null: FI_EINVAL.
const Address* look_up(const Endpoint& endpoint, fi_addr_t place) {
  if (place >= endpoint.table->entries.size()) return nullptr;
  const Address& address = endpoint.table->entries[place];
  return address == Address{} ? nullptr : &address;
}

ssize_t start(fid_ep* ep, Operation::Kind kind, void* local, std::uint64_t bytes, void* descriptor,
              fi_addr_t place, const fi_rma_iov& remote, void* context, const std::uint64_t* data) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  auto& endpoint = *static_cast<Endpoint*>(ep);
  const bool message = kind == Operation::Kind::kMessage;
  const bool reads = kind == Operation::Kind::kRead;
  const std::uint64_t capability = message ? FI_MSG : reads ? FI_READ : FI_RMA;
  if (!endpoint.enabled || (endpoint.capabilities & capability) == 0) return -FI_EOPNOTSUPP;
  if (context == nullptr) misuse("an operation without a context");
  if (message && bytes > kMessageMax) return -FI_EMSGSIZE;
  const Address* const to = look_up(endpoint, place);
  if (to == nullptr) return -FI_EINVAL;
  check_source(network, endpoint, local, bytes, descriptor,
               message ? FI_SEND
               : reads ? FI_READ
                       : FI_WRITE);
  auto operation = std::make_unique<Operation>();
  operation->kind = kind;
  operation->from = &endpoint;
  operation->to = *to;
  operation->context = context;
  operation->local = static_cast<std::byte*>(local);
  operation->bytes = bytes;
  operation->descriptor = descriptor;
  operation->remote = remote.addr;
  operation->key = remote.key;
  operation->with_data = data != nullptr;
  operation->data = data != nullptr ? *data : 0;
  return network.post(std::move(operation));
}

ssize_t write_message(fid_ep* ep, const fi_msg_rma* message, std::uint64_t flags) {
  if ((flags & FI_INJECT) != 0) return -FI_EINVAL;  // as far as this program may know
  if (message->iov_count != 1 || message->rma_iov_count != 1 ||
      message->rma_iov->len != message->msg_iov->iov_len)
    return -FI_EINVAL;
  return start(ep, Operation::Kind::kWrite, message->msg_iov->iov_base, message->msg_iov->iov_len,
               message->desc == nullptr ? nullptr : message->desc[0], message->addr,
               *message->rma_iov, message->context,
               (flags & FI_REMOTE_CQ_DATA) != 0 ? &message->data : nullptr);
}

ssize_t read_remote(fid_ep* ep, void* local, std::size_t bytes, void* descriptor, fi_addr_t place,
                    std::uint64_t remote, std::uint64_t key, void* context) {
  return start(ep, Operation::Kind::kRead, local, bytes, descriptor, place, {remote, bytes, key},
               context, nullptr);
}

ssize_t send(fid_ep* ep, const void* local, std::size_t bytes, void* descriptor, fi_addr_t place,
             void* context) {
  return start(ep, Operation::Kind::kMessage, const_cast<void*>(local), bytes, descriptor, place,
               {}, context, nullptr);
}

ssize_t receive(fid_ep* ep, void* buffer, std::size_t bytes, void* descriptor, fi_addr_t,
                void* context) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  auto& endpoint = *static_cast<Endpoint*>(ep);
  if (!endpoint.enabled || (endpoint.capabilities & FI_MSG) == 0) return -FI_EOPNOTSUPP;
  check_source(network, endpoint, buffer, bytes, descriptor, FI_RECV);
  if (endpoint.receives.size() == kReceiveQueue || network.chance(16)) return -FI_EAGAIN;
  endpoint.receives.push_back({buffer, bytes, context});
  return 0;
}

fi_ops endpoint_object = {
    .size = sizeof(fi_ops), .close = close_endpoint, .bind = bind, .control = control};
fi_ops_ep endpoint_calls = {.size = sizeof(fi_ops_ep), .getopt = get_option, .setopt = set_option};
fi_ops_cm address_calls = {.size = sizeof(fi_ops_cm), .getname = get_name};
fi_ops_msg message_calls = {.size = sizeof(fi_ops_msg), .recv = receive, .send = send};
fi_ops_rma remote_calls = {
    .size = sizeof(fi_ops_rma), .read = read_remote, .writemsg = write_message};

}  // namespace

int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** made, void* context) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal("fi_endpoint")) return error;
  auto* const endpoint = make<Endpoint>(network, FI_CLASS_EP, context, &endpoint_object);
  endpoint->ops = &endpoint_calls;
  endpoint->cm = &address_calls;
  endpoint->msg = &message_calls;
  endpoint->rma = &remote_calls;
  endpoint->domain = static_cast<Domain*>(domain);
  endpoint->capabilities = info->caps;
  ++endpoint->domain->users;
  *made = endpoint;
  return 0;
}

int close_endpoint(fid* object) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  Endpoint& endpoint = as_endpoint(object);
  network.forget(endpoint);
  if (endpoint.table != nullptr) --endpoint.table->users;
  if (endpoint.queue != nullptr) --endpoint.queue->users;
  --endpoint.domain->users;
  --network.objects;
  delete &endpoint;
  return 0;
}

}  // namespace mk::soft_efa
