#include "train/checkpoint/bundle.h"

#include "base/files.h"
#include "base/result.h"
#include "train/checkpoint/exchange.h"

#include <fmt/format.h>

#include <sys/stat.h>

#include <fstream>
#include <map>

namespace cohort::checkpoint {

std::string part_file(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::string random_name(int rank, const std::string& generator) {
  return generator == "cpu" ? fmt::format("rank/{}", rank) : fmt::format("rank/{}/{}", rank, generator);
}

std::string to_string(CheckpointPlace place) {
  switch (place) {
    case CheckpointPlace::Rank0: return "rank0";
    case CheckpointPlace::Shared: return "shared";
    case CheckpointPlace::Local: return "local";
  }
  return {};
}

namespace {

/// Empty if there is no such folder.
std::string identity_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {};
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{} {} {}", boot, status.st_dev, status.st_ino);
}

}  // namespace

SharedFolder probe_shared_folder(Communicator& comm, const FolderOptions& options, IfMissing if_missing) {
  SharedFolder folder;
  folder.place = options.place;
  folder.rank = rank_of(comm);
  const auto ranks = static_cast<std::size_t>(size_of(comm));
  if (options.place == CheckpointPlace::Rank0) {
    folder.keepers.assign(ranks, 0);
    folder.hosts.resize(ranks);
    return folder;
  }
  folder.hosts = gather(comm, comm ? comm.host() : std::string());
  if (options.place == CheckpointPlace::Shared) {
    folder.keepers.assign(ranks, 0);
    return folder;
  }
  std::string own;
  agree(comm, attempt([&] {
          if (if_missing == IfMissing::Make) value_or_throw(sys::make_folders(options.path));
          own = identity_of(options.path);
          if (if_missing == IfMissing::Make && own.empty()) {
            raise(ErrorCode::Unavailable, "cannot read the folder {} -- {} -- check its permissions", options.path,
                  errno_text(errno));
          }
        }));
  std::map<std::string, int> keepers;
  for (const std::string& identity : gather(comm, own)) {
    const int rank = static_cast<int>(folder.keepers.size());
    folder.keepers.push_back(identity.empty() ? -1 : keepers.emplace(identity, rank).first->second);
  }
  return folder;
}

std::string places_of(const SharedFolder& folder, const std::vector<int>& ranks) {
  std::map<std::string, std::vector<int>> by_host;
  for (const int rank : ranks) by_host[folder.hosts[static_cast<std::size_t>(rank)]].push_back(rank);
  std::string text;
  for (const auto& [host, those] : by_host) {
    text += fmt::format("{}{} (rank{} ", text.empty() ? "" : ", ", host, those.size() == 1 ? "" : "s");
    for (std::size_t i = 0; i < those.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", those[i]);
    text += ')';
  }
  return text;
}

}  // namespace cohort::checkpoint
