// Functions of newer versions of glibc that GCC's archives call, made of older ones and hidden: the
// library is to load with glibc 2.34. On an older glibc GCC does not call them.
#include <dlfcn.h>
#include <link.h>
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

// libstdc++'s std::random_device, since glibc 2.36.
extern "C" std::uint32_t arc4random() noexcept;
extern "C" std::uint32_t arc4random() noexcept {
  std::uint32_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != sizeof value) std::abort();  // as glibc's does
  return value;
}

#ifdef DLFO_STRUCT_HAS_EH_DBASE
namespace {

struct Search {
  std::uintptr_t address;
  dl_find_object* found;
};

int look_at_object(dl_phdr_info* object, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const ElfW(Phdr)* unwind = nullptr;
  std::uintptr_t begin = UINTPTR_MAX, end = 0;
  bool inside = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = object->dlpi_phdr[i];
    const std::uintptr_t at = object->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_GNU_EH_FRAME) unwind = &part;
    if (part.p_type != PT_LOAD) continue;
    if (at < begin) begin = at;
    if (at + part.p_memsz > end) end = at + part.p_memsz;
    inside = inside || (search.address >= at && search.address < at + part.p_memsz);
  }
  if (!inside) return 0;
  if (unwind == nullptr) return -1;
  search.found->dlfo_flags = 0;
  search.found->dlfo_map_start = reinterpret_cast<void*>(begin);
  search.found->dlfo_map_end = reinterpret_cast<void*>(end);
  search.found->dlfo_link_map = nullptr;
  search.found->dlfo_eh_frame = reinterpret_cast<void*>(object->dlpi_addr + unwind->p_vaddr);
  return 1;
}

}  // namespace

// libgcc's search for the frames of an exception, since glibc 2.35: the object that holds
// `address`.
extern "C" int _dl_find_object(void* address, dl_find_object* found) noexcept {
  Search search{reinterpret_cast<std::uintptr_t>(address), found};
  return ::dl_iterate_phdr(look_at_object, &search) == 1 ? 0 : -1;
}
#endif
