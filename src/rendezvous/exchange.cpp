#include "rendezvous/exchange.h"

#include "base/log.h"
#include "base/parse.h"
#include "base/unique_fd.h"
#include "net/secret.h"
#include "net/socket.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

namespace cohort::rendezvous {
namespace {

// PMI version 1, as spoken by Hydra (MPICH, Intel MPI) and Slurm's pmi2 plug-in: lines of words over an inherited
// socket. Implemented here, since the existing libraries are part of an MPI.

using Reply = std::map<std::string, std::string, std::less<>>;

constexpr std::size_t kLongestLine = 64 * 1024;
constexpr std::chrono::seconds kAnswer{30};  // longest time for a reply from the launcher's process on this host
constexpr std::chrono::seconds kGoodBye{1};

class PmiExchange final : public Exchange {
 public:
  PmiExchange(sys::UniqueFd fd, int rank, int size)
      : fd_(std::move(fd)), process_(::getpid()), rank_(rank), size_(size) {}

  // Hydra and Slurm treat a process that ends without "finalize" as failed.
  ~PmiExchange() override {
    if (process_ != ::getpid() || broken_) return;
    (void)ask("cmd=finalize", "finalize_ack", net::deadline_in(kGoodBye));
  }

  Result<void> open() {
    const net::Deadline deadline = net::deadline_in(kAnswer);
    // MPI may already have sent "init"; sending it again is allowed.
    if (auto hello = ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", deadline); !hello)
      return tl::unexpected(hello.error());
    const auto limits = ask("cmd=get_maxes", "maxes", deadline);
    if (!limits) return tl::unexpected(limits.error());
    longest_value_ = number(*limits, "vallen_max").value_or(256) - 1;
    const auto space = ask("cmd=get_my_kvsname", "my_kvsname", deadline);
    if (!space) return tl::unexpected(space.error());
    const auto name = space->find("kvsname");
    if (name == space->end() || name->second.empty()) return bad("a reply without kvsname");
    space_ = name->second;
    return {};
  }

  std::string_view name() const override { return "PMI"; }
  std::size_t longest_value() const override { return longest_value_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                            net::Deadline deadline) override {
    const std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) return fail(ErrorCode::InvalidArgument, "PMI cannot be used in a forked child");
    if (broken_) return fail(ErrorCode::Unavailable, "PMI: an earlier exchange failed in this process");
    auto result = share_once(key, mine, deadline);
    if (!result) broken_ = true;
    return result;
  }

 private:
  static tl::unexpected<Error> bad(std::string_view why) {
    return fail(ErrorCode::Unavailable, "PMI (at PMI_FD): {}", why);
  }

  static std::optional<std::size_t> number(const Reply& reply, std::string_view name) {
    const auto found = reply.find(name);
    if (found == reply.end()) return std::nullopt;
    const auto value = parse_integer<std::size_t>(found->second);
    return value && *value > 1 && *value < kLongestLine ? value : std::nullopt;
  }

  Result<std::string> share_once(const std::string& key, const std::optional<std::string>& mine,
                                 net::Deadline deadline) {
    const std::string place = fmt::format("kvsname={} key={}", space_, key);
    if (mine) {
      if (mine->size() > longest_value_) return bad(fmt::format("it takes no value of {} bytes", mine->size()));
      std::string request;
      const net::Wiping wiping(request);
      const std::string_view cmd = "cmd=put ", value = " value=";
      request.reserve(cmd.size() + place.size() + value.size() + mine->size());
      request.append(cmd).append(place).append(value).append(*mine);
      const auto put = ask(request, "put_result", deadline);
      if (!put) return tl::unexpected(put.error());
    }
    const auto all = ask("cmd=barrier_in", "barrier_out", deadline);
    if (!all) {
      if (all.error().code() != ErrorCode::Timeout) return tl::unexpected(all.error());
      return fail(ErrorCode::Timeout,
                  "PMI's barrier: not all {} processes came in time -- does every one of them call init?", size_);
    }
    auto got = ask(fmt::format("cmd=get {}", place), "get_result", deadline);
    if (!got) return tl::unexpected(got.error());
    const auto value = got->find("value");
    if (value == got->end()) return bad("a reply without value");
    return std::move(value->second);
  }

