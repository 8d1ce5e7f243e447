#include "base/files.h"
#include "base/parse.h"
#include "base/records.h"
#include "base/result.h"
#include "base/signals.h"
#include "telemetry/timeline.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/checkpoint/shards.h"
#include "train/formats/checkpoint_folder.h"
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"
#include "train/formats/tensor.h"

#include <cohort/checkpoint_follower.h>
#include <cohort/communicator.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::checkpoint {
namespace {

// Finds which ranks have each file of a checkpoint, and whose copy is whole. Collective.

/// Returns the saved rank to which a part belongs; -1 for files of all ranks.
int saved_rank_of(const std::string& file, const formats::StoredCheckpoint& stored);

bool is_damage(const Error& error) { return error.code() == ErrorCode::Corrupt; }

class Holders {
 public:
  /// Asks all ranks which of `files` they see in the checkpoint's folder. Each rank passes its own path to the folder.
  Holders(Communicator& comm, const SharedFolder& folder, const formats::StoredCheckpoint& stored,
          const std::set<std::string>& files);

  /// Lets one holder of each file read and compare the file, and the next holder if the first finds damage. A part is
  /// preferably read by the rank with the saved rank's number, so that ranks read in parallel. If `keeps` returns true
  /// for a sound file, the rank that read it passes its bytes to `keep`. Returns what is wrong with files of which no
  /// rank has a whole copy; empty if all are whole. Throws Io on all ranks if no rank has found a file whole, but some
  /// rank could not read it, which is no damage.
  std::vector<std::string> verify(const std::function<bool(const std::string& file)>& keeps,
                                  const std::function<void(const std::string& file, sys::FileBytes bytes)>& keep);

  /// Returns the rank that has found the file whole.
  int owner(const std::string& file) const { return owners_.at(file); }
  /// Returns the owner of each of the files, and the ranks that can read it.
  StoredTensors readers_of(const std::vector<std::string>& files) const;

 private:
  void assign(const std::set<std::string>& files);
  std::string missing(const std::string& file) const;

