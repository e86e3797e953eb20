/// \file
/// What a test does to the software NICs of this process. Any thread.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mk::soft_nic {

/// "soft0" and "soft1" are RoCE: GIDs at 0 and 1 link-local, at 2 and 3 of 10.77.0.1 and 10.77.0.2,
/// of the types v1 and v2 each. "softib0" and "softib1" are InfiniBand, of
/// the LIDs 3 and 4. All are of one network. As at the start
/// again, for each test.
void reset();

/// With the event that a NIC reports.
void set_port(const std::string& device, bool up);
/// An IPv4 address (10.77.0.1 is 0x0a4d0001; 0: none any more) at the entries 2 + 2 `slot` and 3 +
/// 2 `slot`.
void set_ip(const std::string& device, std::uint32_t slot, std::uint32_t ip);
void set_lid(const std::string& device, std::uint16_t lid);
void set_pkeys(const std::string& device, std::vector<std::uint16_t> keys);
enum class Failure {
  kFlushing,  ///< with IBV_EVENT_DEVICE_FATAL, and all that queues held comes back
  kGone,      ///< with it; nothing comes back, and nobody finds the device
  kUnsaid,    ///< nothing comes back, and no event says so
};
/// Everything of it ends in error, and nothing can be made, until `repair_device`; what was opened
/// before that never works again.
void fail_device(const std::string& device, Failure how = Failure::kFlushing);
void repair_device(const std::string& device);
/// While nobody finds it: it is found under that name from now on.
void rename_device(const std::string& device, const std::string& name);
/// How many times it is open.
std::size_t open_contexts(const std::string& device);
/// The NIC gives up the connected queue pairs of that device, with IBV_EVENT_QP_FATAL.
void fail_queues(const std::string& device);
/// The same with those of datagrams; `told`: with the event.
void fail_datagrams(const std::string& device, bool told);

/// Of 100 datagrams, so many get lost.
void lose_datagrams(unsigned percent);
/// Nothing is sent or received, as by a NIC that hangs, until it is let go.
void hold(bool held);
/// The next `times` calls of the function of that name ("ibv_create_qp") answer `error`.
void refuse(const std::string& function, int error, int times);
/// Of these, those that were not made yet.
int refusals_left(const std::string& function);
/// Whether devices have the extended submission interface.
void offer_extended(bool offered);

/// Objects of libibverbs that were made and not yet destroyed.
std::size_t live_objects();

}  // namespace mk::soft_nic
