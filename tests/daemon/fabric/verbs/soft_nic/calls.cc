// libibverbs' functions of devices, memory and completions. A program with these files in it never
// calls the library's own.
#include <endian.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "tests/daemon/fabric/verbs/soft_nic/call.h"

namespace mk::soft_nic {
namespace {

int poll_cq(ibv_cq* cq, int most, ibv_wc* entries) {
  auto& queue = *static_cast<CompletionQueue*>(cq);
  // Most polls find nothing, and need not wait for the network's lock to know.
  if (queue.count.load(std::memory_order_acquire) == 0) return 0;
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  int count = 0;
  for (; count < most && !queue.entries.empty(); ++count) {
    const Completion& completion = queue.entries.front();
    entries[count] = completion.entry;
    const auto owner = network.queues.find(completion.entry.qp_num);
    if (owner != network.queues.end()) owner->second->taken -= completion.requests;
    queue.entries.pop_front();
  }
  queue.count.store(queue.entries.size(), std::memory_order_release);
  return count;
}

int req_notify_cq(ibv_cq* cq, int) {
  return act("ibv_req_notify_cq", [cq](Network&) {
    static_cast<CompletionQueue*>(cq)->armed = true;
    return 0;
  });
}

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes,
               std::size_t bytes) {
  return act("ibv_query_port", [&](Network&) {
    const Device& device = *of(context).owner;
    if (dead(context)) return EIO;
    if (port != 1) return EINVAL;
    ibv_port_attr all{};
    all.state = device.up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    all.max_mtu = all.active_mtu = IBV_MTU_1024;
    all.gid_tbl_len = 16;
    all.max_msg_sz = kMessageMax;
    all.pkey_tbl_len = static_cast<std::uint16_t>(device.pkeys.size());
    all.lid = device.lid;
    all.link_layer = device.link_layer;
    std::memcpy(attributes, &all, std::min(bytes, sizeof all));
    return 0;
  });
}

ibv_mr* make_region(const char* name, ibv_pd* domain, std::byte* bytes, std::size_t length,
                    std::uint64_t first, unsigned access, bool mapped) {
  return make(name, domain->context, [&](Network& network) -> ibv_mr* {
    auto* const region = new Region;
    region->context = domain->context;
    region->pd = domain;
    region->addr = bytes;
    region->length = length;
    region->first = first;
    region->allowed = access;
    region->bytes = bytes;
    region->mapped = mapped;
    region->lkey = region->rkey = network.next_key;
    network.next_key += 0x101;
    network.regions[region->lkey] = region;
    return region;
  });
}

}  // namespace
}  // namespace mk::soft_nic

using namespace mk::soft_nic;

#undef ibv_reg_mr
#undef ibv_query_port

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  auto** const list = new ibv_device* [network.devices.size() + 1] {};
  int found = 0;
  for (auto& [name, device] : network.devices) {
    if (!device.gone) list[found++] = &device;
  }
  if (count != nullptr) *count = found;
  return list;
}
void ibv_free_device_list(ibv_device** list) { delete[] list; }
const char* ibv_get_device_name(ibv_device* device) { return device->name; }
__be64 ibv_get_device_guid(ibv_device* device) {
  return htobe64(static_cast<mk::soft_nic::Device*>(device)->guid);
}

