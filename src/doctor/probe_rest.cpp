#include "base/env.h"
#include "cluster/program_identity.h"
#include "doctor/beside.h"
#include "doctor/probe.h"
#include "launch/agent/agent.h"
#include "launch/plan/program.h"
#include "launch/start/invitation.h"
#include "launch/start/starter.h"
#include "launch/version.h"
#include "net/interfaces.h"
#include "net/resolve.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <string_view>
#include <thread>

namespace cohort::doctor {
namespace {

// Metadata only: an import of torch takes seconds. One line, whatever start-up files of Python print.
constexpr const char* kScript = R"(
import json, platform, sys
out = {"python": platform.python_version(), "path": sys.executable}
try:
    from importlib.metadata import version
    for name in ("torch", "cohort"):
        try: out[name] = version(name)
        except Exception: pass
except Exception: pass
try:
    import cohort
    out["cohort"] = getattr(cohort, "__version__", out.get("cohort", ""))
except Exception: pass
print("cohort-doctor " + json.dumps(out))
)";
constexpr std::string_view kMark = "cohort-doctor ";

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

void ask_python(SoftwareFacts& facts, const launch::Environment& environment, std::chrono::milliseconds limit) {
  auto python = launch::active_python(environment);
  if (!python) {
    facts.python_error = python.error().what();
    return;
  }
  facts.python_path = *python;
  const auto answer = launch::capture({*python, "-c", kScript}, limit);
  if (!answer) {
    facts.python_error = answer.error().what();
    return;
  }
  const auto at = answer->text.rfind(kMark);
  if (answer->status != 0 || at == std::string::npos) {
    facts.python_error = fmt::format("{} ended with status {}: {}", *python, answer->status, first_line(answer->text));
    return;
  }
  const auto said = nlohmann::json::parse(first_line(answer->text.substr(at + kMark.size())), nullptr, false);
  const auto text = [&said](const char* name) {
    return said.is_object() && said.contains(name) && said[name].is_string() ? said[name].get<std::string>()
                                                                             : std::string();
  };
  facts.python = text("python");
  if (!text("path").empty()) facts.python_path = text("path");
  facts.torch = text("torch");
  facts.package = text("cohort");
}

/// By asking the network that this process is in; /sys may show another one's.
int mtu_of(const std::string& interface) {
  const sys::UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  if (!socket || interface.size() >= sizeof request.ifr_name) return 0;
  interface.copy(request.ifr_name, interface.size());
  return ::ioctl(socket.get(), SIOCGIFMTU, &request) == 0 ? request.ifr_mtu : 0;
}

std::string file_system(const std::string& path) {
  struct Kind {
    unsigned long magic;
    const char* name;
  };
  constexpr std::array kKinds = {Kind{0x6969, "nfs"},         Kind{0x0bd00bd0, "lustre"}, Kind{0x47504653, "gpfs"},
                                 Kind{0xef53, "ext2/3/4"},    Kind{0x58465342, "xfs"},    Kind{0x01021994, "tmpfs"},
                                 Kind{0x794c7630, "overlay"}, Kind{0x9123683e, "btrfs"},  Kind{0x65735546, "fuse"},
                                 Kind{0xff534d42, "cifs"},    Kind{0x19830326, "beegfs"}, Kind{0x00c36400, "ceph"}};
  struct statfs found {};
  if (::statfs(path.c_str(), &found) != 0) return {};
  for (const Kind& kind : kKinds) {
    if (kind.magic == (static_cast<unsigned long>(found.f_type) & 0xffffffffUL)) return kind.name;
  }
  return fmt::format("{:#x}", static_cast<unsigned long>(found.f_type));
}

}  // namespace

SoftwareFacts probe_software(const launch::Environment& environment, std::chrono::milliseconds limit) {
  SoftwareFacts facts;
  facts.version = launch::kVersion;
  facts.build = launch::own_announcement().build;
  facts.path = sys::own_executable().value_or("?");
  facts.commit = cluster::own_executable();
  ask_python(facts, environment, limit);
  if (launch::find_command("mpirun", environment)) {
    if (const auto answer = launch::capture({"mpirun", "--version"}, limit); answer && answer->status == 0)
      facts.mpi = first_line(answer->text);
  }
  // Hydra says it in a table.
  if (facts.mpi.starts_with("HYDRA")) facts.mpi = "MPICH (Hydra)";
  return facts;
}

