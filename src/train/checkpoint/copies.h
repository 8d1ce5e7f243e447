// Copies files to the disks of other hosts, so that a host may be lost: the keepers of folders form a ring in the order
// of ranks, and each sends its files to the next ones. One thread per communicator.
#pragma once

#include "train/checkpoint/checkpoint.h"
#include "train/formats/checkpoint_folder.h"

#include <cohort/communicator.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace cohort::checkpoint {

using Digests = std::map<std::string, formats::FileDigest>;

class Copies {
 public:
  /// `copies`: number of folders that get each file, including the folder it was written to; all folders if there are
  /// fewer.
  Copies(const SharedFolder& folder, int copies);

  /// Returns whether a file belongs in this rank's folder.
  bool is_here(const std::string& file) const;

  /// Copies all files to their folders, synced, and compares received files with `digests`. `hidden` is this rank's
  /// path to the folder being made. Collective; a disk error on one rank is thrown on all.
  void make(Communicator& comm, const std::string& hidden, const Digests& digests) const;

 private:
  /// Returns the seat that is `places` before this rank's folder in the ring.
  std::size_t seat_before(std::size_t places) const { return (seat_ + keepers_.size() - places) % keepers_.size(); }
  /// Returns the seat of the folder to which a file is written.
  std::size_t seat_of(const std::string& file) const;
  std::vector<std::string> files_of(std::size_t seat, const Digests& digests) const;

  std::vector<int> keepers_;                  // the ring, in the order of ranks
  std::map<std::string, std::size_t> seats_;  // by file of a part: the seat to which it is written
  std::size_t first_ = 0;                     // seat to which all other files are written
  std::size_t seat_ = 0;                      // seat of this rank's folder
  std::size_t further_ = 0;                   // number of seats along the ring to which each file is copied
  bool keeps_ = false;
};

}  // namespace cohort::checkpoint
