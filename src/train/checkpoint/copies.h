// Copies on the disks of other hosts, so that one of them may be lost: what lies in a folder travels from its keeper to
// the next keepers in the order of ranks, the first following the last. One thread per communicator.
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
  /// `copies`: how many folders are to have each file, the one it was written to among them; all of them if there are
  /// fewer.
  Copies(const SharedFolder& folder, int copies);

  /// Whether a file is to be in this rank's folder.
  bool is_here(const std::string& file) const;

  /// Brings all files where they are to be, synced, and compares what has come with `digests`. `hidden` is this rank's
  /// path to the folder being made. Collective; a disk's error on one rank is thrown on all.
  void make(Communicator& comm, const std::string& hidden, const Digests& digests) const;

 private:
  /// Seat in the ring, so many places before this rank's folder.
  std::size_t seat_before(std::size_t places) const { return (seat_ + keepers_.size() - places) % keepers_.size(); }
  /// Seat of the folder that a file is written to.
  std::size_t seat_of(const std::string& file) const;
  std::vector<std::string> files_of(std::size_t seat, const Digests& digests) const;

  std::vector<int> keepers_;                  // in the order of ranks: the ring
  std::map<std::string, std::size_t> seats_;  // of the folders that parts are written to
  std::size_t first_ = 0;                     // where all other files are written
  std::size_t seat_ = 0;                      // of this rank's folder
  std::size_t further_ = 0;                   // how far along the ring each file goes
  bool keeps_ = false;
};

}  // namespace cohort::checkpoint
