// A function of a library that is loaded while the program runs. Any thread.
#pragma once

#include <dlfcn.h>

#include <cstring>

namespace cohort::meet {

/// False if the library has none of this name.
template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  void* const symbol = ::dlsym(library, name);
  static_assert(sizeof symbol == sizeof function);
  std::memcpy(&function, &symbol, sizeof symbol);
  return symbol != nullptr;
}

}  // namespace cohort::meet
