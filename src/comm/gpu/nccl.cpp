#include "comm/gpu/nccl.h"

#include "base/env.h"
#include "base/log.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <type_traits>
#include <vector>

namespace cohort::comm::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kInWheel = "nvidia/nccl/lib/libnccl.so.2";
constexpr const char* kHowToGet =
    "pip install nvidia-nccl-cu12 (or -cu13, as the driver is), or give its path with COHORT_NCCL";

/// Returns the folders of Python packages from which this process has loaded a library, and those of its virtual
/// environment.
std::set<fs::path> package_folders() {
  std::set<fs::path> found;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* into) {
        const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
        for (const std::string_view name : {"/site-packages/", "/dist-packages/"}) {
          if (const auto at = path.find(name); at != std::string::npos)
            static_cast<std::set<fs::path>*>(into)->insert(path.substr(0, at + name.size()));
        }
        return 0;
      },
      &found);
  if (const char* const environment = std::getenv("VIRTUAL_ENV"); environment != nullptr) {
    std::error_code error;
    for (fs::directory_iterator each(fs::path(environment) / "lib", error), end; !error && each != end;
         each.increment(error)) {
      if (each->path().filename().string().starts_with("python3")) found.insert(each->path() / "site-packages");
    }
  }
  return found;
}

/// Returns the libraries to try, in this order, if none is loaded already.
std::vector<std::string> places(const std::string& chosen) {
  if (!chosen.empty()) return {chosen};
  std::vector<std::string> all;
  for (const fs::path& folder : package_folders()) {
    std::error_code error;
    if (fs::exists(folder / kInWheel, error)) all.push_back((folder / kInWheel).string());
  }
  all.emplace_back(kName);
  return all;
}

/// Returns the path of the library that contains a function.
std::string path_of(const void* function) {
  Dl_info info{};
  return ::dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : kName;
}

}  // namespace

std::string Nccl::text_of(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

Result<Nccl> Nccl::load(const std::string& chosen) {
  if (chosen == "off") return fail(ErrorCode::Unavailable, "NCCL is not used: COHORT_NCCL=off");
  // Prefers a loaded NCCL: two in one process would have separate threads and memory, and might differ in version.
  void* handle = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  const bool found_loaded = handle != nullptr;
  std::string why;
  for (const std::string& place : places(chosen)) {
    if (handle != nullptr) break;
    handle = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    const char* const said = ::dlerror();
    why += fmt::format("{}{}", why.empty() ? "" : "; ", said != nullptr ? said : place);
  }
  if (handle == nullptr) return fail(ErrorCode::Unavailable, "there is no NCCL: {} -- {}", why, kHowToGet);

  Nccl library;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  NcclFunctions& call = library.call;
#define FIND(name) find(call.name, #name)
  FIND(ncclGetVersion);
  FIND(ncclGetUniqueId);
  FIND(ncclCommInitRankConfig);
  FIND(ncclCommDestroy);
  FIND(ncclCommAbort);
  FIND(ncclCommGetAsyncError);
  FIND(ncclGetErrorString);
  FIND(ncclGetLastError);
  FIND(ncclGroupStart);
  FIND(ncclGroupEnd);
  FIND(ncclAllReduce);
  FIND(ncclRedOpCreatePreMulSum);
  FIND(ncclRedOpDestroy);
  FIND(ncclReduce);
  FIND(ncclReduceScatter);
  FIND(ncclBroadcast);
  FIND(ncclAllGather);
  FIND(ncclSend);
  FIND(ncclRecv);
#undef FIND
  if (call.ncclGetVersion == nullptr)
    return fail(ErrorCode::Unavailable, "{} is no NCCL -- {}", chosen.empty() ? kName : chosen.c_str(), kHowToGet);
  library.path = path_of(reinterpret_cast<const void*>(call.ncclGetVersion));
  if (const NcclResult result = call.ncclGetVersion(&library.version); result != NcclResult::Success)
    return fail(ErrorCode::Unavailable, "NCCL does not tell its version ({})", library.path);
  if (library.version < kOldest || !missing.empty()) {
    return fail(ErrorCode::Unavailable, "NCCL {} is too old{} ({}) -- {} or newer is needed: {}",
                text_of(library.version), missing.empty() ? "" : ", it has no " + missing, library.path,
                text_of(kOldest), kHowToGet);
  }
  std::error_code error;
  if (found_loaded && !chosen.empty() && !fs::equivalent(chosen, library.path, error))
    log::warn("comm", "COHORT_NCCL={} does not count: the process has loaded {} before", chosen, library.path);
  return library;
}

const Result<Nccl>& Nccl::find() {
  static const auto* const found = new Result<Nccl>(load(env::text(env::kNccl)));
  return *found;
}

std::string Nccl::said(NcclResult result, NcclComm comm) const {
  const char* const meaning = call.ncclGetErrorString(result);
  const char* const more = call.ncclGetLastError(comm);
  std::string text =
      fmt::format("NCCL says: {} (result {}", meaning != nullptr ? meaning : "unknown", static_cast<int>(result));
  if (more != nullptr && *more != '\0') text += fmt::format("; {}", more);
  return text + ")";
}

}  // namespace cohort::comm::cuda