  // Sends a request and returns its reply. A reply whose rc is not 0 is an error.
  Result<Reply> ask(const std::string& request, std::string_view command, net::Deadline deadline) {
    std::string line;
    const net::Wiping wiping_line(line);
    line.reserve(request.size() + 1);
    line.append(request).append("\n");
    for (std::string_view rest = line; !rest.empty();) {
      const ssize_t n = ::send(fd_.get(), rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        rest.remove_prefix(static_cast<std::size_t>(n));
      } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (auto ready = wait(POLLOUT, deadline); !ready) return tl::unexpected(ready.error());
      } else {
        return bad(
            fmt::format("the launcher does not listen any more: {} -- ranks have to call init before MPI_Finalize",
                        errno_text(errno)));
      }
    }
    auto text = read_line(deadline);
    if (!text) return tl::unexpected(text.error());
    const net::Wiping wiping_text(*text);
    auto reply = parse_pmi_line(*text);
    if (!reply) return tl::unexpected(reply.error());
    const std::string asked = request.substr(0, request.find(" value="));  // values must not appear in messages
    if ((*reply)["cmd"] != command) return bad(fmt::format("the reply '{}' to '{}'", (*reply)["cmd"], asked));
    if (const auto rc = reply->find("rc"); rc != reply->end() && rc->second != "0")
      return bad(fmt::format("'{}' was refused: {}", asked, (*reply)["msg"]));
    return reply;
  }

  Result<void> wait(short events, net::Deadline deadline) {
    const auto ready = net::wait_ready(fd_.get(), events, deadline);
    if (!ready) return tl::unexpected(ready.error());
    if (!*ready) return fail(ErrorCode::Timeout, "PMI (at PMI_FD): no answer in time");
    return {};
  }

  // Reads no byte beyond the line's end, since MPI reads from the same socket.
  Result<std::string> read_line(net::Deadline deadline) {
    std::string line;
    line.reserve(kLongestLine);  // so that growth never copies the line, which may be a secret
    std::string buffer(512, '\0');
    const net::Wiping wiping(buffer);
    while (line.size() < kLongestLine) {
      const ssize_t seen = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_PEEK | MSG_DONTWAIT);
      if (seen == 0) return bad("the launcher has closed its side -- ranks have to call init before MPI_Finalize");
      if (seen < 0) {
        if (errno != EAGAIN && errno != EINTR) return bad(errno_text(errno));
        if (auto ready = wait(POLLIN, deadline); !ready) return tl::unexpected(ready.error());
        continue;
      }
      const std::string_view part(buffer.data(), static_cast<std::size_t>(seen));
      const std::size_t newline = part.find('\n');
      const std::size_t take = newline == std::string_view::npos ? part.size() : newline + 1;
      if (::recv(fd_.get(), buffer.data(), take, MSG_DONTWAIT) != static_cast<ssize_t>(take))
        return bad("somebody else reads the launcher's replies");
      line.append(part.substr(0, newline));
      if (newline != std::string_view::npos) return line;
    }
    return bad("a reply without an end");
  }

  std::mutex mutex_;
  sys::UniqueFd fd_;
  pid_t process_;
  int rank_;
  int size_;
  bool broken_ = false;
  std::size_t longest_value_ = 255;
  std::string space_;
};

std::optional<int> value_of(const rendezvous::Environment& environment, std::string_view name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::nullopt : parse_integer<int>(found->second);
}

}  // namespace

Result<Reply> parse_pmi_line(std::string_view line) {
  Reply reply;
  while (!line.empty()) {
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string_view word = line.substr(0, space);
    line.remove_prefix(std::min(line.size(), space + 1));
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    // Slurm's messages for people contain spaces; values that are needed contain none.
    if (equals == 0 || equals == std::string_view::npos) continue;
    reply.emplace(word.substr(0, equals), word.substr(equals + 1));
  }
  if (!reply.contains("cmd")) return fail(ErrorCode::Corrupt, "PMI (at PMI_FD): a reply that is no PMI message");
  return reply;
}

