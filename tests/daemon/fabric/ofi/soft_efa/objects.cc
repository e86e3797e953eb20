// Domains and what is opened in them, but for endpoints.
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>

#include "daemon/fabric/ofi/domain.h"
#include "tests/daemon/fabric/ofi/soft_efa/network.h"

namespace mk::soft_efa {
namespace {

template <class T>
T& as(fid* object) {
  return *reinterpret_cast<T*>(object);  // a fid is the first member of each
}

/// Runs `body` under the lock, unless the test refuses.
template <class Body>
int act(const char* function, Body&& body) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  if (const int error = network.refusal(function)) return error;
  return body(network);
}

template <class T>
void destroy(Network& network, T& object) {
  --network.objects;
  delete &object;
}

// -- address tables -------------------------------------------------------------------------------

int close_table(fid* object) {
  return act("fi_close", [&](Network& network) {
    Table& table = as<Table>(object);
    if (table.users != 0) misuse("an address table is closed before its endpoint");
    --table.domain->users;
    network.tables.erase(&table);
    destroy(network, table);
    return 0;
  });
}

int insert(fid_av* av, const void* addresses, std::size_t count, fi_addr_t* places, std::uint64_t,
           void*) {
  return act("fi_av_insert", [&](Network& network) {
    Table& table = *static_cast<Table*>(av);
    int taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
      Address address;
      std::memcpy(&address, static_cast<const std::byte*>(addresses) + i * sizeof address,
                  sizeof address);
      const bool known = network.device_of(address) != nullptr && address.reserved == 0;
      places[i] = known ? table.entries.size() : FI_ADDR_NOTAVAIL;
      if (!known) continue;
      table.entries.push_back(address);
      ++taken;
    }
    return taken;
  });
}

int remove(fid_av* av, fi_addr_t* places, std::size_t count, std::uint64_t) {
  return act("fi_av_remove", [&](Network&) {
    Table& table = *static_cast<Table*>(av);
    for (std::size_t i = 0; i < count; ++i) {
      if (places[i] >= table.entries.size() || table.entries[places[i]] == Address{})
        misuse("an address is removed that is not in the table");
      table.entries[places[i]] = {};
    }
    return 0;
  });
}

fi_ops table_object = {.size = sizeof(fi_ops), .close = close_table};
fi_ops_av table_calls = {.size = sizeof(fi_ops_av), .insert = insert, .remove = remove};

int open_table(fid_domain* domain, fi_av_attr*, fid_av** made, void* context) {
  return act("fi_av_open", [&](Network& network) {
    auto* const table = make<Table>(network, FI_CLASS_AV, context, &table_object);
    table->ops = &table_calls;
    table->domain = static_cast<Domain*>(domain);
    ++table->domain->users;
    network.tables.insert(table);
    *made = table;
    return 0;
  });
}

// -- completion queues ----------------------------------------------------------------------------

int close_queue(fid* object) {
  return act("fi_close", [&](Network& network) {
    Queue& queue = as<Queue>(object);
    if (queue.users != 0) misuse("a completion queue is closed before its endpoint");
    --queue.domain->users;
    destroy(network, queue);
    return 0;
  });
}

/// `sources`: null where nobody asks for them.
ssize_t read_from(fid_cq* cq, void* entries, std::size_t count, fi_addr_t* sources) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  network.run(24);
  Queue& queue = *static_cast<Queue*>(cq);
  if (!queue.errors.empty()) return -FI_EAVAIL;
  if (queue.entries.empty()) return -FI_EAGAIN;
  const std::size_t taken = std::min(count, queue.entries.size());
  std::copy_n(queue.entries.begin(), taken, static_cast<fi_cq_data_entry*>(entries));
  if (sources != nullptr) std::copy_n(queue.sources.begin(), taken, sources);
  const auto erase = [taken](auto& all) {
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(taken));
  };
  erase(queue.entries);
  erase(queue.sources);
  return static_cast<ssize_t>(taken);
}

ssize_t read(fid_cq* cq, void* entries, std::size_t count) {
  return read_from(cq, entries, count, nullptr);
}

ssize_t read_error(fid_cq* cq, fi_cq_err_entry* entry, std::uint64_t) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  Queue& queue = *static_cast<Queue*>(cq);
  if (queue.errors.empty()) return -FI_EAGAIN;
  *entry = queue.errors.front();
  queue.errors.pop_front();
  return 1;
}

const char* error_text(fid_cq*, int error, const void*, char* text, std::size_t bytes) {
  if (text != nullptr) std::snprintf(text, bytes, "%s", text_of(error));
  return text_of(error);
}

fi_ops queue_object = {.size = sizeof(fi_ops), .close = close_queue};
fi_ops_cq queue_calls = {.size = sizeof(fi_ops_cq),
                         .read = read,
                         .readfrom = read_from,
                         .readerr = read_error,
                         .strerror = error_text};

int open_queue(fid_domain* domain, fi_cq_attr* attributes, fid_cq** made, void* context) {
  return act("fi_cq_open", [&](Network& network) {
    if (attributes->format != FI_CQ_FORMAT_DATA || attributes->wait_obj != FI_WAIT_NONE)
      return -FI_ENOSYS;
    auto* const queue = make<Queue>(network, FI_CLASS_CQ, context, &queue_object);
    queue->ops = &queue_calls;
    queue->domain = static_cast<Domain*>(domain);
    queue->size = attributes->size;
    ++queue->domain->users;
    *made = queue;
    return 0;
  });
}

