#include "base/files.h"
#include "base/log.h"
#include "base/records.h"
#include "base/result.h"
#include "telemetry/status_page.h"
#include "telemetry/timeline.h"
#include "train/checkpoint/background.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/copies.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/safetensors.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace cohort::checkpoint {

std::string part_file(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::string random_name(int rank, const std::string& generator) {
  return generator == "cpu" ? fmt::format("rank/{}", rank) : fmt::format("rank/{}/{}", rank, generator);
}

std::string to_string(CheckpointPlace place) {
  switch (place) {
    case CheckpointPlace::Rank0: return "rank0";
    case CheckpointPlace::Shared: return "shared";
    case CheckpointPlace::Local: return "local";
  }
  return {};
}

void check(const FolderOptions& options) {
  if (options.path.empty()) raise(ErrorCode::InvalidArgument, "a CheckpointFolder needs the name of a folder");
  if (options.keep < 1)
    raise(ErrorCode::InvalidArgument, "a CheckpointFolder keeps at least 1 checkpoint, not {}", options.keep);
  if (options.copies < 1)
    raise(ErrorCode::InvalidArgument, "a CheckpointFolder has at least 1 copy of each file, not {}", options.copies);
  if (options.best.keep < 0)
    raise(ErrorCode::InvalidArgument, "a CheckpointFolder cannot keep {} best ones -- keep_best is at least 1",
          options.best.keep);
  if (options.best.keep > 0 && options.best.value.empty())
    raise(ErrorCode::InvalidArgument,
          "a CheckpointFolder with keep_best {} needs best_by: the name of the value that says which are the best",
          options.best.keep);
}

namespace {

std::string text_of(const formats::BestBy& best) {
  return best.value.empty() ? "none"
                            : fmt::format("{} of the {} '{}'", std::max(1, best.keep),
                                          best.mode == BestMode::Min ? "lowest" : "highest", best.value);
}

/// Returns an identity of the folder; empty if it does not exist.
std::string identity_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {};
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{} {} {}", boot, status.st_dev, status.st_ino);
}

}  // namespace

SharedFolder probe_shared_folder(Communicator& comm, const FolderOptions& options, IfMissing if_missing) {
  SharedFolder folder;
  folder.place = options.place;
  folder.rank = rank_of(comm);
  const auto ranks = static_cast<std::size_t>(size_of(comm));
  if (options.place == CheckpointPlace::Rank0) {
    folder.keepers.assign(ranks, 0);
    folder.hosts.resize(ranks);
    return folder;
  }
  folder.hosts = gather(comm, comm ? comm.host() : std::string());
  if (options.place == CheckpointPlace::Shared) {
    folder.keepers.assign(ranks, 0);
    return folder;
  }
  std::string own;
  agree(comm, attempt([&] {
          if (if_missing == IfMissing::Make) value_or_throw(sys::make_folders(options.path));
          own = identity_of(options.path);
          if (if_missing == IfMissing::Make && own.empty()) {
            raise(ErrorCode::Unavailable, "cannot read the folder {} -- {} -- check its permissions", options.path,
                  errno_text(errno));
          }
        }));
  std::map<std::string, int> keepers;
  for (const std::string& identity : gather(comm, own)) {
    const int rank = static_cast<int>(folder.keepers.size());
    folder.keepers.push_back(identity.empty() ? -1 : keepers.emplace(identity, rank).first->second);
  }
  return folder;
}

