// One line of a run record, read. A value that can be read into again, so that a record of millions of lines costs no
// allocation for each; belongs to one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace cohort::track {

/// Before the names of what a program logged.
inline constexpr std::string_view kValues = "values/";

struct RecordLine {
  struct Field {
    std::string name;  ///< what is inside an object has its name before it: "parameters/lr"
    std::variant<bool, std::int64_t, double, std::string> value;
  };

  std::string event;
  std::optional<double> time;  ///< seconds since 1970
  std::vector<Field> fields;   ///< all others, in the order of the line; arrays and nulls are left out

  /// False if `text` is no JSON object with a text under "event"; *this is then of no use.
  bool read(std::string_view text);

  const Field* find(std::string_view name) const noexcept;
  /// Also one of the texts "NaN", "Infinity", "-Infinity"; nullopt if it is not there or no number.
  std::optional<double> number(std::string_view name) const;
  std::optional<std::int64_t> integer(std::string_view name) const;
  /// Empty if it is not there or no text.
  std::string_view text(std::string_view name) const noexcept;
};

/// As RecordLine::number; a truth value is no number.
std::optional<double> number_of(const RecordLine::Field& field);
/// As people write it: 0.1, 7, true, a text as it is.
std::string text_of(const RecordLine::Field& field);

}  // namespace cohort::track
