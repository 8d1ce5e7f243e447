#include "checkpoint/holders.h"

#include "base/codec.h"
#include "base/result.h"
#include "checkpoint/exchange.h"

#include <unistd.h>

#include <algorithm>

namespace cohort::checkpoint {

int saved_rank_of(const std::string& file, const formats::StoredCheckpoint& stored) {
  if (!file.starts_with("rank-")) return -1;
  for (int rank = 0; rank < stored.manifest.world_size; ++rank) {
    if (file == part_file(rank)) return rank;
  }
  return -1;
}

Holders::Holders(Communicator& comm, const SharedFolder& folder, const formats::StoredCheckpoint& stored,
                 const std::set<std::string>& files)
    : comm_(comm), shared_folder_(folder), stored_(stored) {
  std::string seen;
  for (const std::string& file : files)
    seen += folder.sees() && ::access(fmt::format("{}/{}", stored.folder, file).c_str(), F_OK) == 0 ? '1' : '0';
  const auto all = gather(comm, seen);
  std::size_t index = 0;
  for (const std::string& file : files) {
    auto& holders = holders_[file];
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].at(index) == '1') holders.push_back(static_cast<int>(rank));
    }
    ++index;
  }
}

void Holders::assign(const std::set<std::string>& files) {
  for (const std::string& file : files) {
    const auto& holders = holders_.at(file);
    if (holders.empty()) continue;
    const int saved = saved_rank_of(file, stored_);
    const bool own = std::find(holders.begin(), holders.end(), saved) != holders.end();
    const std::size_t turn = saved < 0 ? 0 : static_cast<std::size_t>(saved) % holders.size();
    owners_[file] = own ? saved : holders[turn];
  }
}

std::string Holders::missing(const std::string& file) const {
  const auto& hosts = stored_.manifest.hosts;
  const int saved = saved_rank_of(file, stored_);
  std::string text = fmt::format("{}/{}: missing", stored_.folder, file);
  if (saved >= 0) text += fmt::format(" -- it is rank {}'s part", saved);
  if (hosts.empty()) return text;
  text += fmt::format(" -- host {} has had it on its own disk", hosts[static_cast<std::size_t>(std::max(0, saved))]);
  return text + (shared_folder_.place == CheckpointPlace::Local ? ", and no host of this job has it"
                                                                : " -- load it with the place local");
}

std::vector<std::string> Holders::verify(const std::function<void(const std::string&, sys::FileBytes)>& keep) {
  std::set<std::string> open;
  for (const auto& [file, holders] : holders_) open.insert(file);
  while (!open.empty()) {
    assign(open);
    codec::Writer failures;
    for (const std::string& file : open) {
      if (holders_.at(file).empty() || owners_.at(file) != shared_folder_.rank) continue;
      auto bytes = formats::read_checkpoint_file(stored_, file);
      if (bytes)
        keep(file, std::move(*bytes));
      else
        failures.text(file).text(bytes.error().what());
    }
    const auto all = gather(comm_, failures.take());
    std::set<std::string> again;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      for (codec::Reader in(all[rank]); !in.at_end();) {
        const std::string file(value_or_throw(in.text(all[rank].size())));
        std::string& problem = problems_[file];
        problem += fmt::format("{}{}", problem.empty() ? "" : "; ", value_or_throw(in.text(all[rank].size())));
        // Whoever sees the same folder sees the same damage.
        auto& holders = holders_.at(file);
        const int place = shared_folder_.keeper_of(static_cast<int>(rank));
        std::erase_if(holders, [&](int holder) { return shared_folder_.keeper_of(holder) == place; });
        if (!holders.empty()) again.insert(file);
      }
    }
    open = std::move(again);
  }
  std::vector<std::string> problems;
  for (const auto& [file, holders] : holders_) {
    if (!holders.empty()) continue;
    const auto found = problems_.find(file);
    problems.push_back(found != problems_.end() ? found->second : missing(file));
  }
  return problems;
}

}  // namespace cohort::checkpoint
