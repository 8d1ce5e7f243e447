// PMIx through its library, found at run time: Open MPI, PRRTE, Slurm's pmix plug-in. Only what its standard fixes for
// good is used here: names of functions, layout of four structures, numbers of types.
#include "base/log.h"
#include "meet/exchange.h"
#include "meet/look_up.h"
#include "net/secret.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

namespace cohort::meet {
namespace {

// The standard's structures.
struct PmixProcess {
  char nspace[256];
  std::uint32_t rank;
};
struct PmixValue {
  std::uint16_t type;
  union {
    bool flag;
    char* string;
    std::uint32_t number;
    std::array<std::byte, 24> space;
  };
};
struct PmixInfo {
  char key[512];
  std::uint32_t flags;
  PmixValue value;
};
static_assert(sizeof(PmixProcess) == 260 && sizeof(PmixValue) == 32 && sizeof(PmixInfo) == 552);

constexpr std::uint16_t kBool = 1;
constexpr std::uint16_t kString = 3;
constexpr std::uint16_t kUint32 = 14;
constexpr std::uint8_t kGlobal = 3;
constexpr std::uint32_t kEveryone = UINT32_MAX - 1;  // a "rank" that stands for the job
constexpr int kPmixSuccess = 0;
constexpr std::size_t kLongestValue = 4096;

using Done = void (*)(int status, void* context);

struct Library {
  int (*init)(PmixProcess*, PmixInfo*, std::size_t) = nullptr;
  int (*finalize)(const PmixInfo*, std::size_t) = nullptr;
  int (*put)(std::uint8_t, const char*, PmixValue*) = nullptr;
  int (*commit)() = nullptr;
  int (*fence_nb)(const PmixProcess*, std::size_t, const PmixInfo*, std::size_t, Done, void*) = nullptr;
  int (*get)(const PmixProcess*, const char*, const PmixInfo*, std::size_t, PmixValue**) = nullptr;
  const char* (*error_text)(int) = nullptr;

  std::string text(int status) const {
    const char* const text = error_text(status);
    return fmt::format("{} ({})", text == nullptr ? "unknown" : text, status);
  }
};

Result<Library> load() {
  // Where MPI is in this process, its library is there already, and it has to be the same one. It stays loaded.
  void* handle = ::dlopen("libpmix.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return fail(ErrorCode::Unavailable, "PMIx's library cannot be loaded: {}", why == nullptr ? "unknown" : why);
  }
  Library library;
  const bool complete =
      look_up(handle, "PMIx_Init", library.init) && look_up(handle, "PMIx_Finalize", library.finalize) &&
      look_up(handle, "PMIx_Put", library.put) && look_up(handle, "PMIx_Commit", library.commit) &&
      look_up(handle, "PMIx_Fence_nb", library.fence_nb) && look_up(handle, "PMIx_Get", library.get) &&
      look_up(handle, "PMIx_Error_string", library.error_text);
  if (!complete) return fail(ErrorCode::Unavailable, "libpmix.so.2 lacks functions of PMIx 2");
  return library;
}

// A fence that is under way; outlives a waiter that gave up.
struct Fence {
  std::mutex mutex;
  std::condition_variable ended;
  std::optional<int> status;
  PmixInfo collect{};  // the library reads it until the end
};

void fence_done(int status, void* context) {
  const std::unique_ptr<std::shared_ptr<Fence>> held(static_cast<std::shared_ptr<Fence>*>(context));
  Fence& fence = **held;
  const std::lock_guard lock(fence.mutex);
  fence.status = status;
  fence.ended.notify_all();
}

class PmixExchange final : public Exchange {
 public:
  explicit PmixExchange(const Library& library) : library_(library) {}

  // Ended once, at the process's end: MPI, which counts on the same library, cannot start in it a second time. Open MPI
  // takes a process that ends without it for one that has failed.
  ~PmixExchange() override {
    if (opened_ && process_ == ::getpid() && !broken_) (void)library_.finalize(nullptr, 0);
  }

  Result<void> open() {
    const int status = library_.init(&me_, nullptr, 0);
    if (status != kPmixSuccess)
      return fail(ErrorCode::Unavailable, "PMIx: the launcher's server cannot be reached: {}", library_.text(status));
    opened_ = true;
    const auto size = job_number(cluster::kPmixJobSize);
    if (!size) return tl::unexpected(size.error());
    size_ = *size;
    return {};
  }

  /// Of the job, by the name of its key.
  Result<int> job_number(std::string_view key) const {
    PmixProcess everyone = me_;
    everyone.rank = kEveryone;
    PmixValue* value = nullptr;
    const int status = library_.get(&everyone, std::string(key).c_str(), nullptr, 0, &value);
    const bool good =
        status == kPmixSuccess && value != nullptr && value->type == kUint32 && value->number <= INT32_MAX;
    const int number = good ? static_cast<int>(value->number) : 0;
    std::free(value);
    if (!good) return fail(ErrorCode::Unavailable, "PMIx: {} is not known: {}", key, library_.text(status));
    return number;
  }

