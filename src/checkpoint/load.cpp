#include "checkpoint/load.h"

#include "base/codec.h"
#include "checkpoint/exchange.h"
#include "checkpoint/holders.h"
#include "checkpoint/pieces.h"
#include "formats/sink.h"
#include "status/timeline.h"

#include <algorithm>
#include <filesystem>
#include <utility>

namespace cohort::checkpoint {
namespace {

/// A checkpoint that some rank sees, by the digest of its manifest: there may be others of the same generation.
struct Candidate {
  std::int64_t generation = 0;
  std::string digest;
  auto operator<=>(const Candidate&) const = default;
};

struct Listing {
  std::map<Candidate, int> candidates;  ///< and the lowest rank that lists it
  std::map<Candidate, formats::StoredCheckpoint> own;
  std::vector<std::string> damaged;
  std::int64_t newer = 0;  ///< generation of the newest one of a newer Cohort
  std::string newer_text;
};

/// What the keepers see.
Listing list_all(Communicator& comm, const FolderOptions& options, const SharedFolder& folder) {
  Listing all;
  codec::Writer mine;
  agree(comm, attempt([&] {
          if (!folder.keeps()) return;
          auto list = value_or_throw(formats::list_checkpoints(options.path));
          for (formats::StoredCheckpoint& one : list.sound) {
            const std::string text = value_or_throw(formats::to_json(one.manifest));
            const Candidate candidate{one.manifest.generation, formats::sha256(formats::as_bytes(text))};
            mine.number('s').number(candidate.generation).text(candidate.digest);
            all.own.emplace(candidate, std::move(one));
          }
          for (const Error& error : list.damaged) mine.number('d').number(std::int64_t{0}).text(error.what());
          for (const auto& [generation, error] : list.newer) mine.number('n').number(generation).text(error.what());
        }));
  const auto texts = gather(comm, mine.take());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (codec::Reader in(texts[rank]); !in.at_end();) {
      const char kind = value_or_throw(in.number<char>());
      const auto generation = value_or_throw(in.number<std::int64_t>());
      const std::string text(value_or_throw(in.text(kLongestText)));
      if (kind == 's') {
        all.candidates.emplace(Candidate{generation, text}, static_cast<int>(rank));
      } else if (kind == 'd') {
        all.damaged.push_back(text);
      } else if (generation > all.newer) {
        all.newer = generation;
        all.newer_text = text;
      }
    }
  }
  return all;
}

/// The candidate as this rank sees it: the manifest is the same on all, the path is its own.
formats::StoredCheckpoint open_candidate(Communicator& comm, const FolderOptions& options, const Listing& listing,
                                         const Candidate& candidate) {
  const int lister = listing.candidates.at(candidate);
  const auto own = listing.own.find(candidate);
  std::string text, name;
  if (own != listing.own.end()) {
    text = value_or_throw(formats::to_json(own->second.manifest));
    name = std::filesystem::path(own->second.folder).filename().string();
  }
  text = share(comm, text, lister);
  name = share(comm, name, lister);
  // Rank 0's folder is the one to speak of; in Local and Shared every rank has its own path to it.
  std::string folder = fmt::format("{}/{}", options.path, name);
  if (options.place == CheckpointPlace::Rank0) folder = share(comm, folder);
  return {folder, value_or_throw(formats::parse_manifest(text, folder))};
}

std::set<std::string> names_of(const formats::StoredCheckpoint& stored) {
  std::set<std::string> names;
  for (const auto& [name, digest] : stored.manifest.files) names.insert(name);
  return names;
}

/// A file from the rank that has it to those that want it. `at_hand`: the owner's bytes if it has kept them.
void hand_over(Communicator& comm, const formats::StoredCheckpoint& stored, const std::string& file, int owner,
               const std::vector<int>& wanted_by, std::optional<sys::FileBytes>& bytes) {
  const int rank = rank_of(comm);
  const bool wants = std::find(wanted_by.begin(), wanted_by.end(), rank) != wanted_by.end();
  agree(comm, attempt([&] {
          if (rank == owner && !bytes) bytes = value_or_throw(formats::read_checkpoint_file(stored, file));
          if (rank != owner && wants)
            bytes = sys::FileBytes(static_cast<std::size_t>(stored.manifest.files.at(file).bytes));
        }));
  for (const int to : wanted_by) {
    if (to == owner) continue;
    if (rank == owner) send_bytes(comm, bytes->bytes(), to);
    if (rank == to) receive_bytes(comm, {bytes->data(), bytes->size()}, owner);
  }
  if (!wants) bytes.reset();
}

}  // namespace