// -- memory ---------------------------------------------------------------------------------------

int close_region(fid* object) {
  return act("fi_close", [&](Network& network) {
    Region& region = as<Region>(object);
    network.regions.erase(region.key);
    if (region.mapping != nullptr) ::munmap(region.mapping, region.mapping_bytes);
    --region.domain->users;
    destroy(network, region);
    return 0;
  });
}

fi_ops region_object = {.size = sizeof(fi_ops), .close = close_region};

Region* make_region(Network& network, fid* domain, std::uint64_t first, std::uint64_t bytes,
                    std::byte* memory, std::uint64_t access) {
  auto* const region = make<Region>(network, FI_CLASS_MR, nullptr, &region_object);
  region->domain = &as<Domain>(domain);
  ++region->domain->users;
  region->first = first;
  region->bytes = bytes;
  region->memory = memory;
  region->access = access;
  region->mem_desc = region;
  region->key = network.next_key;
  network.next_key += 0x101;
  network.regions[region->key] = region;
  return region;
}

int reg(fid* domain, const void* memory, std::size_t bytes, std::uint64_t access, std::uint64_t,
        std::uint64_t requested_key, std::uint64_t flags, fid_mr** made, void*) {
  return act("fi_mr_reg", [&](Network& network) {
    if (requested_key != 0 || flags != 0) return -FI_EINVAL;
    auto* const first = const_cast<std::byte*>(static_cast<const std::byte*>(memory));
    *made =
        make_region(network, domain, reinterpret_cast<std::uint64_t>(memory), bytes, first, access);
    return 0;
  });
}

#if MK_OFI_DMABUF
constexpr std::uint64_t kPage = 4096;

int reg_attributes(fid* domain, const fi_mr_attr* attributes, std::uint64_t flags, fid_mr** made) {
  return act("fi_mr_regattr", [&](Network& network) {
    const Domain& of = as<Domain>(domain);
    if (flags != FI_MR_DMABUF || FI_VERSION_LT(of.of->version, FI_VERSION(1, 20)))
      return -FI_EBADFLAGS;
    if (attributes->iface != FI_HMEM_CUDA || (of.capabilities & FI_HMEM) == 0)
      misuse("a GPU's memory is registered as the host's");
    const fi_mr_dmabuf& window = *attributes->dmabuf;
    const std::uint64_t first = reinterpret_cast<std::uint64_t>(window.base_addr) + window.offset;
    struct stat file {};
    if (::fstat(window.fd, &file) != 0) return -FI_EBADF;
    const auto size = static_cast<std::uint64_t>(file.st_size);
    if (first % kPage != window.offset % kPage || window.offset > size ||
        window.len > size - window.offset)
      return -FI_EINVAL;
    const std::uint64_t before = window.offset % kPage;
    void* const mapped = ::mmap(nullptr, before + window.len, PROT_READ | PROT_WRITE, MAP_SHARED,
                                window.fd, static_cast<off_t>(window.offset - before));
    if (mapped == MAP_FAILED) return -FI_ENOMEM;
    Region* const region =
        make_region(network, domain, first, window.len, static_cast<std::byte*>(mapped) + before,
                    attributes->access);
    region->mapping = mapped;
    region->mapping_bytes = before + window.len;
    *made = region;
    return 0;
  });
}
fi_ops_mr memory_calls = {.size = sizeof(fi_ops_mr), .reg = reg, .regattr = reg_attributes};
#else
fi_ops_mr memory_calls = {.size = sizeof(fi_ops_mr), .reg = reg};
#endif

// -- domains --------------------------------------------------------------------------------------

int close_domain(fid* object) {
  return act("fi_close", [&](Network& network) {
    Domain& domain = as<Domain>(object);
    if (domain.users != 0) misuse("a domain is closed before what is in it");
    --domain.of->users;
    destroy(network, domain);
    return 0;
  });
}

fi_ops domain_object = {.size = sizeof(fi_ops), .close = close_domain};
fi_ops_domain domain_calls = {.size = sizeof(fi_ops_domain),
                              .av_open = open_table,
                              .cq_open = open_queue,
                              .endpoint = open_endpoint};

}  // namespace

int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** made, void* context) {
  return act("fi_domain", [&](Network& network) {
    const std::string_view name = info->domain_attr->name;
    const auto device = std::find_if(network.devices.begin(), network.devices.end(),
                                     [&](const auto& one) { return one->name + "-rdm" == name; });
    if (device == network.devices.end()) return -FI_ENODEV;
    auto* const domain = make<Domain>(network, FI_CLASS_DOMAIN, context, &domain_object);
    domain->ops = &domain_calls;
    domain->mr = &memory_calls;
    domain->of = static_cast<Fabric*>(fabric);
    domain->device = device->get();
    domain->capabilities = info->caps;
    domain->descriptors = (info->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
    ++domain->of->users;
    *made = domain;
    return 0;
  });
}

int close_fabric(fid* object) {
  return act("fi_close", [&](Network& network) {
    Fabric& fabric = as<Fabric>(object);
    if (fabric.users != 0) misuse("a fabric is closed before its domains");
    destroy(network, fabric);
    return 0;
  });
}

}  // namespace mk::soft_efa
