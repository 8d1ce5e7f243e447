// Threads, and what they wait for each other with: mutexes, conditions, once, futexes. And clocks.
#include "kernel/kernel.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>

using namespace sim;

namespace {

constexpr Nanoseconds kMonotonicBase = 100'000 * kSecond;
constexpr Nanoseconds kRealBase = 1'800'000'000 * kSecond;

Nanoseconds base_of(clockid_t clock) {
  switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE: return kRealBase;
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_COARSE:
    case CLOCK_MONOTONIC_RAW:
    case CLOCK_BOOTTIME: return kMonotonicBase;
    default: return 0;
  }
}

Nanoseconds nanoseconds(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }

timespec to_timespec(Nanoseconds time) { return {time / kSecond, time % kSecond}; }

WaitQueue& queue_of(const void* thing) { return state->waits[{here(), thing}]; }

void drop_if_empty(const void* thing) {
  const auto found = state->waits.find({here(), thing});
  if (found != state->waits.end() && found->second.empty()) state->waits.erase(found);
}

int lock(pthread_mutex_t* mutex, Nanoseconds deadline) {
  auto& data = mutex->__data;
  if (data.__lock != 0 && data.__owner == self->tid && (data.__kind & 3) == PTHREAD_MUTEX_RECURSIVE_NP) {
    ++data.__count;
    return 0;
  }
  while (data.__lock != 0) {
    if (state->now >= deadline) return ETIMEDOUT;
    queue_of(mutex).add(*self);
    block("a mutex", deadline);
  }
  data.__lock = 1;
  data.__owner = self->tid;
  data.__count = 1;
  return 0;
}

int unlock(pthread_mutex_t* mutex) {
  auto& data = mutex->__data;
  if ((data.__kind & 3) == PTHREAD_MUTEX_RECURSIVE_NP && --data.__count > 0) return 0;
  data.__lock = 0;
  data.__owner = 0;
  if (const auto found = state->waits.find({here(), mutex}); found != state->waits.end()) {
    found->second.wake_one();
    drop_if_empty(mutex);
  }
  return 0;
}

int wait(pthread_cond_t* condition, pthread_mutex_t* mutex, Nanoseconds deadline) {
  queue_of(condition).add(*self);
  unlock(mutex);
  const Woke woke = block("a condition", deadline, true);
  if (woke == Woke::Signal) run_handlers();
  drop_if_empty(condition);
  lock(mutex, kNever);
  return woke == Woke::Timeout ? ETIMEDOUT : 0;
}

}  // namespace

CALL(int, clock_gettime, clockid_t clock, timespec* time) {
  if (here() == nullptr) return REAL(clock_gettime)(clock, time);
  charge(kClockCost);
  *time = to_timespec(base_of(clock) + state->now + self->ahead);
  return 0;
}
CALL(int, gettimeofday, timeval* time, void* zone) {
  if (here() == nullptr) return REAL(gettimeofday)(time, zone);
  const Nanoseconds now = kRealBase + state->now;
  *time = {now / kSecond, now % kSecond / 1000};
  return 0;
}
CALL(time_t, time, time_t* out) {
  if (here() == nullptr) return REAL(time)(out);
  const time_t now = (kRealBase + state->now) / kSecond;
  if (out != nullptr) *out = now;
  return now;
}

namespace {

int sleep_until(Nanoseconds deadline, timespec* left) {
  while (state->now < deadline) {
    if (block("sleep", deadline, true) == Woke::Signal) {
      run_handlers();
      if (left != nullptr) *left = to_timespec(std::max<Nanoseconds>(deadline - state->now, 0));
      return EINTR;
    }
  }
  return 0;
}

}  // namespace

