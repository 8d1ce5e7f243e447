// How the turn is passed: one real thread goes from the stack of a simulated thread to that of the next, with the
// thread pointer that thread_local and errno are found by. The C library has made both for a real thread of each
// simulated one, which waits in the kernel from its first instruction on, and takes its stack back to end.
#include "kernel/kernel.h"

#include <linux/futex.h>
#include <sys/auxv.h>
#include <sys/syscall.h>

namespace sim {
namespace {

Thread* ending = nullptr;  ///< a detached thread that has ended: its stack is given back once nothing runs on it

}  // namespace

extern "C" {
__attribute__((visibility("hidden"))) unsigned char sim_sets_thread_pointer = 0;  ///< by an instruction (FSGSBASE)
__attribute__((visibility("hidden"))) void sim_switch(Context* from, const Context* to);
__attribute__((visibility("hidden"))) void sim_park(Context* own);
}

// Context: 0 stack pointer, 8 thread pointer, 16 phase. On the stack: the registers that a call keeps.
__asm__(
    ".text\n.hidden sim_switch\n.globl sim_switch\n.type sim_switch,@function\nsim_switch:\n"
    "  pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "  movq %rsp, 0(%rdi)\n  movq %fs:0, %rax\n  movq %rax, 8(%rdi)\n"
    "  movq %rsi, %r12\n  movq 0(%r12), %rsp\n  movq 8(%r12), %rsi\n"
    "  cmpb $0, sim_sets_thread_pointer(%rip)\n  je 1f\n  wrfsbase %rsi\n  jmp 2f\n"
    "1: movl $158, %eax\n  movl $0x1002, %edi\n  syscall\n"  // arch_prctl(ARCH_SET_FS)
    "2: popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n  ret\n"
    ".size sim_switch, .-sim_switch\n"
    // Says that the stack is free, waits until it is given back, and goes on where it has been left then.
    ".hidden sim_park\n.globl sim_park\n.type sim_park,@function\nsim_park:\n"
    "  pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "  movq %rsp, 0(%rdi)\n  movq %fs:0, %rax\n  movq %rax, 8(%rdi)\n  movq %rdi, %r12\n"
    "  leaq 16(%r12), %rdi\n  movl $129, %esi\n  movl $1, %edx\n  movl $202, %eax\n  movl $1, 16(%r12)\n  syscall\n"
    "3: cmpl $1, 16(%r12)\n  jne 4f\n"
    "  leaq 16(%r12), %rdi\n  movl $128, %esi\n  movl $1, %edx\n  xorl %r10d, %r10d\n  movl $202, %eax\n  syscall\n"
    "  jmp 3b\n"
    "4: movq 0(%r12), %rsp\n"
    "  popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n  ret\n"
    ".size sim_park, .-sim_park\n");

namespace {

void futex(int* word, int operation, int value) {
  register long r10 __asm__("r10") = 0;
  long result = SYS_futex;
  __asm__ volatile("syscall"
                   : "+a"(result)
                   : "D"(word), "S"(operation | FUTEX_PRIVATE_FLAG), "d"(value), "r"(r10)
                   : "rcx", "r11", "memory");
}

enum Phase : int { kStarting, kParked, kGivenBack };

void take_turn() {
  if (Thread* const ended = std::exchange(ending, nullptr)) give_back(*ended);
}

}  // namespace

void give_back(Thread& ended) {
  __atomic_store_n(&ended.context.phase, kGivenBack, __ATOMIC_SEQ_CST);
  futex(&ended.context.phase, FUTEX_WAKE, 1);
  REAL(pthread_join)(ended.handle, nullptr);
}

void park(Thread& own) {
  sim_park(&own.context);
  take_turn();
}

void pass_turn(Thread& from, Thread& to) {
  constexpr unsigned long kFsGsBase = 2;
  static const bool known = (sim_sets_thread_pointer = (::getauxval(AT_HWCAP2) & kFsGsBase) != 0 ? 1 : 0, true);
  (void)known;
  while (__atomic_load_n(&to.context.phase, __ATOMIC_SEQ_CST) == kStarting)
    futex(&to.context.phase, FUTEX_WAIT, kStarting);
  if (from.ended && from.detached) ending = &from;
  sim_switch(&from.context, &to.context);
  if (!from.ended) take_turn();  // (the real thread of one that has ended)
}

}  // namespace sim
