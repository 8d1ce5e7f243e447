// Images of the executable: each simulated process has one, with globals of its own. Its code is mapped from the file
// again, so that code finds the globals next to it; all images share it in memory. Made of what the dynamic linker had
// made of the executable before a constructor ran: pointers into the executable are moved, others stay.
#include "kernel/kernel.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMost = 32'768;  ///< images at a time; only address space is taken for them

std::uintptr_t down(std::uintptr_t at) { return at & ~(kPage - 1); }
std::uintptr_t up(std::uintptr_t at) { return down(at + kPage - 1); }

struct Executable {
  std::uintptr_t base = 0, span = 0;
  std::uintptr_t globals = 0, globals_end = 0;  ///< offsets of what stays writable
  std::vector<ElfW(Phdr)> segments;
  std::vector<std::uintptr_t> pointers;  ///< offsets of words that the dynamic linker has written
  std::uintptr_t constructors = 0;
  std::size_t constructor_count = 0;
  std::string relocated;  ///< the writable segment's part that the file has
  int file = -1;
};
Executable* executable = nullptr;
char* arena = nullptr;
std::size_t used = 0;
std::vector<char*>* dropped = nullptr;

int find_executable(dl_phdr_info* info, std::size_t, void* out) {
  auto& made = *static_cast<Executable*>(out);
  made.base = info->dlpi_addr;
  const auto* dynamic = static_cast<const ElfW(Dyn)*>(nullptr);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(made.base + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) made.globals = header.p_vaddr + header.p_memsz;
    if (header.p_type != PT_LOAD) continue;
    made.segments.push_back(header);
    made.globals_end = header.p_vaddr + header.p_memsz;
    made.span = up(made.globals_end);
  }
  std::uintptr_t tables[2] = {0, 0}, sizes[2] = {0, 0};
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    std::uintptr_t at = dynamic->d_un.d_ptr;
    if (at < made.base) at += made.base;
    switch (dynamic->d_tag) {
      case DT_RELA: tables[0] = at; break;
      case DT_RELASZ: sizes[0] = dynamic->d_un.d_val; break;
      case DT_JMPREL: tables[1] = at; break;
      case DT_PLTRELSZ: sizes[1] = dynamic->d_un.d_val; break;
      case DT_INIT_ARRAY: made.constructors = at - made.base; break;
      case DT_INIT_ARRAYSZ: made.constructor_count = dynamic->d_un.d_val / sizeof(void*); break;
      default: break;
    }
  }
  for (int i = 0; i < 2; ++i) {
    const auto* const all = reinterpret_cast<const ElfW(Rela)*>(tables[i]);
    for (std::size_t k = 0; k < sizes[i] / sizeof *all; ++k) {
      const auto type = ELF64_R_TYPE(all[k].r_info);
      if (type == R_X86_64_RELATIVE || type == R_X86_64_64 || type == R_X86_64_GLOB_DAT || type == R_X86_64_JUMP_SLOT)
        made.pointers.push_back(all[k].r_offset);
      else if (type != R_X86_64_TPOFF64)  // (a copy of a library's variable would be the executable's alone)
        std::abort();
    }
  }
  return 1;  // the executable comes first
}

std::size_t slot_of(const void* address) {
  const auto at = static_cast<std::size_t>(static_cast<const char*>(address) - arena);
  return arena == nullptr || at >= kMost * executable->span ? kMost : at / executable->span;
}

}  // namespace

void remember_executable() {
  executable = new Executable;
  ::dl_iterate_phdr(find_executable, executable);
  const ElfW(Phdr)& last = executable->segments.back();
  executable->relocated.assign(reinterpret_cast<const char*>(executable->base + last.p_vaddr), last.p_filesz);
}

char* make_image() {
  const Executable& exe = *executable;
  if (arena == nullptr) {
    executable->file = REAL(open)("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    arena = static_cast<char*>(
        REAL(mmap)(nullptr, kMost * exe.span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    dropped = new std::vector<char*>;
  }
  char* image = nullptr;
  if (!dropped->empty()) {
    image = dropped->back();
    dropped->pop_back();
  } else if (used == kMost || executable->file < 0 || arena == MAP_FAILED) {
    std::abort();
  } else {
    image = arena + used++ * exe.span;
    for (const ElfW(Phdr) & part : exe.segments) {
      if ((part.p_flags & PF_W) != 0) continue;
      const int protection = PROT_READ | ((part.p_flags & PF_X) != 0 ? PROT_EXEC : 0);
      REAL(mmap)
      (image + down(part.p_vaddr), up(part.p_vaddr + part.p_filesz) - down(part.p_vaddr), protection,
       MAP_PRIVATE | MAP_FIXED, exe.file, static_cast<off_t>(down(part.p_offset)));
    }
  }
  const ElfW(Phdr)& last = exe.segments.back();
  REAL(mmap)
  (image + down(last.p_vaddr), exe.span - down(last.p_vaddr), PROT_READ | PROT_WRITE,
   MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0);
  std::memcpy(image + last.p_vaddr, exe.relocated.data(), exe.relocated.size());
  for (const std::uintptr_t at : exe.pointers) {
    std::uintptr_t value = 0;
    std::memcpy(&value, image + at, sizeof value);
    if (value - exe.base >= exe.span) continue;
    value += reinterpret_cast<std::uintptr_t>(image) - exe.base;
    std::memcpy(image + at, &value, sizeof value);
  }
  return image;
}

void drop_image(char* image) {
  if (image != nullptr) dropped->push_back(image);
}

void* in_image(const char* image, const void* of_executable) {
  return const_cast<char*>(image) + (reinterpret_cast<std::uintptr_t>(of_executable) - executable->base);
}

void run_constructors(char* image) {
  auto* const all = reinterpret_cast<void (**)(int, char**, char**)>(image + executable->constructors);
  for (std::size_t i = 0; i < executable->constructor_count; ++i) all[i](0, nullptr, environ);
}

std::string keep_globals(const char* image) {
  return std::string(image + executable->globals, executable->globals_end - executable->globals);
}

void put_globals(char* image, const std::string& kept) {
  for (std::size_t at = 0; at < kept.size(); at += kPage) {
    const std::size_t size = std::min(kPage, kept.size() - at);
    char* const to = image + executable->globals + at;
    if (std::memcmp(to, kept.data() + at, size) != 0) std::memcpy(to, kept.data() + at, size);
  }
}

}  // namespace sim

using namespace sim;

/// How exceptions find the tables of the code that they pass.
CALL(int, _dl_find_object, void* address, dl_find_object* result) {
  const std::size_t slot = slot_of(address);
  if (slot == kMost) return REAL(_dl_find_object)(address, result);
  const std::uintptr_t moved = reinterpret_cast<std::uintptr_t>(arena) + slot * executable->span - executable->base;
  const int failure =
      REAL(_dl_find_object)(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) - moved), result);
  if (failure != 0) return failure;
  const auto move = [moved](void* at) { return static_cast<char*>(at) + moved; };
  result->dlfo_map_start = move(result->dlfo_map_start);
  result->dlfo_map_end = move(result->dlfo_map_end);
  result->dlfo_eh_frame = move(result->dlfo_eh_frame);
  return 0;
}