CALL(int, nanosleep, const timespec* time, timespec* left) {
  if (here() == nullptr) return REAL(nanosleep)(time, left);
  const int error = sleep_until(state->now + std::max<Nanoseconds>(nanoseconds(*time), 1'000), left);
  return error == 0 ? 0 : failed(error);
}
CALL(int, clock_nanosleep, clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (here() == nullptr) return REAL(clock_nanosleep)(clock, flags, time, left);
  const Nanoseconds until =
      (flags & TIMER_ABSTIME) != 0 ? nanoseconds(*time) - base_of(clock) : state->now + nanoseconds(*time);
  return sleep_until(until, left);
}
CALL(int, sched_yield) {
  if (here() == nullptr) return REAL(sched_yield)();
  charge(kCallCost);
  return 0;
}

CALL(int, pthread_mutex_lock, pthread_mutex_t* mutex) {
  return here() == nullptr ? REAL(pthread_mutex_lock)(mutex) : lock(mutex, kNever);
}
CALL(int, pthread_mutex_trylock, pthread_mutex_t* mutex) {
  if (here() == nullptr) return REAL(pthread_mutex_trylock)(mutex);
  const bool own = mutex->__data.__owner == self->tid && (mutex->__data.__kind & 3) == PTHREAD_MUTEX_RECURSIVE_NP;
  return mutex->__data.__lock != 0 && !own ? EBUSY : lock(mutex, kNever);
}
CALL(int, pthread_mutex_unlock, pthread_mutex_t* mutex) {
  return here() == nullptr ? REAL(pthread_mutex_unlock)(mutex) : unlock(mutex);
}
CALL(int, pthread_mutex_clocklock, pthread_mutex_t* mutex, clockid_t clock, const timespec* time) {
  if (here() == nullptr) return REAL(pthread_mutex_clocklock)(mutex, clock, time);
  return lock(mutex, nanoseconds(*time) - base_of(clock));
}
CALL(int, pthread_cond_wait, pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return here() == nullptr ? REAL(pthread_cond_wait)(condition, mutex) : wait(condition, mutex, kNever);
}
CALL(int, pthread_cond_clockwait, pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
     const timespec* time) {
  if (here() == nullptr) return REAL(pthread_cond_clockwait)(condition, mutex, clock, time);
  return wait(condition, mutex, nanoseconds(*time) - base_of(clock));
}
CALL(int, pthread_cond_timedwait, pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* time) {
  if (here() == nullptr) return REAL(pthread_cond_timedwait)(condition, mutex, time);
  // A condition with another clock than the default says so in a bit (glibc's __wrefs).
  const bool monotonic = (condition->__data.__wrefs & 2) != 0;
  return wait(condition, mutex, nanoseconds(*time) - base_of(monotonic ? CLOCK_MONOTONIC : CLOCK_REALTIME));
}
CALL(int, pthread_cond_signal, pthread_cond_t* condition) {
  if (here() == nullptr) return REAL(pthread_cond_signal)(condition);
  if (const auto found = state->waits.find({here(), condition}); found != state->waits.end()) found->second.wake_one();
  return 0;
}
CALL(int, pthread_cond_broadcast, pthread_cond_t* condition) {
  if (here() == nullptr) return REAL(pthread_cond_broadcast)(condition);
  if (const auto found = state->waits.find({here(), condition}); found != state->waits.end()) found->second.wake_all();
  return 0;
}
CALL(int, pthread_cond_destroy, pthread_cond_t* condition) {
  if (here() == nullptr) return REAL(pthread_cond_destroy)(condition);
  state->waits.erase({here(), condition});
  return 0;
}
CALL(int, pthread_mutex_destroy, pthread_mutex_t* mutex) {
  if (here() == nullptr) return REAL(pthread_mutex_destroy)(mutex);
  state->waits.erase({here(), mutex});
  return 0;
}

CALL(int, pthread_once, pthread_once_t* once, void (*function)()) {
  if (here() == nullptr) return REAL(pthread_once)(once, function);
  while (*once == 1) {
    queue_of(once).add(*self);
    block("pthread_once");
  }
  if (*once == 2) return 0;
  *once = 1;
  try {
    function();
  } catch (...) {
    *once = 0;
    queue_of(once).wake_all();
    throw;
  }
  *once = 2;
  queue_of(once).wake_all();
  drop_if_empty(once);
  return 0;
}

// Initialisation of local statics: the first byte says that it is done, the second that it is being done.
CALL(int, __cxa_guard_acquire, char* guard) {
  using Function = int (*)(char*);
  static Function real = nullptr;
  if (here() == nullptr) {
    if (real == nullptr) real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "__cxa_guard_acquire"));
    return real(guard);
  }
  while (guard[0] == 0 && guard[1] != 0) {
    queue_of(guard).add(*self);
    block("the initialisation of a static");
  }
  if (guard[0] != 0) return 0;
  guard[1] = 1;
  return 1;
}
CALL(void, __cxa_guard_release, char* guard) {
  using Function = void (*)(char*);
  static Function real = nullptr;
  if (here() == nullptr) {
    if (real == nullptr) real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "__cxa_guard_release"));
    return real(guard);
  }
  guard[0] = 1;
  guard[1] = 0;
  if (const auto found = state->waits.find({here(), guard}); found != state->waits.end()) found->second.wake_all();
}
CALL(void, __cxa_guard_abort, char* guard) {
  using Function = void (*)(char*);
  static Function real = nullptr;
  if (here() == nullptr) {
    if (real == nullptr) real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "__cxa_guard_abort"));
    return real(guard);
  }
  guard[1] = 0;
  if (const auto found = state->waits.find({here(), guard}); found != state->waits.end()) found->second.wake_all();
}

