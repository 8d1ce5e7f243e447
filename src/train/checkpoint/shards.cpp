#include "train/checkpoint/shards.h"

#include "base/records.h"
#include "base/result.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/safetensors.h"
#include "train/formats/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <utility>

namespace cohort::checkpoint {
namespace {

struct Names {
  std::vector<ShardName> all;
};
void visit_fields(auto& m, auto& archive, const Names*) { archive(m.all); }

}  // namespace

std::vector<bool> without_replicas(Communicator& comm, const std::vector<ShardName>& shards) {
  const auto texts = gather(comm, codec::encode(Names{shards}));
  std::vector<bool> mine;
  std::set<std::string> seen;
  for (int rank = 0; rank <= rank_of(comm); ++rank) {
    mine.clear();
    const Names names = value_or_throw(
        codec::decode<Names>(texts[static_cast<std::size_t>(rank)], {.most_elements = std::size_t{1} << 28}));
    for (const ShardName& name : names.all) mine.push_back(seen.insert(codec::encode(name)).second);
  }
  return mine;
}

namespace {

// Ranges of bytes, from files that a rank sees or from the rank that has them.

/// Returns the copies that a rank makes from a file, ascending. For another rank they have no destination addresses.
using CopiesOf = std::function<std::vector<formats::Copy>(const std::string& file, int rank)>;

/// Sends a file's bytes to another rank, which waits for all of them, even after an error here.
void send_copies(Communicator& comm, formats::CheckedFile* file, const std::vector<formats::Copy>& copies, int to,
                 std::optional<Error>& error) {
  PieceSender out(comm, to);
  std::vector<std::byte> nothing;
  for (const formats::Copy& copy : copies) {
    std::uint64_t left = copy.bytes;
    if (file != nullptr && !error) {
      const auto sent = file->each(copy.offset, copy.bytes, [&](std::span<const std::byte> piece) -> Result<void> {
        out.add(piece);
        left -= piece.size();
        return {};
      });
      if (!sent) error = sent.error();
    }
    for (; left > 0; left -= nothing.size()) {
      nothing.resize(static_cast<std::size_t>(std::min<std::uint64_t>(left, kPiece)));
      out.add(nothing);
    }
  }
  out.flush();
}

void receive_copies(Communicator& comm, const std::vector<formats::Copy>& copies, int from) {
  std::uint64_t bytes = 0;
  for (const formats::Copy& copy : copies) bytes += copy.bytes;
  PieceReceiver in(comm, from, bytes);
  std::span<const std::byte> piece;
  for (const formats::Copy& copy : copies) {
    for (std::uint64_t done = 0; done < copy.bytes;) {
      if (piece.empty()) piece = in.next();
      const auto part = piece.first(static_cast<std::size_t>(std::min<std::uint64_t>(piece.size(), copy.bytes - done)));
      std::memcpy(copy.to + done, part.data(), part.size());
      done += part.size();
      piece = piece.subspan(part.size());
    }
  }
}

/// Fetches one file after the other, in the same order on all ranks.
void fetch(Communicator& comm, const StoredTensors& tensors, const CopiesOf& copies_of) {
  const int rank = rank_of(comm);
  std::optional<Error> error;
  for (const auto& [name, owner] : tensors.owners) {
    const std::set<int>& readers = tensors.readers.at(name);
    std::optional<formats::CheckedFile> file;
    const auto open = [&, &name = name] {
      if (file || error) return;
      if (auto opened = formats::CheckedFile::open(tensors.stored, name))
        file = std::move(*opened);
      else
        error = opened.error();
    };
    if (readers.contains(rank)) {
      const auto copies = copies_of(name, rank);
      if (!copies.empty()) open();
      for (const formats::Copy& copy : copies) {
        if (error) break;
        if (auto done = file->read(copy.offset, {copy.to, static_cast<std::size_t>(copy.bytes)}); !done)
          error = done.error();
      }
    }
    for (int to = 0; to < checkpoint::size_of(comm); ++to) {
      if (readers.contains(to) || (rank != owner && rank != to)) continue;
      const auto copies = copies_of(name, to);
      if (copies.empty()) continue;
      if (rank == to) {
        receive_copies(comm, copies, owner);
        continue;
      }
      open();
      send_copies(comm, file ? &*file : nullptr, copies, to, error);
    }
  }
  agree(comm, error);
}

}  // namespace

std::map<std::string, std::string> heads_of(Communicator& comm, const StoredTensors& tensors) {
  std::map<std::string, std::string> heads;
  std::optional<Error> error;
  for (const auto& [name, owner] : tensors.owners) {
    std::string own;
    if (owner == rank_of(comm)) {
      const auto failed = attempt([&, &name = name] {
        own = value_or_throw(value_or_throw(formats::CheckedFile::open(tensors.stored, name)).head());
      });
      if (failed && !error) error = failed;
    }
    heads[name] = share(comm, own, owner);
  }
  agree(comm, error);
  return heads;
}

namespace {

/// A safetensors file to be assembled from tensors of other files.
struct FileToMake {
  std::string head;
  std::uint64_t bytes = 0;
  std::vector<std::pair<std::string, std::uint64_t>> places;  ///< by tensor: its offset

