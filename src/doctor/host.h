// `cohort doctor-host`: the part of `cohort doctor` on a host. Agents start it as they start a job's rank; it reads
// orders from stdin, a line of JSON each, and answers on stdout. Ends with its stdin. It leaves nothing behind.
#pragma once

namespace cohort::doctor {

/// Returns the process's exit status; the caller has to end the process at once, since threads still listen.
int run_doctor_host();

/// Seconds since 1970: hosts' clocks are compared by it.
double wall_clock();

/// Before every answer: programs that are asked for a version may print to our stdout.
inline constexpr char kAnswerMark[] = "cohort-doctor-host ";

}  // namespace cohort::doctor
