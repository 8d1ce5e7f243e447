#include "train/formats/checkpoint_folder.h"

#include "base/json.h"
#include "base/result.h"
#include "train/formats/tensor.h"

#include <fmt/chrono.h>
#include <openssl/evp.h>
#include <nlohmann/json.hpp>

#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <ctime>
#include <limits>
#include <string_view>

namespace cohort::formats {

struct Sha256::Context {
  EVP_MD_CTX* pointer = EVP_MD_CTX_new();
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { EVP_MD_CTX_free(pointer); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  if (context_->pointer == nullptr || EVP_DigestInit_ex(context_->pointer, EVP_sha256(), nullptr) != 1) {
    raise(ErrorCode::Unavailable, "cannot compute SHA-256 -- OpenSSL refuses it -- check OpenSSL's configuration");
  }
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;

void Sha256::update(std::span<const std::byte> bytes) {
  if (EVP_DigestUpdate(context_->pointer, bytes.data(), bytes.size()) != 1)
    raise(ErrorCode::Internal, "SHA-256 failed");
}

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(context_->pointer, digest.data(), &size) != 1) raise(ErrorCode::Internal, "SHA-256 failed");
  std::string text;
  for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256(std::span<const std::byte> bytes) {
  Sha256 digest;
  digest.update(bytes);
  return digest.finish();
}

void FileDigester::end_block() {
  blocks_ += fmt::format("{:08x}", crc_);
  crc_ = 0;
  in_block_ = 0;
}

void FileDigester::update(std::span<const std::byte> bytes) {
  size_ += bytes.size();
  // Computes both digests of a block while the block is in the cache.
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kBlockBytes - in_block_));
    sha256_.update(piece);
    crc_ =
        static_cast<std::uint32_t>(::crc32_z(crc_, reinterpret_cast<const unsigned char*>(piece.data()), piece.size()));
    in_block_ += piece.size();
    if (in_block_ == kBlockBytes) end_block();
    bytes = bytes.subspan(piece.size());
  }
}

FileDigest FileDigester::finish() {
  if (in_block_ > 0) end_block();
  return {size_, sha256_.finish(), std::move(blocks_)};
}

FileDigest digest_of(std::span<const std::byte> bytes) {
  FileDigester digester;
  digester.update(bytes);
  return digester.finish();
}

std::string differing_bytes(const FileDigest& written, const FileDigest& found) {
  constexpr std::size_t kDigits = 8;
  if (written.crc32.size() != found.crc32.size() || written.bytes != found.bytes) return {};
  const std::size_t blocks = written.crc32.size() / kDigits;
  const auto differs = [&](std::size_t block) {
    const auto of = [&](const FileDigest& digest) {
      return std::string_view(digest.crc32).substr(block * kDigits, kDigits);
    };
    return of(written) != of(found);
  };
  std::string first_place;
  std::size_t places = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    if (!differs(block)) continue;
    const std::size_t first = block;
    while (block + 1 < blocks && differs(block + 1)) ++block;
    if (places++ > 0) continue;
    first_place = fmt::format("bytes {} to {}", first * kBlockBytes,
                              std::min<std::uint64_t>((block + 1) * kBlockBytes, written.bytes) - 1);
  }
  if (places < 2) return first_place;
  return fmt::format("{} and {} more place{}", first_place, places - 1, places == 2 ? "" : "s");
}

namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "cohort-checkpoint";
constexpr std::string_view kPlaces[] = {"rank0", "shared", "local"};

std::string finished(const Json& body) {
  const Json whole = {{"manifest", body}, {"sha256", sha256(as_bytes(body.dump()))}};
  return whole.dump(2) + '\n';
}

Json to_json(const ManifestValue& value) {
  if (const auto* real = std::get_if<double>(&value); real != nullptr && !std::isfinite(*real)) {
    return {{"float64", fmt::format("{:016x}", std::bit_cast<std::uint64_t>(*real))}};  // JSON has no NaN
  }
  return std::visit([](const auto& plain) { return Json(plain); }, value);
}

/// Reads the fields of an object, and keeps the first problem.
class FieldReader {
 public:
  explicit FieldReader(const Json& object) : object_(object) {}

