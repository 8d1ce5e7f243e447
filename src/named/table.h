// Names that some ranks have brought and others not yet, of those that have no slot. Every rank holds the same table,
// since every rank enters the same descriptions in the same order. Pure; belongs to the engine's thread.
#pragma once

#include "named/match.h"

#include <cstddef>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

namespace cohort::named {

class Table {
 public:
  explicit Table(int size) : size_(static_cast<std::size_t>(size)) {}

  /// A name is described once by a rank; a second time replaces the first.
  void add(int rank, const std::string& name, Signature signature);
  /// Takes out what all ranks that have not joined have brought, in the order in which the names first came.
  struct Complete {
    std::string name;
    Brought brought;
  };
  std::vector<Complete> take_complete(const std::vector<bool>& joined);
  /// Whether the rank has described the name.
  bool has(int rank, const std::string& name) const;
  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  void erase(const std::string& name);
  std::size_t size() const noexcept { return index_.size(); }

 private:
  struct Entry {
    std::string name;
    Brought brought;
    std::size_t missing = 0;  // ranks that have not brought it
  };
  const std::size_t size_;
  std::list<Entry> entries_;  // in the order in which the names first came
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
};

}  // namespace cohort::named
