// What the headers and the static libstdc++ of Debian 12 refer to and old glibcs lack; linked into what a wheel holds
// (tools/release/old_glibc.py), seen by nobody else.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HIDDEN __attribute__((visibility("hidden")))

// glibc 2.32: whether counts need not be atomic. They always are.
HIDDEN char __libc_single_threaded = 0;

// glibc 2.30. Where it is there, it is called. Elsewhere the wait is against the system's clock, in pieces: whoever sets
// that clock changes a wait by a second at most.
enum { kPieceNs = 1000000000L };

static struct timespec piece_from_now(clockid_t clock, const struct timespec* until, int* is_over) {
  struct timespec now;
  clock_gettime(clock, &now);
  long long left = (until->tv_sec - now.tv_sec) * 1000000000LL + (until->tv_nsec - now.tv_nsec);
  *is_over = left <= 0;
  if (left < 0) left = 0;
  if (left > kPieceNs) left = kPieceNs;
  clock_gettime(CLOCK_REALTIME, &now);
  left += now.tv_nsec;
  now.tv_sec += left / 1000000000LL;
  now.tv_nsec = left % 1000000000LL;
  return now;
}

HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* until) {
  typedef int Function(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static char unknown;
  static _Atomic(void*) known = &unknown;
  void* real = known;
  if (real == &unknown) known = real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  if (real) return ((Function*)real)(condition, mutex, clock, until);
  // A piece that is over is a spurious wakeup, which callers expect: whoever has changed what is waited for between two
  // pieces would not be seen if this waited on.
  int is_over;
  const struct timespec piece = piece_from_now(clock, until, &is_over);
  const int status = pthread_cond_timedwait(condition, mutex, &piece);
  return status == ETIMEDOUT && !is_over ? 0 : status;
}

HIDDEN int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  for (;;) {
    int is_over;
    const struct timespec piece = piece_from_now(clock, until, &is_over);
    const int status = pthread_mutex_timedlock(mutex, &piece);
    if (status != ETIMEDOUT || is_over) return status;
  }
}

// glibc 2.28; the same function where file offsets have 64 bits anyway.
#undef fcntl
extern int old_fcntl(int, int, ...) __asm__("fcntl");
HIDDEN int fcntl64(int descriptor, int command, ...) {
  va_list list;
  va_start(list, command);
  void* const argument = va_arg(list, void*);
  va_end(list);
  return old_fcntl(descriptor, command, argument);
}

HIDDEN pid_t gettid(void) { return (pid_t)syscall(SYS_gettid); }  // glibc 2.30

// glibc 2.32.
HIDDEN const char* strerrordesc_np(int error) {
  static _Thread_local char text[128];
  return strerror_r(error, text, sizeof text);
}
HIDDEN const char* strerrorname_np(int error) {
  const char* (*real)(int) = (const char* (*)(int))dlsym(RTLD_NEXT, "strerrorname_np");
  return real ? real(error) : NULL;
}
HIDDEN const char* sigabbrev_np(int signal) {
  static const char* const names[] = {
      [SIGHUP] = "HUP",   [SIGINT] = "INT",   [SIGQUIT] = "QUIT", [SIGILL] = "ILL",   [SIGTRAP] = "TRAP",
      [SIGABRT] = "ABRT", [SIGBUS] = "BUS",   [SIGFPE] = "FPE",   [SIGKILL] = "KILL", [SIGUSR1] = "USR1",
      [SIGSEGV] = "SEGV", [SIGUSR2] = "USR2", [SIGPIPE] = "PIPE", [SIGALRM] = "ALRM", [SIGTERM] = "TERM",
      [SIGCHLD] = "CHLD", [SIGCONT] = "CONT", [SIGSTOP] = "STOP", [SIGTSTP] = "TSTP", [SIGTTIN] = "TTIN",
      [SIGTTOU] = "TTOU", [SIGURG] = "URG",   [SIGXCPU] = "XCPU", [SIGXFSZ] = "XFSZ", [SIGSYS] = "SYS"};
  return signal > 0 && signal < (int)(sizeof names / sizeof *names) ? names[signal] : NULL;
}

// GCC 11. With the static library's own, its std::terminate would come along, beside the one that others call.
extern void exception_ptr_copy(void* self, const void* other) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
extern void exception_ptr_destroy(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
HIDDEN void exception_ptr_addref(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
HIDDEN void exception_ptr_release(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void exception_ptr_addref(void* self) {
  void* kept;
  exception_ptr_copy(&kept, self);
}
void exception_ptr_release(void* self) {
  exception_ptr_destroy(self);
  *(void**)self = NULL;
}
