// operator new and delete of the library: the process's own, where it has any, since a string that
// the library makes may be freed by its caller, and the other way round. A process without C++ has
// none.
#include <dlfcn.h>

#include <cstdlib>
#include <new>

namespace {

struct Allocator {
  void* (*allocate)(std::size_t);
  void (*release)(void*);
};

void* allocate_by_malloc(std::size_t bytes) { return std::malloc(bytes == 0 ? 1 : bytes); }

/// The pair that the dynamic linker finds first: a program's own, or the shared libstdc++'s. Both
/// or neither, so that what is allocated is released by its counterpart.
const Allocator& allocator() {
  static const Allocator chosen = [] {
    auto* const allocate = reinterpret_cast<void* (*)(std::size_t)>(::dlsym(RTLD_DEFAULT, "_Znwm"));
    auto* const release = reinterpret_cast<void (*)(void*)>(::dlsym(RTLD_DEFAULT, "_ZdlPv"));
    return allocate != nullptr && release != nullptr ? Allocator{allocate, release}
                                                     : Allocator{allocate_by_malloc, std::free};
  }();
  return chosen;
}

}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = allocator().allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// libstdc++'s forms for arrays, and those that do not throw, end in these.
void operator delete(void* memory) noexcept { allocator().release(memory); }
void operator delete(void* memory, std::size_t) noexcept { allocator().release(memory); }
