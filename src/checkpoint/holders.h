// Who has which file of a checkpoint, and whose copy is whole. Collective.
#pragma once

#include "checkpoint/shared_folder.h"
#include "formats/checkpoint_folder.h"
#include "sys/files.h"

#include <cohort/communicator.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace cohort::checkpoint {

/// The saved rank that a part is of; -1 for files of all ranks.
int saved_rank_of(const std::string& file, const formats::StoredCheckpoint& stored);

class Holders {
 public:
  /// Asks all ranks which of `files` they see in the checkpoint's folder. Each rank gives its own path to it.
  Holders(Communicator& comm, const SharedFolder& folder, const formats::StoredCheckpoint& stored,
          const std::set<std::string>& files);

  /// Lets one holder of each file read and compare it, another one where that finds damage; parts preferably by the
  /// rank of the saved one's number, so that all read at once. `keep` is called where a sound file was read. Gives back
  /// what is wrong with those that nobody has whole: empty if all are.
  std::vector<std::string> verify(const std::function<void(const std::string& file, sys::FileBytes bytes)>& keep);

  /// The rank that has found the file whole.
  int owner(const std::string& file) const { return owners_.at(file); }

 private:
  void assign(const std::set<std::string>& files);
  std::string missing(const std::string& file) const;

  Communicator& comm_;
  const SharedFolder& shared_folder_;
  const formats::StoredCheckpoint& stored_;
  std::map<std::string, std::vector<int>> holders_;  // ascending; those that have proved damaged are taken out
  std::map<std::string, int> owners_;
  std::map<std::string, std::string> problems_;
};

}  // namespace cohort::checkpoint
