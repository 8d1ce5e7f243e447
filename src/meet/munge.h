// MUNGE, which Slurm's clusters authenticate users by: a credential carries bytes that only this user's processes on
// the cluster can have made and can read. libmunge is found at run time. Calls go to the daemon on this host and may
// take some seconds where it does not answer; any thread.
#pragma once

#include "base/result.h"

#include <memory>
#include <string>
#include <string_view>

namespace cohort::meet {

class Munge {
 public:
  /// `socket`: the daemon's; empty: the usual one. Unavailable if there is no libmunge.
  static Result<std::shared_ptr<Munge>> load(const std::string& socket);

  /// For this user's processes only. Unavailable if the daemon does not answer.
  Result<std::string> seal(std::string_view bytes) const;
  /// InvalidArgument if it is no fresh credential of this user.
  Result<std::string> open(const std::string& credential) const;

 private:
  struct Library;
  explicit Munge(std::shared_ptr<const Library> library, std::string socket)
      : library_(std::move(library)), socket_(std::move(socket)) {}
  std::shared_ptr<const Library> library_;
  std::string socket_;
};

/// The daemon's socket that a slurm.conf names (AuthInfo=socket=PATH); empty if it names none. Pure.
std::string munge_socket_of(std::string_view slurm_conf);

}  // namespace cohort::meet
