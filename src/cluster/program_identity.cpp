#include "cluster/program_identity.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

namespace cohort::cluster {
namespace {

namespace fs = std::filesystem;

/// The descriptor of the first GNU build-id note in `notes`, in hexadecimal digits.
std::string build_id_in(const char* notes, std::size_t size) {
  while (size >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes, sizeof note);
    const std::size_t name = (note.n_namesz + 3U) & ~std::size_t{3};
    const std::size_t text = (note.n_descsz + 3U) & ~std::size_t{3};
    if (sizeof note + name + text > size) return {};
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(notes + sizeof note, "GNU", 4) == 0) {
      std::string digits;
      for (std::size_t i = 0; i < std::min<std::size_t>(note.n_descsz, 8); ++i) {
        digits += fmt::format("{:02x}", static_cast<unsigned char>(notes[sizeof note + name + i]));
      }
      return digits;
    }
    notes += sizeof note + name + text;
    size -= sizeof note + name + text;
  }
  return {};
}

std::string build_id_of(const dl_phdr_info& module) {
  for (std::size_t i = 0; i < module.dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = module.dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const auto* const notes = reinterpret_cast<const char*>(module.dlpi_addr + header.p_vaddr);
    if (std::string id = build_id_in(notes, header.p_memsz); !id.empty()) return id;
  }
  return {};
}

int take_first(dl_phdr_info* module, std::size_t, void* id) {
  *static_cast<std::string*>(id) = build_id_of(*module);
  return 1;  // the executable comes first
}

int take_torch(dl_phdr_info* module, std::size_t, void* path) {
  const std::string_view name = module->dlpi_name == nullptr ? std::string_view() : module->dlpi_name;
  if (name.find("/libtorch_cpu.so") == std::string_view::npos) return 0;
  static_cast<std::string*>(path)->assign(name);
  return 1;
}

/// What a wheel's torch/version.py says.
std::string version_in(const fs::path& file) {
  std::ifstream in(file);
  constexpr std::string_view kName = "__version__ = '";
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(kName)) continue;
    return line.substr(kName.size(), line.find('\'', kName.size()) - kName.size());
  }
  return {};
}

}  // namespace

std::string own_executable() {
  std::error_code error;
  const fs::path path = fs::read_symlink("/proc/self/exe", error);
  std::string name = path.filename().string();
  // The file may have been replaced since.
  constexpr std::string_view kDeleted = " (deleted)";
  if (name.ends_with(kDeleted)) name.resize(name.size() - kDeleted.size());
  std::string id;
  ::dl_iterate_phdr(take_first, &id);
  if (!id.empty()) return fmt::format("{} (build id {})", name, id);
  const auto size = fs::file_size("/proc/self/exe", error);
  return error ? name : fmt::format("{} ({} bytes)", name, size);
}

std::string loaded_torch() {
  std::string path;
  ::dl_iterate_phdr(take_torch, &path);
  if (path.empty()) return {};
  const fs::path file(path);
  if (std::string version = version_in(file.parent_path().parent_path() / "version.py"); !version.empty()) {
    return version;
  }
  std::error_code error;
  const std::string name = fs::canonical(file, error).filename().string();
  constexpr std::string_view kPlain = "libtorch_cpu.so.";
  if (name.starts_with(kPlain)) return name.substr(kPlain.size());
  return fmt::format("of an unknown version, {} bytes", fs::file_size(file, error));
}

}  // namespace cohort::cluster
