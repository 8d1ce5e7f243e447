// SnapshotWriter: writes snapshots of some rows on other threads, while pushes go on, and answers the calls that have
// asked for them. A call for one that is being written, or for the last one, gets the same answer. On the thread of the
// RpcServer.
#pragma once

#include "ps/backup.h"
#include "ps/state.h"

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

namespace cohort::ps {

/// Runs a task on a thread of its own.
using Aside = std::function<void(std::function<void()>)>;

class SnapshotWriter {
 public:
  SnapshotWriter(net::RpcServer& rpc, const Aside& aside, Backup& backup) : rpc_(rpc), aside_(aside), backup_(backup) {}

  SnapshotWriter(const SnapshotWriter&) = delete;

  /// Writes the present state, and answers the call when that is done.
  void write(const Backup::ClientPtr& client, std::uint64_t id, const std::string& folder, const std::string& file,
             State& state);

 private:
  struct Writing {
    std::string folder;
    std::string file;
    Backup::ClientPtr client;
    std::uint64_t id = 0;
    std::string answer = {};  // empty: it is being written
  };
  void written(const std::string& folder, const std::string& file, const std::string& answer);

  net::RpcServer& rpc_;
  const Aside& aside_;
  Backup& backup_;
  std::list<Writing> writing_;
  const std::shared_ptr<void> alive_ = std::make_shared<char>();  // expires at the end, for other threads
};

}  // namespace cohort::ps