CALL(int, pthread_create, pthread_t* handle, const pthread_attr_t* attributes, void* (*routine)(void*),
     void* argument) {
  Process* const process = here();
  if (process == nullptr) return REAL(pthread_create)(handle, attributes, routine, argument);
  if (self->fork) settle_fork();
  constexpr Nanoseconds kThreadCost = 20'000;
  charge(kThreadCost);
  Thread& thread = add_thread(*here());
  thread.blocked = self->blocked;
  thread.routine = routine;
  thread.argument = argument;
  start_thread(thread, state->now);
  *handle = thread.handle;
  return 0;
}

namespace {

Thread* thread_of(pthread_t handle) {
  for (const auto& thread : here()->threads) {
    if (pthread_equal(thread->handle, handle) != 0 && !thread->detached) return thread.get();
  }
  return nullptr;
}

}  // namespace

CALL(int, pthread_join, pthread_t handle, void** result) {
  if (here() == nullptr) return REAL(pthread_join)(handle, result);
  Thread* const thread = thread_of(handle);
  if (thread == nullptr) return ESRCH;
  while (!thread->ended) {
    thread->joiners.add(*self);
    block("pthread_join");
  }
  thread->detached = true;
  give_back(*thread);
  return 0;
}
CALL(int, pthread_detach, pthread_t handle) {
  if (here() == nullptr) return REAL(pthread_detach)(handle);
  if (Thread* const thread = thread_of(handle)) {
    thread->detached = true;
    if (thread->ended) give_back(*thread);
  }
  return 0;
}
CALL(int, pthread_setname_np, pthread_t handle, const char* name) {
  return here() == nullptr ? REAL(pthread_setname_np)(handle, name) : 0;
}

// Memory that processes share has another address in each: a futex is known by its file and offset.
namespace {

struct Shared {
  std::size_t bytes;
  std::uint64_t file;
};
std::map<const char*, Shared>* mappings = nullptr;
std::map<std::pair<std::uint64_t, std::uint64_t>, WaitQueue>* futexes = nullptr;

WaitQueue& futex_of(const void* word) {
  if (futexes == nullptr) futexes = new std::map<std::pair<std::uint64_t, std::uint64_t>, WaitQueue>;
  const auto* const at = static_cast<const char*>(word);
  if (mappings != nullptr) {
    auto found = mappings->upper_bound(at);
    if (found != mappings->begin() && at < (--found)->first + found->second.bytes)
      return (*futexes)[{found->second.file, static_cast<std::uint64_t>(at - found->first)}];
  }
  return (*futexes)[{static_cast<std::uint64_t>(here()->pid), reinterpret_cast<std::uint64_t>(word)}];
}

long futex(std::uint32_t* word, int operation, std::uint32_t value, const timespec* time) {
  charge(kCallCost);
  const int what = operation & FUTEX_CMD_MASK;
  if (what == FUTEX_WAKE || what == FUTEX_WAKE_BITSET) {
    if (value == 1)
      futex_of(word).wake_one();
    else
      futex_of(word).wake_all();
    return 0;
  }
  if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) return failed(EAGAIN);
  Nanoseconds deadline = kNever;
  if (time != nullptr && what == FUTEX_WAIT) deadline = state->now + nanoseconds(*time);
  if (time != nullptr && what == FUTEX_WAIT_BITSET)
    deadline = nanoseconds(*time) - base_of((operation & FUTEX_CLOCK_REALTIME) != 0 ? CLOCK_REALTIME : CLOCK_MONOTONIC);
  futex_of(word).add(*self);
  const Woke woke = block("a futex", deadline, true);
  if (woke == Woke::Signal) run_handlers();
  return woke == Woke::Ready ? 0 : failed(woke == Woke::Timeout ? ETIMEDOUT : EINTR);
}

}  // namespace