  Communicator& comm_;
  const SharedFolder& shared_folder_;
  const formats::StoredCheckpoint& stored_;
  std::map<std::string, std::vector<int>> holders_;  // ascending, without holders of damaged copies
  std::map<std::string, int> owners_;
  std::map<std::string, std::string> problems_;
};

int saved_rank_of(const std::string& file, const formats::StoredCheckpoint& stored) {
  std::string_view digits = file;
  if (!digits.starts_with(formats::kPartPrefix)) return -1;
  digits.remove_prefix(formats::kPartPrefix.size());
  const auto rank = parse_integer<int>(digits.substr(0, digits.find('.')));
  return rank && *rank >= 0 && *rank < stored.manifest.world_size && file == part_file(*rank) ? *rank : -1;
}

/// Returns false only if the file is missing; a file that cannot be accessed may be here.
bool may_be_here(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

Holders::Holders(Communicator& comm, const SharedFolder& folder, const formats::StoredCheckpoint& stored,
                 const std::set<std::string>& files)
    : comm_(comm), shared_folder_(folder), stored_(stored) {
  std::string seen;
  for (const std::string& file : files)
    seen += folder.sees() && may_be_here(fmt::format("{}/{}", stored.folder, file)) ? '1' : '0';
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

StoredTensors Holders::readers_of(const std::vector<std::string>& files) const {
  StoredTensors all{stored_, {}, {}, {}};
  for (const std::string& file : files) {
    const int owner = all.owners[file] = owners_.at(file);
    for (const int holder : holders_.at(file)) {
      if (shared_folder_.keeper_of(holder) == shared_folder_.keeper_of(owner)) all.readers[file].insert(holder);
    }
  }
  return all;
}

std::vector<std::string> Holders::verify(const std::function<bool(const std::string&)>& keeps,
                                         const std::function<void(const std::string&, sys::FileBytes)>& keep) {
  std::set<std::string> open, unread;
  for (const auto& [file, holders] : holders_) open.insert(file);
  while (!open.empty()) {
    assign(open);
    codec::Writer failures;
    for (const std::string& file : open) {
      if (holders_.at(file).empty() || owners_.at(file) != shared_folder_.rank) continue;
      Result<void> sound;
      if (!keeps(file))
        sound = formats::check_checkpoint_file(stored_, file);
      else if (auto bytes = formats::read_checkpoint_file(stored_, file))
        keep(file, std::move(*bytes));
      else
        sound = tl::unexpected(bytes.error());
      if (!sound) failures.number(static_cast<char>(is_damage(sound.error()))).text(file).text(sound.error().what());
    }
    const auto all = gather(comm_, failures.take());
    std::set<std::string> again;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      for (codec::Reader in(all[rank]); !in.at_end();) {
        const bool damage = value_or_throw(in.number<char>()) != 0;
        const std::string file(value_or_throw(in.text(all[rank].size())));
        std::string& problem = problems_[file];
        if (!damage) unread.insert(file);
        problem += fmt::format("{}{}", problem.empty() ? "" : "; ", value_or_throw(in.text(all[rank].size())));
        // All ranks that see the same folder see the same damage.
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
    if (unread.contains(file)) raise(ErrorCode::Io, "{}", found->second);
    problems.push_back(found != problems_.end() ? found->second : missing(file));
  }
  return problems;
}

/// A checkpoint that some rank sees, identified also by its manifest's digest, since generations may be equal.
struct Candidate {
  std::int64_t generation = 0;
  std::string digest;
  auto operator<=>(const Candidate&) const = default;
};

struct Listed {
  int lister = 0;                  ///< the lowest rank that lists the checkpoint
  std::optional<double> standing;  ///< the number by which options.best orders checkpoints
};

struct Listing {
  std::map<Candidate, Listed> candidates;
  std::map<Candidate, formats::StoredCheckpoint> own;
  std::vector<std::string> damaged;
  /// The newest checkpoint that no rank can judge: from a newer Cohort (InvalidArgument), or unreadable (Io).
  std::int64_t newer = 0;
  std::optional<Error> newer_error;
  std::int64_t newest = 0;  ///< highest generation, damaged or not
};

/// Lists the checkpoints that the keepers see.
Listing list_all(Communicator& comm, const FolderOptions& options, const SharedFolder& folder) {
  Listing all;
  codec::Writer mine;
  agree(comm, attempt([&] {
          if (!folder.keeps()) return;
          auto list = value_or_throw(formats::list_checkpoints(options.path));
          for (formats::StoredCheckpoint& one : list.sound) {
            const std::string text = value_or_throw(formats::to_json(one.manifest));
            const Candidate candidate{one.manifest.generation, formats::sha256(formats::as_bytes(text))};
            const auto standing = formats::standing(one.manifest, options.best);
            mine.number('s').number(candidate.generation).text(candidate.digest);
            mine.number(standing.value_or(std::numeric_limits<double>::quiet_NaN()));
            all.own.emplace(candidate, std::move(one));
          }
          mine.number('g').number(list.newest).text("");
          for (const Error& error : list.damaged) mine.number('d').number(std::int64_t{0}).text(error.what());
          for (const auto& [generation, error] : list.newer) mine.number('n').number(generation).text(error.what());
          for (const auto& [generation, error] : list.unreadable)
            mine.number('u').number(generation).text(error.what());
        }));
  const auto texts = gather(comm, mine.take());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (codec::Reader in(texts[rank]); !in.at_end();) {
      const char kind = value_or_throw(in.number<char>());
      const auto generation = value_or_throw(in.number<std::int64_t>());
      const std::string text(value_or_throw(in.text(kLongestText)));
      if (kind == 's') {
        const auto standing = value_or_throw(in.number<double>());
        all.candidates.emplace(
            Candidate{generation, text},
            Listed{static_cast<int>(rank), std::isnan(standing) ? std::nullopt : std::optional(standing)});
      } else if (kind == 'g') {
        all.newest = std::max(all.newest, generation);
      } else if (kind == 'd') {
        all.damaged.push_back(text);
      } else if (generation > all.newer) {
        all.newer = generation;
        all.newer_error.emplace(kind == 'u' ? ErrorCode::Io : ErrorCode::InvalidArgument, text);
      }
    }
  }
  return all;
}

/// Returns the candidate as this rank sees it: with the manifest that all ranks share, and this rank's path.
formats::StoredCheckpoint open_candidate(Communicator& comm, const FolderOptions& options, const Listing& listing,
                                         const Candidate& candidate) {
  const int lister = listing.candidates.at(candidate).lister;
  const auto own = listing.own.find(candidate);
  std::string text, name;
  if (own != listing.own.end()) {
    text = value_or_throw(formats::to_json(own->second.manifest));
    name = std::filesystem::path(own->second.folder).filename().string();
  }
  text = share(comm, text, lister);
  name = share(comm, name, lister);
  // In Rank0, all ranks name rank 0's folder; in Local and Shared, each rank has its own path to the checkpoint.
  std::string folder = fmt::format("{}/{}", options.path, name);
  if (options.place == CheckpointPlace::Rank0) folder = share(comm, folder);
  return {folder, value_or_throw(formats::parse_manifest(text, folder))};
}

std::set<std::string> names_of(const formats::StoredCheckpoint& stored) {
  std::set<std::string> names;
  for (const auto& [name, digest] : stored.manifest.files) names.insert(name);
  return names;
}

/// Sends a file from its owner to the ranks that want it. `bytes`: the file's bytes, if the owner has kept them.
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

std::vector<Candidate> in_order(const Listing& listing, const FolderOptions& options, Order order) {
  std::vector<Candidate> all;
  if (order == Order::NewestFirst) {
    for (auto next = listing.candidates.rbegin(); next != listing.candidates.rend(); ++next) all.push_back(next->first);
    return all;
  }
  if (options.best.value.empty())
    raise(ErrorCode::InvalidArgument, "cannot load the best checkpoint of {} -- best_by has not said what is the best",
          options.path);
  // A checkpoint of a newer Cohort may be the best one, but cannot be judged here.
  if (listing.newer > 0) return all;
  std::set<std::pair<double, Candidate>> by_standing;
  for (const auto& [candidate, listed] : listing.candidates) {
    if (listed.standing) by_standing.emplace(*listed.standing, candidate);
  }
  for (const auto& [standing, candidate] : by_standing) all.push_back(candidate);
  if (all.empty() && !listing.candidates.empty())
    raise(ErrorCode::InvalidArgument,
          "cannot load the best checkpoint of {} -- none has a finite number '{}' among its values -- is it the name "
          "under which they were saved?",
          options.path, options.best.value);
  return all;
}

}  // namespace

namespace {

/// Limit on new listings, needed if a training saves a newer checkpoint and removes the one about to be read.
constexpr int kMostLooks = 1000;

bool is_gone(const std::string& folder) {
  struct stat status {};
  return ::stat(folder.c_str(), &status) != 0 && errno == ENOENT;
}

/// Returns nullopt if a listed checkpoint has been removed meanwhile, and `look_again` allows a new listing.
std::optional<Found> load_listed(Communicator& comm, const FolderOptions& options,
                                 const std::set<std::string>& unwanted, std::optional<std::int64_t> latest, Order order,
                                 bool look_again) {
  const int rank = rank_of(comm);
  const int ranks = size_of(comm);
  const SharedFolder folder = probe_shared_folder(comm, options, IfMissing::Leave);
  const bool in_parts = any(comm, unwanted.contains(kModelFile));
  Found found;
  Listing listing = list_all(comm, options, folder);
  found.passed_over = listing.damaged;
  std::vector<Candidate> candidates;
  agree(comm, attempt([&] { candidates = in_order(listing, options, order); }));
  for (const Candidate& next : candidates) {
    if (listing.newer >= next.generation) break;
    if (latest && next.generation > *latest) continue;
    const formats::StoredCheckpoint stored = open_candidate(comm, options, listing, next);
    const bool sharded = formats::has_shards(stored.manifest);
    std::set<std::string> wanted;  // files that any rank wants
    for (const std::string& file : names_of(stored)) {
      if (saved_rank_of(file, stored) < 0 && any(comm, !unwanted.contains(file))) wanted.insert(file);
    }
    const std::vector<std::string> in_places = formats::tensor_files(stored.manifest);
    const auto is_in_places = [&](const std::string& file) {
      return sharded && std::find(in_places.begin(), in_places.end(), file) != in_places.end();
    };
    std::map<std::string, sys::FileBytes> kept;
    Holders holders(comm, folder, stored, names_of(stored));
    auto problems = holders.verify(
        [&](const std::string& file) {
          return !is_in_places(file) && (wanted.contains(file) || saved_rank_of(file, stored) == rank);
        },
        [&](const std::string& file, sys::FileBytes bytes) { kept.emplace(file, std::move(bytes)); });
    std::shared_ptr<StoredTensors> tensors;
    if (problems.empty() && (sharded || in_parts)) {
      tensors = std::make_shared<StoredTensors>(holders.readers_of(in_places));
      auto content = formats::tensors_of(stored, heads_of(comm, *tensors));
      if (content)
        tensors->content = std::move(*content);
      else
        problems.emplace_back(content.error().what());
    }
    if (!problems.empty() && look_again && any(comm, listing.own.contains(next) && is_gone(stored.folder)))
      return std::nullopt;
    formats::remember_damage(stored.folder, !problems.empty());
    if (!problems.empty()) {
      found.passed_over.insert(found.passed_over.end(), problems.begin(), problems.end());
      continue;
    }
    // Every rank gets the bytes that were compared, and no others.
    for (const std::string& file : names_of(stored)) {
      const int saved = saved_rank_of(file, stored);
      if (is_in_places(file)) continue;
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
      if (!wanted.contains(file)) continue;
      agree(comm, attempt([&] {
              if (!kept.contains(file))
                kept.emplace(file, sys::FileBytes(static_cast<std::size_t>(stored.manifest.files.at(file).bytes)));
            }));
      sys::FileBytes& bytes = kept.at(file);
      share_bytes(comm, {bytes.data(), bytes.size()}, holders.owner(file));
      found.files.emplace(file, std::move(bytes));
    }
    if (sharded) {
      std::map<std::string, std::vector<int>> parts;
      for (int saved = 0; saved < std::min(ranks, stored.manifest.world_size); ++saved) {
        if (stored.manifest.files.contains(part_file(saved))) parts[part_file(saved)] = {saved};
      }
      for (auto& [file, bytes] : fetch_parts(comm, *tensors, tensors->content.files, parts))
        found.part = std::move(bytes);
      for (const char* const file : {kModelFile, kOptimizerFile}) {
        if (!any(comm, !unwanted.contains(file))) continue;
        if (auto bytes = fetch_file(comm, *tensors, file)) found.files.emplace(file, std::move(*bytes));
      }
    }
    found.tensors = std::move(tensors);
    found.stored = stored;
    formats::remember_own(options.path, listing.newest);
    return found;
  }
  if (listing.newer_error) throw *listing.newer_error;
  return found;
}

}  // namespace

Found load_newest(Communicator& comm, const FolderOptions& options, const std::set<std::string>& unwanted,
                  std::optional<std::int64_t> latest, Order order) {
  const status::timeline::Scope event(status::TimelineKind::Checkpoint, "load");
  for (int look = 1;; ++look) {
    if (auto found = load_listed(comm, options, unwanted, latest, order, look < kMostLooks)) return *std::move(found);
  }
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
  // The name is the same on all ranks; each has its own path.
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
  const bool sharded = formats::has_shards(here.manifest);
  const auto problems = holders.verify(
      [&](const std::string& file) {
        const auto& who = wanted.at(file);
        return !sharded && std::find(who.begin(), who.end(), folder.rank) != who.end();
      },
      [&](const std::string& file, sys::FileBytes bytes) { kept.emplace(file, std::move(bytes)); });
  if (!problems.empty()) raise(ErrorCode::Corrupt, "cannot load parts of a checkpoint -- {}", problems.front());
  std::map<int, sys::FileBytes> parts;
  if (sharded) {
    const StoredTensors tensors = holders.readers_of({files.begin(), files.end()});
    Headers headers;
    for (const auto& [file, head] : heads_of(comm, tensors)) {
      headers.emplace(file, value_or_throw(formats::parse_safetensors_header(
                                formats::as_bytes(head), here.manifest.files.at(file).bytes, file)));
    }
    for (auto& [file, bytes] : fetch_parts(comm, tensors, headers, wanted))
      parts.emplace(saved_rank_of(file, here), std::move(bytes));
    return parts;
  }
  for (const auto& [file, who] : wanted) {
    std::optional<sys::FileBytes> bytes;
    if (const auto own = kept.find(file); own != kept.end()) bytes = std::move(own->second);
    hand_over(comm, here, file, holders.owner(file), who, bytes);
    if (bytes) parts.emplace(saved_rank_of(file, here), std::move(*bytes));
  }
  return parts;
}

}  // namespace cohort::checkpoint

namespace cohort {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Interval of checks whether the process was told to end.
constexpr milliseconds kSlice{20};

}  // namespace

struct CheckpointFollower::State {
  CheckpointFollowerOptions options;
  sys::SignalLatch told;
  Clock::time_point waiting_since = Clock::now();
  Clock::time_point look_at = Clock::now();

