#include "cluster/host_identity.h"

#include "base/env.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <fstream>

namespace cohort::cluster {
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

}  // namespace cohort::cluster
