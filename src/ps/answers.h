// Answers of servers as bytes. Pure; any thread.
#pragma once

#include "ps/protocol.h"

#include <string>

namespace cohort::ps {

inline std::string answer_of(const Error& error) { return pack(Answer{.error = error}); }
template <class T>
std::string answer_of(const T& record) {
  return pack(Answer{}).append(codec::encode(record));
}

}  // namespace cohort::ps
