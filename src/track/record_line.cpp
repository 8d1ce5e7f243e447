#include "track/record_line.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

namespace cohort::track {
namespace {

using Json = nlohmann::json;

/// Takes the values as they are parsed: a tree of each line would take three times as long.
class FieldsReader {
 public:
  explicit FieldsReader(RecordLine& line) : line_(line) {}

  bool good() const noexcept { return whole_ && has_event_; }
  std::size_t count() const noexcept { return count_; }

  bool null() { return true; }
  bool boolean(bool value) {
    if (wanted()) next().value = value;
    return true;
  }
  bool number_integer(Json::number_integer_t value) {
    if (is_top("time"))
      line_.time = static_cast<double>(value);
    else if (wanted())
      next().value = value;
    return true;
  }
  bool number_unsigned(Json::number_unsigned_t value) {
    if (value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return number_integer(static_cast<std::int64_t>(value));
    }
    return number_float(static_cast<double>(value), {});
  }
  bool number_float(double value, const std::string&) {
    if (is_top("time"))
      line_.time = value;
    else if (wanted())
      next().value = value;
    return true;
  }
  bool string(std::string& value) {
    if (is_top("event")) {
      line_.event = value;
      has_event_ = true;
    } else if (wanted()) {
      RecordLine::Field& field = next();
      if (auto* const text = std::get_if<std::string>(&field.value))
        *text = value;
      else
        field.value = value;
    }
    return true;
  }
  bool binary(Json::binary_t&) { return true; }
  bool start_object(std::size_t) {
    if (arrays_ > 0) return true;
    // A line is an object, and so may what it holds be.
    prefixes_.push_back(prefix_.size());
    if (prefixes_.size() > 1) prefix_.append(key_).push_back('/');
    return true;
  }
  bool key(std::string& name) {
    if (arrays_ == 0) key_ = name;
    return true;
  }
  bool end_object() {
    if (arrays_ > 0) return true;
    prefix_.resize(prefixes_.back());
    prefixes_.pop_back();
    if (prefixes_.empty()) whole_ = true;
    return true;
  }
  bool start_array(std::size_t) {
    if (prefixes_.empty()) return false;
    ++arrays_;
    return true;
  }
  bool end_array() {
    --arrays_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) { return false; }

 private:
  bool wanted() const noexcept { return arrays_ == 0 && !prefixes_.empty(); }
  bool is_top(std::string_view name) const noexcept { return arrays_ == 0 && prefixes_.size() == 1 && key_ == name; }
  RecordLine::Field& next() {
    if (count_ == line_.fields.size()) line_.fields.emplace_back();
    RecordLine::Field& field = line_.fields[count_++];
    field.name.assign(prefix_).append(key_);
    return field;
  }

  RecordLine& line_;
  std::string prefix_, key_;
  std::vector<std::size_t> prefixes_;  // lengths of prefix_, one for each object that is open
  std::size_t arrays_ = 0, count_ = 0;
  bool has_event_ = false, whole_ = false;
};

}  // namespace

bool RecordLine::read(std::string_view text) {
  time.reset();
  FieldsReader reader(*this);
  const bool parsed = Json::sax_parse(text.begin(), text.end(), &reader);
  fields.resize(reader.count());
  return parsed && reader.good();
}

const RecordLine::Field* RecordLine::find(std::string_view name) const noexcept {
  for (const Field& field : fields) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

std::optional<double> RecordLine::number(std::string_view name) const {
  if (name == "time") return time;
  const Field* const field = find(name);
  return field != nullptr ? number_of(*field) : std::nullopt;
}

std::optional<std::int64_t> RecordLine::integer(std::string_view name) const {
  constexpr double kMost = 9.2e18;
  const auto value = number(name);
  if (!value || !(std::abs(*value) < kMost)) return std::nullopt;
  const Field* const field = find(name);
  const auto* const exact = field != nullptr ? std::get_if<std::int64_t>(&field->value) : nullptr;
  return exact != nullptr ? *exact : static_cast<std::int64_t>(*value);
}

std::string_view RecordLine::text(std::string_view name) const noexcept {
  const Field* const field = find(name);
  const auto* const held = field != nullptr ? std::get_if<std::string>(&field->value) : nullptr;
  return held != nullptr ? std::string_view(*held) : std::string_view();
}

std::optional<double> number_of(const RecordLine::Field& field) {
  if (const auto* const value = std::get_if<double>(&field.value)) return *value;
  if (const auto* const value = std::get_if<std::int64_t>(&field.value)) return static_cast<double>(*value);
  if (const auto* const value = std::get_if<std::string>(&field.value)) {
    if (*value == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (*value == "Infinity") return std::numeric_limits<double>::infinity();
    if (*value == "-Infinity") return -std::numeric_limits<double>::infinity();
  }
  return std::nullopt;
}

std::string text_of(const RecordLine::Field& field) {
  return std::visit([](const auto& held) { return fmt::format("{}", held); }, field.value);
}

}  // namespace cohort::track