  static FileToMake of(const std::vector<formats::NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
    auto layout = value_or_throw(formats::lay_out_safetensors(tensors, metadata));
    FileToMake file{std::move(layout.head), 0, {}};
    file.bytes = file.head.size();
    for (const std::size_t index : layout.order) {
      file.places.emplace_back(tensors[index].name, file.bytes);
      file.bytes += *formats::byte_count(tensors[index].tensor.type, tensors[index].tensor.shape);
    }
    return file;
  }
  sys::FileBytes begun() const {
    sys::FileBytes file(static_cast<std::size_t>(bytes));
    std::memcpy(file.data(), head.data(), head.size());
    return file;
  }
};

/// Describes a part as it is saved without shards, with only the rank's random state and other state.
FileToMake small_part(const formats::SafetensorsHeader& header) {
  std::vector<formats::NamedTensor> tensors;
  for (const auto& entry : header.entries) {
    if (entry.name.starts_with(kRandomPrefix) || entry.name.starts_with(kStatePrefix))
      tensors.push_back({entry.name, {entry.type, entry.shape, {}}});
  }
  return FileToMake::of(tensors, {});
}

std::vector<formats::Copy> copies_of_part(const formats::SafetensorsHeader& header, std::byte* to) {
  std::vector<formats::Copy> copies;
  for (const auto& [name, offset] : small_part(header).places) {
    const auto entry = std::find_if(header.entries.begin(), header.entries.end(),
                                    [&, &wanted = name](const auto& one) { return one.name == wanted; });
    copies.push_back({entry->offset, entry->bytes, to == nullptr ? nullptr : to + offset});
  }
  return copies;
}

void sort(std::vector<formats::Copy>& copies) {
  std::sort(copies.begin(), copies.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
}

}  // namespace

std::map<std::string, sys::FileBytes> fetch_parts(Communicator& comm, const StoredTensors& tensors,
                                                  const Headers& headers,
                                                  const std::map<std::string, std::vector<int>>& wanted) {
  const int rank = rank_of(comm);
  std::map<std::string, sys::FileBytes> parts;
  const auto wants = [&](const std::string& file, int who) {
    const auto by = wanted.find(file);
    return by != wanted.end() && std::find(by->second.begin(), by->second.end(), who) != by->second.end();
  };
  agree(comm, attempt([&] {
          for (const auto& [file, by] : wanted) {
            if (wants(file, rank)) parts.emplace(file, small_part(headers.at(file)).begun());
          }
        }));
  fetch(comm, tensors, [&](const std::string& file, int who) {
    if (!wants(file, who)) return std::vector<formats::Copy>();
    auto copies = copies_of_part(headers.at(file), who == rank ? parts.at(file).data() : nullptr);
    sort(copies);
    return copies;
  });
  return parts;
}

std::optional<sys::FileBytes> fetch_file(Communicator& comm, const StoredTensors& tensors, const std::string& name) {
  const std::string_view prefix = name == kModelFile ? formats::kModelPrefix : formats::kOptimizerPrefix;
  const auto& content = tensors.content;
  std::vector<formats::NamedTensor> whole;
  for (const auto& [tensor, parts] : content.tensors) {
    if (tensor.starts_with(prefix)) whole.push_back({tensor.substr(prefix.size()), {parts.type, parts.sizes(), {}}});
  }
  const auto saved = content.files.find(name);
  if (whole.empty() && saved == content.files.end()) return std::nullopt;
  sys::FileBytes file;
  FileToMake plan;
  agree(comm, attempt([&] {
          const std::map<std::string, std::string> otherwise = {{"format", "pt"}};
          plan = FileToMake::of(whole, saved == content.files.end() ? otherwise : saved->second.metadata);
          file = plan.begun();
        }));
  fetch(comm, tensors, [&](const std::string& from, int who) {
    std::vector<formats::Copy> copies;
    for (std::size_t i = 0; who == 0 && i < plan.places.size(); ++i) {
      const auto& [tensor, offset] = plan.places[i];
      const auto& parts = content.tensors.at(std::string(prefix) + tensor);
      formats::add_copies(parts, formats::whole_shard(parts.sizes()), from,
                          rank_of(comm) == 0 ? file.data() + offset : nullptr, copies);
    }
    sort(copies);
    return copies;
  });
  share_bytes(comm, {file.data(), file.size()});
  return file;
}

void read_shards(Communicator& comm, const StoredTensors& tensors, const std::vector<WantedShard>& wanted) {
  const int rank = rank_of(comm);
  const auto& all = tensors.content.tensors;
  codec::Writer mine;
  agree(comm, attempt([&] {
          for (const auto& [name, to] : wanted) {
            const auto found = all.find(name.tensor);
            const auto refuse = [&, &tensor = name.tensor](std::string_view what) {
              raise(ErrorCode::InvalidArgument, "{}: cannot load a part of tensor '{}' -- {}", tensors.stored.folder,
                    tensor, what);
            };
            if (found == all.end()) refuse("it was not saved");
            if (const auto problem = formats::problem_of(name.shard)) refuse(*problem);
            if (name.shard.sizes != found->second.sizes())
              refuse(fmt::format("it is {} there and {} here", formats::shape_text(found->second.sizes()),
                                 formats::shape_text(name.shard.sizes)));
            if (formats::byte_count(found->second.type, std::array{name.shard.count}) != to.size())
              refuse(fmt::format("{} bytes are not {} elements of {}", to.size(), name.shard.count,
                                 formats::info(found->second.type).torch));
            mine.text(codec::encode(name));
          }
        }));
  // Senders have to know what the others want. If all ranks see all files, nobody sends.
  const bool all_see = std::all_of(tensors.readers.begin(), tensors.readers.end(), [&](const auto& one) {
    return one.second.size() == static_cast<std::size_t>(checkpoint::size_of(comm));
  });
  std::vector<std::string> texts;
  if (!all_see) texts = gather(comm, mine.take());
  fetch(comm, tensors, [&](const std::string& file, int who) {
    std::vector<formats::Copy> copies;
    if (who == rank) {
      for (const auto& [name, to] : wanted)
        formats::add_copies(all.at(name.tensor), name.shard, file, to.data(), copies);
    } else {
      for (codec::Reader in(texts[static_cast<std::size_t>(who)]); !in.at_end();) {
        const auto name = value_or_throw(codec::decode<ShardName>(value_or_throw(in.text(kLongestText))));
        formats::add_copies(all.at(name.tensor), name.shard, file, nullptr, copies);
      }
    }
    sort(copies);
    return copies;
  });
}

}  // namespace cohort::checkpoint