FolderFacts probe_folder(const std::string& path) {
  FolderFacts facts;
  facts.path = path;
  launch::StartJob job;  // as a job that comes from another host looks for it
  job.folder = path;
  job.path = "/proc/self/exe";
  if (const auto fine = launch::check_host(job); !fine) {
    facts.error = fine.error().what();
    return facts;
  }
  facts.writable = ::access(path.c_str(), W_OK | X_OK) == 0;
  struct statvfs space {};
  if (::statvfs(path.c_str(), &space) == 0)
    facts.free = static_cast<std::int64_t>(space.f_bavail) * static_cast<std::int64_t>(space.f_frsize);
  facts.file_system = file_system(path);
  return facts;
}

std::vector<NetworkFacts> probe_networks(std::string& error) {
  std::vector<NetworkFacts> out;
  auto all = net::interface_addresses();
  if (!all) {
    error = all.error().what();
    return out;
  }
  std::erase_if(*all, [](const net::InterfaceAddress& address) { return address.loopback; });
  std::vector<std::string> offered;
  if (auto chosen = net::offered_addresses(); chosen)
    offered = *std::move(chosen);
  else
    error = chosen.error().what();
  for (const net::InterfaceAddress& address : *all) {
    NetworkFacts facts;
    facts.interface = address.interface;
    facts.address = address.text;
    facts.mtu = mtu_of(address.interface);
    const auto place = std::find(offered.begin(), offered.end(), address.text);
    if (place != offered.end()) facts.offered = static_cast<int>(place - offered.begin());
    out.push_back(std::move(facts));
  }
  std::stable_sort(out.begin(), out.end(), [](const NetworkFacts& a, const NetworkFacts& b) {
    return static_cast<unsigned>(a.offered) < static_cast<unsigned>(b.offered);  // -1: last
  });
  return out;
}

std::vector<NameFacts> resolve_names(const std::vector<std::string>& names, std::chrono::milliseconds limit) {
  std::vector<NameFacts> out(names.size());
  const net::Deadline deadline = net::deadline_in(limit);
  const auto one = [&](std::size_t at) {
    NameFacts& facts = out[at];
    facts.name = names[at];
    const auto found = net::resolve({facts.name, 0}, deadline);
    if (!found) {
      facts.error = found.error().what();
      return;
    }
    for (const net::SocketAddress& address : *found) {
      std::array<char, INET6_ADDRSTRLEN> text{};
      const void* bytes = nullptr;
      if (address.storage.ss_family == AF_INET)
        bytes = &reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr;
      else if (address.storage.ss_family == AF_INET6)
        bytes = &reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr;
      if (bytes == nullptr || ::inet_ntop(address.storage.ss_family, bytes, text.data(), text.size()) == nullptr)
        continue;
      if (std::find(facts.addresses.begin(), facts.addresses.end(), text.data()) == facts.addresses.end())
        facts.addresses.emplace_back(text.data());
    }
  };
  // A name service that does not answer costs the deadline once, and not for each name.
  constexpr std::size_t kAtOnce = 16;
  {
    std::vector<std::jthread> threads;
    for (std::size_t first = 0; first < std::min(kAtOnce, names.size()); ++first) {
      threads.push_back(beside([&, first] {
        for (std::size_t at = first; at < names.size(); at += kAtOnce) one(at);
      }));
    }
  }
  return out;
}

std::map<std::string, std::string> variables_that_matter(const launch::Environment& environment) {
  constexpr std::array<std::string_view, 12> kNames = {
      env::kAlone,         env::kNetwork,        env::kPretendHosts,   env::kMasterAddr,   "CUDA_VISIBLE_DEVICES",
      env::kOmpNumThreads, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "PYTHONPATH",
      "VIRTUAL_ENV",       "LD_LIBRARY_PATH"};
  std::map<std::string, std::string> out;
  for (const std::string_view name : kNames) {
    if (const auto value = environment.find(name)) out[std::string(name)] = *value;
  }
  return out;
}

}  // namespace cohort::doctor