  std::optional<FollowedCheckpoint> look() {
    const auto list = value_or_throw(formats::list_checkpoints(options.folder));
    if (list.sound.empty()) return std::nullopt;
    const formats::StoredCheckpoint& newest = list.sound.back();
    const formats::Manifest& manifest = newest.manifest;
    if (manifest.generation <= options.after_generation) return std::nullopt;
    options.after_generation = manifest.generation;
    waiting_since = Clock::now();
    return FollowedCheckpoint{newest.folder, manifest.generation, manifest.step, manifest.epoch};
  }
};

CheckpointFollower::CheckpointFollower(CheckpointFollowerOptions options) {
  if (options.folder.empty()) raise(ErrorCode::InvalidArgument, "a CheckpointFollower needs the name of a folder");
  if (options.look_every <= milliseconds(0))
    raise(ErrorCode::InvalidArgument, "a CheckpointFollower looks every {} ms -- give a time above 0",
          options.look_every.count());
  state_ = std::make_unique<State>(State{std::move(options), value_or_throw(sys::SignalLatch::create({SIGTERM}))});
}

CheckpointFollower::CheckpointFollower(CheckpointFollower&&) noexcept = default;
CheckpointFollower::~CheckpointFollower() = default;

bool CheckpointFollower::training_is_over() const noexcept { return state_->told.received() != 0; }

CheckpointFollower::Look CheckpointFollower::next_within(milliseconds limit) {
  State& state = *state_;
  const auto end = Clock::now() + limit;
  while (true) {
    // Read before the folder is listed, so that no checkpoint saved before the training's end is missed.
    const bool over = training_is_over();
    if (over || Clock::now() >= state.look_at) {
      state.look_at = Clock::now() + state.options.look_every;
      if (auto found = state.look()) {
        state.look_at = Clock::now();  // the next call comes when this checkpoint has been used
        return {true, std::move(found)};
      }
      if (over) {
        state.told.keep_handlers();  // another signal may come before the process ends
        return {true, std::nullopt};
      }
    }
    const auto now = Clock::now();
    if (state.options.timeout && now - state.waiting_since >= *state.options.timeout) {
      raise(ErrorCode::Timeout,
            "no checkpoint newer than generation {} has come into {} within {:g} s -- is it the training's folder, and "
            "does the training save?",
            state.options.after_generation, state.options.folder,
            std::chrono::duration<double>(*state.options.timeout).count());
    }
    if (now >= end) return {};
    std::this_thread::sleep_until(std::min(now + kSlice, end));
  }
}

std::optional<FollowedCheckpoint> CheckpointFollower::next() {
  while (true) {
    Look look = next_within(std::chrono::hours(1));
    if (look.came) return std::move(look.checkpoint);
  }
}

}  // namespace cohort
