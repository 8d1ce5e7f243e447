#include "comm/transport/mpi/endpoint.h"

#include "base/env.h"
#include "base/log.h"
#include "rendezvous/exchange.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

namespace cohort::mpi {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOpenMpi = "openmpi";
constexpr std::string_view kMpich = "mpich";
constexpr std::string_view kAbi = "abi";  // libmpi_abi.so, MPI 5's standard ABI

/// Returns the display name, "Open MPI" for "openmpi".
std::string_view family_name(std::string_view family) noexcept {
  if (family == kOpenMpi) return "Open MPI";
  if (family == kMpich) return "MPICH";
  if (family == kAbi) return "MPI's standard ABI";
  return "MPI";
}

std::string how_to_build(std::string_view family) {
  if (family == kAbi) return "`cohort build-mpi --mpicc mpicc_abi` compiles it";
  return family.empty()
             ? "`cohort build-mpi` compiles it by the site's mpicc"
             : fmt::format("`cohort build-mpi` compiles it by {}'s mpicc (--mpicc says which)", family_name(family));
}

// libmpi.so.12 is the name of the binary interface that is common to MPICH, Intel MPI and others.
std::string_view family_of_library(std::string_view name) {
  if (name.starts_with("libmpich.so") || name.starts_with("libmpich-") || name.starts_with("libmpi.so.12"))
    return kMpich;
  if (name.starts_with("libmpi_abi.so")) return kAbi;
  return name.starts_with("libmpi.so") ? kOpenMpi : std::string_view();
}

struct LoadedLibrary {
  std::string path;
  std::string_view family;
};

std::vector<LoadedLibrary> loaded_libraries() {
  std::vector<LoadedLibrary> found;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const std::string_view family = family_of_library(std::string_view(path).substr(path.rfind('/') + 1));
        if (!family.empty()) static_cast<std::vector<LoadedLibrary>*>(to)->push_back({path, family});
        return 0;
      },
      &found);
  return found;
}

fs::path own_folder() {
  static const int here = 0;
  Dl_info info{};
  std::error_code ignored;
  if (::dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  const fs::path path = fs::canonical(info.dli_fname, ignored);
  return ignored ? fs::path() : path.parent_path();
}

// Checks that only the owner can write, since a loaded plug-in runs with all of the user's rights.
bool only_owner_writes(const fs::path& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return false;
  return (about.st_uid == ::geteuid() || about.st_uid == 0) && (about.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

struct Candidate {
  fs::path path;
  fs::file_time_type made;
};

/// Returns a folder's plug-ins that other users cannot have written, newest first; an empty family means any.
std::vector<Candidate> candidates_in(const fs::path& folder, std::string_view family) {
  std::vector<Candidate> found;
  std::error_code ignored;
  for (fs::directory_iterator each(folder, ignored), end; !ignored && each != end; each.increment(ignored)) {
    const std::string name = each->path().filename().string();
    if (!name.starts_with(kPluginPrefix) || each->path().extension() != ".so") continue;
    if (!family.empty() && !name.starts_with(fmt::format("{}{}-", kPluginPrefix, family))) continue;
    if (!only_owner_writes(folder) || !only_owner_writes(each->path())) {
      log::warn("comm", "{} is not used: it, or its folder, can be written by others -- chmod go-w", name);
      continue;
    }
    found.push_back({each->path(), fs::last_write_time(each->path(), ignored)});
  }
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(b.made, a.path) < std::pair(a.made, b.path);
  });
  return found;
}

/// Returns the MPI family of the launcher that started this process, "openmpi" or "mpich"; empty if it may be any MPI
/// (Slurm, PMIx). Fails with Unavailable if no launcher that MPI knows started it.
Result<std::string> launcher_family(const rendezvous::Environment& environment) {
  const auto detected = rendezvous::detect_rank(environment);
  if (!detected) return tl::unexpected(detected.error());
  const bool inner =
      detected->launcher == "cohort run" || detected->launcher == "torchrun" || detected->launcher == "Horovod";
  if (!inner) {
    if (environment.contains("OMPI_COMM_WORLD_SIZE")) return std::string(kOpenMpi);
    const bool of_slurm = detected->launcher == "Slurm";
    if (environment.contains("MV2_COMM_WORLD_SIZE")) return std::string(kMpich);
    if (environment.contains("PMI_SIZE") && !of_slurm) return std::string(kMpich);
    if (environment.contains("PMIX_NAMESPACE") || of_slurm || environment.contains("PMI_SIZE")) return std::string();
  }
  return fail(
      ErrorCode::Unavailable,
      "MPI as transport: {} started this process, and MPI knows only ranks that its own launcher has started -- "
      "start them by mpirun or srun (mpirun -np 4 ./train), or leave COHORT_TRANSPORT at tcp",
      detected->launcher.empty() ? "no launcher" : detected->launcher);
}

/// Returns the required MPI family; empty means any. If the program has loaded an MPI, its family is required.
Result<std::string> wanted_family(const rendezvous::Environment& environment) {
  const auto launcher = launcher_family(environment);
  for (const LoadedLibrary& library : loaded_libraries()) {
    if (launcher && !launcher->empty() && *launcher != library.family && library.family != kAbi) {
      return fail(ErrorCode::Mismatch,
                  "MPI: this program has loaded {} ({}), but {}'s launcher started it -- start it by the mpirun of its "
                  "own MPI",
                  library.path, family_name(library.family), family_name(*launcher));
    }
    return std::string(library.family);
  }
  return launcher;
}

/// Returns the family of launchers for the plug-in's MPI.
std::string_view family_of(const CohortMpi& mpi) {
  char text[512] = "";
  if (mpi.family != kAbi || mpi.library(text, sizeof text) != 0) return mpi.family;
  return std::string_view(text).starts_with("Open MPI") ? kOpenMpi : kMpich;  // MPICH and its derivatives
}

Result<void> check_family(const Plugin& plugin, std::string_view wanted) {
  const std::string_view made = family_of(*plugin.mpi);
  if (wanted.empty() || made == wanted || plugin.mpi->family == wanted || made == "other") return {};
  return fail(ErrorCode::Mismatch,
              "the MPI plug-in {} is made for {}, but {}'s launcher started this process: its ranks would not find "
              "each other -- {}, or start by {}'s mpirun",
              plugin.path, plugin.mpi->made_for, family_name(wanted), how_to_build(wanted), family_name(made));
}

}  // namespace

