#include "rendezvous/identity.h"

#include "base/env.h"
#include "base/parse.h"

#include <fmt/format.h>

#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string_view>
#include <system_error>

namespace cohort::rendezvous {
namespace {

std::string namespace_of(const char* kind) {
  std::array<char, 64> target{};
  const std::string path = fmt::format("/proc/self/ns/{}", kind);
  const ssize_t n = ::readlink(path.c_str(), target.data(), target.size());
  return n > 0 ? std::string(target.data(), static_cast<std::size_t>(n)) : std::string(kind);
}

}  // namespace

HostIdentity host_identity() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0 || host[0] == '\0')
    host = {'l', 'o', 'c', 'a', 'l', 'h', 'o', 's', 't'};
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  HostIdentity identity;
  identity.name = env::get(env::kHost).value_or(host.data());
  identity.id = fmt::format("{} {} {} {}", boot_id, host.data(), namespace_of("pid"), namespace_of("net"));
  return identity;
}

namespace {

namespace fs = std::filesystem;

/// Returns the first GNU build id in `notes`, in hexadecimal digits.
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
  return 1;  // stops: the executable comes first
}

int take_torch(dl_phdr_info* module, std::size_t, void* path) {
  const std::string_view name = module->dlpi_name == nullptr ? std::string_view() : module->dlpi_name;
  if (name.find("/libtorch_cpu.so") == std::string_view::npos) return 0;
  static_cast<std::string*>(path)->assign(name);
  return 1;
}

/// Returns the version in a wheel's torch/version.py.
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
  // The file may have been replaced since the process began.
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

Result<std::vector<int>> divide_into_hosts(std::string_view text, int size) {
  std::vector<int> hosts;
  if (text.empty()) return hosts;
  const auto wrong = [&](std::string_view why) {
    return fail(ErrorCode::InvalidArgument,
                "COHORT_PRETEND_HOSTS='{}': {} -- give a number of hosts, or how many ranks "
                "each has (as 2,2)",
                text, why);
  };
  std::vector<int> numbers;
  for (std::string_view rest = text;;) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    const auto number = parse_integer<int>(entry);
    if (!number || *number < 1) return wrong("not a list of numbers from 1");
    numbers.push_back(*number);
    if (entry.size() == rest.size()) break;
    rest.remove_prefix(entry.size() + 1);
  }
  if (numbers.size() == 1) {  // if the division has a remainder, the first hosts have one rank more
    const int count = std::clamp(size, 1, numbers[0]);
    numbers.assign(static_cast<std::size_t>(count), size / count);
    for (int host = 0; host < size % count; ++host) ++numbers[static_cast<std::size_t>(host)];
  } else if (std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0}) != size) {
    return wrong(fmt::format("these are not the {} ranks of the world", size));
  }
  for (std::size_t host = 0; host < numbers.size(); ++host) {
    hosts.insert(hosts.end(), static_cast<std::size_t>(numbers[host]), static_cast<int>(host));
  }
  return hosts;
}

std::vector<int> fake_hosts(int size) { return value_or_throw(divide_into_hosts(env::text(env::kPretendHosts), size)); }

}  // namespace cohort::rendezvous