  std::int64_t integer(const char* key, std::int64_t lowest = 0) {
    const Json* const value = get(key);
    if (value == nullptr) return 0;
    const bool fits =
        value->is_number_integer() &&
        (!value->is_number_unsigned() ||
         value->get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits || value->get<std::int64_t>() < lowest) {
      complain(fmt::format("'{}' is no whole number from {} on", key, lowest));
      return 0;
    }
    return value->get<std::int64_t>();
  }
  std::uint64_t natural(const char* key) {
    const Json* const value = get(key);
    if (value == nullptr) return 0;
    if (!value->is_number_unsigned()) {
      complain(fmt::format("'{}' is no whole number from 0 on", key));
      return 0;
    }
    return value->get<std::uint64_t>();
  }
  std::string text(const char* key) {
    const Json* const value = get(key);
    if (value == nullptr) return {};
    if (!value->is_string()) {
      complain(fmt::format("'{}' is no text", key));
      return {};
    }
    return value->get<std::string>();
  }
  std::vector<std::string> texts(const char* key) {
    std::vector<std::string> all;
    const Json* const value = get(key);
    if (value == nullptr) return all;
    if (!value->is_array()) complain(fmt::format("'{}' is no list", key));
    for (const Json& item : value->is_array() ? *value : Json::array()) {
      if (!item.is_string()) {
        complain(fmt::format("'{}' is no list of texts", key));
        break;
      }
      all.push_back(item.get<std::string>());
    }
    return all;
  }
  const Json& object(const char* key) {
    static const Json kEmpty = Json::object();
    const Json* const value = get(key);
    if (value == nullptr) return kEmpty;
    if (!value->is_object()) {
      complain(fmt::format("'{}' is no object", key));
      return kEmpty;
    }
    return *value;
  }
  void complain(std::string what) {
    if (problem_.empty()) problem_ = std::move(what);
  }
  const std::string& problem() const { return problem_; }

 private:
  const Json* get(const char* key) {
    if (!object_.is_object() || !object_.contains(key)) {
      complain(fmt::format("'{}' is missing", key));
      return nullptr;
    }
    return &object_.at(key);
  }

  const Json& object_;
  std::string problem_;
};

std::optional<ManifestValue> value_of(const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned() &&
      json.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return std::nullopt;
  }
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_object() && json.size() == 1 && json.contains("float64") && json["float64"].is_string()) {
    const auto digits = json["float64"].get<std::string>();
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) return std::nullopt;
    return std::bit_cast<double>(static_cast<std::uint64_t>(std::stoull(digits, nullptr, 16)));
  }
  return std::nullopt;
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() < 200 && name.front() != '.' && name != "manifest.json" &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-.") == std::string_view::npos;
}

}  // namespace

std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

Result<std::string> to_json(const Manifest& manifest) {
  Json body = {{"format", kFormat},           {"version", manifest.version}, {"generation", manifest.generation},
               {"step", manifest.step},       {"epoch", manifest.epoch},     {"world_size", manifest.world_size},
               {"created", manifest.created}, {"program", manifest.program}, {"values", Json::object()},
               {"files", Json::object()}};
  if (manifest.sampler) {
    body["sampler"] = {{"seed", manifest.sampler->seed},
                       {"epoch", manifest.sampler->epoch},
                       {"cursor", manifest.sampler->cursor},
                       {"size", manifest.sampler->size}};
  }
  for (const auto& [name, value] : manifest.values) {
    const auto* const text = std::get_if<std::string>(&value);
    if (!is_utf8(name) || (text != nullptr && !is_utf8(*text))) {
      return fail(ErrorCode::InvalidArgument, "cannot save the checkpoint -- its value '{}' is not UTF-8 -- encode it",
                  name);
    }
    body["values"][name] = to_json(value);
  }
  if (manifest.version > 1) {
    body["place"] = manifest.place;
    body["block_bytes"] = kBlockBytes;
    if (!manifest.hosts.empty()) body["hosts"] = manifest.hosts;
  }
  for (const std::string& host : manifest.hosts) {
    if (!is_utf8(host)) {
      return fail(ErrorCode::InvalidArgument, "cannot save the checkpoint -- the name of a host is not UTF-8");
    }
  }
  for (const auto& [name, digest] : manifest.files) {
    Json& file = body["files"][name] = {{"bytes", digest.bytes}, {"sha256", digest.sha256}};
    if (manifest.version > 1) file["crc32"] = digest.crc32;
  }
  return finished(body);
}