  std::string_view name() const override { return "PMIx"; }
  std::size_t longest_value() const override { return kLongestValue; }
  int rank() const override { return static_cast<int>(me_.rank); }
  int size() const override { return size_; }

  Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                            net::Deadline deadline) override {
    const std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) return fail(ErrorCode::InvalidArgument, "PMIx cannot be used in a forked child");
    if (broken_) return fail(ErrorCode::Unavailable, "PMIx: an earlier exchange failed in this process");
    auto result = share_once(key, mine, deadline);
    if (!result) broken_ = true;
    return result;
  }

 private:
  Result<std::string> share_once(const std::string& key, std::optional<std::string> mine, net::Deadline deadline) {
    if (mine) {
      const net::Wiping wiping(*mine);
      PmixValue value{};
      value.type = kString;
      value.string = mine->data();
      int status = library_.put(kGlobal, key.c_str(), &value);
      if (status == kPmixSuccess) status = library_.commit();
      if (status != kPmixSuccess)
        return fail(ErrorCode::Unavailable, "PMIx: '{}' was refused: {}", key, library_.text(status));
    }
    if (auto all = fence(deadline); !all) return tl::unexpected(all.error());
    PmixProcess first = me_;
    first.rank = 0;
    PmixValue* value = nullptr;
    const int status = library_.get(&first, key.c_str(), nullptr, 0, &value);
    if (status != kPmixSuccess || value == nullptr || value->type != kString || value->string == nullptr)
      return fail(ErrorCode::Unavailable, "PMIx: rank 0 has shared no '{}': {}", key, library_.text(status));
    std::string text(value->string);
    ::explicit_bzero(value->string, text.size());
    std::free(value->string);  // as the standard says: made by malloc, the caller's
    std::free(value);
    return text;
  }

  // With the data of all, so that no later question has to travel.
  Result<void> fence(net::Deadline deadline) {
    const auto fence = std::make_shared<Fence>();
    std::strcpy(fence->collect.key, "pmix.collect");
    fence->collect.value.type = kBool;
    fence->collect.value.flag = true;
    auto held = std::make_unique<std::shared_ptr<Fence>>(fence);
    const int started = library_.fence_nb(nullptr, 0, &fence->collect, 1, fence_done, held.get());
    if (started != kPmixSuccess) return fail(ErrorCode::Unavailable, "PMIx's fence: {}", library_.text(started));
    (void)held.release();  // fence_done's
    std::unique_lock lock(fence->mutex);
    if (!fence->ended.wait_until(lock, deadline, [&] { return fence->status.has_value(); })) {
      return fail(ErrorCode::Timeout,
                  "PMIx's fence: not all {} processes came in time -- does every one of them call join?", size_);
    }
    if (*fence->status != kPmixSuccess) {
      return fail(ErrorCode::PeerLost, "PMIx's fence: {} -- has another process of the job ended?",
                  library_.text(*fence->status));
    }
    return {};
  }

  std::mutex mutex_;
  Library library_;
  pid_t process_ = ::getpid();
  bool opened_ = false;
  bool broken_ = false;
  PmixProcess me_{};
  int size_ = 0;
};

Result<std::shared_ptr<PmixExchange>> open_once() {
  static std::mutex mutex;
  static std::shared_ptr<PmixExchange> opened;  // its destructor ends PMIx at the process's end
  const std::lock_guard lock(mutex);
  if (opened) return opened;
  const auto library = load();
  if (!library) return tl::unexpected(library.error());
  auto exchange = std::make_shared<PmixExchange>(*library);
  if (auto open = exchange->open(); !open) return tl::unexpected(open.error());
  opened = exchange;
  return opened;
}

}  // namespace

Result<std::shared_ptr<Exchange>> open_pmix(const cluster::Environment&) {
  auto exchange = open_once();
  if (!exchange) return tl::unexpected(exchange.error());
  return std::shared_ptr<Exchange>(*std::move(exchange));
}

Result<cluster::Environment> with_pmix_keys(cluster::Environment environment) {
  if (!cluster::needs_pmix_keys(environment)) return environment;
  const auto exchange = open_once();
  if (!exchange) {
    return fail(ErrorCode::Unavailable,
                "PMIX_RANK={} says that a launcher started this process, but not how many there are: {} -- start it "
                "otherwise, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; to run singly, set COHORT_ALONE=1",
                environment["PMIX_RANK"], exchange.error().what());
  }
  environment[std::string(cluster::kPmixJobSize)] = std::to_string((*exchange)->size());
  const auto local = (*exchange)->job_number(cluster::kPmixLocalSize);
  if (local) environment[std::string(cluster::kPmixLocalSize)] = std::to_string(*local);
  return environment;
}

}  // namespace cohort::meet
