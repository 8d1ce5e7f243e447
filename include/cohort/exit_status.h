// Exit statuses that mean something to `cohort run`.
#pragma once

namespace cohort {

/// The exit status of a program that has saved what it needs and asks to be started again (EX_TEMPFAIL of
/// <sysexits.h>). To `cohort run` it is no failure: once all ranks have ended so, it ends with the same status.
inline constexpr int kRequeueStatus = 75;

}  // namespace cohort