Result<Manifest> parse_manifest(std::string_view text, const std::string& name) {
  const auto corrupt = [&](std::string_view what) {
    return fail(ErrorCode::Corrupt, "{}: the checkpoint's manifest is damaged -- {}", name, what);
  };
  const Json whole = parse_json_or_discard<Json>(text);
  if (whole.is_discarded() || !whole.is_object() || !whole.contains("manifest"))
    return corrupt("it is not the JSON that was written");
  const Json& body = whole["manifest"];
  if (!body.is_object()) return corrupt("it is not the JSON that was written");
  if (finished(body) != text) return corrupt("its bytes do not agree with its SHA-256");

  FieldReader fields(body);
  if (const std::string format = fields.text("format"); format != kFormat)
    fields.complain(fmt::format("its format is '{}'", format));
  const std::int64_t version = fields.integer("version", 1);
  if (fields.problem().empty() && version > kManifestVersion) {
    // A newer version cannot be checked, and must not be reported as damage.
    return fail(
        ErrorCode::InvalidArgument,
        "{}: a newer Cohort saved this checkpoint: its format is of version {}, and this one knows 1 to {} -- load it "
        "with that Cohort or a later one",
        name, version, kManifestVersion);
  }
  Manifest manifest;
  manifest.version = static_cast<int>(std::min<std::int64_t>(version, kManifestVersion));
  manifest.generation = fields.integer("generation", 1);
  manifest.step = fields.integer("step");
  manifest.epoch = fields.integer("epoch");
  const std::int64_t world_size = fields.integer("world_size", 1);
  if (world_size > std::numeric_limits<int>::max()) fields.complain("'world_size' is too large");
  manifest.world_size = static_cast<int>(std::min<std::int64_t>(world_size, std::numeric_limits<int>::max()));
  manifest.created = fields.text("created");
  manifest.program = fields.text("program");
  if (body.contains("sampler")) {
    FieldReader sampler(body["sampler"]);
    manifest.sampler = SamplerPosition{sampler.natural("seed"), sampler.integer("epoch"), sampler.integer("cursor"),
                                       sampler.integer("size")};
    if (!sampler.problem().empty()) fields.complain(sampler.problem());
  }
  for (const auto& [key, json] : fields.object("values").items()) {
    auto value = value_of(json);
    if (!value)
      fields.complain(fmt::format("the value '{}' is of no known type", key));
    else
      manifest.values.emplace(key, std::move(*value));
  }
  const bool has_blocks = manifest.version > 1;
  if (has_blocks) {
    manifest.place = fields.text("place");
    if (std::find(std::begin(kPlaces), std::end(kPlaces), manifest.place) == std::end(kPlaces))
      fields.complain(fmt::format("its place is '{}'", manifest.place));
    if (fields.natural("block_bytes") != kBlockBytes) fields.complain("'block_bytes' is of another size");
    if (body.contains("hosts")) {
      manifest.hosts = fields.texts("hosts");
      if (manifest.hosts.size() != static_cast<std::size_t>(manifest.world_size))
        fields.complain("'hosts' does not name one host for each rank");
    }
  }
  for (const auto& [key, json] : fields.object("files").items()) {
    FieldReader file(json);
    if (!is_plain_name(key)) file.complain(fmt::format("'{}' is no name of a file", key));
    FileDigest digest{file.natural("bytes"), file.text("sha256"), has_blocks ? file.text("crc32") : std::string()};
    if (!file.problem().empty()) fields.complain(file.problem());
    manifest.files.emplace(key, std::move(digest));
  }
  if (!fields.problem().empty()) return corrupt(fields.problem());
  return manifest;
}

}  // namespace cohort::formats