std::vector<fs::path> plugin_folders(const rendezvous::Environment& environment) {
  std::vector<fs::path> folders;
  const std::string data = env::text("XDG_DATA_HOME", environment);
  const std::string home = env::text("HOME", environment);
  if (!data.empty()) {
    folders.push_back(fs::path(data) / "cohort" / "mpi");
  } else if (!home.empty()) {
    folders.push_back(fs::path(home) / ".local" / "share" / "cohort" / "mpi");
  }
  const fs::path own = own_folder();
  if (!own.empty()) {
    folders.push_back(own / "cohort-mpi");
    folders.push_back((own / ".." / "lib" / "cohort" / "mpi").lexically_normal());
  }
  return folders;
}

Result<Plugin> open_plugin(const fs::path& path) {
  // RTLD_GLOBAL: some MPIs load components later that need the library's symbols.
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return fail(ErrorCode::Unavailable, "the MPI plug-in {} cannot be loaded: {} -- {}", path.string(),
                why == nullptr ? "no reason given" : why, how_to_build(""));
  }
  const auto entry = reinterpret_cast<decltype(&cohort_mpi_plugin)>(::dlsym(handle, COHORT_MPI_ENTRY));
  if (entry == nullptr) {
    return fail(ErrorCode::Mismatch, "{} is no MPI plug-in of Cohort: it has no {} -- {}", path.string(),
                COHORT_MPI_ENTRY, how_to_build(""));
  }
  const CohortMpi* const mpi = entry();
  if (mpi == nullptr || mpi->abi != COHORT_MPI_ABI || mpi->bytes != sizeof(CohortMpi)) {
    return fail(ErrorCode::Mismatch,
                "the MPI plug-in {} speaks version {} of the interface and this Cohort version {}: it was made by "
                "another version of Cohort -- run `cohort build-mpi` again",
                path.string(), mpi == nullptr ? 0 : mpi->abi, COHORT_MPI_ABI);
  }
  return Plugin{mpi, path.string()};
}