std::string places_of(const SharedFolder& folder, const std::vector<int>& ranks) {
  std::map<std::string, std::vector<int>> by_host;
  for (const int rank : ranks) by_host[folder.hosts[static_cast<std::size_t>(rank)]].push_back(rank);
  std::string text;
  for (const auto& [host, those] : by_host) {
    text += fmt::format("{}{} (rank{} ", text.empty() ? "" : ", ", host, those.size() == 1 ? "" : "s");
    for (std::size_t i = 0; i < those.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", those[i]);
    text += ')';
  }
  return text;
}

namespace {

using namespace std::chrono_literals;
using formats::NamedTensor;

/// Network file systems may show a new folder late.
constexpr auto kSeenWithin = 5s;

Result<void> put(const TensorFile& file, const formats::Sink& sink) {
  return formats::write_safetensors(sink, file.tensors, file.metadata);
}

/// Returns the file's size; throws the error that writing the file would throw.
std::uint64_t size_of(const TensorFile& file) {
  std::uint64_t size = 0;
  value_or_throw(put(file, [&](std::span<const std::byte> bytes) -> Result<void> {
    size += bytes.size();
    return {};
  }));
  return size;
}

formats::TensorView bytes_tensor(std::span<const std::byte> bytes) {
  return {formats::ElementType::UInt8, {static_cast<std::int64_t>(bytes.size())}, bytes};
}

std::string encode(const std::vector<NamedTensor>& random) {
  codec::Writer out;
  for (const auto& [name, tensor] : random)
    out.text(name).text({reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()});
  return out.take();
}

std::string encode(const Digests& digests) {
  codec::Writer out;
  for (const auto& [name, digest] : digests) out.text(name).number(digest.bytes).text(digest.sha256).text(digest.crc32);
  return out.take();
}

void decode(std::string_view text, Digests& digests) {
  for (codec::Reader in(text); !in.at_end();) {
    const std::string name(value_or_throw(in.text(kLongestText)));
    formats::FileDigest& digest = digests[name];
    digest.bytes = value_or_throw(in.number<std::uint64_t>());
    digest.sha256 = value_or_throw(in.text(kLongestText));
    digest.crc32 = value_or_throw(in.text(kLongestText));
  }
}

/// Limits on the ranks' descriptions of their shards.
constexpr codec::Limits kShardLimits{.longest_text = std::size_t{1} << 20, .most_elements = std::size_t{1} << 28};

struct Claim {
  ShardName name;
  formats::ElementType type = formats::ElementType::Float32;
};
void visit_fields(auto& m, auto& archive, const Claim*) {
  archive(m.name, codec::below(m.type, formats::kElementTypeCount, "an unknown type"));
}
struct Claims {
  std::vector<Claim> all;
};
void visit_fields(auto& m, auto& archive, const Claims*) { archive(m.all); }

class Save {
 public:
  Save(Communicator& comm, const FolderOptions& options, const Bundle& bundle)
      : comm_(comm), options_(options), bundle_(bundle), rank_(rank_of(comm)), ranks_(checkpoint::size_of(comm)) {}

  formats::StoredCheckpoint run() {
    agree_on_content();
    open();
    if (options_.place == CheckpointPlace::Shared) require_shared();
    write();
    if (in_parts_ && options_.place == CheckpointPlace::Rank0) send_to_rank0();
    for (const std::string& digests : gather(comm_, encode(digests_))) decode(digests, manifest_.files);
    if (copies_) copies_->make(comm_, hidden_, manifest_.files);
    seal();
    return publish();
  }

 private:
  bool shared_folder() const { return options_.place != CheckpointPlace::Local; }

  /// Runs before anything is written, so that a save that has to fail does not fill the disk first.
  void agree_on_content() {
    enum : std::int64_t { OneFile, Parts, Shards };
    const bool own = options_.place != CheckpointPlace::Rank0 || !bundle_.state.empty();
    const std::int64_t form = highest(comm_, !bundle_.shards.empty() ? Shards : own ? Parts : OneFile);
    in_parts_ = form != OneFile;
    if (form == Shards) agree_on_shards();
    if (in_parts_) {
      part_.name = part_file(rank_);
      part_.metadata = {{"rank", std::to_string(rank_)}, {"world_size", std::to_string(ranks_)}};
      for (const NamedTensor& one : bundle_.random) part_.tensors.push_back({kRandomPrefix + one.name, one.tensor});
      for (const NamedTensor& one : bundle_.state) part_.tensors.push_back({kStatePrefix + one.name, one.tensor});
      for (const ShardBytes& one : bundle_.shards) {
        const std::string name = formats::shard_name(part_.tensors.size(), one.name.tensor);
        part_.metadata[name] = formats::shard_text(one.name.shard);
        part_.tensors.push_back({name, {one.type, formats::shape_of(one.name.shard), one.bytes}});
      }
    }
    std::string text;
    std::uint64_t size = 0;
    agree(comm_, attempt([&] {
            if (rank_ == 0) {
              formats::Manifest manifest = bundle_.manifest;
              require_number(manifest);
              warn_without_best(manifest);
              if (form == Shards) manifest.version = formats::kManifestVersion;
              manifest.generation = 1;  // not known yet
              manifest.world_size = ranks_;
              manifest.created = formats::utc_now();
              manifest.place = to_string(options_.place);
              text = value_or_throw(formats::to_json(manifest));
              for (const TensorFile& file : bundle_.files) size_of(file);
            }
            if (in_parts_) size = size_of(part_);
          }));
    text = share(comm_, text);
    manifest_ = value_or_throw(formats::parse_manifest(text, "rank 0's description of the checkpoint"));
    // Ranks with different options would wait for each other in different steps.
    const std::string best = share(comm_, text_of(options_.best));
    agree(comm_, attempt([&] {
            if (const std::string keeps = text_of(options_.best); keeps != best) {
              raise(ErrorCode::InvalidArgument,
                    "cannot save a checkpoint -- of the best this rank keeps {}, and rank 0 {} -- give all the same",
                    keeps, best);
            }
            if (const std::string place = to_string(options_.place); place != manifest_.place) {
              raise(ErrorCode::InvalidArgument,
                    "cannot save a checkpoint -- this rank's place is {}, and rank 0's is {} -- give all the same",
                    place, manifest_.place);
            }
          }));
    if (!shared_folder()) agree_on_copies();
    if (in_parts_ && options_.place == CheckpointPlace::Rank0) sizes_ = gather(comm_, std::to_string(size));
  }

  /// Throws if the value is no number, since it could never be the best.
  void require_number(const formats::Manifest& manifest) const {
    const auto found = manifest.values.find(options_.best.value);
    if (options_.best.value.empty() || found == manifest.values.end() ||
        std::holds_alternative<std::int64_t>(found->second) || std::holds_alternative<double>(found->second))
      return;
    raise(ErrorCode::InvalidArgument,
          "cannot save a checkpoint -- its value '{}', by which the best is kept, is no number", options_.best.value);
  }

  /// Warns, once per folder, if the value is not saved, before somebody misses the best checkpoint.
  void warn_without_best(const formats::Manifest& manifest) const {
    const std::string& name = options_.best.value;
    if (name.empty() || manifest.values.empty() || manifest.values.contains(name)) return;
    static std::mutex mutex;
    static std::set<std::pair<std::string, std::string>> warned;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!warned.emplace(options_.path, name).second) return;
    std::string others;
    for (const auto& [other, value] : manifest.values)
      others += fmt::format("{}'{}'", others.empty() ? "" : ", ", other);
    log::warn("checkpoint",
              "{}: a checkpoint is saved without the value '{}', which best_by names: it is never among the best -- it "
              "has {}",
              options_.path, name, others);
  }

  /// Checks that every element of every tensor is passed exactly once.
  void agree_on_shards() {
    Claims mine;
    agree(comm_, attempt([&] {
            for (const ShardBytes& one : bundle_.shards) {
              const auto bytes = formats::byte_count(one.type, std::array{one.name.shard.count});
              if (bytes != one.bytes.size()) {
                raise(ErrorCode::InvalidArgument,
                      "cannot save a checkpoint -- the shard of tensor '{}' of {} elements has {} bytes",
                      one.name.tensor, one.name.shard.count, one.bytes.size());
              }
              mine.all.push_back({one.name, one.type});
            }
            for (const TensorFile& file : rank_ == 0 ? bundle_.files : std::vector<TensorFile>()) {
              const auto prefix = file.name == kModelFile ? formats::kModelPrefix : formats::kOptimizerPrefix;
              for (const NamedTensor& one : file.tensors)
                mine.all.push_back(
                    {{std::string(prefix) + one.name, formats::whole_shard(one.tensor.shape)}, one.tensor.type});
            }
          }));
    const auto texts = gather(comm_, codec::encode(mine));
    // All ranks have the same texts, so either all throw or none.
    formats::PartedTensors tensors;
    const auto require = [](const std::optional<std::string>& problem) {
      if (problem)
        raise(ErrorCode::InvalidArgument,
              "cannot save a checkpoint -- {} -- each element of a tensor is to be brought by one rank", *problem);
    };
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      for (Claim& one : value_or_throw(codec::decode<Claims>(texts[rank], kShardLimits)).all) {
        require(formats::add_part(tensors, one.name.tensor, one.type,
                                  {fmt::format("rank {}", rank), std::move(one.name.shard)}));
      }
    }
    for (const auto& [name, tensor] : tensors) require(formats::coverage_problem(name, tensor));
  }

  void agree_on_copies() {
    const std::int64_t most = highest(comm_, options_.copies);
    agree(comm_, attempt([&] {
            if (options_.copies != most) {
              raise(ErrorCode::InvalidArgument,
                    "cannot save a checkpoint -- this rank has copies = {}, and another has {} -- give all the same",
                    options_.copies, most);
            }
          }));
  }

  void open() {
    shared_folder_ = probe_shared_folder(comm_, options_, IfMissing::Make);
    if (!shared_folder()) {
      manifest_.hosts = shared_folder_.hosts;
      copies_.emplace(shared_folder_, options_.copies);
    }
    agree(comm_, attempt([&] {
            if (!shared_folder_.keeps()) return;
            writer_.emplace(value_or_throw(formats::CheckpointWriter::open(options_.path)));
            look_for_others();
          }));
    manifest_.generation = highest(comm_, writer_ ? writer_->newest() : 0) + 1;
    agree(comm_, attempt([&] {
            if (writer_) value_or_throw(writer_->begin(manifest_.generation, manifest_.step));
          }));
    const std::string own = writer_ ? std::filesystem::path(writer_->hidden()).filename().string() : std::string();
    const auto names = gather(comm_, own);
    hidden_ = fmt::format("{}/{}", options_.path, names[static_cast<std::size_t>(shared_folder_.keeper_of(rank_))]);
  }

  /// Looks for checkpoints of another job, from which the lock separates this one only during a save.
  void look_for_others() {
    of_others_ = formats::checkpoints_of_others(options_.path);
    if (of_others_.empty()) return;
    static std::mutex mutex;
    static std::map<std::string, std::int64_t> warned;
    const std::lock_guard<std::mutex> lock(mutex);
    if (std::exchange(warned[options_.path], *of_others_.rbegin()) == *of_others_.rbegin()) return;
    log::warn("checkpoint",
              "{}: another job has saved checkpoint {} here since this one saved or loaded its last; each will resume "
              "from whichever is the newest -- give each job a folder of its own",
              options_.path, *of_others_.rbegin());
  }

  /// Checks that this rank sees the hidden folder. Its name is random, so the rank then sees rank 0's folder.
  void require_shared() {
    const auto deadline = std::chrono::steady_clock::now() + kSeenWithin;
    struct stat status {};
    bool seen = false;
    while (!(seen = ::stat(hidden_.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(50ms);
    }
    const auto all = gather(comm_, seen ? "1" : "0");
    std::vector<int> blind;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (all[static_cast<std::size_t>(rank)] != "1") blind.push_back(rank);
    }
    if (blind.empty()) return;
    raise(
        ErrorCode::InvalidArgument,
        "cannot save a checkpoint in {} -- it is to be shared, but what rank 0 (host {}) makes there is not seen by {} "
        "-- give a folder of a file system that all hosts mount, or let the place be rank0 or local",
        options_.path, shared_folder_.hosts.front(), places_of(shared_folder_, blind));
  }

  void add(const TensorFile& file) {
    digests_[file.name] = value_or_throw(
        formats::write_checkpoint_file(hidden_, file.name, [&](const formats::Sink& sink) { return put(file, sink); }));
  }

  void write() {
    std::vector<std::string> random_states;
    if (!in_parts_) random_states = gather(comm_, encode(bundle_.random));
    agree(comm_, attempt([&] {
            if (rank_ == 0) {
              for (const TensorFile& file : bundle_.files) add(file);
              if (!in_parts_) add_random(random_states);
            }
            if (in_parts_ && (rank_ == 0 || options_.place != CheckpointPlace::Rank0)) add(part_);
          }));
  }

  /// Without parts, one small file holds the random states of all ranks.
  void add_random(const std::vector<std::string>& states) {
    TensorFile file{kRandomFile, {}, {}};
    for (std::size_t rank = 0; rank < states.size(); ++rank) {
      for (codec::Reader in(states[rank]); !in.at_end();) {
        const std::string generator(value_or_throw(in.text(kLongestText)));
        const auto state = formats::as_bytes(value_or_throw(in.text(kLongestText)));
        file.tensors.push_back({random_name(static_cast<int>(rank), generator), bytes_tensor(state)});
      }
    }
    add(file);
  }

  /// Sends the other ranks' parts to rank 0's disk, one after the other.
  void send_to_rank0() {
    std::optional<Error> error;
    for (int from = 1; from < ranks_; ++from) {
      if (rank_ == from) {
        PieceSender out(comm_, 0);
        value_or_throw(put(part_, [&](std::span<const std::byte> bytes) -> Result<void> {
          out.add(bytes);
          return {};
        }));
        out.flush();
      } else if (rank_ == 0) {
        auto failed = attempt([&] { receive_part(from); });
        if (failed && !error) error = std::move(failed);
      }
    }
    agree(comm_, error);
  }

  void receive_part(int from) {
    const std::uint64_t size = std::stoull(sizes_[static_cast<std::size_t>(from)]);
    PieceReceiver in(comm_, from, size);
    auto digest = formats::write_checkpoint_file(hidden_, part_file(from), [&](const formats::Sink& sink) {
      Result<void> done;
      while (done && !in.at_end()) done = sink(in.next());
      return done;
    });
    while (!in.at_end()) static_cast<void>(in.next());  // the sender does not know of the error
    digests_[part_file(from)] = value_or_throw(std::move(digest));
  }

  void seal() {
    agree(comm_, attempt([&] {
            if (!writer_) return;
            value_or_throw(
                writer_->seal(manifest_, [&](const std::string& name) { return !copies_ || copies_->is_here(name); }));
          }));
  }

  formats::StoredCheckpoint publish() {
    // Removes checkpoints of writers that were killed between publishing and pruning, since they would accumulate.
    prune();
    formats::StoredCheckpoint stored;
    const auto error = first_error(comm_, attempt([&] {
                                     if (writer_) stored = value_or_throw(writer_->publish());
                                   }));
    if (error) {
      if (writer_) writer_->withdraw();
      throw *error;
    }
    formats::remember_own(options_.path, manifest_.generation);
    prune();
    // All ranks report rank 0's path, although the other ranks may not see that folder.
    stored.folder = share(comm_, stored.folder);
    stored.manifest = manifest_;
    return stored;
  }

  /// Removes old checkpoints. A checkpoint is complete if all disks have its manifest, and each file is on some disk.
  void prune() {
    // After rank 0 has logged a non-finite loss, new checkpoints may be useless, so earlier ones are kept.
    const status::NotFiniteStatus& lost = status::StatusPage::own().layout().not_finite;
    formats::Spared spared;
    if (lost.state.load(std::memory_order_acquire) == status::NotFiniteStatus::Written) {
      spared.below_step = lost.step;
      spared.count = options_.keep;
    }
    spared.unjudged = of_others_;
    if (shared_folder()) {
      if (writer_) formats::keep_newest_checkpoints(options_.path, options_.keep, spared, options_.best);
      return;
    }
    if (const std::string theirs = share(comm_, spared.count > 0 ? std::to_string(spared.below_step) : "");
        !theirs.empty()) {
      spared.below_step = std::stoll(theirs);
      spared.count = options_.keep;
    }
    codec::Writer own;
    std::vector<formats::StoredCheckpoint> sound;
    if (writer_) {
      if (auto list = formats::list_checkpoints(options_.path)) {
        sound = std::move(list->sound);
        for (const auto& one : sound) {
          const auto text = formats::to_json(one.manifest);
          if (!text) continue;
          own.number(one.manifest.generation).text(formats::sha256(formats::as_bytes(*text)));
          own.text(formats::whole_at_a_glance(one));
        }
        // A checkpoint that this host cannot judge is kept on all hosts.
        for (const auto* const all : {&list->newer, &list->unreadable}) {
          for (const auto& [generation, error] : *all) own.number(generation).text("").text("?");
        }
      }
    }
    const auto lists = gather(comm_, own.take());
    std::map<std::pair<std::int64_t, std::string>, std::size_t> held;
    std::map<std::int64_t, std::string> whole;  // '1' for each file that is whole on some host
    std::set<std::int64_t> damaged;
    std::size_t keepers = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (shared_folder_.keeper_of(rank) != rank) continue;
      ++keepers;
      for (codec::Reader in(lists[static_cast<std::size_t>(rank)]); !in.at_end();) {
        const auto generation = value_or_throw(in.number<std::int64_t>());
        if (const std::string which(value_or_throw(in.text(64))); !which.empty()) ++held[{generation, which}];
        const auto here = value_or_throw(in.text(kLongestText));
        std::string& on_some = whole[generation];
        on_some.resize(std::max(on_some.size(), here.size()), '0');
        for (std::size_t i = 0; i < here.size(); ++i) {
          if (here[i] == '1') on_some[i] = '1';
        }
        if (here.empty()) damaged.insert(generation);
        if (here.find('?') != std::string::npos) spared.unjudged.insert(generation);
      }
    }
    std::set<std::int64_t> complete;
    for (const auto& [which, times] : held) {
      const auto generation = which.first;
      if (times == keepers && !damaged.contains(generation) && !spared.unjudged.contains(generation) &&
          whole.at(generation).find('0') == std::string::npos)
        complete.insert(generation);
    }
    if (!writer_ || complete.size() < static_cast<std::size_t>(options_.keep)) return;
    // All hosts have the same manifests of complete checkpoints, and so the same best ones.
    std::erase_if(sound, [&](const auto& one) { return !complete.contains(one.manifest.generation); });
    spared.best = formats::best_checkpoints(sound, options_.best);
    formats::remove_older_checkpoints(options_.path, *std::prev(complete.end(), options_.keep), spared);
  }

  Communicator& comm_;
  const FolderOptions& options_;
  const Bundle& bundle_;
  const int rank_, ranks_;
  bool in_parts_ = false;
  TensorFile part_;
  std::vector<std::string> sizes_;  // sizes of the parts, by rank
  SharedFolder shared_folder_;
  std::optional<Copies> copies_;                     // set if there are several disks
  std::optional<formats::CheckpointWriter> writer_;  // set on keepers of a folder
  std::set<std::int64_t> of_others_;                 // checkpoints of another job
  std::string hidden_;
  formats::Manifest manifest_;
  Digests digests_;  // digests of the files that this rank has written
};

}  // namespace

formats::StoredCheckpoint save(Communicator& comm, const FolderOptions& options, const Bundle& bundle) {
  const status::timeline::Scope event(status::TimelineKind::Checkpoint, "save");
  wait_for_earlier_saves(options.path, rank_of(comm));
  return Save(comm, options, bundle).run();
}

}  // namespace cohort::checkpoint
