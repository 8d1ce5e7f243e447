// Lists of hosts as people and schedulers write them: Slurm's host lists and counts, lists for -H, host files in Open
// MPI's, MPICH's, Horovod's and DeepSpeed's spelling. Pure functions, strict and total: the whole text has a meaning or
// the error (InvalidArgument) names the place. Nothing larger than `kMostHosts` is ever built. Any thread.
// Parts shared by the parsers of hosts: the characters that a name may have, and errors that name the place in the
// text. Pure. Used within this folder only. Characters are counted from 1, as editors do.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

/// More hosts than this are a typing error.
inline constexpr std::size_t kMostHosts = 65536;
/// Most slots on one host.
inline constexpr int kMostSlots = 65536;

/// A host and how many ranks it takes.
struct HostSlots {
  std::string host;                   ///< a name or an address; IPv6 without brackets
  std::optional<int> slots = {};      ///< where it is said; from 1
  std::optional<int> max_slots = {};  ///< Open MPI's bound for oversubscription
  bool operator==(const HostSlots&) const = default;
};

/// "h:4", "h", "[fe80::1]:4": as `parse_host_slots` reads it (which knows no max_slots).
std::string to_string(const HostSlots& host);

/// Slurm's grammar: "n[01-03,7],m" is n01 n02 n03 n7 m, in that order, duplicates kept. Several brackets in a name
/// multiply in Slurm's order; a suffix behind the last bracket is taken, as Slurm does from 23.11.
Result<std::vector<std::string>> parse_slurm_hosts(std::string_view text);

/// Slurm's counts, one for each host of its list: "3,1(x3)" is 3 1 1 1.
Result<std::vector<int>> parse_slurm_counts(std::string_view text);

/// Parses -H and --host: "a:4,b", "[fe80::1]:4", "n[01-16]:8". A host that is named again adds to its slots (1 where
/// none are said), as in Open MPI. Hosts stay in the order of their first mention.
Result<std::vector<HostSlots>> parse_host_slots(std::string_view text);

/// A host file: a line for each host, "h", "h:4" or "h slots=4 max_slots=8", with comments from '#' and empty lines.
/// A host that is named again adds to its slots, so that PBS's and LSF's files (a line per slot) are read as well.
Result<std::vector<HostSlots>> parse_host_file(std::string_view text);

/// A text, what it is called in messages, and how it ought to be written.
struct NamedText {
  std::string_view text;
  std::string_view what;
  std::string_view advice;
};

/// Describes what is wrong with a host name or numeric address (IPv6 without brackets); empty if nothing is.
std::string_view fault_of_host(std::string_view host);

}  // namespace cohort::rendezvous