Found load_newest(Communicator& comm, const FolderOptions& options, const std::set<std::string>& unwanted,
                  std::optional<std::int64_t> latest) {
  const status::timeline::Scope event(status::TimelineKind::Checkpoint, "load");
  const int rank = rank_of(comm);
  const int ranks = size_of(comm);
  const SharedFolder folder = probe_shared_folder(comm, options, IfMissing::Leave);
  Found found;
  Listing listing = list_all(comm, options, folder);
  found.passed_over = listing.damaged;
  for (auto next = listing.candidates.rbegin(); next != listing.candidates.rend(); ++next) {
    if (listing.newer > next->first.generation) break;
    if (latest && next->first.generation > *latest) continue;
    const formats::StoredCheckpoint stored = open_candidate(comm, options, listing, next->first);
    std::map<std::string, sys::FileBytes> kept;
    Holders holders(comm, folder, stored, names_of(stored));
    const auto problems = holders.verify([&](const std::string& file, sys::FileBytes bytes) {
      const int saved = saved_rank_of(file, stored);
      if (saved < 0 || saved == rank) kept.emplace(file, std::move(bytes));
    });
    if (!problems.empty()) {
      found.passed_over.insert(found.passed_over.end(), problems.begin(), problems.end());
      continue;
    }
    // The same bytes go to every rank: none can see other bytes than those that were compared.
    for (const std::string& file : names_of(stored)) {
      const int saved = saved_rank_of(file, stored);
      if (saved >= 0) {
        const int owner = holders.owner(file);
        if (saved >= ranks) continue;
        if (owner == saved) {
          if (rank == saved) found.part = std::move(kept.at(file));
          continue;
        }
        std::optional<sys::FileBytes> part;
        hand_over(comm, stored, file, owner, {saved}, part);
        if (rank == saved) found.part = std::move(part);
        continue;
      }
      if (!any(comm, !unwanted.contains(file))) continue;
      agree(comm, attempt([&] {
              if (!kept.contains(file))
                kept.emplace(file, sys::FileBytes(static_cast<std::size_t>(stored.manifest.files.at(file).bytes)));
            }));
      sys::FileBytes& bytes = kept.at(file);
      share_bytes(comm, {bytes.data(), bytes.size()}, holders.owner(file));
      found.files.emplace(file, std::move(bytes));
    }
    found.stored = stored;
    return found;
  }
  if (listing.newer > 0) raise(ErrorCode::InvalidArgument, "{}", listing.newer_text);
  return found;
}

Error all_damaged(const FolderOptions& options, const std::vector<std::string>& reasons) {
  std::string text;
  for (const std::string& reason : reasons) text += (text.empty() ? "" : "; ") + reason;
  return Error(
      ErrorCode::Corrupt,
      fmt::format("cannot load a checkpoint from {} -- all of them are damaged: {} -- restore one from a copy, or "
                  "start anew in another folder",
                  options.path, text));
}

std::map<int, sys::FileBytes> load_parts(Communicator& comm, const FolderOptions& options,
                                         const formats::StoredCheckpoint& stored, const std::set<int>& ranks) {
  // The name is the same everywhere, and the path to it each rank's own.
  formats::StoredCheckpoint here = stored;
  if (options.place != CheckpointPlace::Rank0)
    here.folder = fmt::format("{}/{}", options.path, std::filesystem::path(stored.folder).filename().string());
  codec::Writer mine;
  for (const int rank : ranks) mine.number(rank);
  const auto texts = gather(comm, mine.take());
  std::map<std::string, std::vector<int>> wanted;
  std::set<std::string> files;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (codec::Reader in(texts[rank]); !in.at_end();) {
      const std::string file = part_file(value_or_throw(in.number<int>()));
      if (!here.manifest.files.contains(file)) continue;
      wanted[file].push_back(static_cast<int>(rank));
      files.insert(file);
    }
  }
  const SharedFolder folder = probe_shared_folder(comm, options, IfMissing::Leave);
  Holders holders(comm, folder, here, files);
  std::map<std::string, sys::FileBytes> kept;
  const auto problems = holders.verify([&](const std::string& file, sys::FileBytes bytes) {
    const auto& who = wanted.at(file);
    if (std::find(who.begin(), who.end(), folder.rank) != who.end()) kept.emplace(file, std::move(bytes));
  });
  if (!problems.empty()) raise(ErrorCode::Corrupt, "cannot load parts of a checkpoint -- {}", problems.front());
  std::map<int, sys::FileBytes> parts;
  for (const auto& [file, who] : wanted) {
    std::optional<sys::FileBytes> bytes;
    if (const auto own = kept.find(file); own != kept.end()) bytes = std::move(own->second);
    hand_over(comm, here, file, holders.owner(file), who, bytes);
    if (bytes) parts.emplace(saved_rank_of(file, here), std::move(*bytes));
  }
  return parts;
}

}  // namespace cohort::checkpoint
