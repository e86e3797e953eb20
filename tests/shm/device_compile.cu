// Compiled for the device, never run: every accessor a kernel uses must be host/device code.
#include "shm/atomic.h"
#include "shm/command.h"
#include "shm/error_code.h"
#include "shm/flag.h"
#include "shm/layout.h"
#include "shm/limits.h"
#include "shm/ring.h"

namespace mk::shm {

__global__ void send_and_wait(CommandSlot* slots, LaneControl* control,
                              std::uint32_t slot_count_log2, std::uint64_t produced,
                              std::uint32_t* flags, SegmentHeader* header, std::uint64_t* out) {
  RingProducer producer{RingView{slots, control, slot_count_log2}, produced, 0};
  Command command;
  command.opcode = Opcode::kWrite;
  command.bytes = 4096;
  command.epoch = 1;
  while (!producer.try_push(command)) {
    if (load_acquire(&header->abort_flag) != 0) return;
  }
  if (producer.has_credits(2)) {
    producer.write(0, command);
    producer.write(1, command);
    producer.stamp(1, 5);
    producer.commit(2);
  }
  while (!flag_reached(&flags[0], 1)) {
    if (load_relaxed(&header->abort_flag) != 0) return;
  }
  flag_publish(&flags[1], 1);
  std::uint64_t words[kCommandWords];
  encode(command, words);
  words[kCommitWord] = commit_word(producer.produced, slot_count_log2);
  const std::uint32_t immediate = make_immediate(1, 2, 3);
  out[0] = producer.completed();
  out[1] = reserved_bits_clear(words) && decode(words) == command;
  out[2] = immediate_slot(immediate) + immediate_flag(immediate) + immediate_epoch(immediate, 3);
  fetch_add(&out[3], std::uint64_t{1});
  compare_exchange(&out[4], std::uint64_t{0}, std::uint64_t{1});
  store_relaxed(&out[5], std::uint64_t{sizeof(SegmentHeader)});
  store_release(&out[6], static_cast<std::uint64_t>(ErrorCode::kOk));
}

}  // namespace mk::shm
