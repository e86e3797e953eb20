#include "tests/daemon/fabric/verbs/soft_nic/soft_nic.h"

#include <algorithm>
#include <utility>

#include "tests/daemon/fabric/verbs/soft_nic/network.h"

namespace mk::soft_nic {
namespace {

template <class Change>
void change(const std::string& name, Change&& what) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  what(network, network.devices.at(name));
  network.wake();
}

void fail_queues_of(const std::string& device, ibv_qp_type type, bool told) {
  change(device, [=](Network& network, Device& changed) {
    for (const auto& [number, queue] : network.queues) {
      if (queue->owner != &changed || queue->qp().qp_type != type) continue;
      network.to_error(*queue);
      if (told) network.queue_event(*queue, IBV_EVENT_QP_FATAL);
    }
  });
}

}  // namespace

void reset() {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  network.reset();
}
void set_port(const std::string& device, bool up) {
  change(device, [up](Network& network, Device& changed) {
    changed.up = up;
    network.port_event(changed, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
  });
}
void set_ip(const std::string& device, std::uint32_t slot, std::uint32_t ip) {
  change(device, [=](Network& network, Device& changed) {
    give_ip(changed, slot, ip);
    network.port_event(changed, IBV_EVENT_GID_CHANGE);
  });
}
void set_lid(const std::string& device, std::uint16_t lid) {
  change(device, [lid](Network& network, Device& changed) {
    changed.lid = lid;
    network.port_event(changed, IBV_EVENT_LID_CHANGE);
  });
}
void set_pkeys(const std::string& device, std::vector<std::uint16_t> keys) {
  change(device, [&keys](Network& network, Device& changed) {
    changed.pkeys = std::move(keys);
    network.port_event(changed, IBV_EVENT_PKEY_CHANGE);
  });
}
void fail_device(const std::string& device, Failure how) {
  change(device, [how](Network& network, Device& changed) {
    changed.failed = true;
    changed.gone = how == Failure::kGone;
    for (const auto& [number, queue] : network.queues) {
      if (queue->owner == &changed) network.to_error(*queue, how != Failure::kFlushing);
    }
    if (how != Failure::kUnsaid) network.port_event(changed, IBV_EVENT_DEVICE_FATAL);
    for (Context* const context : network.contexts) {
      if (context->owner == &changed) context->failed = true;
    }
  });
}
void repair_device(const std::string& device) {
  change(device, [](Network&, Device& changed) { changed.failed = changed.gone = false; });
}
void rename_device(const std::string& device, const std::string& name) {
  change(device, [&](Network& network, Device& changed) {
    if (!changed.gone) misuse("a device that is there is renamed");
    std::snprintf(changed.name, sizeof changed.name, "%s", name.c_str());
    auto entry = network.devices.extract(device);
    entry.key() = name;
    network.devices.insert(std::move(entry));
  });
}
std::size_t open_contexts(const std::string& device) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  return static_cast<std::size_t>(
      std::count_if(network.contexts.begin(), network.contexts.end(),
                    [&](const Context* context) { return context->owner->name == device; }));
}
void fail_queues(const std::string& device) { fail_queues_of(device, IBV_QPT_RC, true); }
void fail_datagrams(const std::string& device, bool told) {
  fail_queues_of(device, IBV_QPT_UD, told);
}
void lose_datagrams(unsigned percent) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  network.datagrams_lost_percent = percent;
}
void hold(bool held) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  network.held = held;
  network.wake();
}
void refuse(const std::string& function, int error, int times) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  network.refusals[function] = {error, times};
}
int refusals_left(const std::string& function) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  return network.refusals[function].second;
}
void offer_extended(bool offered) {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  network.extended = offered;
}
std::size_t live_objects() {
  Network& network = Network::get();
  const std::lock_guard lock(network.mutex);
  return network.objects;
}

}  // namespace mk::soft_nic