namespace {

/// Loads COHORT_MPI_PLUGIN, or else the newest suitable plug-in of the folders. Fails with Unavailable if there is none
/// (the message lists the folders and the command to run), Mismatch if it is for another MPI or version of Cohort.
Result<Plugin> load_plugin(const rendezvous::Environment& environment) {
  const auto wanted = wanted_family(environment);
  if (!wanted) return tl::unexpected(wanted.error());
  const std::string given = env::text(env::kMpiPlugin, environment);
  std::optional<fs::path> path;
  std::string looked;
  if (!given.empty()) {
    std::error_code ignored;
    if (!fs::is_regular_file(given, ignored)) {
      return fail(ErrorCode::Unavailable, "COHORT_MPI_PLUGIN={}: there is no such file on this host -- {}", given,
                  how_to_build(*wanted));
    }
    path = fs::absolute(given);
    if (!only_owner_writes(*path) || !only_owner_writes(path->parent_path())) {
      return fail(
          ErrorCode::InvalidArgument,
          "COHORT_MPI_PLUGIN={}: it, or its folder, can be written by others, and what is loaded runs with your "
          "rights -- chmod go-w, or a copy in a folder of your own",
          given);
    }
  } else {
    for (const fs::path& folder : plugin_folders(environment)) {
      looked += fmt::format("{}{}", looked.empty() ? "" : ", ", folder.string());
      std::vector<Candidate> found = candidates_in(folder, *wanted);
      if (found.empty() && loaded_libraries().empty()) found = candidates_in(folder, kAbi);
      if (found.empty()) continue;
      // If the launcher does not determine the MPI, choosing between two families would be a guess.
      for (const Candidate& other : found) {
        const std::string name = other.path.filename().string();
        const std::string first = found.front().path.filename().string();
        const auto family = [](const std::string& text) {
          return text.substr(kPluginPrefix.size(), text.find('-', kPluginPrefix.size()) - kPluginPrefix.size());
        };
        if (family(name) == family(first)) continue;
        return fail(ErrorCode::Unavailable,
                    "MPI as transport: there are plug-ins for several MPIs ({}, {}), and the launcher does not say "
                    "which is meant -- set COHORT_MPI_PLUGIN to the path of one",
                    found.front().path.string(), other.path.string());
      }
      path = found.front().path;
      break;
    }
    if (!path) {
      return fail(ErrorCode::Unavailable,
                  "MPI as transport: there is no plug-in for {} on this host (looked in {}) -- {}; it is done once for "
                  "each MPI",
                  wanted->empty() ? "an MPI" : family_name(*wanted), looked, how_to_build(*wanted));
    }
  }
  // Checks the file's name first, so that no second MPI is loaded into the process that then does not fit.
  const std::string name = path->filename().string();
  for (const std::string_view other : {kOpenMpi, kMpich}) {
    if (wanted->empty() || *wanted == other || !name.starts_with(fmt::format("{}{}-", kPluginPrefix, other))) continue;
    return fail(ErrorCode::Mismatch,
                "the MPI plug-in {} is made for {}, but {}'s launcher started this process: its ranks would not find "
                "each other -- {}, or start by {}'s mpirun",
                path->string(), family_name(other), family_name(*wanted), how_to_build(*wanted), family_name(other));
  }
  auto plugin = open_plugin(*path);
  if (!plugin) return plugin;
  if (auto fits = check_family(*plugin, *wanted); !fits) return tl::unexpected(fits.error());
  return plugin;
}

}  // namespace

Result<Plugin> plugin_of_process() {
  static std::mutex mutex;
  static std::optional<Plugin> loaded;
  const std::lock_guard lock(mutex);
  if (loaded) return *loaded;
  const auto environment = rendezvous::with_pmix_keys(rendezvous::current_environment());
  if (!environment) return tl::unexpected(environment.error());
  auto plugin = load_plugin(*environment);
  if (plugin) loaded = *plugin;
  return plugin;
}

std::vector<fs::path> installed_plugins(const rendezvous::Environment& environment) {
  std::vector<fs::path> found;
  for (const fs::path& folder : plugin_folders(environment)) {
    for (const Candidate& each : candidates_in(folder, "")) found.push_back(each.path);
  }
  return found;
}

}  // namespace cohort::mpi
