// Lists of hosts as people and schedulers write them: Slurm's host lists and counts, lists for -H, host files in the
// formats of Open MPI, MPICH, Horovod and DeepSpeed. Pure functions: either the whole text is valid, or the error
// (InvalidArgument) names the position. No result has more than `kMostHosts` hosts. Any thread.
// Parts shared by the parsers: the characters that a name may have, and errors that name the position in the text.
// Pure. Used only within this folder. Characters are counted from 1, as in editors.
#pragma once

#include "base/result.h"

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

/// Most hosts in a list. More count as a typing error.
inline constexpr std::size_t kMostHosts = 65536;
/// Most slots on one host.
inline constexpr int kMostSlots = 65536;

/// A host, and how many ranks it may have.
struct HostSlots {
  std::string host;                   ///< a name or an address; IPv6 without brackets
  std::optional<int> slots = {};      ///< if given; from 1
  std::optional<int> max_slots = {};  ///< Open MPI's bound for oversubscription
  bool operator==(const HostSlots&) const = default;
};

/// Returns "h:4", "h" or "[fe80::1]:4", as `parse_host_slots` reads it (without max_slots).
std::string to_string(const HostSlots& host);

/// Parses Slurm's host lists: "n[01-03,7],m" is n01 n02 n03 n7 m, in that order, with duplicates. Several brackets in a
/// name multiply in Slurm's order. A suffix after the last bracket is accepted, like in Slurm from 23.11 on.
Result<std::vector<std::string>> parse_slurm_hosts(std::string_view text);

/// Parses Slurm's counts, one for each host of a list: "3,1(x3)" is 3 1 1 1.
Result<std::vector<int>> parse_slurm_counts(std::string_view text);

/// Parses -H and --host: "a:4,b", "[fe80::1]:4", "n[01-16]:8". If a host is named repeatedly, its slots are added (1 if
/// not given), as in Open MPI. Hosts stay in the order of their first mention.
Result<std::vector<HostSlots>> parse_host_slots(std::string_view text);

/// Parses a host file: a line per host, "h", "h:4" or "h slots=4 max_slots=8", with empty lines and comments from '#'.
/// If a host is named repeatedly, its slots are added, so PBS's and LSF's files (a line per slot) can be read.
Result<std::vector<HostSlots>> parse_host_file(std::string_view text);

/// A text, its name in messages, and advice on how to write it.
struct NamedText {
  std::string_view text;
  std::string_view what;
  std::string_view advice;
};

/// Describes what is wrong with a host name or numeric address (IPv6 without brackets); empty if it is valid.
std::string_view fault_of_host(std::string_view host);

}  // namespace cohort::rendezvous
