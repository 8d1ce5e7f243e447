#include "status/elf_symbols.h"

#include <elf.h>

#include <bit>
#include <cstring>
#include <optional>

namespace cohort::status {
namespace {

using Bytes = std::span<const std::byte>;

template <class T>
std::optional<T> read(Bytes file, std::uint64_t offset) noexcept {
  if (offset > file.size() || file.size() - offset < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

Bytes part(Bytes file, std::uint64_t offset, std::uint64_t size) noexcept {
  if (offset > file.size() || file.size() - offset < size) return {};
  return file.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
}

std::string_view text_at(Bytes texts, std::uint64_t offset) noexcept {
  if (offset >= texts.size()) return {};
  const auto* const begin = reinterpret_cast<const char*>(texts.data()) + offset;
  const void* const end = std::memchr(begin, '\0', texts.size() - static_cast<std::size_t>(offset));
  if (end == nullptr) return {};
  return {begin, static_cast<std::size_t>(static_cast<const char*>(end) - begin)};
}

FunctionSymbol find_in(Bytes symbols, Bytes names, std::uint64_t address) noexcept {
  for (std::uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols.size(); at += sizeof(Elf64_Sym)) {
    const auto symbol = *read<Elf64_Sym>(symbols, at);
    const bool inside = address >= symbol.st_value && address - symbol.st_value < symbol.st_size;
    if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && inside) {
      return {text_at(names, symbol.st_name), address - symbol.st_value};
    }
  }
  return {};
}

}  // namespace

FunctionSymbol find_function(Bytes file, std::uint64_t address) noexcept {
  constexpr unsigned char kOrder = std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
  const auto header = read<Elf64_Ehdr>(file, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return {};
  if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != kOrder) return {};
  if (header->e_shentsize != sizeof(Elf64_Shdr)) return {};
  const auto section = [&](std::uint64_t number) {
    // A table at the end of the numbers would come around.
    if (header->e_shoff > file.size()) return std::optional<Elf64_Shdr>();
    return read<Elf64_Shdr>(file, header->e_shoff + number * sizeof(Elf64_Shdr));
  };
  for (std::uint64_t i = 0; i < header->e_shnum; ++i) {
    const auto table = section(i);
    if (!table || table->sh_type != SHT_SYMTAB) continue;
    const auto names = section(table->sh_link);
    if (!names) continue;
    return find_in(part(file, table->sh_offset, table->sh_size), part(file, names->sh_offset, names->sh_size), address);
  }
  return {};
}

}  // namespace cohort::status