namespace {

/// Opens PMI once per process; later calls return the same object.
Result<std::shared_ptr<Exchange>> open_pmi(const rendezvous::Environment& environment) {
  static std::mutex mutex;
  static std::shared_ptr<PmiExchange> opened;  // its destructor sends "finalize" at the process's end
  const std::lock_guard lock(mutex);
  if (opened) return opened;
  const auto number = value_of(environment, "PMI_FD");
  const auto rank = value_of(environment, "PMI_RANK");
  const auto size = value_of(environment, "PMI_SIZE");
  if (!number || *number < 0 || !rank || !size)
    return fail(ErrorCode::Unavailable, "PMI_FD, PMI_RANK or PMI_SIZE is not set to a number");
  int type = 0;
  socklen_t length = sizeof type;
  if (::getsockopt(*number, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) {
    return fail(ErrorCode::Unavailable,
                "PMI_FD={} is not the launcher's socket any more (a program in between closed it, or MPI has ended)",
                *number);
  }
  // Works on a duplicate: MPI closes the original when it ends, and the number may then be given to another file.
  sys::UniqueFd fd(::fcntl(*number, F_DUPFD_CLOEXEC, 3));
  if (!fd) return fail(ErrorCode::Io, "PMI_FD={}: {}", *number, errno_text(errno));
  auto exchange = std::make_shared<PmiExchange>(std::move(fd), *rank, *size);
  if (auto open = exchange->open(); !open) return tl::unexpected(open.error());
  opened = exchange;
  return opened;
}

// PMIx through its library, found at run time: Open MPI, PRRTE, Slurm's pmix plug-in. Uses only what the standard has
// fixed for good: names of functions, layouts of four structures, type numbers.

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

// Loads PMIx's library for good. Has to use the one that an MPI in this process has already loaded; otherwise the
// launcher's own, which a later MPI also uses. That may lie in an unusual folder (Open MPI 5 from PyPI).
void* open_library() {
  constexpr const char* kName = "libpmix.so.2";
  if (void* const there = ::dlopen(kName, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD)) return there;
  if (const char* const prefix = std::getenv("PMIX_PREFIX")) {
    for (const char* const folder : {"lib", "lib64", "lib/openmpi"}) {
      const std::string path = fmt::format("{}/{}/{}", prefix, folder, kName);
      if (void* const own = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return own;
    }
  }
  return ::dlopen(kName, RTLD_NOW | RTLD_GLOBAL);
}

Result<Library> load() {
  void* const handle = open_library();
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

// A fence under way. It outlives a waiter that has given up.
struct Fence {
  std::mutex mutex;
  std::condition_variable ended;
  std::optional<int> status;
  PmixInfo collect{};  // read by the library until the fence ends
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

  // Ends PMIx once, at the process's end, since an MPI that uses the same library could not start it a second time.
  // Open MPI treats a process that ends without this as failed.
  ~PmixExchange() override {
    if (opened_ && process_ == ::getpid() && !broken_) (void)library_.finalize(nullptr, 0);
  }

  Result<void> open() {
    const int status = library_.init(&me_, nullptr, 0);
    if (status != kPmixSuccess)
      return fail(ErrorCode::Unavailable, "PMIx: the launcher's server cannot be reached: {}", library_.text(status));
    opened_ = true;
    const auto size = job_number(rendezvous::kPmixJobSize);
    if (!size) return tl::unexpected(size.error());
    size_ = *size;
    return {};
  }

  /// Returns a number of the job by its key's name.
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
    std::free(value->string);  // by the standard, made by malloc and owned by the caller
    std::free(value);
    return text;
  }

  // Runs a fence that collects all processes' data, so that later look-ups are local.
  Result<void> fence(net::Deadline deadline) {
    const auto fence = std::make_shared<Fence>();
    std::strcpy(fence->collect.key, "pmix.collect");
    fence->collect.value.type = kBool;
    fence->collect.value.flag = true;
    auto held = std::make_unique<std::shared_ptr<Fence>>(fence);
    const int started = library_.fence_nb(nullptr, 0, &fence->collect, 1, fence_done, held.get());
    if (started != kPmixSuccess) return fail(ErrorCode::Unavailable, "PMIx's fence: {}", library_.text(started));
    (void)held.release();  // fence_done owns it now
    std::unique_lock lock(fence->mutex);
    if (!fence->ended.wait_until(lock, deadline, [&] { return fence->status.has_value(); })) {
      return fail(ErrorCode::Timeout,
                  "PMIx's fence: not all {} processes came in time -- does every one of them call init?", size_);
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

Result<std::shared_ptr<Exchange>> open_pmix(const rendezvous::Environment&) {
  auto exchange = open_once();
  if (!exchange) return tl::unexpected(exchange.error());
  return std::shared_ptr<Exchange>(*std::move(exchange));
}

}  // namespace

Result<rendezvous::Environment> with_pmix_keys(rendezvous::Environment environment) {
  if (!rendezvous::needs_pmix_keys(environment)) return environment;
  const auto exchange = open_once();
  if (!exchange) {
    return fail(ErrorCode::Unavailable,
                "PMIX_RANK={} says that a launcher started this process, but not how many there are: {} -- start it "
                "otherwise, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; to run singly, set COHORT_ALONE=1",
                environment["PMIX_RANK"], exchange.error().what());
  }
  environment[std::string(rendezvous::kPmixJobSize)] = std::to_string((*exchange)->size());
  const auto local = (*exchange)->job_number(rendezvous::kPmixLocalSize);
  if (local) environment[std::string(rendezvous::kPmixLocalSize)] = std::to_string(*local);
  return environment;
}

namespace {

bool is_set(const rendezvous::Environment& environment, std::string_view name, std::optional<int> value = {}) {
  const auto found = environment.find(name);
  return found != environment.end() && !found->second.empty() && (!value || found->second == std::to_string(*value));
}

std::string_view advice_for(std::string_view launcher) {
  if (launcher == "Slurm") return "start by `srun --mpi=pmi2` or `srun --mpi=pmix`, or ";
  return "";
}

}  // namespace

Result<std::shared_ptr<Exchange>> open_exchange(const rendezvous::Detected& said,
                                                const rendezvous::Environment& environment) {
  // Variables of an outer launcher's PMI may still be set: they are used only if they match this rank and a kind of
  // exchange that the launcher has.
  const bool slurm = said.launcher == "Slurm";
  const bool has_pmi = slurm || said.launcher == "MPI (PMI)" || said.launcher == "MVAPICH2";
  const bool has_pmix =
      slurm || said.launcher == "Open MPI" || said.launcher == "PMIx" || said.launcher == "LSF (jsrun)";
  std::string why = "this launcher has none that Cohort knows";
  if (has_pmi || has_pmix) why = "it set none up for this process (no PMI_FD, no PMIX_NAMESPACE)";
  if (has_pmi && is_set(environment, "PMI_FD") && is_set(environment, "PMI_RANK", said.rank)) {
    auto exchange = open_pmi(environment);
    if (exchange) return exchange;
    why = exchange.error().what();
  } else if (has_pmix && is_set(environment, "PMIX_NAMESPACE") && is_set(environment, "PMIX_RANK", said.rank)) {
    auto exchange = open_pmix(environment);
    if (exchange) return exchange;
    why = exchange.error().what();
  } else if (slurm) {
    auto exchange = open_munge(said, environment);
    if (exchange) return exchange;
    why = fmt::format("{}, and MUNGE cannot stand in: {}", why, exchange.error().what());
  }
  return fail(ErrorCode::Unavailable, "{}", why);
}

Result<std::shared_ptr<Exchange>> find_exchange(const rendezvous::Detected& said,
                                                const rendezvous::Environment& environment) {
  auto exchange = open_exchange(said, environment);
  if (exchange) return exchange;
  return fail(
      ErrorCode::Unavailable,
      "{}: ranks on several hosts need a place to meet, and {}'s own cannot be used: {} -- {}set COHORT_INIT to "
      "file:///PATH, a new file for each job on a file system that all hosts share",
      said.source, said.launcher, exchange.error().what(), advice_for(said.launcher));
}

}  // namespace cohort::rendezvous
