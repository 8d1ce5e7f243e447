// Exit statuses that mean something to `cohort run`.
#pragma once

namespace cohort {

/// The exit status of a program that has saved what it needs and asks to be started again (EX_TEMPFAIL of
/// <sysexits.h>). `cohort run` does not count it as a failure, and ends with the same status when all ranks have.
inline constexpr int kRequeueStatus = 75;

}  // namespace cohort