ibv_context* ibv_open_device(ibv_device* device) {
  return make("ibv_open_device", nullptr, [device](Network& network) -> ibv_context* {
    if (static_cast<Device*>(device)->failed) {
      errno = EIO;
      return nullptr;
    }
    auto* const made = new Context;
    made->owner = static_cast<Device*>(device);
    made->sz = sizeof(verbs_context);
    made->query_port = query_port;
    made->create_qp_ex = create_qp_ex;
    ibv_context& context = made->context;
    context.device = device;
    context.async_fd = made->events.fd;
    context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    context.ops.poll_cq = poll_cq;
    context.ops.req_notify_cq = req_notify_cq;
    context.ops.post_send = post_send;
    context.ops.post_recv = post_recv;
    context.ops.post_srq_recv = post_srq_recv;
    network.contexts.insert(made);
    return &context;
  });
}
int ibv_close_device(ibv_context* context) {
  Context* const closed = &of(context);
  return destroy(closed, nullptr, [closed, context](Network& network) {
    if (network.made[context] != 0) misuse("a device is closed before what was made of it");
    network.made.erase(context);
    network.contexts.erase(closed);
  });
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  return act("ibv_query_device", [&](Network&) {
    if (dead(context)) return EIO;
    *attributes = {};
    attributes->max_qp_wr = kWorkRequestsMax;
    attributes->max_cqe = kCompletionsMax;
    attributes->max_srq = 16;
    attributes->max_srq_wr = kWorkRequestsMax;
    attributes->max_pkeys = static_cast<std::uint16_t>(of(context).owner->pkeys.size());
    attributes->phys_port_cnt = 1;
    return 0;
  });
}
int ibv_query_port(ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* attributes) {
  return query_port(context, port, reinterpret_cast<ibv_port_attr*>(attributes),
                    offsetof(ibv_port_attr, port_cap_flags2));
}
int ibv_query_pkey(ibv_context* context, std::uint8_t, int index, __be16* key) {
  return act("ibv_query_pkey", [&](Network&) {
    if (dead(context)) return EIO;
    const auto& keys = of(context).owner->pkeys;
    if (index < 0 || static_cast<std::size_t>(index) >= keys.size()) return EINVAL;
    *key = htobe16(keys[static_cast<std::size_t>(index)]);
    return 0;
  });
}
int ibv_query_gid(ibv_context* context, std::uint8_t, int index, ibv_gid* gid) {
  return act("ibv_query_gid", [&](Network&) {
    if (dead(context)) return EIO;
    for (const ibv_gid_entry& entry : of(context).owner->gids) {
      if (entry.gid_index != static_cast<std::uint32_t>(index)) continue;
      *gid = entry.gid;
      return 0;
    }
    return ENODATA;
  });
}
ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t most,
                             std::uint32_t, std::size_t entry_bytes) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal("ibv_query_gid_table")) return -error;
  if (dead(context)) return -EIO;
  if (entry_bytes != sizeof(ibv_gid_entry)) misuse("GID entries of another size");
  const auto& gids = of(context).owner->gids;
  const std::size_t count = std::min(most, gids.size());
  std::copy_n(gids.begin(), count, entries);
  return static_cast<ssize_t>(count);
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  return make("ibv_alloc_pd", context, [context](Network&) { return new ibv_pd{context, 0}; });
}
int ibv_dealloc_pd(ibv_pd* domain) {
  return destroy(domain, domain->context, [domain](Network& network) {
    for (const auto& [key, region] : network.regions) {
      if (region->pd == domain) misuse("a domain is freed before its memory");
    }
  });
}

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, std::size_t length, int access) {
  return make_region("ibv_reg_mr", domain, static_cast<std::byte*>(address), length,
                     reinterpret_cast<std::uint64_t>(address), static_cast<unsigned>(access),
                     false);
}
ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* address, std::size_t length, std::uint64_t first,
                         unsigned access) {
  return make_region("ibv_reg_mr", domain, static_cast<std::byte*>(address), length, first, access,
                     false);
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t length,
                          std::uint64_t first, int fd, int access) {
  constexpr std::uint64_t kPage = 4096;
  struct stat file {};
  if (::fstat(fd, &file) != 0) return nullptr;
  const auto size = static_cast<std::uint64_t>(file.st_size);
  if (first % kPage != offset % kPage || offset > size || length > size - offset) {
    errno = EINVAL;
    return nullptr;
  }
  const std::uint64_t before = offset % kPage;
  void* const mapped = ::mmap(nullptr, before + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                              static_cast<off_t>(offset - before));
  if (mapped == MAP_FAILED) return nullptr;
  ibv_mr* const region =
      make_region("ibv_reg_dmabuf_mr", domain, static_cast<std::byte*>(mapped) + before, length,
                  first, static_cast<unsigned>(access), true);
  if (region == nullptr) ::munmap(mapped, before + length);
  return region;
}
int ibv_dereg_mr(ibv_mr* mr) {
  auto* const region = static_cast<Region*>(mr);
  return destroy(region, region->context, [region](Network& network) {
    network.regions.erase(region->lkey);
    if (!region->mapped) return;
    const auto before = reinterpret_cast<std::uint64_t>(region->bytes) % 4096;
    ::munmap(region->bytes - before, region->length + before);
  });
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return make("ibv_create_comp_channel", context, [context](Network&) -> ibv_comp_channel* {
    auto* const made = new Channel;
    made->context = context;
    made->fd = made->ready.fd;
    made->refcnt = 0;
    return made;
  });
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return destroy(static_cast<Channel*>(channel), channel->context, [](Network&) {});
}
ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* data, ibv_comp_channel* channel,
                      int) {
  return make("ibv_create_cq", context, [&](Network&) -> ibv_cq* {
    if (entries < 1 || entries > kCompletionsMax) {
      errno = EINVAL;
      return nullptr;
    }
    auto* const made = new CompletionQueue;
    made->context = context;
    made->channel = channel;
    made->cq_context = data;
    made->cqe = entries;
    return made;
  });
}
int ibv_destroy_cq(ibv_cq* cq) {
  return destroy(static_cast<CompletionQueue*>(cq), cq->context, [cq](Network& network) {
    for (const auto& [number, queue] : network.queues) {
      if (queue->qp().send_cq == cq || queue->qp().recv_cq == cq)
        misuse("a completion queue is destroyed before its queue pairs");
    }
  });
}
int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** data) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (!static_cast<Channel*>(channel)->ready.take(*cq)) return -1;
  *data = (*cq)->cq_context;
  return 0;
}
void ibv_ack_cq_events(ibv_cq*, unsigned) {}

ibv_srq* ibv_create_srq(ibv_pd* domain, ibv_srq_init_attr* wanted) {
  return make("ibv_create_srq", domain->context, [&](Network&) -> ibv_srq* {
    auto* const made = new SharedReceives;
    made->context = domain->context;
    made->pd = domain;
    made->most = wanted->attr.max_wr;
    return made;
  });
}
int ibv_destroy_srq(ibv_srq* srq) {
  return destroy(static_cast<SharedReceives*>(srq), srq->context, [srq](Network& network) {
    for (const auto& [number, queue] : network.queues) {
      if (queue->qp().srq == srq) misuse("shared receives are destroyed before their queue pairs");
    }
  });
}

ibv_ah* ibv_create_ah(ibv_pd* domain, ibv_ah_attr* attributes) {
  return make("ibv_create_ah", domain->context, [&](Network&) -> ibv_ah* {
    if (!has_gid(*of(domain->context).owner, *attributes)) {
      errno = EINVAL;
      return nullptr;
    }
    auto* const made = new Path;
    made->context = domain->context;
    made->pd = domain;
    made->attributes = *attributes;
    return made;
  });
}
int ibv_destroy_ah(ibv_ah* path) {
  return destroy(static_cast<Path*>(path), path->context, [](Network&) {});
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (!of(context).events.take(*event)) return -1;
  if (is_of_queue(event->event_type)) ++of(event->element.qp).events_open;
  return 0;
}
void ibv_ack_async_event(ibv_async_event* event) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (is_of_queue(event->event_type)) network.acknowledged(of(event->element.qp));
}

}  // extern "C"
