#include "ps/snapshot_writer.h"

#include "ps/snapshot.h"

#include <utility>

namespace cohort::ps {

void SnapshotWriter::write(const Backup::ClientPtr& client, std::uint64_t id, const std::string& folder,
                           const std::string& file, State& state) {
  for (Writing& one : writing_) {
    if (one.folder != folder || one.file != file) continue;
    one.client = client;
    one.id = id;
    if (!one.answer.empty()) backup_.answer(client, id, one.answer);
    return;
  }
  writing_.remove_if([](const Writing& one) { return !one.answer.empty(); });
  writing_.push_back({folder, file, client, id});
  aside_([this, state = state.freeze(), folder, file, alive = std::weak_ptr(alive_), &rpc = rpc_]() mutable {
    const auto made = write_snapshot(*state, folder, file);
    state.reset();
    std::string told =
        made ? answer_of(Written{file, made->bytes, made->sha256, made->crc32}) : answer_of(made.error());
    rpc.post([this, alive, folder, file, told = std::move(told)] {
      if (!alive.expired()) written(folder, file, told);
    });
  });
}

void SnapshotWriter::written(const std::string& folder, const std::string& file, const std::string& answer) {
  for (Writing& one : writing_) {
    if (one.folder != folder || one.file != file) continue;
    one.answer = answer;
    backup_.answer(one.client, one.id, one.answer);
  }
}

}  // namespace cohort::ps