CALL(void*, mmap, void* address, std::size_t size, int protection, int flags, int fd, off_t offset) {
  if (here() == nullptr) return REAL(mmap)(address, size, protection, flags, fd, offset);
  int real = fd;
  std::uint64_t identity = 0;
  if (fd >= 0) {
    if (const FilePtr file = file_of(fd)) {
      real = file->real();
      identity = reinterpret_cast<std::uint64_t>(file.get());
    }
  }
  void* const memory = REAL(mmap)(address, size, protection, flags, real, offset);
  if (memory != MAP_FAILED && identity != 0 && (flags & MAP_SHARED) != 0) {
    if (mappings == nullptr) mappings = new std::map<const char*, Shared>;
    (*mappings)[static_cast<const char*>(memory)] = {size, identity};
  }
  return memory;
}
CALL(int, munmap, void* address, std::size_t size) {
  if (here() != nullptr && mappings != nullptr) mappings->erase(static_cast<const char*>(address));
  return REAL(munmap)(address, size);
}
CALL(int, mlock, const void* address, std::size_t size) { return here() == nullptr ? REAL(mlock)(address, size) : 0; }

CALL(ssize_t, process_vm_readv, pid_t pid, const iovec* local, unsigned long locals, const iovec* remote,
     unsigned long remotes, unsigned long flags) {
  if (here() == nullptr) return REAL(process_vm_readv)(pid, local, locals, remote, remotes, flags);
  charge(kCallCost);
  if (find(pid) == nullptr || find(pid)->ended) return failed(ESRCH);
  ssize_t moved = 0;
  for (unsigned long i = 0; i < std::min(locals, remotes); ++i) {
    const std::size_t size = std::min(local[i].iov_len, remote[i].iov_len);
    std::memcpy(local[i].iov_base, remote[i].iov_base, size);
    moved += static_cast<ssize_t>(size);
  }
  return moved;
}

CALL(ssize_t, getrandom, void* bytes, std::size_t size, unsigned flags) {
  if (here() == nullptr) return REAL(getrandom)(bytes, size, flags);
  auto* out = static_cast<unsigned char*>(bytes);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<unsigned char>(state->random());
  return static_cast<ssize_t>(size);
}
CALL(int, sigaltstack, const stack_t* now, stack_t* before) {
  return here() == nullptr ? REAL(sigaltstack)(now, before) : 0;
}
CALL(int, getentropy, void* bytes, std::size_t size) {
  if (here() == nullptr) return REAL(getentropy)(bytes, size);
  simulated_getrandom(bytes, size, 0);
  return 0;
}
CALL(std::uint32_t, arc4random) {
  if (here() == nullptr) {
    std::uint32_t value = 0;
    REAL(getrandom)(&value, sizeof value, 0);
    return value;
  }
  return static_cast<std::uint32_t>(state->random());
}

extern "C" int simulated_pidfd_open(pid_t pid);
extern "C" int simulated_pidfd_send_signal(int fd, int number);
extern "C" int simulated_close_range(unsigned first, unsigned last, unsigned flags);

CALL(long, syscall, long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& value : a) value = va_arg(list, long);
  va_end(list);
  if (here() == nullptr) return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  switch (number) {
    case SYS_futex:
      return futex(reinterpret_cast<std::uint32_t*>(a[0]), static_cast<int>(a[1]), static_cast<std::uint32_t>(a[2]),
                   reinterpret_cast<const timespec*>(a[3]));
    case SYS_gettid: return self->tid;
    case SYS_getrandom: return simulated_getrandom(reinterpret_cast<void*>(a[0]), static_cast<std::size_t>(a[1]), 0);
    case SYS_pidfd_open: return simulated_pidfd_open(static_cast<pid_t>(a[0]));
    case SYS_pidfd_send_signal: return simulated_pidfd_send_signal(static_cast<int>(a[0]), static_cast<int>(a[1]));
    case SYS_close_range:
      return simulated_close_range(static_cast<unsigned>(a[0]), static_cast<unsigned>(a[1]),
                                   static_cast<unsigned>(a[2]));
    case SYS_sched_getaffinity: {
      const auto size = static_cast<std::size_t>(a[1]);
      std::memset(reinterpret_cast<void*>(a[2]), 0, size);
      for (int core = 0; core < here()->host->cores; ++core)
        reinterpret_cast<unsigned char*>(a[2])[core / 8] |= static_cast<unsigned char>(1U << (core % 8));
      return static_cast<long>(size);
    }
    case SYS_ioprio_set: return 0;
    default: return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  }
}
